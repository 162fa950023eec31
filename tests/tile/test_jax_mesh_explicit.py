"""`tile` and `tiled_loss` where Explicit mesh axes cut the tokens: what fn closes over, modules, random numbers, results."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.mlp.jax_untiled import operands
from tiled_jax import UnsupportedError, tile, tiled_loss

pytestmark = pytest.mark.ranks

B, S, H = 8, 32, 8


def mesh_of() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)


def on_mesh(a: jax.Array, *spec: Any) -> jax.Array:
    return jax.device_put(a, NamedSharding(mesh_of(), P(*spec)))


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(jnp.dot(x, w))


def in_a_cell(w: jax.Array) -> Any:
    return lambda x: product(x, w)


def in_a_pytree(w: jax.Array) -> Any:
    held = {"layers": [w, None]}

    def second(x: jax.Array) -> jax.Array:
        return product(x, held["layers"][0])

    return lambda x: (product(x, held["layers"][0]) + second(x)) / 2


def in_a_function_it_calls(w: jax.Array) -> Any:
    def inner(x: jax.Array, times: int) -> jax.Array:  # names itself
        return inner(x, times - 1) if times else product(x, w)

    return lambda x: (inner(x, 2) + inner(x, 0)) / 2


def in_two_functions(w: jax.Array) -> Any:
    def shared(x: jax.Array) -> jax.Array:
        return product(x, w)

    def other(x: jax.Array) -> jax.Array:
        return shared(x)

    return lambda x: (shared(x) + other(x)) / 2


def in_a_partial(w: jax.Array) -> Any:
    return partial(lambda w, x, *, v: (product(x, w) + product(x, v)) / 2, w, v=w)


def in_defaults(w: jax.Array) -> Any:
    def fn(x: jax.Array, w: jax.Array = w, *, v: jax.Array = w) -> jax.Array:
        return (product(x, w) + product(x, v)) / 2

    return fn


HELD: dict[str, jax.Array] = {}


def in_a_global(w: jax.Array) -> Any:
    HELD["w"] = w
    return lambda x: product(x, HELD["w"])


def in_a_function_of_jax(w: jax.Array) -> Any:
    return lambda x: jax.jit(lambda x: product(x, w))(x)


class Product(nnx.Module):
    def __init__(self, w: jax.Array) -> None:
        self.w = nnx.Param(w)

    def product(self, x: jax.Array) -> jax.Array:
        return product(x, self.w.get_value())

    __call__ = product


def in_a_module_it_closes_over(w: jax.Array) -> Any:
    module = Product(w)
    return lambda x: module(x)


def in_the_object_of_a_method(w: jax.Array) -> Any:
    return Product(w).product


def in_linen_variables(w: jax.Array) -> Any:
    dense = linen.Dense(H, use_bias=False)
    return lambda x: jnp.sin(jnp.asarray(dense.apply({"params": {"kernel": w}}, x)))


PLACES = (
    in_a_cell,
    in_a_pytree,
    in_a_function_it_calls,
    in_two_functions,
    in_a_partial,
    in_defaults,
    in_a_global,
    in_a_function_of_jax,
    Product,
    in_a_module_it_closes_over,
    in_the_object_of_a_method,
    in_linen_variables,
)


@pytest.mark.deep_but(4)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_fn_may_keep_a_weight(place: Any, same: Any) -> None:
    x, w = operands(B, S, hidden=H, intermediate=H)[:2]

    def gradients(wrap: Any) -> Any:
        return jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.cos(wrap(place(w))(x))), (0, 1)))

    found = gradients(partial(tile, num_shards=3))(on_mesh(x, None, ("data", "context")), on_mesh(w, "data"))
    same(found, gradients(lambda fn: fn)(x, w))


def test_a_straight_through_gradient_stays_the_one_that_fn_defines(same: Any) -> None:
    @jax.custom_vjp
    def rounded(x: jax.Array) -> jax.Array:
        return jnp.round(x)

    rounded.defvjp(lambda x: (rounded(x), None), lambda _, d: (d,))
    x, w = operands(B, S, hidden=H, intermediate=H)[:2]

    def gradients(wrap: Any) -> Any:
        return jax.jit(jax.grad(lambda x, w: jnp.sum(wrap(lambda x: rounded(jnp.dot(x, w)) ** 2)(x)), (0, 1)))

    found = gradients(partial(tile, num_shards=3))(on_mesh(x, "data", "context"), on_mesh(w))
    same(found, gradients(lambda fn: fn)(x, w))


@pytest.mark.deep
def test_without_jit_and_in_forward_mode(same: Any) -> None:
    x, w = operands(B, S, hidden=H, intermediate=H)[:2]
    given = on_mesh(x, "data")
    kept = on_mesh(w)
    y, tangent = jax.jvp(tile(lambda x: product(x, kept), num_shards=3), (given,), (given,))
    assert jax.typeof(y).sharding.spec[0] == "data"
    same([y, tangent], list(jax.jvp(lambda x: product(x, w), (x,), (x,))))


def test_sums_and_values_of_a_loss_without_jit(same: Any) -> None:
    x, w = operands(B, S, hidden=H, intermediate=H)[:2]
    kept = on_mesh(w)
    found = tiled_loss(
        lambda x: (jnp.sum(product(x, kept)), product(x, kept)[..., 0]), on_mesh(x, None, "context"), num_shards=3
    )
    same(found, (jnp.sum(product(x, w)), product(x, w)[..., 0]))


def test_every_token_draws_its_own_mask() -> None:
    def masked(x: jax.Array) -> Any:
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        return tile(dropout, num_shards=2)(x), tile(dropout, num_shards=2)(x)

    first, second = (np.asarray(a).reshape(B * S, 64) for a in jax.jit(masked)(on_mesh(jnp.ones((B, S, 64)), "data")))
    assert len({row.tobytes() for row in (*first, *second)}) == 2 * B * S, "two tokens have the same mask"


def test_a_key_for_every_shard() -> None:
    drop = tile(lambda x, *, rngs: jax.random.uniform(rngs, x.shape), num_shards=2, rngs=jax.random.key(0))
    found = np.asarray(jax.jit(drop)(on_mesh(jnp.ones((B, S, 8)), "data", "context")))
    assert len({row.tobytes() for row in found.reshape(B * S, 8)}) == B * S


def test_a_write_of_a_module_that_fn_closes_over_is_refused() -> None:
    norm = nnx.BatchNorm(H, rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match=r"^tile: fn writes to the state of its modules: \w+ \(BatchStat"):
        tile(lambda x: norm(x), num_shards=2)(on_mesh(jnp.ones((B, S, H)), "data"))


@pytest.mark.parametrize("function", ["tile", "tiled_loss"])
def test_an_array_in_an_object_is_refused(function: str) -> None:
    class Held:
        weight = on_mesh(jnp.ones((H, H)))

    held = Held()
    x = on_mesh(jnp.ones((B, S, H)), "data")
    rule = "fn must be free of arrays on Explicit mesh axes that it keeps in an object, got one"
    fn = tile if function == "tile" else lambda fn: partial(tiled_loss, fn)
    with pytest.raises(UnsupportedError, match=f"{function}: {rule}. Hand the array or the pytree"):
        fn(lambda x: jnp.dot(x, held.weight))(x)


def test_a_flat_result_of_tokens_cut_in_a_later_dim_is_refused(same: Any) -> None:
    x = operands(B, S, hidden=H)[0]
    flat = tile(lambda x: x.reshape(-1, H)[:, 0], num_shards=2)
    same(flat(on_mesh(x, "data")), x.reshape(-1, H)[:, 0])
    with pytest.raises(UnsupportedError, match=r"output 0 of fn must be \[1, t, ...\] where Explicit mesh axes cut"):
        flat(on_mesh(x, None, "data"))


def test_axes_that_cut_no_tokens_stay_fn_s_own_matter(same: Any) -> None:
    """Tensor-parallel columns under types: fn says itself how its product comes out."""
    x, w_gate, _, w_down = operands(B, S, hidden=H, intermediate=16)

    def fn(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.dot(jnp.tanh(jnp.dot(x, up)), down, out_sharding=P())

    given = on_mesh(x), on_mesh(w_gate, None, "data"), on_mesh(w_down, "data")
    with jax.set_mesh(mesh_of()):
        found = tile(fn, num_shards=4)(*given)
    same(found, jnp.dot(jnp.tanh(jnp.dot(x, w_gate)), w_down))
