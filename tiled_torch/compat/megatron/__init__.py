"""Megatron-core's `tensor_parallel` by its own names, signatures and formulas, over this library's layers and collectives.

The files have the names that Megatron-core's have, so that only what stands before them in an import changes.
"""

from tiled_torch.collectives.splitting import split_tensor_along_last_dim as split_tensor_along_last_dim
from tiled_torch.compat.megatron.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from tiled_torch.compat.megatron.data import broadcast_data as broadcast_data
from tiled_torch.compat.megatron.layers import ColumnParallelLinear as ColumnParallelLinear
from tiled_torch.compat.megatron.layers import RowParallelLinear as RowParallelLinear
from tiled_torch.compat.megatron.layers import VocabParallelEmbedding as VocabParallelEmbedding
from tiled_torch.compat.megatron.layers import copy_gtp_attributes as copy_gtp_attributes
from tiled_torch.compat.megatron.layers import (
    copy_tensor_model_parallel_attributes as copy_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.layers import linear_with_frozen_weight as linear_with_frozen_weight
from tiled_torch.compat.megatron.layers import (
    linear_with_grad_accumulation_and_async_allreduce as linear_with_grad_accumulation_and_async_allreduce,
)
from tiled_torch.compat.megatron.layers import param_is_not_gtp_duplicate as param_is_not_gtp_duplicate
from tiled_torch.compat.megatron.layers import (
    param_is_not_tensor_parallel_duplicate as param_is_not_tensor_parallel_duplicate,
)
from tiled_torch.compat.megatron.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes as set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.layers import (
    set_tensor_model_parallel_attributes as set_tensor_model_parallel_attributes,
)
from tiled_torch.compat.megatron.mappings import (
    all_gather_last_dim_from_tensor_parallel_region as all_gather_last_dim_from_tensor_parallel_region,
)
from tiled_torch.compat.megatron.mappings import all_to_all as all_to_all
from tiled_torch.compat.megatron.mappings import all_to_all_hp2sp as all_to_all_hp2sp
from tiled_torch.compat.megatron.mappings import all_to_all_sp2hp as all_to_all_sp2hp
from tiled_torch.compat.megatron.mappings import (
    copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    gather_from_tensor_model_parallel_region as gather_from_tensor_model_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    reduce_scatter_last_dim_to_tensor_parallel_region as reduce_scatter_last_dim_to_tensor_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
)
from tiled_torch.compat.megatron.mappings import (
    scatter_to_tensor_model_parallel_region as scatter_to_tensor_model_parallel_region,
)
from tiled_torch.compat.megatron.random import CheckpointWithoutOutput as CheckpointWithoutOutput
from tiled_torch.compat.megatron.random import checkpoint as checkpoint
from tiled_torch.compat.megatron.random import convert_cuda_rng_state as convert_cuda_rng_state
from tiled_torch.compat.megatron.random import get_cuda_rng_tracker as get_cuda_rng_tracker
from tiled_torch.compat.megatron.random import (
    get_data_parallel_rng_tracker_name as get_data_parallel_rng_tracker_name,
)
from tiled_torch.compat.megatron.random import (
    get_expert_parallel_rng_tracker_name as get_expert_parallel_rng_tracker_name,
)
from tiled_torch.compat.megatron.random import is_graph_safe_cuda_rng_tracker as is_graph_safe_cuda_rng_tracker
from tiled_torch.compat.megatron.random import model_parallel_cuda_manual_seed as model_parallel_cuda_manual_seed
from tiled_torch.compat.megatron.utils import gather_split_1d_tensor as gather_split_1d_tensor
from tiled_torch.compat.megatron.utils import split_tensor_into_1d_equal_chunks as split_tensor_into_1d_equal_chunks
