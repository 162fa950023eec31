"""`TiledLinear` split over ranks: FSDP2's gloo ranks of PyTorch against virtual devices of JAX, gradients included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.ranks import Ranks
from tiled_jax import TiledLinear

pytestmark = pytest.mark.ranks

RANKS, T, IN, OUT = 2, 8, 24, 18
# Tiles, over which dim of them JAX splits each, and whether inside `shard_map`. 18 in 4 are 5, 5, 4, 4.
CASES: list[tuple[dict[str, int], tuple[str | None, str | None], bool]] = [
    ({"in_splits": 3, "out_splits": 4}, ("fsdp", None), True),
    ({"in_splits": 2, "out_splits": 4}, ("fsdp", None), False),
    ({"in_splits": 5, "out_splits": 1}, (None, "fsdp"), True),
]
Arrays = dict[str, np.ndarray[Any, Any]]


def operands() -> Arrays:
    """The weight as JAX has it."""
    rng = np.random.default_rng(0)
    shapes = {"x": (T, IN), "dy": (T, OUT), "weight": (IN, OUT), "bias": (OUT,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def on_devices(splits: dict[str, int], sharding: Any, mapped: bool) -> Arrays:
    given = operands()
    mesh = jax.make_mesh((RANKS,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])
    tokens = NamedSharding(mesh, P("fsdp"))
    with jax.enable_x64(True), jax.set_mesh(mesh):
        plain = nnx.Linear(IN, OUT, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        plain.kernel[...], plain.bias[...] = jnp.asarray(given["weight"]), jnp.asarray(given["bias"])
        layer = TiledLinear(IN, OUT, sharding=sharding, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **splits)
        layer.copy_params_from(plain)
        graph, state = nnx.split(layer)

        def call(x: jax.Array, state: Any) -> jax.Array:
            return nnx.merge(graph, state)(x)

        specs = P("fsdp"), nnx.get_partition_spec(state)
        fn = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("fsdp")) if mapped else call

        @jax.jit
        def run(x: jax.Array, state: Any, dy: jax.Array) -> Any:
            y, pull = jax.vjp(fn, x, state)
            return y, *pull(dy)

        y, dx, gradients = run(*(jax.device_put(given["x"], tokens), state, jax.device_put(given["dy"], tokens)))
        tiles = nnx.merge(graph, gradients)
        dweight = layer.config.tiles.unstack(jnp.asarray(np.asarray(tiles.weight[...])))
        found = {"y": y, "dx": dx, "dweight": dweight, "dbias": tiles.bias[...]}
        return {name: np.asarray(a) for name, a in found.items()}


def test_gradients_of_ranks_and_of_devices(pools: dict[int, Ranks]) -> None:
    torchs = {name: (a.T if name == "weight" else a).tolist() for name, a in operands().items()}
    cases = [splits for splits, _, _ in CASES]
    answers = pools[RANKS].run("tests.linear.ranks_torch_parity_linear:layers", operands=torchs, cases=cases)
    for at, (splits, sharding, mapped) in enumerate(CASES):
        ours = on_devices(splits, sharding, mapped)
        for rank, answer in enumerate(result[at] for result in answers):
            assert set(answer) == set(ours)
            for name, value in ours.items():
                part = np.split(value, RANKS)[rank] if name in ("y", "dx") else value
                theirs = np.asarray(answer[name])
                theirs = theirs.T if name == "dweight" else theirs
                assert_within(theirs, part, DISTRIBUTED_FLOAT64, f"{splits}: {name} of rank {rank}")
