"""Losses over gloo ranks in float64: a vocabulary that is split over two and four of them, and data-parallel engines.

What runs on the ranks is in ranks_loss.py and ranks_loss_engines.py; every error is relative to one process.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from shared_specs import UnsupportedError
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64, limit
from tests.core.ranks_torch_each import run_each
from tests.matrix import pairwise
from tests.ranks import Ranks
from tiled_torch.parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

pytestmark = pytest.mark.ranks

WORLDS = (2, 4)
OUTPUTS = ("log_probs", "lse", "entropy", "accuracy")


def run(pools: dict[int, Ranks], world: int, function: str, *cases: dict[str, Any]) -> list[list[Any]]:
    """For every case what the ranks return."""
    return run_each(pools[world], f"tests.loss.ranks_torch_loss:{function}", cases)


def assert_close(answers: list[Any], gradients: int, what: object) -> None:
    """Every error within the limit, of as many gradients as there should be; none in the padding, none on frozen leaves."""
    for rank, answer in enumerate(answers):
        errors = answer["errors"]
        assert sum(name.startswith("d") for name in errors) == gradients, what
        assert max(errors.values()) <= DISTRIBUTED_FLOAT64, f"{what}, rank {rank}: {errors}"
        assert answer["padding"] == 0.0, what


HEADS: dict[str, dict[str, Any]] = {
    "mean": {"every": 40},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "every": 40},
    "num_valid": {"num_valid": 17},
    "smoothing": {"label_smoothing": 0.2},
    "class_weight": {"class_weight": True, "label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.1},
    "softcap": {"logit_softcap": 3.0, "logit_scale": 0.7},
    "outputs": {"outputs": OUTPUTS},
    "everything": {
        "outputs": OUTPUTS,
        "reduction": "none",
        "label_smoothing": 0.2,
        "class_weight": True,
        "z_loss": 0.1,
        "logit_softcap": 3.0,
    },
    "accuracy": {"outputs": ("accuracy",)},
    "vocab_shards": {"vocab_shards": 3, "every": 40},
    "vocab_shards none": {"vocab_shards": 3, "reduction": "none", "every": 40},
    "vocab_shards, ignored": {"vocab_shards": 3},
    "ignored none": {"reduction": "none", "vocab_shards": 2, "label_smoothing": 0.2},
    "vocab_shards outputs": {"vocab_shards": 3, "outputs": OUTPUTS, "label_smoothing": 0.2},
    "padded": {"partition": "padded"},
    "main_grad": {"main_grad": True},
    "main_grad none": {"main_grad": True, "reduction": "none", "num_shards": 3},
    "main_grad, padded": {"main_grad": True, "partition": "padded"},
    "main_grad, dtensor": {"main_grad": True, "partition": "dtensor"},
    "main_grad, dtensor none": {"main_grad": True, "partition": "dtensor", "reduction": "none", "bias": False},
    "padded none": {"partition": "padded", "reduction": "none", "label_smoothing": 0.2, "class_weight": True},
    "weighted": {"token_weight": True, "vocab_shards": 2},
    "weighted none": {"token_weight": True, "reduction": "none", "outputs": OUTPUTS},
    "even": {"partition": "equal", "vocab": 204},
    "dtensor": {"partition": "dtensor"},
    "dtensor none": {"partition": "dtensor", "reduction": "none", "bias": False},
    "mesh": {"group": "mesh"},
    "fewer entries than ranks": {"vocab": 3, "label_smoothing": 0.2, "class_weight": True},
    "fewer entries than ranks, outputs": {"vocab": 3, "outputs": (*OUTPUTS, "prediction", "top_logprobs"), "top_k": 3},
    "ranked, padded": {"partition": "padded", "outputs": ("top_logprobs", "prediction"), "top_k": 5, "vocab_shards": 2},
    "fewer entries than ranks, DTensor": {"vocab": 5, "partition": "dtensor"},
    "fewer entries than ranks, padded": {"vocab": 5, "partition": "padded", "reduction": "none"},
    "one entry": {"vocab": 1},
    "no tokens": {"tokens": 0, "outputs": ("lse",)},
    "one shard": {"num_shards": 1},
    "twice": {"every": 40, "twice": True},
    "twice none": {"every": 40, "twice": True, "reduction": "none"},
}


# Where four ranks are more than two: parts of other sizes, parts without an entry, sums of more than two.
FOUR = ["mean", "none", "everything", "vocab_shards outputs", "padded", "dtensor none", "main_grad, padded"]
FOUR += [name for name in HEADS if name.startswith("fewer entries")]


@pytest.fixture(scope="module")
def heads(pools: dict[int, Ranks]) -> Callable[[int], dict[str, list[Any]]]:
    """The ranks' answers for every head that a number of ranks tries."""

    @cache
    def of(world: int) -> dict[str, list[Any]]:
        names = FOUR if world == 4 else list(HEADS)
        return dict(zip(names, run(pools, world, "head", *(HEADS[name] for name in names)), strict=True))

    return of


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_head(heads, world):
    for name, answers in heads(world).items():
        assert_close(answers, 2 if HEADS[name].get("bias") is False else 3, name)
        assert all(answer["flags"] for answer in answers), name


