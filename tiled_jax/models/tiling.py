"""`tile_model` and `untile_model`: the MLPs of any Flax nnx model, tiled in place.

A module keeps its attributes and variables and only changes its class, to a subclass whose call is tiled: `nnx.state`, graph
definitions of its parts, optimizers and checkpoints see the same paths as before.
"""

import re
import warnings
from typing import Any, Literal, NamedTuple

from flax import nnx

from shared_specs.config import JAX, Tiling
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from shared_specs.layers.scope import check_scope
from tiled_jax import backends
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.models.llama import Llama
from tiled_jax.models.others.form import Form, difference, leaves_of, mlp_form_of, value_of
from tiled_jax.models.others.probe import Found, probed
from tiled_jax.models.others.tiled import is_tiled, kind_of, path_of, path_that_ran, set_class, tiled_class
from tiled_jax.moe.module import TiledMoE

_NAMES = re.compile(r"mlp|ffn|ffw|feed_?forward|swiglu|geglu", re.IGNORECASE)
_PARTS = ({"gate_proj", "down_proj"}, {"up_proj", "down_proj"}, {"w1", "w2"}, {"wi", "wo"}, {"wi_0", "wo"}, {"fc1", "fc2"},
          {"linear1", "linear2"}, {"gating_einsum", "linear"}, {"linear_fc1", "linear_fc2"}, {"c_fc", "c_proj"})  # fmt: skip


