"""The vocabulary-parallel loss whose tokens are split over gloo ranks too: float64 against one process, counts, sizes.

What runs on the ranks is in ranks_sequence_loss.py.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from shared_specs.loss.costs import LossShape, chosen_shard_tokens, runs_alone
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.ranks_torch_each import run_each
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
HIDDEN = 4
OUTPUTS = ("log_probs", "lse", "entropy", "accuracy")


def run(pools: dict[int, Ranks], world: int, function: str, *cases: dict[str, Any]) -> list[list[Any]]:
    """For every case what the ranks return."""
    return run_each(pools[world], f"tests.loss.ranks_torch_sequence_loss:{function}", cases)


def assert_close(answers: list[Any], gradients: int, what: object) -> None:
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert sum(name.startswith("d") for name in errors) == gradients, what
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, f"{what}, rank {rank}: {errors}"


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
    "ranked": {"outputs": ("prediction", "top_logprobs"), "top_k": 4},
    "everything": {
        "outputs": OUTPUTS,
        "reduction": "none",
        "label_smoothing": 0.2,
        "class_weight": True,
        "z_loss": 0.1,
        "logit_softcap": 3.0,
    },
    "vocab_shards": {"vocab_shards": 3},
    "weighted": {"token_weight": True, "class_weight": True},
    "weighted none": {"token_weight": True, "reduction": "none", "vocab_shards": 2},
    "vocab_shards none": {"vocab_shards": 3, "reduction": "none"},
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


# Where four ranks are more than two: parts of other sizes, parts without an entry, sums of more than two.
FOUR = (
    "mean",
    "none",
    "everything",
    "vocab_shards outputs",
    "fewer entries than ranks",
    "dtensor",
    "ragged",
    "automatic",
)


@pytest.fixture(scope="module")
def heads(pools: dict[int, Ranks]) -> Callable[[int], dict[str, list[Any]]]:
    """The ranks' answers for every head that a number of ranks tries."""

    @cache
    def of(world: int) -> dict[str, list[Any]]:
        names = FOUR if world == 4 else tuple(HEADS)
        return dict(zip(names, run(pools, world, "head", *(HEADS[name] for name in names)), strict=True))

    return of


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_head(heads, world):
    """Results, dx of the rank's tokens, dweight and dbias of its entries."""
    for name, answers in heads(world).items():
        assert_close(answers, 2 if HEADS[name].get("bias") is False else 3, name)


SIZES = {2: [(9, 4), (8, 0), (0, 8), (1, 0)], 4: [(5, 5, 4, 4), (9, 0, 3, 1), (0, 0, 0, 5)]}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_with_different_numbers_of_tokens(pools, world):
    """One with none included."""
    options: list[dict[str, Any]] = [{}, {"outputs": OUTPUTS, "reduction": "none"}]
    cases = [{"sizes": sizes, "num_shards": 3, **given} for sizes in SIZES[world] for given in options]
    for case, answers in zip(cases, run(pools, world, "head", *cases), strict=True):
        assert_close(answers, 3, case)
        assert len({str(answer["collectives"]) for answer in answers}) == 1, case


def test_other_groups(pools):
    cases = [{"group": group} for group in ("mesh", "mesh dim", "subset")]
    for found, inside in zip(run(pools, 4, "head", *cases), (4, 4, 2), strict=True):
        answers = [answer for answer in found if answer is not None]
        assert len(answers) == inside
        assert_close(answers, 3, inside)


def test_frozen_operands(pools):
    frozen = (("x",), ("weight",), ("weight", "bias"), ("x", "weight", "bias"))
    cases = [{"frozen": names, "reduction": reduction} for names in frozen for reduction in ("mean", "none")]
    for case, answers in zip(cases, run(pools, 2, "head", *cases), strict=True):
        assert_close(answers, 3 - len(case["frozen"]), case)
        for answer in answers:
            assert ("_reduce_scatter_base_" in answer["collectives"]) == ("x" not in case["frozen"]), case


ALL_ROWS: dict[str, dict[str, Any]] = {
    name: HEADS[name] | {"ignored": (0.0,) * 2} for name in ("mean", "none", "vocab_shards", "vocab_shards none")
}


@pytest.fixture(scope="module")
def of_all_rows(pools: dict[int, Ranks]) -> Callable[[int], dict[str, list[Any]]]:
    """The ranks' answers where every label counts."""

    @cache
    def of(world: int) -> dict[str, list[Any]]:
        names = ("mean", "none") if world == 4 else tuple(ALL_ROWS)
        cases = [ALL_ROWS[name] | {"ignored": (0.0,) * world} for name in names]
        return dict(zip(names, run(pools, world, "head", *cases), strict=True))

    return of


@pytest.mark.parametrize("world", WORLDS)
def test_collectives(of_all_rows, world):
    """Per shard: one gather of x, two reductions of numbers per token, one scatter of dx. Once: the targets."""
    backward = 4 + 2  # of losses per token: x again; targets; lse with the upstream gradients
    for name, answers in of_all_rows(world).items():
        assert_close(answers, 3, name)
        for answer in answers:
            assert answer["collectives"] == {
                "_allgather_base_": 4 + 1 + (backward if "none" in name else 0),
                "allreduce_": 2 * 4,
                "_reduce_scatter_base_": 4,
            }, name


@pytest.mark.parametrize("world", WORLDS)
def test_two_gathered_shards_at_a_time(pools, of_all_rows, world):
    """2 R t H elements; none is left over, and nothing has the size of [T, H] or of all logits of a rank's entries."""
    for answer in of_all_rows(world)["mean"]:
        pieces, elements, left = answer["gathered"]
        assert (pieces, elements, left) == (2, 2 * 16 * HIDDEN, 0)
        assert answer["largest"] == max(16 * answer["entries"], answer["entries"] * HIDDEN)
    for answer in run(pools, world, "head", {"vocab": 17, "tokens": 128, "ignored": (0.0,) * world})[0]:
        assert answer["gathered"] == [2, 2 * 32 * HIDDEN, 0]
        assert answer["largest"] < 128 * HIDDEN


