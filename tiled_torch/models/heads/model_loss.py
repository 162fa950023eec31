"""`tiled_model_loss`: the cross entropy of the logits of any PyTorch model, without its logits."""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel

from shared_specs.config import TORCH, LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, refusal_text, show_shape
from shared_specs.loss import checks as loss_checks
from tiled_torch import backends
from tiled_torch.core.partitioned import is_partitioned
from tiled_torch.models.causal_lm import loss_through
from tiled_torch.models.family import reason_linear_is_not_plain
from tiled_torch.models.heads.model import head_of
from tiled_torch.models.heads.rows import HeadRows, RowLogits
from tiled_torch.models.heads.run import HeadRun
from tiled_torch.models.heads.steps import as_options, bias_of
from tiled_torch.models.heads.swap import as_before, swapped
from tiled_torch.models.mlps.layout import sizes_of

_NAME = "tiled_model_loss"
_RULE = "one whose logits are a product of hidden states and one weight, capped or scaled by numbers"
_ADVICE = "Pass hidden states and the weight to tiled_linear_cross_entropy, or a function to tiled_loss."


def tiled_model_loss(
    model: nn.Module,
    targets: Tensor,
    *args: Any,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
    token_weight: Tensor | None = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> Any:
    """Return the cross entropy of the logits model(*args, **kwargs), one shard of tokens at a time. The logits never exist.

    The model runs with a head that returns its input. The head is the linear layer that the model registers last among its
    own attributes, or its output embeddings (transformers); a module that holds one other is looked through. Behind it there
    may be a frozen bias, a factor, a softcap (c tanh(z / c)), casts and views. The hidden states in front of the head go to
    `tiled_linear_cross_entropy`, inside the model's forward, where an engine has gathered its weights. The rest of the model
    runs as it is. Gradients reach every parameter.

    Args:
        model: a module that returns logits [*tokens, V]; also in DistributedDataParallel or fully_shard.
        targets: [*tokens], int64 | int32: shifted already. Entries of the vocabulary, or loss.ignore_index.
        args, kwargs: what the model is called with.
        loss, num_shards, tiling, backend, token_weight: as in `tiled_linear_cross_entropy`. The model's own softcap and factor
            are taken from it, so that loss.logit_softcap and loss.logit_scale are refused. A head with adapters or hooks is
            called for every shard, with the options of torch.nn.functional.cross_entropy alone.
        has_aux: the model returns (logits, aux), and this function (loss, aux).
    Returns:
        What `tiled_linear_cross_entropy` returns.
    Numerics: as in `tiled_linear_cross_entropy`, of the dtype in which the model's head multiplies.
    Memory: that of the model without its head, and of `tiled_linear_cross_entropy`. If the model itself reads the logits, they
        are made for it.
    Raises:
        UnsupportedError: the logits are made in another way, or the model is compiled (compile its layers instead).
        SpecError: the targets' shape is not that of the logits without their last dim. TypeError: model is no module, or
        returns no tensor.
    Source: `tiled_linear_cross_entropy`.
    Example:
        >>> model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32))
        >>> tokens = torch.arange(10).reshape(2, 5)
        >>> tiled_model_loss(model, tokens[:, 1:], tokens[:, :-1]).shape
        torch.Size([])
    """
    if not isinstance(model, nn.Module):
        fail_type(_NAME, "model", "a torch.nn.Module", type(model).__name__)
    if not isinstance(targets, Tensor):
        fail_type(_NAME, "targets", "a tensor", type(targets).__name__)
    loss_checks.check_model_loss(_NAME, loss, has_aux)
    options = checks.resolve_tiling(_NAME, num_shards, 0.0, tiling, unused=("keep", "deterministic"))
    checks.check_backend(_NAME, backend, TORCH, backends.usable_backends())
    inside = _without_wrappers(model)
    if isinstance(getattr(inside, "_orig_mod", None), nn.Module):
        raise UnsupportedError(refusal_text(_NAME, "model is compiled", advice="Compile its layers instead."))
    name, head = _head_of(inside)
    run = HeadRun(name, head, options, backend, model=model)

    def instead(module: nn.Module, given: Any, found: Any) -> Any:
        logits, aux = _apart(found, has_aux)
        result = _loss(run, logits, targets, loss, token_weight)
        return (result, aux) if has_aux else result

    # An engine's own hook hears of the loss, from which backward begins; those of users hear of what stands for the logits.
    hook = inside.register_forward_hook(instead, prepend=_is_sharded(inside))

    def call() -> Any:
        with swapped(head, run):
            return model(*args, **kwargs)

    try:
        # A graph of whoever compiles the step would make the logits.
        uncompiled: Any = torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call
        return uncompiled()
    finally:
        hook.remove()


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the model whose result replicas hand on as it is; a module of somebody's own may change it."""
    inside: Any = model
    while isinstance(inside, DataParallel | DistributedDataParallel):
        inside = inside.module
    return inside


def _is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` has changed a model, without an import of it."""
    return any(base.__name__ == "FSDPModule" for base in type(model).__mro__)


def _head_of(model: nn.Module) -> tuple[str, nn.Module]:
    inside = model
    while not isinstance(inside, PreTrainedModel):
        own = [(name, child) for name, child in inside.named_children() if sizes_of(child) is not None]
        others = [child for child in inside.children() if next(child.parameters(), None) is not None]
        if own or len(others) != 1:
            break
        inside = others[0]
    found = head_of(inside) if isinstance(inside, PreTrainedModel) else own[-1] if own else None
    if found is None:
        got = f"{type(inside).__name__}, which has no linear layer among its own attributes"
        raise UnsupportedError(error_text(_NAME, "model", "one with a head", got, advice=_ADVICE))
    return found


def _apart(found: Any, has_aux: bool) -> tuple[Tensor, Any]:
    """Return logits and aux."""
    if has_aux and not (isinstance(found, tuple) and len(found) == 2):
        fail_type(_NAME, "model", "a function that returns (logits, aux), with has_aux", type(found).__name__)
    logits, aux = found if has_aux else (found, None)
    if not isinstance(logits, Tensor):
        advice = "" if has_aux else "Pass has_aux=True if it returns (logits, aux)."
        if hasattr(logits, "logits"):
            advice = "tile_model computes the loss of a model of transformers that is called with labels."
        fail_type(_NAME, "model", "a function that returns logits", type(logits).__name__, advice=advice)
    return logits, aux


def _loss(run: HeadRun, logits: Tensor, targets: Tensor, loss: LossOptions, token_weight: Tensor | None) -> Any:
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        rule = f"of the shape of the logits {show_shape(tuple(logits.shape))} without their last dim"
        fail(_NAME, "targets", rule, show_shape(tuple(targets.shape)))
    if not isinstance(logits, RowLogits):
        raise _refusal(
            f"logits to which {run.last} is applied" if run.read else f"logits that {run.name} does not make"
        )
    made_of: HeadRows = logits.made_of
    known = as_options(made_of.steps)
    if known is None:
        raise _refusal("logits after more than a factor and a softcap")
    made = replace(loss, logit_scale=known.logit_scale, logit_softcap=known.logit_softcap)
    bias = bias_of(made_of.steps)
    with as_before(run.head):
        reason = reason_linear_is_not_plain(run.name, run.head, gathered=True, unit=True)
        if reason is not None:
            _check_adapted(run, reason, loss, more=token_weight is not None or bias is not None)
        return loss_through(run.head, made_of.rows, targets, made, run.tiling, run.backend, None, bias, token_weight)


def _check_adapted(run: HeadRun, reason: str, loss: LossOptions, *, more: bool) -> None:
    """Refuse what a head that is called for every shard does not take. more: tokens have weights, or a bias comes behind."""
    usual = ("ignore_index", "label_smoothing", "class_weight", "num_valid")
    rest = replace(loss, **{name: getattr(LossOptions(), name) for name in (*usual, "reduction")})
    if more or loss.reduction == "none" or rest != LossOptions():
        rule = "those of torch.nn.functional.cross_entropy, but reduction='none',"
        raise UnsupportedError(error_text(_NAME, "the options of the loss", rule, "others", advice=f"{reason}."))
    if any(map(is_partitioned, run.head.parameters())):
        rule = "a plain linear layer under ZeRO-3, which would gather it for every shard"
        raise UnsupportedError(error_text(_NAME, run.name, rule, reason, advice="Use ZeRO stage 1 or 2."))


def _refusal(got: str) -> UnsupportedError:
    return UnsupportedError(error_text(_NAME, "model", _RULE, got, advice=_ADVICE))
