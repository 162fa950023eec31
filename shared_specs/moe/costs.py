"""FLOP and bytes of the mixture of experts as formulas. Tests count the real thing and compare; nothing here is fitted.

Letters: T tokens, H hidden, I intermediate, E experts, k of them for each token, t tokens of the longest shard. Bytes are peaks
above inputs, outputs and gradients. One product of all tokens with one weight of their experts is 2 k THI FLOP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from shared_specs.core.budget import shard_tokens_within
from shared_specs.mlp.costs import CheckpointKind, block_rows
from shared_specs.shards import ShardPlan, plan_tokens

# Elements of one expert's rows that eager elementwise work takes at a time, at least: experts with few rows are not cut.
FEW_ELEMENTS = 2**15
# Rows of a compiled block, where an expert has as many: below, reading and writing weights costs more than products.
FEWEST_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """The shape of one call, as the formulas read it. `itemsize` is of the compute dtype, `weight_itemsize` of the weights."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: str = "silu"
    itemsize: int = 4
    weight_itemsize: int = 4

    @property
    def pairs(self) -> int:
        """Return how many rows all experts compute together: every token in each of its experts."""
        return self.tokens * self.top_k

    @property
    def weight_elements(self) -> int:
        return 3 * self.experts * self.hidden * self.intermediate

    @property
    def wide(self) -> int:
        """Return the bytes of a float32 number, or of a float64 one beside float64."""
        return max(4, self.itemsize)


def moe_flop(shape: MoEShape, *, checkpointing: CheckpointKind = "none", rows: int | None = None) -> int:
    """Return FLOP of the products of one forward and backward: 22 k THI, and 8 THE of the router.

    An expert is an MLP: gate and up are computed again, down is not. The router is computed again too, since its logits are
    not kept. Non-reentrant checkpointing replays the router alone.

    rows: how many rows the experts compute where that is more than `pairs`: compiled, those of each fill whole blocks.
    """
    one = 2 * (shape.pairs if rows is None else rows) * shape.hidden * shape.intermediate
    router = 2 * shape.tokens * shape.hidden * shape.experts
    replay = {"none": 0, "non-reentrant": 0, "reentrant": 3}[checkpointing]
    return (11 + replay) * one + (4 if checkpointing == "none" else 5) * router


def moe_saved_bytes(shape: MoEShape) -> int:
    """Return bytes kept for backward beyond x and the weights: the experts of a token and what each counts."""
    return shape.pairs * (4 + shape.wide)


def plain_moe_saved_bytes(shape: MoEShape) -> int:
    """Return bytes that untiled experts keep: rows of x, gate, up, act(gate), h and what comes out, of every pair."""
    return shape.pairs * (4 * shape.intermediate + 2 * shape.hidden) * shape.itemsize


