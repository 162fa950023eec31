"""A module tried on a few tokens, with parameters drawn for it: is it the formula of an MLP, and if not, is it token-wise?

The parameters of the module itself say nothing where they are zeros, as in a model that waits for its checkpoint, or shapes
alone, and are not read. 16 bits become float32 in the copy that is tried, so that roundings hide nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.config import ACTIVATIONS
from shared_specs.tolerances import FORMULA_FLOAT32
from tiled_jax.models.others.form import Path, leaves_of, value_of
from tiled_jax.models.others.formula import Formula, candidates
from tiled_jax.tile.api import tile

Values = dict[Path, Any]
_ROWS = (2, 5)  # tokens that the formula is compared on
# Each of its own size: small ones, and some whose values meet whatever a module cuts off.
_SCALES = ((0.1, 0.3, 1.0, 1.0, 3.0), (10.0, 100.0, 1e3, 1e4, 1.0))
_TOKENS = 64  # and those that shards of are compared with all

_WRITES = "it writes to its state"
_MIXES = "a token's result depends on other tokens"


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a probe: the formula, or that the module is token-wise, or why it stays as it is."""

    formula: Formula | None = None
    token_wise: bool = False
    reason: str = ""


class Probe:
    """A copy of a module in one mode, as a function of the values of its variables and of x."""

    def __init__(self, module: nnx.Module, kind: type, *, training: bool) -> None:
        """kind: the class of the module before it was tiled."""
        graph, state = nnx.split(module)
        leaves = nnx.to_flat_state(state)
        lead = _stacked(module)
        draw = np.random.default_rng(0)
        copy: Any = nnx.merge(graph, nnx.from_flat_state([(path, _drawn(leaf, lead, draw)) for path, leaf in leaves]))
        object.__setattr__(copy, "__class__", kind)
        copy.train() if training else copy.eval()
        _in_float32(copy)
        self._graph, state = nnx.split(copy)
        self._leaves = dict(nnx.to_flat_state(state))
        self.values: Values = {path: value_of(leaf) for path, leaf in self._leaves.items()}
        self.writes = False

    @property
    def parameters(self) -> Values:
        """Return the values of floating-point variables."""
        return {path: a for path, a in self.values.items() if jnp.issubdtype(a.dtype, jnp.floating)}

    def __call__(self, parameters: Mapping[Path, Any], x: jax.Array) -> Any:
        """Return the result of the module with these parameters."""
        return self._forward(parameters, x)[0]

    def run(self, x: jax.Array) -> Any:
        """Return the result, compiled; whether the module wrote to its state is noted."""
        y, after = jax.jit(self._forward)(self.parameters, x)
        # nnx.remat writes back what it did not change.
        self.writes |= any(
            not np.array_equal(np.asarray(a), np.asarray(self.values[path])) for path, a in after.items()
        )
        return y

    def _forward(self, parameters: Mapping[Path, Any], x: jax.Array) -> tuple[Any, Values]:
        """Return the result, and what was written; a stream of random numbers may be."""
        values = self.values | dict(parameters)
        module = self.module(values)
        y = module(x)
        streams = {path for path, leaf in self._leaves.items() if isinstance(leaf, nnx.RngState)}
        after = {path: value_of(leaf) for path, leaf in leaves_of(module).items() if path not in streams}
        self.writes |= not after.keys() <= values.keys()
        return y, {path: a for path, a in after.items() if path in values and a is not values[path]}

    def module(self, values: Values) -> Any:
        """Return the module with these values."""
        leaves = self._leaves.items()
        pairs = [(path, a.replace(values[path]) if isinstance(a, nnx.Variable) else values[path]) for path, a in leaves]
        return nnx.merge(self._graph, nnx.from_flat_state(pairs))

    def hidden(self) -> tuple[int, Any]:
        """Return a width of x that the module takes, and the form of its result; TypeError for none."""
        sizes = dict.fromkeys(size for a in self.parameters.values() for size in a.shape if size > 1)
        last: Exception | None = None
        for size in sizes:
            x = jax.ShapeDtypeStruct((*_ROWS, size), jnp.float32)
            try:
                return size, jax.eval_shape(self, self.parameters, x)
            except Exception as error:  # whatever somebody else's module raises for a width that is not its own
                last = error
        text = f": {type(last).__name__}" if last else ""
        raise TypeError(f"it cannot be called with tokens alone{text}")


