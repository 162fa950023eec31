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

from shared_specs.core.rounding import relative_error
from shared_specs.layers import oracle
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tiled_jax import SpecError, UnsupportedError
from tiled_jax.parallel import norm_column_parallel_linear, row_parallel_linear_residual_norm

pytestmark = pytest.mark.ranks

T, B, IN, H, EPS = 16, 2, 24, 32, 1e-3
WHOLE, TOKENS, COLUMNS, ROWS = P(), P("tp"), P(None, "tp"), P("tp", None)
FEATURES = P(None, None, "tp")
Array = np.ndarray[Any, Any]
SIZES: dict[int, dict[str, tuple[int, ...]]] = {  # tokens of every device
    2: {"uneven": (3, 1), "one token": (1, 0), "even": (2, 2)},
    4: {"uneven": (1, 3, 0, 2), "one token": (0, 0, 1, 0), "even": (1, 1, 1, 1)},
    8: {"uneven": (0, 2, 1, 0, 3, 1, 0, 1), "one token": (1, *[0] * 7), "even": (2,) * 8},
}


def mesh_of(ranks: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((ranks,), ("tp",), axis_types=(kind,), devices=jax.devices()[:ranks])


def drawn(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape) for shape in shapes]


def column_operands(tokens: int = T) -> list[Array]:
    return drawn((tokens, B, IN), (IN,), (IN, H), (H,))


def row_operands(tokens: int = T) -> list[Array]:
    return drawn((tokens, B, IN), (IN, H), (tokens, B, H), (H,), (H,))


def padded(a: Array, sizes: tuple[int, ...]) -> Array:
    """The devices' tokens, each part followed up to the longest by what nobody may look at."""
    parts = np.split(a, np.cumsum(sizes)[:-1])
    return np.concatenate([np.concatenate([one, np.full_like(a, np.nan)])[: max(sizes)] for one in parts])


def tokens_of(a: Any, sizes: tuple[int, ...]) -> Array:
    """What was padded, once what follows the tokens is zero."""
    parts = np.split(np.asarray(a), len(sizes))
    assert not any(one[size:].any() for one, size in zip(parts, sizes, strict=True)), "something beyond the tokens"
    return np.concatenate([one[:size] for one, size in zip(parts, sizes, strict=True)])


def column(
    mesh: jax.sharding.Mesh, *, sequence_parallel: bool = False, check_vma: bool = True, **options: Any
) -> Callable[..., Any]:
    given = {"eps": EPS, "sequence_parallel": sequence_parallel, **options}
    fn = partial(norm_column_parallel_linear, axis_name="tp", **given)
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


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ranks", SIZES)
def test_devices_with_unequally_many_tokens(ranks: int, check_vma: bool, x64: None) -> None:
    """x and the residual end in NaN where a device has fewer tokens than another one, or none."""
    mesh, cases = mesh_of(ranks), SIZES[ranks].values()
    x, y = ({sizes: operands(sum(sizes)) for sizes in cases} for operands in (column_operands, row_operands))

    @jax.jit
    def run(x: Any, y: Any) -> Any:
        return [uneven(mesh, sizes, check_vma, x[sizes], y[sizes]) for sizes in cases]

    given_x = {sizes: [padded(a[0], sizes), *a[1:]] for sizes, a in x.items()}
    given_y = {sizes: [*a[:2], padded(a[2], sizes), *a[3:]] for sizes, a in y.items()}
    for sizes, (columns, normed, h, own) in zip(cases, run(given_x, given_y), strict=True):
        truth = oracle.norm_linear(*x[sizes], EPS), *oracle.linear_residual_norm(*y[sizes], EPS)
        found = np.asarray(columns), np.asarray(normed), tokens_of(h, sizes)
        for name, a, b in zip(("columns", "normed", "h"), found, truth, strict=True):
            assert_within(a, b, DISTRIBUTED_FLOAT64, f"{name} of {sizes}")
        assert_within(tokens_of(own, sizes), truth[1], DISTRIBUTED_FLOAT64, f"own normed of {sizes}")