def rows_of_a_block(pairs: int, experts: int) -> int:
    """Return how many rows of one expert a compiled loop takes at a time, of so many pairs in a shard.

    At most a quarter of what an expert has on average, so that blocks that are half full cost an eighth.
    """
    return max(1, min(pairs, max(FEWEST_ROWS, pairs // (4 * experts))))


def block_count(pairs: int, experts: int, rows: int) -> int:
    """Return the most blocks of so many rows that the pairs of a shard fill, each with rows of one expert alone."""
    return (pairs + min(pairs, experts) * (rows - 1)) // rows


def sorting_bytes(shape: MoEShape) -> int:
    """Return bytes of numbers of pairs while these are sorted by expert."""
    return 40 * shape.pairs


def moe_peak_bytes(shape: MoEShape, plan: ShardPlan, *, device: str = "cpu") -> int:
    """Return the most bytes of one eager backward above inputs, outputs, gradients and `moe_saved_bytes`.

    An expert's rows are worked on t at a time, however many it has: rows of x and dy, gate and up, dh, and rows of dx. Beside
    them there are the router's logits of a shard, and float32 sums of 16-bit gradients: of one expert at a time and of x of all
    tokens, where the latter are fewer than all weights, else of all experts and of x of as many tokens. Numbers of pairs alone
    grow with T.
    """
    t, wide, H, I = plan.longest, shape.wide, shape.hidden, shape.intermediate  # noqa: E741
    narrow = shape.itemsize < 4
    rows = t * ((2 * H + 3 * I) * shape.itemsize + H * (wide + shape.itemsize * narrow))
    block = max(block_rows(t, 2 * I, device) * 2 * I, min(FEW_ELEMENTS, 2 * t * I))
    elementwise = ((6 if narrow else 5) + (shape.activation == "relu_squared")) * block * wide
    copies = t * (I + H) * 4 if narrow and device == "cpu" else 0
    whole = shape.tokens * H <= shape.weight_elements
    sums = 4 * shape.weight_elements // (shape.experts if whole else 1) if shape.weight_itemsize < 4 else 0
    of_x = 4 * (shape.tokens * H if whole else max(shape.weight_elements, t * H)) if narrow else 0
    router = t * (6 * shape.experts * wide + (H * 4 if narrow else 0))
    cast = 3 * H * I * shape.itemsize if shape.weight_itemsize != shape.itemsize else 0
    of_shard = max(rows + max(elementwise, copies) + cast, router)
    return max(sorting_bytes(shape), of_shard + sums + (8 + wide) * shape.pairs) + of_x


def compiled_moe_peak_bytes(shape: MoEShape, plan: ShardPlan, *, device: str = "cpu", ragged: bool = False) -> int:
    """Return the most temporary bytes the compiled (XLA) forward and backward use above `moe_saved_bytes`: an upper bound.

    Of the rows computed at a time, a block or with `ragged` all pairs of a shard, there are gate, up, dh and h, dgate, dup, and
    rows of x, of dy and of y or dx. Beside them are the router's logits, x, dy and dx of a shard, float32 sums of the weights'
    gradients and one expert's weights. On a CPU 16-bit products are float32 ones between casts.
    """
    t, H, I = plan.longest, shape.hidden, shape.intermediate  # noqa: E741
    pairs = t * shape.top_k
    rows = pairs if ragged else rows_of_a_block(pairs, shape.experts)
    widened = 4 if shape.itemsize < 4 and device == "cpu" else 0
    each = shape.itemsize + widened
    buffers = rows * ((6 * I + 3 * H) * each + (H + I) * shape.wide)
    of_shard = t * ((6 * shape.experts + 2 * H) * shape.wide + 3 * H * each) + 48 * pairs
    sums = shape.weight_elements * shape.wide
    cast = shape.weight_elements * each if shape.weight_itemsize != shape.itemsize or widened else 0
    one = 0 if ragged else 3 * H * I * (shape.wide + each)
    return buffers + of_shard + sums + cast + one


def plain_moe_peak_bytes(shape: MoEShape) -> int:
    """Return peak bytes of the untiled backward above inputs, outputs and gradients: what was saved and gradients of it."""
    return plain_moe_saved_bytes(shape) + shape.pairs * 3 * shape.intermediate * shape.itemsize


def plan_moe(
    function: str,
    shape: MoEShape,
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    peak: Callable[[MoEShape, ShardPlan], int] | None = None,
) -> ShardPlan:
    """Return the plan of one call. An automatic plan that would cost more memory than no tiling becomes one shard.

    peak: what a memory budget is compared with; None is `moe_peak_bytes`, of the eager loop. Without a budget both halves make
    the same plan.
    """
    if memory_budget is not None:
        needed = partial(peak or partial(moe_peak_bytes, device=device), shape)
        shard_tokens = shard_tokens_within(function, memory_budget, shape.tokens, needed)
    plan = plan_tokens(shape.tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device)
    automatic = num_shards is None and shard_tokens is None
    if automatic and len(plan) > 1 and moe_peak_bytes(shape, plan, device=device) >= plain_moe_peak_bytes(shape):
        return ShardPlan(shape.tokens, shape.tokens)
    return plan
