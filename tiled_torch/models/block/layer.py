"""The classes of a decoder layer that runs as one `Block` and of the norm behind the last; why a layer runs its MLP alone."""

import inspect
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as of_all_modules  # whose hooks have no public name
from torch.utils.checkpoint import checkpoint

from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.config import Tiling
from shared_specs.shards import ShardPlan, plan_tokens
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.groups import rank_group
from tiled_torch.core import replay
from tiled_torch.core.autocast import autocast_dtype
from tiled_torch.core.gradients import main_grad_of
from tiled_torch.core.operands import PLAIN_TENSORS
from tiled_torch.core.tensors import device_kind, is_dtensor
from tiled_torch.models.block.attention import Turns, turns_of
from tiled_torch.models.block.function import Block, BlockCall
from tiled_torch.models.block.heads import scales_of
from tiled_torch.models.block.known import attention_of, family_of_block, has_experts, linears_of, reason_more
from tiled_torch.models.block.offload import asked_to_offload, input_on_host
from tiled_torch.models.block.parts import Unhooked
from tiled_torch.models.block.shards import BlockRanks, ColumnShards, Shards, TokenShards, dealt, is_split
from tiled_torch.models.experts.forms import routers_in
from tiled_torch.models.family import home_of, is_of, reason_called
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import note_layers, tell_of_part
from tiled_torch.tile.api import tile
from tiled_torch.tile.state import is_fake

_NAME = "tile_model"
BETWEEN = ", between two compiled graphs"  # what `tiling_paths` adds of a layer that a compiler left as it is


def reason_not_block(layer: Any) -> str | None:
    """Return why a layer cannot run as one `Block` now; None where it can."""
    family = family_of_block(layer)
    formulas = (family.attention, "mlp")
    if (other := _other_code(layer, formulas) or _other_router(layer)) is not None:
        return other
    if _anybody_hooks_all_modules():
        return "there are hooks of all modules"
    ranks: BlockRanks | None = layer._block_ranks
    linears, known = linears_of(layer), frozenset() if ranks is None else ranks.hooks
    if ranks is not None and has_experts(layer):
        return "its weights are split, and its MLP is a mixture of experts"
    if (more := reason_more(layer)) is not None:
        return more
    for name, module in layer.named_modules():
        reason = reason_called(name, module, known=known) if name else None
        if reason is not None:
            return reason
        if name.startswith(linears) and next(module.buffers(recurse=False), None) is not None:
            return f"{name} has buffers"
    parameters = dict(layer.named_parameters())
    for name, parameter in parameters.items():
        if main_grad_of(parameter) is not None:
            return f"{name} has a main_grad"
        if ranks is not None:
            if not is_split(name, parameter, ranks, linears, (family.out, family.down)):
                return f"{name} is split otherwise"
        elif type(parameter) not in PLAIN_TENSORS:
            return f"{name} is {type(parameter).__name__}"
    missing = next((name for name in plain_linears(layer) if f"{name}.weight" not in parameters), None)
    return None if missing is None else f"{missing} has no weight of its own"


