"""The state of Flax nnx modules inside a loop over shards: read as it is, random streams split, other writes refused."""

import dis
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.errors import UnsupportedError, fail_type, refusal_text, show_shape
from tiled_jax.tile.token_layout import varied

Path = tuple[Any, ...]


def check_rngs(function: str, rngs: Any) -> None:
    """Raise TypeError for what is neither one key (typed, or the uint32 numbers of one) nor streams nor None."""
    rule = "a key, nnx.Rngs, nnx.RngStream or None"
    if not isinstance(rngs, jax.Array | nnx.Rngs | nnx.RngStream | None):
        fail_type(function, "rngs", rule, type(rngs).__name__)
    if isinstance(rngs, jax.Array) and not _is_key(rngs):
        got = f"an array {rngs.dtype} {show_shape(tuple(rngs.shape))}"
        fail_type(function, "rngs", rule, got, advice="Every shard gets a split of the one key.")


def _is_key(value: jax.Array) -> bool:
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.ndim == 0
    return value.dtype == jnp.uint32 and value.shape == jax.eval_shape(jax.random.PRNGKey, 0).shape


def check_module_rngs(function: str, rngs: Any) -> nnx.Rngs:
    """Return the streams that a module draws its parameters from; TypeError for anything else."""
    if not isinstance(rngs, nnx.Rngs):
        fail_type(
            function, "rngs", "nnx.Rngs", type(rngs).__name__, advice="Pass rngs=nnx.Rngs(0), or of a seed of your own."
        )
    return rngs


def check_closure(function: str, fn: Any) -> None:
    """Raise UnsupportedError where fn closes over a key, from which every shard would draw the same numbers."""
    if any(isinstance(value, jax.Array) and _is_key(value) for value in closed_over(fn)):
        advice = (
            "Every shard would draw the same numbers: hand it to tile as rngs=, or to fn as an argument to mean that."
        )
        raise UnsupportedError(refusal_text(function, "fn closes over a random key", advice=advice))


def closed_over(fn: Any) -> list[Any]:
    """Return the leaves of what a function reads besides its arguments: cells, globals, defaults, arguments of a `partial`."""
    held: list[Any] = []
    while isinstance(fn, functools.partial):
        held += [fn.args, fn.keywords]
        fn = fn.func
    for cell in getattr(fn, "__closure__", None) or ():
        with suppress(ValueError):  # a name that is not bound yet
            held.append(cell.cell_contents)
    if (code := getattr(fn, "__code__", None)) is not None:
        named = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
        held += [fn.__globals__[name] for name in named if name in fn.__globals__]
        held += [fn.__defaults__, fn.__kwdefaults__]
    return jax.tree.leaves(held)


class Modules:
    """The modules that one tiled call uses, seen as arrays, so that a loop can rebuild them at its own trace level.

    Every random stream gives each shard a key of its own, and is advanced once for the whole call if a shard drew from
    it: two calls draw different numbers, and recomputation the same ones.
    """

    def __init__(self, modules: Sequence[Any], shards: int, function: str, axes: Iterable[str] = ()) -> None:
        """`axes`: mesh axes along which the tokens differ, and so the parameters as a shard sees them."""
        self._function = function
        self._graph, state = nnx.split(list(modules))
        self._variables = dict(nnx.to_flat_state(state))
        self._values = {path: varied(_value(variable), axes) for path, variable in self._variables.items()}
        self._streams = [path[:-1] for path, variable in self._variables.items() if isinstance(variable, nnx.RngKey)]
        self._drawn: set[Path] = set()
        self.shard_keys = [self._split(stream, shards) for stream in self._streams]

    def _split(self, stream: Path, shards: int) -> jax.Array:
        """Return one key per shard from the key of the stream's next draw."""
        key, count = (_value(self._variables[(*stream, name)]) for name in ("key", "count"))
        return jax.random.split(jax.random.fold_in(key, count), shards)

    def arrays(self) -> list[jax.Array]:
        """Return the values of the variables, but for those that are no arrays."""
        return [value for value in self._values.values() if isinstance(value, jax.Array)]

    def inside(self, keys: Sequence[jax.Array], arrays: Iterator[jax.Array] | None = None) -> "_Inside":
        """Return the modules as one shard sees them, with its keys. `arrays`: others in the place of `arrays()`."""
        values = dict(self._values)
        if arrays is not None:
            values = {path: next(arrays) if isinstance(a, jax.Array) else a for path, a in values.items()}
        for stream, key in zip(self._streams, keys, strict=True):
            values[(*stream, "key")] = key
            values[(*stream, "count")] = jnp.zeros_like(values[(*stream, "count")])
        state = [(path, _with_value(self._variables[path], value)) for path, value in values.items()]
        return _Inside(nnx.merge(self._graph, nnx.from_flat_state(state)), values, self._graph)

    def drew(self, written: Sequence[Path]) -> None:
        """Note what a shard wrote; anything but the count of a stream is refused.

        Raises:
            UnsupportedError: fn writes statistics, counters or other state.
        """
        counts = {(*stream, "count"): stream for stream in self._streams}
        for path in written:
            if path not in counts:
                name = type(self._variables[path]).__name__ if path in self._variables else "a new variable"
                raise UnsupportedError(
                    refusal_text(
                        self._function,
                        f"fn writes to the state of its modules: {'.'.join(map(str, path[1:]))} ({name})",
                        advice="Each shard would see the state of another; write it outside of fn, or switch it off "
                        "(for statistics: use_running_average=True).",
                    )
                )
            self._drawn.add(counts[path])

    def advance(self) -> None:
        """Move every stream that a shard drew from to its next draw."""
        for stream in self._drawn:
            count = self._variables[(*stream, "count")]
            count.set_value(count.get_value() + 1)


class _Inside:
    """Modules rebuilt for one shard, and what was in them before fn ran."""

    def __init__(self, modules: list[Any], before: dict[Path, Any], graph: Any) -> None:
        self.modules, self._before, self._graph = modules, before, graph

    def written(self) -> list[Path]:
        """Return paths of the variables that hold another array now, or did not exist."""
        _, state = nnx.split(self.modules)
        after = {path: _value(variable) for path, variable in nnx.to_flat_state(state)}
        return [path for path, value in after.items() if path not in self._before or value is not self._before[path]]


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _with_value(variable: Any, value: Any) -> Any:
    return variable.replace(value) if isinstance(variable, nnx.Variable) else value
