"""Megatron-core's helpers that cut tensors and vocabularies into equal parts, with its tp_group."""

from typing import Any

from torch import Tensor

from shared_specs.collectives.partitions import VocabUtility as VocabUtility
from tiled_torch.collectives import splitting
from tiled_torch.collectives.splitting import split_tensor_along_last_dim as split_tensor_along_last_dim
from tiled_torch.compat.megatron.parallel_state import group_or_default


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: Any = None) -> Tensor:
    """Return this rank's stretch of the elements of a tensor that all ranks have.

    As `tiled_torch.parallel.split_tensor_into_1d_equal_chunks`; tp_group None: `parallel_state`'s.
    """
    return splitting.split_tensor_into_1d_equal_chunks(tensor, new_buffer, group=group_or_default(tp_group))


def gather_split_1d_tensor(tensor: Tensor, tp_group: Any = None) -> Tensor:
    """Return the elements of all ranks side by side, the inverse of `split_tensor_into_1d_equal_chunks`.

    As `tiled_torch.parallel.gather_split_1d_tensor`; tp_group None: `parallel_state`'s.
    """
    return splitting.gather_split_1d_tensor(tensor, group=group_or_default(tp_group))
