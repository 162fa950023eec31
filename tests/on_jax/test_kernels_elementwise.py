"""The kernels that read memory once: their numbers in JAX's GPU interpreter and their lowering for CUDA."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.blocks import Blocks
from shared_specs.config import LossOptions
from shared_specs.oracle.loss import linear_cross_entropy, log_sum_exp
from shared_specs.oracle.mlp import activate
from shared_specs.rounding import DTYPES, relative_error, round_to
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.on_jax.interpreted import clean_interpreter
from tiled_jax.kernels.activations import KERNEL_ACTIVATIONS
from tiled_jax.kernels.common import interpreter
from tiled_jax.kernels.cross_entropy import cross_entropy
from tiled_jax.kernels.glu_elementwise import glu, glu_backward

Array = np.ndarray[Any, Any]
LLAMA_3_8B, LLAMA_3_VOCABULARY = 14336, 128256
OPTIONS = {
    "plain": LossOptions(),
    "smooth": LossOptions(label_smoothing=0.1, z_loss=1e-2),
    "bent": LossOptions(logit_softcap=3.0, logit_scale=0.5, label_smoothing=0.2, ignore_index=7),
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with clean_interpreter():
        yield


def assert_true(found: Any, exact: Array, plain: Array, dtype: str) -> None:
    __tracebackhide__ = True
    assert_within(np.asarray(found), exact, limit(relative_error(plain, exact), dtype), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_glu(activation: str, dtype: str) -> None:
    """3 x 640 elements are no whole number of runs of 1024: the last run is padded."""
    rng = np.random.default_rng(3)
    dh, gate, up = (rng.standard_normal((3, 640)).astype(DTYPES[dtype]) for _ in range(3))
    arrays = [jnp.asarray(a) for a in (dh, gate, up)]
    h = glu(*arrays[1:], activation=activation, interpret=interpreter())
    found = glu_backward(*arrays, activation=activation, interpret=interpreter())
    rounding = round_to(dtype)
    a = [value.astype(np.float64) for value in (dh, gate, up)]
    act, slope = activate(activation, a[1])
    for got, exact in zip((*found, h), (a[0] * a[2] * slope, a[0] * act, act * a[2], act * a[2]), strict=True):
        assert str(got.dtype) == dtype
        assert_true(got, exact, rounding(exact), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_cross_entropy(name: str, dtype: str) -> None:
    """V = 896 in blocks of 256 leaves 128; every third target is ignored, and the last logit is a target."""
    rows, vocab, options = 6, 896, OPTIONS[name]
    rng = np.random.default_rng(5)
    logits = (4 * rng.standard_normal((rows, vocab))).astype(DTYPES[dtype])
    targets = rng.integers(8, vocab, rows)
    targets[::3], targets[-1] = options.ignore_index, vocab - 1
    upstream = rng.uniform(0.5, 2.0, rows).astype(np.float32)
    blocks = Blocks(rows=1, columns=256)
    loss, lse, dlogits = cross_entropy(
        jnp.asarray(logits),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(upstream),
        options=options,
        blocks=blocks,
        interpret=interpreter(),
    )
    exact, plain = (truth(logits, targets, upstream, options, dtype, rounded=rounded) for rounded in (False, True))
    assert str(dlogits.dtype) == dtype
    for got, key in ((loss, "loss"), (lse, "lse")):
        assert str(got.dtype) == "float32"
        assert_true(got, exact[key], plain[key].astype(np.float32), "float32")
    assert_true(dlogits, exact["dlogits"], plain["dlogits"], dtype)


def truth(
    logits: Array, targets: Array, upstream: Array, options: LossOptions, dtype: str, *, rounded: bool
) -> dict[str, Array]:
    """The oracle with the identity for x: its dweight is then the gradient of the logits."""
    compute = np.float32 if rounded else np.float64
    wide, identity = logits.astype(compute), np.eye(len(logits), dtype=compute)
    none = LossOptions(**{**vars(options), "reduction": "none", "outputs": ("lse",)})
    found = linear_cross_entropy(
        identity,
        wide,
        targets,
        {"loss": upstream.astype(compute)},
        options=none,
        rounding=round_to(dtype) if rounded else None,
    )
    return {"loss": found["loss"], "lse": found["lse"], "dlogits": found["dweight"]}


def test_equal_and_extreme_logits() -> None:
    """Where a sum of exponentials that is not relative to the largest logit overflows."""
    logits = np.full((2, 256), 1e4, np.float32)
    logits[1, :128] = -1e4
    _, lse, dlogits = cross_entropy(
        jnp.asarray(logits),
        jnp.asarray([0, 255], jnp.int32),
        jnp.ones(2, jnp.float32),
        blocks=Blocks(rows=1, columns=128),
        interpret=interpreter(),
    )
    np.testing.assert_array_equal(np.asarray(lse), log_sum_exp(logits.astype(np.float64)).astype(np.float32))
    assert np.isfinite(np.asarray(dlogits)).all()


def test_what_the_loss_kernel_cannot_do_is_refused() -> None:
    operands = jnp.zeros((2, 100)), jnp.zeros(2, jnp.int32), jnp.zeros(2)
    with pytest.raises(ValueError, match="V must be a multiple of 128, got 100"):
        cross_entropy(*operands)
    with pytest.raises(ValueError, match="no kernel has class weights"):
        cross_entropy(jnp.zeros((2, 128)), *operands[1:], options=LossOptions(class_weight=jnp.ones(128)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_glu_lowers_for_cuda(activation: str, dtype: Any) -> None:
    a = jax.ShapeDtypeStruct((100, LLAMA_3_8B), dtype)
    for fn, count in ((glu, 2), (glu_backward, 3)):
        assert "mosaic_gpu_v2" in lowered(partial(fn, activation=activation), *[a] * count)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_loss_lowers_for_cuda_in_place(options: LossOptions, dtype: Any) -> None:
    shapes = ((64, LLAMA_3_VOCABULARY), dtype), ((64,), jnp.int32), ((64,), jnp.float32)
    text = lowered(partial(cross_entropy, options=options), *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert "mosaic_gpu_v2" in text
    assert "output_operand_alias" in text


def lowered(fn: Any, *shapes: jax.ShapeDtypeStruct) -> str:
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
