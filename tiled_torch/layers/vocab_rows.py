"""A rank's own rows of an embedding whose vocabulary is split: what is added over the ranks gives every row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.collectives.partitions import VocabPartition
from shared_specs.errors import fail


def own_rows(
    function: str,
    ids: Tensor,
    weight: Tensor,
    part: VocabPartition,
    *,
    deterministic: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The rows of the entries that this rank holds; zero for the others'.

    An id outside the vocabulary is a SpecError on a CPU, and a row of NaN in compiled code and on other devices, which
    reading the ids would stall.

    Args:
        weight: this rank's entries, of which `part` says where they are.
        deterministic: by indexing, whose gradient is added in one order; without padding_idx.
        padding_idx: the entry, of the whole vocabulary, that gets no gradient.
    """
    missing = (ids < 0) | (ids >= part.vocab)
    read = ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if read and bool(missing.any()):
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
