"""The loops of the tiled cross entropy over shards of tokens and of the vocabulary. No autograd here.

Letters: T tokens, H hidden, V vocabulary, t tokens and v entries of a shard. One buffer [t, v] of logits is the largest
thing that exists; every shard reuses it, and dlogits are written over it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shared_specs.loss.costs import LossShape
from shared_specs.shards import ShardPlan
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.row_shards import Rows
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.math import Coefficients, Labels, Part, Rules, Statistics
from tiled_torch.loss.ranking import Ranking, ranking_of
from tiled_torch.loss.steps import EAGER, LossSteps


class Ranks(Protocol):
    """The holders of the vocabulary: how many they are, and reductions over them, in place."""

    @property
    def size(self) -> int: ...

    def maximum_(self, a: Tensor) -> Tensor: ...

    def sum_(self, a: Tensor) -> Tensor: ...

    def gather(self, a: Tensor) -> Tensor:
        """Return [R, ...]: that of every holder."""
        ...


class SplitTokens(Protocol):
    """Tokens that are split over ranks: how this rank's part becomes all of them, shard by shard where it is x."""

    def rows(self, x: Tensor) -> Rows:
        """Return this rank's x [T / R, H] as gathered shards."""
        ...

    def everywhere(self, values: list[Tensor], fill: float = 0) -> list[Tensor]:
        """Return [T / R] of every rank as [T], in the order of the shards; `fill` in rows that stand for no token."""
        ...

    def own(self, values: Tensor) -> Tensor:
        """Return this rank's tokens [T / R] of values [T] in the order of the shards."""
        ...

    @property
    def chosen(self) -> Tensor | None:
        """Return the numbers of this rank's tokens that there are, where not all are."""
        ...

    def counted(self, targets: Tensor, ignore_index: int, shape: LossShape) -> tuple["SplitTokens", Tensor]:
        """Return the split of the tokens that are run, which have labels where many have none, and the targets of all of them
        in the order of its shards. targets: of this rank.
        """
        ...


