"""`tile_model` and `untile_model`: the MLPs of a Hugging Face model and its loss, tiled in place.

A module keeps its attributes and parameters and only changes its class, to a subclass whose forward is tiled; state_dict
keys, hooks, `save_pretrained` and sharding engines see the same module as before.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any

from torch import nn

from shared_specs import checks
from shared_specs.config import TORCH, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail_type
from tiled_torch import backends
from tiled_torch.functional.mlp import tiled_mlp
from tiled_torch.functional.tile import tile
from tiled_torch.models.causal_lm import TiledCausalLM, is_causal_lm, loss_path, tiled_causal_lm
from tiled_torch.models.family import Family, activation_of, reason_linear_is_not_plain
from tiled_torch.models.llama import LLAMA
from tiled_torch.models.phi3 import PHI3
from tiled_torch.models.pickling import Remade

FAMILIES = (LLAMA, PHI3)


def tile_model(
    model: nn.Module,
    *,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> nn.Module:
    """The same model, its MLPs and its loss computed shard by shard from now on. Parameters and state_dict keys do not
    change.

    An MLP whose projections are plain linear layers runs through `tiled_mlp`; one with LoRA adapters, quantised or
    separately sharded projections, or hooks on them, through `tile`. `tiling_paths` tells which, now.

    Of a causal language model the loss is tiled as well: `model(..., labels=labels).loss` is the model's own
    (`num_items_in_batch` and `shift_labels` included; 0 where every label is ignored), and `.logits` is None: pass
    `logits_to_keep` for those of the last tokens, or no labels for all of them.

    Args:
        model: a Hugging Face model, or any module, that contains MLPs of a known family (Llama, Mistral, Qwen, Gemma,
            Phi-3, ...); changed in place.
        num_shards, keep, tiling, backend: as in `tiled_mlp`, for every MLP; for the loss too, where keep has no meaning.
    Returns:
        The model itself.
    Raises:
        SpecError, TypeError: a number out of its range.
        UnsupportedError: no MLP of a known family, or an activation that is not in the specification; nothing changed.
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
    for _, module, _ in known:
        if not isinstance(module, Tiled):
            module.__class__ = _tiled_class(type(module))
        module._tiling, module._backend = options, backend  # type: ignore[assignment]
    for module in filter(is_causal_lm, model.modules()):
        if not isinstance(module, TiledCausalLM):
            module.__class__ = tiled_causal_lm(type(module))
        module._tiling, module._backend = replace(options, keep=0.0), backend  # type: ignore[assignment]
    return model


def untile_model(model: nn.Module) -> nn.Module:
    """The same model with its MLPs computed whole again; a model that was not tiled is returned as it is.

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
    for module in model.modules():
        if not isinstance(module, Tiled | TiledCausalLM):
            continue
        make = tiled_causal_lm if isinstance(module, TiledCausalLM) else _tiled_class
        if type(module) is not make(module._untiled):
            advice = "Untile the model before wrapping it."
            got = type(module).__name__
            raise UnsupportedError(
                error_text("untile_model", "model", "free of classes added after tiling", got, advice=advice)
            )
        tiled: Any = module
        tiled.__class__ = tiled._untiled
        del tiled._tiling, tiled._backend
    return model


def tiling_paths(model: nn.Module) -> dict[str, str]:
    """Name of every tiled MLP -> "tiled_mlp", or "tile" and the reason why its projections are not plain.

    Of a causal language model also its head -> "tiled_linear_cross_entropy", or how else its loss runs and why.
    """
    if not isinstance(model, nn.Module):
        fail_type("tiling_paths", "model", "a torch.nn.Module", type(model).__name__)
    paths = {}
    for name, module in model.named_modules():
        if isinstance(module, Tiled):
            paths[name] = _path_of(module)
        elif isinstance(module, TiledCausalLM):
            paths[f"{name}.lm_head".removeprefix(".")] = loss_path(module)
    return paths


def _path_of(module: Any) -> str:
    if module._run_split is not None:
        return "tensor_parallel_mlp"
    reason = reason_not_plain(module)
    return "tiled_mlp" if reason is None else f"tile: {reason}"


def family_of(module: nn.Module) -> Family | None:
    """The family a module belongs to, by the name of its class or of the class it had before tiling or sharding."""
    if not any(hasattr(module, family.projections[0]) for family in FAMILIES):
        return None
    names = {base.__name__ for base in type(module).__mro__}
    return next((family for family in FAMILIES if names & family.classes), None)


def reason_not_plain(module: nn.Module) -> str | None:
    """Why a projection is more than its weight and bias; None where every one is a plain nn.Linear."""
    family = family_of(module)
    reasons = (
        reason_linear_is_not_plain(name, getattr(module, name)) for name in (family.projections if family else ())
    )
    return next((reason for reason in reasons if reason is not None), None)


class Tiled(Remade):
    """Marker and forward of a tiled MLP; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _run_split: Callable[[Any], Any] | None = (
        None  # what `parallelize` lets run where the projections are split over ranks
    )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._run_split is not None:
            return self._run_split(*args, **kwargs)
        if reason_not_plain(self) is not None or kwargs or len(args) != 1:  # type: ignore[arg-type]
            whole = MethodType(self._untiled.forward, self)  # tile knows the parameters of a forward's module
            return tile(whole, tiling=self._tiling)(*args, **kwargs)
        family = family_of(self)  # type: ignore[arg-type]
        assert family is not None
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
