"""The fused layers of inference: gloo ranks, virtual devices and the oracle in float64, and the same words for what is wrong.

PyTorch's have no gradients and refuse them (tests/layers/test_torch_ranks_inference.py): those of JAX's are compared with
those of PyTorch's layers and collectives that make the same.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import JAX, TORCH
from shared_specs.layers import oracle
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.layers.test_jax_inference import SIZES, padded, tokens_of
from tests.plans.jax_parallel_models import quickly
from tiled_jax import parallel

pytestmark = pytest.mark.ranks

T, B, IN, H, EPS = 8, 3, 12, 16, 1e-3
NORM, ROW = "norm_column_parallel_linear", "row_parallel_linear_residual_norm"
Array = np.ndarray[Any, Any]
Dims = dict[str, int | None]
Sizes = tuple[int, ...] | None
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {  # x and the residual of one token
    NORM: {"x": (1, B, IN), "norm_weight": (IN,), "weight": (IN, H), "bias": (H,)},
    ROW: {"x": (1, B, IN), "weight": (IN, H), "residual": (1, B, H), "norm_weight": (H,), "bias": (H,)},
}
OF_TOKENS = ("x", "residual")  # operands whose dim 0 they are
# Along which dim of JAX's array each operand is split; None: whole on every rank.
DIMS: dict[str, Dims] = {
    NORM: {"x": None, "norm_weight": None, "weight": 1, "bias": 0},
    ROW: {"x": 2, "weight": 0, "residual": 0, "norm_weight": None, "bias": None},
}


@dataclass(frozen=True)
class Case:
    """One call in both halves, and the dims along which its results are split."""

    function: str
    outputs: tuple[int | None, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    bias: bool = True

    @property
    def sizes(self) -> Sizes:
        """Tokens of every rank; None: equally many."""
        return self.arguments.get("split_sizes")

    @property
    def dims(self) -> Dims:
        tokens: Dims = {"x": 0} if self.arguments.get("sequence_parallel") else {}
        found = DIMS[self.function] | tokens
        return {name: dim for name, dim in found.items() if name != "bias" or self.bias}

    @property
    def operands(self) -> dict[str, Array]:
        rng = np.random.default_rng(0)
        tokens = T if self.sizes is None else sum(self.sizes)
        shapes = {
            name: (tokens, *shape[1:]) if name in OF_TOKENS else shape for name, shape in SHAPES[self.function].items()
        }
        drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        return {name: drawn[name] for name in self.dims}

    @property
    def expected(self) -> tuple[Array, ...]:
        given = {"bias": np.zeros(H)} | self.operands | {"eps": EPS}
        return (oracle.norm_linear(**given),) if self.function == NORM else oracle.linear_residual_norm(**given)

    def sizes_along(self, dim: int | None, operand: str = "x") -> Sizes:
        """What a device's part of an operand, or of a result, is padded from along `dim`; None: it is not."""
        return self.sizes if dim == 0 and operand in OF_TOKENS else None


CASES = {
    "norm, column": Case(NORM, (2,)),
    "norm, column of own tokens": Case(NORM, (2,), {"sequence_parallel": True}),
    "norm, column without bias": Case(NORM, (2,), {"sequence_parallel": True}, bias=False),
    "row, norm": Case(ROW, (None, 0)),
    "row, norm of own tokens": Case(ROW, (0, 0), {"gather": False, "path": "collectives"}),
    "row, norm without bias": Case(ROW, (None, 0), bias=False),
}
OF_SIZES = {  # in each of tests.layers.test_jax_inference.SIZES
    "norm, column": Case(NORM, (2,), {"sequence_parallel": True}),
    "row, norm": Case(ROW, (None, 0)),
    "row, norm of own tokens": Case(ROW, (0, 0), {"gather": False}, bias=False),
}


def cases_of(ranks: int) -> dict[str, Case]:
    uneven = {
        f"{name}, {tokens}": replace(case, arguments=case.arguments | {"split_sizes": sizes})
        for tokens, sizes in SIZES[ranks].items()
        for name, case in OF_SIZES.items()
    }
    return CASES | uneven


