"""`TensorParallelTiledMLP`: global weights split over a mesh, called with global arrays, equal to `TiledMLP`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.loss.jax_split_tokens import largest_arrays, mesh_of
from tiled_jax import SpecError, TiledMLP
from tiled_jax.parallel import TensorParallelTiledMLP

pytestmark = pytest.mark.ranks


def make(mesh: jax.sharding.Mesh, **options: Any) -> TensorParallelTiledMLP:
    given = {"bias": True, "num_shards": 2, "param_dtype": jnp.float64, **options}
    return TensorParallelTiledMLP(8, 16, mesh=mesh, rngs=nnx.Rngs(0), **given)


def parameters(module: nnx.Module) -> dict[str, jax.Array]:
    return {name: value[...] for name, value in vars(module).items() if isinstance(value, nnx.Param)}


@jax.jit
def y_and_gradients(module: Any, x: jax.Array) -> Any:
    y, pull = jax.vjp(lambda module, x: module(x), module, x)
    dmodule, dx = pull(jnp.cos(y))
    return {"y": y, "dx": dx, **parameters(dmodule)}


@pytest.mark.parametrize(
    ("ranks", "data", "kind", "sequence_parallel"),
    [(2, 4, "Auto", False), (4, 2, "Explicit", True), (4, 2, "Explicit", False), (8, 1, "Auto", True)],
)
def test_equals_the_module_on_one_device(sequence_parallel: bool, ranks: int, data: int, kind: str, x64: None) -> None:
    """x [B, S, H] is split by B over `data` and with sequence_parallel by S over `tp`; so are y and dx."""
    mesh = mesh_of(ranks, data, AxisType[kind])
    module = make(mesh, sequence_parallel=sequence_parallel, keep=0.5)
    weights = {name: np.asarray(a) for name, a in parameters(module).items()}
    biases = {name[2:]: jnp.asarray(weights[name]) for name in weights if name.startswith("b_")}
    whole = TiledMLP.from_weights(
        *(jnp.asarray(weights[f"w_{name}"]) for name in ("gate", "up", "down")), biases=biases
    )
    x = np.random.default_rng(0).standard_normal((4, 16, 8))
    spec = P("data", "tp" if sequence_parallel else None, None)
    with jax.set_mesh(mesh):
        actual = y_and_gradients(module, jax.device_put(x, NamedSharding(mesh, spec)))
    expected = y_and_gradients(whole, jnp.asarray(x))
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert_within(np.asarray(actual[name]), np.asarray(value), DISTRIBUTED_FLOAT64, name)
        placed = spec if name in ("y", "dx") else parameters(module)[name].sharding.spec
        assert actual[name].sharding.is_equivalent_to(NamedSharding(mesh, placed), value.ndim), name


@pytest.mark.parametrize("ranks", [2, 8])
def test_master_weights_of_a_computation_in_bfloat16(ranks: int) -> None:
    """Against float64, y and the float32 gradients are as right as those of `TiledMLP` on one device."""
    module = make(mesh_of(ranks), sequence_parallel=True, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    weights = {name: np.asarray(a) for name, a in parameters(module).items()}
    x = np.asarray(np.random.default_rng(0).standard_normal((4, 16, 8)), jnp.bfloat16)

    def on_one_device(dtype: Any, param_dtype: Any) -> Any:
        one = TiledMLP(8, 16, bias=True, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
        for name, weight in weights.items():
            getattr(one, name)[...] = jnp.asarray(weight, param_dtype)
        return y_and_gradients(one, jnp.asarray(x, dtype))

    found, plain = y_and_gradients(module, jnp.asarray(x)), on_one_device(jnp.bfloat16, jnp.float32)
    with jax.enable_x64(True):
        exact = on_one_device(jnp.float64, jnp.float64)
    for name, value in exact.items():
        a, b, truth = (np.asarray(of, np.float64) for of in (found[name], plain[name], value))
        assert found[name].dtype == plain[name].dtype == (jnp.bfloat16 if name in ("y", "dx") else jnp.float32)
        assert_within(a, truth, limit(relative_error(b, truth), "bfloat16"), name)


def test_weights_are_the_same_at_any_number_of_devices(x64: None) -> None:
    one = parameters(make(mesh_of(1)))
    assert one["w_up"].shape == (8, 16)
    for ranks in (2, 4, 8):
        module = make(mesh_of(ranks))
        for name, a in parameters(module).items():
            np.testing.assert_array_equal(np.asarray(a), np.asarray(one[name]))
            split = 1 if name == "b_down" else ranks
            assert {shard.data.size for shard in a.addressable_shards} == {a.size // split}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_device_holds_the_full_sequence(kind: AxisType) -> None:
    """x [2, 2048, 64] that comes split: what is gathered is 32 tokens of every device, not 4096."""
    mesh = mesh_of(4, 1, kind)
    module = TensorParallelTiledMLP(64, 64, sequence_parallel=True, num_shards=32, mesh=mesh, rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "tp", None))
        x = jax.ShapeDtypeStruct((2, 2048, 64), jnp.float32, sharding=sharding)
        found = largest_arrays(y_and_gradients.lower(module, x).compile().as_text())
    assert found == {"gathered": 4 * 32 * 64, "any": 2 * 512 * 64}


def test_tokens_that_come_whole_are_split(x64: None) -> None:
    """On an Explicit mesh too, whose arrays say how they are split."""
    x = np.random.default_rng(0).standard_normal((16, 8))
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = mesh_of(4, 1, kind)
        with jax.set_mesh(mesh):
            given = jax.device_put(x, NamedSharding(mesh, P(None, None)))
            y = make(mesh, sequence_parallel=True)(given)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("tp", None)), 2)
        found.append(np.asarray(y))
    assert_within(*found, DISTRIBUTED_FLOAT64, "y of an Explicit mesh")


def test_refused() -> None:
    mesh, name = mesh_of(4, 2), "TensorParallelTiledMLP"
    options: dict[str, Any] = {"mesh": mesh, "rngs": nnx.Rngs(0)}
    with pytest.raises(SpecError) as caught:
        TensorParallelTiledMLP(8, 15, **options)
    assert str(caught.value) == f"{name}: intermediate_size must be a multiple of the 4 ranks it is split over, got 15."
    with pytest.raises(
        SpecError, match=rf"^{name}: axis_name must be an axis of the mesh, one of data, tp, got 'model'"
    ):
        TensorParallelTiledMLP(8, 16, axis_name="model", **options)
    with pytest.raises(TypeError, match=rf"^{name}: mesh must be a jax.sharding.Mesh, got NoneType"):
        TensorParallelTiledMLP(8, 16, mesh=None, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="sequence_parallel must be True or False, got int"):
        TensorParallelTiledMLP(8, 16, sequence_parallel=1, **options)
    module = TensorParallelTiledMLP(8, 16, sequence_parallel=True, **options)
    rule = rf"^{name}: dim 0 of x must be a multiple of the 8 ranks it is split over, got 12 \(x is \[12, 8\]\)"
    with pytest.raises(SpecError, match=rule):
        module(jnp.ones((12, 8)))
