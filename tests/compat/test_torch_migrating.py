"""The migration page: what it says to import is there, and nothing that the peers' names need is missing."""

import ast
import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
NAMES = {
    "liger": (
        "CrossEntropyOutput LigerFusedLinearCrossEntropyFunction LigerFusedLinearCrossEntropyLoss LigerTiledGEGLUMLP "
        "LigerTiledSwiGLUMLP apply_tiled_mlp liger_fused_linear_cross_entropy"
    ),
    "deepspeed": (
        "SequenceTiledCompute TiledFusedLogitsLoss TiledLinear TiledLinearReturnBias TiledMLP sequence_tiled_compute"
    ),
    "megatron": (
        "CheckpointWithoutOutput ColumnParallelLinear RowParallelLinear VocabParallelEmbedding "
        "all_gather_last_dim_from_tensor_parallel_region all_to_all all_to_all_hp2sp all_to_all_sp2hp broadcast_data "
        "checkpoint convert_cuda_rng_state copy_gtp_attributes copy_tensor_model_parallel_attributes "
        "copy_to_tensor_model_parallel_region gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region gather_split_1d_tensor get_cuda_rng_tracker "
        "get_data_parallel_rng_tracker_name get_expert_parallel_rng_tracker_name is_graph_safe_cuda_rng_tracker "
        "linear_with_grad_accumulation_and_async_allreduce model_parallel_cuda_manual_seed param_is_not_gtp_duplicate "
        "param_is_not_tensor_parallel_duplicate reduce_from_tensor_model_parallel_region "
        "reduce_scatter_last_dim_to_tensor_parallel_region reduce_scatter_to_sequence_parallel_region "
        "scatter_to_sequence_parallel_region scatter_to_tensor_model_parallel_region "
        "set_defaults_if_not_set_tensor_model_parallel_attributes set_tensor_model_parallel_attributes "
        "split_tensor_along_last_dim split_tensor_into_1d_equal_chunks vocab_parallel_cross_entropy"
    ),
    "megatron.layers": "linear_with_frozen_weight",
    "megatron.random": "CheckpointWithoutOutputManager CudaRNGStatesTracker initialize_rng_tracker get_all_rng_states",
    "megatron.utils": "VocabUtility",
}


def test_five_lines_are_enough() -> None:
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        assert sum(map(bool, block.splitlines())) <= 5
        found = [node for node in ast.parse(block).body if isinstance(node, ast.ImportFrom)]
        assert found
        for node in found:
            module = importlib.import_module(node.module or "")
            for name in node.names:
                if not hasattr(module, name.name):  # a file of a package
                    importlib.import_module(f"{node.module}.{name.name}")


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(f"tiled_torch.compat.{module}")
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []
