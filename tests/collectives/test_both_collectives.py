"""Every collective of the two halves: what gloo ranks and virtual devices make of the same parts and upstream gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.cases import CollectiveCase, collective_cases
from shared_specs.signatures import PARALLEL_SIGNATURES
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import QUICKLY
from tests.ranks import Ranks
from tiled_jax import parallel

pytestmark = pytest.mark.ranks

# Where JAX's types say that all devices hold the same: there every rank is given the same, x or the gradient of y.
SAME_X = {"copy_to_tensor_parallel_region", "scatter_to_tensor_parallel_region", "scatter_to_sequence_parallel_region"}
SAME_Y = {"reduce_from_tensor_parallel_region", "gather_from_tensor_parallel_region"}
Array = np.ndarray[Any, Any]
Parts = list[Array]


def cases_of(ranks: int) -> list[CollectiveCase]:
    """Each collective even and, where it can be, uneven, also with a rank that has no tokens."""
    rare = ("no tokens", "-dim 1", "dim -1", "all without", "three dims", "longest first")
    return [case for case in collective_cases(ranks) if not any(word in case.id for word in rare)]


def same_y(case: CollectiveCase) -> bool:
    return case.name in SAME_Y or not case.arguments.get("tensor_parallel_output_grad", True)


def operands(case: CollectiveCase) -> tuple[Parts, Parts]:
    """x and dy of every rank."""
    x, dy = case.inputs(), case.output_gradients()
    x = x[:1] * case.ranks if case.name in SAME_X else x
    return x, dy[:1] * case.ranks if same_y(case) else dy


def for_torch(case: CollectiveCase) -> dict[str, Any]:
    given, (x, dy) = dict(case.arguments), operands(case)
    sizes, own = given.pop("sizes", None), {}
    if sizes is not None:
        own = {"input_split_sizes": sizes, "output_split_sizes": list(zip(*sizes, strict=True))}
    lists = {"x": [a.tolist() for a in x], "dy": [a.tolist() for a in dy]}
    shapes = [[a.shape for a in parts] for parts in (x, dy)]
    return {"name": case.name, **lists, "shapes": shapes, "arguments": given, "own": own}


def on_ranks(pool: Ranks, cases: list[CollectiveCase]) -> list[dict[str, Parts]]:
    """Of every case: y and dx of every rank."""
    found = pool.run(
        "tests.collectives.ranks_torch_parity_collectives:collectives", calls=[for_torch(case) for case in cases]
    )

    def array(answer: dict[str, Any]) -> Array:
        return np.asarray(answer["values"], np.float64).reshape(answer["shape"])

    return [
        {name: [array(answers[at][name]) for answers in found] for name in ("y", "dx")} for at, _ in enumerate(cases)
    ]


def padded(parts: Parts) -> Array:
    """[R, ...]: all parts, shorter ones filled up with what nobody may look at."""
    shape = np.max([part.shape for part in parts], axis=0)
    whole = np.full((len(parts), *shape), np.nan)
    for rank, part in enumerate(parts):
        whole[rank][tuple(slice(size) for size in part.shape)] = part
    return whole


def on_devices(cases: list[CollectiveCase], check_vma: bool) -> list[dict[str, Parts]]:
    """The same of virtual devices, in one program: where a part is shorter than the longest, it ends in zeros."""
    ranks = cases[0].ranks
    mesh = jax.make_mesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])

    def call(case: CollectiveCase, x: jax.Array) -> jax.Array:
        given = dict(case.arguments)
        sizes = given.pop("sizes", None)
        if sizes is not None:
            given |= {"input_split_sizes": sizes, "output_split_sizes": tuple(zip(*sizes, strict=True))}
        y = getattr(parallel, case.name)(x if case.name in SAME_X else x[0], axis_name="tp", **given)
        return y if same_y(case) else y[None]

    mapped = jax.shard_map(
        lambda *x: [call(case, part) for case, part in zip(cases, x, strict=True)],
        mesh=mesh,
        in_specs=tuple(P() if case.name in SAME_X else P("tp") for case in cases),
        out_specs=[P() if same_y(case) else P("tp") for case in cases],
        check_vma=check_vma,
    )

    @jax.jit
    def run(x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(mapped, *x)
        return y, pull(dy)

    def given(whole: bool, parts: Parts) -> jax.Array:
        return jnp.asarray(parts[0] if whole else padded(parts))

    both = [operands(case) for case in cases]
    x = [given(case.name in SAME_X, x) for case, (x, _) in zip(cases, both, strict=True)]
    dy = [given(same_y(case), dy) for case, (_, dy) in zip(cases, both, strict=True)]

    def parts(whole: bool, array: jax.Array) -> Parts:
        return [np.asarray(array)] * ranks if whole else list(np.asarray(array))

    return [
        {"y": parts(same_y(case), y), "dx": parts(case.name in SAME_X, dx)}
        for case, y, dx in zip(cases, *run.lower(x, dy).compile(QUICKLY)(x, dy), strict=True)
    ]


def test_no_collective_is_left_out() -> None:
    expected = {
        name for name in PARALLEL_SIGNATURES if name.endswith("_parallel_region") or name.startswith("all_to_all")
    }
    assert expected == {case.name for ranks in (2, 4) for case in cases_of(ranks)}
    assert len(expected) == 12


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_and_devices(pools: Any, ranks: int) -> None:
    """Results and gradients of every rank, with JAX's types of what varies and without them."""
    cases = cases_of(ranks)
    theirs = on_ranks(pools[ranks], cases)
    for check_vma in (True, False):
        with jax.enable_x64(True):
            ours = on_devices(cases, check_vma)
        for case, found, wanted in zip(cases, ours, theirs, strict=True):
            for name in ("y", "dx"):
                longest = np.max([part.shape for part in wanted[name]], axis=0)
                for rank, part in enumerate(wanted[name]):
                    full = np.zeros(longest)
                    full[tuple(slice(size) for size in part.shape)] = part
                    what = f"{case.id}, check_vma={check_vma}: {name} of rank {rank}"
                    assert_within(found[name][rank], full, DISTRIBUTED_FLOAT64, what)
