"""`tile` on Flax linen modules: their own random numbers in every shard, real parameters, no write that gets lost."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from shared_specs.tolerances import FLOOR
from tests.asserting import assert_within
from tiled_jax import SpecError, UnsupportedError, tile

KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = jnp.cos(jnp.arange(1 * 10 * 4, dtype=jnp.float32)).reshape(1, 10, 4)
HALVES = {"num_shards": 2}


class Block(nn.Module):
    """Dense, relu and dropout; tiled as a whole, as a method, as a submodule, or not at all."""

    how: str = "plain"
    rate: float = 0.0

    def setup(self) -> None:
        self.dense, self.drop = nn.Dense(3), nn.Dropout(self.rate, deterministic=False)

    def block(self, x: jax.Array) -> jax.Array:
        return self.drop(nn.relu(self.dense(x)))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.how == "method":
            return tile(self.block, num_shards=3)(x)
        if self.how == "submodule":
            return self.drop(nn.relu(tile(self.dense, num_shards=3)(x)))
        if self.how == "closure":
            return tile(lambda x: self.drop(x), **HALVES)(x)
        return self.block(x)


class Inline(nn.Module):
    """A tiled module that is made inside a compact call."""

    make: Callable[[], nn.Module]

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return tile(self.make(), **HALVES)(x)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("intermediates", "seen", x)
        return nn.Dense(2)(x)


def dropout() -> nn.Module:
    return nn.Dropout(0.5, deterministic=False)


def test_every_shard_has_its_own_dropout_mask() -> None:
    apply = partial(Inline(dropout).apply, {}, rngs={"dropout": KEYS["dropout"]})
    y = apply(jnp.ones((1, 64, 4)))[0]
    assert not np.array_equal(y[:32], y[32:])
    assert set(np.unique(y)) == {0.0, 2.0}
    np.testing.assert_array_equal(apply(jnp.ones((1, 64, 4)))[0], y)


def test_backward_draws_the_mask_of_forward() -> None:
    def total(x: jax.Array) -> jax.Array:
        return Inline(dropout).apply({}, x, rngs={"dropout": KEYS["dropout"]}).sum()

    y = Inline(dropout).apply({}, jnp.ones_like(X), rngs={"dropout": KEYS["dropout"]})
    np.testing.assert_array_equal(jax.grad(total)(jnp.ones_like(X)), y)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("how", ["method", "submodule"])
def test_parameters_are_real_and_gradients_those_of_the_whole(how: str, same: Any) -> None:
    def gradients(how: str, variables: Any, x: jax.Array) -> Any:
        return jax.grad(lambda v, x: jnp.sin(Block(how).apply(v, x)).sum(), argnums=(0, 1))(variables, x)

    made, plain = (Block(each).init(KEYS, X) for each in (how, "plain"))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, plain)
    assert all(isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(made))
    variables, x = jax.tree.map(lambda a: a.astype(jnp.float64), (made, X))
    with jax.numpy_dtype_promotion("standard"):
        same(gradients(how, variables, x), gradients("plain", variables, x))


def test_under_jit_and_a_second_call_draws_anew() -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            drop = tile(dropout(), **HALVES)
            return drop(x), drop(x)

    apply = partial(Twice().apply, {}, rngs={"dropout": KEYS["dropout"]})
    first, second = jax.jit(apply)(jnp.ones_like(X))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(apply(jnp.ones_like(X))[1], second)


@pytest.mark.parametrize(
    ("make", "collection", "name"),
    [
        (partial(nn.BatchNorm, use_running_average=False), "batch_stats", "batch_stats.mean"),
        (Sowing, "intermediates", "intermediates.seen"),
    ],
    ids=["batch-norm", "sow"],
)
def test_a_write_to_a_collection_is_refused(make: Any, collection: str, name: str) -> None:
    made = jax.tree.map(jnp.asarray, Plain(make).init(KEYS, X))
    with pytest.raises(UnsupportedError, match=f"fn writes to the state of its modules: {name}"):
        Inline(make).apply(made, X, mutable=[collection])


class Plain(Inline):
    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return self.make()(x)


def test_what_is_sown_into_a_collection_that_nobody_asked_for_is_dropped_as_without_tiling() -> None:
    made = Inline(Sowing).init(KEYS, X)
    tiled, plain = (np.asarray(each(Sowing).apply(made, X)) for each in (Inline, Plain))
    assert_within(tiled, plain, FLOOR["float32"], "y")


@pytest.mark.parametrize("call", ["init", "apply"])
def test_a_module_bound_outside_of_fn_is_refused(call: str) -> None:
    with pytest.raises(UnsupportedError, match="fn calls Dropout, a module that is bound outside"):
        Block("closure", 0.5).init(KEYS, X) if call == "init" else Block("closure", 0.5).apply({}, X, rngs=KEYS)


def test_modules_of_the_one_around_are_refused_and_its_own_work() -> None:
    """nn.Sequential inside nn.compact holds layers whose parameters are those of the module that wrote it down."""

    class Around(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return tile(nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(2)]), **HALVES)(x)

    with pytest.raises(UnsupportedError, match=r"^tile: fn holds Dense_0, a module of Around. Make both in setup, or"):
        Around().init(KEYS, X)

    class InSetup(nn.Module):
        def setup(self) -> None:
            self.layers = nn.Sequential([nn.Dense(4), jnp.tanh, nn.Dense(2)])

        def __call__(self, x: jax.Array, tiled: bool = True) -> Any:
            return tile(self.layers, **HALVES)(x) if tiled else self.layers(x)

    made = InSetup().init(KEYS, X)
    assert set(made["params"]["layers"]) == {"layers_0", "layers_2"}
    tiled, plain = (np.asarray(InSetup().apply(made, X, tiled=tiled)) for tiled in (True, False))
    assert_within(tiled, plain, FLOOR["float32"], "y")


def test_a_module_that_was_bound_by_hand() -> None:
    bound = Block().bind(Block().init(KEYS, X))
    tiled, plain = (np.asarray(dense(X)) for dense in (tile(bound.dense, num_shards=3), bound.dense))
    assert_within(tiled, plain, FLOOR["float32"], "y")
    with pytest.raises(UnsupportedError, match="fn calls Dense, a module that is bound outside"):
        jax.jit(lambda x: tile(lambda x: bound.dense(x), **HALVES)(x))(X)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_fn_closes_over_is_refused(make: Any) -> None:
    rngs, drop = {"dropout": make(0)}, dropout()
    with pytest.raises(UnsupportedError, match="fn closes over a random key"):
        tile(lambda x: drop.apply({}, x, rngs=rngs), **HALVES)
    y = tile(lambda x, rngs: drop.apply({}, x, rngs={"dropout": rngs}), rngs=make(0), **HALVES)(jnp.ones((1, 64, 4)))[0]
    assert not np.array_equal(y[:32], y[32:])


def test_streams_beside_those_of_the_module_are_refused() -> None:
    class Both(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return tile(nn.Dense(2), rngs=jax.random.key(0))(x)

    with pytest.raises(SpecError, match="rngs must be None for a linen module"):
        Both().init(KEYS, X)
