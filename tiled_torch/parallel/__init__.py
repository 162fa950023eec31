"""What runs across ranks: collectives with gradients, layers split over ranks, losses over a split vocabulary."""

from importlib import import_module
from typing import TYPE_CHECKING

from tiled_torch.parallel.checkpoint import CheckpointWithoutOutput as CheckpointWithoutOutput
from tiled_torch.parallel.checkpoint import checkpoint as checkpoint
from tiled_torch.parallel.collectives import (
    all_gather_last_dim_from_tensor_parallel_region as all_gather_last_dim_from_tensor_parallel_region,
)
from tiled_torch.parallel.collectives import all_to_all as all_to_all
from tiled_torch.parallel.collectives import all_to_all_hidden_to_sequence as all_to_all_hidden_to_sequence
from tiled_torch.parallel.collectives import all_to_all_sequence_to_hidden as all_to_all_sequence_to_hidden
from tiled_torch.parallel.collectives import copy_to_tensor_parallel_region as copy_to_tensor_parallel_region
from tiled_torch.parallel.collectives import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from tiled_torch.parallel.collectives import gather_from_tensor_parallel_region as gather_from_tensor_parallel_region
from tiled_torch.parallel.collectives import reduce_from_tensor_parallel_region as reduce_from_tensor_parallel_region
from tiled_torch.parallel.collectives import (
    reduce_scatter_last_dim_to_tensor_parallel_region as reduce_scatter_last_dim_to_tensor_parallel_region,
)
from tiled_torch.parallel.collectives import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from tiled_torch.parallel.collectives import scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region
from tiled_torch.parallel.collectives import scatter_to_tensor_parallel_region as scatter_to_tensor_parallel_region
from tiled_torch.parallel.context import context_attention as context_attention
from tiled_torch.parallel.context import context_slice as context_slice
from tiled_torch.parallel.data import broadcast_data as broadcast_data
from tiled_torch.parallel.embedding import vocab_parallel_embedding as vocab_parallel_embedding
from tiled_torch.parallel.inference import InferencePath as InferencePath
from tiled_torch.parallel.inference import inference_path as inference_path
from tiled_torch.parallel.inference import norm_column_parallel_linear as norm_column_parallel_linear
from tiled_torch.parallel.inference import row_parallel_linear_residual_norm as row_parallel_linear_residual_norm
from tiled_torch.parallel.layers import ColumnParallelLinear as ColumnParallelLinear
from tiled_torch.parallel.layers import RowParallelLinear as RowParallelLinear
from tiled_torch.parallel.layers import VocabParallelEmbedding as VocabParallelEmbedding
from tiled_torch.parallel.linear import column_parallel_linear as column_parallel_linear
from tiled_torch.parallel.linear import linear_with_frozen_weight as linear_with_frozen_weight
from tiled_torch.parallel.linear import row_parallel_linear as row_parallel_linear
from tiled_torch.parallel.linear_function import deferred_weight_grad as deferred_weight_grad
from tiled_torch.parallel.loss import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from tiled_torch.parallel.loss import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from tiled_torch.parallel.mlp import tensor_parallel_mlp as tensor_parallel_mlp
from tiled_torch.parallel.mlp_module import TensorParallelTiledMLP as TensorParallelTiledMLP
from tiled_torch.parallel.random import RandomStates as RandomStates
from tiled_torch.parallel.random import seed_parallel as seed_parallel
from tiled_torch.parallel.sharded_state import sharded_state_dict as sharded_state_dict
from tiled_torch.parallel.tiled_state import whole_state_dict as whole_state_dict

if TYPE_CHECKING:  # as _ON_FIRST_USE
    from tiled_torch.parallel.checkpoint_policies import apply_checkpointing as apply_checkpointing
    from tiled_torch.parallel.compile_plan import backward_context as backward_context
    from tiled_torch.parallel.meta_device import materialize as materialize
    from tiled_torch.parallel.plan_registry import Plan as Plan
    from tiled_torch.parallel.plan_registry import plan_of as plan_of
    from tiled_torch.parallel.plan_registry import register_plan as register_plan
    from tiled_torch.parallel.plans import parallelize as parallelize

__all__ = [
    "CheckpointWithoutOutput",
    "ColumnParallelLinear",
    "InferencePath",
    "Plan",
    "RandomStates",
    "RowParallelLinear",
    "TensorParallelTiledMLP",
    "VocabParallelEmbedding",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hidden_to_sequence",
    "all_to_all_sequence_to_hidden",
    "apply_checkpointing",
    "backward_context",
    "broadcast_data",
    "checkpoint",
    "column_parallel_linear",
    "context_attention",
    "context_slice",
    "copy_to_tensor_parallel_region",
    "deferred_weight_grad",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "inference_path",
    "linear_with_frozen_weight",
    "materialize",
    "norm_column_parallel_linear",
    "parallelize",
    "plan_of",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "register_plan",
    "row_parallel_linear",
    "row_parallel_linear_residual_norm",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "seed_parallel",
    "sharded_state_dict",
    "tensor_parallel_mlp",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
    "whole_state_dict",
]

# DTensor, FSDP and torch's compiler take seconds to import, and most users of this package never call them.
_ON_FIRST_USE = {
    "Plan": "plan_registry",
    "apply_checkpointing": "checkpoint_policies",
    "backward_context": "compile_plan",
    "materialize": "meta_device",
    "parallelize": "plans",
    "plan_of": "plan_registry",
    "register_plan": "plan_registry",
}


def __getattr__(name: str) -> object:
    if name in _ON_FIRST_USE:
        globals()[name] = getattr(import_module(f"tiled_torch.parallel.{_ON_FIRST_USE[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
