"""Documents put together to sequences of a fixed length: whole where they fit, cut where nothing does."""

from collections.abc import Sequence
from typing import NamedTuple

# Documents that are looked at before a row is taken for full.
_LOOK_AHEAD = 256


class Piece(NamedTuple):
    """A run of a document's tokens.

    Attributes:
        document: its number. start, stop: of its tokens.
    """

    document: int
    start: int
    stop: int


def pack(lengths: Sequence[int], tokens: int, *, cut: bool) -> list[list[Piece]]:
    """Return rows of pieces of documents, each document once, in nearly the order they are given.

    First fit: a row takes whole documents, the first ones of the next 256 that have room. What room is then left, no whole
    document fits into. With `cut` the beginning of the next document fills it, and the rest of that document stands first in
    line as a document of its own; every row has exactly `tokens` tokens, and what is left over at the end is in none.
    Without it the row stays that short.

    Args:
        lengths: tokens of each document; an empty one is in no row, and without `cut` none is longer than `tokens`.
        tokens: of a row.
    """
    waiting = [Piece(document, 0, length) for document, length in enumerate(lengths) if length][
        ::-1
    ]  # the next one last
    rows = []
    while waiting:
        row, room = _first_fit(waiting, tokens)
        if cut and room:
            if not waiting:
                break
            whole = waiting.pop()
            row.append(whole._replace(stop=whole.start + room))
            waiting.append(whole._replace(start=whole.start + room))
        rows.append(row)
    return rows


def _first_fit(waiting: list[Piece], room: int) -> tuple[list[Piece], int]:
    """Take what a row has room for out of `waiting`; returns it, and the room that is left."""
    row: list[Piece] = []
    passed: list[Piece] = []
    while room and waiting and len(passed) < _LOOK_AHEAD:
        piece = waiting.pop()
        if piece.stop - piece.start <= room:
            row.append(piece)
            room -= piece.stop - piece.start
        else:
            passed.append(piece)
    waiting.extend(reversed(passed))
    return row, room