def for_torch(case: Case) -> dict[str, Any]:
    operands, dims = case.operands, dict(case.dims)
    operands["weight"], dims["weight"] = operands["weight"].T, 1 - (dims["weight"] or 0)
    lists = {name: a.tolist() for name, a in operands.items()}
    return {"function": case.function, "operands": lists, "dims": dims, "arguments": case.arguments | {"eps": EPS}}


def spec(dim: int | None) -> P:
    return P() if dim is None else P(*[None] * dim, "tp")


def mesh_of(ranks: int) -> jax.sharding.Mesh:
    return jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def mapped(function: str, mesh: jax.sharding.Mesh, dims: Dims, outputs: Any, **arguments: Any) -> Any:
    """The function over whole operands, by name."""
    fn = partial(getattr(parallel, function), axis_name="tp", **arguments)
    specs = {name: spec(dim) for name, dim in dims.items()}
    return jax.shard_map(lambda operands: fn(**operands), mesh=mesh, in_specs=(specs,), out_specs=outputs)


def upstream(case: Case) -> list[Array]:
    """Gradients of the whole results."""
    return [np.cos(truth * (1 + place)) for place, truth in enumerate(case.expected)]


def as_held(whole: Array, sizes: Sizes) -> Array:
    return whole if sizes is None else padded(whole, sizes)


def as_whole(held: Any, sizes: Sizes) -> Array:
    return np.asarray(held) if sizes is None else tokens_of(held, sizes)


def on_devices(ranks: int) -> dict[str, tuple[list[Array], dict[str, Array]]]:
    """Results and gradients of every case, whole, in one program."""
    mesh, cases = mesh_of(ranks), cases_of(ranks)

    @jax.jit
    def run(operands: dict[str, Any], dy: dict[str, Any]) -> Any:
        found = {}
        for name, case in cases.items():
            specs = tuple(spec(dim) for dim in case.outputs)
            outputs = specs if case.function == ROW else specs[0]
            fn = mapped(case.function, mesh, case.dims, outputs, eps=EPS, **case.arguments)
            results, pull = jax.vjp(fn, operands[name])
            found[name] = jax.tree.leaves(results), pull(jax.tree.unflatten(jax.tree.structure(results), dy[name]))[0]
        return found

    with jax.enable_x64(True):
        operands = {
            name: {key: as_held(a, case.sizes_along(case.dims[key], key)) for key, a in case.operands.items()}
            for name, case in cases.items()
        }
        dy = {
            name: [as_held(d, case.sizes_along(dim)) for d, dim in zip(upstream(case), case.outputs, strict=True)]
            for name, case in cases.items()
        }
        found = quickly(run, *jax.tree.map(jnp.asarray, (operands, dy)))
    return {name: wholes(case, *found[name]) for name, case in cases.items()}


def wholes(case: Case, results: list[Any], gradients: dict[str, Any]) -> tuple[list[Array], dict[str, Array]]:
    """Without what the devices' parts are padded with."""
    found = [as_whole(a, case.sizes_along(dim)) for a, dim in zip(results, case.outputs, strict=True)]
    return found, {name: as_whole(a, case.sizes_along(case.dims[name], name)) for name, a in gradients.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.deep)])
