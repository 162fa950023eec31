"""Two gloo ranks with different numbers of tokens and of shards: gradients are those of one untiled process.

float64, two micro-batches. What runs on the ranks is in ranks_engines.py; the model and its truth in ranks_model.py.
"""

import inspect
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.core.ranks_torch_each import run_each
from tests.matrix import pairwise
from tests.plans.ranks_torch_model import MICRO_BATCHES
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.ranks

# Torch 2.11 does not cast a unit's inputs while its hooks are paused; tile then says so.
CASTS_WHILE_PAUSED = "_cast_forward_inputs" in inspect.getsource(FSDPState)
TILED = ("TiledMLP", "tiled_mlp", "tiled_mlp-keep", "tile", "tile-forward")
KINDS: dict[str, tuple[Any, ...]] = {"kind": TILED, "checkpointed": (False, True)}


@pytest.fixture
def ranks(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


def rows(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Cases that hold every two values of two options."""
    return pairwise(axes, lambda row: True)


def run(ranks: Ranks, engine: str, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The ranks' answers to every case, every error in them within the limit."""
    found = run_each(ranks, f"tests.mlp.ranks_torch_engines:{engine}", cases)
    for case, answers in zip(cases, found, strict=True):
        for rank, answer in enumerate(answers):
            assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64, f"{case}, rank {rank}: {answer['errors']}"
    return found


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {"no_sync": True},
    "static graph over four iterations": {"static_graph": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_ddp(ranks, mode):
    """Every rank holds the same bits, and every parameter's gradient was accumulated once per backward."""
    first = list(MODES).index(mode) % 2
    kinds = [(kind, bool((first + at) % 2)) for at, kind in enumerate(TILED)]
    kinds += [("tile-lora", False), ("tile-lora", True)] if mode == "plain" else []
    cases = [{"kind": kind, "checkpointed": checkpointed, **MODES[mode]} for kind, checkpointed in kinds]
    for case, answers in zip(cases, run(ranks, "ddp", cases), strict=True):
        for answer in answers:
            assert len(answer["errors"]) == (4 if "static_graph" in case else 1)
            assert set(answer["spreads"]) == {0.0}, case
            assert all(fired == [answer["micro_batches"]] for fired in answer["fired"]), case


@pytest.mark.deep
def test_a_forward_that_only_rank_0_makes_returns(ranks):
    """Bare and under DDP, in training and in evaluation; one more collective of rank 0 would leave it waiting at the end."""
    run(ranks, "rank0_forward", rows({"kind": TILED, "wrapped": (True, False), "training": (True, False)}))


def test_fsdp1(ranks):
    run(ranks, "fsdp1", rows(KINDS | {"wrapped": ("block", "mlp"), "use_orig_params": (True, False)}))


def assert_fsdp2(ranks: Ranks, cases: list[dict[str, Any]], untiled: str) -> None:
    """Each gradient once per backward, and as many collectives on every rank as the untiled model needs."""
    plain = [dict(sorted((case | {"kind": untiled}).items())) for case in cases]
    once = list({str(case): case for case in plain}.values())
    needed = {str(case): found[0]["collectives"] for case, found in zip(once, run(ranks, "fsdp2", once), strict=True)}
    for case, like, answers in zip(cases, plain, run(ranks, "fsdp2", cases), strict=True):
        for answer in answers:
            assert answer["fired"] == [MICRO_BATCHES], case
            assert answer["collectives"] == needed[str(like)], case
            assert sum(answer["collectives"].values()) > 0
            assert answer["order"] == sorted(answer["order"], reverse=True), f"{case}: reduced at the very end"


def test_fsdp2(ranks):
    assert_fsdp2(ranks, rows(KINDS | {"wrapped": ("block", "mlp")}), "untiled")


@pytest.mark.deep
@pytest.mark.parametrize("case", ["plain", "frozen_input", "no_tokens"])
def test_fsdp2_inside_tile(ranks, case):
    """Units inside fn: the module itself, every linear layer, two layers as one unit. Also a rank without tokens."""
    axes = {"wrapped": ("inner", "linear", "group"), "kind": ("tile", "tile-forward"), "checkpointed": (False, True)}
    assert_fsdp2(ranks, rows(axes | {"case": (case,)}), "untiled")


@pytest.mark.deep
def test_fsdp2_lora(ranks):
    units = [
        ("block", False),
        ("mlp", True),
        ("linear", False),
        ("linear", True),
        ("adapter", False),
        ("adapter", True),
    ]
    cases = [{"kind": "tile-lora", "wrapped": wrapped, "checkpointed": checkpointed} for wrapped, checkpointed in units]
    assert_fsdp2(ranks, cases, "untiled-lora")


@pytest.mark.parametrize("wrapped", ["block", "mlp", "inner", "linear"])
def test_fsdp2_mixed_precision(ranks, wrapped):
    """Under a float32 policy: no further from the truth than the untiled model under the same policy."""
    if wrapped in ("inner", "linear") and not CASTS_WHILE_PAUSED:
        with pytest.raises(RankError, match="cannot apply the mixed precision policy"):
            ranks.run("tests.mlp.ranks_torch_engines:fsdp2_mixed", kind="tile", wrapped=wrapped)
        return
    for answer in ranks.run("tests.mlp.ranks_torch_engines:fsdp2_mixed", kind="tile", wrapped=wrapped):
        assert answer["untiled"] > DISTRIBUTED_FLOAT64, "the policy was not applied"
        assert answer["tile"] <= limit(answer["untiled"], "float32")


def test_tensor_parallel_layers_inside_tile(ranks):
    """Column- and row-parallel linear layers, which communicate per shard: ranks hold the same tokens and shards."""
    run(ranks, "tensor_parallel", [{"checkpointed": False}, {"checkpointed": True}])


REFUSED = ("ddp", "fsdp1", "fsdp2 in a closure", "fsdp2 in a list", "fsdp2 in a list, training", "fsdp2 method")


def test_engines_that_would_communicate_per_shard_are_refused(ranks):
    cases = [{"engine": engine} for engine in REFUSED]
    for case, answers in zip(cases, run_each(ranks, "tests.mlp.ranks_torch_engines:refused", cases), strict=True):
        assert all(answer.startswith("tile: fn calls ") for answer in answers), (case, answers)


def test_an_error_on_one_rank_is_shown(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: only here"):
        ranks.run("tests.core.ranks_torch_each:fail", where=1)
    assert ranks.run("tests.core.ranks_torch_each:fail", where=None) == [0, 1]


@pytest.mark.deep
def test_a_hang_is_reported_and_survived():
    with Ranks(world=1, hang_seconds=6) as alone:
        with pytest.raises(RankError, match=r"(?s)did not return within 6 s.*in hang"):
            alone.run("tests.core.ranks_torch_each:hang")
        assert alone.run("tests.core.ranks_torch_each:fail", where=None) == [0]
        with pytest.raises(RankError, match="the process ended"):
            alone.run("tests.core.ranks_torch_each:leave")
