"""Documents packed into one sequence: where each begins, where positions restart, and what its last token predicts.

A document is a run of tokens with one number. `documents` is [B or 1, S] everywhere, of all tokens of the sequences, whichever
of them a rank holds. Formulas in NumPy: `shared_specs.layers.documents`.
"""

from bisect import bisect_right

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shared_specs.layers.documents import check_documents
from tiled_torch.core.tensors import dtype_name

Starts = tuple[int, ...]  # places of the first tokens of a sequence's documents
# A model hands one tensor to all of its layers: one wait for the device in a step, instead of one in each of them.
_ROWS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def begins(documents: Tensor) -> Tensor:
    """Return [B, S], boolean: whether a token is the first of its document."""
    changed = documents[:, 1:] != documents[:, :-1]
    return F.pad(changed, (documents.shape[1] - changed.shape[1], 0), value=True)


def first_keys(documents: Tensor) -> Tensor:
    """Return [B, S]: the place of the first token of every token's document, the first key that it sees."""
    places = torch.arange(documents.shape[1], device=documents.device)
    return torch.where(begins(documents), places, 0).cummax(1).values


def documents_of_positions(positions: Tensor) -> Tensor:
    """Return [B, S], 0, 1, ...: a document begins wherever a position is not the one before it plus one."""
    return (torch.diff(positions, dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)


def documents_of_restarts(positions: Tensor) -> Tensor:
    """Return [B, S], 0, 1, ...: which document a token is in for the loss, whose labels do not look across a restart."""
    before, after = positions[:, :-1], positions[:, 1:]
    restarts = (after <= before) & (after != before).any(1, keepdim=True)
    return F.pad(restarts.cumsum(1), (positions.shape[1] - restarts.shape[1], 0))


def positions_in(documents: Tensor) -> Tensor:
    """Return [B, S]: the place of every token in its document."""
    return torch.arange(documents.shape[1], device=documents.device) - first_keys(documents)


def shifted_labels(labels: Tensor, documents: Tensor | None = None, ignore_index: int = -100) -> Tensor:
    """Return [B, S], what every token is to predict: the next label, but nothing at the end of a document."""
    shifted = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    if documents is None:
        return shifted
    ends = F.pad(begins(documents)[:, 1:], (0, 1), value=True)
    return shifted.masked_fill(ends, ignore_index)


def packed(positions: Tensor | None) -> Tensor | None:
    """Return the documents that positions [B or 1, S] tell apart; None where every sequence is one. Waits for the device."""
    if positions is None or positions.dim() != 2 or not positions.shape[1]:
        return None
    documents = documents_of_positions(positions)
    return documents if bool(documents[:, -1].any()) else None


def rows_of_documents(function: str, documents: Tensor, batch: int, tokens: int) -> tuple[Starts, ...]:
    """Return the starts of every sequence's documents, once where all sequences have the same.

    Raises:
        SpecError: documents are not [B or 1, S]. TypeError: they are no integers.
    """
    if not isinstance(documents, Tensor):
        check_documents(function, (), False, type(documents).__name__, batch, tokens)
    integer = not (documents.is_floating_point() or documents.is_complex())
    check_documents(function, tuple(documents.shape), integer, dtype_name(documents.dtype), batch, tokens)
    known = _ROWS.get(documents)
    if known is None or known[0] != documents._version:
        found: list[list[int]] = [[] for _ in documents]
        for row, place in begins(documents).nonzero().tolist():
            found[row].append(place)
        starts = tuple(map(tuple, found))
        known = documents._version, starts[:1] if len(set(starts)) == 1 else starts
        _ROWS[documents] = known
    return known[1]


def fragments(starts: Starts, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (first key, start, stop) of the parts of [start, stop) that lie in one document each."""
    found, place = [], start
    while place < stop:
        number = bisect_right(starts, place) - 1
        end = min(stop, starts[number + 1] if number + 1 < len(starts) else stop)
        found.append((starts[number], place, end))
        place = end
    return found