def probed(module: nnx.Module, kind: type, *, looks_like_one: bool) -> Found:
    """Return what a module is found to be. looks_like_one: whether it is asked to be token-wise, if it is not the formula."""
    with ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        try:
            probe = Probe(module, kind, training=False)
            hidden, form = probe.hidden()
        except Exception as error:  # of somebody else's module, which may raise anything
            return Found(
                reason=str(error) if type(error) is TypeError else f"a probe of it raised {type(error).__name__}"
            )
        if probe.writes:
            return Found(reason=_WRITES)
        formula = _formula_of(probe, hidden, form)
        if formula is not None and _is(_made(module, kind), formula, hidden):
            return Found(formula=formula)
        if not looks_like_one:
            return Found(reason="it is not the formula of an MLP")
        reason = _reason_not_token_wise(module, probe, hidden)
        return Found(token_wise=reason is None, reason=reason or "")


def _made(module: nnx.Module, kind: type) -> Probe | None:
    try:
        return Probe(module, kind, training=True)
    except Exception:  # in training it is not what it is in evaluation
        return None


def _formula_of(probe: Probe, hidden: int, form: Any) -> Formula | None:
    """Return the formula that has the values of the module; of two different ones none has those of the other."""
    if not isinstance(form, jax.ShapeDtypeStruct) or form.shape[:-1] != _ROWS or form.dtype != jnp.float32:
        return None
    shapes = {path: a.shape for path, a in probe.parameters.items()}
    if len(probe.parameters) != sum(not isinstance(leaf, nnx.RngState) for leaf in probe._leaves.values()):
        return None
    x = _tokens(1, hidden)
    y = probe.run(x)
    numbers = {path: np.asarray(a) for path, a in probe.parameters.items()}
    made = (
        Formula(tuple(parts.items()), activation)
        for parts in candidates(shapes, hidden, form.shape[-1])
        for activation in ACTIVATIONS
    )
    return next((formula for formula in made if _each_close(formula(numbers, np.asarray(x)), y)), None)


def _is(probe: Probe | None, formula: Formula, hidden: int) -> bool:
    """Return whether a module has the formula's values and gradients (of x, token by token, and of every parameter).

    Parameters have the gradients of tokens of one size, where none is lost beside those of larger ones.
    """
    if probe is None:
        return False
    try:
        for x, of_each in ((_tokens(2, hidden), True), (_normal(2, (*_ROWS, hidden)), False)):
            dy = _normal(3, probe.run(x).shape)
            (found, expected), (of_found, of_expected) = zip(
                *(jax.jit(_gradients, static_argnums=0)(fn, probe.parameters, x, dy) for fn in (probe, formula)),
                strict=True,
            )
            if not all(map(_each_close, found, expected)):
                return False
            pairs = zip(jax.tree.leaves(of_found), jax.tree.leaves(of_expected), strict=True)
            if not of_each and not all(_close(a, b) for a, b in pairs):
                return False
    except Exception:  # in training it needs what it is not given, a random stream
        return False
    return not probe.writes


def _gradients(fn: Callable[..., Any], parameters: Values, x: jax.Array, dy: jax.Array) -> Any:
    """Return y and dx, and the gradients of the parameters."""
    y, pull = jax.vjp(fn, parameters, x)
    dparameters, dx = pull(dy)
    return (y, dx), dparameters


