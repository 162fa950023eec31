"""The MLP compiled ahead of time for eight H200s, tokens sharded over them under plain `jit`: collectives and bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.aot import h200
from tests.core.jax_program import counted
from tiled_jax import tiled_mlp

H, I = 1024, 4096  # noqa: E741
TOPOLOGY = topologies.get_topology_desc("h200", "cuda", target_config=h200.TARGET, topology="1x8x1")
MESH = topologies.make_mesh(TOPOLOGY, (8,), ("data",))


def step(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(x: jax.Array, *operands: jax.Array) -> Any:
        *weights, dy = operands
        y, pull = jax.vjp(fn, x, *weights)
        return y, *pull(dy)

    return run


def compiled(batch: int, tokens: P, weights: P) -> Any:
    def on_mesh(spec: P, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(MESH, spec))

    rows = on_mesh(tokens, batch, 2048, H)
    w = [on_mesh(weights, *dims) for dims in ((H, I), (H, I), (I, H))]
    return h200.compiled(step(partial(tiled_mlp, num_shards=8)), rows, *w, rows)


@pytest.mark.parametrize("tokens", [P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("weights", [P(), P("data")], ids=str)
def test_sharded_tokens_cost_no_gather_in_the_loop_and_a_device_s_own_bytes(tokens: P, weights: P) -> None:
    program = compiled(16, tokens, weights)
    outside, inside, _ = counted(program.as_text())
    temp = program.memory_analysis().temp_size_in_bytes
    rows, w = (
        h200.shape(jnp.bfloat16, 2, 2048, H),
        [h200.shape(jnp.bfloat16, *dims) for dims in ((H, I), (H, I), (I, H))],
    )
    one = h200.compiled(step(partial(tiled_mlp, num_shards=8)), rows, *w, rows).memory_analysis().temp_size_in_bytes
    gathered = 3 * H * I * 2 if weights == P("data") else 0
    sums = 3 * H * I * 4  # in float32, reduced
    print(outside, inside, temp / 2**20, one / 2**20)
    assert not inside
    assert outside["all-gather"] <= (3 if gathered else 0)
    assert temp <= one + sums + gathered
