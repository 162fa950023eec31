"""Liger Kernel's fused linear cross entropy by its own names and conventions, over `tiled_linear_cross_entropy`."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared_specs.config import LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from shared_specs.loss import checks as loss_checks
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.loss.api import tiled_linear_cross_entropy
from tiled_torch.tile.api import tile

_NAME = "liger_fused_linear_cross_entropy"


@dataclass
class CrossEntropyOutput:
    """The loss and what else was asked for; None where it was not."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LigerOptions:
    """The arguments of Liger Kernel's loss that are no operands."""

    ce_weight: Tensor | None = None
    ignore_index: int = -100
    lse_square_scale: float = 0.0
    label_smoothing: float = 0.0
    reduction: str = "mean"
    softcap: float | None = None
    return_z_loss: bool = False
    accum_dtype: torch.dtype | None = None
    use_token_scaling: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    chunk_mem_const: int = 1

    def check(self, function: str) -> LossOptions:
        """Return the options of the loss that do not depend on the targets.

        Raises:
            SpecError, TypeError: a value out of its range or of the wrong kind.
        """
        for field in fields(self):
            if field.type is bool:
                checks.check_flags(function, **{field.name: getattr(self, field.name)})
        if self.accum_dtype is not None and not isinstance(self.accum_dtype, torch.dtype):
            fail_type(function, "accum_dtype", "a torch.dtype or None", type(self.accum_dtype).__name__)
        if self.chunk_mem_const is None:
            fail_type(function, "chunk_mem_const", "an integer", "None")
        checks.check_count(function, "chunk_mem_const", self.chunk_mem_const)
        options = LossOptions(
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.lse_square_scale,
            logit_softcap=self.softcap,
            reduction=self.reduction,  # type: ignore[arg-type]
        )
        loss_checks.check_loss_options(function, options)
        return options


class _LossOperands(NamedTuple):
    """Operands of one call. x: [T, H]; weight: [V, H]; targets: [T]; bias: [V] or None."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None


def _loss(function: str, given: _LossOperands, liger: LigerOptions) -> CrossEntropyOutput:
    """Return the loss with everything that was asked for."""
    options = liger.check(function)
    for name, tensor in zip(("input", "weight", "target"), given, strict=False):
        if not isinstance(tensor, Tensor):
            fail_type(function, name, "an array", type(tensor).__name__)
    _check_sums(function, liger.accum_dtype, given.weight.dtype)
    valid = given.targets != liger.ignore_index
    count = valid.sum()
    scaled = liger.use_token_scaling
    predicted = (
        _predicted(given, valid, liger) if liger.return_predicted_tokens or liger.return_token_accuracy else None
    )
    outputs = (*(("log_probs",) if scaled else ()), *(("lse",) if liger.return_z_loss else ()))
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    values |= {"class_weight": _class_weight(given, valid, count, liger), "outputs": outputs}
    values |= {"reduction": "none"} if scaled else {}
    result = tiled_linear_cross_entropy(
        given.x, given.weight, given.targets, bias=given.bias, loss=LossOptions(**values), tiling=_tiling(given, liger)
    )
    if isinstance(result, Tensor):
        return CrossEntropyOutput(result, None, *_measures(liger, predicted, given.targets, valid, count))
    factor = result.log_probs.detach().exp() if scaled else 1.0
    loss = _reduced(result.loss * factor, liger.reduction, count) if scaled else result.loss
    z_loss = None
    if liger.return_z_loss:
        z = torch.where(valid, liger.lse_square_scale * result.lse.detach().square(), 0.0)
        z_loss = _reduced(z * factor, liger.reduction, count)
    return CrossEntropyOutput(loss, z_loss, *_measures(liger, predicted, given.targets, valid, count))


def _class_weight(given: _LossOperands, valid: Tensor, count: Tensor, liger: LigerOptions) -> Tensor | None:
    """Return class weights that sum to the number of valid targets over these: a mean is the same, and its z-loss the one of
    Liger Kernel, which divides that by the number of tokens.
    """
    weight = liger.ce_weight
    if not isinstance(weight, Tensor) or liger.reduction != "mean" or weight.dim() != 1:
        return weight
    weight = weight.to(given.x.device, wide_dtype(given.x.dtype))
    known = (valid & (given.targets >= 0) & (given.targets < weight.shape[0])).to(weight.dtype)
    total = (weight[given.targets.clamp(0, weight.shape[0] - 1)] * known).sum()
    return torch.where(count == 0, weight, weight * (count / total))


def _reduced(values: Tensor, reduction: str, count: Tensor) -> Tensor:
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / count.clamp(min=1)


def _measures(
    liger: LigerOptions, predicted: Tensor | None, targets: Tensor, valid: Tensor, count: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the token accuracy, a mean also where the loss is a sum, and the predicted tokens."""
    if predicted is None:
        return None, None
    right = ((predicted == targets) & valid).float()
    accuracy = right if liger.reduction == "none" else right.sum() / count
    return accuracy if liger.return_token_accuracy else None, predicted if liger.return_predicted_tokens else None


@torch.no_grad()
def _predicted(given: _LossOperands, valid: Tensor, liger: LigerOptions) -> Tensor:
    """Return the entry with the largest logit of each token, -1 where ignored: one more product of the head, by shards."""
    tiling = _tiling(given, liger)
    x, weight, bias = (None if a is None else a.detach() for a in (given.x, given.weight, given.bias))
    assert x is not None
    assert weight is not None
    found = tile(lambda rows: F.linear(rows, weight, bias).argmax(-1), tiling=tiling)(x)
    return torch.where(valid, found, -1)