def test_ranks_devices_and_oracle(pools: Any, ranks: int) -> None:
    cases = cases_of(ranks)
    answers = pools[ranks].run(
        "tests.layers.ranks_torch_parity_inference:layers", cases=[for_torch(case) for case in cases.values()]
    )
    slopes = [
        for_torch(case) | {"dy": [d.tolist() for d in upstream(case)], "outputs": case.outputs}
        for case in cases.values()
    ]
    gradients = pools[ranks].run("tests.layers.ranks_torch_parity_inference:gradients", cases=slopes)
    ours = on_devices(ranks)
    for at, (name, case) in enumerate(cases.items()):
        results, d_operands = ours[name]
        assert len(results) == len(case.outputs) == len(case.expected)
        for output, (dim, whole, truth) in enumerate(zip(case.outputs, results, case.expected, strict=True)):
            assert_within(whole, truth, DISTRIBUTED_FLOAT64, f"{name}: output {output} of JAX")
            for rank, part in enumerate(parts_of(whole, dim, ranks, case.sizes_along(dim))):
                theirs = array(answers[rank][at][output], part)
                assert_within(theirs, part, DISTRIBUTED_FLOAT64, f"{name}: output {output} of rank {rank}")
        assert d_operands.keys() == case.dims.keys()
        for operand, whole in d_operands.items():
            dim = case.dims[operand]
            for rank, part in enumerate(parts_of(whole, dim, ranks, case.sizes_along(dim, operand))):
                theirs = array(gradients[rank][at][operand], part)
                theirs = theirs.T if operand == "weight" else theirs
                assert_within(theirs, part, DISTRIBUTED_FLOAT64, f"{name}: d{operand} of rank {rank}")


def array(values: list[Any], like: Array) -> Array:
    """Of lists, which lose the shape of what has no elements."""
    found = np.asarray(values)
    return found if like.size or found.size else np.empty(like.shape)


def parts_of(whole: Array, dim: int | None, ranks: int, sizes: Sizes) -> list[Array]:
    if dim is None:
        return [whole] * ranks
    return np.split(whole, ranks if sizes is None else np.cumsum(sizes)[:-1], dim)


