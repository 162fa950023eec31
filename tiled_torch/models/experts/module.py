"""Tiled classes of experts and of routers, given to modules in place as `tile_model` gives MLPs theirs."""

import inspect
import sys
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.config import Tiling
from shared_specs.mlp import costs as mlp_costs
from tiled_torch.core import replay, tangents
from tiled_torch.core.autocast import after_autocast, autocast_dtype
from tiled_torch.core.partitioned import gathers
from tiled_torch.core.tensors import device_kind
from tiled_torch.models.experts import dbrx, llama4, longcat
from tiled_torch.models.experts.blocks import BLOCKS, kind_of_block
from tiled_torch.models.experts.forms import (
    ExpertsForm,
    experts_form_of,
    is_experts,
    operands_of,
    reason_not_formula,
    reason_operands_are_not_plain,
    reason_weights_are_lent,
    routers_in,
)
from tiled_torch.models.experts.function import FORMULA, run
from tiled_torch.models.experts.marker import OfExperts
from tiled_torch.models.reports import note_layers, report, state_seen
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.steps import ExpertWeights
from tiled_torch.tile.api import tile_where


class TiledRouter(OfExperts):
    """Forward of a router by shards. Its hooks, transformers' record of router logits among them, see all tokens at once."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _ran: str | None = None

    def path_now(self: Any) -> str:
        if any(map(gathers, self.modules())):
            return "untiled: ZeRO-3 gathers its weights"
        if self.training and getattr(self, "moe_jitter_eps", None) is not None:  # DBRX's
            return "untiled: it changes its input in place"
        reason = reason_weights_are_lent(self)
        return "tile" if reason is None else f"untiled: {reason}"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = self.path_now()
        report(self, path)
        whole = MethodType(self._untiled.forward, self)
        if path != "tile":
            return whole(*args, **kwargs)
        tiling = _without_bytes(self._tiling)
        # A bias that it moves would choose for the next shard's tokens.
        allows = state_seen(self, attributes=True)
        others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
        if not args or any(a.dim() > 1 for a in others) or not others:
            return tile_where(whole, tiling, allows)(*args, **kwargs)
        # One number for each expert, which is as long as x where there are as many tokens.
        return tile_where(lambda x: whole(x, *args[1:], **kwargs), tiling, allows)(args[0])


class TiledExperts(OfExperts):
    """Forward of experts by shards; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _ran: str | None = None
    _told: tuple[str, ...] = ()
    _model_name: str = ""  # as in tiled MLPs
    _alone: bool = False

    def path_now(self: Any) -> str:
        form = experts_form_of(self)
        if form is not None and form.flat and (reason := dbrx.reason_not_whole(self)) is not None:
            return f"untiled: {reason}"
        reason = "its formula is not the declared one" if form is None else reason_not_formula(self, form)
        return FORMULA if reason is None else f"tile: {reason}"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._model_name:
            note_layers(self)
        if torch.compiler.is_exporting():
            return self._untiled.forward(self, *args, **kwargs)
        if "torch._dynamo" in sys.modules:  # the rows of an expert are known while it runs only
            return torch.compiler.disable(_forward)(self, *args, **kwargs)
        return _forward(self, *args, **kwargs)


def _forward(experts: Any, *args: Any, **kwargs: Any) -> Any:
    form, whole = experts_form_of(experts), MethodType(experts._untiled.forward, experts)
    if form is not None and form.dense:
        if len(args) + len(kwargs) == 1:  # past a tiled block
            report(experts, "untiled: it was called with all tokens for every expert")
            return whole(*args, **kwargs)
        whole = partial(llama4.of_all_tokens, experts, whole)
    if form is not None and form.flat and args and isinstance(args[0], Tensor) and args[0].dim() == 3:
        y = _forward(experts, args[0].flatten(0, 1), *args[1:], **kwargs)
        return y.view(args[0].shape)
    given = _arguments(experts, form, args, kwargs)
    path, operands = _path_of_call(experts, form, given)
    report(experts, path)
    if path.startswith("untiled"):
        return whole(*args, **kwargs)
    if form is None or operands is None or given is None:
        tiling, allows = _without_bytes(experts._tiling), state_seen(experts)
        return tile_where(whole, tiling, allows)(*args, **kwargs)
    replay.refuse_transforms("tile_model", "the untiled experts")
    x, index, weights = given
    # Autocast does not reach the grouped products; elsewhere x is cast to the weights as it is for those.
    grouped = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    dtype = operands.up.dtype if grouped else after_autocast(operands.up, autocast_dtype(x))
    length = shard_tokens(x, operands, form, dtype, experts._tiling)
    y = run(
        x, index, weights, operands, ExpertsCall(dtype, length, _gate_of(experts, form), form.transposed, form.dense)
    )
    if form.passing:
        y = y + longcat.handed_on(experts, x, index, weights, _without_bytes(experts._tiling))
    return y[:, None] if form.flat else y


