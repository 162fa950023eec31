"""FLOP, bytes kept and compiled bytes, counted and compared with shared_specs/costs.py. Nothing is timed or executed."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shared_specs.config import Tiling
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan
from tests.core.jax_counting import flop, kept_bytes, temp_bytes
from tests.mlp.jax_untiled import mlp, operands, y_and_gradients
from tiled_jax import tiled_mlp

H, I = 512, 2048  # noqa: E741
FLOAT32 = 4
BARRIERS = jax.__version_info__ >= (0, 11)
needs_barriers = pytest.mark.skipif(not BARRIERS, reason="XLA's CPU compiler of jax 0.10 drops optimization barriers")


def gradient(fn: Any, argnums: tuple[int, ...] = (0, 1, 2, 3)) -> Any:
    return jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=argnums)


def shapes(tokens: int, hidden: int, intermediate: int) -> list[jax.ShapeDtypeStruct]:
    sizes = (tokens, hidden), (hidden, intermediate), (hidden, intermediate), (intermediate, hidden)
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


@pytest.mark.parametrize(("tokens", "shard_tokens"), [(64, 16), (70, 16), (32, 16), (16, 16)])
@pytest.mark.parametrize("keep", [0.0, 0.25, 0.5, 1.0])
def test_flop(tokens: int, shard_tokens: int, keep: float) -> None:
    shape, plan = mlp_costs.MLPShape(tokens=tokens, hidden=8, intermediate=12), ShardPlan(tokens, shard_tokens)
    tiled = partial(tiled_mlp, tiling=Tiling(shard_tokens=shard_tokens, keep=keep))
    arguments = shapes(tokens, 8, 12)
    assert flop(gradient(tiled), *arguments) == mlp_costs.mlp_flop(shape, plan, keep=keep)
    # jax.checkpoint drops what nobody reads of its replay: the down-projection, and without kept shards all of it.
    replayed = mlp_costs.mlp_flop(shape, plan, keep=keep, checkpointing="non-reentrant")
    assert flop(gradient(jax.checkpoint(tiled)), *arguments) == replayed == 11 * mlp_costs.thi(shape)


def test_flop_of_the_plain_mlp_show_that_the_meter_counts() -> None:
    shape, arguments = mlp_costs.MLPShape(tokens=64, hidden=8, intermediate=12), shapes(64, 8, 12)
    assert flop(gradient(mlp), *arguments) == mlp_costs.plain_flop(shape)
    assert flop(gradient(jax.checkpoint(mlp)), *arguments) == mlp_costs.plain_flop(shape, checkpointing="non-reentrant")


@pytest.mark.parametrize(
    ("argnums", "products"),
    [((0,), 8), ((1, 2, 3), 9), ((1,), 7)],
    ids=["frozen weights", "frozen x", "gate alone"],
)
def test_frozen_operands_cost_nothing(argnums: tuple[int, ...], products: int) -> None:
    tiled = partial(tiled_mlp, tiling=Tiling(shard_tokens=16))
    thi = mlp_costs.thi(mlp_costs.MLPShape(tokens=70, hidden=8, intermediate=12))
    assert flop(gradient(tiled, argnums), *shapes(70, 8, 12)) == products * thi


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_kept_bytes(keep: float, gated: bool) -> None:
    x, w_gate, w_up, w_down = operands(70, dtype=jnp.float32)
    w_gate = w_gate if gated else None
    shape, plan = mlp_costs.MLPShape(tokens=70, hidden=8, intermediate=12, gated=gated), ShardPlan(70, 16)
    tiled = partial(tiled_mlp, tiling=Tiling(shard_tokens=16, keep=keep))
    assert kept_bytes(tiled, x, w_gate, w_up, w_down) == mlp_costs.saved_bytes(shape, plan, keep=keep)


def allowed(shard_tokens: int, hidden: int = H, intermediate: int = I) -> int:
    """Five buffers [t, I] and the float32 sums of the weight gradients."""
    return (5 * shard_tokens * intermediate + 3 * hidden * intermediate) * FLOAT32


def with_gradients(layer: Any, layers: int = 1) -> Any:
    """dy, x and weights -> y and every gradient of the layers, each added to its input if there are several."""

    def stack(x: jax.Array, *weights: jax.Array) -> jax.Array:
        for first in range(0, len(weights), 3):
            y = layer(x, *weights[first : first + 3])
            x = y if layers == 1 else x + y
        return x

    def run(dy: jax.Array, *arguments: jax.Array) -> Any:
        y, pull = jax.vjp(stack, *arguments)
        return y, pull(dy)

    return run


@cache
def temp(
    tokens: int, shard_tokens: int, keep: float = 0.0, layers: int = 1, hidden: int = H, intermediate: int = I
) -> int:
    """Temporary bytes of y and every gradient of a stack, without the gate and up that `keep` pays for."""
    layer = partial(tiled_mlp, tiling=Tiling(shard_tokens=shard_tokens, keep=keep))
    x, *weights = shapes(tokens, hidden, intermediate)
    shape = mlp_costs.MLPShape(tokens=tokens, hidden=hidden, intermediate=intermediate)
    plan = ShardPlan(tokens, shard_tokens)
    used = temp_bytes(with_gradients(layer, layers), x, x, *weights * layers)
    return used - layers * mlp_costs.saved_bytes(shape, plan, keep=keep)


@pytest.mark.parametrize(("tokens", "shard_tokens"), [(8192, 1024), (9000, 1024), (8192, 256)])
def test_temp_bytes_of_one_mlp(tokens: int, shard_tokens: int) -> None:
    assert temp(tokens, shard_tokens) <= allowed(shard_tokens) + 2**10


@pytest.mark.parametrize(("tokens", "hidden", "intermediate"), [(8192, 576, 1536), (4096, 1024, 4096)])
def test_temp_bytes_at_the_sizes_of_the_benchmarks(tokens: int, hidden: int, intermediate: int) -> None:
    """x is transposed only once h is done with, where it would be a sixth buffer's worth at (8192, 576, 1536)."""
    used = temp(tokens, 1024, hidden=hidden, intermediate=intermediate)
    assert used <= allowed(1024, hidden, intermediate)


