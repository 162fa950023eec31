"""The loop of the distillation loss over shards of tokens. No autograd here.

Letters: T tokens, H and G the hidden sizes of student and teacher, V vocabulary, t tokens of a shard. One buffer [t, V] of
logits for each head is the largest thing that exists; every shard reuses them, and dlogits are written over the student's.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tiled_torch.core.row_shards import Rows
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.distillation import math as distillation_math
from tiled_torch.distillation.math import DistillationRules
from tiled_torch.loss.loops import Gradients, Head, Needs
from tiled_torch.loss.math import Labels


class HeadPair(NamedTuple):
    """Student and teacher, or what each of them has."""

    student: Rows
    teacher: Rows
    head: Head
    head_teacher: Head


def losses(pair: HeadPair, rules: DistillationRules, labels: Labels) -> Tensor:
    """Return the unweighted loss of each token [T], without gradients: 2 THV + 2 TGV FLOP."""
    return _run(pair, rules, labels, None, None)


def losses_and_gradients(
    pair: HeadPair, rules: DistillationRules, labels: Labels, upstream: Tensor, needs: Needs
) -> tuple[Tensor, Gradients]:
    """Return the unweighted losses [T] and the gradients of the student for upstream ones [T]: 6 THV + 2 TGV FLOP."""
    gradients = Gradients(pair.student, pair.head, needs)
    return _run(pair, rules, labels, upstream, gradients), gradients.finish()


def _run(
    pair: HeadPair, rules: DistillationRules, labels: Labels, upstream: Tensor | None, gradients: Gradients | None
) -> Tensor:
    head, other, plan = pair.head, pair.head_teacher, pair.student.plan
    found = torch.empty(plan.tokens, dtype=wide_dtype(head.weight.dtype), device=head.weight.device)
    room, room_teacher = head.buffer(plan), other.buffer(plan)
    part = head.parts[0]
    of_teacher = pair.teacher.shards(other.weight.dtype)
    for shard, place, x in pair.student.shards(head.weight.dtype):
        _, _, x_teacher = next(of_teacher)
        logits_teacher = other.logits(x_teacher, part, room_teacher)
        del x_teacher  # may be a copy: before the next one is made
        logits = head.logits(x, part, room)
        given = None if upstream is None else upstream[place]
        found[place] = distillation_math.losses_(rules, logits, logits_teacher, labels[place], given)
        if gradients is not None:
            gradients.add(x, logits, 0, shard)
        del x
    return found