# What two ranks hold, weights as JAX has them, and how a call of that goes wrong: (changed operands, changed arguments).
RIGHT: dict[str, dict[str, list[Any]]] = {
    NORM: {"x": [T, B, IN], "norm_weight": [IN], "weight": [IN, H // 2], "bias": [H // 2]},
    ROW: {"x": [T, B, IN // 2], "weight": [IN // 2, H], "residual": [T // 2, B, H], "norm_weight": [H], "bias": [H]},
}
SHORT: dict[str, Any] = {"norm_weight": [[3], "float32"]}
BOTH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "short norm_weight": (SHORT, {}),
    "norm_weight of two dims": ({"norm_weight": [[1, H], "float32"]}, {}),
    "dtype of norm_weight": ({"norm_weight": [None, "float16"]}, {}),
    "norm_weight that is no array": ({"norm_weight": "ones"}, {}),
    "no norm_weight": ({"norm_weight": None}, {}),
    "negative eps": ({}, {"eps": -1.0}),
    "eps that is no number": ({}, {"eps": "small"}),
    "eps that is a truth": ({}, {"eps": True}),
    "short bias": ({"bias": [[3], "float32"]}, {}),
    "dtype of bias": ({"bias": [None, "float16"]}, {}),
    "dtype of weight": ({"weight": [None, "float16"]}, {}),
    "weight of one dim": ({"weight": [[IN], "float32"]}, {}),
    "weight that is no array": ({"weight": 3}, {}),
    "x that is no array": ({"x": 3}, {}),
    "x of one dim": ({"x": [[IN], "float32"]}, {}),
    "x of integers": ({"x": [None, "int32"]}, {}),
}
BAD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"{function}: {what}": (function, *wrong) for function in (NORM, ROW) for what, wrong in BOTH.items()},
    "sequence_parallel": (NORM, {}, {"sequence_parallel": 1}),
    "gather": (ROW, {}, {"gather": "all"}),
    "path": (ROW, {}, {"path": "fast"}),
    "path that is no name": (ROW, {}, {"path": None}),
    "all of the residual": (ROW, {"residual": [[T, B, H], "float32"]}, {}),
    "dtype of residual": (ROW, {"residual": [None, "float16"]}, {}),
    "no residual": (ROW, {"residual": None}, {}),
    "tokens that do not divide": (ROW, {"x": [[T - 1, B, IN // 2], "float32"]}, {}),
    "one token": (ROW, {"x": [[1, B, IN // 2], "float32"], "residual": [[1, B, H], "float32"]}, {}),
    "sizes of another sum": (ROW, {}, {"split_sizes": [5, 4]}),
    "sizes of tokens that all have": (NORM, {}, {"split_sizes": [T, 0]}),
    **{
        f"{function}: {what}": (function, {}, more | {"split_sizes": sizes})
        for function, more in ((NORM, {"sequence_parallel": True}), (ROW, {}))
        for what, sizes in {
            "sizes of three": [4, 2, 2],
            "no sizes": [],
            "a size below 0": [9, -1],
            "a size that is no integer": [4.0, 4],
            "a size that is a truth": [7, True],
            "one size for all": 4,
            "sizes that are text": "44",
        }.items()
    },
    "residual of equal sizes": (ROW, {"residual": [[T, B, H], "float32"]}, {"split_sizes": [T // 2, T // 2]}),
    "x of one dim with sizes": (ROW, {"x": [[IN], "float32"]}, {"split_sizes": [T // 2, T // 2]}),
    "path with sizes": (ROW, {}, {"path": "fast", "split_sizes": [T // 2, T // 2]}),
}


def wrong_operands(function: str, changes: dict[str, Any]) -> dict[str, Any]:
    """[shape, dtype] of every operand, or what is no array."""
    whole: dict[str, Any] = {name: [shape, "float32"] for name, shape in RIGHT[function].items()}
    for name, change in changes.items():
        whole[name] = [change[0] or whole[name][0], change[1]] if isinstance(change, list) else change
    return whole


def refused_by_jax(function: str, operands: dict[str, Any], arguments: dict[str, Any]) -> str:
    given = {name: jnp.ones(a[0], a[1]) if isinstance(a, list) else a for name, a in operands.items()}

    def on_device() -> jax.Array:
        getattr(parallel, function)(**given, **arguments, axis_name="tp")
        return jnp.zeros(())

    try:
        jax.eval_shape(jax.shard_map(on_device, mesh=mesh_of(2), in_specs=(), out_specs=P()))
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def turned(operands: dict[str, Any]) -> dict[str, Any]:
    weight = operands["weight"]
    return operands | {"weight": [weight[0][::-1], weight[1]] if isinstance(weight, list) else weight}


def in_the_words_of_jax(text: str) -> str:
    return text.replace(TORCH.package, JAX.package).replace(TORCH.layout, JAX.layout)


def test_the_same_words_for_wrong_calls(pools: Any) -> None:
    calls = [
        {"function": function, "operands": wrong_operands(function, changes), "arguments": arguments}
        for function, changes, arguments in BAD.values()
    ]
    ours = [refused_by_jax(**call) for call in calls]
    torchs = [call | {"operands": turned(call["operands"])} for call in calls]
    theirs = pools[2].run("tests.layers.ranks_torch_parity_inference:refusals", calls=torchs)[0]
    found = dict(zip(BAD, zip(ours, theirs, strict=True), strict=True))
    different = {name: both for name, both in found.items() if both[0] != in_the_words_of_jax(both[1])}
    assert not different
    accepted = [name for name, both in found.items() if "accepted" in both]
    assert not accepted


def test_symmetric_memory_is_refused_with_each_halfs_reason(pools: Any) -> None:
    call = {"function": ROW, "operands": wrong_operands(ROW, {}), "arguments": {"path": "symmetric_memory"}}
    theirs = pools[2].run(
        "tests.layers.ranks_torch_parity_inference:refusals", calls=[call | {"operands": turned(call["operands"])}]
    )[0][0]
    for text, reason in ((refused_by_jax(**call), "XLA has no kernel"), (theirs, "Symmetric memory is a path of CUDA")):
        start = f"UnsupportedError: {ROW}: path must be usable here, got 'symmetric_memory'. {reason}"
        assert text.startswith(start)
        assert text.endswith('Pass path="auto".')
