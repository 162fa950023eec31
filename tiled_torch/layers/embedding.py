"""Rows of an embedding whose vocabulary is split over ranks: each rank looks up its own entries, and the results are added."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shared_specs.collectives import checks as collective_checks
from shared_specs.collectives.partitions import vocab_partition
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from shared_specs.layers import checks as layer_checks
from tiled_torch.collectives.conjugates import Join, Keep, Sum, SumSplit, move
from tiled_torch.collectives.groups import not_compiled, rank_group
from tiled_torch.core.autocast import operand
from tiled_torch.core.tensors import refuse_dtensor
from tiled_torch.layers.vocab_rows import own_rows

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
    """weight[ids] of a vocabulary that is split over the ranks of a group.

    Args:
        ids: [*tokens], int32 or int64, the same on every rank, in [0, vocab_size).
        weight: [V / R, H], this rank's entries.
        vocab_size: V, where ranks do not all hold V / R entries: partitions are those of
            `shared_specs.collectives.partitions.vocab_range`, or equal with padding at the end, which gets no gradient.
        reduce_scatter_embeddings: return this rank's tokens only (for sequence parallelism).
        sequence_dim: the dim of ids that is then split; split_sizes: tokens of every rank there, None for equal parts.
        deterministic: look up by indexing, whose gradient is added in one order on a GPU too (it sorts), instead of by
            torch's embedding, whose gradient is added by atomics there.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [*tokens, H] in the dtype of weight, the same on every rank, or this rank's tokens of it. Each row comes from one
        rank and zeros from the others, so that it is exact.
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
            sizes = collective_checks.check_sizes(_NAME, "split_sizes", split_sizes, over.size)
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
