"""`tiled_mlp` under JAX's transformations, with values and arguments that break a careless implementation."""

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from shared_specs.config import ACTIVATIONS, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.mlp.cases import MLP_CASES, MLPCase
from shared_specs.tolerances import BF16_256_SHARDS, DISTRIBUTED_FLOAT64
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.matrix import MATRIX
from tests.mlp.jax_untiled import mlp, operands, y_and_gradients
from tiled_jax import SpecError, UnsupportedError, backends, tiled_mlp

if importlib.util.find_spec("torch") is None:  # else test_both_mlp.py runs every case in both halves

    @pytest.mark.parametrize("case", [*MLP_CASES, *MATRIX], ids=lambda case: case.id)
    def test_case(case: MLPCase) -> None:
        assert_case(case, ADAPTERS["jax"].run(case))


@pytest.mark.parametrize(("tokens", "keep"), [(16, 0.0), (23, 0.5)])
def test_second_order(tokens: int, keep: float, same: Any) -> None:
    arguments = operands(tokens)
    tiled = partial(tiled_mlp, num_shards=4, keep=keep)

    def slope(fn: Any) -> Any:
        first = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=(0, 1, 2, 3))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(g * g) for g in first(*a)), argnums=(0, 1, 2, 3)))

    same(slope(tiled)(*arguments), slope(mlp)(*arguments))


@pytest.mark.parametrize(
    ("in_axes", "keep"), [((0, None, None, None), 0.0), ((0, 0, 0, 0), 0.5), ((None, 0, None, None), 0.5)]
)
def test_vmap(in_axes: tuple[int | None, ...], keep: float, same: Any) -> None:
    x, *weights = operands(3, 11, layers=3)
    arguments = [a if axis == 0 else a[0] for a, axis in zip((x, *weights), in_axes, strict=True)]
    tiled = y_and_gradients(partial(tiled_mlp, num_shards=4, keep=keep))
    same(
        jax.jit(jax.vmap(tiled, in_axes))(*arguments),
        jax.jit(jax.vmap(y_and_gradients(mlp), in_axes))(*arguments),
    )


@pytest.mark.parametrize(
    ("wrap", "keep"),
    [(lambda fn: fn, 0.5), (jax.checkpoint, 0.0), (jax.checkpoint, 0.5)],
    ids=["", "remat", "remat-keep"],
)
def test_scan_over_layers(wrap: Any, keep: float, same: Any) -> None:
    arguments = operands(3, 11, layers=3)

    def stack(layer: Any, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + wrap(layer)(x, *w), None), x, weights)[0]

    tiled = partial(stack, partial(tiled_mlp, num_shards=4, keep=keep))
    same(jax.jit(y_and_gradients(tiled))(*arguments), jax.jit(y_and_gradients(partial(stack, mlp)))(*arguments))


def test_without_jit_and_with_donated_arguments(same: Any) -> None:
    tiled = y_and_gradients(partial(tiled_mlp, num_shards=4))
    expected = y_and_gradients(mlp)(*operands(33))
    same(tiled(*operands(33)), expected)
    same(jax.jit(tiled, donate_argnums=(0, 1, 2, 3))(*operands(33)), expected)


def test_gradients_of_other_operands_first_change_nothing(same: Any) -> None:
    """JAX keeps what a rule saves by program; a checkpoint once got the structure of another gradient's trace."""
    arguments, tiled = operands(33), partial(tiled_mlp, num_shards=4, keep=0.5)

    def gradient(fn: Any, argnums: tuple[int, ...]) -> Any:
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums))

    jax.make_jaxpr(gradient(tiled, (1,)))(*arguments)
    every = (0, 1, 2, 3)
    same(gradient(jax.checkpoint(tiled), every)(*arguments), gradient(mlp, every)(*arguments))


