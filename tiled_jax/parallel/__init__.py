"""What devices compute together, inside `jax.shard_map`."""

from tiled_jax.parallel.checkpoint import checkpoint_without_output, checkpointed, scan_layers
from tiled_jax.parallel.collectives import (
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
from tiled_jax.parallel.context import context_attention, context_slice
from tiled_jax.parallel.embedding import vocab_parallel_embedding
from tiled_jax.parallel.inference import norm_column_parallel_linear, row_parallel_linear_residual_norm
from tiled_jax.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from tiled_jax.parallel.linear import column_parallel_linear, linear_with_frozen_weight, row_parallel_linear
from tiled_jax.parallel.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.parallel.mlp import TensorParallelTiledMLP, tensor_parallel_mlp
from tiled_jax.parallel.plans import Parallelized, TrainState, parallelize
from tiled_jax.parallel.random import RandomStates, mesh_coordinates, seed_parallel
from tiled_jax.parallel.rules import ModelRules, register_rules

__all__ = [
    "ColumnParallelLinear",
    "ModelRules",
    "Parallelized",
    "RandomStates",
    "RowParallelLinear",
    "TensorParallelTiledMLP",
    "TrainState",
    "VocabParallelEmbedding",
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
    "linear_with_frozen_weight",
    "mesh_coordinates",
    "norm_column_parallel_linear",
    "parallelize",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_rules",
    "row_parallel_linear",
    "row_parallel_linear_residual_norm",
    "scan_layers",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "seed_parallel",
    "tensor_parallel_mlp",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]
