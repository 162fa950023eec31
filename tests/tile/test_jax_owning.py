"""`tile(module)` is a module that owns the variables of what it tiles: kept as an attribute it trains and saves as without."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from shared_specs.errors import SpecError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tiled_jax import tile

HIDDEN = 6
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, HIDDEN)), jnp.float32)


class Inner(nnx.Module):
    """A token-wise module with parameters and a plain attribute."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(HIDDEN, 8, rngs=rngs), nnx.Linear(8, HIDDEN, rngs=rngs)
        self.scale = 2.0

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x))) * self.scale


class Plainly(Inner, pytree=False):
    """One that is no pytree, with a list of layers."""


class Model(nnx.Module):
    def __init__(self, *, tiled: bool, kind: Any = Inner) -> None:
        rngs = nnx.Rngs(0)
        inner = kind(rngs)
        self.first, self.inner = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs), tile(inner, num_shards=3) if tiled else inner

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.first(x))


def pair(kind: Any = Inner) -> tuple[Any, Any]:
    return Model(tiled=True, kind=kind), Model(tiled=False, kind=kind)


def near(found: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within(np.asarray(ours), np.asarray(theirs), between("float32"), "the values")


@pytest.mark.deep
@pytest.mark.parametrize("kind", [Inner, Plainly])
def test_an_optimizer_trains_it(kind: Any) -> None:
    def trained(model: Any) -> Any:
        optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
        for _ in range(2):
            optimizer.update(model, nnx.grad(lambda m: jnp.square(m(X)).mean())(model))
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    ours, plain = pair(kind)
    before = nnx.to_pure_dict(nnx.state(plain, nnx.Param))
    found, expected = trained(ours), trained(plain)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    near(found, expected)
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, expected)
    assert all(jax.tree.leaves(moved)), f"not trained: {moved}"


def test_its_state_is_that_of_the_model_without() -> None:
    ours, plain = pair()
    assert [path for path, _ in nnx.to_flat_state(nnx.state(ours))] == [
        path for path, _ in nnx.to_flat_state(nnx.state(plain))
    ]
    nnx.update(ours, jax.tree.map(lambda a: 2 * a, nnx.state(plain)))
    nnx.update(plain, nnx.state(ours))
    near(ours(X), plain(X))
    assert isinstance(ours.inner, Inner)


COPIES = {
    "split and merge": lambda model: nnx.merge(*nnx.split(model)),
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickled graph": lambda model: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(model)))),
    "leaves": lambda model: jax.tree.map(lambda leaf: leaf, model),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_tiled(how: str) -> None:
    ours, plain = pair()
    copied = COPIES[how](ours)
    near(copied(X), plain(X))
    loops = str(jax.make_jaxpr(lambda x: copied(x))(X)).count("scan[")
    assert loops == str(jax.make_jaxpr(lambda x: ours(x))(X)).count("scan[") > 0
    near(nnx.grad(lambda m: m(X).sum())(copied), nnx.grad(lambda m: m(X).sum())(plain))


def test_attributes_are_those_of_the_module() -> None:
    ours, plain = pair()
    for model in (ours, plain):
        model.inner.scale, model.inner.up = 5.0, nnx.Linear(HIDDEN, 8, rngs=nnx.Rngs(7))
    near(ours(X), plain(X))


def test_the_module_and_its_tiled_one_share_variables() -> None:
    inner = Inner(nnx.Rngs(0))
    ours = tile(inner, num_shards=2)
    inner.up.kernel[...] *= 3.0
    near(ours(X), inner(X))


@pytest.mark.parametrize("how", ["eval_shape", "jit", "in the call"])
def test_it_may_be_made_while_something_is_traced(how: str) -> None:
    """A weight made under `nnx.eval_shape` does not leak a tracer."""
    ours, plain = pair()
    if how == "eval_shape":
        abstract = nnx.eval_shape(lambda: Model(tiled=True))
        assert jax.tree.map(jnp.shape, nnx.state(abstract)) == jax.tree.map(jnp.shape, nnx.state(ours))
        near(nnx.merge(nnx.graphdef(abstract), nnx.state(plain))(X), plain(X))
    elif how == "jit":
        near(nnx.jit(lambda: Model(tiled=True))()(X), plain(X))
    else:
        near(jax.jit(lambda x: tile(plain.inner, num_shards=2)(x))(X), plain.inner(X))


def test_streams_given_to_tile_are_a_part_of_it() -> None:
    """Each call advances them; a clone draws what the module would have drawn."""

    class Drops(nnx.Module):
        def __init__(self) -> None:
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
            return self.drop(x, rngs=rngs)

    ours = tile(Drops(), num_shards=2, rngs=nnx.Rngs(dropout=1))
    x = jnp.ones((64, 8))
    first, copied = ours(x), nnx.clone(ours)
    second = ours(x)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[:32], first[32:])
    np.testing.assert_array_equal(copied(x), second)


class Held(linen.Module):
    """A tiled linen module made in `setup`, or handed over, or not tiled."""

    how: str = "plain"
    given: Any = None

    def setup(self) -> None:
        made = linen.Dense(3) if self.given is None else self.given
        self.inner = tile(made, num_shards=3) if self.how == "tiled" else made

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


@pytest.mark.parametrize("how", ["setup", "given", "alone"])
def test_linen_variables_lie_where_they_lay(how: str) -> None:
    if how == "alone":
        ours, plain = tile(linen.Dense(3), num_shards=3), linen.Dense(3)
    elif how == "given":
        ours, plain = Held(given=tile(linen.Dense(3), num_shards=3)), Held(given=linen.Dense(3))
    else:
        ours, plain = Held("tiled"), Held()
    variables, expected = ours.init(jax.random.key(0), X), plain.init(jax.random.key(0), X)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    near(variables, expected)

    def value_and_grad(module: Any) -> Any:
        return jax.value_and_grad(lambda v: jnp.sin(module.apply(v, X)).sum())(variables)

    near(value_and_grad(ours), value_and_grad(plain))
    assert "scan[" in str(jax.make_jaxpr(lambda v: ours.apply(v, X))(variables))
    if how == "alone":
        assert ours == tile(linen.Dense(3, kernel_init=plain.kernel_init, bias_init=plain.bias_init), num_shards=3)
        assert hash(ours) != hash(ours.clone(tile_options=ours.tile_options.__class__(num_shards=2)))
        assert type(pickle.loads(pickle.dumps(tile(linen.Dropout(0.5))))) is type(tile(linen.Dropout(0.5)))


def test_a_linen_module_has_streams_of_its_own() -> None:
    with pytest.raises(SpecError, match="rngs must be None for a linen module"):
        tile(linen.Dropout(0.5), rngs=nnx.Rngs(0))
