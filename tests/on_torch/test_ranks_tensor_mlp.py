"""The MLP whose weights, and tokens, are split over gloo ranks: float64 against one process, counts, sizes, errors.

What runs on the ranks is in ranks_tensor_mlp.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared_specs import UnsupportedError
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks
from tiled_torch.parallel import TensorParallelTiledMLP, tensor_parallel_mlp

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
HIDDEN, FEATURES, OUT = 6, 16, 5


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    with Ranks(world=2) as two, Ranks(world=4) as four:
        yield {2: two, 4: four}


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.on_torch.ranks_tensor_mlp:{function}", **arguments)


def assert_close(answers: list[Any], results: int) -> None:
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert len(errors) == results
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, f"rank {rank}: {errors}"


CASES: dict[str, dict[str, Any]] = {
    "sequence": {},
    "tensor": {"sequence_parallel": False},
    "one shard": {"num_shards": 1},
    "ragged": {"num_shards": 3},
    "shard_tokens": {"num_shards": None, "shard_tokens": 3},
    "automatic": {"num_shards": None},
    "tensor, automatic": {"num_shards": None, "sequence_parallel": False},
    "keep": {"keep": 0.5},
    "keep all": {"keep": 1.0},
    "keep, ragged": {"keep": 0.5, "num_shards": 3},
    "tensor, keep": {"sequence_parallel": False, "keep": 0.5},
    "plain": {"gated": False},
    "tensor, plain": {"sequence_parallel": False, "gated": False},
    "plain, keep": {"gated": False, "keep": 0.5},
    "no bias": {"bias": False},
    "tensor, no bias": {"sequence_parallel": False, "bias": False},
    "batched": {"batched": True},
    "tensor, batched": {"sequence_parallel": False, "batched": True},
    "checkpointed": {"checkpointed": True},
    "tensor, checkpointed": {"sequence_parallel": False, "checkpointed": True},
    "checkpointed, keep": {"checkpointed": True, "keep": 0.5},
    "main_grad": {"main_grad": True},
    "tensor, main_grad": {"sequence_parallel": False, "main_grad": True},
    "DTensor": {"layout": "dtensor"},
    "tensor, DTensor": {"layout": "dtensor", "sequence_parallel": False},
    "DTensor, main_grad": {"layout": "dtensor", "main_grad": True},
    "no tokens": {"tokens": 0},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_against_one_process(pools, world, name):
    """y, dx and every weight's and bias's gradient, of this rank's tokens and features."""
    options = CASES[name]
    answers = run(pools, world, "mlp", **options)
    matrices = 3 if options.get("gated", True) else 2
    assert_close(answers, 2 + matrices * (2 if options.get("bias", True) else 1))
    for answer in answers:
        assert answer["flags"]
        assert answer["dtensors"]


SIZES = {
    2: [(9, 4), (4, 9), (8, 0), (0, 8), (1, 0), (7, 8)],
    4: [(5, 5, 4, 4), (9, 0, 3, 1), (0, 0, 0, 5), (7, 6, 5, 0)],
}


