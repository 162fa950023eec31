"""The MLP whose weights, and tokens, are split over gloo ranks: float64 against one process, counts, sizes, errors.

What runs on the ranks is in ranks_tensor_mlp.py.
"""

from typing import Any

import pytest
import torch

from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.ranks_torch_each import run_each
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
HIDDEN, FEATURES, OUT = 6, 16, 5


def run(pools: dict[int, Ranks], world: int, function: str, *cases: dict[str, Any]) -> list[list[Any]]:
    """For every case what the ranks return."""
    return run_each(pools[world], f"tests.mlp.ranks_torch_tensor_mlp:{function}", cases)


def assert_close(answers: list[Any], results: int, what: object = "") -> None:
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert len(errors) == results, what
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, f"{what}, rank {rank}: {errors}"


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


# Where four ranks are more than two: sums of more than two, parts that are shorter, checkpointing's order of collectives.
FOUR = ("sequence", "tensor", "keep, ragged", "tensor, plain", "checkpointed, keep", "DTensor", "automatic")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_against_one_process(pools, world):
    """y, dx and every weight's and bias's gradient, of this rank's tokens and features."""
    names = FOUR if world == 4 else tuple(CASES)
    for name, answers in zip(names, run(pools, world, "mlp", *(CASES[name] for name in names)), strict=True):
        matrices = 3 if CASES[name].get("gated", True) else 2
        assert_close(answers, 2 + matrices * (2 if CASES[name].get("bias", True) else 1), name)
        for answer in answers:
            assert answer["flags"], name
            assert answer["dtensors"], name


