"""The mixture of experts of the JAX half: FLOP, bytes, ragged products, meshes, transformations, and its modules."""

import inspect
import pickle
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs import Tiling
from shared_specs.moe import costs as moe_costs
from shared_specs.moe.cases import MOE_CASES
from shared_specs.shards import ShardPlan
from shared_specs.signatures import LINEN_WITHOUT, SIGNATURES
from tests.adapters import JaxAdapter
from tests.asserting import assert_case
from tests.core.jax_counting import flop, kept_bytes, temp_bytes
from tiled_jax import SpecError, TiledMoE, linen, tiled_moe, tiling_paths
from tiled_jax.moe import api
from tiled_jax.moe.routes import routes_of
from tiled_jax.moe.steps import BlockSteps, RaggedSteps, steps_here

H, I, E, K = 8, 12, 4, 2  # noqa: E741


def operands(
    *lead: int, dtype: Any = jnp.float64, hot: bool = False, hidden: int = H, inter: int = I
) -> list[jax.Array]:
    """x, w_router, w_gate, w_up, w_down. hot: all tokens choose the first two experts."""
    rng = np.random.default_rng(sum(lead))
    sizes = (*lead, hidden), (hidden, E), (E, hidden, inter), (E, hidden, inter), (E, inter, hidden)
    x, w_router, *experts = [rng.standard_normal(size) for size in sizes]
    x[..., 0] = 1
    w_router[0, :K] += 20 if hot else 0
    return [jnp.asarray(a / np.sqrt(hidden) if a is not x else a, dtype) for a in (x, w_router, *experts)]


def shape(tokens: int, hidden: int = H, inter: int = I, itemsize: int = 4) -> moe_costs.MoEShape:
    sizes = {"itemsize": itemsize, "weight_itemsize": itemsize}
    return moe_costs.MoEShape(tokens=tokens, hidden=hidden, intermediate=inter, experts=E, top_k=K, **sizes)


