"""Gradients of what the shards of `tile` share: summed in float32, rounded once, sent once, and nothing kept for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import BF16_256_SHARDS, limit
from tests.asserting import assert_within
from tests.core.jax_counting import collectives, kept_bytes, temp_bytes
from tiled_jax import tile
from tiled_jax.tile import shared_gradients

T, H, I = 1024, 32, 64  # noqa: E741


class Block(nnx.Module):
    """A gated MLP of given weights."""

    def __init__(self, w: dict[str, jax.Array]) -> None:
        self.gate, self.up, self.down = (nnx.Param(w[name]) for name in ("gate", "up", "down"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return block(x, {"gate": self.gate[...], "up": self.up[...], "down": self.down[...]})


def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]


FORMS: dict[str, Any] = {
    "arguments": lambda x, w, n: tile(block, num_shards=n)(x, w),
    "closure": lambda x, w, n: tile(lambda x: block(x, w), num_shards=n)(x),
    "module": lambda x, w, n: tile(Block(w), num_shards=n)(x),
}


def operands(dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"gate": (H, I), "up": (H, I), "down": (I, H)}
    w = {name: rng.standard_normal(shape) / np.sqrt(shape[0]) for name, shape in shapes.items()}
    drawn = rng.standard_normal((T, H)), w, rng.standard_normal((T, H))
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16).astype(dtype), drawn)


def weight_gradients(fn: Any, dtype: Any) -> dict[str, np.ndarray[Any, Any]]:
    found = jax.jit(lambda x, w, dy: jax.vjp(lambda w: fn(x, w), w)[1](dy)[0])(*operands(dtype))
    assert {a.dtype for a in found.values()} == {jnp.dtype(dtype)}
    return {name: np.asarray(a) for name, a in found.items()}


@pytest.fixture(scope="module")
def allowed() -> tuple[dict[str, Any], dict[str, float]]:
    """The exact gradients, and the largest error of each."""
    with jax.enable_x64(True):
        exact = weight_gradients(block, jnp.float64)
    untiled = weight_gradients(block, jnp.bfloat16)
    return exact, {name: BF16_256_SHARDS * relative_error(untiled[name], exact[name]) for name in exact}


@pytest.mark.parametrize("num_shards", [256, 205], ids=["even", "ragged"])
@pytest.mark.parametrize("form", FORMS)
def test_many_shards_in_bfloat16(form: str, num_shards: int, allowed: Any) -> None:
    exact, limits = allowed
    found = weight_gradients(lambda x, w: FORMS[form](x, w, num_shards), jnp.bfloat16)
    for name, wanted in exact.items():
        assert relative_error(found[name], wanted) <= limits[name], name


def test_sums_in_bfloat16_would_be_seen(allowed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_gradients.SharedSums, "over", lambda self, run, *example: run)
    exact, limits = allowed
    found = weight_gradients(lambda x, w: FORMS["arguments"](x, w, 256), jnp.bfloat16)
    assert all(relative_error(found[name], wanted) > 2 * limits[name] for name, wanted in exact.items())


def test_only_the_sums_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer, however many there are; between forward and backward nothing."""
    x, w, dy = operands(jnp.bfloat16)
    layers = jax.tree.map(lambda a: jnp.stack([a] * 6), w)

    def stack(x: jax.Array, layers: Any, dy: jax.Array) -> Any:
        def run(x: jax.Array, layers: Any) -> jax.Array:
            return lax.scan(lambda x, w: (x + FORMS["arguments"](x, w, 16), None), x, layers)[0]

        return jax.vjp(run, x, layers)[1](dy)

    def measured() -> tuple[int, int]:
        return temp_bytes(stack, x, layers, dy), kept_bytes(lambda x, w: FORMS["closure"](x, w, 16), x, w)

    wide = measured()
    monkeypatch.setattr(shared_gradients.SharedSums, "over", lambda self, run, *example: run)
    narrow = measured()
    assert wide[0] - narrow[0] <= 4 * 3 * H * I
    assert wide[1] == narrow[1]


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["arguments", "module"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_devices_are_summed_once_a_call(dtype: Any, form: str) -> None:
    """Three weights, three sums, none of them in a loop; with tokens of every device."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    fn = jax.shard_map(lambda x, w: FORMS[form](x, w, 4), mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert collectives(lambda x, w, dy: jax.vjp(fn, x, w)[1](dy), *operands(dtype)) == {False: 3, True: 0}


def test_derivatives_of_any_order(same: Any) -> None:
    """Forward, backward and twice, through the pair of an array and its wide twin."""

    def through(w: jax.Array) -> jax.Array:
        return shared_gradients.with_gradient_of(w, w.astype(jnp.float64))

    def curvature(use: Any, w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(jnp.sin(use(w)) ** 3))(w) ** 2))(w)

    w = jnp.cos(jnp.arange(6.0))
    same(curvature(through, w), curvature(lambda w: w, w))
    same(jax.jvp(lambda w: jnp.sin(through(w)), (w,), (w,)), jax.jvp(jnp.sin, (w,), (w,)))
    same(jax.vmap(jax.grad(lambda w: jnp.sin(through(w))))(w), jnp.cos(w))


def test_forward_mode_in_bfloat16() -> None:
    def slope(fn: Any, dtype: Any) -> np.ndarray[Any, Any]:
        x, w, _ = operands(dtype)
        return np.asarray(jax.jit(lambda w: jax.jvp(lambda w: fn(x, w), (w,), (w,))[1])(w))

    with jax.enable_x64(True):
        exact = slope(block, jnp.float64)
    untiled = relative_error(slope(block, jnp.bfloat16), exact)
    found = slope(lambda x, w: FORMS["closure"](x, w, 8), jnp.bfloat16)
    assert_within(found, exact, limit(untiled, "bfloat16"), "tangent")
