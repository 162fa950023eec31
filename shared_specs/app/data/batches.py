"""What one step is trained on, and rows of documents as such: labels at the seams, positions that begin anew."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np

from shared_specs.app.data.packing import Piece
from shared_specs.app.options import InputError

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of a step, [rows, S] int32 each: those of its first micro-batch come first.

    Attributes:
        input_ids: what goes in.
        shift_labels: what each position is to predict; -100 where nothing.
        position_ids: the place in its document of each token, where rows are of several; None where a row is one.
    """

    input_ids: np.ndarray
    shift_labels: np.ndarray
    position_ids: np.ndarray | None = None

    @classmethod
    def of_windows(cls, windows: np.ndarray) -> "Batch":
        """Return the batch of [rows, S + 1] ids: every token is to predict the one behind it."""
        return cls(input_ids=windows[:, :-1], shift_labels=windows[:, 1:])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return its arrays by name, without what is None."""
        return {name: array for name, array in vars(self).items() if array is not None}

    def micro_batches(self, count: int, mine: slice = slice(None)) -> list["Batch"]:
        """Return so many equal parts, one after the other; mine: of each, the rows that are wanted."""
        size = len(self.input_ids) // count
        parts = [{name: a[m * size : (m + 1) * size][mine] for name, a in self.arrays().items()} for m in range(count)]
        return [Batch(**part) for part in parts]

    @property
    def valid(self) -> int:
        """Labels that count."""
        return int((self.shift_labels != IGNORED).sum())


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Sequences that are held out of the data, and never trained on, in an order that is always the same.

    Attributes:
        rows: how many there are. take: makes the batch of the rows from one number to another.
    """

    rows: int
    take: Callable[[int, int], Batch]

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all rows, `size` at a time; the last batch is filled up with rows that have nothing to predict."""
        for first in range(0, self.rows, size):
            yield filled(self.take(first, min(first + size, self.rows)), size)

    def count(self, size: int) -> int:
        """Return how many batches of this size there are."""
        return -(-self.rows // size)


def filled(batch: Batch, rows: int) -> Batch:
    """Return the batch with as many rows as that, those that it has not with nothing to predict."""
    missing = rows - len(batch.input_ids)
    if missing == 0:
        return batch
    tokens = batch.input_ids.shape[1]
    more = {"input_ids": 0, "shift_labels": IGNORED, "position_ids": np.arange(tokens)}
    return Batch(
        **{
            name: np.concatenate([array, np.broadcast_to(np.asarray(more[name], np.int32), (missing, tokens))])
            for name, array in batch.arrays().items()
        }
    )


def held_rows(fraction: float, total: int, what: str) -> int:
    """Return how many of so many rows are held out: their part, but one at least.

    Args:
        what: the rows are, for messages.
    Raises:
        InputError: nothing would be left to train on.
    """
    held = max(1, round(fraction * total))
    if held >= total:
        raise InputError(
            f"finetune: --eval-fraction must leave something to train on, got {fraction} of {total} {what}. "
            "Pass more data or a smaller fraction."
        )
    return held


class Data(Protocol):
    """An endless stream of sequences, on which a run trains; it follows from the seed."""

    @property
    def told(self) -> str:
        """Return what it is, for the line that a run begins with."""
        ...

    @property
    def size(self) -> int:
        """Return the total number of tokens."""
        ...

    def at(self, step: int, rows: int) -> Batch:
        """Return the batch of step `step`, counted from 0, of so many rows."""
        ...

    def digest(self) -> str:
        """Return a digest of all tokens and labels, which a resumed run compares with its own."""
        ...

    def split(self, fraction: float) -> tuple[Self, HeldOut]:
        """Return what is left to train on, and what is held out of it; both follow from the data and the seed.

        Raises:
            InputError: nothing would be left to train on.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Tokenized documents, one after the other.

    Attributes:
        ids: int32. wanted: bool; whether a token is to be predicted, by those of its document before it.
        bounds: where each document begins, and where the last one ends.
    """

    ids: np.ndarray
    wanted: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, ids: Sequence[Any], wanted: Sequence[np.ndarray] | None = None) -> "Documents":
        """Return them together; ids: lists or arrays of integers; wanted: None where every token is."""
        flat = np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int32)
        labels = np.ones(flat.shape, bool) if wanted is None else np.concatenate([np.zeros(0, bool), *wanted])
        return cls(ids=flat, wanted=labels, bounds=np.cumsum([0, *map(len, ids)]))

    @property
    def lengths(self) -> list[int]:
        return np.diff(self.bounds).tolist()


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of pieces of documents, read in an order that is drawn anew for each epoch from (seed, epoch).

    Args:
        rows: of at most `tokens` tokens; one that is shorter is filled up with id 0, which nothing predicts.
        packed: whether positions begin anew with every piece; without it every row is one piece.
    """

    documents: Documents
    rows: Sequence[Sequence[Piece]]
    tokens: int
    seed: int
    packed: bool
    told: str

    @property
    def size(self) -> int:
        return len(self.documents.ids)

    def at(self, step: int, rows: int) -> Batch:
        """See `Data`."""
        chosen = []
        orders: dict[int, np.ndarray] = {}  # of the epoch at hand: rows come epoch after epoch
        for row in range(rows):
            epoch, place = divmod(step * rows + row, len(self.rows))
            if epoch not in orders:
                orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))}
            chosen.append(self.rows[orders[epoch][place]])
        return self._batch(chosen)

    def split(self, fraction: float) -> tuple[Self, HeldOut]:
        """See `Data`. The rows that are held out are drawn by the seed."""
        count = held_rows(fraction, len(self.rows), "sequences")
        order = np.random.default_rng([self.seed, len(self.rows), count]).permutation(len(self.rows))
        held = [self.rows[place] for place in sorted(order[:count])]
        kept = replace(self, rows=[self.rows[place] for place in sorted(order[count:])])
        return kept, HeldOut(rows=count, take=lambda first, last: self._batch(held[first:last]))

    def _batch(self, rows: Sequence[Sequence[Piece]]) -> Batch:
        found = Batch(
            input_ids=np.zeros((len(rows), self.tokens), np.int32),
            shift_labels=np.full((len(rows), self.tokens), IGNORED, np.int32),
            position_ids=np.zeros((len(rows), self.tokens), np.int32) if self.packed else None,
        )
        for number, row in enumerate(rows):
            self._fill({name: a[number] for name, a in found.arrays().items()}, row)
        return found

    def _fill(self, into: dict[str, np.ndarray], row: Sequence[Piece]) -> None:
        at = 0
        for document, start, stop in row:
            first = int(self.documents.bounds[document]) + start
            ids, wanted = (a[first : first + stop - start] for a in (self.documents.ids, self.documents.wanted))
            end = at + len(ids)
            into["input_ids"][at:end] = ids
            into["shift_labels"][at : end - 1] = np.where(wanted[1:], ids[1:], IGNORED)
            if self.packed:
                into["position_ids"][at:end] = np.arange(len(ids))
            at = end
        if self.packed:
            into["position_ids"][at:] = np.arange(self.tokens - at)

    def digest(self) -> str:
        """See `Data`."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for array in (self.documents.ids, self.documents.wanted, self.documents.bounds.astype(np.int64)):
            digest.update(array.tobytes())
        return digest.hexdigest()


def with_targets(documents: Documents, rows: Sequence[Sequence[Piece]]) -> list[Sequence[Piece]]:
    """Return the rows that have something to predict."""

    def wanted(piece: Piece) -> bool:
        first = int(documents.bounds[piece.document])
        return bool(documents.wanted[first + piece.start + 1 : first + piece.stop].any())

    return [row for row in rows if any(map(wanted, row))]
