"""`jax.checkpoint`, `lax.scan`, `jax.vmap` and Flax linen's forms of them around what is tiled, and `tile` in `tile`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.core.jax_counting import flop, temp_bytes
from tests.mlp.jax_untiled import mlp, operands, y_and_gradients
from tiled_jax import linen, tile, tiled_mlp

LEADS = [(3, 11), (32,)]  # 33 tokens leave a shorter shard


def layer(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w_up) @ w_down


def of_layer(*lead: int, **options: Any) -> list[Any]:
    x, w_up, _, w_down = operands(*lead, **options)
    return [x, w_up, w_down]


AROUND = {
    "checkpoint": lambda fn: jax.checkpoint(tile(fn, num_shards=4)),
    "checkpoint in tile": lambda fn: tile(jax.checkpoint(fn), num_shards=4),
    "tile in tile": lambda fn: tile(tile(fn, num_shards=2), num_shards=4),
    "three deep": lambda fn: jax.checkpoint(tile(tile(tile(fn, num_shards=3), num_shards=2), num_shards=2)),
}


@pytest.mark.parametrize(
    ("around", "lead"), [(around, LEADS[at % 2]) for at, around in enumerate(AROUND.values())], ids=[*AROUND]
)
def test_tile_in_checkpoint_and_in_tile(around: Any, lead: tuple[int, ...], same: Any) -> None:
    arguments = of_layer(*lead)
    same(jax.jit(y_and_gradients(around(layer)))(*arguments), y_and_gradients(layer)(*arguments))
    # Forward, the first product again, backward: what tile and a checkpoint cost, each alone.
    assert 2 * flop(y_and_gradients(around(layer)), *arguments) == 7 * flop(layer, *arguments)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_a_replay_draws_the_masks_of_forward(around: Any) -> None:
    def dropout(x: jax.Array, rngs: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(rngs, 0.5, x.shape), x, jnp.zeros_like(x))

    def masked(x: jax.Array) -> jax.Array:
        return tile(dropout, num_shards=3, rngs=jax.random.key(0))(x)

    x = jnp.ones((11, 64))
    y, slope = jax.jit(y_and_gradients(around(masked)))(x)
    assert 0 < np.count_nonzero(y) < y.size
    np.testing.assert_array_equal(np.asarray(slope) != 0, np.asarray(y) != 0)


class Nested(nnx.Module):
    """Dropout, tiled once more inside whatever runs it."""

    def __init__(self) -> None:
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return tile(self.drop, num_shards=2)(x)


def test_every_shard_of_a_shard_draws_its_own_mask() -> None:
    x = jnp.ones((11, 64))
    y, slope = jax.jit(y_and_gradients(lambda x: tile(Nested(), num_shards=3)(x)))(x)
    assert len({row.tobytes() for row in np.asarray(y)}) == 11, "two tokens have the same mask"
    np.testing.assert_array_equal(np.asarray(slope) != 0, np.asarray(y) != 0)


@pytest.mark.parametrize(
    ("wrap", "lead"), [(lambda fn: fn, LEADS[1]), (jax.checkpoint, LEADS[0])], ids=["", "checkpoint"]
)
def test_tile_in_a_scan_over_layers(wrap: Any, lead: tuple[int, ...], same: Any) -> None:
    arguments = of_layer(*lead, layers=3)

    def stack(fn: Any, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return lax.scan(wrap(lambda x, w: (x + fn(x, *w), None)), x, weights)[0]

    tiled = partial(stack, tile(layer, num_shards=4))
    same(jax.jit(y_and_gradients(tiled))(*arguments), y_and_gradients(partial(stack, layer))(*arguments))


def test_memory_of_a_checkpointed_scan_is_that_of_one_shard() -> None:
    tokens, hidden, intermediate = 4096, 8, 512
    arguments = of_layer(tokens, hidden=hidden, intermediate=intermediate, layers=3, dtype=jnp.float32)

    def gradient(fn: Any) -> Any:
        body = jax.checkpoint(lambda x, w: (x + fn(x, *w), None))
        return y_and_gradients(lambda x, *weights: lax.scan(body, x, weights)[0])

    whole = tokens * intermediate * 4
    assert temp_bytes(gradient(layer), *arguments) > whole
    assert temp_bytes(gradient(tile(layer, num_shards=16)), *arguments) < whole / 2


@pytest.mark.parametrize("in_axes", [(0, None, None), (0, 0, 0), (None, 0, None), (1, None, 0)], ids=str)
def test_tile_in_vmap(in_axes: tuple[int | None, ...], same: Any) -> None:
    arguments = [a if axis is not None else a[0] for a, axis in zip(of_layer(3, 3, 11, layers=3), in_axes, strict=True)]
    tiled = y_and_gradients(tile(layer, num_shards=4))
    same(
        jax.jit(jax.vmap(tiled, in_axes))(*arguments),
        jax.jit(jax.vmap(y_and_gradients(layer), in_axes))(*arguments),
    )


def test_vmap_in_tile(same: Any) -> None:
    """Of experts, which see the same tokens."""
    x, *weights = of_layer(3, 11, layers=3)

    def mixed(x: jax.Array, *weights: jax.Array) -> jax.Array:
        return jax.vmap(layer, (None, 0, 0))(x, *weights).sum(0)

    same(
        jax.jit(y_and_gradients(tile(mixed, num_shards=4)))(x, *weights),
        jax.jit(y_and_gradients(mixed))(x, *weights),
    )


POLICIES = {"": None, "products saved": jax.checkpoint_policies.dots_saveable}


@pytest.mark.parametrize(("keep", "policy"), [(0.0, ""), (0.5, "products saved"), (1.0, "")], ids=str)
def test_mlp_in_checkpoint(keep: float, policy: str, same: Any) -> None:
    arguments = operands(3, 11)
    tiled = jax.checkpoint(partial(tiled_mlp, num_shards=4, keep=keep), policy=POLICIES[policy])
    same(jax.jit(y_and_gradients(tiled))(*arguments), y_and_gradients(mlp)(*arguments))


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_mlp_in_tile(keep: float, same: Any) -> None:
    arguments = operands(3, 11)
    tiled = tile(partial(tiled_mlp, num_shards=3, keep=keep), num_shards=4)
    same(jax.jit(y_and_gradients(tiled))(*arguments), y_and_gradients(mlp)(*arguments))


class Residual(nn.Module):
    """x + mlp(x), as a body for nn.scan."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + linen.TiledMLP(8, 12, num_shards=4, keep=0.5, param_dtype=jnp.float64, name="mlp")(x), None


