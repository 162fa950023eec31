"""FLOP and bytes of a distillation loss as formulas. Tests count the real thing and compare; nothing here is fitted.

Letters: T tokens, H and G the hidden sizes of student and teacher, V vocabulary, t tokens of the longest shard.
"""

from dataclasses import dataclass
from functools import partial

from shared_specs.core.budget import shard_tokens_within
from shared_specs.loss.costs import LOSS_ELEMENTS
from shared_specs.shards import ShardPlan, plan_tokens

# Elementwise work is done on so many times fewer rows at a time than in the cross entropy: there are as many more temporaries.
ROWS_SHARE = 4


@dataclass(frozen=True, kw_only=True)
class DistillationShape:
    """The shape of one distillation loss. itemsizes: of the compute dtypes. weight_itemsizes: of the weights as stored."""

    tokens: int
    hidden: int
    teacher_hidden: int
    vocab: int
    itemsize: int = 4
    teacher_itemsize: int = 4
    weight_itemsize: int = 4
    teacher_weight_itemsize: int = 4

    @property
    def cast_bytes(self) -> int:
        """Return the bytes of weights in the compute dtype, where they are stored in another one."""
        pairs = (
            (self.hidden, self.itemsize, self.weight_itemsize),
            (self.teacher_hidden, self.teacher_itemsize, self.teacher_weight_itemsize),
        )
        return sum(self.vocab * hidden * item for hidden, item, stored in pairs if item != stored)


def distillation_flop(shape: DistillationShape, *, gradients_in_forward: bool = True, valid: float = 1.0) -> int:
    """Return FLOP of the products of one forward and backward: 6 THV of the student and 2 TGV of the teacher.

    With reduction "none" the logits of both are computed again: 8 THV and 4 TGV. valid: the share of rows with a label.
    """
    once = 2 * round(shape.tokens * valid) * shape.vocab
    again = not gradients_in_forward
    return once * ((3 + again) * shape.hidden + (1 + again) * shape.teacher_hidden)


def distillation_peak_bytes(shape: DistillationShape, plan: ShardPlan, *, device: str = "cpu") -> int:
    """Return peak bytes of one eager call above inputs and gradients: the logits of one shard, of both heads.

    On top: elementwise temporaries of a few rows, the float32 sum of a 16-bit weight's gradient, copies of weights in another
    dtype, and for 16-bit operands on a CPU the float32 copies of one product's operands.
    """
    t, wide = plan.longest, max(shape.itemsize, 4)
    logits = t * shape.vocab * (shape.itemsize + shape.teacher_itemsize)
    rows = min(t, max(1, LOSS_ELEMENTS[device] // ROWS_SHARE // max(1, shape.vocab)))
    temporaries = 7 * rows * shape.vocab * wide
    copies = t * (shape.vocab + shape.hidden) * 4 if shape.itemsize < 4 and device == "cpu" else 0
    sums = shape.vocab * shape.hidden * 4 if shape.weight_itemsize < 4 else 0
    return logits + max(temporaries, copies) + sums + shape.cast_bytes


def chosen_pair_tokens(shape: DistillationShape, shard_tokens: int) -> int:
    """Return the tokens of a shard whose hidden states and gradient are copies, so that these fit beside its logits in the
    same bytes."""
    logits = shape.vocab * (shape.itemsize + shape.teacher_itemsize)
    copies = 2 * shape.hidden * shape.itemsize + shape.teacher_hidden * shape.teacher_itemsize
    return max(1, shard_tokens * logits // (logits + copies))


def compiled_distillation_peak_bytes(shape: DistillationShape, plan: ShardPlan, *, device: str = "cpu") -> int:
    """Return the most temporary bytes that the compiled (XLA) call with its gradients uses: an upper bound.

    One shard of logits of both heads, three wide arrays of their size that elementwise work stores, the shard's rows of
    hidden states and their gradient, one shard's product before it is added to the sum, and casts of weights.
    """
    t, wide = plan.longest, max(4, shape.itemsize)
    widened = shape.itemsize < 4 and device == "cpu"
    logits = t * shape.vocab * (shape.itemsize + shape.teacher_itemsize + 3 * wide)
    rows = t * (shape.hidden * (2 * shape.itemsize + 2 * wide) + shape.teacher_hidden * shape.teacher_itemsize)
    weight = shape.vocab * shape.hidden
    casts = shape.cast_bytes + (weight + shape.vocab * shape.teacher_hidden) * wide * widened
    sums = weight * 4 if shape.weight_itemsize < 4 else 0
    return logits + rows + weight * wide + casts + sums


def plan_distillation(
    function: str,
    shape: DistillationShape,
    *,
    num_shards: int | None = None,
    shard_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cpu",
    compiled: bool = False,
) -> ShardPlan:
    """Return the plan of one call: always tiled, as the cross entropy is."""
    if memory_budget is not None:
        peak = compiled_distillation_peak_bytes if compiled else distillation_peak_bytes
        shard_tokens = shard_tokens_within(function, memory_budget, shape.tokens, partial(peak, shape, device=device))
    return plan_tokens(shape.tokens, num_shards=num_shards, shard_tokens=shard_tokens, device=device)