SIZES = {
    2: [(9, 4), (4, 9), (8, 0), (0, 8), (1, 0), (7, 8)],
    4: [(5, 5, 4, 4), (9, 0, 3, 1), (0, 0, 0, 5), (7, 6, 5, 0)],
}


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_with_different_numbers_of_tokens(pools, world):
    """One with none included; as many collectives on every rank, those of the longest."""
    cases = [{"sizes": sizes, "num_shards": 3, "keep": 0.4} for sizes in SIZES[world]]
    for sizes, answers in zip(SIZES[world], run(pools, world, "mlp", *cases), strict=True):
        assert_close(answers, 8, sizes)
        shards = -(-max(sizes) // -(-max(sizes) // 3))
        for answer in answers:
            assert answer["forward"] == {"_allgather_base_": shards, "_reduce_scatter_base_": shards}, sizes


def test_other_groups(pools):
    """The ranks outside are not waited for, and two groups do not disturb each other."""
    cases = [
        {"group": group, "sequence_parallel": s} for group in ("mesh", "mesh dim", "subset") for s in (True, False)
    ]
    for case, answers in zip(cases, run(pools, 4, "mlp", *cases), strict=True):
        inside = [answer for answer in answers if answer is not None]
        assert len(inside) == (2 if case["group"] == "subset" else 4)
        assert_close(inside, 8, case)


FROZEN = (
    ("x",), ("w_gate", "w_up"), ("w_down", "b_down"), ("x", "w_gate", "w_up", "w_down"), ("b_gate", "b_up", "b_down"),
)  # fmt: skip


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_frozen_operands(pools, sequence_parallel):
    """What is frozen gets no gradient, and dx that nobody needs is not reduced."""
    cases = [{"frozen": frozen, "sequence_parallel": sequence_parallel} for frozen in FROZEN]
    for frozen, answers in zip(FROZEN, run(pools, 2, "mlp", *cases), strict=True):
        assert_close(answers, 8 - len(frozen), frozen)
        dx = "x" not in frozen
        expected = {"_allgather_base_": 12, "_reduce_scatter_base_": 8 if dx else 4}
        if not sequence_parallel:
            expected = {"allreduce_": 2 if dx else 1}
        assert all(answer["collectives"] == expected for answer in answers), frozen


def flop(tokens: int, ranks: int, *, recomputed: float) -> int:
    """Of the products of forward and backward: gate and up with H, down with H_out. recomputed: fraction of the shards."""
    product = 2 * tokens * (FEATURES // ranks)
    return int(product * (HIDDEN * (2 + 2 * recomputed + 4) + 3 * OUT))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_flop_and_collectives(pools, world):
    """22 - 4f THI / R, and 22 under checkpointing, whose replay stops before the MLP's products and collectives.

    Kept shards are gathered once for their gate and up and never for y; a replay gathers them again.
    """
    cases = [
        {"keep": keep, "checkpointed": checkpointed, "sequence_parallel": sequence_parallel, "tokens": 32}
        for sequence_parallel in (True, False)
        for keep, checkpointed in ((0.0, False), (0.0, True), (0.5, False), (0.5, True))
    ]
    for case, answers in zip(cases, run(pools, world, "mlp", *cases), strict=True):
        keep, checkpointed = case["keep"], case["checkpointed"]
        forward, every = {"allreduce_": 1}, {"allreduce_": 2}
        if case["sequence_parallel"]:
            forward = {"_allgather_base_": 4, "_reduce_scatter_base_": 4}
            every = {"_allgather_base_": 12 + (4 * keep if checkpointed else 0), "_reduce_scatter_base_": 8}
        for answer in answers:
            assert answer["flop"] == flop(32, world, recomputed=1.0 if checkpointed else 1.0 - keep), case
            assert (answer["forward"], answer["collectives"]) == (forward, every), case


@pytest.mark.parametrize("world", WORLDS)
def test_two_gathered_shards_at_a_time(pools, world):
    """2 R t H elements in forward, and of x and dy together in backward; none is left over. T H would be twice that here."""
    t = 32 // world // 4
    for answer in run(pools, world, "forward_only", {})[0]:
        assert answer["live"] == [2, 2 * world * t * HIDDEN]
        assert answer["largest"] < 32 * HIDDEN
        assert answer["error"] <= DISTRIBUTED_FLOAT64
    for answer in run(pools, world, "mlp", {})[0]:
        assert answer["live"] == [2, world * t * (HIDDEN + max(HIDDEN, OUT)), 0]


def test_a_third_gathered_shard_would_be_seen(pools):
    assert run(pools, 2, "held", {}) == [[[2, 3]] * 2]


def test_two_gathered_shards_of_padded_parts(pools):
    cases = [{"sizes": sizes, "num_shards": 3} for sizes in ((9, 4), (9, 0))]
    for answers in run(pools, 2, "mlp", *cases):
        assert all(answer["live"] == [2, 2 * 3 * (HIDDEN + max(HIDDEN, OUT)), 0] for answer in answers)


def test_the_next_shard_is_gathered_and_the_one_before_is_scattered_under_products(pools):
    """Of three shards: gathers that had arrived, gathers and reduce-scatters under way, product after product.

    While y of a shard is computed, that of the one before is under way until its own last product needs the memory. In
    backward dy arrives under the recomputation, and x of the next shard under dx and the gradients of gate and up, under
    which dx is on its way as well.
    """
    for answer in run(pools, 2, "under_way", {})[0]:
        assert answer["forward"] == [[1, 1, 0], [2, 1, 1], [2, 1, 0], [3, 0, 1], [3, 0, 0]]
        first = [[1, 1, 0], [2, 0, 0], [2, 1, 0], [2, 1, 1]]
        middle = [[3, 1, 1], [4, 0, 1], [4, 1, 0], [4, 1, 1]]
        last = [[5, 1, 1], [6, 0, 1], [6, 0, 0], [6, 0, 1]]
        assert answer["backward"] == first + middle + last


def test_kept_shards_are_gathered_under_products_too(pools):
    """In forward for gate and up, then y of all; in backward dy of a shard comes first, x is under way meanwhile."""
    for answer in run(pools, 2, "under_way", {"keep": 1.0})[0]:
        assert answer["forward"] == [[1, 1, 0], [2, 1, 0], [3, 0, 0]]
        first = [[1, 1, 0], [1, 2, 0], [2, 1, 1]]
        middle = [[3, 1, 1], [3, 2, 0], [4, 1, 1]]
        last = [[5, 1, 1], [5, 1, 0], [6, 0, 1]]
        assert answer["backward"] == first + middle + last


def test_without_gradients(pools):
    """Nothing is kept: every shard is gathered once."""
    for answers in run(pools, 2, "forward_only", {"keep": 0.0}, {"keep": 0.5}):
        for answer in answers:
            assert answer["collectives"] == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}
            assert answer["error"] <= DISTRIBUTED_FLOAT64


@pytest.mark.parametrize("world", WORLDS)
def test_peak_bytes(pools, world):
    """As `sequence_costs.sequence_peak_bytes` says; and no storage of either pass is as large as [T, H]."""
    cases = [{"dtype": dtype, "gated": gated} for dtype in ("float32", "bfloat16") for gated in (True, False)]
    found = run(pools, world, "peaks", *(cases if world == 2 else cases[1:3]))
    for answer in (answer for answers in found for answer in answers):
        assert abs(answer["backward"] - answer["formula"]) <= COST_BYTES * answer["formula"], answer
        assert answer["forward"] <= answer["formula"]
        assert answer["live"] == [2, 2 * world * 64 * 64]
        assert answer["largest"] < 512 * world * 64


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch was built without oneDNN")
def test_peak_bytes_of_products_that_bring_their_own_memory(pools):
    for answer in run(pools, 2, "peaks", {"onednn": True})[0]:
        assert abs(answer["backward"] - answer["formula"]) <= COST_BYTES * answer["formula"], answer
        assert answer["forward"] <= answer["formula"]
        assert answer["live"] == [2, 2 * 2 * 64 * 64]
        assert answer["products"] == 8 * (3 + 2 + 1 + 2)  # y; gate and up once more; dh; dx


BFLOAT16: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"sequence_parallel": False}, {"sizes": (21, 8), "num_shards": 3, "keep": 0.4}],
    4: [
        {},
        {"sequence_parallel": False},
        {"sizes": (9, 0, 13, 4), "num_shards": 3},
        {"group": "subset"},
        {"group": "subset", "sequence_parallel": False},
    ],
}


@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16(pools, world):
    """As exact as the untiled MLP on one process, although sums over ranks are rounded."""
    cases = [{"compute": "bfloat16", **case} for case in BFLOAT16[world]]
    for case, found in zip(cases, run(pools, world, "mlp", *cases), strict=True):
        answers = [answer for answer in found if answer is not None]
        assert len(answers) == (2 if "group" in case else world)
        for answer in answers:
            for name, error in answer["errors"].items():
                assert error <= limit(answer["baseline"][name], "bfloat16"), (case, name)


def test_autocast(pools):
    for answers in run(pools, 2, "other_dtypes", {"sequence_parallel": True}, {"sequence_parallel": False}):
        for answer in answers:
            assert answer["dtypes"] == ["torch.bfloat16", "torch.float32"]
            for name, (ours, theirs) in answer["errors"].items():
                assert ours <= limit(theirs, "bfloat16"), name


def test_a_group_of_one_rank_is_free(pools):
    assert run(pools, 2, "one_rank", {}) == [[{"same": True, "collectives": 0}] * 2]
