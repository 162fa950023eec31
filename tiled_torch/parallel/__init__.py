"""What runs across ranks: collectives with gradients, layers split over ranks, losses over a split vocabulary."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from shared_specs.collectives.partitions import VocabUtility as VocabUtility
from tiled_torch.collectives.api import (
    all_gather_last_dim_from_tensor_parallel_region as all_gather_last_dim_from_tensor_parallel_region,
)
from tiled_torch.collectives.api import all_to_all as all_to_all
from tiled_torch.collectives.api import all_to_all_hidden_to_sequence as all_to_all_hidden_to_sequence
from tiled_torch.collectives.api import all_to_all_sequence_to_hidden as all_to_all_sequence_to_hidden
from tiled_torch.collectives.api import copy_to_tensor_parallel_region as copy_to_tensor_parallel_region
from tiled_torch.collectives.api import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from tiled_torch.collectives.api import gather_from_tensor_parallel_region as gather_from_tensor_parallel_region
from tiled_torch.collectives.api import reduce_from_tensor_parallel_region as reduce_from_tensor_parallel_region
from tiled_torch.collectives.api import (
    reduce_scatter_last_dim_to_tensor_parallel_region as reduce_scatter_last_dim_to_tensor_parallel_region,
)
from tiled_torch.collectives.api import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from tiled_torch.collectives.api import scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region
from tiled_torch.collectives.api import scatter_to_tensor_parallel_region as scatter_to_tensor_parallel_region
from tiled_torch.collectives.broadcast_data import broadcast_data as broadcast_data
from tiled_torch.collectives.split_module import (
    copy_tensor_model_parallel_attributes as copy_tensor_model_parallel_attributes,
)
from tiled_torch.collectives.split_module import (
    param_is_not_tensor_parallel_duplicate as param_is_not_tensor_parallel_duplicate,
)
from tiled_torch.collectives.split_module import (
    set_defaults_if_not_set_tensor_model_parallel_attributes as set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from tiled_torch.collectives.split_module import (
    set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes,
)
from tiled_torch.collectives.splitting import gather_split_1d_tensor as gather_split_1d_tensor
from tiled_torch.collectives.splitting import split_tensor_along_last_dim as split_tensor_along_last_dim
from tiled_torch.collectives.splitting import split_tensor_into_1d_equal_chunks as split_tensor_into_1d_equal_chunks
from tiled_torch.layers import modules as _layers
from tiled_torch.layers import random as _random
from tiled_torch.layers.context import context_attention as context_attention
from tiled_torch.layers.context import context_slice as context_slice
from tiled_torch.layers.embedding import vocab_parallel_embedding as vocab_parallel_embedding
from tiled_torch.layers.inference import InferencePath as InferencePath
from tiled_torch.layers.inference import inference_path as inference_path
from tiled_torch.layers.inference import norm_column_parallel_linear as norm_column_parallel_linear
from tiled_torch.layers.inference import row_parallel_linear_residual_norm as row_parallel_linear_residual_norm
from tiled_torch.layers.linear import column_parallel_linear as column_parallel_linear
from tiled_torch.layers.linear import linear_with_frozen_weight as linear_with_frozen_weight
from tiled_torch.layers.linear import row_parallel_linear as row_parallel_linear
from tiled_torch.layers.linear_autodiff import deferred_weight_grad as deferred_weight_grad
from tiled_torch.layers.modules import ColumnParallelLinear as ColumnParallelLinear
from tiled_torch.layers.modules import RowParallelLinear as RowParallelLinear
from tiled_torch.layers.modules import VocabParallelEmbedding as VocabParallelEmbedding
from tiled_torch.layers.parameters.grad_norm import clip_grad_norm_ as clip_grad_norm_
from tiled_torch.layers.parameters.grad_norm import get_grad_norm as get_grad_norm
from tiled_torch.layers.parameters.grad_norm import reduce_sequence_parallel_grads as reduce_sequence_parallel_grads
from tiled_torch.layers.parameters.state import sharded_state_dict as sharded_state_dict
from tiled_torch.layers.random import RandomStates as RandomStates
from tiled_torch.layers.random import seed_parallel as seed_parallel
from tiled_torch.layers.recompute import CheckpointWithoutOutput as CheckpointWithoutOutput
from tiled_torch.layers.recompute import checkpoint as checkpoint
from tiled_torch.layers.ring import ring_attention as ring_attention
from tiled_torch.linear.state import whole_state_dict as whole_state_dict
from tiled_torch.loss.ranks import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from tiled_torch.loss.ranks import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from tiled_torch.mlp import ranks_module as _mlp_module
from tiled_torch.mlp.ranks import tensor_parallel_mlp as tensor_parallel_mlp
from tiled_torch.mlp.ranks_module import TensorParallelTiledMLP as TensorParallelTiledMLP

if TYPE_CHECKING:  # as _ON_FIRST_USE
    from tiled_torch.plans.api import parallelize as parallelize
    from tiled_torch.plans.compile import backward_context as backward_context
    from tiled_torch.plans.meta_device import materialize as materialize
    from tiled_torch.plans.recompute import apply_checkpointing as apply_checkpointing
    from tiled_torch.plans.registry import Plan as Plan
    from tiled_torch.plans.registry import plan_of as plan_of
    from tiled_torch.plans.registry import register_plan as register_plan

__all__ = [
    "CheckpointWithoutOutput",
    "ColumnParallelLinear",
    "InferencePath",
    "Plan",
    "RandomStates",
    "RowParallelLinear",
    "TensorParallelTiledMLP",
    "VocabParallelEmbedding",
    "VocabUtility",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hidden_to_sequence",
    "all_to_all_sequence_to_hidden",
    "apply_checkpointing",
    "backward_context",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm_",
    "column_parallel_linear",
    "context_attention",
    "context_slice",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_parallel_region",
    "deferred_weight_grad",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_parallel_region",
    "gather_split_1d_tensor",
    "get_grad_norm",
    "inference_path",
    "linear_with_frozen_weight",
    "materialize",
    "norm_column_parallel_linear",
    "parallelize",
    "param_is_not_tensor_parallel_duplicate",
    "plan_of",
    "reduce_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_sequence_parallel_grads",
    "register_plan",
    "ring_attention",
    "row_parallel_linear",
    "row_parallel_linear_residual_norm",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_parallel_region",
    "seed_parallel",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "sharded_state_dict",
    "split_tensor_along_last_dim",
    "split_tensor_into_1d_equal_chunks",
    "tensor_parallel_mlp",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
    "whole_state_dict",
]

# DTensor, FSDP and torch's compiler take seconds to import, and most users of this package never call them.
_ON_FIRST_USE = {
    "Plan": "plans.registry",
    "apply_checkpointing": "plans.recompute",
    "backward_context": "plans.compile",
    "materialize": "plans.meta_device",
    "parallelize": "plans.api",
    "plan_of": "plans.registry",
    "register_plan": "plans.registry",
}


def __getattr__(name: str) -> object:
    if name in _ON_FIRST_USE:
        globals()[name] = getattr(import_module(f"tiled_torch.{_ON_FIRST_USE[name]}"), name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Pickles name the files that classes stood in.
_FILES = {"layers": _layers, "mlp_module": _mlp_module, "random": _random}
sys.modules.update({f"{__name__}.{old}": module for old, module in _FILES.items()})
