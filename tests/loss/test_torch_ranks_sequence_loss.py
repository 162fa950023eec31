"""The vocabulary-parallel loss whose tokens are split over gloo ranks too: float64 against one process, counts, sizes.

What runs on the ranks is in ranks_sequence_loss.py.
"""

from typing import Any

import pytest

from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
HIDDEN = 4
OUTPUTS = ("log_probs", "lse", "entropy", "accuracy")


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.loss.ranks_torch_sequence_loss:{function}", **arguments)


def assert_close(answers: list[Any], gradients: int) -> None:
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert sum(name.startswith("d") for name in errors) == gradients
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, f"rank {rank}: {errors}"


HEADS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "num_valid": {"num_valid": 17},
    "class_weight": {"class_weight": True, "label_smoothing": 0.2},
    "softcap": {"logit_softcap": 3.0, "logit_scale": 0.7, "z_loss": 0.1},
    "outputs": {"outputs": OUTPUTS},
    "accuracy": {"outputs": ("accuracy",)},
    "lse": {"outputs": ("lse",), "reduction": "sum"},
    "everything": {
        "outputs": OUTPUTS,
        "reduction": "none",
        "label_smoothing": 0.2,
        "class_weight": True,
        "z_loss": 0.1,
        "logit_softcap": 3.0,
    },
    "vocab_shards": {"vocab_shards": 3},
    "vocab_shards outputs": {"vocab_shards": 3, "outputs": OUTPUTS, "label_smoothing": 0.2},
    "fewer entries than ranks": {"vocab": 3, "label_smoothing": 0.2},
    "dtensor": {"layout": "dtensor"},
    "no bias": {"bias": False},
    "no tokens": {"tokens": 0, "outputs": ("lse",)},
    "no labels": {"no_labels": True},
    "one shard": {"num_shards": 1},
    "ragged": {"num_shards": 3},
    "shard_tokens": {"num_shards": None, "shard_tokens": 3},
    "automatic": {"num_shards": None},
    "batched": {"batched": True, "reduction": "none"},
    "twice": {"twice": True},
    "twice none": {"twice": True, "reduction": "none"},
    "checkpointed": {"checkpointed": True},
    "checkpointed none": {"checkpointed": True, "reduction": "none", "outputs": OUTPUTS},
    "main_grad": {"main_grad": True},
    "main_grad, dtensor": {"main_grad": True, "layout": "dtensor"},
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("world", WORLDS)
def test_head(pools, world, name):
    """Results, dx of the rank's tokens, dweight and dbias of its entries."""
    answers = run(pools, world, "head", **HEADS[name])
    assert_close(answers, 2 if HEADS[name].get("bias") is False else 3)


SIZES = {2: [(9, 4), (8, 0), (0, 8), (1, 0)], 4: [(5, 5, 4, 4), (9, 0, 3, 1), (0, 0, 0, 5)]}


@pytest.mark.parametrize("options", [{}, {"outputs": OUTPUTS, "reduction": "none"}], ids=["mean", "outputs"])
@pytest.mark.parametrize(("world", "sizes"), [(world, sizes) for world in WORLDS for sizes in SIZES[world]], ids=str)
def test_ranks_with_different_numbers_of_tokens(pools, world, sizes, options):
    """One with none included."""
    answers = run(pools, world, "head", sizes=sizes, num_shards=3, **options)
    assert_close(answers, 3)
    assert len({str(answer["collectives"]) for answer in answers}) == 1


@pytest.mark.parametrize("group", ["mesh", "mesh dim", "subset"])
def test_other_groups(pools, group):
    answers = [answer for answer in run(pools, 4, "head", group=group) if answer is not None]
    assert len(answers) == (2 if group == "subset" else 4)
    assert_close(answers, 3)


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("weight", "bias"), ("x", "weight", "bias")], ids=" ".join)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_operands(pools, reduction, frozen):
    answers = run(pools, 2, "head", frozen=frozen, reduction=reduction)
    assert_close(answers, 3 - len(frozen))
    for answer in answers:
        assert ("_reduce_scatter_base_" in answer["collectives"]) == ("x" not in frozen)


