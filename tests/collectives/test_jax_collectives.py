"""The collectives inside `shard_map`, forward and backward, against the NumPy specification of what every rank gets."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.cases import CollectiveCase, collective_cases
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError, parallel
from tiled_jax.collectives import api as collectives

pytestmark = pytest.mark.ranks

SAME_INPUT = {
    "copy_to_tensor_parallel_region",
    "scatter_to_tensor_parallel_region",
    "scatter_to_sequence_parallel_region",
}
SAME_OUTPUT = {"reduce_from_tensor_parallel_region", "gather_from_tensor_parallel_region"}
Parts = list[np.ndarray[Any, Any]]


def mesh_of(ranks: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((ranks,), ("tp",), axis_types=(kind,), devices=jax.devices()[:ranks])


def same_output(case: CollectiveCase) -> bool:
    return case.name in SAME_OUTPUT or not case.arguments.get("tensor_parallel_output_grad", True)


def arguments_of(case: CollectiveCase) -> dict[str, Any]:
    given = dict(case.arguments)
    if (sizes := given.pop("sizes", None)) is not None and not case.even:
        given |= {"input_split_sizes": sizes, "output_split_sizes": tuple(zip(*sizes, strict=True))}
    return given


def stacked(parts: Parts, beyond: float) -> np.ndarray[Any, Any]:
    """One array [R, ...] of all parts, shorter ones padded."""
    shape = np.max([part.shape for part in parts], axis=0)
    widths = [[(0, full - size) for full, size in zip(shape, part.shape, strict=True)] for part in parts]
    return np.stack([np.pad(part, w, constant_values=beyond) for part, w in zip(parts, widths, strict=True)])


def x_of(case: CollectiveCase) -> Parts:
    """What each rank puts in: the same wherever the function asks for it."""
    parts = case.inputs()
    return [parts[0]] * len(parts) if case.name in SAME_INPUT else parts


def dy_of(case: CollectiveCase) -> Parts:
    parts = case.output_gradients()
    return [parts[0]] * len(parts) if same_output(case) else parts


def operands(case: CollectiveCase, beyond: float = np.nan) -> list[np.ndarray[Any, Any]]:
    """x and dy as global arrays; `beyond` stands where nobody may look."""
    x, dy = x_of(case), dy_of(case)
    x = x[0] if case.name in SAME_INPUT else stacked(x, beyond)
    return [x, dy[0] if same_output(case) else stacked(dy, beyond)]


def expected(case: CollectiveCase) -> list[np.ndarray[Any, Any]]:
    """y and dx as global arrays, by the specification."""
    y, dx = case.outputs(x_of(case)), case.input_gradients(dy_of(case))
    y = y[0] if same_output(case) else stacked(y, 0)
    return [y, dx[0] if case.name in SAME_INPUT else stacked(dx, 0)]


def mapped(cases: list[CollectiveCase], mesh: jax.sharding.Mesh, *, check_vma: bool) -> Any:
    """x -> y of every case over global arrays, in one program."""

    def one(case: CollectiveCase, x: jax.Array) -> jax.Array:
        x = x if case.name in SAME_INPUT else x[0]
        y = getattr(collectives, case.name)(x, axis_name="tp", **arguments_of(case))
        return y if same_output(case) else y[None]

    def on_device(*x: jax.Array) -> list[jax.Array]:
        return [one(case, part) for case, part in zip(cases, x, strict=True)]

    inputs = tuple(P() if case.name in SAME_INPUT else P("tp") for case in cases)
    outputs = [P() if same_output(case) else P("tp") for case in cases]
    return jax.shard_map(on_device, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=check_vma)


def y_and_dx(fn: Any, given: Any) -> list[Any]:
    y, pull = jax.vjp(fn, *(x for x, _ in given))
    return list(zip(y, pull([dy for _, dy in given]), strict=True))


def run(cases: list[CollectiveCase], mesh: jax.sharding.Mesh, check_vma: bool, dtype: Any) -> list[Any]:
    """y and dx of every case."""

    def place(a: jax.Array, split: bool) -> jax.Array:
        return jax.device_put(a.astype(dtype), NamedSharding(mesh, P("tp") if split else P()))

    given = [
        (place(x, case.name not in SAME_INPUT), place(dy, not same_output(case)))
        for case, (x, dy) in zip(cases, map(operands, cases), strict=True)
    ]
    with jax.set_mesh(mesh):
        return quickly(jax.jit(partial(y_and_dx, mapped(cases, mesh, check_vma=check_vma))), given)


def few_cases(ranks: int) -> list[CollectiveCase]:
    """Each collective once or twice, uneven where it can be."""
    rare = ("no tokens", "-dim 1", "dim -1", "without", "three dims", "longest first")
    return [case for case in collective_cases(ranks) if not any(word in case.id for word in rare)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_collective_is_what_the_specification_says(ranks: int, check_vma: bool, x64: None) -> None:
    cases = collective_cases(ranks) if ranks in (1, 4) else few_cases(ranks)
    assert {case.name for case in cases} == set(collectives_of_the_module())
    for case, found in zip(cases, run(cases, mesh_of(ranks), check_vma, jnp.float64), strict=True):
        for name, a, b in zip(("y", "dx"), found, expected(case), strict=True):
            assert_within(np.asarray(a), b, DISTRIBUTED_FLOAT64, f"{case.id} {name}")


def collectives_of_the_module() -> list[str]:
    from shared_specs.signatures import PARALLEL_SIGNATURES

    return [name for name in PARALLEL_SIGNATURES if hasattr(collectives, name)]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        pytest.param(1, AxisType.Explicit, marks=pytest.mark.slow),
        (2, AxisType.Auto),
        (4, AxisType.Explicit),
        (8, AxisType.Auto),
    ],
    ids=str,
)
def test_in_bfloat16_and_on_either_kind_of_mesh(ranks: int, kind: AxisType) -> None:
    """What is only moved is exact; sums may be as wrong as their result, rounded once, may be."""
    cases, mesh = few_cases(ranks), mesh_of(ranks, kind)
    for case, found in zip(cases, run(cases, mesh, True, jnp.bfloat16), strict=True):
        for name, a, b in zip(("y", "dx"), found, expected(case), strict=True):
            assert a.dtype == jnp.bfloat16
            rounded = b.astype(jnp.bfloat16)
            assert_within(np.asarray(a), b, limit(relative_error(rounded, b), "bfloat16"), f"{case.id} {name}")


def communication(fn: Any, *arguments: Any) -> list[str]:
    """The collectives of the compiled program, sorted."""
    text = jax.jit(fn).lower(*arguments).compile().as_text()
    return sorted(
        re.findall(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
    )


def case_of(name: str, ranks: int = 4) -> CollectiveCase:
    return next(case for case in collective_cases(ranks) if case.name == name and "no tokens" not in case.id)


COMMUNICATION = {
    "copy_to_tensor_parallel_region": ["all-reduce"],
    "reduce_from_tensor_parallel_region": ["all-reduce"],
    "scatter_to_tensor_parallel_region": ["all-gather"],
    "gather_from_tensor_parallel_region": ["all-gather"],
    "scatter_to_sequence_parallel_region": ["all-gather"],
    "gather_from_sequence_parallel_region": ["all-gather", "reduce-scatter"],
    "reduce_scatter_to_sequence_parallel_region": ["all-gather", "reduce-scatter"],
    "all_gather_last_dim_from_tensor_parallel_region": ["all-gather", "reduce-scatter"],
    "reduce_scatter_last_dim_to_tensor_parallel_region": ["all-gather", "reduce-scatter"],
    "all_to_all": ["all-to-all", "all-to-all"],
    "all_to_all_sequence_to_hidden": ["all-to-all", "all-to-all"],
    "all_to_all_hidden_to_sequence": ["all-to-all", "all-to-all"],
}


@pytest.mark.parametrize("name", COMMUNICATION)
def test_what_is_sent(name: str) -> None:
    """Forward and backward send no more than the pair is named after.

    One device moves nothing: what may stay in a program for the CPU is a sum of its own term alone, which only a sum
    turns into something that is the same on all devices (and which `shard_map` itself adds with check_vma=False).
    """
    for ranks, check_vma in ((4, True), (1, True), (1, False)):
        sent = COMMUNICATION[name]
        case = case_of(name, ranks)
        given = [tuple(jnp.asarray(a, jnp.float32) for a in operands(case))]
        found = communication(partial(y_and_dx, mapped([case], mesh_of(ranks), check_vma=check_vma)), given)
        if ranks > 1:
            assert found == sent
        else:
            assert set(found) <= {"all-reduce"}


def sharded_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    """A two-layer network in tensor and sequence parallel form: every kind of pair in one value."""
    whole = collectives.gather_from_sequence_parallel_region(x, axis_name="tp")
    hidden = jnp.tanh(whole @ w)
    part = collectives.reduce_scatter_to_sequence_parallel_region(hidden @ w.T, axis_name="tp")
    return collectives.reduce_from_tensor_parallel_region(jnp.sum(jnp.sin(part)), axis_name="tp")


def plain_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(jnp.tanh(x @ w) @ w.T))


def network() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.standard_normal((8, 6))), jnp.asarray(rng.standard_normal((6, 12)))


def assert_same(actual: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "gradient")


def test_gradients_taken_inside(x64: None) -> None:
    """With check_vma=True as they are; without, JAX differentiates the sum of every device's loss: each gives a share."""
    specs, both = (P("tp"), P(None, "tp")), (0, 1)
    wanted = jax.value_and_grad(plain_loss, both)(*network())
    for check_vma, share in ((True, 1), (False, 4)):
        inside = jax.value_and_grad(lambda x, w, share=share: sharded_loss(x, w) / share, both)
        fn = jax.shard_map(inside, mesh=mesh_of(4), in_specs=specs, out_specs=(P(), specs), check_vma=check_vma)
        value, gradients = jax.jit(fn)(*network())
        assert_same((value * share, gradients), wanted)