IGNORED: dict[int, list[tuple[float, ...]]] = {
    2: [(0.1, 0.1), (0.5, 0.5), (0.9, 0.9), (1.0, 1.0), (0.9, 0.5), (1.0, 0.5), (1.0, 0.0)],
    4: [(0.5, 0.5, 0.5, 0.5), (0.9, 1.0, 0.5, 0.9)],
}


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("world", WORLDS)
def test_ignored_rows_are_not_multiplied(pools, world, reduction):
    """Each rank's own rows that count, in shards that all have: FLOP of as many rows of each as the rank with most labels has.

    No collective more than of all rows, and no other wait for the device than for the labels of all.
    """
    cases = [{"ignored": shares, "reduction": reduction, "token_weight": True} for shares in IGNORED[world]]
    for shares, answers in zip(IGNORED[world], run(pools, world, "head", *cases), strict=True):
        assert_close(answers, 3, shares)
        most = 64 // world - round(min(shares) * (64 // world))
        if runs_alone(64 // world, most):
            shards = -(-most // chosen_shard_tokens(_shape(world), 16 // world))
        else:
            most, shards = 64 // world, 4
        for answer in answers:
            units = 6 if reduction == "mean" else 8
            assert answer["flop"] == units * world * most * HIDDEN * answer["entries"], shares
            per_token = 2 if reduction == "mean" else 5  # targets and weights; again, and lse with upstream gradients
            passes = 1 if reduction == "mean" else 2
            expected = {
                "_allgather_base_": shards * passes + (per_token if most else 1),
                "allreduce_": 2 * shards,
                "_reduce_scatter_base_": shards,
            }
            assert answer["collectives"] == {name: count for name, count in expected.items() if count}, shares
            assert answer["waits"] == answers[0]["waits"]


def _shape(world: int) -> LossShape:
    return LossShape(tokens=64 // world, hidden=-(-HIDDEN // world), vocab=-(-103 // world))


def test_the_next_shard_is_gathered_and_the_one_before_is_scattered_under_products(pools):
    """Of three shards: gathers that had arrived, gathers and reduce-scatters under way, product after product.

    dx of a shard is under way while dweight and the logits of the next are computed. Losses per token come first and make
    no dx; their backward gathers the upstream gradients, and every shard again.
    """
    shards = [[[1, 1, 0], [1, 1, 1]], [[2, 1, 1], [2, 1, 0], [2, 1, 1]], [[3, 0, 1], [3, 0, 0], [3, 0, 1]]]
    both = [numbers for shard in shards for numbers in shard]
    for answer in run(pools, 2, "under_way", {})[0]:
        assert answer == {
            "mean": both,
            "mean backward": [],
            "none": [[1, 1, 0], [2, 1, 0], [3, 0, 0]],
            "none backward": [[1 + arrived, *under_way] for arrived, *under_way in both],
        }


@pytest.mark.parametrize("world", WORLDS)
def test_peak_bytes(pools, world):
    """Where rows are chosen, copies of them included: no more."""
    for share, answers in zip((0.0, 0.5), run(pools, world, "peaks", {}, {"share": 0.5}), strict=True):
        for answer in answers:
            assert answer["peak"] <= (1 + COST_BYTES) * answer["formula"], (share, answer)
            if not share:
                assert answer["peak"] >= (1 - COST_BYTES) * answer["formula"], answer
                assert answer["gathered"] == [2, 2 * world * 32 * 64]


def test_flop(of_all_rows):
    """6 THV / R, as of whole tokens."""
    for answer in of_all_rows(2)["mean"]:
        assert answer["flop"] == 6 * 64 * HIDDEN * answer["entries"]


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_holds_the_same_scalars(pools, world):
    first, *others = run(pools, world, "same_everywhere", {})[0]
    assert others == [first] * (world - 1)


BFLOAT16: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"reduction": "none"}, {"sizes": (21, 43)}],
    4: [{}, {"reduction": "none"}, {"sizes": (9, 0, 13, 42)}, {"group": "subset"}],
}


@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16(pools, world):
    for case, found in zip(BFLOAT16[world], run(pools, world, "bfloat16_head", *BFLOAT16[world]), strict=True):
        answers = [answer for answer in found if answer is not None]
        assert len(answers) == (2 if "group" in case else world)
        for answer in answers:
            for name, (ours, theirs) in answer.items():
                assert ours <= limit(theirs, "bfloat16"), (case, name)


NAME = "vocab_parallel_linear_cross_entropy"
REFUSED = {
    "sequence_parallel": f"{NAME}: sequence_parallel must be True or False, got str.",
    "split_sizes alone": f"{NAME}: split_sizes must be left out without sequence_parallel, got (6, 6). It says how many",
    "split_sizes length": f"{NAME}: split_sizes must be of one size for each of the 2 ranks, got [6].",
    "split_sizes of another": f"{NAME}: split_sizes must be 6 for rank ",
    "target of one rank": f"{NAME}: targets must be in [0, 10) or ignore_index = -100, got 10. ",
    "targets of all": f"{NAME}: targets must be [6], got [12] (x is [6, 4]).",
}


def test_every_rank_refuses(pools):
    """On all ranks, so that none waits for another; a wrong target of one rank as well."""
    found = run(pools, 2, "refused", *({"what": what} for what in REFUSED))
    for (what, text), messages in zip(REFUSED.items(), found, strict=True):
        assert all(message.startswith(text) for message in messages), (what, messages)
