"""The classes of a decoder layer that runs as one `Block` and of the norm behind the last; why a layer runs its MLP alone."""

from contextlib import nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_specs.config import Tiling
from shared_specs.shards import ShardPlan, plan_tokens
from tiled_torch.core import replay
from tiled_torch.core.autocast import autocast_dtype
from tiled_torch.core.gradients import main_grad_of
from tiled_torch.core.operands import PLAIN
from tiled_torch.core.tensors import device_kind
from tiled_torch.models.block.function import LAYERS, Block, BlockCall
from tiled_torch.models.block.offload import input_on_host
from tiled_torch.models.family import forward_in_place_of, reason_called
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import note_layers
from tiled_torch.tile.api import tile
from tiled_torch.tile.state import is_fake

_LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LINEAR += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a decoder layer of a known family that runs its class's own forward."""
    return type(module).__name__ in LAYERS and forward_in_place_of(module, LAYERS) is None


def reason_not_block(layer: Any) -> str | None:
    """Return why a layer cannot run as one `Block` now; None where it can."""
    for name, module in layer.named_modules():
        reason = reason_called(name, module) if name else None
        if reason is not None:
            return reason
        if name.startswith(_LINEAR) and next(module.buffers(recurse=False), None) is not None:
            return f"{name} has buffers"
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        if main_grad_of(parameter) is not None:
            return f"{name} has a main_grad"
        if type(parameter) not in PLAIN:
            return f"{name} is {type(parameter).__name__}"
    missing = next((name for name in plain_linears(layer) if f"{name}.weight" not in parameters), None)
    return None if missing is None else f"{missing} has no weight of its own"


def plain_linears(layer: nn.Module) -> frozenset[str]:
    """Return the projections of which only weight and bias are used; adapters and what else is no nn.Linear are called."""
    return frozenset(name for name in _LINEAR if type(layer.get_submodule(name)) is nn.Linear)


def _reason_of_call(x: Any, embeddings: Any, cache_given: bool, options: dict[str, Any]) -> str | None:
    if not torch.is_grad_enabled():
        return "no gradient is asked for"
    if torch._C._are_functorch_transforms_active():
        return "it was called inside torch.func"
    if cache_given:
        return "it was called with a cache"
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.numel() or embeddings is None:
        return "it was called without x [B, S, H] or its rotary positions"
    return "attention weights are asked for" if options.get("output_attentions") else None


class TiledBlock(Remade):
    """Marker and forward of a tiled decoder layer; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _block_tiling: Tiling
    _block_ran: str | None = None
    _offload: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: transformers' wrapper would checkpoint what is its own checkpoint."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _uncompiled()(self, *args, **kwargs)


@cache
def _uncompiled() -> Any:
    """Return the forward of a layer, as code that torch.compile calls instead of tracing it. A call: torch._dynamo is slow to
    import."""
    return torch.compiler.disable(_forward)


def _forward(layer: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    options = dict(kwargs)
    mask, embeddings = options.pop("attention_mask", None), options.pop("position_embeddings", None)
    cached = options.pop("past_key_values", None) is not None
    options.pop("use_cache", None)
    reason = "it was called with more than x by position" if args else None
    reason = reason or _reason_of_call(hidden_states, embeddings, cached, options) or reason_not_block(layer)
    layer._block_ran = "tiled_block" if reason is None else f"mlp: {reason}"
    offloaded = layer._offload or _is_offloaded(layer)
    if reason is not None:
        again = torch.is_grad_enabled() and not cached and not torch._C._are_functorch_transforms_active()
        return _whole(layer, hidden_states, *args, recomputed=again, offloaded=offloaded, **kwargs)
    for mlp in layer.children():  # whose own forward does not run, where it would look
        if getattr(mlp, "_model_name", ""):
            note_layers(mlp)
    tensors, named = isinstance(mask, Tensor), dict(layer.named_parameters())
    plain, dropout = plain_linears(layer), layer.training and layer.self_attn.attention_dropout
    draws = bool(dropout) or len(plain) < len(_LINEAR)
    call = BlockCall(
        layer=layer,
        names=tuple(named),
        plain=plain,
        plan=_plan(hidden_states, layer._block_tiling),
        mask=None if tensors else mask,
        options=options,
        cast=autocast_dtype(hidden_states),
        autocast=replay.Autocast(hidden_states.device),
        random=replay.GeneratorStates(hidden_states.device, apart=is_fake(hidden_states)) if draws else None,
    )
    operands = (hidden_states, *embeddings, mask if tensors else None, *named.values())
    # Its input is asked for twice in backward: attention's has its room between.
    with input_on_host(hidden_states, takes=2) if offloaded else nullcontext():
        return Block.apply(call, *operands)


def _plan(x: Tensor, tiling: Tiling) -> ShardPlan:
    """Return the plan of the sequence, of shards as long as those of B S tokens together."""
    batch, length, _ = x.shape
    options = {"num_shards": tiling.num_shards, "shard_tokens": tiling.shard_tokens, "device": device_kind(x.device)}
    tokens = plan_tokens(batch * length, **options)
    return plan_tokens(length, shard_tokens=max(1, tokens.shard_tokens // batch))


def _is_offloaded(layer: Any) -> bool:
    """Return whether the model's own checkpointing was asked to offload: activation_checkpointing_enable(offload=True)."""
    if not (layer.gradient_checkpointing and layer.training):
        return False
    run = getattr(getattr(layer, "_gradient_checkpointing_func", None), "func", None)
    return run is not None and run is not checkpoint


def _whole(layer: Any, x: Any, *args: Any, recomputed: bool, offloaded: bool, **kwargs: Any) -> Any:
    """The layer as its class runs it, its MLP a shard at a time; recomputed: it keeps its input alone here too."""
    run = partial(layer._untiled.forward, layer, **kwargs)
    if not recomputed:
        return run(x, *args)
    with input_on_host(x) if offloaded else nullcontext():
        return checkpoint(run, x, *args, use_reentrant=False)


class TiledNorm(Remade):
    """Marker and forward of the norm behind the last layer, a shard at a time, which would keep its input in float32."""

    _untiled: type[nn.Module]
    _block_tiling: Tiling

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return tile(MethodType(self._untiled.forward, self), tiling=self._block_tiling)(hidden_states)


@cache
def norm_class(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the tiled subclass of a norm's class."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(norm_class)}
    return type(f"Tiled{untiled.__name__}", (TiledNorm, untiled), attributes)


@cache
def block_class(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the tiled subclass of a decoder layer's class."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(block_class)}
    return type(f"Tiled{untiled.__name__}", (TiledBlock, untiled), attributes)
