"""Training text: read, tokenized, and cut into windows whose order depends on nothing but the seed."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shared_specs.app.data.batches import IGNORED, Batch, HeldOut, held_rows
from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.options import InputError


def read_text(path: str | None) -> str:
    """Return the text of a UTF-8 file; None is the English of Python's own manual, `pydoc_data.topics`.

    Raises:
        InputError: see `read_file`.
    """
    return "\n\n".join(_manual()) if path is None else read_file(path, "--text")


def read_documents(path: str | None) -> list[str]:
    """Return the documents of a UTF-8 file; None is the manual of `read_text`, each topic a document.

    Of a file whose name ends in .jsonl they are the "text" of each line; of any other what blank lines part.

    Raises:
        InputError: see `read_file`; or a line is no JSON with a "text".
    """
    if path is None:
        return _manual()
    text = read_file(path, "--text")
    if not path.endswith(".jsonl"):
        return [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
        except (ValueError, TypeError, KeyError):
            document = None
        if not isinstance(document, str):
            raise InputError(f'finetune: --text {path}: line {number} must be JSON with a "text", {{"text": "..."}}.')
        found.append(document)
    return found


def _manual() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_file(path: str, option: str) -> str:
    """Return the text of a UTF-8 file; option: that it was given by, for messages.

    Raises:
        InputError: the file is missing, not a file, not UTF-8, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except FileNotFoundError:
        raise InputError(f"finetune: {option} must be a text file, got {path}, which does not exist.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"finetune: {option} must be UTF-8, got {path} with another byte at offset {error.start}. "
            "Convert it, for example with iconv."
        ) from None
    except OSError as error:
        raise InputError(f"finetune: {option} {path} cannot be read ({error.strerror}).") from error
    if not text.strip():
        raise InputError(f"finetune: {option} must hold text, got {path}, which is empty.")
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
    def told(self) -> str:
        """See `batches.Data`."""
        return f"text of {self.size} tokens"

    @property
    def size(self) -> int:
        """Return the total number of tokens."""
        return len(self.ids)

    @property
    def per_epoch(self) -> int:
        """Windows in an epoch."""
        return (len(self.ids) - 1) // self.tokens

    def split(self, fraction: float) -> tuple["Windows", HeldOut]:
        """Return all but the last tokens to train on, and the last ones: of as many windows as make up the fraction.

        The last window is filled up, so that each of the tokens but the first is predicted once.
        """
        tokens = self.tokens
        held = self.ids[-max(held_rows(fraction, len(self.ids), "tokens"), 2) :]
        kept = self.ids[: -len(held)]
        if len(kept) < tokens + 1:
            raise InputError(
                f"finetune: --eval-fraction must leave {tokens + 1} tokens to train on for --tokens {tokens}, got "
                f"{fraction}, which leaves {len(kept)} of {len(self.ids)}. Pass a longer text or a smaller fraction."
            )

        def take(first: int, last: int) -> Batch:
            found = Batch(
                input_ids=np.zeros((last - first, tokens), np.int32),
                shift_labels=np.full((last - first, tokens), IGNORED, np.int32),
            )
            for row in range(last - first):
                ids = held[(first + row) * tokens :][: tokens + 1]
                found.input_ids[row, : len(ids) - 1] = ids[:-1]
                found.shift_labels[row, : len(ids) - 1] = ids[1:]
            return found

        return Windows(kept, tokens, self.seed), HeldOut(rows=-(-(len(held) - 1) // tokens), take=take)

    def at(self, step: int, rows: int) -> Batch:
        """Return the batch of step `step`."""
        return Batch.of_windows(self.batch(step, rows))

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
        """Return the start of an epoch's cut, and its windows in the order they are read."""
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
    check_vocabulary(ids, vocabulary)
    return Windows(ids, tokens, seed)


def check_vocabulary(ids: np.ndarray, vocabulary: int) -> None:
    """Refuse ids of words that the model does not have.

    Raises:
        InputError: there is one.
    """
    if ids.max() >= vocabulary:
        raise InputError(
            f"finetune: --model has {vocabulary} words in its vocabulary and its tokenizer gave word {ids.max()}. "
            "Tokenizer and weights do not belong together."
        )