ALONE = linen.TiledMLP(8, 12, num_shards=4, keep=0.5, param_dtype=jnp.float64)
OWN_EACH = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}


def parameters(module: Any, *inputs: Any) -> dict[str, jax.Array]:
    """Drawn in an order of their own, so that no two layers or experts are alike."""
    params = module.init(jax.random.key(0), *inputs)["params"]
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return tree.unflatten([jnp.asarray(rng.standard_normal(leaf.shape) / leaf.shape[-2] ** 0.5) for leaf in leaves])


def by_name(x: jax.Array, params: Any) -> jax.Array:
    return mlp(x, params["w_gate"], params["w_up"], params["w_down"])


def test_linen_module_in_vmap(same: Any) -> None:
    """jax.vmap of apply with weights shared or not, and nn.vmap, whose copies have weights of their own."""
    x = operands(3, 11)[0]
    experts: Any = nn.vmap(linen.TiledMLP, **OWN_EACH)(8, 12, num_shards=4, keep=0.5, param_dtype=jnp.float64)
    params = parameters(experts, x)
    assert params["w_up"].shape == (3, 8, 12)
    same(
        jax.jit(y_and_gradients(lambda x, params: experts.apply({"params": params}, x)))(x, params),
        y_and_gradients(jax.vmap(by_name))(x, params),
    )
    shared = jax.tree.map(lambda a: a[0], params)
    for axis, given in ((0, params), (None, shared)):
        call: Any = jax.vmap(lambda x, params: ALONE.apply({"params": params}, x), (0, axis))
        same(
            jax.jit(y_and_gradients(call))(x, given),
            y_and_gradients(jax.vmap(by_name, (0, axis)))(x, given),
        )


def test_linen_module_in_remat(same: Any) -> None:
    x = operands(3, 11)[0]
    again: Any = nn.remat(linen.TiledMLP)(8, 12, num_shards=4, keep=0.5, param_dtype=jnp.float64)
    params = parameters(again, x)

    def call(x: jax.Array, params: Any) -> jax.Array:
        return again.apply({"params": params}, x)

    assert [equation.primitive.name for equation in jax.make_jaxpr(call)(x, params).eqns] == ["remat2"]
    same(jax.jit(y_and_gradients(call))(x, params), y_and_gradients(by_name)(x, params))


@pytest.mark.parametrize("wrap", [lambda body: body, nn.remat], ids=["", "remat"])
def test_linen_module_in_scan(wrap: Any, same: Any) -> None:
    x = operands(3, 11)[0]
    stack: Any = nn.scan(wrap(Residual), length=3, **OWN_EACH)()
    params = parameters(stack, x, None)
    assert params["mlp"]["w_up"].shape == (3, 8, 12)

    def plainly(x: jax.Array, params: Any) -> jax.Array:
        for index in range(3):
            x = x + by_name(x, jax.tree.map(lambda a, index=index: a[index], params["mlp"]))
        return x

    tiled = y_and_gradients(lambda x, params: stack.apply({"params": params}, x, None)[0])
    same(jax.jit(tiled)(x, params), y_and_gradients(plainly)(x, params))


@pytest.mark.ranks
@pytest.mark.parametrize("num_shards", [2, 3])
def test_second_order_of_two_shards_in_a_shard_map(num_shards: int, same: Any) -> None:
    """What stands between the two is typed as varying along the axes of any of it."""
    arrays, mesh = operands(4, 6, hidden=4, intermediate=6), jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P("d"), P(), P(), P()), "out_specs": P("d")}

    def products(fn: Any) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(fn(*arrays) ** 2)

        return jax.jit(lambda *a: jax.jvp(jax.grad(loss, (0, 1, 2, 3)), a, tuple(map(jnp.cos, a))))(*arrays)

    same(products(jax.shard_map(partial(tiled_mlp, num_shards=num_shards), mesh=mesh, **specs)), products(mlp))
