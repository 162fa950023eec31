"""Two gloo ranks with different numbers of tokens and of shards: gradients are those of one untiled process.

float64, two micro-batches. What runs on the ranks is in ranks_engines.py; the model and its truth in ranks_model.py.
"""

import inspect
from typing import Any

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.plans.ranks_torch_model import MICRO_BATCHES
from tests.ranks import RankError, Ranks

pytestmark = pytest.mark.ranks

# Torch 2.11 does not cast a unit's inputs while its hooks are paused; tile then says so.
CASTS_WHILE_PAUSED = "_cast_forward_inputs" in inspect.getsource(FSDPState)
TILED = ("TiledMLP", "tiled_mlp", "tiled_mlp-keep", "tile", "tile-forward")
CHECKPOINTED = pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "checkpointed"])
KIND = pytest.mark.parametrize("kind", TILED)


@pytest.fixture
def ranks(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


def run(ranks: Ranks, engine: str, **arguments: Any) -> list[dict[str, Any]]:
    """The ranks' answers, every error in them within the limit."""
    answers = ranks.run(f"tests.mlp.ranks_torch_engines:{engine}", **arguments)
    for rank, answer in enumerate(answers):
        assert max(answer["errors"]) <= DISTRIBUTED_FLOAT64, f"rank {rank}: relative errors {answer['errors']}"
    return answers


def assert_ddp(answers: list[dict[str, Any]]) -> None:
    """Every rank holds the same bits, and every parameter's gradient was accumulated once per backward."""
    for answer in answers:
        assert set(answer["spreads"]) == {0.0}
        assert all(fired == [answer["micro_batches"]] for fired in answer["fired"])


@CHECKPOINTED
@KIND
def test_ddp(ranks, kind, checkpointed):
    assert_ddp(run(ranks, "ddp", kind=kind, checkpointed=checkpointed))


@CHECKPOINTED
@KIND
def test_ddp_accumulates_under_no_sync(ranks, kind, checkpointed):
    assert_ddp(run(ranks, "ddp", kind=kind, checkpointed=checkpointed, no_sync=True))


@CHECKPOINTED
@KIND
def test_ddp_static_graph_over_four_iterations(ranks, kind, checkpointed):
    answers = run(ranks, "ddp", kind=kind, checkpointed=checkpointed, static_graph=True)
    assert len(answers[0]["errors"]) == 4
    assert_ddp(answers)


@pytest.mark.parametrize("wrapped", [True, False], ids=["under DDP", "unwrapped"])
@pytest.mark.parametrize("training", [True, False])
@KIND
def test_a_forward_that_only_rank_0_makes_returns(ranks, kind, wrapped, training):
    run(ranks, "rank0_forward", kind=kind, wrapped=wrapped, training=training)


@CHECKPOINTED
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["original", "flat"])
@pytest.mark.parametrize("wrapped", ["block", "mlp"])
@KIND
def test_fsdp1(ranks, kind, wrapped, use_orig_params, checkpointed):
    run(ranks, "fsdp1", kind=kind, checkpointed=checkpointed, wrapped=wrapped, use_orig_params=use_orig_params)


def assert_fsdp2(ranks: Ranks, answers: list[dict[str, Any]], untiled: str, **arguments: Any) -> None:
    """Each gradient once per backward, and as many collectives on every rank as the untiled model needs."""
    expected = run(ranks, "fsdp2", kind=untiled, **arguments)
    for answer in answers:
        assert answer["fired"] == [MICRO_BATCHES]
        assert answer["collectives"] == expected[0]["collectives"]
        assert sum(answer["collectives"].values()) > 0
        assert answer["order"] == sorted(answer["order"], reverse=True), "gradients were reduced at the very end"


@CHECKPOINTED
@pytest.mark.parametrize("wrapped", ["block", "mlp"])
@KIND
def test_fsdp2(ranks, kind, wrapped, checkpointed):
    arguments = {"wrapped": wrapped, "checkpointed": checkpointed}
    assert_fsdp2(ranks, run(ranks, "fsdp2", kind=kind, **arguments), "untiled", **arguments)


@CHECKPOINTED
@pytest.mark.parametrize("case", ["plain", "frozen_input", "no_tokens"])
@pytest.mark.parametrize("wrapped", ["inner", "linear", "group"])
@pytest.mark.parametrize("kind", ["tile", "tile-forward"])
def test_fsdp2_inside_tile(ranks, kind, wrapped, case, checkpointed):
    """Units inside fn: the module itself, every linear layer, two layers as one unit. Also a rank without tokens."""
    arguments = {"wrapped": wrapped, "checkpointed": checkpointed, "case": case}
    assert_fsdp2(ranks, run(ranks, "fsdp2", kind=kind, **arguments), "untiled", **arguments)


@CHECKPOINTED
@pytest.mark.parametrize("wrapped", ["block", "mlp", "linear", "adapter"])
def test_fsdp2_lora(ranks, wrapped, checkpointed):
    arguments = {"wrapped": wrapped, "checkpointed": checkpointed}
    assert_fsdp2(ranks, run(ranks, "fsdp2", kind="tile-lora", **arguments), "untiled-lora", **arguments)


@CHECKPOINTED
def test_lora_under_ddp(ranks, checkpointed):
    assert_ddp(run(ranks, "ddp", kind="tile-lora", checkpointed=checkpointed))


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


@CHECKPOINTED
def test_tensor_parallel_layers_inside_tile(ranks, checkpointed):
    """Column- and row-parallel linear layers, which communicate per shard: ranks hold the same tokens and shards."""
    run(ranks, "tensor_parallel", checkpointed=checkpointed)


REFUSED = ("ddp", "fsdp1", "fsdp2 in a closure", "fsdp2 in a list", "fsdp2 in a list, training", "fsdp2 method")


@pytest.mark.parametrize("engine", REFUSED)
def test_engines_that_would_communicate_per_shard_are_refused(ranks, engine):
    for answer in ranks.run("tests.mlp.ranks_torch_engines:refused", engine=engine):
        assert answer.startswith("tile: fn calls ")


def test_an_error_on_one_rank_is_shown(ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ValueError: only here"):
        ranks.run("tests.mlp.ranks_torch_engines:fail", where=1)
    assert ranks.run("tests.mlp.ranks_torch_engines:fail", where=None) == [0, 1]


def test_a_hang_is_reported_and_survived():
    with Ranks(world=1, hang_seconds=6) as alone:
        with pytest.raises(RankError, match=r"(?s)did not return within 6 s.*in hang"):
            alone.run("tests.mlp.ranks_torch_engines:hang")
        assert alone.run("tests.mlp.ranks_torch_engines:fail", where=None) == [0]
        with pytest.raises(RankError, match="the process ended"):
            alone.run("tests.mlp.ranks_torch_engines:leave")