def _tiling(given: _LossOperands, liger: LigerOptions) -> Tiling | None:
    """Return None where the plan chooses; with a chunk_mem_const, as many tokens as Liger Kernel takes at a time."""
    if liger.chunk_mem_const == 1 or given.x.dim() != 2 or not given.x.numel():
        return None
    (tokens, hidden), vocab = given.x.shape, given.weight.shape[0]
    chunks = -(-vocab // (liger.chunk_mem_const * hidden))
    return Tiling(shard_tokens=min(tokens, 1 << (-(-tokens // max(1, chunks)) - 1).bit_length()))


def _check_sums(function: str, wanted: torch.dtype | None, dtype: torch.dtype) -> None:
    if wanted is None:
        return
    wide = wide_dtype(dtype)
    if not wanted.is_floating_point or torch.promote_types(wanted, wide) != wide:
        advice = "Sums over tokens are made in it whatever accum_dtype says."
        fail(function, "accum_dtype", f"None or a float dtype up to {wide}", wanted, advice=advice)


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Tensor | CrossEntropyOutput:
    """Return the cross entropy of a language-model head by Liger Kernel's name, arguments and conventions.

    Args:
        input: [T, H] hidden states. weight: [V, H]. target: [T], int64. bias: [V] or None.
        ce_weight: [V] class weights, as `weight` of torch.nn.functional.cross_entropy.
        lse_square_scale: z-loss; "mean" divides it by the number of valid tokens, whatever their class weights.
        softcap: > 0 or None. label_smoothing, ignore_index, reduction: as torch's.
        return_z_loss: also its part of the loss, without a gradient.
        accum_dtype: None, or up to float32 (float64 for float64), in which sums over tokens are made in any case.
        use_token_scaling: multiply each token's loss by the detached probability of its target.
        return_token_accuracy: also the mean of right predictions over valid tokens ([T] with reduction "none").
        return_predicted_tokens: also [T], int64: the entry of the largest logit, -1 where the target is ignored.
        chunk_mem_const: 1 lets the plan choose; above, shards are of as many tokens as Liger Kernel's chunks.
    Returns:
        The loss, float32 (float64 for float64); a `CrossEntropyOutput` where something else is asked for.
    Numerics, Memory: as `tiled_linear_cross_entropy`. Where tokens are predicted the head's product is made once more; a z-loss
        that is returned and token scaling make backward compute the logits again.
    Raises:
        SpecError, TypeError: as `tiled_linear_cross_entropy`.
    Source: named and called as Liger Kernel's (transformers/functional.py).
    Example:
        >>> import torch
        >>> x, weight, target = torch.zeros(5, 8), torch.zeros(4, 8), torch.ones(5, dtype=torch.long)
        >>> liger_fused_linear_cross_entropy(x, weight, target)  # log 4
        tensor(1.3863)
    """
    liger = LigerOptions(
        ce_weight=ce_weight,
        ignore_index=ignore_index,
        lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        return_z_loss=return_z_loss,
        accum_dtype=accum_dtype,
        use_token_scaling=use_token_scaling,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        chunk_mem_const=chunk_mem_const,
    )
    return _as_asked(_loss(_NAME, _LossOperands(input, weight, target, bias), liger), liger)


def _as_asked(found: CrossEntropyOutput, liger: LigerOptions) -> Tensor | CrossEntropyOutput:
    asked = liger.return_z_loss or liger.return_token_accuracy or liger.return_predicted_tokens
    return found if asked else found.loss


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """`liger_fused_linear_cross_entropy` as a module without parameters, called with the head's weight first.

    Args, Numerics, Memory, Raises, Source: as `liger_fused_linear_cross_entropy`; options are checked at construction.
    Example:
        >>> import torch
        >>> loss = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)
        >>> loss(torch.zeros(4, 8), torch.zeros(5, 8), torch.zeros(5, dtype=torch.long)).token_accuracy
        tensor(1.)
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.ce_weight, self.ignore_index, self.lse_square_scale = ce_weight, ignore_index, lse_square_scale
        self.label_smoothing, self.reduction, self.softcap = label_smoothing, reduction, softcap
        self.return_z_loss, self.accum_dtype, self.use_token_scaling = return_z_loss, accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens
        self._options().check(type(self).__name__)

    def _options(self) -> LigerOptions:
        names = (field.name for field in fields(LigerOptions) if field.name != "chunk_mem_const")
        return LigerOptions(**{name: getattr(self, name) for name in names})

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        """lin_weight [V, H], _input [T, H], target [T], bias [V]: the loss, or what was asked for."""
        liger = self._options()
        return _as_asked(_loss(type(self).__name__, _LossOperands(_input, lin_weight, target, bias), liger), liger)


class LigerFusedLinearCrossEntropyFunction:
    """The `apply` of Liger Kernel's autograd function: (loss, z_loss, token_accuracy, predicted_tokens)."""

    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *options: Any
    ) -> tuple[Tensor | None, ...]:
        """Return all four results, None where one was not asked for.

        options: in the order of `liger_fused_linear_cross_entropy`, with ce_impl and ce_mode, which are None here, before
        chunk_mem_const.
        """
        name = "LigerFusedLinearCrossEntropyFunction.apply"
        names = [field.name for field in fields(LigerOptions)]
        names[-1:] = ["ce_impl", "ce_mode", names[-1]]
        given = dict(zip(names, options, strict=False))
        for choice in ("ce_impl", "ce_mode"):
            if given.pop(choice, None) is not None:
                fail(
                    name, choice, "None", repr(options[names.index(choice)]), advice="There is one implementation here."
                )
        found = _loss(name, _LossOperands(_input, weight, target, bias), LigerOptions(**given))
        return found.loss, found.z_loss, found.token_accuracy, found.predicted_tokens