@pytest.mark.parametrize(("world", "sizes"), [(world, sizes) for world in WORLDS for sizes in SIZES[world]], ids=str)
def test_ranks_with_different_numbers_of_tokens(pools, world, sizes):
    """One with none included; as many collectives on every rank, those of the longest."""
    answers = run(pools, world, "mlp", sizes=sizes, num_shards=3, keep=0.4)
    assert_close(answers, 8)
    shards = -(-max(sizes) // -(-max(sizes) // 3))
    for answer in answers:
        assert answer["forward"] == {"_allgather_base_": shards, "_reduce_scatter_base_": shards}


@pytest.mark.parametrize("group", ["mesh", "mesh dim", "subset"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_other_groups(pools, group, sequence_parallel):
    """The ranks outside are not waited for, and two groups do not disturb each other."""
    answers = run(pools, 4, "mlp", group=group, sequence_parallel=sequence_parallel)
    inside = [answer for answer in answers if answer is not None]
    assert len(inside) == (2 if group == "subset" else 4)
    assert_close(inside, 8)


@pytest.mark.parametrize(
    "frozen",
    [("x",), ("w_gate", "w_up"), ("w_down", "b_down"), ("x", "w_gate", "w_up", "w_down"), ("b_gate", "b_up", "b_down")],
    ids=" ".join,
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_frozen_operands(pools, sequence_parallel, frozen):
    """What is frozen gets no gradient, and dx that nobody needs is not reduced."""
    answers = run(pools, 2, "mlp", frozen=frozen, sequence_parallel=sequence_parallel)
    assert_close(answers, 8 - len(frozen))
    needs_dx = "x" not in frozen
    for answer in answers:
        if sequence_parallel:
            assert answer["collectives"] == {"_allgather_base_": 12, "_reduce_scatter_base_": 8 if needs_dx else 4}
        else:
            assert answer["collectives"] == {"allreduce_": 2 if needs_dx else 1}


def flop(tokens: int, ranks: int, *, recomputed: float) -> int:
    """Of the products of forward and backward: gate and up with H, down with H_out. recomputed: fraction of the shards."""
    product = 2 * tokens * (FEATURES // ranks)
    return int(product * (HIDDEN * (2 + 2 * recomputed + 4) + 3 * OUT))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("keep", [0.0, 0.5])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_flop_and_collectives(pools, world, sequence_parallel, keep, checkpointed):
    """22 - 4f THI / R, and 22 under checkpointing, whose replay stops before the MLP's products and collectives.

    Kept shards are gathered once for their gate and up and never for y; a replay gathers them again.
    """
    answers = run(
        pools, world, "mlp", keep=keep, checkpointed=checkpointed, sequence_parallel=sequence_parallel, tokens=32
    )
    for answer in answers:
        assert answer["flop"] == flop(32, world, recomputed=1.0 if checkpointed else 1.0 - keep)
        if not sequence_parallel:
            assert answer["forward"] == {"allreduce_": 1}
            assert answer["collectives"] == {"allreduce_": 2}
            continue
        replayed = 4 * keep if checkpointed else 0
        assert answer["forward"] == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}
        assert answer["collectives"] == {"_allgather_base_": 12 + replayed, "_reduce_scatter_base_": 8}


@pytest.mark.parametrize("world", WORLDS)
def test_two_gathered_shards_at_a_time(pools, world):
    """2 R t H elements in forward, in backward as many of x and of dy; none is left over. T H would be twice that here."""
    t = 32 // world // 4
    for answer in run(pools, world, "forward_only"):
        assert answer["live"] == [2, 2 * world * t * HIDDEN]
        assert answer["largest"] < 32 * HIDDEN
        assert answer["error"] <= DISTRIBUTED_FLOAT64
    for answer in run(pools, world, "mlp"):
        assert answer["live"] == [4, 2 * world * t * (HIDDEN + OUT), 0]


def test_a_third_gathered_shard_would_be_seen(pools):
    assert run(pools, 2, "held") == [[2, 3]] * 2


@pytest.mark.parametrize("sizes", [(9, 4), (9, 0)], ids=str)
def test_two_gathered_shards_of_padded_parts(pools, sizes):
    for answer in run(pools, 2, "mlp", sizes=sizes, num_shards=3):
        assert answer["live"] == [4, 2 * 2 * 3 * (HIDDEN + OUT), 0]


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_without_gradients(pools, keep):
    """Nothing is kept: every shard is gathered once."""
    for answer in run(pools, 2, "forward_only", keep=keep):
        assert answer["collectives"] == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}
        assert answer["error"] <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", WORLDS)
def test_peak_bytes(pools, world, dtype, gated):
    """As `sequence_costs.sequence_peak_bytes` says; and no storage of either pass is as large as [T, H]."""
    for answer in run(pools, world, "peaks", dtype=dtype, gated=gated):
        assert abs(answer["backward"] - answer["formula"]) <= COST_BYTES * answer["formula"], answer
        assert answer["forward"] <= answer["formula"]
        assert answer["live"] == [4, 2 * world * 64 * (64 + 64)]
        assert answer["largest"] < 512 * world * 64


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16(pools, world, sequence_parallel):
    """As exact as the untiled MLP on one process, although sums over ranks are rounded."""
    for answer in run(pools, world, "mlp", compute="bfloat16", sequence_parallel=sequence_parallel):
        for name, error in answer["errors"].items():
            assert error <= limit(answer["baseline"][name], "bfloat16"), name


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_autocast(pools, sequence_parallel):
    for answer in run(pools, 2, "other_dtypes", sequence_parallel=sequence_parallel):
        assert answer["dtypes"] == ["torch.bfloat16", "torch.float32"]
        for name, (ours, theirs) in answer["errors"].items():
            assert ours <= limit(theirs, "bfloat16"), name


def test_a_group_of_one_rank_is_free(pools):
    assert run(pools, 2, "one_rank") == [{"same": True, "collectives": 0}] * 2


@pytest.mark.parametrize(
    ("gated", "bias", "sequence_parallel"), [(True, True, True), (True, False, False), (False, True, False)]
)
@pytest.mark.parametrize("world", WORLDS)
def test_module(pools, world, gated, bias, sequence_parallel):
    answers = run(pools, world, "module", gated=gated, bias=bias, sequence_parallel=sequence_parallel)
    assert_close(answers, 1 + (3 if gated else 2) * (1 + bias))
    for answer in answers:
        assert answer["same"]
        assert answer["dims"]["w_up"] == 0
        assert answer["dims"]["w_down"] == 1
        assert answer["dims"].get("b_down", -1) == -1
        assert f"of {FEATURES}" in answer["repr"]


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("kind", ["dtensor", "module"])
def test_beside_fsdp2_on_another_mesh_dim(pools, kind, sequence_parallel):
    for errors in run(pools, 4, "data_and_tensor", kind=kind, sequence_parallel=sequence_parallel):
        assert len(errors) == 7
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, errors


def test_inside_torch_compile(pools):
    assert run(pools, 2, "compiled") == [{"same": True}] * 2


NAME = "tensor_parallel_mlp"
REFUSED = {
    "sequence_parallel": f"{NAME}: sequence_parallel must be True or False, got int.",
    "split_sizes alone": f"{NAME}: split_sizes must be left out without sequence_parallel, got (8, 8). It says how many",
    "split_sizes kind": f"{NAME}: split_sizes must be a sequence of integers or None, got int.",
    "split_sizes length": f"{NAME}: split_sizes must be of one size for each of the 2 ranks, got [8, 8, 8].",
    "split_sizes of another": f"{NAME}: split_sizes must be 8 for rank ",
    "negative split_sizes": f"{NAME}: split_sizes must be >= 0, got [-8, 8].",
    "x": f"{NAME}: x must be a plain tensor, got a DTensor. Convert it with to_local()",
    "one DTensor": f"{NAME}: w_gate must be a DTensor as the other weights are, got Tensor.",
    "placement": f"{NAME}: w_down must be sharded by dim 1 over one mesh of one dim, got (Shard(dim=0),) over ",
    "group beside a DTensor": f"{NAME}: group must be left out beside a DTensor, got DeviceMesh",
    "mesh": f"{NAME}: group must be a mesh of one dim, got one of 2.",
    "group": f"{NAME}: group must be a process group, a DeviceMesh or None, got str.",
    "whole w_down": f"{NAME}: w_down must be [out, intermediate] = [5, 8], got [5, 16].",
    "num_shards": f"{NAME}: num_shards must be >= 1, got 0 (x is [8, 6]).",
    "deterministic": f"{NAME}: deterministic must be False here, got True. Sums over ranks are",
    "budget": f"{NAME}: memory_budget must be >= ",
    "module": "TensorParallelTiledMLP: intermediate_size must be a multiple of the 2 ranks it is split over, got 15.",
    "create_graph": f"{NAME}: create_graph must be False in backward, got True.",
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses(pools, what):
    """On all ranks, so that none waits for another."""
    for message in run(pools, 2, "refused", what=what):
        assert message.startswith(REFUSED[what])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_rank_that_never_comes(pools, sequence_parallel):
    """The others wait for the group's timeout, and say who they are and what they waited for."""
    first, second = run(pools, 2, "absent", sequence_parallel=sequence_parallel)
    collective = "all-gather" if sequence_parallel else "all-reduce"
    assert first.startswith(
        f"{NAME}: {collective} failed on rank 0 of 2. Every rank of the group has to make this call"
    )
    assert second.startswith(f"{NAME}: w_up must be [intermediate, hidden] = [8, 6], got [6, 8].")


def test_without_a_process_group():
    with pytest.raises(UnsupportedError, match=r"^tensor_parallel_mlp: group must be usable here"):
        tensor_parallel_mlp(torch.ones(2, 4), None, torch.ones(3, 4), torch.ones(4, 3))
    with pytest.raises(UnsupportedError, match=r"^TensorParallelTiledMLP: group must be usable here"):
        TensorParallelTiledMLP(4, 8)
