"""Named streams of random keys for devices that compute parts of one model: who draws the same numbers, and who does not.

A stream is a key and a count of the draws from it, both plain arrays: under `jax.jit` they go in and come out as any
other argument, and what a checkpoint computes again draws from the same keys.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.core import Tracer

from shared_specs.errors import fail, fail_type
from shared_specs.layers.random import RANDOM_STREAMS, stream_coordinates

_DEFAULT = "tensor-parallel"
State = tuple[jax.Array, jax.Array]  # a typed key, and how many draws were made from it


def seed_parallel(seed: Any, *, data: Any = 0, tensor: Any = 0, expert: Any = 0) -> "RandomStates":
    """Return the named streams of one device, all derived from one seed and the device's place in the mesh.

    "data-parallel" differs between data ranks and is the same on all tensor and expert ranks. Use it for activations that
    tensor ranks hold whole. "tensor-parallel" also differs between tensor ranks. Use it for activations that are split.
    "expert-parallel" differs between all ranks (shared_specs.layers.random.RANDOM_STREAMS). Inside `jax.shard_map` the types
    of the keys agree with this: a key varies only along these axes.

    Args:
        seed: an integer >= 0, or a key, the same on all devices.
        data, tensor, expert: the device's index along each axis: integers, or inside `jax.shard_map` `lax.axis_index(...)` or
            the result of `mesh_coordinates`. Context and pipeline ranks count as data ranks.
    Returns:
        `RandomStates` with the three streams.
    Numerics: the numbers are not those of tiled_torch, which has other generators. Which ranks agree is the same.
    Raises:
        SpecError: a seed or a rank below 0. TypeError: no integer and no key.
    Source: the roles are Megatron-LM's (arXiv 1909.08053); keys are folded, never added, so that no two seeds give the same
        key.
    Example:
        >>> a, b = seed_parallel(7, tensor=0), seed_parallel(7, tensor=1)
        >>> bool(a.key("data-parallel") == b.key("data-parallel")), bool(a.key() == b.key())
        (True, False)
    """
    root = _key("seed_parallel", "seed", seed)
    ranks = {"data": data, "tensor": tensor, "expert": expert}
    for axis, rank in ranks.items():
        _check_integer("seed_parallel", axis, rank)
    states = RandomStates()
    for name in RANDOM_STREAMS:
        key = root
        for coordinate in stream_coordinates(name, **ranks):
            key = jax.random.fold_in(key, coordinate)
        states.add(name, key)
    return states


def mesh_coordinates(*, data: Any = (), tensor: Any = (), expert: Any = ()) -> dict[str, Any]:
    """Return the ranks of this device for `seed_parallel`, inside `jax.shard_map`, from names of mesh axes.

    Args:
        data, tensor, expert: a name or a tuple of names, such as ("dp_replicate", "dp_shard", "cp"); () is rank 0.
    Example:
        states = seed_parallel(7, **mesh_coordinates(data=("dp", "cp"), tensor="tp"))
    """
    given = {"data": data, "tensor": tensor, "expert": expert}
    names = {role: (axes,) if isinstance(axes, str) else tuple(axes) for role, axes in given.items()}
    return {role: lax.axis_index(axes) if axes else 0 for role, axes in names.items()}


@jax.tree_util.register_pytree_node_class
class RandomStates:
    """Random streams by name. A draw is the stream's key folded with its count, which the draw advances.

    It is a pytree. A jitted function that gets one and draws from it must return it. Otherwise the caller's counts do not
    change. The body of a `lax.scan` is traced once, so pass it one of `keys` for each step.

    Example:
        >>> states = RandomStates()
        >>> states.add("dropout", 3)
        >>> with states.fork("dropout") as rngs:
        ...     dropped = nnx.Dropout(0.5)(jax.numpy.ones(8), rngs=rngs)
    """

    def __init__(self) -> None:
        self._streams: dict[str, State] = {}

    def add(self, name: str, seed: Any) -> None:
        """Add a stream from a seed, an integer >= 0 or a key.

        Raises:
            SpecError: the name is taken, or another stream was made from the same seed.
        """
        if name in self._streams:
            fail("RandomStates.add", "name", "new", repr(name), advice="reset() forgets all streams.")
        key = _key("RandomStates.add", "seed", seed)
        if _known(key) and any(_same(key, other) for other, _ in self._streams.values()):
            fail("RandomStates.add", "seed", "new", seed, advice="Two streams of one seed are the same numbers.")
        self._streams[name] = (key, jax.numpy.zeros((), jax.numpy.uint32))

    def key(self, name: str = _DEFAULT) -> jax.Array:
        """Return the key of the stream's next draw."""
        return self._draw("RandomStates.key", name)

    def keys(self, name: str = _DEFAULT, *, number: int) -> jax.Array:
        """Return [number] keys for the steps of a `lax.scan`; together they are one draw of the stream."""
        return jax.random.split(self._draw("RandomStates.keys", name), number)

    @contextmanager
    def fork(self, name: str = _DEFAULT) -> Iterator[nnx.Rngs]:
        """Return nnx.Rngs whose streams all draw from this one stream; together they are one draw of it.

        Forks of one stream may nest. Each is a separate draw, in the order of entry.
        """
        yield nnx.Rngs(self._draw("RandomStates.fork", name))

    def rngs(self, **streams: str) -> nnx.Rngs:
        """Return nnx.Rngs for modules, with one of these streams for each of theirs by name, such as
        `params="data-parallel"`."""
        return nnx.Rngs(**{name: self._draw("RandomStates.rngs", stream) for name, stream in streams.items()})

    def states(self) -> dict[str, State]:
        """Return every stream's key and count, as `set_states` takes them. Keys and counts are arrays, safe to store."""
        return dict(self._streams)

    def set_states(self, states: Mapping[str, State]) -> None:
        """Continue from `states`: its streams replace all present streams.

        Raises:
            TypeError: not a mapping, or a value is not a key and a count.
        """
        function = "RandomStates.set_states"
        if not isinstance(states, Mapping):
            fail_type(function, "states", "a mapping", type(states).__name__)
        for name, state in states.items():
            if not isinstance(state, tuple | list) or len(state) != 2 or not _is_key(state[0]):
                fail_type(function, f"states[{name!r}]", "a key and a count", type(state).__name__)
            _check_integer(function, f"the count of states[{name!r}]", state[1])
        self._streams = {
            name: (key, jax.numpy.asarray(count, jax.numpy.uint32)) for name, (key, count) in states.items()
        }

    def reset(self) -> None:
        """Remove all streams."""
        self._streams = {}

    def _draw(self, function: str, name: str) -> jax.Array:
        if name not in self._streams:
            fail(function, "name", f"one of {', '.join(self._streams) or 'no streams'}", repr(name))
        key, count = self._streams[name]
        self._streams[name] = (key, count + 1)
        return jax.random.fold_in(key, count)

    def tree_flatten(self) -> tuple[tuple[State, ...], tuple[str, ...]]:
        """As a pytree: keys and counts."""
        return tuple(self._streams.values()), tuple(self._streams)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], streams: tuple[State, ...]) -> Self:
        """From a pytree."""
        states = cls()
        states._streams = dict(zip(names, streams, strict=True))
        return states


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _key(function: str, argument: str, seed: Any) -> jax.Array:
    """Return a typed key from an integer or from a key."""
    if _is_key(seed):
        return seed
    _check_integer(function, argument, seed, "an integer or a key")
    return jax.random.key(seed)


def _check_integer(function: str, argument: str, value: Any, rule: str = "an integer") -> None:
    known = isinstance(value, int | np.integer) and not isinstance(value, bool)
    integer_array = (
        isinstance(value, jax.Array | np.ndarray)
        and value.ndim == 0
        and jax.numpy.issubdtype(value.dtype, jax.numpy.integer)
    )
    if not known and not integer_array:
        fail_type(function, argument, rule, type(value).__name__)
    if known and value < 0:
        fail(function, argument, ">= 0", value)


def _known(key: jax.Array) -> bool:
    return not isinstance(key, Tracer)


def _same(a: jax.Array, b: jax.Array) -> bool:
    """Return whether two keys are equal; two that are not known yet are not compared."""
    return _known(b) and a.dtype == b.dtype and bool((jax.random.key_data(a) == jax.random.key_data(b)).all())
