"""Elementwise work of the cross entropy on a few rows of logits at a time. No loops over shards, no autograd.

Letters: r rows (tokens), v columns (entries of one vocabulary shard), V the whole vocabulary. Work is float32 (float64 for
float64): in place where the logits have that dtype, else on a widened copy of the block. Formulas: shared_specs/README.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from shared_specs.loss.costs import LOSS_ELEMENTS
from tiled_torch.core.tensors import device_kind, wide_dtype


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows with about LOSS_ELEMENTS logits each."""
    elements = LOSS_ELEMENTS[device_kind(logits.device)]
    step = max(1, elements // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, min(start + step, logits.shape[0]))


@dataclass(frozen=True)
class Labels:
    """The labels of each token, [T] each, and the weights of the vocabulary.

    Args:
        index: the target, 0 where there is none. counted: 1, 0 where ignored, NaN where the target does not exist.
        weight: class weight of the target, times counted.
        class_weight: [V] or None. total_weight: its sum, or V.
    """

    index: Tensor
    counted: Tensor
    weight: Tensor
    class_weight: Tensor | None
    total_weight: Tensor | float

    def __getitem__(self, rows: slice) -> "Labels":
        parts = self.index[rows], self.counted[rows], self.weight[rows]
        return Labels(*parts, self.class_weight, self.total_weight)

    def over(self, size: Tensor) -> "Labels":
        """Return the same for losses divided by a number: their coefficients are linear in `counted` and `weight`."""
        return Labels(self.index, self.counted / size, self.weight / size, self.class_weight, self.total_weight)


def labels_of(targets: Tensor, vocab: int, class_weight: Tensor | None, ignore_index: int, wide: torch.dtype) -> Labels:
    """targets: [T] integers."""
    valid = targets != ignore_index
    exists = (targets >= 0) & (targets < vocab)
    index = torch.where(valid & exists, targets, 0).long()
    counted = torch.where(valid & ~exists, torch.nan, valid.to(wide))
    if class_weight is None:
        return Labels(index, counted, counted, None, float(vocab))
    class_weight = class_weight.to(wide)
    return Labels(index, counted, counted * class_weight[index], class_weight, class_weight.sum())


def first_missing_target(targets: Tensor, vocab: int, ignore_index: int) -> int | None:
    """Return the first target that is neither an entry of the vocabulary nor ignored; reads the device."""
    missing = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    return int(targets[missing][0]) if bool(missing.any()) else None


class Columns(NamedTuple):
    """Which entries of the vocabulary some logits are for: [start, stop) of V."""

    start: int
    stop: int

    def local(self, labels: Labels) -> tuple[Tensor, Tensor]:
        """Return the target's column, 0 where it is not among these, and 1 where it is: [r, 1] and [r]."""
        inside = (labels.index >= self.start) & (labels.index < self.stop)
        return torch.where(inside, labels.index - self.start, 0)[:, None], inside.to(labels.counted.dtype)

    def weights(self, labels: Labels) -> Tensor | None:
        return None if labels.class_weight is None else labels.class_weight[self.start : self.stop]


class Statistics(NamedTuple):
    """Sums over logits z, [r] each: their maximum m, Σ exp(z - m), z of the target (0 where it is elsewhere)
    and, where asked for, Σ ω z and Σ exp(z - m) (z - m)."""

    top: Tensor
    total: Tensor
    target: Tensor
    weighted: Tensor | None
    moment: Tensor | None

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


def transformed(
    logits: Tensor, options: LossOptions, *, slope: bool, copy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """z [r, v] in the wide dtype, over the logits themselves where they have it, and dz/dlogits where it is no number."""
    z = logits.to(wide_dtype(logits.dtype), copy=copy)
    if options.logit_scale != 1.0:
        z.mul_(options.logit_scale)
    if options.logit_softcap is None:
        return z, None
    z.div_(options.logit_softcap).tanh_()
    bent = z.square().neg_().add_(1.0).mul_(options.logit_scale) if slope else None
    return z.mul_(options.logit_softcap), bent


def exponentials_(z: Tensor, labels: Labels, columns: Columns, *, weighted: bool, moment: bool) -> Statistics:
    """Return statistics of z [r, v]; leaves exp(z - max) in it. Of no entries (a rank may have none) they change no union."""
    if not z.shape[1]:
        none, zero = z.new_full((z.shape[0],), -torch.inf), z.new_zeros(z.shape[0])
        return Statistics(none, zero, zero, zero if weighted else None, zero if moment else None)
    top = z.amax(1)
    column, inside = columns.local(labels)
    target = z.gather(1, column)[:, 0] * inside
    weights = columns.weights(labels)
    sum_weighted = None if not weighted else z.sum(1) if weights is None else z @ weights
    z.sub_(top[:, None])
    if not moment:
        return Statistics(top, z.exp_().sum(1), target, sum_weighted, None)
    shifted = z.clone()
    total = z.exp_().sum(1)
    return Statistics(top, total, target, sum_weighted, shifted.mul_(z).sum(1))


def token_losses(found: Statistics, labels: Labels, options: LossOptions, vocab: int) -> Tensor:
    """Return [r]: the loss of each token, 0 where ignored."""
    loss = (1 - options.label_smoothing) * labels.weight * found.nll
    if options.label_smoothing:
        assert found.weighted is not None
        smooth = labels.total_weight * found.lse - found.weighted
        loss = loss + labels.counted * (options.label_smoothing / vocab) * smooth
    if options.z_loss:
        loss = loss + labels.counted * options.z_loss * found.lse.square()
    return torch.where(labels.counted == 0, 0.0, loss)


class Coefficients(NamedTuple):
    """dz = A p - B [target] - C ω - D p (log p + entropy), [r] each; C, D None where they are zero."""

    a: Tensor
    b: Tensor
    c: Tensor | None
    d: Tensor | None = None

    def __getitem__(self, rows: slice) -> "Coefficients":  # type: ignore[override]
        return Coefficients(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]


def loss_coefficients(lse: Tensor, labels: Labels, options: LossOptions, vocab: int) -> Coefficients:
    """For an upstream gradient of 1 on every token's loss."""
    b = labels.weight if not options.label_smoothing else (1 - options.label_smoothing) * labels.weight
    a, c = b, None
    if options.label_smoothing:
        c = labels.counted * (options.label_smoothing / vocab)
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


def size_of_losses(labels: Labels, options: LossOptions, vocab: int) -> Tensor:
    """Return []: how large the gradients of the sum of the losses in the logits are, but for what z_loss adds; a power of
    two.
    """
    k = loss_coefficients(labels.weight, labels, replace(options, z_loss=0.0), vocab)  # no log-sum-exp has a part in it
    return size_of_gradients(k, labels, options)


def size_of_gradients(k: Coefficients, labels: Labels, options: LossOptions) -> Tensor:
    """Return []: how large the gradients in the logits are that have these coefficients; a power of two."""
    share = k.c if k.c is None or labels.class_weight is None else k.c * labels.class_weight.abs().amax()
    parts = [part.abs() for part in (k.a, k.b, share, k.d) if part is not None]
    return power_of_two(torch.stack(parts), options.logit_scale)


def pull_back_(
    p: Tensor, factor: Tensor, k: Coefficients, labels: Labels, columns: Columns, scale: float, slope: Tensor | None
) -> Tensor:
    """dlogits over p [r, v]: factor p - B [target] - C ω, through scale or slope. factor: [r], or [r, v] with entropy."""
    if not p.shape[1]:
        return p
    p.mul_(factor if factor.dim() == 2 else factor[:, None])
    column, inside = columns.local(labels)
    p.scatter_(1, column, p.gather(1, column) - (k.b * inside)[:, None])
    if k.c is not None:
        weights = columns.weights(labels)
        if weights is None:
            p.sub_(k.c[:, None])
        else:
            p.addr_(k.c, weights, alpha=-1)
    if slope is not None:
        return p.mul_(slope)
    return p if scale == 1.0 else p.mul_(scale)


def fused_gradient_(logits: Tensor, labels: Labels, columns: Columns, options: LossOptions, vocab: int) -> Statistics:
    """Return statistics of whole rows of logits [r, V], which become dlogits for an upstream gradient of 1 per token."""
    z, slope = transformed(logits, options, slope=True)
    found = exponentials_(z, labels, columns, weighted=bool(options.label_smoothing), moment=False)
    k = loss_coefficients(found.lse, labels, options, vocab)
    pull_back_(z, k.a / found.total, k, labels, columns, options.logit_scale, slope)
    if z is not logits:
        logits.copy_(z)
    return found


def gradient_(
    logits: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    k: Coefficients,
    labels: Labels,
    columns: Columns,
    options: LossOptions,
) -> None:
    """Logits [r, v] become dlogits, from the log-sum-exp (and entropy) of the whole vocabulary."""
    z, slope = transformed(logits, options, slope=True)
    z.sub_(lse[:, None])
    factor = k.a
    if k.d is not None and entropy is not None:  # p log p is 0 where p is
        factor = z.add(entropy[:, None]).mul_(k.d[:, None]).neg_().add_(k.a[:, None])
    p = z.exp_()
    pull_back_(p, factor, k, labels, columns, options.logit_scale, slope)
    if p is not logits:
        logits.copy_(p)
