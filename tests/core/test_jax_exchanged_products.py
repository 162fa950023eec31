"""Products that somebody exchanges while a model runs, as qwix does: refused by name, and never kept for another call.

A compiled call that was traced with them was taken for the plain one of the same shapes, and the other way round.
"""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import llama_config
from tiled_jax import TiledLinear, TiledLinearCrossEntropy, TiledMLP, tile
from tiled_jax.models import Llama

H = 8
X = jnp.cos(jnp.arange(2 * 5 * H, dtype=jnp.float32)).reshape(2, 5, H)
LABELS = jnp.arange(10).reshape(2, 5)


def block_of(rngs: nnx.Rngs) -> Any:
    model: Any = Llama(llama_config(num_hidden_layers=1), scope="block", rngs=rngs)
    return lambda: model(LABELS)


def called(module: Any, *args: Any) -> Callable[[], Any]:
    return lambda: module(*args)


# What is called, by the name in the message and the weight in it.
CALLS: dict[str, tuple[str, Callable[[nnx.Rngs], Callable[[], Any]]]] = {
    "tiled_mlp": ("w_gate", lambda rngs: called(TiledMLP(H, 12, num_shards=2, rngs=rngs), X)),
    "tiled_linear_cross_entropy": (
        "weight",
        lambda rngs: called(TiledLinearCrossEntropy(H, 16, num_shards=2, rngs=rngs), X, LABELS),
    ),
    "TiledLinear": ("weight", lambda rngs: called(TiledLinear(H, 12, in_splits=2, rngs=rngs), X)),
    "Llama": ("q", block_of),
}


PLAIN = types.FunctionType(lax.dot_general.__code__, lax.dot_general.__globals__, closure=lax.dot_general.__closure__)
PLAIN.__kwdefaults__, PLAIN.__defaults__ = lax.dot_general.__kwdefaults__, lax.dot_general.__defaults__
used: list[Callable[..., Any]] = []  # the product in the place of `lax.dot_general`


def exchanged(monkeypatch: pytest.MonkeyPatch, product: Callable[..., Any]) -> None:
    """`lax.dot_general` for everybody, by whatever name they have it, as qwix exchanges it: by its code."""

    def other(*args: Any, **options: Any) -> Any:
        from tests.core import test_jax_exchanged_products as here

        return here.used[-1](here.PLAIN, *args, **options)

    used.append(product)
    monkeypatch.setattr(lax.dot_general, "__code__", other.__code__)


def halved(plain: Any, *args: Any, **options: Any) -> jax.Array:
    return plain(*args, **options) * 0.5


def only_passed_on(plain: Any, *args: Any, **options: Any) -> jax.Array:
    return plain(*args, **options)


@pytest.mark.parametrize("name", CALLS)
def test_exchanged_products_are_refused_and_leave_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, make = CALLS[name]
    call = make(nnx.Rngs(0))
    expected = call()
    with monkeypatch.context() as changed:
        exchanged(changed, halved)
        with pytest.raises(
            UnsupportedError, match=f"{name}: the product with .*{weight}.* is exchanged while the model runs"
        ):
            call()
    np.testing.assert_array_equal(call(), expected)


def test_products_of_other_modules_may_be_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interception is there for the whole model; where it passes the product on, nothing is refused."""
    call = CALLS["tiled_mlp"][1](nnx.Rngs(0))
    expected = call()
    exchanged(monkeypatch, only_passed_on)
    np.testing.assert_array_equal(call(), expected)


def test_tile_calls_what_stands_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward recomputes what forward computed, with the products that it had."""
    layer = nnx.Linear(H, 4, use_bias=False, rngs=nnx.Rngs(0))
    exchanged(monkeypatch, halved)
    tiled = tile(layer, num_shards=2)
    found, expected = (jax.value_and_grad(lambda x, fn=fn: jnp.sin(fn(x)).sum())(X) for fn in (tiled, layer))
    for ours, theirs in zip(found, expected, strict=True):
        assert_within(np.asarray(ours), np.asarray(theirs), between("float32"), "the values")
