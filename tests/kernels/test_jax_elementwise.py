"""The activation of the MLP as a kernel: its numbers in JAX's GPU interpreter and their lowering for CUDA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.config import ACTIVATIONS
from shared_specs.core.rounding import DTYPES, relative_error, round_to
from shared_specs.kernels.blocks import CANDIDATES, Blocks
from shared_specs.mlp.oracle import activate
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.kernels.jax_interpreted import written_over
from tests.mlp import jax_untiled as untiled
from tiled_jax.core.mosaic import interpreter
from tiled_jax.mlp.kernels.glu_elementwise import glu, glu_backward

pytestmark = pytest.mark.usefixtures("clean")

Array = np.ndarray[Any, Any]
LLAMA_3_8B = 14336


def assert_true(found: Any, exact: Array, plain: Array, dtype: str) -> None:
    __tracebackhide__ = True
    assert_within(np.asarray(found), exact, limit(relative_error(plain, exact), dtype), dtype)


# Every activation in one dtype, every dtype with one activation.
KINDS = [*((activation, "float32") for activation in ACTIVATIONS), ("silu", "bfloat16"), ("gelu", "float16")]


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("activation", "dtype"), KINDS)
def test_glu(activation: str, dtype: str) -> None:
    """3 x 640 elements are no whole number of runs of 1024: the last run is padded."""
    rng = np.random.default_rng(3)
    dh, gate, up = (rng.standard_normal((3, 640)).astype(DTYPES[dtype]) for _ in range(3))
    arrays = [jnp.asarray(a) for a in (dh, gate, up)]
    options = {"activation": activation, "interpret": interpreter()}
    found = [*glu_backward(*arrays, **options), glu(*arrays[1:], **options)]
    no_gate, *plain = glu_backward(arrays[0], None, arrays[2], **options)
    assert no_gate is None
    found += [*plain, glu(None, arrays[2], **options)]
    a = [value.astype(np.float64) for value in (dh, gate, up)]
    (act, slope), (of_up, slope_of_up) = (activate(activation, value) for value in a[1:])
    gated = a[0] * a[2] * slope, a[0] * act, act * a[2], act * a[2]
    for got, exact in zip(found, (*gated, a[0] * slope_of_up, of_up, of_up), strict=True):
        assert str(got.dtype) == dtype
        assert_true(got, exact, round_to(dtype)(exact), dtype)


@pytest.mark.parametrize("activation", ["silu", "relu_squared"])
def test_glu_backward_beside_infinity(activation: str) -> None:
    """NaN and infinities where automatic differentiation has them; test_jax_kernels.py has every formula by itself."""
    values = np.array([-np.inf, -2, 0, 2, np.inf, np.nan], np.float32)
    dh, gate, up = (jnp.asarray(a.reshape(6, 36)) for a in np.meshgrid(values, values, values))
    act = untiled.ACTIVATIONS[activation]
    with jax.debug_nans(False):
        options = {"activation": activation, "interpret": interpreter()}
        found = [*glu_backward(dh, gate, up, **options), *glu_backward(dh, None, up, **options)[1:]]
        h, pull = jax.vjp(lambda gate, up: act(gate) * up, gate, up)
        plain, pull_plain = jax.vjp(act, up)
        expected = jax.device_get([*pull(dh), h, *pull_plain(dh), plain])
    for a, b in zip(jax.device_get(found), expected, strict=True):
        np.testing.assert_array_equal(*(np.where(np.isfinite(value), 0, value) for value in (a, b)))


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("activation", "dtype"), KINDS)
def test_glu_lowers_for_cuda(activation: str, dtype: str) -> None:
    a = jax.ShapeDtypeStruct((100, LLAMA_3_8B), dtype)
    for fn, operands in ((glu, (a, a)), (glu, (None, a)), (glu_backward, (a, a, a)), (glu_backward, (a, None, a))):
        assert "mosaic_gpu_v2" in lowered(partial(fn, activation=activation), *operands)


def test_results_take_the_place_of_operands() -> None:
    a = jax.ShapeDtypeStruct((100, LLAMA_3_8B), jnp.bfloat16)
    for fn, shapes, results in (
        (glu, (a, a), 1),
        (glu, (None, a), 1),
        (glu_backward, (a, a, a), 3),
        (glu_backward, (a, None, a), 2),
    ):
        assert written_over(partial(fn, activation="silu"), *shapes) == results


@pytest.mark.parametrize("blocks", CANDIDATES["pallas"]["glu_elementwise"][1:], ids=str)
def test_what_tune_may_choose_lowers_for_cuda(blocks: Blocks) -> None:
    a = jax.ShapeDtypeStruct((100, LLAMA_3_8B), jnp.bfloat16)
    for fn, operands in ((glu, (a, a)), (glu_backward, (a, a, a))):
        assert "mosaic_gpu_v2" in lowered(partial(fn, activation="silu", blocks=blocks), *operands)


def lowered(fn: Any, *shapes: jax.ShapeDtypeStruct) -> str:
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
