"""`tile_model` and `untile_model`: the MLPs of a Hugging Face model and its loss, tiled in place.

A module keeps its attributes and parameters and only changes its class, to a subclass whose forward is tiled; state_dict
keys, hooks, `save_pretrained` and sharding engines see the same module as before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from shared_specs.config import TORCH, Tiling
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail_type
from shared_specs.layers.scope import check_block_tiling, check_scope
from tiled_torch import backends
from tiled_torch.core import partitioned
from tiled_torch.mlp.api import tiled_mlp
from tiled_torch.models.block.function import LAYERS
from tiled_torch.models.block.layer import TiledBlock, TiledNorm, block_class, is_block, norm_class, reason_not_block
from tiled_torch.models.causal_lm import TiledCausalLM, is_causal_lm, loss_path, reason_head_stays, tiled_causal_lm
from tiled_torch.models.family import (
    Family,
    activation_of,
    forward_in_place_of,
    reason_called,
    reason_linear_is_not_plain,
)
from tiled_torch.models.llama import LLAMA
from tiled_torch.models.phi3 import PHI3
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import ALONE, note_layers, report, warn_untiled
from tiled_torch.tile.api import tile

FAMILIES = (LLAMA, PHI3)


def tile_model(
    model: nn.Module,
    *,
    scope: Literal["mlp", "block"] = "mlp",
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> nn.Module:
    """Return the same model, its MLPs and its loss computed shard by shard from now on. Parameters and state_dict keys do not
    change.

    An MLP whose projections are plain linear layers runs through `tiled_mlp`; one with LoRA adapters, quantised or
    separately sharded projections, or hooks on them, through `tile`. `tiling_paths` tells which did.

    Of a causal language model the loss is tiled as well: `model(..., labels=labels).loss` is the model's own
    (`num_items_in_batch` and `shift_labels` included; 0 where every label is ignored). `.logits` are there as before, with
    their gradients, and computed only when they are read (torch.compile: when an attribute or an item of the outputs is).
    They are those of the forward: after the optimizer's step to read them for the first time is a RuntimeError.
    `logits_to_keep` chooses logits; the loss is always that of all labels. Where a loss runs another way than through
    `tiled_linear_cross_entropy`, a warning says why, once.

    Under ZeRO-3 an MLP, and the head with its loss, are gathered once around all shards; nothing has to be marked. Its engine
    may come first, but not where MLPs have adapters (LoRA): these become its leaf modules, for which x has to require grad
    (`model.enable_input_require_grads()`) and which one backward may run through once.

    Args:
        model: a Hugging Face model, or any module, that contains MLPs of a known family (Llama, Mistral, Qwen, Gemma,
            Phi-3, ...); changed in place.
        scope: "mlp": the MLPs and the loss. "block": of Llama, Mistral, Qwen2 and Qwen3 also the rest of every decoder layer
            but attention; such a layer keeps its input alone, in host memory where checkpointing offloads. `tiling_paths` says
            why one runs its MLP alone by shards. It excludes keep, a memory budget and a backend.
        num_shards, keep, tiling, backend: as in `tiled_mlp`, for every MLP; for the loss too, where keep has no meaning.
    Returns:
        The model itself.
    Raises:
        SpecError, TypeError: a number out of its range.
        UnsupportedError: no MLP of a known family, with scope="block" no such layer or an option it excludes; a forward that is
            not its class's, or an activation that is not in the specification, or MLPs with adapters in a ZeRO-3 engine;
            nothing changed. In calls under ZeRO-3: a head that is no plain linear layer; x that needs no gradient of an MLP
            with adapters.
    Memory: with scope="block" see shared_specs.layers.block_costs.eager_block_row_bytes.
    Source: derived in shared_specs/README.md.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        ...                      vocab_size=16)
        >>> model = tile_model(LlamaForCausalLM(config), num_shards=4)
        >>> tiling_paths(model)["model.layers.0.mlp"]
        'tiled_mlp'
    """
    options = checks.resolve_tiling("tile_model", num_shards, keep, tiling, unused=("vocab_shards", "deterministic"))
    checks.check_backend("tile_model", backend, TORCH, backends.usable_backends())
    check_scope("tile_model", scope)
    if scope == "block":
        check_block_tiling("tile_model", options, backend)
    if not isinstance(model, nn.Module):
        fail_type("tile_model", "model", "a torch.nn.Module", type(model).__name__)
    found = [(name, module, family_of(module)) for name, module in model.named_modules()]
    known = [(name, module, family) for name, module, family in found if family is not None]
    if not known:
        names = sorted({type(module).__name__ for name, module in model.named_modules() if name.endswith("mlp")})
        rule = "a model with MLPs of a known family: " + ", ".join(family.name for family in FAMILIES)
        got = f"MLP classes {', '.join(names)}" if names else type(model).__name__
        advice = "Use tile(module) for a token-wise module of another kind."
        raise UnsupportedError(error_text("tile_model", "model", rule, got, advice=advice))
    for name, module, family in known:
        activation = getattr(module, family.activation)
        if activation_of(activation) is None:
            rule, got = "one of the specification's", type(activation).__name__
            raise UnsupportedError(error_text("tile_model", f"activation of {name}", rule, got))
        replaced = forward_in_place_of(module, family.classes)
        if replaced is not None:
            rule, advice = (
                "that of its class in transformers",
                "Tile the model before what replaces it (accelerate's hooks, say).",
            )
            raise UnsupportedError(error_text("tile_model", f"forward of {name}", rule, replaced, advice=advice))
        has_hooks = partitioned.gathers(getattr(module, family.projections[0]))
        reason = reason_not_plain(module) if has_hooks and not isinstance(module, Tiled) else None
        if reason is not None:
            _refuse_after_engine("tile_model", f"one that has its hooks, and {reason}")
    if scope == "block":
        _tile_blocks(model, options)
    else:
        _untile_blocks(model)
    for _, module, _ in known:
        if not isinstance(module, Tiled):
            module.__class__ = _tiled_class(type(module))
        module._tiling, module._backend = options, backend  # type: ignore[assignment]
    for module in model.modules():
        reason = reason_head_stays(module)
        if reason is not None:
            warn_untiled(type(module).__name__, reason, "Its MLPs are tiled, its logits are made whole.")
        elif is_causal_lm(module):
            if not isinstance(module, TiledCausalLM):
                module.__class__ = tiled_causal_lm(type(module))
            module._tiling, module._backend = replace(options, keep=0.0), backend  # type: ignore[assignment]
            decoder: Any = module.get_decoder()  # type: ignore[operator]  # not a tower of images, which `generate` calls alone
            watcher: Any = next((inner for inner in decoder.modules() if isinstance(inner, Tiled)), None)
            if watcher is not None:
                watcher._model_name = type(module).__name__
    return model


def _tile_blocks(model: nn.Module, options: Tiling) -> None:
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, TiledBlock) or is_block(module)]
    if not blocks:
        rule = "a decoder of a family whose blocks are known: " + ", ".join(sorted(LAYERS))
        advice = "Use scope='mlp'."
        raise UnsupportedError(error_text("tile_model", "model", rule, type(model).__name__, advice=advice))
    for block in blocks:
        if not isinstance(block, TiledBlock):
            block.__class__ = block_class(type(block))
        block._block_tiling = options
    for module in list(model.modules()):
        layers: Any = getattr(module, "layers", ())
        norm: Any = getattr(module, "norm", None)
        if norm is not None and any(isinstance(layer, TiledBlock) for layer in layers):
            if not isinstance(norm, TiledNorm):
                norm.__class__ = norm_class(type(norm))
            norm._block_tiling = options


def _untile_blocks(model: nn.Module) -> None:
    """Give layers that ran as one function their own forward again; their MLPs stay tiled."""
    for module in model.modules():
        if isinstance(module, TiledBlock | TiledNorm):
            tiled: Any = module
            tiled.__class__ = tiled._untiled
            for name in TiledBlock.__annotations__:
                vars(module).pop(name, None)


def untile_model(model: nn.Module) -> nn.Module:
    """Return the same model with its MLPs computed whole again; a model that was not tiled is returned as it is.

    Args:
        model: changed in place, also inside sharding wrappers that came after tiling.
    Example:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96))
        >>> type(untile_model(tile_model(mlp))).__name__
        'LlamaMLP'
    """
    if not isinstance(model, nn.Module):
        fail_type("untile_model", "model", "a torch.nn.Module", type(model).__name__)
    if any(isinstance(m, Tiled) and partitioned.gathers(m) and m._z3_leaf for m in model.modules()):
        _refuse_after_engine("untile_model", "one in which it gathers tiled MLPs as a whole")
    for module in model.modules():
        if not isinstance(module, Tiled | TiledCausalLM | TiledBlock | TiledNorm):
            continue
        if type(module) is not type(module)._made_by(module._untiled):
            advice = "Untile the model before wrapping it."
            got = type(module).__name__
            raise UnsupportedError(
                error_text("untile_model", "model", "free of classes added after tiling", got, advice=advice)
            )
        tiled: Any = module
        tiled.__class__ = tiled._untiled
        for name in (*Tiled.__annotations__, *TiledCausalLM.__annotations__, *TiledBlock.__annotations__):
            vars(tiled).pop(name, None)
    return model


def _refuse_after_engine(function: str, got: str) -> None:
    advice = "Call it before deepspeed.initialize, which hangs hooks on modules as they are then."
    raise UnsupportedError(error_text(function, "model", "one that no ZeRO-3 engine has yet", got, advice=advice))


def tiling_paths(model: nn.Module) -> dict[str, str]:
    """Name of every tiled MLP -> "tiled_mlp", or "tile" and the reason why its projections are not plain.

    Of a causal language model also its head -> "tiled_linear_cross_entropy", or how else its loss runs and why.
    Each is what the last call did; before the first, and where only compiled code ran, what a call would do now.

    Args:
        model: given to `tile_model` before; any other has no paths.
    Example:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> tiling_paths(tile_model(LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))))
        {'': 'tiled_mlp'}
    """
    if not isinstance(model, nn.Module):
        fail_type("tiling_paths", "model", "a torch.nn.Module", type(model).__name__)
    paths = {}
    within: tuple[str, ...] = ()  # layers whose MLP is a part of one function
    for name, module in model.named_modules():
        if isinstance(module, Tiled):
            paths[name] = "tiled_block" if name.startswith(within) else module._ran or path_now(module)
        elif isinstance(module, TiledBlock):
            reason = reason_not_block(module)
            paths[name] = module._block_ran or ("tiled_block" if reason is None else f"mlp: {reason}")
            within += (f"{name}.",) if paths[name] == "tiled_block" else ()
        elif isinstance(module, TiledCausalLM):
            inside: Any = module.modules()  # type: ignore[attr-defined]  # a mixin of modules
            alone = any(isinstance(inner, Tiled) and inner._alone for inner in inside)
            path = f"untiled: {ALONE}" if alone else module._ran or loss_path(module)
            paths[f"{name}.lm_head".removeprefix(".")] = path
        elif (reason := reason_head_stays(module)) is not None and any(isinstance(m, Tiled) for m in module.modules()):
            paths[f"{name}.lm_head".removeprefix(".")] = f"untiled: {reason}"
    return paths


def path_now(mlp: Any) -> str:
    """Return how a tiled MLP would run now."""
    if mlp._run_split is not None:
        return "tensor_parallel_mlp"
    reason = reason_not_plain(mlp)
    return "tiled_mlp" if reason is None else f"tile: {reason}"


def family_of(module: nn.Module) -> Family | None:
    """Return the family a module belongs to, by the name of its class or of the class it had before tiling or sharding."""
    if not any(hasattr(module, family.projections[0]) for family in FAMILIES):
        return None
    names = {base.__name__ for base in type(module).__mro__}
    return next((family for family in FAMILIES if names & family.classes), None)


def reason_not_plain(module: nn.Module) -> str | None:
    """Return why a projection is more than its weight and bias; None where every one is a plain nn.Linear."""
    family = family_of(module)
    reasons = (
        reason_linear_is_not_plain(name, getattr(module, name), gathered=True)
        for name in (family.projections if family else ())
    )
    return next((reason for reason in (*reasons, _reason_of_activation(module, family)) if reason is not None), None)


def _reason_of_activation(module: nn.Module, family: Family | None) -> str | None:
    """Return why what a module calls between its projections is not what `tile_model` found there."""
    if family is None:
        return None
    name, activation = family.activation, getattr(module, family.activation)
    if activation_of(activation) is None:
        return f"{name} is {type(activation).__name__}"
    return reason_called(name, activation, gathered=True)


class Tiled(Remade):
    """Marker and forward of a tiled MLP; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _run_split: Callable[[Any], Any] | None = (
        None  # what `parallelize` lets run where the projections are split over ranks
    )
    _ran: str | None = None
    _told: tuple[str, ...] = ()
    _leaf: bool | None = None
    _model_name: str = (
        ""  # of the causal language model, in one MLP of it, which sees whether the model's own forward is used
    )
    _alone: bool = False

    @property
    def _z3_leaf(self: Any) -> bool:
        """Return the answer to ZeRO-3's question to a module: whether all that is inside is gathered around all shards,
        without hooks of its own.

        Where the projections are called, that is; where only their weights are used, `gather_around` is enough, and has none
        of a leaf's limits. It stays as it was when the engine's hooks were made.
        """
        if self._leaf is None:
            family = family_of(self)
            has_hooks = family is not None and partitioned.gathers(getattr(self, family.projections[0]))
            self._leaf = not has_hooks and reason_not_plain(self) is not None
        return self._leaf

    @_z3_leaf.setter
    def _z3_leaf(self, flag: bool) -> None:
        self._leaf = flag

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        partitioned.refuse_early_gradient(self, args)  # type: ignore[arg-type]  # a mixin of modules
        path = path_now(self)
        if path == "tiled_mlp" and (kwargs or len(args) != 1):
            path = "tile: it was called with more than x"
        report(self, path)
        if not torch.compiler.is_compiling() and self._model_name:  # equal blocks share one compilation
            note_layers(self)
        if self._run_split is not None:
            return self._run_split(*args, **kwargs)
        if path != "tiled_mlp":
            whole = MethodType(self._untiled.forward, self)  # tile knows the parameters of a forward's module
            return tile(whole, tiling=self._tiling)(*args, **kwargs)
        family = family_of(self)  # type: ignore[arg-type]
        assert family is not None
        for name in family.projections:
            partitioned.gather_around(self, getattr(self, name)._parameters.values())  # type: ignore[arg-type]
        operands = family.operands(self)
        return tiled_mlp(
            args[0],
            operands.w_gate,
            operands.w_up,
            operands.w_down,
            biases=operands.biases,
            activation=activation_of(getattr(self, family.activation)) or "silu",
            tiling=self._tiling,
            backend=self._backend,
        )


@cache
def _tiled_class(untiled: type[nn.Module]) -> type[nn.Module]:
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "_made_by": staticmethod(_tiled_class)}
    return type(f"Tiled{untiled.__name__}", (Tiled, untiled), attributes)