def _anybody_hooks_all_modules() -> bool:
    """Return whether there are hooks of all modules, but for those by which PyTorch's own tools follow where a model is.

    CommDebugMode's are none of these: it cannot follow a module that is called twice.
    """
    names = (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
    found = (hook for name in names for hook in getattr(of_all_modules, name).values())
    homes = [str(getattr(hook, "__module__", "")) for hook in found]
    return any(not home.startswith(("torch.", "tiled_torch.")) or ".tensor.debug." in home for home in homes)


def plain_linears(layer: nn.Module) -> frozenset[str]:
    """Return the projections of which only weight and bias are used; adapters and what else is no nn.Linear are called."""
    return frozenset(name for name in linears_of(layer) if type(layer.get_submodule(name)) is nn.Linear)


def _reason_of_call(layer: Any, x: Any, embeddings: Any, cache_given: bool, options: dict[str, Any]) -> str | None:
    if not torch.is_grad_enabled():
        return "no gradient is asked for"
    if torch._C._are_functorch_transforms_active():
        return "it was called inside torch.func"
    if cache_given:
        return "it was called with a cache"
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.numel() or embeddings is None:
        return "it was called without x [B, S, H] or its rotary positions"
    if family_of_block(layer).scaled is not None and not isinstance(options.get("position_ids"), Tensor):
        return "it was called without its positions"
    if is_dtensor(x) != (layer._block_ranks is not None):
        return f"x is {type(x).__name__}"
    return "attention weights are asked for" if options.get("output_attentions") else None


class TiledBlock(Remade):
    """Marker and forward of a tiled decoder layer; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _block_tiling: Tiling
    _block_count: int = 1  # of such layers in its model
    _block_ran: str | None = None
    _block_ranks: BlockRanks | None = None  # what `parallelize` says of a layer whose weights are split
    _offload: bool = False
    _heard: set[str]  # what was warned of, one set for a model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: transformers' wrapper would checkpoint what is its own checkpoint."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            return _forward(self, *args, **kwargs)
        outside: Any = torch.compiler.disable(_forward)
        return outside(self, *args, between=True, **kwargs)


def _forward(layer: Any, hidden_states: Any, *args: Any, between: bool = False, **kwargs: Any) -> Any:
    """between: compiled code calls it, between two of its graphs."""
    of_cache = family_of_block(layer).cache
    kwargs = kwargs | _own_cache(layer, of_cache, kwargs.get(of_cache))
    options = dict(kwargs)
    mask, embeddings = options.pop("attention_mask", None), options.pop("position_embeddings", None)
    cached = options.pop(of_cache, None) is not None
    options.pop("use_cache", None)
    reason = "it was called with more than x by position" if args else None
    reason = reason or _reason_of_call(layer, hidden_states, embeddings, cached, options) or reason_not_block(layer)
    layer._block_ran = f"tiled_block{BETWEEN * between}" if reason is None else f"mlp: {reason}"
    offloaded = layer._offload or asked_to_offload(layer)
    if reason is not None:
        tell_of_part(layer, "runs whole, its MLP alone a shard at a time, in spite of scope='block'", reason)
        again = torch.is_grad_enabled() and not cached and not torch._C._are_functorch_transforms_active()
        again = again and _other_router(layer) is None
        return _whole(layer, hidden_states, *args, recomputed=again, offloaded=offloaded, **kwargs)
    # Of the MLP, whose own forward does not run, where it would look; what calls compiled code has not said that it does.
    for mlp in () if between else layer.children():
        if getattr(mlp, "_model_name", ""):
            note_layers(mlp)
    whole = isinstance(embeddings, Tensor)  # of complex numbers
    embeddings = torch.view_as_real(embeddings).unbind(-1) if whole else embeddings
    tensors, named, ranks = isinstance(mask, Tensor), dict(layer.named_parameters()), layer._block_ranks
    plain, x = plain_linears(layer), hidden_states
    scales = scales_of(attention_of(layer), family_of_block(layer).scaled, options.get("position_ids"))
    if ranks is None:
        shards = Shards(_plan(x, layer._block_tiling))
    else:
        shards = _agreed(layer, x, ranks)
        x, named = x.to_local(), {name: p.to_local() if is_dtensor(p) else p for name, p in named.items()}
        embeddings = [table.expand(x.shape[0], -1, -1) for table in embeddings]
        scales = None if scales is None else scales.expand(x.shape[0], -1)
    call = BlockCall(
        layer=layer,
        names=tuple(named),
        plain=plain,
        shards=shards,
        turns=_turns(layer, shards),
        mask=None if tensors else mask,
        options=options,
        cast=autocast_dtype(x),
        autocast=replay.Autocast(x.device),
        random=replay.GeneratorStates(x.device, apart=is_fake(x)) if _may_draw(layer) else None,
        offloaded=offloaded,
        complex_positions=whole,
        scales=scales,
    )
    # Its input is asked for twice in backward: attention's has its room between.
    with input_on_host(x, takes=2, inputs=layer._block_count) if offloaded else nullcontext():
        y = Block.apply(call, x, *embeddings, mask if tensors else None, *named.values())
    return y if ranks is None else _like(hidden_states, y)


def _other_router(layer: Any) -> str | None:
    """Return what a router runs that is not its model's own: it may write to its state, and is called no second time."""
    return _other_code(layer, [name for name, _ in routers_in(layer)])


def _other_code(layer: Any, names: Iterable[str]) -> str | None:
    """Return what a part of a layer runs that is not of the layer's own file; None where all run what is."""
    home = home_of(layer).__module__
    for name in names:
        part = home_of(layer.get_submodule(name))
        forward = inspect.unwrap(vars(part)["forward"])
        if not part.__module__ == forward.__module__ == home:
            return f"{name} runs {forward.__module__}.{forward.__qualname__}"
    return None


def _own_cache(layer: Any, name: str, cache: Any) -> dict[str, Any]:
    """Return no cache instead of the empty one with which models are called in training unless told otherwise: as where
    transformers checkpoints a layer, nobody fills it."""
    if cache is None or not (layer.training and torch.is_grad_enabled()):
        return {}
    return {} if cache.get_seq_length(attention_of(layer).layer_idx) else {name: None}


def _may_draw(layer: Any) -> bool:
    """Return whether something in a layer may draw random numbers: somebody's own module, or dropout in training."""
    homes = map(home_of, layer.modules())
    if any(not (is_of("torch", home) or is_of("transformers", home)) for home in homes):
        return True
    drops = (m.p for m in layer.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    return bool(layer.training and (attention_of(layer).attention_dropout or any(drops)))


def _like(x: Any, y: Tensor) -> Tensor:
    """Return a DTensor laid out as x of this rank's part y."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _agreed(layer: Any, x: Any, ranks: BlockRanks) -> Shards:
    """Return the shards of a layer whose weights are split, of which all ranks have as many."""
    over, tiling, (batch, length, _) = rank_group(_NAME, ranks.mesh), layer._block_tiling, x.shape
    if ranks.sequence_parallel:
        sizes = dealt(length, over.size)
        options = {
            "num_shards": tiling.num_shards,
            "shard_tokens": tiling.shard_tokens,
            "device": device_kind(x.device),
        }
        tokens = plan_sequence(_NAME, tuple(batch * size for size in sizes), **options)
        shards: Any = TokenShards(SequencePlan(sizes, max(1, tokens.shard_tokens // batch)), over)
    else:
        shards = ColumnShards(_plan(x, tiling), over)
    said = {
        "sequence_parallel": ranks.sequence_parallel,
        "the shape of x": (batch, length, x.shape[-1]),
        "the number of shards": len(shards),
        "dtypes": (x.dtype, autocast_dtype(x)),
        "the layout of x": x.placements,
        "which parameters require grad": tuple(p.requires_grad for p in layer.parameters()),
    }
    agree(over, x.device, said)
    return shards


def _turns(layer: Any, shards: Shards) -> Turns:
    """Return the turns of attention with this rank's heads."""
    attn, ranks, family = attention_of(layer), shards.ranks, family_of_block(layer)
    heads = attn.config.num_attention_heads
    kv_heads = heads if family.latent or family.of_heads else attn.config.num_key_value_heads
    return turns_of(attn, heads // ranks, kv_heads // ranks, dropout=bool(layer.training and attn.attention_dropout))


def _plan(x: Tensor, tiling: Tiling) -> ShardPlan:
    """Return the plan of the sequence, of shards as long as those of B S tokens together."""
    batch, length, _ = x.shape
    options = {"num_shards": tiling.num_shards, "shard_tokens": tiling.shard_tokens, "device": device_kind(x.device)}
    tokens = plan_tokens(batch * length, **options)
    return plan_tokens(length, shard_tokens=max(1, tokens.shard_tokens // batch))


def _whole(layer: Any, x: Any, *args: Any, recomputed: bool, offloaded: bool, **kwargs: Any) -> Any:
    """The layer as its class runs it, its MLP a shard at a time; recomputed: it keeps its input alone here too."""
    run = partial(layer._untiled.forward, layer, **kwargs)
    if not recomputed:
        return run(x, *args)

    def anew(*given: Any) -> Any:
        with replay.parametrized_anew():  # a replay that finds them cached saves fewer tensors
            return run(*given)

    with input_on_host(x, inputs=layer._block_count) if offloaded else nullcontext():
        return checkpoint(anew, x, *args, use_reentrant=False)


class TiledNorm(Remade):
    """Marker and forward of the norm behind the last layer, a shard at a time, which would keep its input in float32."""

    _untiled: type[nn.Module]
    _block_tiling: Tiling

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if is_dtensor(hidden_states):
            return _split_norm(self, hidden_states)
        return tile(MethodType(self._untiled.forward, self), tiling=self._block_tiling)(hidden_states)


def _split_norm(norm: Any, x: Any) -> Tensor:
    """The norm of this rank's rows of a DTensor; of its parameters' gradients each rank has those of its own rows."""
    from torch.distributed.tensor import Partial, Replicate

    layout = [Replicate() if x.placements == (Replicate(),) else Partial()]
    named = dict(norm.named_parameters())
    plain = Unhooked(norm, norm._untiled.forward)

    def run(rows: Tensor, *values: Tensor) -> Tensor:
        own = {f"module.{name}": value for name, value in zip(named, values, strict=True)}
        return functional_call(plain, own, (rows,))  # type: ignore[no-any-return]

    local = (p.to_local(grad_placements=layout) if is_dtensor(p) else p for p in named.values())
    return _like(x, tile(run, tiling=norm._block_tiling)(x.to_local(), *local))


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