@pytest.mark.deep
def test_head_with_frozen_operands(pools):
    frozen = (("x",), ("weight",), ("weight", "bias"), ("x", "weight"))
    cases = [{"frozen": names, "reduction": kind, "every": 40} for names in frozen for kind in ("mean", "none")]
    for case, answers in zip(cases, run(pools, 2, "head", *cases), strict=True):
        assert_close(answers, 3 - len(case["frozen"]), case)
        assert all(answer["untouched"] for answer in answers)
        assert all(answer["collectives"] == 2 * 8 + ("x" not in case["frozen"]) for answer in answers), case


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("world", WORLDS)
def test_two_collectives_per_shard_and_one_shard_of_logits(heads, world):
    """And one collective for dx. No tensor holds more than [t, V / R] elements; logits of all tokens would be 8 times that."""
    for name in ("mean", "none", *(("vocab_shards", "vocab_shards none") if world == 2 else ())):
        for answer in heads(world)[name]:
            assert answer["collectives"] == 2 * 8 + 1, name
            width = -(-answer["entries"] // HEADS[name].get("vocab_shards", 1))
            assert answer["largest"] == max(64 // 8 * width, answer["entries"] * 4, 64 * 4), name


def test_a_memory_budget_gives_every_rank_the_same_plan(pools):
    """Although one rank holds an entry less, which alone would fit one token more."""
    budget = 2 * 8 * 10 * 21  # logits and their copies: 9 tokens with 22 entries, 10 with 21, 11 with 19
    options = {"vocab": 85, "num_shards": None, "memory_budget": budget, "every": 40}
    cases = [options | {"partition": partition} for partition in ("range", "dtensor", "padded")]
    for case, answers in zip(cases, run(pools, 4, "head", *cases), strict=True):
        assert_close(answers, 3, case)
        assert {answer["collectives"] for answer in answers} == {2 * 8 + 1}, case


def test_a_second_backward_asks_again(heads):
    """What was computed with the loss is used up by the first backward."""
    for answer in heads(2)["twice"]:
        assert answer["collectives"] == 2 * (2 * 8 + 1)


@pytest.mark.parametrize("function", ["head", "logits"])
def test_a_group_that_is_not_the_world(pools, function):
    """The ranks outside are not waited for, and two groups do not disturb each other."""
    for answers, inside in zip(
        run(pools, 4, function, {"group": "subset"}, {"group": "mesh dim"}), (2, 4), strict=True
    ):
        found = [answer for answer in answers if answer is not None]
        assert len(found) == inside
        assert_close(found, 3 if function == "head" else 1, inside)


def test_peak_bytes(pools):
    """As `costs.loss_peak_bytes` says: copies of rows for statistics, and the head in another dtype, included."""
    kinds = [("float32", False), ("bfloat16", False), ("float32", True)]
    cases = pairwise({"kind": kinds, "vocab_shards": (1, 4), "reduction": ("mean", "none")}, lambda row: True)
    cases = [dict(zip(("dtype", "autocast"), case.pop("kind"), strict=True)) | case for case in cases]
    for case, answers in zip(cases, run(pools, 2, "peaks", *cases), strict=True):
        for answer in answers:
            assert abs(answer["peak"] - answer["formula"]) <= COST_BYTES * answer["formula"], (case, answer)
            assert answer["other pass"] <= (1 + COST_BYTES) * answer["formula"], (case, answer)


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_holds_the_same_results(pools, world):
    assert run(pools, world, "same_everywhere", {}) == [[0.0] * world]


@pytest.mark.parametrize("world", WORLDS)
def test_bfloat16_head(pools, world):
    for answers in run(pools, world, "bfloat16_head", {"reduction": "mean"}, {"reduction": "none"}):
        for answer in answers:
            assert set(answer) == {"dx", "dweight", "dbias"}
            for name, errors in answer.items():
                assert errors["ours"] <= limit(errors["untiled"], "bfloat16"), name


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["vocabulary", "sequence"])
def test_the_error_of_a_float16_head_does_not_depend_on_scales(pools, sequence_parallel):
    """Gradients of the logits were stored times the class weights and z_loss: zeros at 1e-9, infinities at 1e5."""
    scales: list[dict[str, Any]] = [{"class_scale": scale} for scale in (1.0, 1e-9, 1e5)] + [{"z_loss": 1e4}]
    cases = [{"sequence_parallel": sequence_parallel, **scale} for scale in scales]
    usual, *others = run_each(pools[2], "tests.loss.ranks_torch_float16:head", cases)
    for odd, answers in zip(scales[1:], others, strict=True):
        for ours, theirs in zip(answers, usual, strict=True):
            for name, error in ours.items():
                assert error <= limit(theirs[name], "float16"), (odd, name)


LOGITS = [
    ("range", 23, 0.2),
    ("padded", 23, 0.2),
    ("dtensor", 23, 0.2),
    ("range", 3, 0.2),
    ("padded", 5, 0.2),
    ("range", 23, 0.0),
    ("equal", 24, 0.2),
    ("range", 1, 0.0),  # no gradient at all; with smoothing what is left are roundings
]


@pytest.mark.parametrize("world", WORLDS)
def test_given_logits(pools, world):
    chosen = LOGITS if world == 2 else LOGITS[:5]
    cases = [dict(zip(("partition", "vocab", "label_smoothing"), case, strict=True)) for case in chosen]
    for case, answers in zip(cases, run(pools, world, "logits", *cases), strict=True):
        assert_close(answers, 1, case)
        for answer in answers:
            assert answer["unchanged"], case
            assert answer["collectives"] == [2, 0], case
            assert answer["dtypes"] == ["torch.float64", "torch.float64"], case


def test_smoothing_by_megatrons_formula(pools):
    """0.1 of its label_smoothing, which it spreads over the V - 1 wrong entries, is 0.1 V / (V - 1) of ours."""
    for errors in run(pools, 2, "smoothed_as_megatron", {})[0]:
        assert max(errors) <= DISTRIBUTED_FLOAT64


def test_given_logits_in_other_dtypes(pools):
    """Losses in float32, gradients in the logits' dtype, each as exact as torch's own."""
    cases = [{"dtype": dtype, "label_smoothing": s} for dtype in ("float32", "bfloat16", "float16") for s in (0.0, 0.2)]
    for case, answers in zip(cases, run(pools, 2, "logits", *cases), strict=True):
        for answer in answers:
            assert answer["dtypes"] == ["torch.float32", f"torch.{case['dtype']}"]
            for name, error in answer["errors"].items():
                assert error <= limit(answer["baseline"][name], case["dtype"]), (case, name)


REFUSED = {
    "partition": "vocab_parallel_linear_cross_entropy: the partition of the vocabulary must be >= ",
    "vocab_size": "vocab_parallel_linear_cross_entropy: vocab_size must be >= 1, got 0.",
    "target": "vocab_parallel_linear_cross_entropy: targets must be in [0, 8) or ignore_index = -100, got 8. ",
    "class_weight": "vocab_parallel_linear_cross_entropy: loss.class_weight must be [8], got [4].",
    "group": "vocab_parallel_linear_cross_entropy: group must be a process group, a DeviceMesh or None, got int.",
    "mesh": "vocab_parallel_linear_cross_entropy: group must be a mesh of one dim, got one of 2.",
    "weight": "vocab_parallel_linear_cross_entropy: weight must be a matrix [out, in], got [4].",
    "placement": "vocab_parallel_linear_cross_entropy: weight must be sharded by rows over a mesh of one dim, got ",
    "vocab_size and DTensor": "vocab_parallel_linear_cross_entropy: vocab_size must be left out beside a DTensor, got 10.",
    "bias": "vocab_parallel_linear_cross_entropy: bias must be a DTensor split as weight is, got Tensor.",
    "logits": "vocab_parallel_cross_entropy: the partition of the vocabulary must be >= ",
    "logits split by tokens": "vocab_parallel_cross_entropy: vocab_parallel_logits must be sharded by its last dim over a "
    "mesh of one dim, got ",
}


def test_every_rank_refuses(pools):
    """On all ranks, so that none waits for another."""
    found = run(pools, 2, "refused", *({"what": what} for what in REFUSED))
    for (what, text), messages in zip(REFUSED.items(), found, strict=True):
        assert all(message.startswith(text) for message in messages), (what, messages)


def test_without_a_process_group():
    message = (
        "group must be usable here, got no initialised process group. Call torch.distributed.init_process_group first."
    )
    x, targets = torch.ones(2, 4), torch.ones(2, dtype=torch.long)
    with pytest.raises(UnsupportedError) as caught:
        vocab_parallel_linear_cross_entropy(x, torch.ones(3, 4), targets)
    assert str(caught.value) == f"vocab_parallel_linear_cross_entropy: {message}"
    with pytest.raises(UnsupportedError) as caught:
        vocab_parallel_cross_entropy(x, targets)
    assert str(caught.value) == f"vocab_parallel_cross_entropy: {message}"


def test_data_parallel(pools):
    """Other counts of valid tokens on every rank: num_valid = count of all / ranks makes the mean one over all tokens."""
    axes = {"case": ("plain", "all ignored", "one token", "no tokens"), "kind": ("loss", "outputs", "tiled_loss")}
    cases = pairwise(axes | {"wrapped": ("ddp", "fsdp2 head", "fsdp2 root")}, lambda row: True)
    found = run_each(pools[2], "tests.loss.ranks_torch_engines:engine", cases)
    for case, answers in zip(cases, found, strict=True):
        for answer in answers:
            assert answer["error"] <= DISTRIBUTED_FLOAT64, case
            assert answer["fired"], case
            assert answer["spread"] == 0.0, case


@pytest.mark.parametrize("world", WORLDS)
def test_unequal_partitions_without_vocab_size_are_refused_on_every_rank(pools, world):
    sizes = ", ".join(["7", *["5"] * (world - 1)])
    rule = f"the number of entries, without vocab_size, must be the same on all {world} ranks, got {sizes}."
    names = ("vocab_parallel_linear_cross_entropy", "vocab_parallel_cross_entropy")
    for answer in run(pools, world, "unequal", {})[0]:
        assert answer["errors"] == [f"{name}: {rule}" for name in names]