def untiled(x: jax.Array, w_router: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    """Every expert on every token."""
    p, index = lax.top_k(jax.nn.softmax(x @ w_router), K)
    share = jnp.sum(jax.nn.one_hot(index, E, dtype=x.dtype) * (p / p.sum(-1, keepdims=True))[..., None], axis=-2)
    h = jax.nn.silu(jnp.einsum("...h,ehi->...ei", x, w_gate)) * jnp.einsum("...h,ehi->...ei", x, w_up)
    return jnp.einsum("...ei,eih,...e->...h", h, w_down, share)


tiled = partial(tiled_moe, top_k=K, num_shards=3)


def y_and_gradients(fn: Any) -> Any:
    def run(*arguments: jax.Array) -> Any:
        y, pull = jax.vjp(fn, *arguments)
        return y, pull(jnp.cos(y))

    return run


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("case", [c for c in MOE_CASES if c.logits and c.dims == (3, 7)][::3], ids=lambda case: case.id)
def test_ragged_products(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right on a CPU too, where XLA makes them E times as large, so that no call takes them there."""
    assert isinstance(steps_here(), BlockSteps)
    monkeypatch.setattr(api, "steps_here", RaggedSteps)
    assert_case(case, {name: np.asarray(a) for name, a in JaxAdapter.moe_arrays.__wrapped__(case, "xla").items()})


def test_flop(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 products of a row: of each routed token, where the rows of an expert fill whole blocks."""
    monkeypatch.setattr(moe_costs, "FEWEST_ROWS", 4)
    arguments = operands(48, dtype=jnp.float32, hot=True)
    call = y_and_gradients(partial(tiled_moe, top_k=K, tiling=Tiling(shard_tokens=16)))
    # In a shard two experts have 16 rows each and two have none: 8 blocks of 4.
    rows = moe_costs.rows_of_a_block(16 * K, E)
    assert rows == 4
    assert flop(call, *arguments, turns=16 * K // rows) == moe_costs.moe_flop(shape(48))
    most = moe_costs.block_count(16 * K, E, rows)
    assert flop(call, *arguments) == moe_costs.moe_flop(shape(48), rows=3 * most * rows)
    y = jax.make_jaxpr(partial(tiled_moe, top_k=K))(*arguments)
    assert "ragged_dot" not in str(y)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("rows", "experts"), [(1, 5), (3, 5), (4, 2), (40, 5)])
def test_routes_name_every_pair_once_and_no_more_blocks_than_experts_need(rows: int, experts: int) -> None:
    index = np.argsort(np.random.default_rng(rows).random((20, experts)))[:, :K].astype(np.int32)
    index[index == experts - 1] = 0  # the last expert has no tokens
    found = routes_of(jnp.asarray(index), experts, rows)
    there = np.asarray(found.pairs) < index.size
    assert sorted(np.asarray(found.pairs)[there]) == list(range(index.size))
    places = np.repeat(np.asarray(found.experts), rows)
    np.testing.assert_array_equal(index.reshape(-1)[np.asarray(found.pairs)[there]], places[there])
    np.testing.assert_array_equal(np.asarray(found.tokens)[there], np.asarray(found.pairs)[there] // K)
    counts = np.bincount(index.reshape(-1), minlength=experts)
    assert found.blocks == sum(-(-counts // rows)) <= len(found.experts)
    np.testing.assert_array_equal(found.sizes, -(-counts // rows) * rows)


def test_kept_bytes() -> None:
    arguments = operands(70, dtype=jnp.float32)
    assert kept_bytes(tiled, *arguments) == moe_costs.moe_saved_bytes(shape(70)) == 70 * K * 8


def test_temp_bytes_do_not_grow_with_tokens_and_are_within_the_formula() -> None:
    hidden, inter, t = 64, 256, 256

    def temp(tokens: int) -> int:
        arguments = jax.eval_shape(partial(operands, tokens, dtype=jnp.float32, hidden=hidden, inter=inter))
        call = partial(tiled_moe, top_k=K, tiling=Tiling(shard_tokens=t))
        used = temp_bytes(y_and_gradients(call), *arguments)
        return used - moe_costs.moe_saved_bytes(shape(tokens)) - tokens * hidden * 4  # the upstream gradient

    few, many = temp(2048), temp(4096)
    assert many <= few + 2**12
    assert few <= moe_costs.compiled_moe_peak_bytes(shape(4096, hidden, inter), ShardPlan(4096, t))
    assert few < 4096 * K * inter * 4


def test_a_mesh_cuts_the_tokens(same: Any) -> None:
    """Every device computes its own tokens, and the gradients of weights are summed."""
    arguments = operands(8, 3)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    placed = [jax.device_put(arguments[0], NamedSharding(mesh, P("data"))), *arguments[1:]]
    program = jax.jit(y_and_gradients(tiled)).lower(*placed).compile()
    same(program(*placed), y_and_gradients(untiled)(*arguments))
    assert "all-gather" not in program.as_text()


@pytest.mark.deep
def test_named_and_explicit_axes_cut_the_tokens(same: Any) -> None:
    arguments = operands(8, 3)
    expected = y_and_gradients(untiled)(*arguments)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))):
        named = partial(tiled_moe, top_k=K, tiling=Tiling(num_shards=2, token_axes="data"))
        same(jax.jit(y_and_gradients(named))(*arguments), expected)
    with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
        placed = [jax.device_put(arguments[0], P("data")), *(jax.device_put(w, P()) for w in arguments[1:])]
        same(jax.jit(y_and_gradients(tiled))(*placed), expected)


@pytest.mark.parametrize("num_shards", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_in_shard_map(num_shards: int, same: Any) -> None:
    """Of two shards the second waits for the first, whose numbers of experts vary over the mesh too."""
    arguments = operands(8, 3)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P("data"), *[P()] * 4)
    cut = partial(tiled_moe, top_k=K, num_shards=num_shards)
    mapped = jax.shard_map(cut, mesh=mesh, in_specs=specs, out_specs=P("data"))
    same(jax.jit(y_and_gradients(mapped))(*arguments), y_and_gradients(untiled)(*arguments))


@pytest.mark.deep
def test_checkpoint_scan_and_vmap(same: Any) -> None:
    arguments = operands(3, 7)
    in_axes = (0, *[None] * 4)
    same(
        jax.jit(jax.vmap(y_and_gradients(jax.checkpoint(tiled)), in_axes))(*arguments),
        jax.vmap(y_and_gradients(untiled), in_axes)(*arguments),
    )


@pytest.mark.deep
def test_derivatives_of_forward_mode_and_of_gradients(same: Any) -> None:
    arguments = operands(7)
    directions = [jnp.cos(a) for a in arguments]

    def found(fn: Any) -> Any:
        gradient = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=tuple(range(5)))
        return jax.jvp(fn, arguments, directions), jax.jvp(gradient, arguments, directions)

    same(jax.jit(partial(found, tiled))(), found(untiled))


def test_master_weights_and_logits() -> None:
    """float32 weights beside a bfloat16 x have float32 gradients; logits are float32."""
    x, *w = operands(20, dtype=jnp.float32)
    x = x.astype(jnp.bfloat16)

    def loss(*a: jax.Array) -> jax.Array:
        y, logits = tiled(*a, return_router_logits=True)
        assert (y.dtype, logits.dtype, logits.shape) == (jnp.bfloat16, jnp.float32, (20, E))
        return jnp.sum(y.astype(jnp.float32)) + jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(x, *w)
    assert [d.dtype for d in found] == [jnp.bfloat16, *[jnp.float32] * 4]
    assert all(np.asarray(d).any() for d in found)


SHAPES = {"w_router": (H, E), "w_gate": (E, H, I), "w_up": (E, H, I), "w_down": (E, I, H)}


def test_modules() -> None:
    """nnx and linen: parameters of the same names and shapes, and the numbers of the function."""
    x = operands(3, 5, dtype=jnp.float32)[0]
    module = TiledMoE(H, I, E, K, num_shards=2, rngs=nnx.Rngs(0))
    assert tiling_paths(module) == {"": "tiled_moe"}
    graph, state = nnx.split(module)
    assert {path[0]: a.shape for path, a in nnx.to_flat_state(state)} == SHAPES
    # Each expert is drawn for its own number of inputs.
    assert float(jnp.std(TiledMoE(64, 64, 8, 1, rngs=nnx.Rngs(0)).w_up[...])) == pytest.approx(1 / 8, rel=1 / 16)
    twin: Any = linen.TiledMoE(H, I, E, K, num_shards=2)
    variables = twin.init(jax.random.key(0), x)
    assert {name: a.shape for name, a in variables["params"].items()} == SHAPES
    params = {name: getattr(module, name)[...] for name in SHAPES}
    expected = tiled_moe(x, *params.values(), top_k=K, num_shards=2)
    np.testing.assert_array_equal(nnx.merge(graph, state)(x), expected)
    np.testing.assert_array_equal(twin.apply({"params": params}, x), expected)
    around = TiledMoE.from_weights(*(getattr(module, name) for name in SHAPES), top_k=K, num_shards=2)
    assert around.w_up is module.w_up
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(around))(x), expected)
    gradient = nnx.grad(lambda module: jnp.sum(module(x)))(around)
    assert all(np.asarray(gradient[name][...]).any() for name in SHAPES)


def test_modules_are_checked_and_have_the_fields_of_the_specification() -> None:
    with pytest.raises(SpecError, match=r"^TiledMoE: top_k must be in \[1, 4\]"):
        linen.TiledMoE(H, I, E, 5).init(jax.random.key(0), jnp.ones((2, H)))
    fields = [name for name in inspect.signature(linen.TiledMoE).parameters if name not in ("parent", "name")]
    arguments = [a.name for a in SIGNATURES["TiledMoE"] if "jax" in a.halves]
    assert fields == [name for name in arguments if name not in LINEN_WITHOUT["TiledMoE"]]