def test_an_unused_result_has_zero_gradients(same: Any) -> None:
    x, *weights = operands(33)
    gradient = jax.grad(lambda x: jnp.sum(x) + 0 * jnp.sum(lax.stop_gradient(tiled_mlp(x, *weights))))(x)
    same(gradient, jnp.ones_like(x))
    _, pull = jax.vjp(lambda x: (x, tiled_mlp(x, *weights)), x)
    same(pull((jnp.ones_like(x), jnp.zeros_like(x)))[0], jnp.ones_like(x))


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_nan_and_infinity_stay_in_their_token(value: float) -> None:
    x, *weights = operands(12, dtype=jnp.float32)
    tiled = jax.jit(partial(tiled_mlp, num_shards=4))
    with jax.debug_nans(False):
        y, clean = (np.asarray(tiled(a, *weights)) for a in (x.at[4, 2].set(value), x))
    assert not np.isfinite(y[4]).all()
    np.testing.assert_array_equal(np.delete(y, 4, axis=0), np.delete(clean, 4, axis=0))


SPECIALS = [(activation, gated, "float64") for activation in ACTIVATIONS for gated in (True, False)]
SPECIALS += [("silu", True, "bfloat16"), ("relu_squared", True, "bfloat16"), ("gelu", False, "bfloat16")]


@pytest.mark.parametrize(("activation", "gated", "dtype"), SPECIALS)
def test_nan_and_infinity_are_those_of_the_plain_mlp(activation: str, gated: bool, dtype: str, x64: None) -> None:
    """In y and every gradient where the plain MLP has them, and nowhere else; every other value is the plain one's."""
    x, *weights = operands(12, dtype=dtype)
    given = dict(zip(("x", "w_gate", "w_up", "w_down"), (x, *weights), strict=True)) | {"dy": jnp.ones_like(x)}
    if not gated:
        del given["w_gate"]

    def results(fn: Any) -> Any:
        def run(given: dict[str, jax.Array]) -> dict[str, jax.Array]:
            operands = {name: value for name, value in given.items() if name != "dy"}
            y, pull = jax.vjp(lambda of: fn(**{"w_gate": None, **of}, activation=activation), operands)
            return {"y": y, **pull(given["dy"])[0]}

        return jax.jit(run)

    ours, theirs = results(partial(tiled_mlp, num_shards=4, keep=0.5)), results(mlp)
    for name in given:
        for value in (jnp.nan, jnp.inf, -jnp.inf):
            broken = given | {name: given[name].at[4, 2].set(value)}
            with jax.debug_nans(False):
                found, expected = jax.device_get((ours(broken), theirs(broken)))
            assert not all(np.isfinite(a).all() for a in expected.values())
            assert_same_where_finite(found, expected, f"{name} {value}", values=dtype == "float64")


def assert_same_where_finite(found: Any, expected: Any, given: str, *, values: bool) -> None:
    """NaN and infinities in the same places, and with `values` the same values elsewhere.

    Not in 16 bits: there the plain MLP rounds more often than tiled_mlp.
    """
    __tracebackhide__ = True
    exact = {"rtol": DISTRIBUTED_FLOAT64, "atol": DISTRIBUTED_FLOAT64}
    for name, b in expected.items():
        a, b = (of.astype(np.float64) for of in (found[name], b))
        if not values:
            a, b = (np.where(np.isfinite(of), 0, of) for of in (a, b))
        np.testing.assert_allclose(a, b, **exact, equal_nan=True, err_msg=f"{name} of {given}")


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_zero_tokens(lead: tuple[int, ...]) -> None:
    x, *weights = operands(*lead, dtype=jnp.float32)
    y, dx, *dw = y_and_gradients(partial(tiled_mlp, num_shards=4, keep=0.5))(x, *weights)
    assert y.shape == x.shape
    assert dx.shape == x.shape
    assert [d.shape for d in dw] == [w.shape for w in weights]
    assert all(not np.asarray(d).any() for d in dw)