def test_second_derivatives(x64: None) -> None:
    """The gradient of a gradient, through a scatter and a gather of what is the same on all devices."""

    def split(x: jax.Array) -> jax.Array:
        part = collectives.scatter_to_tensor_parallel_region(x, axis_name="tp")
        return collectives.gather_from_tensor_parallel_region(jnp.sin(part) ** 2, axis_name="tp")

    fn = jax.shard_map(split, mesh=mesh_of(4), in_specs=P(), out_specs=P())

    def twice(fn: Any) -> Any:
        first = jax.grad(lambda x: jnp.sum(fn(x) ** 2))
        return jax.jit(jax.grad(lambda x: jnp.sum(first(x) ** 3)))

    x = network()[1]
    assert_same(twice(fn)(x), twice(lambda x: jnp.sin(x) ** 2)(x))


def test_beside_another_axis_and_in_a_checkpointed_scan(x64: None) -> None:
    """Tokens over `data` too: gradients of the weights are summed over it, once."""
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    x, w = network()

    def stack(loss: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda total, scale: (total + loss(x * scale, w), None))
        return lax.scan(body, x[0, 0] * 0, jnp.arange(1.0, 4.0))[0]

    def on_device(x: jax.Array, w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda total, scale: (total + sharded_loss(x * scale, w), None))
        start = lax.pcast(jnp.zeros(()), "data", to="varying")
        return lax.psum(lax.scan(body, start, jnp.arange(1.0, 4.0))[0], "data")

    specs = (P(("data", "tp")), P(None, "tp"))
    fn = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P())
    both = (0, 1)
    actual = jax.jit(jax.value_and_grad(fn, both))(x, w)
    assert_same(actual, jax.value_and_grad(partial(stack, plain_loss), both)(x, w))


