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
from tiled_torch.core.replay import is_capturing
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


class RowsRun(NamedTuple):
    """The rows of one call that are run.

    chosen: their numbers [n] in rising order; None: all. split: of tokens that are split over ranks, those that are run.
    targets: of all ranks then, in the order of its shards, where they are there already.
    """

    chosen: Tensor | None = None
    split: SplitTokens | None = None
    targets: Tensor | None = None


def may_be_read(targets: Tensor) -> bool:
    """Return whether the device can be waited for: not of fake tensors, nor while a CUDA graph is captured."""
    return has_values(targets) and not (targets.is_cuda and is_capturing())


def counted_rows(targets: Tensor, ignore_index: int) -> Tensor | None:
    """Return the numbers [n] of the targets [T] that are not ignored, where many are; None where all rows are run.

    It waits for the device once. None where that cannot be.
    """
    if not may_be_read(targets):
        return None
    chosen = (targets != ignore_index).nonzero()[:, 0]
    return chosen if runs_alone(targets.numel(), chosen.numel()) else None


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

    def rows_run(self, given: Operands) -> RowsRun:
        """Return the rows that count, where many do not; else all of them.

        It waits for the device once. All rows are run where that cannot be (fake tensors, a CUDA graph that is captured), and
        where a result of ignored rows is asked for. Where ranks split the tokens each has its own rows, in as many shards as
        the one with most labels needs; the labels of all are gathered anyway.
        """
        targets, ignore_index = given.targets.reshape(-1), self.rules.options.ignore_index
        if {*self.rules.options.outputs} & {*EVERY_ROW_OUTPUTS}:
            return RowsRun(split=self.split)
        if self.split is None:
            return RowsRun(counted_rows(targets, ignore_index))
        if not may_be_read(targets):
            return RowsRun(split=self.split)
        # Each rank copies its own rows of a shard that has those of all.
        shape = self._shape(given, hidden=-(-given.x.shape[-1] // self._holders))
        split, targets = self.split.counted(targets, ignore_index, shape)
        return RowsRun(split.chosen, split, targets)

    def rows(self, given: Operands, run: RowsRun) -> Rows:
        """Return x, shard by shard: all rows, or the chosen ones."""
        x = rows_of(given.x)
        if run.split is not None:
            return run.split.rows(x)
        if run.chosen is None:
            return Rows(x, ShardPlan(checks.flat_tokens(given.x.shape), self.shard_tokens))
        t = chosen_shard_tokens(self._shape(given), self.shard_tokens)
        return ChosenRows(x, run.chosen, ShardPlan(run.chosen.numel(), t))

    @property
    def _holders(self) -> int:
        """Return how many ranks hold the vocabulary."""
        return 1 if self.ranks is None else self.ranks.size

    def _shape(self, given: Operands, hidden: int | None = None) -> LossShape:
        return LossShape(
            tokens=checks.flat_tokens(given.x.shape),
            hidden=given.x.shape[-1] if hidden is None else hidden,
            vocab=-(-self.rules.vocab // self._holders),  # the same on every rank
            vocab_shards=self.vocab_shards,
        )

    def result(self, values: Tensor, dims: torch.Size, run: RowsRun) -> Tensor:
        """Return numbers per token of all shards, [T] or [T, k], as [*dims] or [*dims, k] of this call's own; not a view. Zeros
        in rows that were not run.

        Callers may write to a result in place (mask a loss), engines do.
        """
        own = values if run.split is None else run.split.own(values)
        if run.chosen is not None:
            own = own.new_zeros((dims.numel(), *own.shape[1:])).index_copy_(0, run.chosen, own)
        return torch.ops.aten._unsafe_view(own, (*dims, *own.shape[1:]))

    def reduced(self, values: Tensor, factor: Tensor, dims: torch.Size, run: RowsRun) -> Tensor:
        return self.result(values, dims, run) if self.rules.options.reduction == "none" else values.sum() * factor

    def ranked(self, tokens: Tokens, dims: torch.Size, run: RowsRun) -> tuple[Tensor | None, ...]:
        """Return the predictions, and values and indices of the best entries; None where not asked for."""
        found = tokens.prediction, tokens.top_values, tokens.top_indices
        return tuple(None if a is None else self.result(a, dims, run) for a in found)

    def head(self, given: Operands) -> Head:
        bias = None if given.bias is None else given.bias.to(self.dtype)
        steps = _steps_named(self.backend)
        return Head(given.weight.to(self.dtype), bias, self.rules, self.start, self.vocab_shards, self.ranks, steps)

    def labels(self, given: Operands, run: RowsRun) -> Labels:
        """Return the labels of the rows that are run; on a CPU an error for one that does not exist, on every rank."""
        ignore, wide = self.rules.options.ignore_index, wide_dtype(self.dtype)
        targets, token_weight = (None if a is None else a.reshape(-1) for a in (given.targets, given.token_weight))
        assert targets is not None
        if run.chosen is not None:
            targets, token_weight = targets[run.chosen], None if token_weight is None else token_weight[run.chosen]
        token_weight = None if token_weight is None else token_weight.to(wide)
        if run.split is not None:
            targets = run.split.everywhere([targets], ignore)[0] if run.targets is None else run.targets
            token_weight = None if token_weight is None else run.split.everywhere([token_weight])[0]
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
        run = call.rows_run(given)
        labels, head, rows = call.labels(given, run), call.head(given), call.rows(given, run)
        parts: OutputParts = (None, None, None)
        if any(needs):
            tokens, found, size = losses_and_gradients(rows, head, labels, needs)
            parts = (found.dx, found.dweight, found.dbias)
        else:
            tokens, size = losses(rows, head, labels), 1.0
        factor, count = call.factors(labels, given.num_valid)
        dims = given.targets.shape
        value, right = call.reduced(tokens.loss, factor, dims, run), call.reduced(tokens.right, count, dims, run)
        return value, right, factor * size, *parts, *call.ranked(tokens, dims, run)


def values(given: Operands, call: LossCall, run: RowsRun) -> tuple[Tensor | None, ...]:
    """Return the loss, log_probs, lse, entropy (None where not asked for), the accuracy, and what `LossCall.ranked` has.

    run: what `LossCall.rows_run` found; lse of the other rows is 0.
    """
    with without_autocast(given.x):
        labels, head, rows = call.labels(given, run), call.head(given), call.rows(given, run)
        tokens = losses(rows, head, labels)
        factor, count = call.factors(labels, given.num_valid)
        dims = given.targets.shape
        value, right = call.reduced(tokens.loss, factor, dims, run), call.reduced(tokens.right, count, dims, run)
        of_tokens = (
            None if a is None else call.result(a, dims, run) for a in (tokens.log_probs, tokens.lse, tokens.entropy)
        )
        return value, *of_tokens, right, *call.ranked(tokens, dims, run)


def gradients(
    upstream: tuple[Tensor | None, ...],
    given: Operands,
    saved: tuple[Tensor, Tensor | None],
    call: LossCall,
    needs: Needs,
    run: RowsRun,
) -> tuple[Gradients, Tensor]:
    """Return gradients from the upstream ones of the loss, log_probs, lse and entropy, and the factor that still multiplies
    them.

    saved: lse and entropy as `values` gave them, run as it took it; the logits are computed again.
    """
    with without_autocast(given.x):
        labels, head, rows = call.labels(given, run), call.head(given), call.rows(given, run)
        upstream, (lse, entropy) = _of_run(upstream, saved, call, run)
        k = _coefficients(upstream, lse, labels, call, given.num_valid)
        return gradients_of(rows, head, labels, needs, (lse, entropy), k)


def _of_run(
    upstream: tuple[Tensor | None, ...], saved: tuple[Tensor, Tensor | None], call: LossCall, run: RowsRun
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, Tensor | None]]:
    """Return numbers per token as [n], of the rows that are run; of tokens that are split over ranks those of all, by one
    collective, whatever is None on this rank.
    """
    per_token = [call.rules.options.reduction == "none", *(name in call.rules.options.outputs for name in _PER_TOKEN)]

    def mine(a: Tensor | None) -> Tensor | None:
        flat = None if a is None else a.reshape(-1)
        return flat if flat is None or run.chosen is None else flat[run.chosen]

    upstream = tuple(mine(d) if number or per_token[0] else d for number, d in enumerate(upstream[:4]))
    lse, entropy = mine(saved[0]), mine(saved[1])
    assert lse is not None
    if run.split is None:
        return upstream, (lse, entropy)
    sent = [lse, *([] if entropy is None else [entropy])]
    for d in (d for d, of_token in zip(upstream, per_token, strict=True) if of_token):
        sent.append(torch.zeros_like(lse) if d is None else d.to(lse.dtype))
    found = iter(run.split.everywhere(sent))
    kept = next(found), (None if entropy is None else next(found))
    return tuple(next(found) if of_token else d for d, of_token in zip(upstream, per_token, strict=True)), kept


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