def _gate_of(experts: Any, form: ExpertsForm) -> Any:
    if form.flat:
        return dbrx.flat_gate(experts)
    if form.dense or form.passing:
        return llama4.gate_of(experts)
    return experts._apply_gate if form.gated else experts.act_fn


def _path_of_call(experts: Any, form: ExpertsForm | None, given: Any) -> tuple[str, ExpertWeights | None]:
    """Return how a call runs and, where that is by the formula, its operands."""
    path = experts.path_now()
    if path == FORMULA and given is None:
        path = "tile: it was called with more than x, experts and weights"
    elif path == FORMULA and tangents.carry_tangents(given):
        path = "tile: in forward mode"
    if path != FORMULA or form is None:
        lent = reason_weights_are_lent(experts)
        return path if lent is None else f"untiled: {lent}, and {path.removeprefix('tile: ')}", None
    operands = operands_of(experts, form)
    reason = reason_operands_are_not_plain(form, operands)
    return (path, operands) if reason is None else (f"untiled: {reason}", None)


def shard_tokens(x: Tensor, w: ExpertWeights, form: ExpertsForm, dtype: torch.dtype, tiling: Tiling) -> int:
    """Return how many tokens are worked on at a time. A memory budget is for the rows of one expert, all of one shard."""
    intermediate = w.down.shape[1 if form.transposed else 2]
    shape = mlp_costs.MLPShape(
        tokens=x.shape[0],
        hidden=x.shape[-1],
        intermediate=intermediate,
        gated=form.gated,
        itemsize=dtype.itemsize,
        weight_itemsize=w.up.dtype.itemsize,
    )
    return mlp_costs.plan_mlp("tile_model", shape, **tiling.cut(), device=device_kind(x.device)).shard_tokens


def _without_bytes(tiling: Tiling) -> Tiling:
    return replace(tiling, keep=0.0, memory_budget=None)


@cache
def _names(untiled: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(untiled.forward).parameters)[1:]


def _arguments(experts: Any, form: ExpertsForm | None, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return x, the experts and the weights of a call; None where it has other arguments or forms."""
    names = () if form is None or form.dense else _names(experts._untiled)[len(args) :]
    given = [*args, *(kwargs.get(name) for name in names)]
    if len(given) != 3 or len(kwargs) + len(args) != 3 or not all(isinstance(a, Tensor) for a in given):
        return None
    x, index, weights = given
    fits = x.dim() == index.dim() == 2 and index.shape == weights.shape and len(x) == len(index)
    return (x, index, weights) if fits else None


def tile_experts(model: nn.Module, options: Tiling) -> None:
    """Give every module of experts and its router their tiled classes, but for those with a forward of their own."""
    experts = [module for module in model.modules() if is_experts(module) and "forward" not in vars(module)]
    routers = [module for _, module in routers_in(model) if "forward" not in vars(module)]
    for module in experts:
        _give(module, TiledExperts, _tiled_experts, options)
    for module in routers:
        _give(module, TiledRouter, _tiled_router, options)
    for module in model.modules():
        kind = kind_of_block(module)
        if kind is not None:
            _give(module, kind, _tiled_block, options)


def _give(module: Any, kind: type[Any], made_by: Any, options: Tiling) -> None:
    if not isinstance(module, kind):
        module.__class__ = made_by(type(module))
    if "_tiling" in kind.__annotations__:
        module._tiling = options


def path_of_experts(module: Any) -> str:
    """Return how a tiled module of experts, or router, ran last, or would run now."""
    return module._ran or module.path_now()


def _class_of(kind: type[Any], untiled: type[nn.Module], made_by: Any) -> type[nn.Module]:
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(made_by)}
    return type(f"Tiled{untiled.__name__}", (kind, untiled), attributes)


@cache
def _tiled_experts(untiled: type[nn.Module]) -> type[nn.Module]:
    return _class_of(TiledExperts, untiled, _tiled_experts)


@cache
def _tiled_router(untiled: type[nn.Module]) -> type[nn.Module]:
    return _class_of(TiledRouter, untiled, _tiled_router)


@cache
def _tiled_block(untiled: type[nn.Module]) -> type[nn.Module]:
    return _class_of(
        next(BLOCKS[base.__name__] for base in untiled.__mro__ if base.__name__ in BLOCKS), untiled, _tiled_block
    )
