"""One call of the distillation loss without autograd: what is static about it, its forward, its backward.

`distillation/api.py` differentiates it in eager mode, `distillation/compiled.py` under torch.compile.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.core import checks
from shared_specs.distillation.costs import DistillationShape, chosen_pair_tokens
from shared_specs.loss import checks as loss_checks
from shared_specs.shards import ShardPlan
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.operands import has_values
from tiled_torch.core.row_shards import ChosenRows, Rows
from tiled_torch.core.tensors import rows_of, wide_dtype
from tiled_torch.distillation import loops
from tiled_torch.distillation.loops import HeadPair
from tiled_torch.distillation.math import DistillationRules
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.call import counted_rows
from tiled_torch.loss.loops import Gradients, Head, Needs
from tiled_torch.loss.math import Labels

FUNCTION = "tiled_distillation_loss"


class Distilled(NamedTuple):
    """The tensors of one call. student: [..., H]; w_student: [V, H]; teacher: [..., G]; w_teacher: [V, G]; biases: [V];
    targets, token_weight: [...]; num_valid: []."""

    student: Tensor
    w_student: Tensor
    bias_student: Tensor | None
    teacher: Tensor
    w_teacher: Tensor
    bias_teacher: Tensor | None
    targets: Tensor | None
    num_valid: Tensor | None
    token_weight: Tensor | None


class DistillationCall(NamedTuple):
    """All that is static about one call. dtypes: of the products of student and teacher."""

    rules: DistillationRules
    shard_tokens: int
    dtype: torch.dtype
    dtype_teacher: torch.dtype


def with_gradients(given: Distilled, call: DistillationCall, needs: Needs) -> tuple[Tensor | None, ...]:
    """Return the loss, the factor of the gradients, and dstudent [T, H], dw_student and dbias_student before that factor."""
    with without_autocast(given.student):
        of = _Set.of(given, call)
        losses, found, size = _gradients(call, of, of.weights, needs)
        return of.reduced(losses, given, call), of.mean * size, found.dx, found.dweight, found.dbias


def value(given: Distilled, call: DistillationCall) -> Tensor:
    """Return the loss."""
    with without_autocast(given.student):
        of = _Set.of(given, call)
        return of.reduced(loops.losses(of.pair, call.rules, of.labels), given, call)


def gradients(dloss: Tensor, given: Distilled, call: DistillationCall, needs: Needs) -> tuple[Gradients, Tensor]:
    """Return gradients for the upstream one of the loss, from logits that are made again, and what still multiplies them."""
    with without_autocast(given.student):
        of = _Set.of(given, call)
        upstream = dloss.to(of.weights.dtype)
        if call.rules.options.reduction == "none":
            upstream = upstream.reshape(-1)
            upstream = upstream if of.chosen is None else upstream[of.chosen]
        else:
            upstream = upstream * of.mean
        _, found, size = _gradients(call, of, torch.where(of.weights == 0, 0.0, of.weights * upstream), needs)
    return found, size


class _Set(NamedTuple):
    """What the loop of one call is given. chosen: the rows that are run; None: all."""

    pair: HeadPair
    labels: Labels
    weights: Tensor
    mean: Tensor
    chosen: Tensor | None

    @classmethod
    def of(cls, given: Distilled, call: DistillationCall) -> "_Set":
        """weights: what multiplies the loss of each token, [T]. mean: what a reduction multiplies their sum with."""
        labels = _labels(given, call)
        mean, options = labels.counted.new_ones(()), call.rules.options
        if options.reduction == "mean":
            if given.num_valid is not None and given.num_valid.device.type == "cpu" and has_values(given.num_valid):
                loss_checks.check_count(FUNCTION, given.num_valid.item())
            count = labels.counted.sum()
            by = count if given.num_valid is None else given.num_valid
            mean = torch.where(count == 0, 0.0, by.reciprocal())
        chosen = _chosen(given, call)
        labels = labels if chosen is None else labels[chosen]
        weights = labels.counted
        if labels.token_weight is not None:
            weights = torch.where(weights == 0, 0.0, weights * labels.token_weight)
        x, y = rows_of(given.student), rows_of(given.teacher)
        plan = ShardPlan(x.shape[0], call.shard_tokens)
        if chosen is not None:
            shape = DistillationShape(
                tokens=x.shape[0],
                hidden=x.shape[1],
                teacher_hidden=y.shape[1],
                vocab=call.rules.vocab,
                itemsize=call.dtype.itemsize,
                teacher_itemsize=call.dtype_teacher.itemsize,
            )
            plan = ShardPlan(chosen.numel(), chosen_pair_tokens(shape, call.shard_tokens))
        student, teacher = (Rows(a, plan) if chosen is None else ChosenRows(a, chosen, plan) for a in (x, y))
        rules = call.rules
        heads = (
            Head(given.w_student.to(call.dtype), _cast(given.bias_student, call.dtype), rules.student),
            Head(given.w_teacher.to(call.dtype_teacher), _cast(given.bias_teacher, call.dtype_teacher), rules.teacher),
        )
        return cls(HeadPair(student, teacher, *heads), labels, weights, mean, chosen)

    def reduced(self, losses: Tensor, given: Distilled, call: DistillationCall) -> Tensor:
        """Return the loss from the unweighted ones of the rows that were run."""
        if self.labels.token_weight is not None:
            losses = torch.where(self.weights == 0, 0.0, losses * self.labels.token_weight)
        if call.rules.options.reduction != "none":
            return losses.sum() * self.mean
        lead = given.student.shape[:-1]
        if self.chosen is not None:
            losses = losses.new_zeros(lead.numel()).index_copy_(0, self.chosen, losses)
        return torch.ops.aten._unsafe_view(losses, lead)  # not a view: callers may write to it


def _cast(a: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if a is None else a.to(dtype)


def _labels(given: Distilled, call: DistillationCall) -> Labels:
    wide, rules = wide_dtype(call.dtype), call.rules.student
    token_weight = None if given.token_weight is None else given.token_weight.reshape(-1).to(wide)
    if given.targets is None:
        tokens, device = checks.flat_tokens(given.student.shape), given.student.device
        ones = torch.ones(tokens, dtype=wide, device=device)
        return Labels(torch.zeros(tokens, dtype=torch.long, device=device), ones, ones, None, 0.0, token_weight)
    targets, ignore = given.targets.reshape(-1), rules.options.ignore_index
    if targets.device.type == "cpu" and has_values(targets):
        missing = loss_math.first_missing_target(targets, rules.vocab, ignore)
        if missing is not None:
            loss_checks.fail_target(FUNCTION, missing, rules.vocab, ignore)
    return loss_math.make_labels(rules, targets, None, wide, token_weight)


def _chosen(given: Distilled, call: DistillationCall) -> Tensor | None:
    """Return the numbers of the rows that count, where many do not; it waits for the device once."""
    if given.targets is None:
        return None
    return counted_rows(given.targets.reshape(-1), call.rules.options.ignore_index)


def _gradients(call: DistillationCall, of: _Set, upstream: Tensor, needs: Needs) -> tuple[Tensor, Gradients, Tensor]:
    """Return the unweighted losses, the gradients for upstream ones [rows] and the number that still multiplies these: they
    are held near 1, where float16 has most of its digits."""
    rules = call.rules
    size = loss_math.power_of_two(upstream.abs() * rules.objective.largest_slope, rules.options.logit_scale)
    losses, found = loops.losses_and_gradients(of.pair, rules, of.labels, upstream / size, needs)
    return losses, found, size
