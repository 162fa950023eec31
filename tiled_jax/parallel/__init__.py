"""What devices compute together, inside `jax.shard_map`."""

import sys

from shared_specs.collectives.partitions import VocabUtility
from tiled_jax.collectives.api import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hidden_to_sequence,
    all_to_all_sequence_to_hidden,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from tiled_jax.collectives.splitting import (
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from tiled_jax.layers import modules as _layers
from tiled_jax.layers import random as _random
from tiled_jax.layers.context import context_attention, context_slice
from tiled_jax.layers.embedding import vocab_parallel_embedding
from tiled_jax.layers.inference import norm_column_parallel_linear, row_parallel_linear_residual_norm
from tiled_jax.layers.linear import column_parallel_linear, linear_with_frozen_weight, row_parallel_linear
from tiled_jax.layers.modules import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tiled_jax.layers.random import RandomStates, mesh_coordinates, seed_parallel
from tiled_jax.layers.recompute import checkpoint_without_output, checkpointed, scan_layers
from tiled_jax.layers.ring import ring_attention
from tiled_jax.loss.ranks import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.mlp import ranks as _mlp
from tiled_jax.mlp.ranks import TensorParallelTiledMLP, tensor_parallel_mlp
from tiled_jax.plans.api import Parallelized, TrainState, parallelize
from tiled_jax.plans.registry import ModelRules, register_rules

__all__ = [
    "ColumnParallelLinear",
    "ModelRules",
    "Parallelized",
    "RandomStates",
    "RowParallelLinear",
    "TensorParallelTiledMLP",
    "TrainState",
    "VocabParallelEmbedding",
    "VocabUtility",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hidden_to_sequence",
    "all_to_all_sequence_to_hidden",
    "checkpoint_without_output",
    "checkpointed",
    "column_parallel_linear",
    "context_attention",
    "context_slice",
    "copy_to_tensor_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gather_split_1d_tensor",
    "linear_with_frozen_weight",
    "mesh_coordinates",
    "norm_column_parallel_linear",
    "parallelize",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_rules",
    "ring_attention",
    "row_parallel_linear",
    "row_parallel_linear_residual_norm",
    "scan_layers",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "seed_parallel",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "tensor_parallel_mlp",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]

# Pickles name the files that classes stood in.
_FILES = {"layers": _layers, "mlp": _mlp, "random": _random}
sys.modules.update({f"{__name__}.{old}": module for old, module in _FILES.items()})
