"""Elementwise work of the cross entropy on a few rows of logits at a time. No loops over shards, no autograd.

Letters: r rows (tokens), v entries of one part of the vocabulary, V the whole vocabulary; z, lse, nll, p, ω, A, B, C, D as
in `shared_specs/README.md`. Work is float32 (float64 for
float64): in place where the logits have that dtype, else on a widened copy of these rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from shared_specs.loss.costs import LOSS_ELEMENTS
from tiled_torch.core.tensors import device_kind, wide_dtype

# Where z - lse or z - max is below it exp is 0 in float64 too. It stands for -inf, whose product with that 0 is NaN.
LEAST_LOG = -1000.0


@dataclass(frozen=True)
class Rules:
    """All that is static about the loss of a token: the options without their arrays, and V."""

    options: LossOptions
    vocab: int

    @property
    def smooth(self) -> bool:
        """Return whether Σ ω z is needed, for label smoothing."""
        return bool(self.options.label_smoothing)

    @property
    def entropy(self) -> bool:
        """Return whether the entropy is asked for."""
        return "entropy" in self.options.outputs

    @property
    def ranked(self) -> tuple[int, ...]:
        """Return how many of the best entries are asked for: 1 for a prediction, top_k for their log-probabilities."""
        outputs, top_k = self.options.outputs, self.options.top_k
        return (1,) * ("prediction" in outputs) + ((top_k,) if top_k and "top_logprobs" in outputs else ())


def row_slices(logits: Tensor, share: int = 1) -> Iterator[slice]:
    """Yield slices of the rows with about LOSS_ELEMENTS / share logits each."""
    elements = LOSS_ELEMENTS[device_kind(logits.device)] // share
    step = max(1, elements // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, min(start + step, logits.shape[0]))


@dataclass(frozen=True)
class Labels:
    """The labels of each token, [T] each, and the weights of the vocabulary.

    Args:
        target: the entry, 0 where there is none. counted: 1, 0 where ignored, NaN where the target does not exist.
        weight: class weight of the target, times counted.
        class_weight: [V] or None. total_weight: its sum, or V.
        token_weight: what the loss of each token is multiplied by, [T] or None for ones.
    """

    target: Tensor
    counted: Tensor
    weight: Tensor
    class_weight: Tensor | None
    total_weight: Tensor | float
    token_weight: Tensor | None = None

    def __getitem__(self, rows: slice | Tensor) -> "Labels":
        parts = self.target[rows], self.counted[rows], self.weight[rows]
        token_weight = None if self.token_weight is None else self.token_weight[rows]
        return Labels(*parts, self.class_weight, self.total_weight, token_weight)

    @property
    def scaled(self) -> "Labels":
        """Return the labels of losses times their tokens' weights: losses are linear in `counted` and `weight`."""
        if self.token_weight is None:
            return self
        factor = torch.where(self.counted == 0, 0.0, self.token_weight)
        return replace(self, counted=self.counted * factor, weight=self.weight * factor, token_weight=None)

    def over(self, size: Tensor) -> "Labels":
        """Return the labels of losses divided by a number."""
        return replace(self, counted=self.counted / size, weight=self.weight / size)


def make_labels(
    rules: Rules,
    targets: Tensor,
    class_weight: Tensor | None,
    wide: torch.dtype,
    token_weight: Tensor | None = None,
) -> Labels:
    """Return the labels of targets [T], class weights [V] given whole, token weights [T]."""
    valid = targets != rules.options.ignore_index
    exists = (targets >= 0) & (targets < rules.vocab)
    target = torch.where(valid & exists, targets, 0).long()
    counted = torch.where(valid & ~exists, torch.nan, valid.to(wide))
    if class_weight is None:
        return Labels(target, counted, counted, None, float(rules.vocab), token_weight)
    class_weight = class_weight.to(wide)
    return Labels(target, counted, counted * class_weight[target], class_weight, class_weight.sum(), token_weight)


def first_missing_target(targets: Tensor, vocab: int, ignore_index: int) -> int | None:
    """Return the first target that is neither an entry of the vocabulary nor ignored; reads the device."""
    missing = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    return int(targets[missing][0]) if bool(missing.any()) else None


class Part(NamedTuple):
    """A run of the vocabulary, which some logits are for: the entries [start, stop) of V."""

    start: int
    stop: int

    @property
    def entries(self) -> int:
        return self.stop - self.start

    def local(self, labels: Labels) -> tuple[Tensor, Tensor]:
        """Return the target's column, 0 where it is not among these, and 1 where it is: [r, 1] and [r]."""
        inside = (labels.target >= self.start) & (labels.target < self.stop)
        return torch.where(inside, labels.target - self.start, 0)[:, None], inside.to(labels.counted.dtype)

    def weights(self, labels: Labels) -> Tensor | None:
        return None if labels.class_weight is None else labels.class_weight[self.start : self.stop]


