"""The fused layers of inference inside `shard_map`, against float64 NumPy, with what they send."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.oracle import inference as oracle
from shared_specs.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tiled_jax import SpecError, UnsupportedError
from tiled_jax.parallel import norm_column_parallel_linear, row_parallel_linear_residual_norm

pytestmark = pytest.mark.ranks

T, B, IN, H, EPS = 16, 2, 24, 32, 1e-3
WHOLE, TOKENS, COLUMNS, ROWS = P(), P("tp"), P(None, "tp"), P("tp", None)
FEATURES = P(None, None, "tp")


def mesh_of(ranks: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((ranks,), ("tp",), axis_types=(kind,), devices=jax.devices()[:ranks])


def drawn(*shapes: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


def column_operands() -> list[np.ndarray[Any, Any]]:
    return drawn((T, B, IN), (IN,), (IN, H), (H,))


def row_operands() -> list[np.ndarray[Any, Any]]:
    return drawn((T, B, IN), (IN, H), (T, B, H), (H,), (H,))


def column(mesh: jax.sharding.Mesh, *, sequence_parallel: bool = False, check_vma: bool = True) -> Callable[..., Any]:
    fn = partial(norm_column_parallel_linear, eps=EPS, sequence_parallel=sequence_parallel, axis_name="tp")
    specs = (TOKENS if sequence_parallel else WHOLE, WHOLE, COLUMNS, TOKENS)
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=FEATURES, check_vma=check_vma)


def row(mesh: jax.sharding.Mesh, *, check_vma: bool = True, **options: Any) -> Callable[..., Any]:
    fn = partial(row_parallel_linear_residual_norm, axis_name="tp", **{"eps": EPS, **options})
    specs, out = (FEATURES, ROWS, TOKENS, WHOLE, WHOLE), WHOLE if options.get("gather", True) else TOKENS
    return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=(out, TOKENS), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_equal_to_one_device(ranks: int, check_vma: bool, x64: None) -> None:
    mesh, x, y = mesh_of(ranks), column_operands(), row_operands()

    @jax.jit
    def run(x: Any, y: Any) -> Any:
        columns = [column(mesh, sequence_parallel=split, check_vma=check_vma)(*x) for split in (False, True)]
        rows = [row(mesh, gather=gather, path=path, check_vma=check_vma)(*y) for gather, path in PATHS]
        return columns, rows

    columns, rows = run(*jax.tree.map(jnp.asarray, (x, y)))
    for found in columns:
        assert_within(np.asarray(found), oracle.norm_linear(*x, EPS), DISTRIBUTED_FLOAT64, "norm and columns")
    for found in rows:
        for name, a, b in zip(("normed", "h"), found, oracle.linear_residual_norm(*y, EPS), strict=True):
            assert_within(np.asarray(a), b, DISTRIBUTED_FLOAT64, name)


PATHS = ((True, "auto"), (True, "collectives"), (False, "auto"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma: bool, x64: None) -> None:
    """Inference needs none, but nothing is silently cut off from them."""

    def plain_norm(h: jax.Array, weight: jax.Array) -> jax.Array:
        return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + EPS) * weight

    def plain(x: Any, w: Any, residual: Any, norm_weight: Any, bias: Any) -> Any:
        h = residual + x @ w + bias
        return plain_norm(h, norm_weight), h

    def gradients(fn: Any, operands: Any) -> Any:
        def loss(operands: Any) -> jax.Array:
            return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(fn(*operands)))

        return jax.jit(jax.grad(loss))([jnp.asarray(a) for a in operands])

    mesh = mesh_of(4)
    pairs = [
        (row(mesh, check_vma=check_vma), plain, row_operands()),
        (
            column(mesh, sequence_parallel=True, check_vma=check_vma),
            lambda x, n, w, b: plain_norm(x, n) @ w + b,
            column_operands(),
        ),
    ]
    for ours, whole, operands in pairs:
        for a, b in zip(gradients(ours, operands), gradients(whole, operands), strict=True):
            assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "gradient")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 4, 8])
def test_in_bfloat16(ranks: int) -> None:
    mesh, y = mesh_of(ranks), [a.astype(jnp.bfloat16) for a in row_operands()]
    x = [a.astype(jnp.bfloat16) for a in column_operands()]
    found = [jax.jit(column(mesh))(*map(jnp.asarray, x)), *jax.jit(row(mesh))(*map(jnp.asarray, y))]
    wide_x, wide_y = ([a.astype(np.float64) for a in operands] for operands in (x, y))
    exact = [oracle.norm_linear(*wide_x, EPS), *oracle.linear_residual_norm(*wide_y, EPS)]
    normed = oracle.rms_norm(wide_x[0], wide_x[1], EPS).astype(jnp.bfloat16).astype(np.float64)
    h = exact[2].astype(jnp.bfloat16).astype(np.float64)
    # The same with what lies between two layers in bfloat16.
    baseline = [normed @ wide_x[2] + wide_x[3], oracle.rms_norm(h, wide_y[3], EPS), h]
    for a, b, wanted in zip(found, baseline, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert_within(np.asarray(a), wanted, limit(relative_error(b.astype(jnp.bfloat16), wanted), "bfloat16"), "bf16")


def test_one_reduce_scatter_and_one_gather() -> None:
    operands = [jnp.asarray(a, jnp.float32) for a in row_operands()]

    def sent(fn: Any, operands: Any) -> list[str]:
        text = jax.jit(fn).lower(*operands).compile().as_text()
        return sorted(re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(", text))

    assert sent(row(mesh_of(4)), operands) == ["all-gather", "reduce-scatter"]
    assert sent(row(mesh_of(4), gather=False), operands) == ["reduce-scatter"]
    columns = [jnp.asarray(a, jnp.float32) for a in column_operands()]
    assert sent(column(mesh_of(4)), columns) == []
    assert sent(column(mesh_of(4), sequence_parallel=True), columns) == ["all-gather"]


BAD = {
    "symmetric memory": (
        {"path": "symmetric_memory"},
        {},
        UnsupportedError,
        r"path must be usable here, .* tiled_torch",
    ),
    "no such path": (
        {"path": "fast"},
        {},
        SpecError,
        r"path must be one of auto, collectives, symmetric_memory, got 'fast'",
    ),
    "a whole residual": (
        {},
        {2: (T * 4, B, H)},
        SpecError,
        r"residual must be \[4, 2, 32\], this rank's tokens, got \[16,",
    ),
    "a norm of other features": ({}, {3: (IN,)}, SpecError, r"norm_weight must be \[32\], got \[24\]"),
    "tokens that do not divide": ({}, {0: (T + 1, B, IN)}, SpecError, r"dim 0 of x must be a multiple of the 4 ranks"),
    "no number": ({"eps": "small"}, {}, TypeError, r"eps must be a number, got str"),
    "a negative number": ({"eps": -1.0}, {}, SpecError, r"eps must be >= 0, got -1.0"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    options, shapes, error, message = BAD[what]
    operands = [jnp.ones(shapes.get(at, a.shape), jnp.float32) for at, a in enumerate(row_operands())]
    with pytest.raises(error, match=f"^row_parallel_linear_residual_norm: {message}"):
        jax.eval_shape(row(mesh_of(4), **options), *operands)
