"""The MLP whose weights, and tokens, are split over gloo ranks: float64 against one process, counts, sizes, errors.

What runs on the ranks is in ranks_tensor_mlp.py.
"""

from typing import Any

import pytest
import torch

from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
HIDDEN, FEATURES, OUT = 6, 16, 5


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.mlp.ranks_torch_tensor_mlp:{function}", **arguments)


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
            assert answer["collectives"] == {
                "_allgather_base_": 12,
                "_reduce_scatter_base_": 8 if needs_dx else 4,
            }
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
    """2 R t H elements in forward, and of x and dy together in backward; none is left over. T H would be twice that here."""
    t = 32 // world // 4
    for answer in run(pools, world, "forward_only"):
        assert answer["live"] == [2, 2 * world * t * HIDDEN]
        assert answer["largest"] < 32 * HIDDEN
        assert answer["error"] <= DISTRIBUTED_FLOAT64
    for answer in run(pools, world, "mlp"):
        assert answer["live"] == [2, world * t * (HIDDEN + max(HIDDEN, OUT)), 0]


def test_a_third_gathered_shard_would_be_seen(pools):
    assert run(pools, 2, "held") == [[2, 3]] * 2


@pytest.mark.parametrize("sizes", [(9, 4), (9, 0)], ids=str)
def test_two_gathered_shards_of_padded_parts(pools, sizes):
    for answer in run(pools, 2, "mlp", sizes=sizes, num_shards=3):
        assert answer["live"] == [2, 2 * 3 * (HIDDEN + max(HIDDEN, OUT)), 0]


def test_the_next_shard_is_gathered_and_the_one_before_is_scattered_under_products(pools):
    """Of three shards: gathers that had arrived, gathers and reduce-scatters under way, product after product.

    While y of a shard is computed, that of the one before is under way until its own last product needs the memory. In
    backward dy arrives under the recomputation, and x of the next shard under dx and the gradients of gate and up, under
    which dx is on its way as well.
    """
    for answer in run(pools, 2, "under_way"):
        assert answer["forward"] == [[1, 1, 0], [2, 1, 1], [2, 1, 0], [3, 0, 1], [3, 0, 0]]
        first = [[1, 1, 0], [2, 0, 0], [2, 1, 0], [2, 1, 1]]
        middle = [[3, 1, 1], [4, 0, 1], [4, 1, 0], [4, 1, 1]]
        last = [[5, 1, 1], [6, 0, 1], [6, 0, 0], [6, 0, 1]]
        assert answer["backward"] == first + middle + last


def test_kept_shards_are_gathered_under_products_too(pools):
    """In forward for gate and up, then y of all; in backward dy of a shard comes first, x is under way meanwhile."""
    for answer in run(pools, 2, "under_way", keep=1.0):
        assert answer["forward"] == [[1, 1, 0], [2, 1, 0], [3, 0, 0]]
        first = [[1, 1, 0], [1, 2, 0], [2, 1, 1]]
        middle = [[3, 1, 1], [3, 2, 0], [4, 1, 1]]
        last = [[5, 1, 1], [5, 1, 0], [6, 0, 1]]
        assert answer["backward"] == first + middle + last


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
        assert answer["live"] == [2, 2 * world * 64 * 64]
        assert answer["largest"] < 512 * world * 64


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch was built without oneDNN")
def test_peak_bytes_of_products_that_bring_their_own_memory(pools):
    for answer in run(pools, 2, "peaks", onednn=True):
        assert abs(answer["backward"] - answer["formula"]) <= COST_BYTES * answer["formula"], answer
        assert answer["forward"] <= answer["formula"]
        assert answer["live"] == [2, 2 * 2 * 64 * 64]
        assert answer["products"] == 8 * (3 + 2 + 1 + 2)  # y; gate and up once more; dh; dx


BFLOAT16: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "4": (4, {}),
    "2, tensor": (2, {"sequence_parallel": False}),
    "4, tensor": (4, {"sequence_parallel": False}),
    "2, uneven": (2, {"sizes": (21, 8), "num_shards": 3, "keep": 0.4}),
    "4, uneven": (4, {"sizes": (9, 0, 13, 4), "num_shards": 3}),
    "subset": (4, {"group": "subset"}),
    "subset, tensor": (4, {"group": "subset", "sequence_parallel": False}),
}


@pytest.mark.parametrize(("world", "options"), BFLOAT16.values(), ids=BFLOAT16)
def test_bfloat16(pools, world, options):
    """As exact as the untiled MLP on one process, although sums over ranks are rounded."""
    answers = [found for found in run(pools, world, "mlp", compute="bfloat16", **options) if found is not None]
    assert len(answers) == (2 if "group" in options else world)
    for answer in answers:
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