def test_temp_bytes_do_not_grow_with_tokens() -> None:
    assert temp(8192, 1024) == temp(16384, 1024)
    assert temp(8192, 1024, 0.5) == temp(16384, 1024, 0.5)


def test_temp_bytes_of_the_plain_mlp_show_that_the_meter_sees_them() -> None:
    x, *weights = shapes(8192, H, I)
    assert temp_bytes(y_and_gradients(mlp), x, *weights) >= 4 * 8192 * I * FLOAT32


@pytest.mark.parametrize("keep", [0.25, 0.5, 1.0])
def test_temp_bytes_with_kept_shards(keep: float) -> None:
    assert temp(8192, 1024, keep) <= allowed(1024)


@needs_barriers
@pytest.mark.parametrize("tokens", [2048, 2000, 1024])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_temp_bytes_of_one_and_two_shards(tokens: int, keep: float) -> None:
    assert temp(tokens, 1024, keep) <= allowed(1024) + 2**10


@needs_barriers
@pytest.mark.parametrize("tokens", [8192, 9000, 2048])
def test_temp_bytes_of_four_layers(tokens: int) -> None:
    """The inputs of the layers after the first have to be kept; nothing else may be there once a layer."""
    inputs = 3 * tokens * H * FLOAT32
    assert temp(tokens, 1024, layers=4) - inputs <= allowed(1024) + 2**10


@needs_barriers
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_temp_bytes_of_four_layers_grow_by_what_is_kept_alone(keep: float) -> None:
    assert temp(16384, 1024, keep, layers=4) - temp(8192, 1024, keep, layers=4) == 3 * 8192 * H * FLOAT32


OTHER_CALLS = [
    {},
    {"keep": 0.5},
    {"shard_tokens": 64},
    {"hidden": 2048, "intermediate": 512},
    {"activation": "gelu"},
    {"gated": False},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "weight_dtype": "float32"},
    {"dtype": "float16"},
    {"shard_tokens": 4096},
    pytest.param({"shard_tokens": 2048}, marks=needs_barriers),
    pytest.param({"dtype": "bfloat16", "keep": 0.5}, marks=needs_barriers),
]


def described(call: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in call.items()) or "base"


@pytest.mark.parametrize("call", OTHER_CALLS, ids=described)
def test_temp_bytes_are_within_the_formula(call: dict[str, Any]) -> None:
    given = {"shard_tokens": 512, "hidden": H, "intermediate": I, "dtype": "float32", "keep": 0.0, "gated": True} | call
    x, w_gate, w_up, w_down = shapes(4096, given["hidden"], given["intermediate"])
    x, weight_dtype = x.update(dtype=given["dtype"]), given.get("weight_dtype", given["dtype"])
    weights = [
        None if w is w_gate and not given["gated"] else w.update(dtype=weight_dtype) for w in (w_gate, w_up, w_down)
    ]
    shape = mlp_costs.MLPShape(
        tokens=4096,
        hidden=given["hidden"],
        intermediate=given["intermediate"],
        gated=given["gated"],
        itemsize=x.dtype.itemsize,
        weight_itemsize=w_up.update(dtype=weight_dtype).dtype.itemsize,
    )
    plan, tiling = (
        ShardPlan(4096, given["shard_tokens"]),
        Tiling(shard_tokens=given["shard_tokens"], keep=given["keep"]),
    )
    layer = partial(tiled_mlp, tiling=tiling, activation=given.get("activation", "silu"))
    used = temp_bytes(with_gradients(layer), x, x, *weights) - mlp_costs.saved_bytes(shape, plan, keep=given["keep"])
    assert used <= mlp_costs.compiled_peak_bytes(shape, plan)


@pytest.mark.parametrize("budget", [16 * 2**20, 64 * 2**20])
def test_a_memory_budget_is_kept_and_used(budget: int) -> None:
    x, *weights = shapes(8192, H, I)
    used = temp_bytes(with_gradients(partial(tiled_mlp, tiling=Tiling(memory_budget=budget))), x, x, *weights)
    assert budget / 2 < used <= budget
