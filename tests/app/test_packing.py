"""Documents as packed rows: whole where they fit, each label predicted from its own document, the same in every run."""

import datetime
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared_specs.app.data.batches import IGNORED, Batch, Documents, Rows, with_targets
from shared_specs.app.data.choice import make_data
from shared_specs.app.data.packing import Piece, pack
from shared_specs.app.data.text import read_documents
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions, InputError
from tests.tiny_model import write_inputs

DAY = datetime.date(2026, 11, 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs")) / "model"


def data(model, **options):
    files = read_model(model)
    return make_data(FinetuneOptions(model=str(model), **options), files, files.config, DAY)


def test_whole_documents_go_where_they_fit_and_one_is_cut_where_none_does():
    rows = pack([6, 5, 3, 0, 4], 8, cut=True)
    # 6 leaves 2, into which no document fits: the next one begins there, and goes on first in the next row.
    assert rows == [[Piece(0, 0, 6), Piece(1, 0, 2)], [Piece(1, 2, 5), Piece(2, 0, 3), Piece(4, 0, 2)]]
    assert pack([6, 5, 3, 0, 4], 8, cut=False) == [[Piece(0, 0, 6)], [Piece(1, 0, 5), Piece(2, 0, 3)], [Piece(4, 0, 4)]]


def test_rows_are_full_and_every_token_is_in_one():
    lengths = np.random.default_rng(0).integers(0, 200, size=300).tolist()
    rows = pack(lengths, 64, cut=True)
    assert {sum(piece.stop - piece.start for piece in row) for row in rows} == {64}
    taken = sorted(piece for row in rows for piece in row)
    for number, length in enumerate(lengths):
        own = [piece for piece in taken if piece.document == number]
        assert [piece.start for piece in own] == [0, *(piece.stop for piece in own)][: len(own)]
        assert all(piece.stop <= length for piece in own)
    assert sum(lengths) - 64 * len(rows) < 64
    whole = [length for length in lengths if length <= 64]
    kept = pack(whole, 64, cut=False)
    assert sorted(piece for row in kept for piece in row) == [
        Piece(n, 0, length) for n, length in enumerate(whole) if length
    ]
    assert all(sum(piece.stop for piece in row) <= 64 for row in kept)


def rows_of(ids, wanted=None, tokens=8, cut=True, packed=True):
    documents = Documents.of([np.asarray(each) for each in ids], wanted)
    rows = pack(documents.lengths, tokens, cut=cut)
    return Rows(documents=documents, rows=rows, tokens=tokens, seed=0, packed=packed, told="")


def test_labels_at_the_seams_and_positions():
    found = rows_of([[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]).at(0, 1)
    assert found.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert found.shift_labels.tolist() == [[2, 3, -100, 5, 6, 7, -100, -100]]
    assert found.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert found.valid == 5


def test_padding_and_tokens_that_are_not_wanted_predict_nothing():
    wanted = [np.array([True, True, False]), np.array([False, False, True])]
    found = rows_of([[1, 2, 3], [4, 5, 6]], wanted, cut=False).at(0, 1)
    assert found.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert found.shift_labels.tolist() == [[2, -100, -100, -100, 6, -100, -100, -100]]
    assert found.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert rows_of([[1, 2, 3]], cut=False, packed=False).at(0, 1).position_ids is None


def test_rows_follow_from_seed_and_step_and_each_is_read_once_in_an_epoch():
    rows = rows_of([[n] * 8 for n in range(1, 8)])
    read = [rows.at(step, 2).input_ids[:, 0].tolist() for step in range(7)]
    flat = [n for pair in read for n in pair]
    assert sorted(flat[:7]) == sorted(flat[7:]) == [*range(1, 8)]
    assert flat[:7] != flat[7:]
    assert [rows.at(step, 2).input_ids[:, 0].tolist() for step in range(6, -1, -1)] == read[::-1]
    assert rows.at(0, 7).input_ids[:, 0].tolist() == flat[:7], "whatever the batch"
    assert replace(rows, seed=1).at(0, 7).input_ids[:, 0].tolist() != flat[:7]


def test_digest_knows_tokens_labels_and_documents():
    same = [np.array([True, True, True]), np.array([True, True])]
    other = [np.array([True, True, True]), np.array([False, True])]
    digests = [
        rows_of(*given).digest()
        for given in (
            ([[1, 2, 3], [4, 5]], same),
            ([[1, 2, 3], [4, 6]],),
            ([[1, 2], [3, 4, 5]],),
            ([[1, 2, 3], [4, 5]], other),
        )
    ]
    assert len(set(digests)) == 4
    assert rows_of([[1, 2, 3], [4, 5]]).digest() == digests[0]


def test_rows_without_anything_to_predict_are_left_out():
    documents = Documents.of([[1], [2], [3, 4]])
    assert with_targets(documents, [[Piece(0, 0, 1), Piece(1, 0, 1)], [Piece(2, 0, 2)]]) == [[Piece(2, 0, 2)]]


def test_micro_batches_are_the_rows_in_order():
    batch = Batch.of_windows(np.arange(8 * 3).reshape(8, 3))
    first, second = batch.micro_batches(2, slice(2, 4))
    assert first.input_ids[:, 0].tolist() == [6, 9]
    assert second.shift_labels[:, -1].tolist() == [20, 23]


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("text", "one\ntwo\n\nthree\n \n\n four\n", ["one\ntwo", "three", " four\n"]),
        ("text.jsonl", '{"text": "one\\n\\ntwo"}\n\n{"text": "three"}\n', ["one\n\ntwo", "three"]),
    ],
)
def test_documents_of_a_file(tmp_path, name, content, documents):
    (tmp_path / name).write_text(content)
    assert read_documents(str(tmp_path / name)) == documents


def test_the_default_text_has_a_document_for_each_topic():
    documents = read_documents(None)
    assert len(documents) > 50
    assert any("standard type hierarchy" in document for document in documents)


def test_packed_text_ends_its_documents(model, tmp_path):
    text = tmp_path / "text"
    text.write_text("the sun\n\na house\n\non 42 tiles")
    found = data(model, text=str(text), pack=True, tokens=8)
    assert "in 3 documents, packed into 3 sequences by " in found.told
    ids = np.concatenate([found.at(step, 1).input_ids[0] for step in range(3)]).tolist()
    assert ids.count(257) == 3
    batch = found.at(0, 3)
    assert ((batch.position_ids[:, 1:] == 0) <= (batch.shift_labels[:, :-1] == IGNORED)).all()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("text", b"", "which is empty"),
        ("text", b"short", "at least 8 tokens for --tokens 8 with --pack, got 6 in"),
        ("text.jsonl", b'{"text": "one"}\n{"texts": "two"}', 'line 2 must be JSON with a "text"'),
        ("text.jsonl", b"one", 'line 1 must be JSON with a "text"'),
        ("text.jsonl", b'["one"]', 'line 1 must be JSON with a "text"'),
    ],
)
def test_refused(model, tmp_path: Path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"^finetune: --text .*{words}"):
        data(model, text=str(tmp_path / name), pack=True, tokens=8)
