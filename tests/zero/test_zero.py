"""The PyTorch half under DeepSpeed's ZeRO-1, 2 and 3, its own engine on two ranks. Only `make deepspeed` collects this."""

from typing import Any

import pytest

from shared_specs.tolerances import FACTOR, MODEL_FLOAT32
from tests.ranks import Ranks

RANKS = "tests.zero.ranks_zero"
PART = (
    "tile: a parameter of fn must be whole, got a ZeRO-3 part. Call tile inside the forward of a leaf module of ZeRO-3 that "
    "owns it (deepspeed.utils.set_z3_leaf_modules), as the modules of tile_model are, or use ZeRO stage 0, 1 or 2, or "
    "fully_shard."
)


@pytest.fixture
def two(pools: dict[int, Ranks]) -> Ranks:
    return pools[2]


def check(answer: dict[str, Any], mlp: str = "tiled_mlp") -> None:
    """The tiled model trains as the untiled one; what is released is freed, and no logits are made."""
    assert answer["loss"] <= MODEL_FLOAT32
    assert answer["error"] <= MODEL_FLOAT32
    assert answer["outlived"] == [0, 0, 0]
    assert not answer["logits"]
    assert answer["paths"].pop("lm_head") == "tiled_linear_cross_entropy"
    assert set(answer["paths"].values()) == {mlp}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "case",
    [{"accumulate": 2}, {"tied": True, "checkpoint": "plain"}, {"trains": "lora", "checkpoint": "reentrant"}],
    ids=str,
)
def test_gradients_and_states_in_parts(two: Ranks, stage: int, case: dict[str, Any]) -> None:
    for answer in two.run(f"{RANKS}:both", stage=stage, **case):
        check(answer, "tile: gate_proj is LoRA" if "trains" in case else "tiled_mlp")


@pytest.mark.parametrize(
    ("case", "fewer"),
    [
        ({}, 0),
        ({"tied": True}, 0),
        ({"kind": "phi3"}, 0),
        ({"accumulate": 2, "offload": True}, 0),
        ({"checkpoint": "reentrant"}, 0),
        ({"checkpoint": "plain"}, 6),  # the replay stops before the MLPs: gate and up of three layers
        ({"checkpoint": "plain", "kind": "phi3"}, 3),  # gate and up in one
        ({"trains": "mlp"}, 0),
        ({"trains": "lora"}, 0),
        ({"trains": "lora", "checkpoint": "plain"}, 24),  # three matrices of each projection, but for the last
    ],
    ids=str,
)
def test_parameters_in_parts(two: Ranks, case: dict[str, Any], fewer: int) -> None:
    """Gathered as often as without tiling, or less: by module, never by shard, of which the ranks have 3 and 4."""
    for answer in two.run(f"{RANKS}:both", stage=3, **case):
        check(answer, "tile: gate_proj is LoRA" if case.get("trains") == "lora" else "tiled_mlp")
        for plain, tiled in answer["gathers"]:
            assert set(tiled) == set(plain)
            assert all(tiled[name] <= plain[name] for name in plain)
            assert sum(plain.values()) - sum(tiled.values()) == fewer


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("checkpoint", ["", "plain", "reentrant"])
def test_experts(two: Ranks, checkpoint: str, stage: int) -> None:
    """The parameters of experts are gathered with their module, for its forward and its backward."""
    for answer in two.run(f"{RANKS}:both", stage=stage, kind="gpt_oss", checkpoint=checkpoint):
        paths = answer["paths"]
        routers = {paths.pop(f"model.layers.{i}.mlp.router") for i in range(2)}
        assert routers == {"untiled: ZeRO-3 gathers its weights" if stage == 3 else "tile"}
        check(answer, "tiled_experts")
        for plain, tiled in answer["gathers"]:
            assert all(tiled[name] <= plain[name] for name in plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16(two: Ranks, stage: int) -> None:
    for answer in two.run(f"{RANKS}:both", stage=stage, bf16=True):
        ours, theirs = answer["exact"]
        assert 0 < ours <= FACTOR * theirs


def test_evaluation_and_logits(two: Ranks) -> None:
    """Logits that are read have the model's own values and gradients; training goes on after evaluation, and two calls have
    one backward."""
    for answer in two.run(f"{RANKS}:in_use"):
        assert max(answer.values()) <= MODEL_FLOAT32


@pytest.mark.parametrize(("stage", "inside"), [(1, False), (3, False), (3, True)])
def test_modules(two: Ranks, stage: int, inside: bool) -> None:
    """TiledMLP, TiledLinear and TiledLinearCrossEntropy; also made, drawn and copied where zero.Init parts what is made."""
    for answer in two.run(f"{RANKS}:modules", stage=stage, inside=inside):
        assert answer["error"] <= MODEL_FLOAT32
        assert answer["copied"] == [True, True]
        assert answer["outlived"] == 0
        drawn = answer["drawn"]
        for name, inputs in (
            ("first.w_up", 8),
            ("first.w_down", 12),
            ("wide.linears.1.0.weight", 8),
            ("head.weight", 20),
        ):
            assert 0.8 * inputs**-0.5 < drawn[name] <= inputs**-0.5
        assert "hidden_size=20, vocab_size=37" in answer["texts"][0]
        if stage == 3:
            assert set(answer["gathers"]) == set(drawn)
            assert set(answer["gathers"].values()) == {2}  # of weights and biases, for forward and for backward
            assert answer["most"] == 4 * 10 + 10  # one tile with its bias


def test_tile_in_a_module_of_ones_own(two: Ranks) -> None:
    """In a leaf module of ZeRO-3 all shards share what it gathers; in any other, and around one, each would gather."""
    for answer in two.run(f"{RANKS}:own_modules", leaf=True):
        assert answer["outside"] == PART
        assert answer["error"] <= MODEL_FLOAT32
        assert set(answer["gathers"].values()) == {2}
    for answer in two.run(f"{RANKS}:own_modules", leaf=False):
        assert answer["outside"] == answer["inside"] == PART
        assert set(answer["gathers"]) == {"0.weight", "0.bias"}


def test_what_is_refused(two: Ranks) -> None:
    early = "Call it before deepspeed.initialize, which hangs hooks on modules as they are then."
    for answer in two.run(f"{RANKS}:refusals"):
        assert answer == {
            "tile": "tile_model: model must be one that no ZeRO-3 engine has yet, got one that has its hooks, and gate_proj is "
            f"LoRA. {early}",
            "untile": "untile_model: model must be one that no ZeRO-3 engine has yet, got one in which it gathers tiled MLPs "
            f"as a whole. {early}",
            "head": "tile_model: lm_head must be a plain linear layer under ZeRO-3, which would gather it for every shard, got "
            "lm_head has hooks. Call the model without labels for its logits, or use ZeRO stage 1 or 2.",
            "gathered": "0",
            "frozen": "tile_model: x of an MLP must be a positional argument that requires grad, where ZeRO-3 trains the MLP, "
            "got none that does. Call model.enable_input_require_grads() first: the engine reduces gradients once that of x is "
            "there.",
        }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_lines_of_the_page(two: Ranks, stage: int) -> None:
    for answer in two.run("tests.zero.ranks_lines:both", stage=stage):
        assert answer["stage"] == stage
        assert len(answer["plain"]) == 2
        assert answer["tiled"] == pytest.approx(answer["plain"], rel=MODEL_FLOAT32)
        assert answer["paths"] == ["tiled_linear_cross_entropy", "tiled_mlp"]