def uneven(mesh: jax.sharding.Mesh, sizes: tuple[int, ...], check_vma: bool, x: Any, y: Any) -> list[Any]:
    """Columns; normed of all tokens and h; normed of the devices' own tokens."""
    given = {"split_sizes": sizes, "check_vma": check_vma}
    return [
        column(mesh, sequence_parallel=True, **given)(*x),
        *row(mesh, **given)(*y),
        row(mesh, gather=False, **given)(*y)[0],
    ]


def gradients(fn: Any, operands: Any) -> Any:
    def loss(operands: Any) -> jax.Array:
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(fn(*operands)))

    return jax.jit(jax.grad(loss))([jnp.asarray(a) for a in operands])


def plain_row(x: Any, w: Any, residual: Any, norm_weight: Any, bias: Any, eps: float = EPS) -> Any:
    h = residual + x @ w + bias
    return plain_norm(h, norm_weight, eps), h


def plain_column(x: Any, norm_weight: Any, weight: Any, bias: Any, eps: float = EPS) -> Any:
    return plain_norm(x, norm_weight, eps) @ weight + bias


def plain_norm(h: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + eps) * weight


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma: bool, x64: None) -> None:
    """Inference needs none, but nothing is silently cut off from them."""
    mesh = mesh_of(4)
    pairs = [
        (row(mesh, check_vma=check_vma), plain_row, row_operands()),
        (column(mesh, sequence_parallel=True, check_vma=check_vma), plain_column, column_operands()),
    ]
    for ours, whole, operands in pairs:
        for a, b in zip(gradients(ours, operands), gradients(whole, operands), strict=True):
            assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "gradient")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gather", [True, False])
def test_gradients_of_unequally_many_tokens(gather: bool, check_vma: bool, x64: None) -> None:
    """Nothing of what lies beyond a device's tokens comes into them, with nothing added under the root either."""
    mesh, sizes = mesh_of(4), SIZES[4]["uneven"]
    given = {"split_sizes": sizes, "check_vma": check_vma, "eps": 0.0}
    pairs = [
        (row(mesh, gather=gather, **given), partial(plain_row, eps=0.0), row_operands(sum(sizes)), 2),
        (column(mesh, sequence_parallel=True, **given), partial(plain_column, eps=0.0), column_operands(sum(sizes)), 0),
    ]
    for ours, whole, operands, place in pairs:
        filled = [padded(a, sizes) if at == place else a for at, a in enumerate(operands)]
        found = gradients(ours, filled)
        found[place] = tokens_of(found[place], sizes)
        for at, (a, b) in enumerate(zip(found, gradients(whole, operands), strict=True)):
            assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, f"gradient of operand {at}")