def test_float32_master_weights_beside_bfloat16() -> None:
    x, *weights = operands(64, dtype=jnp.float32)
    got = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=8)))(x.astype(jnp.bfloat16), *weights)
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]
    cast = [a.astype(jnp.bfloat16) for a in (x, *weights)]
    plain = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=8)))(*cast)
    for master, rounded in zip(got[2:], plain[2:], strict=True):
        np.testing.assert_array_equal(np.asarray(master.astype(jnp.bfloat16)), np.asarray(rounded))
        assert np.asarray(master != rounded.astype(jnp.float32)).any(), "the master's gradient was rounded on its way"


def test_bfloat16_weight_gradients_do_not_drift_with_256_shards() -> None:
    arguments = operands(4096, hidden=32, intermediate=48, dtype=jnp.bfloat16)
    truth = jax.jit(y_and_gradients(mlp))(*(a.astype(jnp.float32) for a in arguments))
    tiled = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=256)))(*arguments)
    plain = jax.jit(y_and_gradients(mlp))(*arguments)
    for t, p, exact in zip(tiled[2:], plain[2:], truth[2:], strict=True):
        errors = [relative_error(np.asarray(a), np.asarray(exact)) for a in (t, p)]
        assert errors[0] <= BF16_256_SHARDS * errors[1]


def test_the_backend_that_ran_is_recorded() -> None:
    backends.record_run("tiled_mlp", "nothing")
    tokens = 83  # of no other test: a program that JAX knows is not traced again
    jax.make_jaxpr(lambda *a: tiled_mlp(*a, backend="xla"))(*operands(tokens, dtype=jnp.float32))
    assert backends.last_run("tiled_mlp") == "xla"
    assert backends.last_run("another function") is None


def test_flax_parameters_are_taken(same: Any) -> None:
    x, *weights = operands(7)
    params = [nnx.Param(w) for w in weights]
    same(tiled_mlp(x, *params), mlp(x, *weights))
    gradient = nnx.grad(lambda param: jnp.sum(jnp.sin(tiled_mlp(x, *params[:2], param))))(params[2])
    same(gradient[...], jax.grad(lambda w: jnp.sum(jnp.sin(mlp(x, *weights[:2], w))))(weights[2]))


def test_numpy_arrays_are_taken_and_other_kinds_refused() -> None:
    arguments: list[Any] = [np.asarray(a) for a in operands(7, dtype=jnp.float32)]
    assert tiled_mlp(*arguments).shape == (7, 8)
    with pytest.raises(TypeError, match=r"^tiled_mlp: x must be an array, got list\.$"):
        tiled_mlp(*[[[1.0]], *arguments[1:]])
    with pytest.raises(TypeError, match=r"^tiled_mlp: w_up must be an array, got NoneType\.$"):
        tiled_mlp(*[arguments[0], None, None, arguments[3]])
    with pytest.raises(TypeError, match=r"^tiled_mlp: biases must be a mapping or None, got tuple\.$"):
        tiled_mlp(*arguments, **{"biases": (1, 2)})


def test_a_bias_of_a_missing_gate_is_refused() -> None:
    x, _, w_up, w_down = operands(7, dtype=jnp.float32)
    with pytest.raises(SpecError, match="keys among up, down, got 'gate'"):
        tiled_mlp(x, None, w_up, w_down, biases={"gate": jnp.ones(12)})


def test_every_way_to_say_the_plan_gives_the_same_result(same: Any) -> None:
    arguments = operands(40)
    expected = jax.jit(mlp)(*arguments)
    for tiling in (Tiling(num_shards=3), Tiling(shard_tokens=7), Tiling(memory_budget=10_000), Tiling()):
        same(jax.jit(partial(tiled_mlp, tiling=tiling))(*arguments), expected)


def test_deterministic_is_refused() -> None:
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(x, w, w, w, tiling=Tiling(deterministic=True))
    assert str(caught.value) == (
        'tiled_mlp: deterministic must be False here, got True. XLA adds in an order of its own; the backend "pallas" has '
        "kernels for all of the products, and runs or says why it cannot."
    )
