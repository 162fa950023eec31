"""Shards of more than 2^31 elements: the indices of a program have 32 bits, and only the compilers make offsets of them.

They make offsets in 64 bits, so what has to hold is that no index is as large as an offset. Nothing here is allocated.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shared_specs.config import LossOptions, Tiling
from tests.core.jax_counting import jaxprs_in
from tests.mlp.jax_untiled import y_and_gradients
from tiled_jax import tiled_linear_cross_entropy, tiled_mlp
from tiled_jax.loss.kernels import cross_entropy
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_elementwise import glu, glu_backward
from tiled_jax.mlp.kernels.glu_up import gate_and_up, glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.kernels.linear import dx, linear
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient

LIMIT = 2**31
T, H, I, V = 131072, 8192, 28672, 128256  # noqa: E741


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


x, w_up, w_down, pre = shape(T, H), shape(H, I), shape(I, H), shape(T, I)
index, number, logits = shape(T, dtype=jnp.int32), shape(T, dtype=jnp.float32), shape(T, V)
columns, k = cross_entropy.Columns(index), cross_entropy.RowCoefficients(number, number)
silu: dict[str, Any] = {"activation": "silu"}
KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "glu": (partial(glu, **silu), (pre, pre)),
    "glu_backward": (partial(glu_backward, **silu), (pre, pre, pre)),
    "glu_backward of a plain MLP": (lambda dh, up: glu_backward(dh, None, up, **silu), (pre, pre)),
    "glu_up": (partial(glu_up, keep=True, **silu), (x, w_up, w_up)),
    "gate_and_up": (gate_and_up, (x, w_up, w_up)),
    "glu_up_aux": (partial(glu_up_auxiliary, **silu), (x, w_up, pre)),
    "dgated": (partial(dgated, **silu), (x, w_down, pre, pre)),
    "linear": (linear, (pre, w_down)),
    "dx": (dx, (pre, pre, w_up, w_up)),
    "weight_gradient": (weight_gradient, (shape(H, I, dtype=jnp.float32), x, pre)),
    "statistics": (partial(cross_entropy.statistics, options=LossOptions()), (logits, columns)),
    "gradient": (partial(cross_entropy.gradient, options=LossOptions()), (logits, columns, k, number, number)),
    "both": (partial(cross_entropy.statistics_and_gradient, options=LossOptions()), (logits, columns, k)),
}


def shapes_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Of everything that a program names, the memory of its kernels included."""
    for variable in (*jaxpr.invars, *(out for equation in jaxpr.eqns for out in equation.outvars)):
        yield getattr(variable.aval, "shape", ())
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in jaxprs_in(value):
                yield from shapes_in(inner)


def kernels_in(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in jaxprs_in(value):
                if "mesh" in equation.params or "meshes" in equation.params:
                    yield inner
                else:
                    yield from kernels_in(inner)


@pytest.mark.parametrize("name", KERNELS)
def test_no_index_of_a_kernel_is_an_offset(name: str) -> None:
    fn, shapes = KERNELS[name]
    kernels = list(kernels_in(jax.make_jaxpr(fn)(*shapes).jaxpr))
    assert kernels
    for kernel in kernels:
        found = set(shapes_in(kernel))
        assert max(map(math.prod, found)) >= LIMIT, "nothing is large enough to find a mistake"
        assert max(max(dims, default=0) for dims in found) < LIMIT


@pytest.fixture
def kernels_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend as on a Hopper."""
    monkeypatch.setattr("tiled_jax.backends._no_hopper", lambda: None)


WHOLE = Tiling(num_shards=1)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"mlp {backend}{' deterministic' * tiling.deterministic}": (
            y_and_gradients(partial(tiled_mlp, tiling=tiling, backend=backend)),
            (x, w_up, w_up, w_down),
        )
        for backend, tiling in (
            ("xla", WHOLE),
            ("pallas", WHOLE),
            ("pallas", Tiling(num_shards=1, deterministic=True)),
        )
    },
    **{
        f"loss {backend} {reduction}": (
            jax.grad(
                lambda *a, backend=backend, reduction=reduction: jnp.sum(
                    tiled_linear_cross_entropy(*a, loss=LossOptions(reduction=reduction), tiling=WHOLE, backend=backend)
                ),
                argnums=(0, 1),
            ),
            (x, shape(H, V), index),
        )
        for backend in ("xla", "pallas")
        for reduction in ("mean", "none")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_no_index_of_a_whole_call_is_an_offset(name: str, kernels_without_a_device: None) -> None:
    fn, shapes = CALLS[name]
    found = set(shapes_in(jax.make_jaxpr(fn)(*shapes).jaxpr))
    assert max(map(math.prod, found)) >= LIMIT
    assert max(max(dims, default=0) for dims in found) < LIMIT