def tile_model(
    model: nnx.Module,
    *,
    scope: Literal["mlp", "block"] = "mlp",
    strict: bool = False,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Any:
    """Return the same model. From now on it computes its MLPs shard by shard. State, its paths and values do not change.

    A probe decides whether a module is an MLP. It runs a few tokens through a copy with newly drawn parameters. The values and
    all gradients must equal the formula of `tiled_mlp` up to rounding, in training and in evaluation. The module then runs
    through `tiled_mlp`. Names do not matter for this. Weights may be nnx.Linear layers, einsums or parameters, in either
    layout, with gate and up separate or fused. A module that is named like an MLP, or has the sizes of one, may compute
    another function (dropout, adapters, other activations). It runs through `tile` if a probe shows that it is token-wise.
    If a module stays untiled, a warning says why. `tiling_paths` always gives the reason.

    Each call compares the module with the probed one. The module runs through `tile` once a projection has an adapter (nnx.LoRA
    around it), once it has another activation or dtype, or if it is called with more than x. Existing `TiledMLP` modules do not
    change. Heads do not change: `tiled_model_loss` computes the loss of a model's logits without them.

    Args:
        model: an nnx.Module, changed in place. Its parameters are drawn, loaded or only shapes (nnx.eval_shape). Its layers are
            in a list or stacked for nnx.scan.
        scope: "mlp"; "block" is refused, because other models' attention is not known. models.Llama(scope="block") has it.
        strict: whether to refuse a model in which an MLP would be left untiled.
        num_shards, keep, tiling, backend: as in `tiled_mlp`, for every MLP. keep and a memory budget are refused if an MLP runs
            through `tile`, which does not use them.
    Returns:
        The model itself.
    Raises:
        SpecError, TypeError: a number out of its range.
        UnsupportedError: no MLP is found, scope="block", or with strict one that is left; nothing changed.
    Memory: a probe holds the float32 parameters of one MLP and their gradients, once for every kind of MLP.
    Source: derived in shared_specs/README.md.
    Example:
        >>> import jax.numpy as jnp
        >>> rngs = nnx.Rngs(0)
        >>> mlp = nnx.Sequential(nnx.Linear(8, 12, rngs=rngs), nnx.gelu, nnx.Linear(12, 8, rngs=rngs))
        >>> tiling_paths(tile_model(mlp, num_shards=4))
        {'': 'tiled_mlp'}
        >>> mlp(jnp.ones((2, 5, 8))).shape
        (2, 5, 8)
    """
    options = checks.resolve_tiling(
        "tile_model", num_shards, keep, tiling, unused=("vocab_shards", "deterministic"), token_axes=True
    )
    checks.check_backend("tile_model", backend, JAX, backends.usable_backends())
    checks.check_flags("tile_model", strict=strict)
    check_scope("tile_model", scope)
    if scope == "block":
        advice = "models.Llama(scope='block') has it; of other models attention is not known."
        raise UnsupportedError(error_text("tile_model", "scope", "'mlp' here", "'block'", advice=advice))
    _check_module("tile_model", model)
    seen = survey(model)
    tiles = [each for each in seen if each.found.formula is not None or each.found.token_wise]
    left = [each for each in seen if each not in tiles]
    said = _said(left)
    if not tiles and not _own(model):
        got = f"{type(model).__name__} ({said})" if said else type(model).__name__
        advice = "Use tile(module) for a token-wise module of another kind."
        raise UnsupportedError(error_text("tile_model", "model", "a model with an MLP", got, advice=advice))
    if left and strict:
        rule = "one whose MLPs can all be tiled, with strict"
        raise UnsupportedError(
            error_text("tile_model", "model", rule, said, advice="Without strict they are left as they are.")
        )
    _check_generic(options, [each.name for each in tiles if each.found.formula is None])
    for each in tiles:
        kind = kind_of(each.module)
        set_class(each.module, tiled_class(kind, each.found.formula, mlp_form_of(each.module, kind), options, backend))
    if left:
        warnings.warn(
            f"tile_model: MLPs of {type(model).__name__} stay as they are: {said}.", UserWarning, stacklevel=2
        )
    return model


def untile_model(model: nnx.Module) -> Any:
    """Return the same model with its MLPs computed whole again; a model that was not tiled is returned as it is.

    Args:
        model: changed in place. Modules that were made `TiledMLP` have no other form and stay.
    Raises:
        UnsupportedError: the class of a tiled module has changed since.
    Example:
        >>> linears = [nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2)]
        >>> type(untile_model(tile_model(nnx.Sequential(linears[0], nnx.silu, linears[1])))).__name__
        'Sequential'
    """
    _check_module("untile_model", model)
    tiled = [module for _, module in nnx.iter_modules(model) if is_tiled(module)]
    for module in tiled:
        if "_untiled" not in vars(type(module)):
            rule, got = "free of classes added after tiling", type(module).__name__
            advice = "Untile the model before wrapping it."
            raise UnsupportedError(error_text("untile_model", "model", rule, got, advice=advice))
    for module in tiled:
        set_class(module, kind_of(module))
    return model


def tiling_paths(model: nnx.Module) -> dict[str, str]:
    """Return a mapping from the name of each part to the path that it runs.

    An MLP has "tiled_mlp", or "tile" and the reason why the formula does not compute it, or "untiled" and the reason. A
    `TiledMoE` has "tiled_moe", the experts of a `Llama` "tiled_experts".

    In a `Llama` with scope="block", "layers" has "tiled_block", or "mlp" and the reason why only the MLP of a layer is tiled.
    In a `Llama` whose head is more than its weight, "head" has "tiled_loss" and the reason. Each path is what a call would
    run now.

    Args:
        model: a model that `tile_model` has changed, or one with `TiledMLP` or `TiledMoE` modules. Any other has no paths.
    Example:
        >>> mlp = nnx.Sequential(nnx.Linear(8, 12, rngs=nnx.Rngs(0)), nnx.silu, nnx.Linear(12, 8, rngs=nnx.Rngs(0)))
        >>> _ = tile_model(mlp)
        >>> mlp.layers[0] = nnx.LoRA(8, 2, 12, base_module=mlp.layers[0], rngs=nnx.Rngs(1))
        >>> tiling_paths(mlp)
        {'': 'tile: layers.0 is LoRA'}
    """
    _check_module("tiling_paths", model)
    paths = {_name(path): module._path() for path, module in _own(model)}
    paths |= {_name(path): "tiled_moe" for path, module in nnx.iter_modules(model) if isinstance(module, TiledMoE)}
    paths |= {_name(path): path_of(module) for path, module in nnx.iter_modules(model) if is_tiled(module)}
    for path, module in nnx.iter_modules(model):
        reason = module.reason_not_plain_head() if isinstance(module, Llama) and not module.plain else None
        if reason is not None:
            paths[_name((*path, "head"))] = f"tiled_loss: {reason}"
        if isinstance(module, Llama) and module.scope == "block":
            paths[_name((*path, "layers"))] = ran = module._path()
            if ran == "tiled_block":  # its MLP is not called
                paths.pop(_name((*path, "layers", "mlp")), None)
    if not any(is_tiled(module) for _, module in nnx.iter_modules(model)):
        return paths
    for each in survey(model):
        if each.name not in paths:
            reason = each.found.reason or "it was not there when the model was tiled"
            paths[each.name] = f"untiled: {reason}"
    return paths


def paths_that_ran(model: nnx.Module) -> dict[str, str]:
    """Return the paths of the modules of a model that were called themselves, as they ran; not where a stack's copies were."""
    tiled = ((path, path_that_ran(module)) for path, module in nnx.iter_modules(model) if is_tiled(module))
    return {_name(path): ran for path, ran in tiled if ran is not None}


class SeenMLP(NamedTuple):
    """One module of a model and what a probe found it to be."""

    name: str
    module: nnx.Module
    found: Found


def survey(model: nnx.Module) -> list[SeenMLP]:
    """Return the modules of a model that can be tiled, or are left although they look like MLPs; none inside another.

    Those that are the formula come first, wherever they are; of the rest, those that look like MLPs and contain none.
    """
    modules = [(path, module) for path, module in reversed(list(nnx.iter_modules(model))) if _may_be_one(module)]
    found: dict[tuple[Any, ...], SeenMLP] = {}
    known = [path for path, _ in _own(model)]
    for path, module in modules:
        if not _inside(path, [*found, *known]) and len(leaves_of(module)) <= 12:
            result = _probed_once(module, looks_like_one=False)
            if result.formula is not None:
                found[path] = SeenMLP(_name(path), module, result)
    formulas = [*found, *known]
    for path, module in modules:
        apart = not _inside(path, [*found, *known]) and not any(_inside(inner, [path]) for inner in formulas)
        written_out = _written_out(module)
        if apart and (written_out or _looks_like_one(path, module)):
            result = _probed_once(module, looks_like_one=True)
            if written_out and not result.token_wise:
                names = " and ".join(written_out)
                result = Found(
                    reason=f"{names} are called beside what is no MLP; in a module of their own they can be tiled"
                )
            found[path] = SeenMLP(_name(path), module, result)
    return list(found.values())


def _said(left: list[SeenMLP]) -> str:
    """Return the reasons, each with the modules that it holds of: the first few, and how many more."""
    names: dict[str, list[str]] = {}
    for each in sorted(left, key=lambda each: [part.zfill(9) for part in each.name.split(".")]):
        names.setdefault(each.found.reason, []).append(each.name or "the model")
    more = {reason: f" and {len(of) - 3} more" if len(of) > 3 else "" for reason, of in names.items()}
    return "; ".join(f"{', '.join(of[:3])}{more[reason]}: {reason}" for reason, of in names.items())


def _own(model: nnx.Module) -> list[tuple[Any, Any]]:
    """Return the library's own MLPs and experts with their paths, those that a model has tiled."""
    return [
        (path, module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, TiledMLP) or (isinstance(module, ExpertsMLP) and not module.plain)
    ]


def _may_be_one(module: nnx.Module) -> bool:
    """Return whether a module can be called and has parameters; a layer of Flax is no MLP, and its Sequential may be."""
    kind = kind_of(module)
    of_flax = kind.__module__.startswith("flax.nnx") and kind is not nnx.Sequential
    return callable(module) and not of_flax and not isinstance(module, TiledMLP | TiledMoE | ExpertsMLP)


def _looks_like_one(path: tuple[Any, ...], module: nnx.Module) -> bool:
    """Return whether a module is called an MLP, by its class, its attribute, or the names of its projections, or has the sizes
    of one."""
    if is_tiled(module):
        return True
    weights = [leaf for leaf in leaves_of(module).values() if len(value_of(leaf).shape) > 1]
    if len(weights) < 2:
        return False  # a norm before one
    names = [kind_of(module).__name__, *(str(part) for part in path[-1:])]
    named = any(_NAMES.search(name) for name in names) or any(parts <= vars(module).keys() for parts in _PARTS)
    return named or _has_the_sizes_of_one(module)


def _has_the_sizes_of_one(module: nnx.Module) -> bool:
    """Return whether a module's matrices are the kernels of its own two or three layers, into a wider size and out again."""
    sizes = {path: value_of(leaf).shape for path, leaf in leaves_of(module).items()}
    sizes = {path: shape for path, shape in sizes.items() if len(shape) > 1}
    if any(path[1:] != ("kernel",) or len(shape) != 2 for path, shape in sizes.items()):
        return False
    return _are_of_one(list(sizes.values()))


def _are_of_one(shapes: list[tuple[int, ...]]) -> bool:
    """Return whether matrices of these shapes lead into a wider size, one or two of them, and out again."""
    wider, narrower = ([shape for shape in shapes if (shape[0] < shape[1]) is up] for up in (True, False))
    return len(wider) in (1, 2) and len(set(wider)) == len(narrower) == 1 and narrower[0] == wider[0][::-1]


def _written_out(module: nnx.Module) -> tuple[str, ...]:
    """Return the names of a module's own layers that have the sizes of an MLP, beside parts with parameters of their own."""
    sizes = {path: value_of(leaf).shape for path, leaf in leaves_of(module).items()}
    own = {path[0]: shape for path, shape in sizes.items() if path[1:] == ("kernel",) and len(shape) == 2}
    others = any(path[0] not in own and len(shape) > 1 for path, shape in sizes.items())
    return tuple(map(str, own)) if others and _are_of_one(list(own.values())) else ()


def _inside(path: tuple[Any, ...], others: list[tuple[Any, ...]]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


_probes: dict[type, list[tuple[Form, Any, bool, Found]]] = {}


def _probed_once(module: nnx.Module, *, looks_like_one: bool) -> Found:
    """Return what a probe finds, from memory where a module of the same form and shapes was tried before."""
    kind = kind_of(module)
    form, known = mlp_form_of(module, kind), _probes.setdefault(kind, [])
    shapes = {path: value_of(leaf).shape for path, leaf in leaves_of(module).items()}
    for before in known:
        if before[1:3] == (shapes, looks_like_one) and difference(before[0], form) is None:
            return before[3]
    found = probed(module, kind, looks_like_one=looks_like_one)
    known.append((form, shapes, looks_like_one, found))
    return found


def _check_generic(options: Tiling, names: list[str]) -> None:
    """Raise SpecError for options that only the formula has a use for, where modules run through `tile`."""
    for option, default in (("keep", 0.0), ("memory_budget", None), ("token_axes", None)):
        if names and getattr(options, option) != default:
            rule = f"{default} where an MLP runs through tile"
            fail("tile_model", option, rule, getattr(options, option), advice=f"That is {', '.join(names)}.")


def _check_module(function: str, model: Any) -> None:
    if not isinstance(model, nnx.Module):
        fail_type(function, "model", "an nnx.Module", type(model).__name__)