class Statistics(NamedTuple):
    """Sums over the logits z of a part of the vocabulary, all [r]; two parts make one (`merge`)."""

    top: Tensor  # the largest z
    total: Tensor  # Σ exp(z - top)
    target: Tensor  # z of the target, 0 where another part has it
    weighted: Tensor | None  # Σ ω z, for smoothing
    moment: Tensor | None  # Σ exp(z - top) (z - top), for the entropy

    def below(self, top: Tensor) -> list[Tensor]:
        """Return the sums as they are relative to a larger maximum: those that add up over parts of the vocabulary."""
        distance = self.top - top
        factor = distance.exp()
        sums = [self.total * factor, self.target]
        sums += [] if self.weighted is None else [self.weighted]
        if self.moment is not None:
            sums.append(factor * (self.moment + distance.nan_to_num(neginf=0.0) * self.total))
        return sums

    def above(self, top: Tensor, sums: list[Tensor]) -> "Statistics":
        """Return statistics of the union, from its maximum and the added sums."""
        total, target, *rest = sums
        weighted = rest.pop(0) if self.weighted is not None else None
        return Statistics(top, total, target, weighted, rest.pop(0) if self.moment is not None else None)

    def merge(self, other: "Statistics") -> "Statistics":
        """Return statistics of the logits of both."""
        top = torch.maximum(self.top, other.top)
        return self.above(top, [a + b for a, b in zip(self.below(top), other.below(top), strict=True)])

    @property
    def lse(self) -> Tensor:
        return self.top + self.total.log()

    @property
    def nll(self) -> Tensor:
        """-log p of the target, without the rounding of lse where logits are large."""
        return self.total.log() - (self.target - self.top)

    @property
    def entropy(self) -> Tensor | None:
        return None if self.moment is None else self.total.log() - self.moment / self.total

    @property
    def right(self) -> Tensor:
        """1 where the target's logit is the maximum."""
        return (self.target == self.top).to(self.top.dtype)


def transform(rules: Rules, logits: Tensor, *, slope: bool, copy: bool = False) -> tuple[Tensor, Tensor | None]:
    """z [r, v] in the wide dtype, over the logits themselves where they have it, and dz/dlogits where it is no number."""
    z, options = logits.to(wide_dtype(logits.dtype), copy=copy), rules.options
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    if options.logit_softcap is None:
        return z, None
    z.div_(options.logit_softcap).tanh_()
    bent = z.square().neg_().add_(1.0).mul_(options.logit_scale) if slope else None
    return z.mul_(options.logit_softcap), bent


def statistics_(rules: Rules, z: Tensor, part: Part, labels: Labels) -> Statistics:
    """Return statistics of z [r, v]; leaves exp(z - max) in it. Of no entries (a rank may have none) they change no union."""
    if not z.shape[1]:
        none, zero = z.new_full((z.shape[0],), -torch.inf), z.new_zeros(z.shape[0])
        return Statistics(none, zero, zero, zero if rules.smooth else None, zero if rules.entropy else None)
    top = z.amax(1)
    column, inside = part.local(labels)
    target = torch.where(inside == 0, 0.0, z.gather(1, column)[:, 0])
    weights = part.weights(labels)
    weighted = None if not rules.smooth else z.sum(1) if weights is None else z @ weights
    z.sub_(top.clamp(min=torch.finfo(top.dtype).min)[:, None])  # -inf where no entry of the part is possible
    if not rules.entropy:
        return Statistics(top, z.exp_().sum(1), target, weighted, None)
    shifted = z.clamp(min=LEAST_LOG)
    total = z.exp_().sum(1)
    return Statistics(top, total, target, weighted, shifted.mul_(z).sum(1))


def token_losses(rules: Rules, labels: Labels, found: Statistics) -> Tensor:
    """Return [r]: the loss of each token, 0 where ignored."""
    options = rules.options
    loss = (1 - options.label_smoothing) * labels.weight * found.nll
    if options.label_smoothing:
        assert found.weighted is not None
        smooth = labels.total_weight * found.lse - found.weighted
        loss = loss + labels.counted * (options.label_smoothing / rules.vocab) * smooth
    if options.z_loss:
        loss = loss + labels.counted * options.z_loss * found.lse.square()
    return torch.where(labels.counted == 0, 0.0, loss)


