"""Linear layers and the embedding with split weights inside `shard_map`, against the same math on one device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import ParallelLinearOptions
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.core.jax_counting import flop, kept_bytes
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError
from tiled_jax.parallel import (
    column_parallel_linear,
    copy_to_tensor_parallel_region,
    linear_with_frozen_weight,
    reduce_from_tensor_parallel_region,
    row_parallel_linear,
    vocab_parallel_embedding,
)

pytestmark = pytest.mark.ranks

B, S, IN, OUT, V, H = 2, 8, 16, 32, 21, 6
STRIDE = ParallelLinearOptions(stride=2)
EXPLICIT = ParallelLinearOptions(explicit_expert_comm=True)
SEQUENCE = ParallelLinearOptions(sequence_dim=1)
TOKENS, WHOLE = P(None, "tp"), P()
Operands = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """fn(operands of one device), the specs of its operands and result, and the math of the whole operands."""

    fn: Callable[..., jax.Array]
    specs: dict[str, P]
    out: P
    plain: Callable[..., jax.Array]


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ weight + bias


def frozen(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return x @ lax.stop_gradient(weight) + bias


def lookup(ids: jax.Array, table: jax.Array) -> jax.Array:
    return table[ids]


COLUMNS = {"x": WHOLE, "weight": P(None, "tp"), "bias": P("tp")}
ROWS = {"x": P(None, None, "tp"), "weight": P("tp", None), "bias": WHOLE}
TABLE = {"ids": WHOLE, "table": P("tp", None)}
FEATURES = P(None, None, "tp")


def embedding(ids: jax.Array, table: jax.Array, **options: Any) -> jax.Array:
    return vocab_parallel_embedding(ids, table, vocab_size=V, axis_name="tp", **options)


def expert_column(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    x = copy_to_tensor_parallel_region(x, axis_name="tp")
    return column_parallel_linear(x, weight, bias, options=EXPLICIT, axis_name="tp")


def expert_row(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    part = row_parallel_linear(x, weight, input_is_parallel=True, options=EXPLICIT, axis_name="tp")
    return reduce_from_tensor_parallel_region(part, axis_name="tp") + bias


def on(function: Any, **options: Any) -> Any:
    return partial(function, axis_name="tp", **options)


CASES = {
    "column": Case(on(column_parallel_linear), COLUMNS, FEATURES, linear),
    "column, gathered": Case(on(column_parallel_linear, gather_output=True), COLUMNS, WHOLE, linear),
    "column, gathered, fused": Case(
        on(column_parallel_linear, gather_output=True, options=STRIDE), COLUMNS, WHOLE, linear
    ),
    "column, sequence": Case(
        on(column_parallel_linear, sequence_parallel=True, options=SEQUENCE), COLUMNS | {"x": TOKENS}, FEATURES, linear
    ),
    "column, sequence, gathered": Case(
        on(column_parallel_linear, sequence_parallel=True, gather_output=True, options=SEQUENCE),
        COLUMNS | {"x": TOKENS},
        WHOLE,
        linear,
    ),
    "row": Case(on(row_parallel_linear, input_is_parallel=True), ROWS, WHOLE, linear),
    "row of a whole x": Case(on(row_parallel_linear), ROWS | {"x": WHOLE}, WHOLE, linear),
    "row of a whole x, fused": Case(on(row_parallel_linear, options=STRIDE), ROWS | {"x": WHOLE}, WHOLE, linear),
    "row, sequence": Case(
        on(row_parallel_linear, input_is_parallel=True, sequence_parallel=True, options=SEQUENCE), ROWS, TOKENS, linear
    ),
    "column of an expert": Case(expert_column, COLUMNS, FEATURES, linear),
    "row of an expert": Case(expert_row, ROWS, WHOLE, linear),
    "frozen": Case(on(linear_with_frozen_weight), COLUMNS, FEATURES, frozen),
    "frozen, sequence": Case(
        on(linear_with_frozen_weight, sequence_parallel=True, options=SEQUENCE),
        COLUMNS | {"x": TOKENS},
        FEATURES,
        frozen,
    ),
    "embedding": Case(embedding, TABLE, WHOLE, lookup),
    "embedding, sequence, deterministic": Case(
        partial(embedding, reduce_scatter_embeddings=True, sequence_dim=1, deterministic=True), TABLE, TOKENS, lookup
    ),
}


def operands_of(case: Case, ranks: int, dtype: Any) -> tuple[Operands, jax.Array | None]:
    """Floating operands, and ids. The table is padded to equal parts."""
    rng = np.random.default_rng(0)
    if "ids" not in case.specs:
        shapes = {"x": (B, S, IN), "weight": (IN, OUT), "bias": (OUT,)}
        return {name: jnp.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}, None
    table = rng.standard_normal((-(-V // ranks) * ranks, H))
    return {"table": jnp.asarray(table, dtype)}, jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)


def by_device(case: Case, name: str, a: jax.Array, ranks: int) -> jax.Array:
    """What the devices of a fused layer hold, side by side: of each of its two parts a run."""
    if name == "x" or "tp" not in case.specs[name] or getattr(case.fn, "keywords", {}).get("options") is not STRIDE:
        return a
    dim = list(case.specs[name]).index("tp")
    parts = [jnp.split(part, ranks, dim) for part in jnp.split(a, 2, dim)]
    return jnp.concatenate([half[rank] for rank in range(ranks) for half in parts], dim)


def results(fn: Any, operands: Operands) -> Any:
    """The result and the gradients of the operands, for an upstream gradient that differs from value to value."""
    y, pull = jax.vjp(fn, operands)
    return y, pull(jnp.cos(y))[0]


def sharded(cases: list[Case], mesh: jax.sharding.Mesh, check_vma: bool) -> Any:
    """Every case in one program over global arrays."""
    ranks = mesh.shape["tp"]

    def fn(given: Any) -> list[Any]:
        found = []
        for case, (operands, ids) in zip(cases, given, strict=True):
            names = list(operands) if ids is None else ["ids", *operands]
            mapped = jax.shard_map(
                lambda *parts, case=case, names=names: case.fn(**dict(zip(names, parts, strict=True))),
                mesh=mesh,
                in_specs=tuple(case.specs[name] for name in names),
                out_specs=case.out,
                check_vma=check_vma,
            )

            def call(operands: Operands, case: Case = case, ids: Any = ids, mapped: Any = mapped) -> jax.Array:
                parts = [by_device(case, name, a, ranks) for name, a in operands.items()]
                return mapped(*parts) if ids is None else mapped(ids, *parts)

            found.append(results(call, operands))
        return found

    return jax.jit(fn)


def plain(case: Case, operands: Operands, ids: Any) -> Any:
    return results(lambda operands: case.plain(**operands, **({} if ids is None else {"ids": ids})), operands)


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("ranks", "check_vma"), [(1, True), (2, True), (4, False), (8, True)])
def test_equal_to_one_device(ranks: int, check_vma: bool, x64: None) -> None:
    cases = list(CASES.values())
    given = [operands_of(case, ranks, jnp.float64) for case in cases]
    found = quickly(sharded(cases, mesh_of(ranks), check_vma), given)
    for name, case, actual, arguments in zip(CASES, cases, found, given, strict=True):
        assert_equal(actual, plain(case, *arguments), name)


def assert_equal(actual: Any, wanted: Any, what: str) -> None:
    leaves = jax.tree.leaves_with_path(wanted)
    for (path, expected), a in zip(leaves, jax.tree.leaves(actual), strict=True):
        assert a.dtype == expected.dtype
        assert_within(np.asarray(a), np.asarray(expected), DISTRIBUTED_FLOAT64, f"{what} {jax.tree_util.keystr(path)}")


BFLOAT16 = (
    *("column, gathered, fused", "column, sequence", "row", "row, sequence", "frozen, sequence"),
    *("embedding", "embedding, sequence, deterministic"),
)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 4, 8])
def test_in_bfloat16(ranks: int) -> None:
    """Against float64, as wrong as the same math on one device in bfloat16 may be."""
    cases = [CASES[name] for name in BFLOAT16]
    given = [operands_of(case, ranks, jnp.bfloat16) for case in cases]
    on_one = jax.jit(lambda given: [plain(case, *arguments) for case, arguments in zip(cases, given, strict=True)])
    found, baseline = quickly(sharded(cases, mesh_of(ranks), True), given), quickly(on_one, given)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if a.dtype == jnp.bfloat16 else a, given)
        exact = quickly(on_one, wide)
    for name, *results in zip(BFLOAT16, found, baseline, exact, strict=True):
        for a, b, wanted in zip(*map(jax.tree.leaves, results), strict=True):
            assert a.dtype == b.dtype == jnp.bfloat16
            a, b, wanted = (np.asarray(value) for value in (a, b, wanted))
            assert_within(a, wanted, limit(relative_error(b, wanted), "bfloat16"), name)


def test_a_frozen_weight_keeps_no_x_and_makes_one_product_in_backward() -> None:
    """x of [B, S, IN] float32 is what the trained layer keeps beside its weight."""
    operands, _ = operands_of(CASES["column"], 4, jnp.float32)
    arguments = list(operands.values())

    def step(name: str) -> Any:
        case = CASES[name]
        specs = tuple(case.specs[key] for key in operands)
        return jax.shard_map(case.fn, mesh=mesh_of(4), in_specs=specs, out_specs=case.out)

    def trained(name: str) -> Any:
        return lambda *a: jax.vjp(step(name), *a)[1](jnp.ones((B, S, OUT)))

    once = 2 * B * S * IN * OUT // 4
    assert flop(trained("column"), *arguments) == 3 * once
    assert flop(trained("frozen"), *arguments) == 2 * once
    # The frozen weight is kept, of the gathered x nothing.
    assert kept_bytes(step("frozen, sequence"), *arguments) == IN * OUT * 4


def test_ids_out_of_range_are_nan_and_padding_gets_no_gradient() -> None:
    table = jnp.ones((24, H))
    ids = jnp.asarray([[0, 20, V, -1], [3, 3, 23, 100]], jnp.int32)
    mapped = jax.shard_map(embedding, mesh=mesh_of(4), in_specs=(P(), P("tp", None)), out_specs=P())
    with jax.debug_nans(False):
        rows, pull = jax.jit(lambda table: jax.vjp(lambda table: mapped(ids, table), table))(table)
        gradient = pull(jnp.ones_like(rows))[0]
    np.testing.assert_array_equal(np.isnan(rows).all(-1), [[False, False, True, True], [False, False, True, True]])
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 0, 2, *[0] * 16, 1, 0, 0, 0])


def primitives(fn: Any, *arguments: Any) -> str:
    return str(jax.make_jaxpr(fn)(*arguments))


def test_a_deterministic_embedding_scatters_nothing() -> None:
    """One order of summation: products with one-hot rows, 1024 tokens at a time."""
    ids, table = jnp.zeros((2048,), jnp.int32), jnp.ones((24, H))

    def gradient(deterministic: bool) -> Any:
        def fn(table: jax.Array) -> jax.Array:
            mapped = jax.shard_map(
                partial(embedding, deterministic=deterministic),
                mesh=mesh_of(4),
                in_specs=(P(), P("tp", None)),
                out_specs=P(),
            )
            return jnp.sum(mapped(ids, table))

        return jax.grad(fn)

    assert "scatter" in primitives(gradient(False), table)
    assert "scatter" not in primitives(gradient(True), table)
    assert "f32[1024,6]" in primitives(gradient(True), table)
    np.testing.assert_array_equal(jax.jit(gradient(True))(table), jax.jit(gradient(False))(table))


X, W = jnp.ones((B, S, IN)), jnp.ones((IN, OUT))
BAD = {
    "a weight of other inputs": (
        lambda: column_parallel_linear(X, jnp.ones((IN + 1, OUT)), axis_name="tp"),
        SpecError,
        r"column_parallel_linear: weight must be \[16, 32\], got \[17, 32\] \(x is \[2, 8, 16\]\). tiled_jax keeps weights",
    ),
    "a transposed weight": (
        lambda: row_parallel_linear(X, W.T, input_is_parallel=True, axis_name="tp"),
        SpecError,
        r"row_parallel_linear: weight must be \[16, 32\], got \[32, 16\] .* This one is transposed.",
    ),
    "a bias of other outputs": (
        lambda: column_parallel_linear(X, W, jnp.ones(IN), axis_name="tp"),
        SpecError,
        r"column_parallel_linear: bias must be \[32\], got \[16\]",
    ),
    "two dtypes": (
        lambda: column_parallel_linear(X, W.astype(jnp.bfloat16), axis_name="tp"),
        SpecError,
        r"column_parallel_linear: weight must be of x's dtype float32, got bfloat16",
    ),
    "features that do not divide": (
        lambda: row_parallel_linear(jnp.ones((B, S, 18)), jnp.ones((4, OUT)), axis_name="tp"),
        SpecError,
        r"row_parallel_linear: x's last dim must be a multiple of the 4 ranks it is split over, got 18",
    ),
    "tokens that do not divide": (
        lambda: row_parallel_linear(
            X, W, input_is_parallel=True, sequence_parallel=True, options=ParallelLinearOptions(), axis_name="tp"
        ),
        SpecError,
        r"row_parallel_linear: dim 0 of x must be a multiple of the 4 ranks it is split over, got 2",
    ),
    "features as tokens": (
        lambda: column_parallel_linear(
            X, W, sequence_parallel=True, options=ParallelLinearOptions(sequence_dim=-1), axis_name="tp"
        ),
        SpecError,
        r"column_parallel_linear: options.sequence_dim must be a dim of tokens, got -1",
    ),
    "a whole x and split tokens": (
        lambda: row_parallel_linear(X, W, sequence_parallel=True, options=SEQUENCE, axis_name="tp"),
        SpecError,
        r"row_parallel_linear: input_is_parallel must be True with sequence_parallel, got False",
    ),
    "another half's option": (
        lambda: linear_with_frozen_weight(X, W, options=ParallelLinearOptions(is_expert=True), axis_name="tp"),
        SpecError,
        r"linear_with_frozen_weight: options.is_expert must be left at False, got True",
    ),
    "an expert's outputs gathered": (
        lambda: column_parallel_linear(X, W, gather_output=True, options=EXPLICIT, axis_name="tp"),
        SpecError,
        r"column_parallel_linear: gather_output must be False with options.explicit_expert_comm, got True\. The caller ",
    ),
    "an expert's x that is whole": (
        lambda: column_parallel_linear(X, W, options=EXPLICIT, axis_name="tp"),
        SpecError,
        r"column_parallel_linear: x must be varying over the axis with options.explicit_expert_comm, whose gradient no ",
    ),
    "an expert's bias": (
        lambda: row_parallel_linear(X, W, W[0], input_is_parallel=True, options=EXPLICIT, axis_name="tp"),
        SpecError,
        r"row_parallel_linear: bias must be left out with options.explicit_expert_comm, got one that is added\. Add it ",
    ),
    "an expert's whole x": (
        lambda: row_parallel_linear(jnp.ones((2, 64)), W, options=EXPLICIT, axis_name="tp"),
        SpecError,
        r"row_parallel_linear: input_is_parallel must be True with options.explicit_expert_comm, got False",
    ),
    "no options": (
        lambda: column_parallel_linear(X, W, options={}, axis_name="tp"),
        TypeError,
        r"column_parallel_linear: options must be a ParallelLinearOptions, got dict",
    ),
    "no flag": (
        lambda: column_parallel_linear(X, W, gather_output=1, axis_name="tp"),
        TypeError,
        r"column_parallel_linear: gather_output must be True or False, got int",
    ),
    "no axis": (
        lambda: column_parallel_linear(X, W, axis_name="pp"),
        SpecError,
        r"column_parallel_linear: axis_name must be an axis of the surrounding jax.shard_map, got 'pp'",
    ),
    "ids that are none": (
        lambda: vocab_parallel_embedding(X, W, axis_name="tp"),
        SpecError,
        r"vocab_parallel_embedding: ids must be int32 or int64, got float32",
    ),
    "too few entries": (
        lambda: vocab_parallel_embedding(jnp.zeros(8, jnp.int32), W, vocab_size=65, axis_name="tp"),
        SpecError,
        r"vocab_parallel_embedding: the partition of the vocabulary must be >= 17 entries on rank 0 of 4",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    call, error, message = BAD[what]
    with pytest.raises(error, match=message):
        jax.eval_shape(jax.shard_map(lambda _: call(), mesh=mesh_of(4), in_specs=P(), out_specs=P("tp")), jnp.ones(4))


def test_a_deferral_limit_says_nothing_here() -> None:
    mapped = jax.shard_map(
        lambda x: column_parallel_linear(
            x, W, options=ParallelLinearOptions(wgrad_deferral_limit=2, defer_weight_grad=True), axis_name="tp"
        ),
        mesh=mesh_of(4),
        in_specs=P(),
        out_specs=P(None, None, "tp"),
    )
    with pytest.raises(SpecError, match=r"options\.defer_weight_grad must be left at False"):
        jax.eval_shape(mapped, X)


@pytest.mark.parametrize(
    "field", ["disable_grad_reduce", "gradient_accumulation_fusion", "async_grad_reduce", "defer_weight_grad"]
)
def test_options_of_the_other_half(field: str) -> None:
    options = ParallelLinearOptions(**{field: field != "async_grad_reduce"})
    mapped = jax.shard_map(
        lambda x: column_parallel_linear(x, W, options=options, axis_name="tp"),
        mesh=mesh_of(4),
        in_specs=P(),
        out_specs=P(None, None, "tp"),
    )
    with pytest.raises(SpecError, match=f"options.{field} must be left at"):
        jax.eval_shape(mapped, X)