@dataclass(frozen=True)
class Head:
    """A linear head, or one rank's partition of it: logits of the entries [start, start + weight.shape[0]) of the vocabulary.

    weight: [v, H] and bias: [v] or None, in the compute dtype.
    """

    weight: Tensor
    bias: Tensor | None
    rules: Rules
    start: int = 0
    vocab_shards: int = 1
    ranks: Ranks | None = None
    steps: LossSteps = EAGER

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the vocabulary shards; none longer than the first. An empty one without entries."""
        plan = ShardPlan(self.weight.shape[0], -(-self.weight.shape[0] // self.vocab_shards) or 1)
        return tuple(Part(self.start + start, self.start + stop) for start, stop in plan.spans or ((0, 0),))

    def own(self, part: Part) -> slice:
        """Return which rows of the weight a part has."""
        return slice(part.start - self.start, part.stop - self.start)

    def logits(self, x: Tensor, part: Part, buffer: Tensor) -> Tensor:
        """Return [t, v] of one part, written into the buffer."""
        out, own = self.in_buffer(x, part, buffer), self.own(part)
        w = self.weight[own]
        return torch.mm(x, w.T, out=out) if self.bias is None else torch.addmm(self.bias[own], x, w.T, out=out)

    def rankings(self, logits: Tensor, part: Part) -> list[Ranking]:
        """Return the best entries of a part, as many as each output wants."""
        return [ranking_of(self.rules, logits, part, k) for k in self.rules.ranked]

    def in_buffer(self, x: Tensor, part: Part, buffer: Tensor) -> Tensor:
        """Return the place of the logits [t, v] of one part in the buffer."""
        return buffer[: x.shape[0] * part.entries].view(x.shape[0], part.entries)

    def buffer(self, plan: ShardPlan) -> Tensor:
        """Return room for the logits of the longest shard of tokens and of the vocabulary."""
        return self.weight.new_empty(plan.longest * self.parts[0].entries)


class Needs(NamedTuple):
    """Which gradients somebody needs."""

    x: bool
    weight: bool
    bias: bool


class Tokens(NamedTuple):
    """Results per token, [T] each, top_values and top_indices [T, k]; those from entropy on only where asked for."""

    loss: Tensor
    log_probs: Tensor
    lse: Tensor
    right: Tensor
    entropy: Tensor | None = None
    prediction: Tensor | None = None
    top_values: Tensor | None = None
    top_indices: Tensor | None = None

    def __getitem__(self, rows: slice) -> "Tokens":  # type: ignore[override]
        return Tokens(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def write(self, rules: Rules, labels: Labels, found: Statistics, rankings: Sequence[Ranking]) -> None:
        """The results of one shard into these rows."""
        self.loss.copy_(loss_math.token_losses(rules, labels.scaled, found))
        self.log_probs.copy_(torch.where(labels.counted == 0, 0.0, -found.nll * labels.counted))
        self.lse.copy_(found.lse)
        self.right.copy_(found.right * labels.counted)
        if self.entropy is not None and found.entropy is not None:
            self.entropy.copy_(found.entropy)
        if self.prediction is not None:
            self.prediction.copy_(rankings[0].entries[:, 0])
        if self.top_values is not None and self.top_indices is not None:
            self.top_values.copy_(rankings[-1].log_probs(rules, found))
            self.top_indices.copy_(rankings[-1].entries)


def empty_tokens(rows: Rows, rules: Rules) -> Tokens:
    """Return room for the results of all tokens."""
    options, wide = rules.options, wide_dtype(rows.x.dtype)

    def room(dtype: torch.dtype, *more: int) -> Tensor:
        return rows.x.new_empty((rows.plan.tokens, *more), dtype=dtype)

    tokens = Tokens(room(wide), room(wide), room(wide), room(wide), room(wide) if rules.entropy else None)
    if "prediction" in options.outputs:
        tokens = tokens._replace(prediction=room(torch.int64))
    if options.top_k is None:
        return tokens
    return tokens._replace(top_values=room(wide, options.top_k), top_indices=room(torch.int64, options.top_k))


class Gradients:
    """dx, dweight and dbias, put together shard by shard; sums in float32 (float64 for float64).

    dx has the dtype of x; the sums are the returned gradients themselves where the weight has that dtype.
    """

    def __init__(self, rows: Rows, head: Head, needs: Needs) -> None:
        self.head = head
        w = head.weight
        self.dx = rows.room() if needs.x else None
        self.rows = None if self.dx is None else rows.written(self.dx, self.dx.dtype)
        self.summed = head.ranks if rows.here else None  # over whom dx is still to be summed once it is written
        self.into: Tensor | None = None  # rows of dx that the present shard of tokens writes
        wide = wide_dtype(w.dtype)
        self.dweight = torch.empty(w.shape, dtype=wide, device=w.device) if needs.weight else None
        self.dbias = torch.empty(w.shape[0], dtype=wide, device=w.device) if needs.bias else None
        self.sums = [
            [None if a is None else GradientSum.into(a[head.own(part)]) for a in (self.dweight, self.dbias)]
            for part in head.parts
        ]
        # With vocabulary shards a 16-bit dx is summed in float32, one shard of tokens at a time: [t, H].
        self.dx_sum: Tensor | None = None

    def add(self, x: Tensor, dlogits: Tensor, number: int, shard: int) -> None:
        """Add one vocabulary shard of one shard of tokens. x: [t, H]; dlogits: [t, v] of part `number`."""
        weight_sum, bias_sum = self.sums[number]
        if self.rows is not None:
            if number == 0:
                self.into = self.rows.start(shard)
            self._add_dx(dlogits, number)
            if number == len(self.head.parts) - 1:
                self.into = None
                self.rows.done()
        if weight_sum is not None:
            weight_sum.add_product(dlogits, x)
        if bias_sum is not None:
            bias_sum.add_rows(dlogits)

    def _add_dx(self, dlogits: Tensor, number: int) -> None:
        w, into = self.head.weight[self.head.own(self.head.parts[number])], self.into
        assert into is not None
        last = len(self.head.parts) - 1
        if last and into.dtype != wide_dtype(into.dtype):
            if number == 0:
                self.dx_sum = torch.zeros_like(into, dtype=wide_dtype(into.dtype))
            assert self.dx_sum is not None
            self.dx_sum += dlogits @ w
            if number == last:
                into.copy_(self.dx_sum)
                self.dx_sum = None
        elif number == 0 and into.dtype == w.dtype:
            torch.mm(dlogits, w, out=into)
        elif number == 0:
            into.copy_(dlogits @ w)
        elif into.dtype == w.dtype:
            into.addmm_(dlogits, w)
        else:
            into += dlogits @ w

    def finish(self) -> "Gradients":
        """Zeros where no shard wrote; dx summed over the holders of the vocabulary."""
        for one in (one for pair in self.sums for one in pair if one is not None):
            one.finish()
        if self.rows is not None:
            self.rows.finish()
        if self.dx is not None and self.summed is not None:
            self.summed.sum_(self.dx)
        return self


def losses(rows: Rows, head: Head, labels: Labels) -> Tokens:
    """Return results per token, without gradients: 2 THV FLOP. x in any dtype that the head's converts from."""
    tokens, buffer = empty_tokens(rows, head.rules), head.buffer(rows.plan)
    for _, place, x in rows.shards(head.weight.dtype):
        of_shard = labels[place]
        tokens[place].write(head.rules, of_shard, *_statistics(x, head, of_shard, buffer, keep=False))
        del x  # may be a copy: before the next one is made
    return tokens


