"""Rows of an embedding whose vocabulary is split over ranks: each rank looks up its own entries, and the results are added."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.collectives import checks as collective_checks
from shared_specs.collectives.partitions import VocabPartition, vocab_partition
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from shared_specs.layers import checks as layer_checks
from tiled_torch.collectives.conjugates import Join, Keep, Sum, SumSplit, move
from tiled_torch.collectives.groups import not_compiled, rank_group
from tiled_torch.core.autocast import operand
from tiled_torch.core.operands import has_values
from tiled_torch.core.tensors import refuse_dtensor

_NAME = "vocab_parallel_embedding"


@not_compiled
def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    vocab_size: int | None = None,
    reduce_scatter_embeddings: bool = False,
    sequence_dim: int = 0,
    split_sizes: Sequence[int] | None = None,
    deterministic: bool = False,
    group: Any = None,
) -> Tensor:
    """Return weight[ids] for a vocabulary that is split over the ranks of a group.

    Args:
        ids: [*tokens], int32 or int64, the same on every rank, in [0, vocab_size).
        weight: [V / R, H], this rank's entries.
        vocab_size: V, needed if the ranks do not all hold V / R entries. Partitions are those of
            `shared_specs.collectives.partitions.vocab_range`, or equal with padding at the end, which gets no gradient.
        reduce_scatter_embeddings: return only this rank's tokens (for sequence parallelism).
        sequence_dim: the dim of ids that reduce_scatter_embeddings splits. split_sizes: the number of tokens of every rank
            along it; None: equal parts.
        deterministic: look up by indexing instead of by torch's embedding. On a GPU, the gradient of indexing is added in a
            fixed order (it sorts); that of the embedding is added by atomics.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [*tokens, H] in the dtype of weight, the same on every rank, or this rank's tokens of it. Each row comes from one rank
        and zeros come from the others, so the sum is exact.
    Raises:
        SpecError: shapes or dtypes that do not fit; on a CPU, an id outside [0, V) (on other devices its row is NaN).
        TypeError, UnsupportedError: as `copy_to_tensor_parallel_region`.
    Source: Megatron-LM, arXiv 1909.08053 section 3.
    """
    for name, tensor in (("ids", ids), ("weight", weight)):
        if not isinstance(tensor, Tensor):
            fail_type(_NAME, name, "an array", type(tensor).__name__)
        refuse_dtensor(_NAME, name, tensor, "Pass this rank's part: to_local().")
    flags = {"reduce_scatter_embeddings": reduce_scatter_embeddings, "deterministic": deterministic}
    layer_checks.check_flags(_NAME, **flags)
    checks.check_count(_NAME, "vocab_size", vocab_size)
    over = rank_group(_NAME, group)
    layer_checks.check_ids(_NAME, operand(ids, None), operand(weight, None))
    dim, sizes = 0, None
    shape = tuple(ids.shape)
    if reduce_scatter_embeddings:
        dim = collective_checks.check_dim(_NAME, sequence_dim, shape, of="ids")
        if split_sizes is None:
            collective_checks.check_even(_NAME, shape, dim, over.size, of="ids")
        else:
            sizes = collective_checks.check_split_sizes(_NAME, "split_sizes", split_sizes, over.size)
            collective_checks.check_total(_NAME, "split_sizes", sizes, shape, dim, of="ids")
    elif split_sizes is not None or sequence_dim != 0:
        name, given = ("split_sizes", split_sizes) if split_sizes is not None else ("sequence_dim", sequence_dim)
        fail(_NAME, name, "left out without reduce_scatter_embeddings", given)
    part = vocab_partition(_NAME, vocab_size, weight.shape[0], over.size, over.rank)
    y = own_rows(_NAME, ids, weight, part, deterministic=deterministic)
    if not over.several:
        return y
    return (
        move(y, over, SumSplit(dim, sizes), Join(dim, sizes))
        if reduce_scatter_embeddings
        else move(y, over, Sum(), Keep())
    )


def own_rows(
    function: str,
    ids: Tensor,
    weight: Tensor,
    part: VocabPartition,
    *,
    deterministic: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the rows of the entries that this rank holds; zero for the others'.

    An id outside the vocabulary is a SpecError on a CPU, and a row of NaN in compiled code and on other devices, which
    reading the ids would stall.

    Args:
        weight: this rank's entries, of which `part` says where they are.
        deterministic: by indexing, whose gradient is added in one order; without padding_idx.
        padding_idx: the entry, of the whole vocabulary, that gets no gradient.
    """
    missing = (ids < 0) | (ids >= part.vocab)
    read = ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if read and has_values(ids) and bool(missing.any()):
        fail(function, "ids", f"in [0, {part.vocab})", int(ids[missing][0]))
    others = (ids < part.start) | (ids >= part.start + part.size)
    local = (ids - part.start).masked_fill(others, 0)
    if part.size == 0:  # a rank without entries: zeros that still lead to its weight
        rows = weight.new_zeros((*ids.shape, weight.shape[1])) + weight[:0].sum()
    else:
        padding = -1 if padding_idx is None else padding_idx - part.start
        assert not (deterministic and padding_idx is not None)
        own_padding = padding if 0 <= padding < part.size else None
        rows = weight[local] if deterministic else F.embedding(local, weight, own_padding)
        rows = rows.masked_fill(others.unsqueeze(-1), 0)
    return rows if read else rows.masked_fill(missing.unsqueeze(-1), torch.nan)
