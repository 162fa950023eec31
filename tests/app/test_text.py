"""Training text: what is refused, and windows that follow from the seed alone."""

import numpy as np
import pytest

from shared_specs.app.data.text import Windows, make_windows, read_text
from shared_specs.app.options import InputError
from tests.tiny_model import tiny_tokenizer, write_text


def windows(ids=1000, tokens=64, seed=0):
    return Windows(np.arange(ids, dtype=np.int32), tokens, seed)


def test_default_text_is_the_manual():
    text = read_text(None)
    assert "The standard type hierarchy" in text
    assert len(text) > 300_000


def test_byte_order_mark_is_dropped(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbfone two")
    assert read_text(str(file)) == "one two"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "which does not exist"),
        (b"", "which is empty"),
        (b" \n\t ", "which is empty"),
        (b"abc\xff\xfe", "UTF-8, got .* another byte at offset 3"),
        (b"a few words", "at least 65 tokens for --tokens 64, got 11"),
    ],
)
def test_refused(tmp_path, content, words):
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=f"^finetune: --text must (.*){words}"):
        make_windows(str(file), tiny_tokenizer(), 272, 64, 0)


def test_folder_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"--text .* cannot be read"):
        read_text(str(tmp_path))


def test_words_beyond_the_vocabulary_are_refused(tmp_path):
    file = write_text(tmp_path / "text")
    with pytest.raises(InputError, match=r"do not belong together"):
        make_windows(str(file), tiny_tokenizer(), 260, 64, 0)


def test_shortest_text_that_fits(tmp_path):
    file = tmp_path / "text"
    file.write_text("x" * 65)
    cut = make_windows(str(file), tiny_tokenizer(), 272, 64, 0)
    assert cut.batch(5, 2).shape == (2, 65)


def test_a_window_is_a_run_of_the_text_with_its_targets():
    for step in range(20):
        batch = windows().batch(step, 3)
        assert batch.shape == (3, 65)
        assert batch.dtype == np.int32
        assert (np.diff(batch) == 1).all()


def test_an_epoch_reads_every_window_once():
    cut = windows(ids=1000, tokens=64)
    assert cut.per_epoch == 15
    for epoch in range(3):
        starts = sorted(cut.batch(step, 1)[0, 0] for step in range(15 * epoch, 15 * (epoch + 1)))
        assert np.diff(starts).tolist() == [64] * 14
        assert 0 <= starts[0]
        assert starts[-1] + 64 <= 999


def test_order_follows_from_seed_and_step():
    read = [windows(seed=4).batch(step, 2) for step in range(30)]
    again = [windows(seed=4).batch(step, 2) for step in reversed(range(30))][::-1]
    np.testing.assert_array_equal(read, again)
    assert not np.array_equal(read, [windows(seed=5).batch(step, 2) for step in range(30)])
    # The same stream whatever the batch: two steps of two are four steps of one.
    np.testing.assert_array_equal(read[3], np.concatenate([windows(seed=4).batch(step, 1) for step in (6, 7)]))


def test_epochs_differ():
    cut = windows()
    first, second = (np.stack([cut.batch(15 * epoch + step, 1)[0] for step in range(15)]) for epoch in range(2))
    assert not np.array_equal(first, second)


def test_digest_knows_the_text():
    assert windows(ids=1000).digest() == windows(ids=1000, seed=3).digest()
    assert windows(ids=1000).digest() != windows(ids=1001).digest()