@pytest.mark.parametrize("vocab_shards", [None, 3])
@pytest.mark.parametrize("world", WORLDS)
def test_collectives(pools, world, vocab_shards):
    """Per shard: one gather of x, two reductions of numbers per token, one scatter of dx. Once: the targets."""
    for answer in run(pools, world, "head", vocab_shards=vocab_shards):
        assert answer["collectives"] == {
            "_allgather_base_": 4 + 1,
            "allreduce_": 2 * 4,
            "_reduce_scatter_base_": 4,
        }
    for answer in run(pools, world, "head", vocab_shards=vocab_shards, reduction="none"):
        backward = 4 + 2  # x again; targets; lse with the upstream gradients
        assert answer["collectives"] == {
            "_allgather_base_": 4 + 1 + backward,
            "allreduce_": 2 * 4,
            "_reduce_scatter_base_": 4,
        }


@pytest.mark.parametrize("world", WORLDS)
def test_two_gathered_shards_at_a_time(pools, world):
    """2 R t H elements; none is left over, and nothing has the size of [T, H] or of all logits of a rank's entries."""
    for answer in run(pools, world, "head"):
        pieces, elements, left = answer["gathered"]
        assert (pieces, elements, left) == (2, 2 * 16 * HIDDEN, 0)
        assert answer["largest"] == max(16 * answer["entries"], answer["entries"] * HIDDEN)
    for answer in run(pools, world, "head", vocab=17, tokens=128):
        assert answer["gathered"] == [2, 2 * 32 * HIDDEN, 0]
        assert answer["largest"] < 128 * HIDDEN


def test_the_next_shard_is_gathered_and_the_one_before_is_scattered_under_products(pools):
    """Of three shards: gathers that had arrived, gathers and reduce-scatters under way, product after product.

    dx of a shard is under way while dweight and the logits of the next are computed. Losses per token come first and make
    no dx; their backward gathers the upstream gradients, and every shard again.
    """
    shards = [[[1, 1, 0], [1, 1, 1]], [[2, 1, 1], [2, 1, 0], [2, 1, 1]], [[3, 0, 1], [3, 0, 0], [3, 0, 1]]]
    both = [numbers for shard in shards for numbers in shard]
    for answer in run(pools, 2, "under_way"):
        assert answer == {
            "mean": both,
            "mean backward": [],
            "none": [[1, 1, 0], [2, 1, 0], [3, 0, 0]],
            "none backward": [[1 + arrived, *under_way] for arrived, *under_way in both],
        }


@pytest.mark.parametrize("world", WORLDS)
def test_peak_bytes(pools, world):
    for answer in run(pools, world, "peaks"):
        assert abs(answer["peak"] - answer["formula"]) <= COST_BYTES * answer["formula"], answer
        assert answer["gathered"] == [2, 2 * world * 32 * 64]


def test_flop(pools):
    """6 THV / R, as of whole tokens."""
    for answer in run(pools, 2, "head", tokens=64):
        assert answer["flop"] == 6 * 64 * HIDDEN * answer["entries"]


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_holds_the_same_scalars(pools, world):
    first, *others = run(pools, world, "same_everywhere")
    assert others == [first] * (world - 1)


BFLOAT16: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "4": (4, {}),
    "2, none": (2, {"reduction": "none"}),
    "4, none": (4, {"reduction": "none"}),
    "2, uneven": (2, {"sizes": (21, 43)}),
    "4, uneven": (4, {"sizes": (9, 0, 13, 42)}),
    "subset": (4, {"group": "subset"}),
}


@pytest.mark.parametrize(("world", "options"), BFLOAT16.values(), ids=BFLOAT16)
def test_bfloat16(pools, world, options):
    answers = [found for found in run(pools, world, "bfloat16_head", **options) if found is not None]
    assert len(answers) == (2 if "group" in options else world)
    for answer in answers:
        for name, (ours, theirs) in answer.items():
            assert ours <= limit(theirs, "bfloat16"), name


NAME = "vocab_parallel_linear_cross_entropy"
REFUSED = {
    "sequence_parallel": f"{NAME}: sequence_parallel must be True or False, got str.",
    "split_sizes alone": f"{NAME}: split_sizes must be left out without sequence_parallel, got (6, 6). It says how many",
    "split_sizes length": f"{NAME}: split_sizes must be of one size for each of the 2 ranks, got [6].",
    "split_sizes of another": f"{NAME}: split_sizes must be 6 for rank ",
    "target of one rank": f"{NAME}: targets must be in [0, 10) or ignore_index = -100, got 10. ",
    "targets of all": f"{NAME}: targets must be [6], got [12] (x is [6, 4]).",
}


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses(pools, what):
    """On all ranks, so that none waits for another; a wrong target of one rank as well."""
    for message in run(pools, 2, "refused", what=what):
        assert message.startswith(REFUSED[what])
