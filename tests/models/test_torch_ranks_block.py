"""`tile_model(scope="block")` over ranks: sharding engines around its layers, and layers whose weights are split."""

from typing import Any

import pytest

from shared_specs.layers.block_costs import eager_block_row_bytes
from shared_specs.tolerances import COST_BYTES, DISTRIBUTED_FLOAT64
from tests.ranks import Ranks


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["layers", "fsdp", "ddp"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_of_sharding_engines(pools: dict[int, Ranks], checkpointing: bool, engine: str) -> None:
    """Each layer a unit: its parameters are gathered for its forward and again for its backward, where all is used."""
    options = {"engine": engine, "checkpointing": checkpointing}
    for found in pools[2].run("tests.models.ranks_torch_block:sharded", **options):
        assert found["paths"] == ["tiled_block"]
        assert found["error"] <= DISTRIBUTED_FLOAT64


SPLIT = "tests.plans.ranks_torch_plans:models"


def assert_exact(answers: list[dict[str, Any]]) -> None:
    for found in answers:
        for name, errors in found.items():
            assert max(errors["loss"], errors["gradients"]) <= DISTRIBUTED_FLOAT64, name
            assert not errors["partial"], name
            assert errors["paths"] == ["tiled_block", "vocab_parallel_linear_cross_entropy"], name


@pytest.mark.deep_but(1)
@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_layers_whose_weights_are_split(pools: dict[int, Ranks], kind: str) -> None:
    """Of whole tokens and of a rank's own, uneven ones: biases and grouped heads, norms of heads, norms behind."""
    changes = {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True} if kind == "llama" else {}
    names = ["tp", "sp", *(["sp, offload"] if kind == "llama" else [])]
    assert_exact(pools[2].run(SPLIT, names=names, tiled="block", kind=kind, length=9, **changes))


@pytest.mark.ranks
@pytest.mark.slow
def test_layers_whose_weights_are_split_over_four(pools: dict[int, Ranks]) -> None:
    """Ten tokens are 3, 3, 3 and 1; of five the last rank has none."""
    assert_exact(pools[4].run(SPLIT, names=["tp", "sp", "fsdp x sp", "fsdp x tp"], tiled="block"))
    assert_exact(pools[4].run(SPLIT, names=["sp"], tiled="block", length=5))


@pytest.mark.deep_but(1)
@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_a_split_layer_computes_and_moves(pools: dict[int, Ranks], sequence_parallel: bool) -> None:
    """No product a third time, and of each rank half of the columns. For every shard, rows enter products and sums are handed
    back: of q, k and v, of attention's output, of gate and up, of down's; in backward again but for down's, and the gradients
    of each. The gradients of what all ranks have are added up once."""
    tokens, shards = 12, 3
    options = {"sequence_parallel": sequence_parallel, "tokens": tokens, "shards": shards}
    H, I = 16, 24  # noqa: E741
    weights = 4 * H * H + 3 * H * I
    moved = {"_allgather_base_": (2 + 5) * shards, "_reduce_scatter_base_": (2 + 3) * shards, "allreduce_": 1}
    for found in pools[2].run("tests.models.ranks_torch_block:counts", **options):
        assert found["flop"] == 2 * (2 * tokens) * (4 * weights - H * I) // 2
        assert found["moved"] == (moved if sequence_parallel else {"allreduce_": (2 + 3) * shards})


@pytest.mark.ranks
def test_split_layers_that_cannot_run_as_one(pools: dict[int, Ranks]) -> None:
    for found in pools[2].run("tests.models.ranks_torch_block:stopped"):
        assert found.pop("shards") == [
            "SpecError",
            "tile_model: the number of shards must be the same on all 2 ranks, got 3, 5.",
        ]
        paths = {name: path for name, (_, path) in found.items()}
        assert paths == {
            "as one": ["tiled_block"],
            "no gradient": ["mlp: no gradient is asked for"],
            "hook": ["mlp: mlp has hooks", "tiled_block"],
        }
        assert max(error for error, _ in found.values()) <= DISTRIBUTED_FLOAT64


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sp, offload", "tp"])
def test_split_layers_in_a_compiled_model(pools: dict[int, Ranks], name: str) -> None:
    for errors in pools[2].run("tests.models.ranks_torch_block:compiled", name=name):
        assert max(errors["loss"], errors["gradients"]) <= DISTRIBUTED_FLOAT64


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.figures
@pytest.mark.parametrize(("sequence_parallel", "offload"), [(True, False), (False, False), (False, True)])
def test_bytes_a_token_of_split_layers(pools: dict[int, Ranks], sequence_parallel: bool, offload: bool) -> None:
    """Between two lengths, of layers so many that the whole rows of the embedding are not the most there is.

    Of each length the lesser of two peaks: a thread of gloo may let go of what was exchanged a moment later.
    """
    layers = 6 if sequence_parallel else 2
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "offload": offload, "layers": layers}
    sizes = {"hidden": 128, "heads": 16, "kv_heads": 4, "head_dim": 8, "itemsize": 4, "tensor": 2}
    kept = {"kept_layers": 0 if offload else layers, "sequence_parallel": sequence_parallel}
    peaks: dict[int, list[Any]] = {1024: [], 2048: []}
    for tokens in (1024, 2048, 1024, 2048):
        peaks[tokens].append(pools[2].run("tests.models.ranks_torch_block:peak", tokens=tokens, **options))
    for few, many in zip(*(map(min, zip(*found, strict=True)) for found in peaks.values()), strict=True):
        assert (many - few) / 1024 == pytest.approx(eager_block_row_bytes(**sizes, **kept), rel=COST_BYTES)
