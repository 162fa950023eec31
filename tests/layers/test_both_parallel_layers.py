"""Sharded layers of the two halves: results and gradients of gloo ranks against those of virtual devices, in float64."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import ParallelLinearOptions
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.ranks import Ranks
from tiled_jax import parallel

pytestmark = pytest.mark.ranks

RANKS, T, IN, OUT, V, H = 2, 6, 8, 12, 10, 4
Array = np.ndarray[Any, Any]
COLUMNS: dict[str, int | None] = {"x": None, "weight": 1, "bias": 0, "dy": 1}
ROWS: dict[str, int | None] = {"x": 1, "weight": 0, "bias": None, "dy": None}
TABLE: dict[str, int | None] = {"ids": None, "weight": 0, "dy": None}


@dataclass(frozen=True)
class Case:
    """One call in both halves; `dims`: along which dim of JAX's array each operand is split, None: whole on every rank."""

    function: str
    dims: dict[str, int | None]
    arguments: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "column": Case("column_parallel_linear", COLUMNS),
    "column, sequence": Case("column_parallel_linear", COLUMNS | {"x": 0}, {"sequence_parallel": True}),
    "column, gathered": Case("column_parallel_linear", COLUMNS | {"dy": None}, {"gather_output": True}),
    "column, gathered, fused": Case(
        "column_parallel_linear", COLUMNS | {"dy": None}, {"gather_output": True}, {"stride": 2}
    ),
    "row": Case("row_parallel_linear", ROWS, {"input_is_parallel": True}),
    "row of a whole x, fused": Case("row_parallel_linear", ROWS | {"x": None}, {}, {"stride": 2}),
    "row, sequence": Case(
        "row_parallel_linear", ROWS | {"dy": 0}, {"input_is_parallel": True, "sequence_parallel": True}
    ),
    "frozen": Case("linear_with_frozen_weight", COLUMNS),
    "frozen, sequence": Case("linear_with_frozen_weight", COLUMNS | {"x": 0}, {"sequence_parallel": True}),
    "frozen, fused": Case("linear_with_frozen_weight", COLUMNS, {}, {"stride": 2}),
    "embedding": Case("vocab_parallel_embedding", TABLE),
    "embedding, sequence": Case(
        "vocab_parallel_embedding", TABLE | {"dy": 0}, {"reduce_scatter_embeddings": True, "deterministic": True}
    ),
}


def operands_of(case: Case) -> dict[str, Array]:
    """Whole operands as JAX has them, and dy."""
    rng = np.random.default_rng(0)
    if "ids" in case.dims:
        return {
            "ids": rng.integers(0, V, (T,)),
            "weight": rng.standard_normal((V, H)),
            "dy": rng.standard_normal((T, H)),
        }
    shapes = {"x": (T, IN), "weight": (IN, OUT), "bias": (OUT,), "dy": (T, OUT)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def turned(case: Case) -> bool:
    """Whether torch keeps this weight the other way round."""
    return "ids" not in case.dims


def for_torch(case: Case) -> dict[str, Any]:
    operands, dims = operands_of(case), dict(case.dims)
    if turned(case):
        operands["weight"], dims["weight"] = operands["weight"].T, {0: 1, 1: 0}[dims["weight"] or 0]
    return {
        "function": case.function,
        "operands": {name: value.tolist() for name, value in operands.items()},
        "dims": dims,
        "arguments": case.arguments,
        "options": case.options,
    }


@pytest.fixture(scope="module")
def torch_results(pools: dict[int, Ranks]) -> dict[str, list[dict[str, Any]]]:
    """Of every case, every rank's results."""
    cases = [for_torch(case) for case in CASES.values()]
    found = pools[RANKS].run("tests.layers.ranks_torch_parity_layers:layers", cases=cases)
    return {name: [answers[at] for answers in found] for at, name in enumerate(CASES)}


def by_device(case: Case, name: str, value: Array) -> Array:
    """A fused weight as the devices hold it, side by side."""
    dim, stride = case.dims[name], case.options.get("stride", 1)
    if dim is None or stride == 1 or name not in ("weight", "bias"):
        return value
    parts = [np.split(part, RANKS, dim) for part in np.split(value, stride, dim)]
    return np.concatenate([part[rank] for rank in range(RANKS) for part in parts], dim)


def jax_results(case: Case) -> dict[str, Array]:
    """y and the gradients over all devices, side by side."""
    given = {name: jnp.asarray(by_device(case, name, value)) for name, value in operands_of(case).items()}
    dy = given.pop("dy")
    mesh = jax.make_mesh((RANKS,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])
    options = {} if "ids" in case.dims else {"options": ParallelLinearOptions(**case.options)}

    def spec(dim: int | None) -> P:
        return P() if dim is None else P(*[None] * dim, "tp")

    def on_device(given: dict[str, jax.Array]) -> jax.Array:
        return getattr(parallel, case.function)(**given, **case.arguments, **options, axis_name="tp")

    specs = {name: spec(case.dims[name]) for name in given}
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=spec(case.dims["dy"]))
    ids = {name: value for name, value in given.items() if name == "ids"}
    floats = {name: value for name, value in given.items() if name != "ids"}
    y, pull = jax.vjp(jax.jit(lambda floats: mapped(ids | floats)), floats)
    gradients = {f"d{name}": value for name, value in pull(dy)[0].items()}
    if case.function == "linear_with_frozen_weight":
        assert not gradients.pop("dweight").any()
    return {name: np.asarray(value) for name, value in ({"y": y} | gradients).items()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_ranks_and_of_devices(name: str, torch_results: Any) -> None:
    case = CASES[name]
    with jax.enable_x64(True):
        ours = jax_results(case)
    theirs = torch_results[name]
    assert all(set(answer) == set(ours) for answer in theirs)
    for what, value in ours.items():
        dim = case.dims["dy" if what == "y" else what[1:]]
        parts = [value] * RANKS if dim is None else np.split(value, RANKS, dim)
        for rank, part in enumerate(parts):
            found = np.asarray(theirs[rank][what])
            found = found.T if what == "dweight" and turned(case) else found
            assert_within(found, part, DISTRIBUTED_FLOAT64, f"{name}: {what} of rank {rank}")
