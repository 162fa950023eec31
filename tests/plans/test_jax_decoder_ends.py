"""In which order gradients are made in JAX: what is large is gone before the backward of what comes before it begins."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tiled_jax.functional import tiled_distillation_loss, tiled_linear_cross_entropy
from tiled_jax.plans.data import head_first
from tiled_jax.plans.decoder_ends import _looked_up, _Lookup

X, HEAD = jnp.linspace(-1, 1, 12).reshape(4, 3), jnp.linspace(0, 1, 15).reshape(3, 5)
EACH = LossOptions(reduction="none")
LABELS, IDS = jnp.asarray([0, 4, 2, 1]), jnp.asarray([[3, 0, 3, 7], [1, 9, 0, 3]])


def equations(fn: Callable[..., Any], primitive: str, *args: Any) -> list[Any]:
    """Every equation of a kind in the program of fn(*args)."""

    def of(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == primitive:
                yield equation
            for inner in core.jaxprs_in_params(equation.params):
                yield from of(inner)

    return list(of(jax.make_jaxpr(fn)(*args).jaxpr))


def operands(fn: Callable[..., Any], primitive: str, *args: Any) -> list[list[tuple[int, ...]]]:
    """The shapes of what each of these takes."""
    return [[a.aval.shape for a in equation.invars] for equation in equations(fn, primitive, *args)]


def assert_near(found: jax.Array, expected: jax.Array) -> None:
    assert_within(np.asarray(found), np.asarray(expected), limit(0.0, "float32"), "the values")


def loss(x: jax.Array, head: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ head))


def test_the_gradient_of_a_head_is_there_before_that_of_its_tokens() -> None:
    """A barrier of both in backward; for a head that is not trained there is neither that nor a product."""
    both, of_x = (jax.grad(partial(head_first, loss), which) for which in ((0, 1), 0))
    assert operands(both, "optimization_barrier", X, HEAD) == [[(4, 3), (3, 5)]] * 2
    assert operands(of_x, "optimization_barrier", X, HEAD) == [[(4, 3), (3, 5)]]
    assert [len(operands(fn, "dot_general", X, HEAD)) for fn in (both, of_x)] == [3, 2]
    expected = jax.grad(loss, (0, 1))(X, HEAD)
    for found, of_plain in zip((*both(X, HEAD), of_x(X, HEAD)), (*expected, expected[0]), strict=True):
        assert_near(found, of_plain)


ONE_SHARD: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "loss": (lambda x, w: tiled_linear_cross_entropy(x, w, LABELS), (X, HEAD)),
    "loss in backward": (lambda x, w: tiled_linear_cross_entropy(x, w, LABELS, loss=EACH) @ X[:, 0], (X, HEAD)),
    "distillation": (lambda x, w: tiled_distillation_loss(x, w, X, HEAD[::-1]), (X, HEAD)),
}


@pytest.mark.parametrize("name", ONE_SHARD)
def test_gradients_of_one_shard_are_made_together(name: str) -> None:
    """One barrier has them both: else the weight's would wait until the backward of what comes before is done."""
    fn, args = ONE_SHARD[name]
    found = operands(jax.grad(fn, tuple(range(len(args)))), "optimization_barrier", *args)
    assert sorted(a.shape for a in args) in [sorted(shapes) for shapes in found]


@pytest.mark.ranks
@pytest.mark.parametrize("shard", [None, 1, 2, 3])
def test_the_sum_of_a_split_tables_gradient_waits_for_the_layers(shard: int | None) -> None:
    """Rows and gradient are those of the whole table, and no zeros of its size are there before a gradient is."""
    mesh, table = Mesh(np.asarray(jax.devices()[:2]), ("tp",)), jnp.linspace(-1, 1, 30).reshape(10, 3)
    lookup = _Lookup("tp", sequence_parallel=True, shard=shard)
    ids = IDS if shard else IDS.reshape(1, -1)
    weights = jnp.linspace(1, 2, 24).reshape(8, 3)

    def rows(table: jax.Array) -> jax.Array:
        return _looked_up(lookup, ids, table)

    split = jax.shard_map(rows, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    order = IDS.reshape(-1)
    assert_near(split(table), table[order])
    of_split, of_whole = (
        jax.grad(lambda t, fn=fn: jnp.sum(fn(t) * weights)) for fn in (split, lambda table: table[order])
    )
    assert_near(of_split(table), of_whole(table))
    sums = [e for e in equations(of_split, "broadcast_in_dim", table) if e.outvars[0].aval.shape == (5, 3)]
    assert sums
    assert not any(isinstance(e.invars[0], core.Literal) for e in sums)