def losses_and_gradients(rows: Rows, head: Head, labels: Labels, needs: Needs) -> tuple[Tokens, Gradients, Tensor]:
    """Return results per token, the gradients of the sum of the losses, and the number that still multiplies these.

    6 THV FLOP, 8 with vocabulary shards. The number is a power of two by which weights and logit_scale are divided, so that
    dlogits keep their precision in float16.
    """
    rules, tokens, buffer = head.rules, empty_tokens(rows, head.rules), head.buffer(rows.plan)
    size, sized = labels.weight.new_ones(()), labels.scaled  # near 1 already, but for weights and a scale
    if sized is not labels or labels.class_weight is not None or abs(rules.options.logit_scale) != 1.0:
        size = loss_math.size_of_losses(rules, sized)
        sized = sized.over(size)
    gradients = Gradients(rows, head, needs)
    kept = len(head.parts) == 1
    for shard, place, x in rows.shards(head.weight.dtype):
        of_shard, of_sized = labels[place], sized[place]
        if kept and head.ranks is None:
            logits = head.logits(x, head.parts[0], buffer)
            rankings = head.rankings(logits, head.parts[0])
            found = head.steps.statistics_and_gradient_(rules, logits, head.parts[0], of_sized)
            tokens[place].write(head.rules, of_shard, found, rankings)
            gradients.add(x, logits, 0, shard)
        else:
            found, rankings = _statistics(x, head, of_shard, buffer, keep=kept)
            tokens[place].write(head.rules, of_shard, found, rankings)
            of_rows = found.lse, loss_math.loss_coefficients(rules, of_sized, found.lse), None
            _add_gradients(x, head, of_sized, buffer, of_rows, gradients, shard, kept=kept)
        del x
    return tokens, gradients.finish(), size


def gradients_of(
    rows: Rows,
    head: Head,
    labels: Labels,
    needs: Needs,
    saved: tuple[Tensor, Tensor | None],
    k: Coefficients,
) -> tuple[Gradients, Tensor]:
    """Return gradients for coefficients per token [T], and the factor that still multiplies them; logits are computed again.

    The coefficients are divided by the size of the largest finite one, so that dlogits keep their precision in float16 and a
    token whose upstream gradient is not finite spoils its own row of dx only.
    """
    buffer = head.buffer(rows.plan)
    gradients = Gradients(rows, head, needs)
    scale = loss_math.size_of_gradients(head.rules, labels, k)
    k = Coefficients(*(None if part is None else part / scale for part in k))  # type: ignore[arg-type]
    lse, entropy = saved
    for shard, place, x in rows.shards(head.weight.dtype):
        of_rows = lse[place], k[place], None if entropy is None else entropy[place]
        _add_gradients(x, head, labels[place], buffer, of_rows, gradients, shard, kept=False)
        del x
    return gradients.finish(), scale


def _statistics(
    x: Tensor, head: Head, labels: Labels, buffer: Tensor, *, keep: bool
) -> tuple[Statistics, list[Ranking]]:
    """Return one shard's statistics and best entries over the whole vocabulary; with `keep` the buffer holds the logits
    afterwards.
    """
    found: Statistics | None = None
    rankings: list[Ranking] = []
    for part in head.parts:  # never none
        logits = head.logits(x, part, buffer)
        best = head.rankings(logits, part)
        of_part = head.steps.statistics(head.rules, logits, part, labels, keep=keep)
        rankings = best if found is None else [a.merge(b) for a, b in zip(rankings, best, strict=True)]
        found = of_part if found is None else found.merge(of_part)
    assert found is not None
    if head.ranks is None:
        return found, rankings
    top = head.ranks.maximum_(found.top.clone())
    found = found.above(top, list(head.ranks.sum_(torch.stack(found.below(top)))))
    return found, [ranking.over_ranks(head.ranks.gather) for ranking in rankings]


def _add_gradients(
    x: Tensor,
    head: Head,
    labels: Labels,
    buffer: Tensor,
    of_rows: tuple[Tensor, Coefficients, Tensor | None],
    gradients: Gradients,
    shard: int,
    *,
    kept: bool,
) -> None:
    """Add one shard of tokens. of_rows: its lse, coefficients and entropy; with `kept` its logits are in the buffer."""
    for number, part in enumerate(head.parts):
        logits = head.in_buffer(x, part, buffer) if kept else head.logits(x, part, buffer)
        head.steps.gradient_(head.rules, logits, part, labels, *of_rows)
        gradients.add(x, logits, number, shard)


def scaled(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * scale (0-d, wide), over the gradient itself where it has `dtype`.

    The product is float32, rounded once; a few rows at a time where they must be widened.
    """
    wide = wide_dtype(gradient.dtype)
    if gradient.dtype == wide:
        return gradient.mul_(scale).to(dtype)
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    if gradient.dim() == 1:
        return out.copy_(gradient.to(wide).mul_(scale))
    for rows in loss_math.row_slices(gradient):
        out[rows] = gradient[rows].to(wide).mul_(scale)
    return out
