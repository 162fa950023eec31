"""The call of a tiled module: through `tiled_mlp` while it is what was probed, through `tile` otherwise.

Everything about tiling is in the class that a module is given: its attributes, state and checkpoints stay what they were.
"""

import copyreg
import warnings
from collections.abc import Iterator, MutableMapping
from functools import cache
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.extend import core

from shared_specs.config import Tiling
from tiled_jax.core.params import as_operands
from tiled_jax.mlp.api import tiled_mlp
from tiled_jax.models.others.form import Form, difference, leaves_of, mlp_form_of, value_of
from tiled_jax.models.others.formula import Formula
from tiled_jax.tile.api import tile

_PLAIN = (None, lax.Precision.HIGHEST, (lax.Precision.HIGHEST, lax.Precision.HIGHEST))


class Dtypes(NamedTuple):
    """The one dtype of a module's products, and that of its result."""

    computed: Any
    result: Any


_classes: dict[type, list[Any]] = {}
_ran: MutableMapping[Any, str] = (
    WeakKeyDictionary()
)  # what was traced last; no attribute, which nnx would take for state


def tiled_class(untiled: type, formula: Formula | None, form: Form, tiling: Tiling, backend: str) -> type:
    """Return the class of a tiled module, the same one for the same arguments.

    Its one base is the class before: Python gives an object no class of other bases.
    """
    made = _classes.setdefault(untiled, [])
    for known in made:
        if (known._formula, known._tiling, known._backend) == (formula, tiling, backend):
            if difference(known._form, form) is None:
                return known
    attributes = {
        "_untiled": untiled,
        "_formula": formula,
        "_form": form,
        "_tiling": tiling,
        "_backend": backend,
        "_dtypes": {},  # what `_dtypes_of` found
        "__call__": _call,
        "__module__": untiled.__module__,
        "__doc__": untiled.__doc__,
    }
    made.append(_metaclass(type(untiled))(f"Tiled{untiled.__name__}", (untiled,), attributes))
    return made[-1]


@cache
def _metaclass(kind: type) -> type:
    """Return a metaclass whose classes are pickled by what they are made of, in models and in graph definitions."""
    made = type(kind.__name__, (kind,), {})
    copyreg.pickle(made, _reduced)  # type: ignore[arg-type]
    return made


def _reduced(made: Any) -> tuple[Any, tuple[Any, ...]]:
    return tiled_class, (made._untiled, made._formula, made._form, made._tiling, made._backend)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute what the module's own call does, a shard of tokens at a time."""
    called: Any = module._untiled.__call__
    x = args[0] if args else None
    if isinstance(x, nnx.Variable):
        x = x[...]
    if reason_not_formula(module) is None and len(args) == 1 and not kwargs and hasattr(x, "dtype"):
        dtypes = _dtypes_of(module, x)
        if isinstance(dtypes, Dtypes):
            _ran[module] = "tiled_mlp"
            return _by_formula(module, x, dtypes)
    if getattr(x, "ndim", 2) < 2:
        _ran[module] = "untiled: it is called with one token"
        return called(module, *args, **kwargs)
    now = path_of(module)
    _ran[module] = "tile: it is called with more than x" if now == "tiled_mlp" else now
    if module._formula is not None and now != "tiled_mlp":  # where there is no formula tile_model has found none
        reason = now.removeprefix("tile: ")
        warnings.warn(
            f"tile_model: {module._untiled.__name__} runs through tile, which recomputes all of it: {reason}. "
            "tiling_paths(model) says which ones.",
            stacklevel=2,
        )
    return tile(MethodType(called, module), tiling=module._tiling)(*args, **kwargs)


def _by_formula(module: Any, x: Any, dtypes: Dtypes) -> jax.Array:
    values = {path: value_of(leaf) for path, leaf in leaves_of(module).items()}
    w = as_operands(module._formula.operands(values), dtypes.computed)
    y = tiled_mlp(
        x.astype(dtypes.computed),
        w.get("w_gate"),
        w["w_up"],
        w["w_down"],
        biases={name[2:]: bias for name, bias in w.items() if name[0] == "b"},
        activation=module._formula.activation,
        tiling=module._tiling,
        backend=module._backend,
    )
    return y.astype(dtypes.result)


