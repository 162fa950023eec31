"""One call of the tiled cross entropy without autograd: what is static about it, its forward, its backward.

`functional/loss.py` differentiates it in eager mode, `functional/loss_ops.py` under torch.compile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs import checks
from shared_specs.config import LossOptions
from shared_specs.shards import ShardPlan
from tiled_torch.functional import loss_math
from tiled_torch.functional.activations import wide_dtype
from tiled_torch.functional.casting import without_autocast
from tiled_torch.functional.loss_math import Coefficients, Labels
from tiled_torch.functional.loss_shards import (
    Gradients,
    Head,
    Needs,
    Ranks,
    gradients_of,
    losses,
    losses_and_gradients,
)
from tiled_torch.functional.loss_steps import loss_steps_named

Parts = tuple[Tensor | None, Tensor | None, Tensor | None]


class Operands(NamedTuple):
    """The tensors of one call. x: [..., H]; weight: [V, H]; targets: [...]; num_valid: [], wide."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    num_valid: Tensor | None

    @property
    def rows(self) -> Tensor:
        """x as [T, H]; a copy only where the leading dims cannot be merged."""
        return self.x.reshape(checks.flat_tokens(self.x.shape), self.x.shape[-1])


@dataclass(frozen=True)
class Problem:
    """What is static about one call. options: without its arrays."""

    function: str
    options: LossOptions
    shard_tokens: int
    cuts: int
    dtype: torch.dtype
    vocab: int
    start: int = 0
    ranks: Ranks | None = None
    backend: str = "eager"

    def plan(self, x: Tensor) -> ShardPlan:
        return ShardPlan(checks.flat_tokens(x.shape), self.shard_tokens)

    def head(self, given: Operands) -> Head:
        bias = None if given.bias is None else given.bias.to(self.dtype)
        steps = loss_steps_named(self.backend)
        return Head(given.weight.to(self.dtype), bias, self.vocab, self.start, self.cuts, self.ranks, steps)

    def labels(self, given: Operands) -> Labels:
        """What the targets say; on a CPU an error for one that does not exist."""
        targets, ignore = given.targets.reshape(-1), self.options.ignore_index
        if targets.device.type == "cpu":
            missing = loss_math.first_missing_target(targets, self.vocab, ignore)
            if missing is not None:
                checks.fail_target(self.function, missing, self.vocab, ignore)
        return loss_math.labels_of(targets, self.vocab, given.class_weight, ignore, wide_dtype(self.dtype))

    def factors(self, labels: Labels, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the sums of the losses and of the right tokens are multiplied by; 0 for a mean of nothing."""
        if self.options.reduction != "mean":
            one = labels.counted.new_ones(())
            return one, one
        loss, count = (labels.weight.sum(), labels.counted.sum()) if num_valid is None else (num_valid, num_valid)
        return tuple(torch.where(a == 0, 0.0, a.reciprocal()) for a in (loss, count))  # type: ignore[return-value]


def _reduced(values: Tensor, factor: Tensor, reduction: str, dims: torch.Size) -> Tensor:
    return _of_dims(values, dims) if reduction == "none" else values.sum() * factor


def _of_dims(values: Tensor, dims: torch.Size) -> Tensor:
    """[T] as [*dims], not a view: callers may write to a result in place (mask a loss), engines do."""
    return torch.ops.aten._unsafe_view(values, dims)


def with_gradients(given: Operands, problem: Problem, needs: Needs) -> tuple[Tensor | None, ...]:
    """The loss, the accuracy, the factor of the gradients, and dx [T, H], dweight and dbias before that factor."""
    with without_autocast(given.x):
        labels, head, plan = problem.labels(given), problem.head(given), problem.plan(given.x)
        parts: Parts = (None, None, None)
        if any(needs):
            tokens, found = losses_and_gradients(given.rows, head, labels, problem.options, plan, needs)
            parts = (found.dx, found.dweight, found.dbias)
        else:
            tokens = losses(given.rows, head, labels, problem.options, plan, entropy=False)
        factor, count = problem.factors(labels, given.num_valid)
        reduction, dims = problem.options.reduction, given.targets.shape
        value = _reduced(tokens.loss, factor, reduction, dims)
        return value, _reduced(tokens.right, count, reduction, dims), factor, *parts


def values(given: Operands, problem: Problem) -> tuple[Tensor | None, ...]:
    """The loss, log_probs, lse, entropy (None where not asked for) and the accuracy."""
    with without_autocast(given.x):
        labels, head, plan = problem.labels(given), problem.head(given), problem.plan(given.x)
        entropy = "entropy" in problem.options.outputs
        tokens = losses(given.rows, head, labels, problem.options, plan, entropy=entropy)
        factor, count = problem.factors(labels, given.num_valid)
        reduction, dims = problem.options.reduction, given.targets.shape
        value = _reduced(tokens.loss, factor, reduction, dims)
        right = _reduced(tokens.right, count, reduction, dims)
        of_tokens = (None if a is None else _of_dims(a, dims) for a in (tokens.log_probs, tokens.lse, tokens.entropy))
        return value, *of_tokens, right


def gradients(
    upstream: tuple[Tensor | None, ...],
    given: Operands,
    saved: tuple[Tensor, Tensor | None],
    problem: Problem,
    needs: Needs,
) -> tuple[Gradients, Tensor]:
    """Gradients from the upstream ones of the loss, log_probs, lse and entropy, and the factor that still multiplies them.

    saved: lse and entropy as `values` gave them; the logits are computed again.
    """
    with without_autocast(given.x):
        labels, head, plan = problem.labels(given), problem.head(given), problem.plan(given.x)
        lse, entropy = (None if a is None else a.view(-1) for a in saved)
        assert lse is not None
        k = _coefficients(upstream, lse, labels, problem, given.num_valid)
        return gradients_of(given.rows, head, labels, problem.options, plan, needs, (lse, entropy), k)


def _coefficients(
    upstream: tuple[Tensor | None, ...], lse: Tensor, labels: Labels, problem: Problem, num_valid: Tensor | None
) -> Coefficients:
    """From the upstream gradients of the loss, log_probs, lse and entropy. [T] each."""
    dvalue, dlog_probs, dlse, dentropy = (None if d is None else d.reshape(-1).to(lse.dtype) for d in upstream[:4])
    k = loss_math.loss_coefficients(lse, labels, problem.options, problem.vocab)
    factor, _ = problem.factors(labels, num_valid)
    g = lse.new_zeros(()) if dvalue is None else dvalue if problem.options.reduction == "none" else dvalue * factor
    # 0 for ignored tokens even where the upstream gradient or lse is not finite
    k = Coefficients(*(None if part is None else torch.where(labels.counted == 0, 0.0, part * g) for part in k))  # type: ignore[arg-type]
    a, b = k.a, k.b
    if dlog_probs is not None:
        pull = torch.where(labels.counted == 0, 0.0, dlog_probs * labels.counted)
        a, b = a - pull, b - pull
    if dlse is not None:
        a = a + dlse
    return Coefficients(a, b, k.c, dentropy)