BAD = {
    "an axis that is not there": (
        lambda x: collectives.copy_to_tensor_parallel_region(x, axis_name="pp"),
        SpecError,
        r"copy_to_tensor_parallel_region: axis_name must be an axis of the surrounding jax.shard_map, got 'pp'",
    ),
    "no name": (
        lambda x: collectives.reduce_from_tensor_parallel_region(x, axis_name=("tp",)),
        TypeError,
        r"reduce_from_tensor_parallel_region: axis_name must be the name of a mesh axis, got tuple",
    ),
    "no array": (
        lambda x: collectives.copy_to_tensor_parallel_region([1.0], axis_name="tp"),
        TypeError,
        r"copy_to_tensor_parallel_region: x must be an array, got list",
    ),
    "a dim that does not divide": (
        lambda x: collectives.scatter_to_tensor_parallel_region(x, axis_name="tp"),
        SpecError,
        r"scatter_to_tensor_parallel_region: dim 1 of x must be a multiple of the 4 ranks it is split over, got 6 ",
    ),
    "a dim that is not there": (
        lambda x: collectives.gather_from_sequence_parallel_region(x, dim=2, axis_name="tp"),
        SpecError,
        r"gather_from_sequence_parallel_region: dim must be in \[-2, 2\), got 2 \(x is \[8, 6\]\)",
    ),
    "sizes of another sum": (
        lambda x: collectives.scatter_to_sequence_parallel_region(x, split_sizes=(2, 2, 2, 3), axis_name="tp"),
        SpecError,
        r"split_sizes must be of sum 8, the size of dim 0 of x, got \[2, 2, 2, 3\] of sum 9",
    ),
    "a part of another size": (
        lambda x: collectives.gather_from_sequence_parallel_region(x, split_sizes=(2, 2, 2, 3), axis_name="tp"),
        SpecError,
        r"split_sizes must be of maximum 8, the size of dim 0 of x, got \[2, 2, 2, 3\]",
    ),
    "sizes of one rank": (
        lambda x: collectives.all_to_all(
            x, input_split_sizes=(2, 2, 2, 2), output_split_sizes=(2, 2, 2, 2), axis_name="tp"
        ),
        TypeError,
        r"all_to_all: output_split_sizes must be a sequence with one sequence of integers for each device",
    ),
    "sizes of one direction": (
        lambda x: collectives.all_to_all(x, input_split_sizes=((2,) * 4,) * 4, axis_name="tp"),
        SpecError,
        r"all_to_all: output_split_sizes must be given, or both left out, got None",
    ),
    "sizes that disagree": (
        lambda x: collectives.all_to_all(
            x,
            input_split_sizes=((2, 2, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)),
            output_split_sizes=((2,) * 4,) * 4,
            axis_name="tp",
        ),
        SpecError,
        r"output_split_sizes must be \[\[2, 1, 2, 2\], .*, the columns of input_split_sizes",
    ),
    "one dim": (
        lambda x: collectives.all_to_all_sequence_to_hidden(x[0], axis_name="tp"),
        SpecError,
        r"all_to_all_sequence_to_hidden: x must be of two dims or more, tokens first and features last, got \[6\]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    call, error, message = BAD[what]
    with pytest.raises(error, match=message):
        jax.eval_shape(jax.shard_map(call, mesh=mesh_of(4), in_specs=P(), out_specs=P("tp")), jnp.ones((8, 6)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_equal_chunks_of_an_array(check_vma: bool) -> None:
    """Elements dealt out and gathered again, with gradients; parts of the last dim."""
    x, dy = np.arange(24.0).reshape(2, 12), np.linspace(0, 1, 24)

    def on_device(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = parallel.split_tensor_into_1d_equal_chunks(x, axis_name="tp")
        return part, parallel.gather_split_1d_tensor(jnp.sin(part), axis_name="tp")

    specs: dict[str, Any] = {"in_specs": P(), "out_specs": (P("tp"), P()), "check_vma": check_vma}
    mapped = jax.jit(jax.shard_map(on_device, mesh=mesh_of(4), **specs))
    (parts, y), pull = jax.vjp(mapped, jnp.asarray(x, jnp.float32))
    dx = pull((jnp.zeros_like(parts), jnp.asarray(dy, jnp.float32)))[0]
    expected = {"parts": x.ravel(), "y": np.sin(x.ravel()), "dx": (dy * np.cos(x.ravel())).reshape(2, 12)}
    for (name, wanted), found in zip(expected.items(), (parts, y, dx), strict=True):
        assert_within(np.asarray(found), wanted, limit(0.0, "float32"), name)
    split = parallel.split_tensor_along_last_dim(jnp.asarray(x), 3)
    np.testing.assert_array_equal(jnp.concatenate(split, -1), x)
    with pytest.raises(
        SpecError, match=re.escape("num_partitions must be a divisor of 12, got 5 (tensor is [2, 12]).")
    ):
        parallel.split_tensor_along_last_dim(jnp.asarray(x), 5)
    odd = jax.shard_map(on_device, mesh=mesh_of(4), **specs)
    with pytest.raises(
        SpecError, match="the elements of tensor must be a multiple of the 4 ranks they are split over, got 9"
    ):
        jax.eval_shape(odd, jnp.ones((3, 3)))