def fused(mesh: jax.sharding.Mesh, sizes: tuple[int, ...] | None, x: list[Array], y: list[Array]) -> list[Any]:
    """Columns, normed and h, whole."""
    if sizes is None:
        return [jax.jit(column(mesh))(*map(jnp.asarray, x)), *jax.jit(row(mesh))(*map(jnp.asarray, y))]
    x, y = [padded(x[0], sizes), *x[1:]], [*y[:2], padded(y[2], sizes), *y[3:]]
    columns = jax.jit(column(mesh, sequence_parallel=True, split_sizes=sizes))(*map(jnp.asarray, x))
    normed, h = jax.jit(row(mesh, split_sizes=sizes))(*map(jnp.asarray, y))
    return [columns, normed, tokens_of(h, sizes)]


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [pytest.param(1, None, marks=pytest.mark.slow), *((ranks, None) for ranks in SIZES)]
    + [(ranks, cases[tokens]) for ranks, cases in SIZES.items() for tokens in ("uneven", "one token")],
)
def test_in_bfloat16(ranks: int, sizes: tuple[int, ...] | None) -> None:
    mesh, total = mesh_of(ranks), sum(sizes) if sizes else T
    y = [a.astype(jnp.bfloat16) for a in row_operands(total)]
    x = [a.astype(jnp.bfloat16) for a in column_operands(total)]
    found = fused(mesh, sizes, x, y)
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
    sizes = (7, 0, 8, 1)
    padded_row = [*operands[:2], jnp.zeros((4 * 8, B, H), jnp.float32), *operands[3:]]
    assert sent(row(mesh_of(4), split_sizes=sizes), padded_row) == ["all-gather", "reduce-scatter"]
    padded_column = [jnp.zeros((4 * 8, B, IN), jnp.float32), *columns[1:]]
    assert sent(column(mesh_of(4), sequence_parallel=True, split_sizes=sizes), padded_column) == ["all-gather"]


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
    "tokens that do not divide": (
        {},
        {0: (T + 1, B, IN)},
        SpecError,
        r"dim 0 of x must be a multiple of the 4 ranks .*\. Pass split_sizes for parts of other sizes\.",
    ),
    "sizes of another sum": (
        {"split_sizes": (4, 4, 4, 5)},
        {},
        SpecError,
        r"split_sizes must be of sum 16, the size of dim 0 of x, got \[4, 4, 4, 5\] of sum 17",
    ),
    "sizes of three": ({"split_sizes": (8, 8, 0)}, {}, SpecError, r"split_sizes must be of one size for each of the 4"),
    "a size below 0": ({"split_sizes": (17, -1, 0, 0)}, {}, SpecError, r"split_sizes must be >= 0"),
    "one size": ({"split_sizes": 4}, {}, TypeError, r"split_sizes must be a sequence of integers or None, got int"),
    "a residual that is not padded": (
        {"split_sizes": (7, 1, 4, 4)},
        {},
        SpecError,
        r"residual must be \[7, 2, 32\], this rank's tokens padded to the longest part, got \[4, 2, 32\]",
    ),
    "no number": ({"eps": "small"}, {}, TypeError, r"eps must be a number, got str"),
    "a negative number": ({"eps": -1.0}, {}, SpecError, r"eps must be >= 0, got -1.0"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    options, shapes, error, message = BAD[what]
    operands = [jnp.ones(shapes.get(at, a.shape), jnp.float32) for at, a in enumerate(row_operands())]
    with pytest.raises(error, match=f"^row_parallel_linear_residual_norm: {message}"):
        jax.eval_shape(row(mesh_of(4), **options), *operands)


BAD_COLUMNS = {
    "sizes of tokens that all have": (
        {"split_sizes": (16, 0, 0, 0)},
        SpecError,
        r"split_sizes must be left out without sequence_parallel, got \(16, 0, 0, 0\)\. It says how many tokens each",
    ),
    "a longest part of other rows": (
        {"split_sizes": (5, 3, 4, 4), "sequence_parallel": True},
        SpecError,
        r"split_sizes must be of maximum 4, the size of dim 0 of x, got \[5, 3, 4, 4\]",
    ),
    "sizes of three": (
        {"split_sizes": (4, 4, 4), "sequence_parallel": True},
        SpecError,
        r"split_sizes must be of one size for each of the 4 ranks",
    ),
    "sizes that are no integers": (
        {"split_sizes": (4, 4, 4, 4.0), "sequence_parallel": True},
        TypeError,
        r"split_sizes must be a sequence of integers or None, got one with a float",
    ),
}


@pytest.mark.parametrize("what", BAD_COLUMNS)
def test_bad_sizes_of_columns(what: str) -> None:
    options, error, message = BAD_COLUMNS[what]
    with pytest.raises(error, match=f"^norm_column_parallel_linear: {message}"):
        jax.eval_shape(column(mesh_of(4), **options), *map(jnp.asarray, column_operands()))
