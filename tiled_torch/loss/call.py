"""One call of the tiled cross entropy without autograd: what is static about it, its forward, its backward.

`loss/api.py` differentiates it in eager mode, `loss/compiled.py` under torch.compile.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.config import EVERY_ROW_OUTPUTS
from shared_specs.core import checks
from shared_specs.loss import checks as loss_checks
from shared_specs.loss.costs import LossShape, chosen_shard_tokens, runs_alone
from shared_specs.shards import ShardPlan
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.operands import has_values
from tiled_torch.core.row_shards import ChosenRows, Rows
from tiled_torch.core.tensors import dtype_name, rows_of, wide_dtype
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.loops import (
    Gradients,
    Head,
    Needs,
    Ranks,
    SplitTokens,
    Tokens,
    gradients_of,
    losses,
    losses_and_gradients,
)
from tiled_torch.loss.math import Coefficients, Labels, Rules
from tiled_torch.loss.steps import EAGER, LossSteps

OutputParts = tuple[Tensor | None, Tensor | None, Tensor | None]


class Operands(NamedTuple):
    """The tensors of one call. x: [..., H]; weight: [V, H]; targets, token_weight: [...]; num_valid: [], wide."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    num_valid: Tensor | None
    token_weight: Tensor | None


@dataclass(frozen=True)
class LossCall:
    """All that is static about one call; the plan of forward is the plan of backward.

    function: whose name errors say. split: where the tokens are split over ranks.
    owners: the whole parameters, where weight and bias are this rank's parts of them; else None.
    """

    function: str
    rules: Rules
    shard_tokens: int
    vocab_shards: int
    dtype: torch.dtype
    start: int = 0
    ranks: Ranks | None = None
    backend: str = "eager"
    split: SplitTokens | None = None
    owners: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def with_loss(self) -> bool:
        """Return whether the gradients are computed with the loss."""
        return self.rules.options.gradients_with_loss(dtype_name(self.dtype))

    def chosen(self, given: Operands) -> Tensor | None:
        """Return the numbers [n] of the rows that count, where many do not; None where all rows are run.

        It waits for the device once. All rows are run where that cannot be (fake tensors, a CUDA graph that is captured), where
        ranks split the tokens, and where a result of ignored rows is asked for.
        """
        targets, outputs = given.targets.reshape(-1), self.rules.options.outputs
        if self.split is not None or {*outputs} & {*EVERY_ROW_OUTPUTS}:
            return None
        if not has_values(targets) or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        chosen = (targets != self.rules.options.ignore_index).nonzero()[:, 0]
        return chosen if runs_alone(targets.numel(), chosen.numel()) else None

    def rows(self, given: Operands, chosen: Tensor | None = None) -> Rows:
        """Return x, shard by shard: all rows, or the chosen ones."""
        x = rows_of(given.x)
        if self.split is not None:
            return self.split.rows(x)
        if chosen is None:
            return Rows(x, ShardPlan(checks.flat_tokens(given.x.shape), self.shard_tokens))
        entries = -(-self.rules.vocab // (1 if self.ranks is None else self.ranks.size))  # the same on every rank
        shape = LossShape(tokens=x.shape[0], hidden=x.shape[1], vocab=entries, vocab_shards=self.vocab_shards)
        return ChosenRows(x, chosen, ShardPlan(chosen.numel(), chosen_shard_tokens(shape, self.shard_tokens)))

    def result(self, values: Tensor, dims: torch.Size) -> Tensor:
        """Return numbers per token of all shards, [T] or [T, k], as [*dims] or [*dims, k] of this call's own; not a view.

        Callers may write to a result in place (mask a loss), engines do.
        """
        return torch.ops.aten._unsafe_view(
            values if self.split is None else self.split.own(values), (*dims, *values.shape[1:])
        )

    def reduced(self, values: Tensor, factor: Tensor, dims: torch.Size) -> Tensor:
        return self.result(values, dims) if self.rules.options.reduction == "none" else values.sum() * factor

    def ranked(self, tokens: Tokens, dims: torch.Size) -> tuple[Tensor | None, ...]:
        """Return the predictions, and values and indices of the best entries; None where not asked for."""
        found = tokens.prediction, tokens.top_values, tokens.top_indices
        return tuple(None if a is None else self.result(a, dims) for a in found)

    def head(self, given: Operands) -> Head:
        bias = None if given.bias is None else given.bias.to(self.dtype)
        steps = _steps_named(self.backend)
        return Head(given.weight.to(self.dtype), bias, self.rules, self.start, self.vocab_shards, self.ranks, steps)

    def labels(self, given: Operands) -> Labels:
        """Return the labels of the targets; on a CPU an error for one that does not exist, on every rank."""
        targets, ignore = given.targets.reshape(-1), self.rules.options.ignore_index
        wide = wide_dtype(self.dtype)
        token_weight = None if given.token_weight is None else given.token_weight.reshape(-1).to(wide)
        if self.split is not None:
            (targets,) = self.split.everywhere([targets], ignore)
            token_weight = None if token_weight is None else self.split.everywhere([token_weight])[0]
        if targets.device.type == "cpu" and has_values(targets):
            missing = loss_math.first_missing_target(targets, self.rules.vocab, ignore)
            if missing is not None:
                loss_checks.fail_target(self.function, missing, self.rules.vocab, ignore)
        return loss_math.make_labels(self.rules, targets, given.class_weight, wide, token_weight)

    def factors(self, labels: Labels, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the factors of the sums of the losses and of the right tokens; 0 for a mean of nothing.

        A num_valid of 0 beside tokens that count is a division by zero and gives an infinity, as it would outside.
        """
        if self.rules.options.reduction != "mean":
            one = labels.counted.new_ones(())
            return one, one
        if num_valid is not None and num_valid.device.type == "cpu" and has_values(num_valid):
            loss_checks.check_count(self.function, num_valid.item())
        weight, count = labels.weight.sum(), labels.counted.sum()
        pairs = ((weight, weight), (count, count)) if num_valid is None else ((count, num_valid),) * 2
        return tuple(torch.where(nothing == 0, 0.0, a.reciprocal()) for nothing, a in pairs)  # type: ignore[return-value]


def with_gradients(given: Operands, call: LossCall, needs: Needs) -> tuple[Tensor | None, ...]:
    """Return the loss, the accuracy, the factor of the gradients, dx [T, H], dweight and dbias before that factor, and what
    `LossCall.ranked` has.
    """
    with without_autocast(given.x):
        chosen = call.chosen(given)
        labels, head, rows = _of(call.labels(given), chosen), call.head(given), call.rows(given, chosen)
        parts: OutputParts = (None, None, None)
        if any(needs):
            tokens, found, size = losses_and_gradients(rows, head, labels, needs)
            parts = (found.dx, found.dweight, found.dbias)
        else:
            tokens, size = losses(rows, head, labels), 1.0
        factor, count = call.factors(labels, given.num_valid)
        dims = given.targets.shape
        value, right = call.reduced(tokens.loss, factor, dims), call.reduced(tokens.right, count, dims)
        return value, right, factor * size, *parts, *call.ranked(tokens, dims)


def _of(labels: Labels, chosen: Tensor | None) -> Labels:
    return labels if chosen is None else labels[chosen]


def values(given: Operands, call: LossCall, chosen: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the loss, log_probs, lse, entropy (None where not asked for), the accuracy, and what `LossCall.ranked` has.

    chosen: the rows that are run, as `LossCall.chosen` has them; lse of the others is 0.
    """
    with without_autocast(given.x):
        labels, head, rows = _of(call.labels(given), chosen), call.head(given), call.rows(given, chosen)
        tokens = losses(rows, head, labels).among(given.targets.numel(), chosen)
        factor, count = call.factors(labels, given.num_valid)
        dims = given.targets.shape
        value, right = call.reduced(tokens.loss, factor, dims), call.reduced(tokens.right, count, dims)
        of_tokens = (
            None if a is None else call.result(a, dims) for a in (tokens.log_probs, tokens.lse, tokens.entropy)
        )
        return value, *of_tokens, right, *call.ranked(tokens, dims)


def gradients(
    upstream: tuple[Tensor | None, ...],
    given: Operands,
    saved: tuple[Tensor, Tensor | None],
    call: LossCall,
    needs: Needs,
    chosen: Tensor | None,
) -> tuple[Gradients, Tensor]:
    """Return gradients from the upstream ones of the loss, log_probs, lse and entropy, and the factor that still multiplies
    them.

    saved: lse and entropy as `values` gave them, chosen as it took them; the logits are computed again.
    """
    with without_autocast(given.x):
        labels, head, rows = call.labels(given), call.head(given), call.rows(given, chosen)
        upstream, (lse, entropy) = _everywhere(upstream, saved, call)
        k = _coefficients(upstream, lse, labels, call, given.num_valid)
        if chosen is not None:  # without entropy
            labels, lse, k = labels[chosen], lse[chosen], k[chosen]
        return gradients_of(rows, head, labels, needs, (lse, entropy), k)


def _everywhere(
    upstream: tuple[Tensor | None, ...], saved: tuple[Tensor, Tensor | None], call: LossCall
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor | None]]:
    """Return numbers per token as [T]; of tokens that are split over ranks by one collective, whatever is None on this rank."""
    lse, entropy = (None if a is None else a.reshape(-1) for a in saved)
    assert lse is not None
    if call.split is None:
        return upstream, (lse, entropy)
    per_token = [call.rules.options.reduction == "none", *(name in call.rules.options.outputs for name in _PER_TOKEN)]
    mine = [lse, *([] if entropy is None else [entropy])]
    for d in (d for d, wanted in zip(upstream, per_token, strict=False) if wanted):
        mine.append(torch.zeros_like(lse) if d is None else d.reshape(-1).to(lse.dtype))
    found = iter(call.split.everywhere(mine))
    kept = next(found), (None if entropy is None else next(found))
    return tuple(next(found) if wanted else d for d, wanted in zip(upstream, per_token, strict=False)), kept


_PER_TOKEN = ("log_probs", "lse", "entropy")


def _coefficients(
    upstream: tuple[Tensor | None, ...], lse: Tensor, labels: Labels, call: LossCall, num_valid: Tensor | None
) -> Coefficients:
    """Return the coefficients, [T] each, from the upstream gradients of the loss, log_probs, lse and entropy."""
    dvalue, dlog_probs, dlse, dentropy = (None if d is None else d.reshape(-1).to(lse.dtype) for d in upstream[:4])
    k = loss_math.loss_coefficients(call.rules, labels.scaled, lse)
    factor, _ = call.factors(labels, num_valid)
    g = lse.new_zeros(()) if dvalue is None else dvalue if call.rules.options.reduction == "none" else dvalue * factor
    # 0 for ignored tokens even where the upstream gradient or lse is not finite
    k = Coefficients(*(None if part is None else torch.where(labels.counted == 0, 0.0, part * g) for part in k))  # type: ignore[arg-type]
    a, b = k.a, k.b
    if dlog_probs is not None:
        of_nll = torch.where(labels.counted == 0, 0.0, dlog_probs * labels.counted)
        a, b = a - of_nll, b - of_nll
    if dlse is not None:
        a = a + dlse
    return Coefficients(a, b, k.c, dentropy)


def _steps_named(backend: str) -> LossSteps:
    """Return the steps of a backend, "eager" or "triton"."""
    if backend == "eager":
        return EAGER
    from tiled_torch.loss.steps_kernels import KernelLossSteps  # imports triton

    return KernelLossSteps()