class Coefficients(NamedTuple):
    """dz = A p - B [target] - C ω - D p (log p + entropy), [r] each; C, D None where they are zero."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor | None = None

    def __getitem__(self, rows: slice | Tensor) -> "Coefficients":  # type: ignore[override]
        return Coefficients(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def loss_coefficients(rules: Rules, labels: Labels, lse: Tensor) -> Coefficients:
    """Return the coefficients of the sum of the losses: for an upstream gradient of 1 on every token's."""
    options = rules.options
    b = labels.weight if not options.label_smoothing else (1 - options.label_smoothing) * labels.weight
    a, c = b, None
    if options.label_smoothing:
        c = labels.counted * (options.label_smoothing / rules.vocab)
        a = a + c * labels.total_weight
    if options.z_loss:
        a = a + (2 * options.z_loss) * labels.counted * lse
    return Coefficients(a, b, c)


def power_of_two(sizes: Tensor, factor: float = 1.0) -> Tensor:
    """Return []: a power of two near the largest finite one of `sizes` >= 0, times |factor|; near 1 where there is none.

    Dividing gradients by it and multiplying by it later rounds nothing, and what is stored in between is near 1.
    """
    largest = torch.where(sizes.isfinite(), sizes, 0.0).amax() if sizes.numel() else sizes.new_zeros(())
    range_of = torch.finfo(largest.dtype)
    largest = torch.where(largest == 0, 1.0, largest * (abs(factor) or 1.0)).clamp(range_of.tiny, range_of.max)
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)


def size_of_losses(rules: Rules, labels: Labels) -> Tensor:
    """Return []: how large the gradients of the sum of the losses in the logits are, but for what z_loss adds; a power of
    two.
    """
    without_lse = replace(rules, options=replace(rules.options, z_loss=0.0))
    return size_of_gradients(rules, labels, loss_coefficients(without_lse, labels, labels.weight))


def size_of_gradients(rules: Rules, labels: Labels, k: Coefficients) -> Tensor:
    """Return []: how large the gradients in the logits are that have these coefficients; a power of two."""
    c = k.c if k.c is None or labels.class_weight is None else k.c * labels.class_weight.abs().amax()
    parts = [part.abs() for part in (k.a, k.b, c, k.d) if part is not None]
    return power_of_two(torch.stack(parts), rules.options.logit_scale)


def pull_back_(
    rules: Rules, p: Tensor, part: Part, labels: Labels, factor: Tensor, k: Coefficients, slope: Tensor | None
) -> Tensor:
    """dlogits over p [r, v]: factor p - B [target] - C ω, times the slope. factor: [r], or [r, v] with entropy."""
    if not p.shape[1]:
        return p
    p.mul_(factor if factor.dim() == 2 else factor[:, None])
    column, inside = part.local(labels)
    p.scatter_(1, column, p.gather(1, column) - (k.b * inside)[:, None])
    if k.c is not None:
        weights = part.weights(labels)
        if weights is None:
            p.sub_(k.c[:, None])
        else:
            p.addr_(k.c, weights, alpha=-1)
    if slope is not None:
        return p.mul_(slope)
    scale = rules.options.logit_scale
    return p if scale == 1.0 else p.mul_(scale)


def statistics_and_gradient_(rules: Rules, logits: Tensor, part: Part, labels: Labels) -> Statistics:
    """Return statistics of whole rows of logits [r, V], which become dlogits for an upstream gradient of 1 per token."""
    z, slope = transform(rules, logits, slope=True)
    found = statistics_(rules, z, part, labels)
    k = loss_coefficients(rules, labels, found.lse)
    pull_back_(rules, z, part, labels, k.a / found.total, k, slope)
    if z is not logits:
        logits.copy_(z)
    return found


def gradient_(
    rules: Rules, logits: Tensor, part: Part, labels: Labels, lse: Tensor, k: Coefficients, entropy: Tensor | None
) -> None:
    """Logits [r, v] become dlogits, from the log-sum-exp (and entropy) of the whole vocabulary."""
    z, slope = transform(rules, logits, slope=True)
    z.sub_(lse[:, None])
    factor = k.a
    if k.d is not None and entropy is not None:  # p log p is 0 where p is
        factor = z.clamp(min=LEAST_LOG).add_(entropy[:, None]).mul_(-k.d[:, None]).add_(k.a[:, None])
    p = z.exp_()
    pull_back_(rules, p, part, labels, factor, k, slope)
    if p is not logits:
        logits.copy_(p)
