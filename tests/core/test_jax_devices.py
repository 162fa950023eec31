"""Operands on devices that differ: refused with the text of the PyTorch half where no program is traced, else left to JAX."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.tolerances import MODEL_FLOAT32
from tests.asserting import assert_within
from tests.mlp.jax_untiled import loss_operands, operands
from tiled_jax import SpecError, TiledMLP, tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp


def placed(places: tuple[int | None, ...]) -> list[Any]:
    """x, w_gate, w_up and w_down on devices by number; None: not committed to any."""
    arrays = operands(7, dtype=jnp.float32)
    return [a if at is None else jax.device_put(a, jax.devices()[at]) for a, at in zip(arrays, places, strict=True)]


@pytest.mark.parametrize(
    ("places", "text"),
    [
        ((0, None, 1, 1), "w_up must be on x's device cpu:0, got cpu:1"),
        ((None, None, 2, 1), "w_down must be on w_up's device cpu:2, got cpu:1"),
    ],
)
def test_devices_must_agree(places: tuple[int | None, ...], text: str) -> None:
    arguments = placed(places)
    with pytest.raises(SpecError) as caught:
        tiled_mlp(*arguments)
    assert str(caught.value) == f"tiled_mlp: {text}."
    with pytest.raises(SpecError) as caught:
        jax.grad(lambda w_gate: jnp.sum(tiled_mlp(arguments[0], w_gate, *arguments[2:])))(arguments[1])
    assert str(caught.value) == f"tiled_mlp: {text}."


def test_the_device_of_a_module_must_be_that_of_x() -> None:
    x = jax.device_put(jnp.ones((7, 8)), jax.devices()[1])
    module = TiledMLP(8, 12, rngs=nnx.Rngs(0))
    assert module(x).devices() == {jax.devices()[1]}, "parameters that are not committed go where x is"
    nnx.update(module, jax.device_put(nnx.state(module), jax.devices()[0]))
    with pytest.raises(SpecError, match=r"^tiled_mlp: w_gate must be on x's device cpu:1, got cpu:0\.$"):
        module(x)


@pytest.mark.parametrize("places", [(None, 1, None, 1), (3, 3, 3, 3), (None,) * 4])
def test_arrays_without_a_device_go_where_the_others_are(places: tuple[int | None, ...]) -> None:
    expected = tiled_mlp(*operands(7, dtype=jnp.float32))
    y = tiled_mlp(*placed(places))
    assert y.devices() == {jax.devices()[next((at for at in places if at is not None), 0)]}
    np.testing.assert_array_equal(np.asarray(y), np.asarray(expected))


def test_under_jit_devices_are_jax_own_affair() -> None:
    """Constants of a program are copied to where it runs; of its arguments JAX says itself that they disagree."""
    x, *weights = placed((0, 1, 2, 0))
    expected = np.asarray(tiled_mlp(*operands(7, dtype=jnp.float32)))
    for program in (jax.jit(lambda: tiled_mlp(x, *weights)), partial(jax.jit(lambda x: tiled_mlp(x, *weights)), x)):
        assert_within(np.asarray(program()), expected, MODEL_FLOAT32, "y")
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        jax.jit(tiled_mlp)(x, *weights)
    assert type(caught.value) is ValueError


def test_an_array_beside_sharded_ones_is_jax_own_affair() -> None:
    x, *weights = placed((0, None, None, None))
    mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
    split = [jax.device_put(w, NamedSharding(mesh, P())) for w in weights]
    with pytest.raises(ValueError, match="incompatible devices") as caught:
        tiled_mlp(x, *split)
    assert type(caught.value) is ValueError


def test_devices_of_the_loss_must_agree_where_no_program_is_traced() -> None:
    first, second = jax.devices()[:2]
    x, weight, targets = jax.device_put(loss_operands(12, dtype=jnp.float32), first)
    away, expected = jax.device_put(targets, second), np.asarray(tiled_linear_cross_entropy(x, weight, targets))
    with pytest.raises(
        SpecError, match=r"^tiled_linear_cross_entropy: targets must be on x's device cpu:0, got cpu:1\.$"
    ):
        tiled_linear_cross_entropy(x, weight, away)
    traced = jax.jit(lambda x: tiled_linear_cross_entropy(x, weight, away))(x)
    for found in (traced, tiled_linear_cross_entropy(x, weight, np.asarray(away))):
        assert_within(np.asarray(found), expected, MODEL_FLOAT32, "loss")


@pytest.mark.parametrize("name", ["tile", "tiled_loss"])
def test_what_is_cut_as_x_is_must_be_on_its_device(name: str) -> None:
    """Anything else is up to fn, which may move it."""
    first, second = jax.devices()[:2]
    x, mask, away = (jax.device_put(jnp.ones((2, 6, 4)), device) for device in (first, first, second))
    run = partial(tiled_loss, num_shards=3) if name == "tiled_loss" else lambda fn, *a: tile(fn, num_shards=3)(*a)

    def fn(x: jax.Array, mask: jax.Array, weight: Any = None) -> Any:
        return jnp.sum(x * mask) if name == "tiled_loss" else x * mask

    cut = f"{name}: every array with x's leading dims"
    with pytest.raises(SpecError) as caught:
        run(fn, x, away)
    assert str(caught.value) == f"{cut} must be on x's device cpu:0, got cpu:1 (its shape is [2, 6, 4])."
    assert run(fn, x, mask, jax.device_put(jnp.ones(3), second)).devices() == {first}
    np.testing.assert_array_equal(jax.jit(lambda x: run(fn, x, away))(x), run(fn, x, mask))
    assert run(fn, jnp.ones((2, 6, 4)), away).devices() == {second}, "x is not committed"
