"""Training text: read, tokenized, and cut into windows whose order depends on nothing but the seed."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.options import InputError


def read_text(path: str | None) -> str:
    """Return the text of a UTF-8 file; None is the English of Python's own manual, `pydoc_data.topics`.

    Raises:
        InputError: the file is missing, not a file, not UTF-8, or empty.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except FileNotFoundError:
        raise InputError(f"finetune: --text must be a text file, got {path}, which does not exist.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"finetune: --text must be UTF-8, got {path} with another byte at offset {error.start}. "
            "Convert it, for example with iconv."
        ) from None
    except OSError as error:
        raise InputError(f"finetune: --text {path} cannot be read ({error.strerror}).") from error
    if not text.strip():
        raise InputError(f"finetune: --text must hold text, got {path}, which is empty.")
    return text


@dataclass(frozen=True)
class Windows:
    """Sequences of `tokens` + 1 ids out of one long run of ids.

    An epoch is every window of a non-overlapping cut, shuffled; where the cut begins is drawn anew for each epoch, so
    that what is left over at the ends differs. Both follow from (seed, epoch): step s is the same in every run.
    """

    ids: np.ndarray
    tokens: int
    seed: int

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        return (len(self.ids) - 1) // self.tokens

    def batch(self, step: int, size: int) -> np.ndarray:
        """Return [size, tokens + 1] int32: the windows of step `step`, counted from 0."""
        found = np.empty((size, self.tokens + 1), np.int32)
        orders: dict[int, tuple[int, np.ndarray]] = {}  # of the epoch at hand: windows come epoch after epoch
        for row in range(size):
            epoch, place = divmod(step * size + row, self.per_epoch)
            if epoch not in orders:
                orders = {epoch: self._order(epoch)}
            first, order = orders[epoch]
            start = first + order[place] * self.tokens
            found[row] = self.ids[start : start + self.tokens + 1]
        return found

    def digest(self) -> str:
        """Return a digest of the tokens, which a resumed run compares with its own."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        """Where the cut of an epoch begins, and its windows in the order they are read."""
        random = np.random.default_rng([self.seed, epoch])
        first = int(random.integers(len(self.ids) - self.per_epoch * self.tokens))
        return first, random.permutation(self.per_epoch)


def make_windows(path: str | None, tokenizer: ModelTokenizer, vocabulary: int, tokens: int, seed: int) -> Windows:
    """Return the windows of a text file, or of the default text.

    Args:
        vocabulary: size of the model's vocabulary, which every id has to be below.
        tokens: context length.

    Raises:
        InputError: see `read_text`; or the text is too short for one window.
    """
    ids = tokenizer.encode(read_text(path))
    name = "the default text" if path is None else path
    if len(ids) < tokens + 1:
        raise InputError(
            f"finetune: --text must have at least {tokens + 1} tokens for --tokens {tokens}, got {len(ids)} in {name}. "
            "Pass a longer text or a smaller --tokens."
        )
    if ids.max() >= vocabulary:
        raise InputError(
            f"finetune: --model has {vocabulary} words in its vocabulary and its tokenizer gave word {ids.max()}. "
            "Tokenizer and weights do not belong together."
        )
    return Windows(ids, tokens, seed)
