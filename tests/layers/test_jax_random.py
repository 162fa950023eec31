"""Named random streams: who agrees with whom on eight devices, the same numbers in recomputation, states that come back."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.layers.random import RANDOM_STREAMS
from tiled_jax import SpecError
from tiled_jax.parallel import RandomStates, mesh_coordinates, seed_parallel

AXES = ("data", "tensor", "expert")
RANKS = list(itertools.product(range(2), repeat=3))


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((2, 2, 2), AXES, axis_types=(kind,) * 3)


def drawn(states: RandomStates, name: str) -> jax.Array:
    return jax.random.bits(states.key(name), (4,))


def test_forks_of_one_stream_nest() -> None:
    """Each is one draw of the stream, in the order in which they are entered, again under a checkpoint: no number twice."""

    def dropped(rngs: nnx.Rngs) -> jax.Array:
        return nnx.Dropout(0.5)(jnp.ones(64), rngs=rngs)

    def nested(states: RandomStates) -> list[jax.Array]:
        with states.fork() as outer:
            first = dropped(outer)
            with states.fork() as inner:
                second = dropped(inner)
            third = dropped(outer)
        with states.fork() as after:
            return [first, second, third, dropped(after)]

    def in_turn(states: RandomStates) -> list[jax.Array]:
        outer, inner, after = (nnx.Rngs(states.key()) for _ in range(3))
        return [dropped(outer), dropped(inner), dropped(outer), dropped(after)]

    found, expected = nested(seed_parallel(7)), in_turn(seed_parallel(7))
    np.testing.assert_array_equal(found, expected)
    assert len({tuple(one.tolist()) for one in found}) == 4
    again = jax.checkpoint(lambda x: x * jnp.stack(nested(seed_parallel(7))))
    _, pull = jax.vjp(again, jnp.ones((4, 64)))
    np.testing.assert_array_equal(pull(jnp.ones((4, 64)))[0], found)


@pytest.mark.ranks
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_exactly_which_ranks_agree(kind: AxisType, check_vma: bool) -> None:
    """Every pair of eight devices, every stream; two draws of one stream never agree; and the ranks may be numbers."""

    def on_device() -> dict[str, jax.Array]:
        states = seed_parallel(7, **mesh_coordinates(data="data", tensor="tensor", expert="expert"))
        return {
            name: jnp.stack([drawn(states, name), drawn(states, name)])[None, None, None] for name in RANDOM_STREAMS
        }

    fn = jax.shard_map(on_device, mesh=mesh_of(kind), in_specs=(), out_specs=P(*AXES), check_vma=check_vma)
    found = {name: np.asarray(value) for name, value in jax.jit(fn)().items()}
    for name, axes in RANDOM_STREAMS.items():
        for a, b in itertools.combinations(RANKS, 2):
            agree = all(a[i] == b[i] for i, axis in enumerate(AXES) if axis in axes)
            assert (found[name][a] == found[name][b]).all() == agree, (name, a, b)
            assert agree or (found[name][a] != found[name][b]).any(axis=-1).all(), (name, a, b)
        assert (found[name][0, 0, 0, 0] != found[name][0, 0, 0, 1]).any()
    for a in RANKS:
        states = seed_parallel(7, **dict(zip(AXES, a, strict=True)))
        for name in RANDOM_STREAMS:
            np.testing.assert_array_equal(found[name][a], [drawn(states, name), drawn(states, name)])
    streams = [found[name][0, 0, 0].tolist() for name in RANDOM_STREAMS]
    assert all(a != b for a, b in itertools.combinations(streams, 2))


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_on_one_two_and_four_devices(shape: tuple[int, int, int]) -> None:
    """The same numbers as by the ranks themselves, and so as on eight."""
    devices = jax.devices()[: shape[0] * shape[1] * shape[2]]
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)

    def on_device() -> list[jax.Array]:
        states = seed_parallel(7, **mesh_coordinates(data="data", tensor="tensor", expert="expert"))
        return [drawn(states, name)[None, None, None] for name in RANDOM_STREAMS]

    found = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=(), out_specs=[P(*AXES)] * 3))()
    for name, a in zip(RANDOM_STREAMS, found, strict=True):
        for place in itertools.product(*map(range, shape)):
            states = seed_parallel(7, **dict(zip(AXES, place, strict=True)))
            np.testing.assert_array_equal(a[place], drawn(states, name))


@pytest.mark.ranks
def test_types_say_which_ranks_agree() -> None:
    """With check_vma a result that is the same along an axis may leave `shard_map` as one that is."""

    def on_device() -> list[jax.Array]:
        states = seed_parallel(7, **mesh_coordinates(data="data", tensor="tensor", expert="expert"))
        return [drawn(states, name) for name in RANDOM_STREAMS]

    specs = [P(axes) for axes in RANDOM_STREAMS.values()]
    found = jax.jit(jax.shard_map(on_device, mesh=mesh_of(), in_specs=(), out_specs=specs))()
    assert [len(a) for a in found] == [8, 16, 32]
    with pytest.raises(ValueError, match=r"replicat|vary"):
        jax.jit(jax.shard_map(on_device, mesh=mesh_of(), in_specs=(), out_specs=[P("data")] * 3))()


@pytest.mark.ranks
def test_several_axes_are_one_rank() -> None:
    fn = jax.shard_map(
        lambda: drawn(seed_parallel(7, **mesh_coordinates(data=("data", "expert"))), "data-parallel")[None],
        mesh=mesh_of(),
        in_specs=(),
        out_specs=P(("data", "expert")),
    )
    expected = [drawn(seed_parallel(7, data=rank), "data-parallel") for rank in range(4)]
    np.testing.assert_array_equal(jax.jit(fn)(), expected)


@pytest.mark.ranks
def test_recomputation_sees_the_same_dropout(same: Any) -> None:
    """Split activations drop apart, whole ones alike; a checkpoint changes no number, and neither does a loop of them."""
    mesh, rate = mesh_of(), 0.5

    def layers(x: jax.Array, w: jax.Array, *, checkpointed: bool) -> jax.Array:
        states = seed_parallel(7, **mesh_coordinates(data="data", tensor="tensor"))

        def layer(x: jax.Array, key: jax.Array, whole: jax.Array) -> jax.Array:
            split = nnx.Dropout(rate)(jnp.tanh(x @ w), rngs=nnx.Rngs(key))
            y = lax.psum(split @ w.T, "tensor")
            return x + nnx.Dropout(rate)(y, rngs=nnx.Rngs(whole))

        layer = jax.checkpoint(layer) if checkpointed else layer
        keys = states.keys("tensor-parallel", number=3), states.keys("data-parallel", number=3)
        return lax.scan(lambda x, keys: (layer(x, *keys), None), x, keys)[0]

    def results(checkpointed: bool) -> Any:
        fn = jax.shard_map(
            lambda x, w: layers(x, w, checkpointed=checkpointed),
            mesh=mesh,
            in_specs=(P("data"), P(None, "tensor")),
            out_specs=P("data"),  # the type that whole activations keep only where tensor ranks agree
        )

        def run(x: jax.Array, w: jax.Array) -> Any:
            y, pull = jax.vjp(fn, x, w)
            return y, pull(jnp.cos(y))

        rng = np.random.default_rng(0)
        x, w = (jnp.asarray(rng.standard_normal(shape)) for shape in ((8, 6), (6, 8)))
        return jax.tree.map(np.asarray, jax.jit(run)(x, w))

    plain, again = results(False), results(True)
    same(again, plain)
    assert (plain[0][:4] != plain[0][4:]).any()


def test_states_come_back_through_jit() -> None:
    states = seed_parallel(3)
    taken = states.states()

    @jax.jit
    def step(states: RandomStates) -> tuple[jax.Array, RandomStates]:
        return drawn(states, "tensor-parallel"), states

    first, states = step(states)
    second, states = step(states)
    assert (first != second).any()
    assert [int(count) for _, count in states.states().values()] == [0, 2, 0]
    assert all(isinstance(a, jax.Array) for state in (*taken.values(), *states.states().values()) for a in state)
    # As a checkpoint gives them back: lists for tuples, counts of NumPy.
    states.set_states({name: [key, np.asarray(count)] for name, (key, count) in taken.items()})
    np.testing.assert_array_equal(step(states)[0], first)
    assert (drawn(seed_parallel(4), "tensor-parallel") != first).any()


def test_streams_for_nnx_modules() -> None:
    states = seed_parallel(3)
    with states.fork("data-parallel") as rngs:
        a = nnx.Linear(4, 4, rngs=rngs).kernel[...]
    with states.fork("data-parallel") as rngs:
        assert (nnx.Linear(4, 4, rngs=rngs).kernel[...] != a).any()
    again = seed_parallel(3).rngs(params="data-parallel", dropout="tensor-parallel")
    np.testing.assert_array_equal(nnx.Linear(4, 4, rngs=again).kernel[...], a)
    x = jnp.ones((4, 4))
    assert (nnx.Dropout(0.5, rngs=again)(x) != nnx.Dropout(0.5, rngs=again)(x)).any()


def test_bad_calls() -> None:
    states = seed_parallel(3)
    with pytest.raises(SpecError, match=r"^RandomStates\.key: name must be one of data-parallel, .*, got 'model'\.$"):
        states.key("model")
    with pytest.raises(SpecError, match=r"name must be new, got 'expert-parallel'\. reset\(\) forgets all streams"):
        states.add("expert-parallel", 1)
    states.reset()
    states.add("mine", 1)
    with pytest.raises(SpecError, match=r"seed must be new, got 1\. Two streams of one seed"):
        states.add("other", 1)
    with pytest.raises(TypeError, match="seed must be an integer or a key, got float"):
        states.add("other", 1.5)
    with pytest.raises(TypeError, match="states must be a mapping, got list"):
        states.set_states([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"states\['a'\] must be a key and a count, got int"):
        states.set_states({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"the count of states\['a'\] must be an integer, got str"):
        states.set_states({"a": (jax.random.key(0), "first")})  # type: ignore[dict-item]
    with pytest.raises(SpecError, match="seed_parallel: tensor must be >= 0, got -1"):
        seed_parallel(3, tensor=-1)
    with pytest.raises(TypeError, match="seed_parallel: data must be an integer, got str"):
        seed_parallel(3, data="data")
