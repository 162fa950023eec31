"""MLP, losses and `tile` ahead of time for eight H200s, tokens sharded under plain `jit`: collectives and bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions
from tests.aot import h200
from tests.core.jax_program import counted
from tiled_jax import tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp

H, I, V = 1024, 4096, 16384  # noqa: E741
N = 8  # shards of a device's own tokens
TOPOLOGY = topologies.get_topology_desc("h200", "cuda", target_config=h200.TARGET, topology="1x8x1")
MESH = topologies.make_mesh(TOPOLOGY, (8,), ("data",))


def layer(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return jnp.dot(jax.nn.silu(jnp.dot(x, w_gate)) * jnp.dot(x, w_up), w_down)


def head(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
    return tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(reduction="sum"), num_shards=N)


def nll(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(jnp.dot(x, weight, preferred_element_type=jnp.float32))
    return -jnp.sum(jnp.take_along_axis(log_p, targets[..., None], axis=-1))


FUNCTIONS: dict[str, Callable[..., jax.Array]] = {
    "tiled_mlp": partial(tiled_mlp, num_shards=N),
    "tile": tile(layer, num_shards=N),
    "tiled_linear_cross_entropy": head,
    "tiled_loss": lambda *arrays: tiled_loss(nll, *arrays, num_shards=N),
}


def results(name: str) -> Callable[..., Any]:
    """The result and the gradients of x and the weights; of a layer with an upstream gradient as the first operand."""
    fn = FUNCTIONS[name]
    if name in ("tiled_linear_cross_entropy", "tiled_loss"):
        return jax.value_and_grad(fn, (0, 2))

    def run(dy: jax.Array, *operands: jax.Array) -> Any:
        y, pull = jax.vjp(fn, *operands)
        return y, *pull(dy)

    return run


def program_of(name: str, make: Callable[..., jax.ShapeDtypeStruct], batch: int) -> Any:
    """Compiled for arrays of `make(dtype, *dims)`: tokens first, weights with two dims."""
    x = make(jnp.bfloat16, batch, 2048, H)
    if name in ("tiled_linear_cross_entropy", "tiled_loss"):
        operands = [x, make(jnp.int32, batch, 2048), make(jnp.bfloat16, H, V)]
    else:
        operands = [x, x, *(make(jnp.bfloat16, *dims) for dims in ((H, I), (H, I), (I, H)))]
    return h200.compiled(results(name), *operands)


@pytest.mark.parametrize("tokens", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("weights", [P(), P("data")], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sharded_tokens_cost_no_gather_in_the_loop_and_a_device_s_own_bytes(name: str, tokens: P, weights: P) -> None:
    def on_mesh(dtype: Any, *dims: int) -> jax.ShapeDtypeStruct:
        spec = tokens if dims[1] == 2048 else weights
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(MESH, spec))

    program = program_of(name, on_mesh, 16)
    outside, inside, _ = counted(program.as_text())
    temp = program.memory_analysis().temp_size_in_bytes
    one = program_of(name, h200.shape, 2).memory_analysis().temp_size_in_bytes
    matrices, elements = (3, 3 * H * I) if name in ("tiled_mlp", "tile") else (1, H * V)
    gathered = 2 * elements if weights == P("data") else 0
    sums = 4 * elements  # in float32, reduced
    print(outside, inside, temp / 2**20, one / 2**20)
    assert not inside
    assert outside["all-gather"] <= (matrices if gathered else 0)
    assert temp <= one + sums + gathered