def _reason_not_token_wise(module: nnx.Module, probe: Probe, hidden: int) -> str | None:
    """Return why shards of tokens would not have the results of all of them; None where they have.

    Compared on tokens that differ and on tokens that are nearly the same, which an expert of few places could not all take.
    """
    for _, inner in nnx.iter_modules(module):
        if getattr(inner, "broadcast_dims", ()):
            return "its dropout draws one mask for several tokens"
    part = slice(_TOKENS // 4, _TOKENS // 2)
    different, alike = _normal(4, (1, _TOKENS, hidden)), _normal(5, (1, 1, hidden))
    for x in (different, alike + 1e-3 * different):
        try:
            whole, piece = (probe.run(rows) for rows in (x, x[:, part]))
        except Exception as error:  # of somebody else's module
            return f"a probe of it raised {type(error).__name__}"
        if probe.writes:
            return _WRITES
        pairs = list(zip(jax.tree.leaves(whole), jax.tree.leaves(piece), strict=True))
        if not all(getattr(a, "shape", ())[:2] == (1, _TOKENS) for a, _ in pairs):
            return "a result of it has no row for each token"
        if not all(_close(a[:, part], b) for a, b in pairs):
            return _MIXES
    try:
        jax.eval_shape(lambda x: tile(probe.module(probe.values), num_shards=2)(x), different)
    except Exception as error:  # of `tile`, which says why
        return str(error).removesuffix(".")
    return None


def _close(found: Any, expected: Any) -> bool:
    a, b = (np.asarray(each, np.float64) for each in (found, expected))
    return a.shape == b.shape and bool(np.linalg.norm(a - b) <= FORMULA_FLOAT32 * np.linalg.norm(b))


def _each_close(found: Any, expected: Any) -> bool:
    """Return whether every token of one is the other's."""
    a, b = (np.asarray(each, np.float64) for each in (found, expected))
    if a.shape != b.shape:
        return False
    return bool(np.all(np.linalg.norm(a - b, axis=-1) <= FORMULA_FLOAT32 * np.linalg.norm(b, axis=-1)))


def _tokens(seed: int, hidden: int) -> jax.Array:
    """Return tokens of sizes that differ."""
    return _normal(seed, (*_ROWS, hidden)) * jnp.asarray(_SCALES, jnp.float32)[..., None]


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _drawn(leaf: Any, lead: int, draw: np.random.Generator) -> Any:
    """Return a leaf with values of the probe's own: where layers are stacked, those of one layer."""
    value = value_of(leaf)
    if isinstance(leaf, nnx.RngKey):
        return leaf.replace(jax.random.key(0))
    if isinstance(leaf, nnx.RngCount):
        return leaf.replace(jnp.zeros((), jnp.uint32))
    shape = value.shape[lead:]
    if not isinstance(leaf, nnx.Variable) or not jnp.issubdtype(value.dtype, jnp.floating):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError("it has arrays besides parameters, of which the shapes alone are known")
        return (
            leaf
            if not lead
            else leaf.replace(value[(0,) * lead])
            if isinstance(leaf, nnx.Variable)
            else value[(0,) * lead]
        )
    # Of values that make an activation bend: a token's sums are of the order of one.
    scale = 1.5 / np.sqrt(min(shape[-2:])) if len(shape) > 1 else 0.5
    drawn = draw.standard_normal(shape, np.float32) * np.float32(scale)
    return leaf.replace(jnp.asarray(drawn))


def _stacked(module: nnx.Module) -> int:
    """Return how many dims of stacked layers, as nnx.vmap makes them for nnx.scan, the variables have before their own."""
    linears = (inner for _, inner in nnx.iter_modules(module) if isinstance(inner, nnx.Linear))
    found = (len(linear.kernel.shape) - 2 for linear in linears)
    return next(found, 0)


def _in_float32(module: nnx.Module) -> None:
    """Write float32 for every other floating-point dtype among the attributes of a module, and those of its configurations."""
    for _, inner in nnx.iter_modules(module):
        for name, value in list(vars(inner).items()):
            if _is_other(value):
                setattr(inner, name, jnp.float32)
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                others = [
                    field.name
                    for field in dataclasses.fields(value)
                    if field.init and _is_other(getattr(value, field.name))
                ]
                if others:
                    setattr(inner, name, dataclasses.replace(value, **dict.fromkeys(others, jnp.float32)))


def _is_other(value: Any) -> bool:
    if not isinstance(value, type | np.dtype | jnp.bfloat16.__class__):
        return False
    try:
        return jnp.dtype(value) in (jnp.bfloat16, jnp.float16, np.float64)
    except TypeError:
        return False
