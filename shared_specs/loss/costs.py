"""FLOP and bytes of the losses as formulas. Tests count the real thing and compare; nothing here is fitted.

Letters: T tokens, H hidden, V vocabulary, t tokens of the longest shard. Bytes are peaks above inputs and gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared_specs.config import LossOptions
from shared_specs.core.budget import shard_tokens_within
from shared_specs.shards import ShardPlan, plan_tokens

LOSS_ELEMENTS = {"cpu": 2**21, "gpu": 2**26}
# What of the options comes between the logits as products and their gradients.
BENDS = ("logit_scale", "logit_softcap", "entropy")


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """The shape of one linear cross entropy, as the formulas read it. `vocab`: entries that this call's weight has.

    `itemsize` is of the compute dtype, `weight_itemsize` of the weight. `bends`: which of BENDS come between
    the product and its gradients; which of them cost temporaries is each formula's own. `copied`: statistics are made on
    copies of rows, where other ranks have a part in them and the logits are still needed for the gradients.
    """

    tokens: int
    hidden: int
    vocab: int
    vocab_shards: int = 1
    itemsize: int = 4
    weight_itemsize: int = 4
    bends: tuple[str, ...] = ()
    copied: bool = False

    @classmethod
    def of(cls, loss: LossOptions, **sizes: Any) -> "LossShape":
        """Return the shape of a call with these options. sizes: the other fields."""
        there = loss.logit_scale != 1, loss.logit_softcap is not None, "entropy" in loss.outputs
        return cls(bends=tuple(name for name, is_there in zip(BENDS, there, strict=True) if is_there), **sizes)

    @property
    def vocab_shard(self) -> int:
        """Entries of the longest vocabulary shard."""
        return -(-self.vocab // self.vocab_shards)

    @property
    def cast_bytes(self) -> int:
        """Return the bytes of the weight in the compute dtype, where it is stored in another one (autocast)."""
        return self.vocab * self.hidden * self.itemsize if self.weight_itemsize != self.itemsize else 0


def loss_flop(
    shape: LossShape, *, gradients_in_forward: bool, dx: bool = True, dweight: bool = True, valid: float = 1.0
) -> int:
    """Return FLOP of the products of one forward and backward: 6 THV, or 8 where the logits are computed twice.

    They are computed twice for upstream gradients per token (`LossOptions.gradients_in_forward` false) and with more than
    one vocabulary shard. A gradient that nobody needs costs nothing. `valid`: the share of rows with a label; those without
    one are not multiplied, but for what is left of the last shard, which is less than t rows more.
    """
    again = (dx or dweight) and (not gradients_in_forward or shape.vocab_shards > 1)
    return (1 + again + dx + dweight) * 2 * round(shape.tokens * valid) * shape.hidden * shape.vocab


def runs_alone(tokens: int, valid: int) -> bool:
    """Return whether the rows that count are taken out of all rows: where at least a sixteenth of them are ignored.

    Of fewer, such as the last token of every sequence, the products cost less than copies of all the others.
    """
    return 16 * (tokens - valid) >= tokens > 0


def chosen_shard_tokens(shape: LossShape, shard_tokens: int) -> int:
    """Return the tokens of a shard whose rows of x and dx are copies, so that these fit beside its logits in the same bytes."""
    return max(1, shard_tokens * shape.vocab_shard // (shape.vocab_shard + 2 * shape.hidden))


def loss_accumulator_bytes(shape: LossShape) -> int:
    """Return bytes of the float32 sum of dweight where it is not the returned gradient itself: 16-bit weights."""
    return shape.vocab * shape.hidden * 4 if shape.weight_itemsize < 4 else 0


def loss_block_rows(shape: LossShape, device: str) -> int:
    """Return rows of logits that one elementwise step works on at a time."""
    return max(1, LOSS_ELEMENTS[device] // max(1, shape.vocab_shard))


def loss_peak_bytes(shape: LossShape, plan: ShardPlan, *, device: str = "cpu", kernels: bool = False) -> int:
    """Return peak bytes of one eager loss above inputs and gradients: one shard of logits.

    On top: where logits are widened, bent or copied, elementwise temporaries of `loss_block_rows` rows, the float32 sum of a
    16-bit weight's gradient, a copy of a weight in another dtype, and for 16-bit operands on a CPU the float32 copies of one
    product's operands, because CPU products cannot return float32.
    With vocabulary shards a 16-bit dx is a float32 sum while its tokens are worked on. `kernels`: Triton's, which hold what
    is elementwise in registers.
    """
    t, wide = plan.longest, max(shape.itemsize, 4)
    logits = t * shape.vocab_shard * shape.itemsize
    dx_sum = t * shape.hidden * 4 if shape.itemsize < 4 and shape.vocab_shards > 1 else 0
    block = min(t, loss_block_rows(shape, device)) * shape.vocab_shard
    bends = sum(name != "logit_scale" for name in shape.bends)  # which is multiplied in place
    blocks = max((0 if shape.itemsize >= 4 else 1) + bends, 1 if shape.copied and shape.vocab_shards == 1 else 0)
    temporaries = 0 if kernels else block * wide * blocks
    copies = 0
    if shape.itemsize < 4 and device == "cpu":
        copies = t * (shape.vocab_shard + shape.hidden) * 4
    return logits + dx_sum + max(temporaries, copies) + loss_accumulator_bytes(shape) + shape.cast_bytes


def compiled_loss_peak_bytes(shape: LossShape, plan: ShardPlan, *, device: str = "cpu") -> int:
    """Return the most temporary bytes the compiled (XLA) loss with its gradients uses: an upper bound.

    One shard of logits, over which their gradient is written (where anything `bends` them, two more), the shard's
    rows of x and dx, and one shard's product x^T dlogits before it is added to the sum of dweight. That sum is the
    returned gradient unless the weight has 16 bits. Parts of the vocabulary are cut out of the weight and of the sum.
    Weights of another dtype than x are cast once. On a CPU 16-bit products are float32 ones between casts, so logits, their
    gradient and the weight are there in float32.
    """
    t, wide = plan.longest, max(4, shape.itemsize)
    widened = shape.itemsize < 4 and device == "cpu"
    of_logit = 2 * wide if widened else shape.itemsize * (1 if shape.itemsize >= 4 else 2)
    logits = t * shape.vocab_shard * (of_logit + 2 * wide * bool(shape.bends))
    rows = t * shape.hidden * (2 * shape.itemsize + 2 * wide)
    weight, part = shape.vocab * shape.hidden, shape.vocab_shard * shape.hidden
    casts = shape.cast_bytes + weight * wide * widened
    products = part * wide * (1 if shape.vocab_shards == 1 else 3)
    return logits + rows + products + casts + loss_accumulator_bytes(shape)


def plain_loss_peak_bytes(shape: LossShape) -> int:
    """Return peak bytes of the untiled loss above inputs and gradients: log-probabilities, their gradient and that of the
    logits.

    In float32 (float64), as frameworks compute a cross entropy; for 16-bit logits also these themselves.
    """
    elements = shape.tokens * shape.vocab
    return elements * (3 * max(4, shape.itemsize) + (shape.itemsize if shape.itemsize < 4 else 0))


def plan_loss(
    function: str,
    shape: LossShape,
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    kernels: bool = False,
    peak: Callable[[LossShape, ShardPlan], int] | None = None,
) -> ShardPlan:
    """Return the plan of one loss call; as `plan_mlp`, but always tiled: one shard's logits are what it is for."""
    if memory_budget is not None:
        eager = partial(loss_peak_bytes, device=device, kernels=kernels)
        shard_tokens = shard_tokens_within(function, memory_budget, shape.tokens, partial(peak or eager, shape))
    return plan_tokens(shape.tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device)
