"""FLOP and bytes as formulas. Tests count the real thing and compare; nothing here is fitted.

Letters: T tokens, H hidden, I intermediate, t tokens of the longest shard, f the fraction of tokens whose gate and up
are kept. Bytes are peaks above inputs, outputs and gradients. One T x H x I product is 2 THI FLOP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

from shared_specs.core.budget import shard_tokens_within
from shared_specs.shards import ShardPlan, plan_tokens

CheckpointKind = Literal["none", "non-reentrant", "reentrant"]


# Elements that one elementwise step works on at a time in the eager backend: small enough to stay in a core's cache on
# a CPU, large enough that launches do not show on a GPU. A row of logits is long, so a loss takes a few rows at a time.
ELEMENTWISE_ELEMENTS = {"cpu": 2**17, "gpu": 2**24}


@dataclass(frozen=True, kw_only=True)
class MLPShape:
    """The shape of one call, as the formulas read it. `itemsize` is of the compute dtype, `weight_itemsize` of the weights."""

    tokens: int
    hidden: int
    intermediate: int
    out: int | None = None
    gated: bool = True
    activation: str = "silu"
    itemsize: int = 4
    weight_itemsize: int = 4

    @property
    def weight_elements(self) -> int:
        out = self.hidden if self.out is None else self.out
        return self.intermediate * (self.hidden * (2 if self.gated else 1) + out)

    @property
    def cast_bytes(self) -> int:
        """Return the bytes of the weights in the compute dtype, where they are stored in another one (autocast)."""
        return self.weight_elements * self.itemsize if self.weight_itemsize != self.itemsize else 0


def thi(shape: MLPShape) -> int:
    """Return FLOP of one T x H x I product."""
    return 2 * shape.tokens * shape.hidden * shape.intermediate


def mlp_flop(shape: MLPShape, plan: ShardPlan, *, keep: float = 0.0, checkpointing: CheckpointKind = "none") -> int:
    """Return FLOP of the products of one forward and backward, H_out = H.

    Gated: 22 - 4f THI; 22 for every keep under non-reentrant checkpointing, whose replay stops before the MLP (it
    computes the kept gate and up again); 28 - 4f under reentrant checkpointing. Plain: 14 - 2f, 14 and 18 - 2f.
    """
    up_products = 2 if shape.gated else 1
    kept = Fraction(shape.tokens - plan.kept_start(keep), max(1, shape.tokens))
    recompute = up_products * (1 - kept)
    forward, backward = up_products + 1, 2 * (up_products + 1)
    replay: Fraction | int = 0
    if checkpointing == "non-reentrant":
        replay = up_products * kept
    elif checkpointing == "reentrant":
        replay = forward
    return int((forward + replay + recompute + backward) * thi(shape))


def plain_flop(shape: MLPShape, *, checkpointing: CheckpointKind = "none") -> int:
    """Return FLOP of the untiled MLP: 18 THI gated, 22 and 24 under checkpointing (12, 14 and 16 without a gate)."""
    up_products = 2 if shape.gated else 1
    replay = {"none": 0, "non-reentrant": up_products, "reentrant": up_products + 1}[checkpointing]
    return (3 * (up_products + 1) + replay) * thi(shape)


def saved_bytes(shape: MLPShape, plan: ShardPlan, *, keep: float = 0.0) -> int:
    """Return bytes kept for backward beyond x and the weights: gate and up of the kept shards."""
    kept = shape.tokens - plan.kept_start(keep)
    return (2 if shape.gated else 1) * kept * shape.intermediate * shape.itemsize


def plain_saved_bytes(shape: MLPShape) -> int:
    """Return bytes the untiled MLP keeps: gate, up, act(gate) and h; without a gate the pre-activation and h."""
    return (4 if shape.gated else 2) * shape.tokens * shape.intermediate * shape.itemsize


def accumulator_bytes(shape: MLPShape, plan: ShardPlan) -> int:
    """Return bytes of the weight-gradient accumulators that are not the returned gradients themselves.

    One shard needs none; float32 and float64 gradients accumulate in place; 16-bit gradients need a float32 sum.
    """
    return shape.weight_elements * 4 if shape.weight_itemsize < 4 and len(plan) > 1 else 0


def block_rows(t: int, intermediate: int, device: str) -> int:
    """Return rows of [t, I] that one elementwise step works on at a time: ELEMENTWISE_ELEMENTS, and at most an eighth of
    them, so that float32 temporaries of 16-bit rows stay small beside the buffers of a short shard."""
    return max(1, min(ELEMENTWISE_ELEMENTS[device] // max(1, intermediate), -(-t // 8)))


def peak_bytes(shape: MLPShape, plan: ShardPlan, *, device: str = "cpu", kernels: bool = False) -> int:
    """Return peak bytes of one eager backward above inputs, outputs, gradients and what `saved_bytes` names.

    Buffers [t, I]: gate, up and dh, over which dgate, h and dup are written (two without a gate). On top: a few
    elementwise temporaries of `block_rows` rows, the accumulators, copies of weights in another dtype, and for 16-bit
    operands on a CPU the float32 copies of one product's operands, because CPU products cannot return float32 from 16-bit
    operands. `kernels`: Triton's, which hold what is elementwise in registers.
    """
    t, wide = plan.longest, max(shape.itemsize, 4)
    buffers = (3 if shape.gated else 2) * t * shape.intermediate * shape.itemsize
    block = block_rows(t, shape.intermediate, device) * shape.intermediate
    in_place, widened = (2, 5) if shape.gated else (1, 3)
    if shape.activation == "relu_squared":  # the slope, which has no fused gradient
        in_place, widened = in_place + 1, widened + 1
    temporaries = 0 if kernels else block * wide * (in_place if shape.itemsize >= 4 else widened)
    copies = 0
    sums_wide = len(plan) > 1 or shape.weight_itemsize != shape.itemsize
    if shape.itemsize < 4 and device == "cpu" and sums_wide:
        out = shape.hidden if shape.out is None else shape.out
        copies = t * (shape.intermediate + max(shape.hidden, out)) * 4
    return buffers + max(temporaries, copies) + accumulator_bytes(shape, plan) + shape.cast_bytes


def compiled_peak_bytes(shape: MLPShape, plan: ShardPlan, *, device: str = "cpu") -> int:
    """Return the most temporary bytes the compiled (XLA) forward and backward use above what `saved_bytes` names.

    XLA writes no product over another: gate, up, dh and h, dgate, dup are six buffers [t, I] (four without a gate),
    beside the shard's rows of x, dy and dx and float32 sums of the weight gradients, which may not lie in the results.
    Weights of another dtype than x are cast once. On a CPU 16-bit products are float32 ones between casts, so every
    buffer and every weight is there in float32 as well. An upper bound: what the compiler reuses differs by version.
    """
    t, out = plan.longest, shape.hidden if shape.out is None else shape.out
    widened = 4 if shape.itemsize < 4 and device == "cpu" else 0
    rows = (6 if shape.gated else 4) * t * shape.intermediate + t * (2 * shape.hidden + out)
    sums = shape.weight_elements * max(4, shape.itemsize)
    return rows * (shape.itemsize + widened) + sums + shape.cast_bytes + shape.weight_elements * widened


def plain_peak_bytes(shape: MLPShape) -> int:
    """Return peak bytes of the untiled backward above inputs, outputs and gradients: what was saved and gradients of it.

    And the copies of weights in another dtype, which are saved as well.
    """
    gradients = (3 if shape.gated else 2) * shape.tokens * shape.intermediate * shape.itemsize
    return plain_saved_bytes(shape) + gradients + shape.cast_bytes


def plan_mlp(
    function: str,
    shape: MLPShape,
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    kernels: bool = False,
    peak: Callable[[MLPShape, ShardPlan], int] | None = None,
    multiple_of: int = 1,
) -> ShardPlan:
    """Return the plan of one MLP call. An automatic plan that would cost more memory than no tiling becomes one shard.

    peak: what a memory budget is compared with; None is `peak_bytes`, of the eager loop. Without a budget both halves make
    the same plan.
    """
    if memory_budget is not None:
        needed = partial(peak or partial(peak_bytes, device=device, kernels=kernels), shape)
        shard_tokens = shard_tokens_within(function, memory_budget, shape.tokens, needed, multiple_of)
    plan = plan_tokens(
        shape.tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device, multiple_of=multiple_of
    )
    automatic = num_shards is None and shard_tokens is None
    if automatic and len(plan) > 1 and peak_bytes(shape, plan, device=device) >= plain_peak_bytes(shape):
        return ShardPlan(shape.tokens, shape.tokens)
    return plan