def is_tiled(module: Any) -> bool:
    """Return whether a module runs tiled, its class, or one that this was made from, being made here."""
    return hasattr(type(module), "_untiled") and type(module)._untiled in _classes


def kind_of(module: Any) -> type:
    """Return the class of a module before it was tiled."""
    return module._untiled if is_tiled(module) else type(module)


def set_class(module: Any, kind: type) -> None:
    """Give a module another class, past nnx, which would take it for an attribute."""
    object.__setattr__(module, "__class__", kind)


def reason_not_formula(module: Any) -> str | None:
    """Return why a tiled module is not computed by its formula now; None where it is."""
    if module._formula is None:
        return "it is not the formula of an MLP"
    return difference(mlp_form_of(module, module._untiled), module._form)


def path_of(module: Any) -> str:
    """Return how a tiled module would run now."""
    reason = reason_not_formula(module)
    if reason is None:
        found = _dtypes_of(module, None)
        reason = found if isinstance(found, str) else None
    return "tiled_mlp" if reason is None else f"tile: {reason}"


def path_that_ran(module: Any) -> str | None:
    """Return how the last call of a tiled module ran; None where this very object was not called."""
    return _ran.get(module)


def _dtypes_of(module: Any, x: Any) -> Dtypes | str:
    """Return the dtypes that a module's own call has for x, or why the formula has others. x None: of its weights' dtype."""
    graph, state = nnx.split(module)
    leaves = {path: value_of(leaf) for path, leaf in nnx.to_flat_state(state)}
    up = dict(module._formula.parts)["w_up"]
    dtype = leaves[up.path].dtype if x is None else x.dtype
    key = dtype, x is None or x.ndim > 1, tuple((path, a.dtype) for path, a in leaves.items())
    if key not in module._dtypes:
        lead = x.shape[:-1] if x is not None and x.ndim == 1 else (1, 1)
        module._dtypes[key] = _traced(module, graph, state, lead, dtype)
    return module._dtypes[key]


def _traced(module: Any, graph: Any, state: Any, lead: tuple[int, ...], dtype: Any) -> Dtypes | str:
    values = {path: value_of(leaf) for path, leaf in nnx.to_flat_state(state)}
    part = dict(module._formula.parts)["w_up"]
    stacked = len(values[part.path].shape) - (2 if part.pair is None else 3)
    shapes = [jax.ShapeDtypeStruct(a.shape[stacked:], a.dtype) for a in values.values()]
    one = jax.eval_shape(lambda *arrays: part.of(dict(zip(values, arrays, strict=True))), *shapes)

    def own(arrays: list[jax.Array], x: jax.Array) -> jax.Array:
        pairs = zip(nnx.to_flat_state(state), arrays, strict=True)
        leaves = [(path, leaf.replace(a) if isinstance(leaf, nnx.Variable) else a) for (path, leaf), a in pairs]
        copy: Any = nnx.merge(graph, nnx.from_flat_state(leaves))
        set_class(copy, module._untiled)
        return copy(x)

    try:
        traced = jax.make_jaxpr(own)(shapes, jax.ShapeDtypeStruct((*lead, one.shape[0]), dtype))
    except Exception as error:  # of somebody else's module
        return f"its own call raised {type(error).__name__} for x in {jnp.dtype(dtype).name}"
    products = list(_products(traced.jaxpr))
    dtypes = {each.aval.dtype for product in products for each in (*product.invars, *product.outvars)}
    if len(dtypes) != 1:
        return "its products are of several dtypes: " + ", ".join(sorted(each.name for each in dtypes))
    if any(product.params["precision"] not in _PLAIN for product in products):
        return "its products have a precision of their own"
    return Dtypes(dtypes.pop(), traced.out_avals[0].dtype)


def _products(jaxpr: Any) -> Iterator[Any]:
    """Yield every matrix product of a program, inner ones included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from _products(getattr(value, "jaxpr", value))


def _is_program(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
