"""The kernels' table: a default for every op on every architecture, and what is measured replaces it for its own shape."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from shared_specs.errors import SpecError
from shared_specs.kernels import blocks
from shared_specs.kernels.blocks import (
    CANDIDATES,
    DEFAULTS,
    DETERMINISTIC,
    FLOAT32,
    PAIR,
    PALLAS_UNMEASURED,
    PERSISTENT,
    ROW_ALONE,
    SPILLING,
    UNMEASURED,
    Blocks,
    Paths,
    candidates_on,
)
from shared_specs.shards import KERNEL_MULTIPLE

EVERY = [
    (kernels, architecture, op)
    for kernels, table in DEFAULTS.items()
    for architecture, ops in table.items()
    for op in ops
]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tuned_blocks.json"
    path.write_text("[]")
    monkeypatch.setattr(blocks, "TUNED", path)
    blocks._tuned.cache_clear()
    yield path
    blocks._tuned.cache_clear()


@pytest.mark.parametrize(("kernels", "architecture", "op"), EVERY)
def test_defaults(kernels, architecture, op):
    found = DEFAULTS[kernels][architecture][op]
    for size in (found.rows, found.columns, found.depth, found.warps):
        assert size & (size - 1) == 0
    # a shard's length is a multiple of these, so that no block of a deterministic sum crosses the end of a shard
    assert KERNEL_MULTIPLE % found.rows == 0
    assert KERNEL_MULTIPLE % found.depth == 0
    assert found.halves in (1, 2)


def test_every_architecture_has_the_same_ops():
    for table in DEFAULTS.values():
        assert len({tuple(sorted(ops)) for ops in table.values()}) == 1


def test_candidates_are_of_known_ops_and_hold_the_defaults():
    for kernels, ops in CANDIDATES.items():
        for table in DEFAULTS[kernels].values():
            assert all(table[op] in candidates for op, candidates in ops.items())
            assert set(ops) == set(table)


def test_candidates_that_spill_on_an_architecture_are_not_tried_there():
    for architecture, ops in SPILLING.items():
        for op, spilling in ops.items():
            tried = candidates_on("triton", op, architecture)
            assert set(spilling) < set(CANDIDATES["triton"][op])
            assert DEFAULTS["triton"][architecture][op] in tried.values()
            assert not set(spilling) & set(tried.values())
            assert all(CANDIDATES["triton"][op][number] == blocks_ for number, blocks_ in tried.items())
    assert candidates_on("triton", "linear", "sm_90") == dict(enumerate(CANDIDATES["triton"]["linear"]))


def test_what_was_measured_holds_for_its_own_shape_only(table):
    fast = Blocks(rows=64, columns=64, depth=32)
    key = {"kernels": "triton", "op": "dgated", "architecture": "sm_90", "dtype": "bfloat16", "shape": [14336, 4096]}
    ways = {**key, "op": "paths", "paths": asdict(Paths(up="dual"))}
    blocks.write_tuned([{**key, "blocks": asdict(Blocks(rows=32, columns=32))}, ways], table)
    blocks.write_tuned([{**key, "blocks": asdict(fast)}], table)
    assert len(json.loads(table.read_text())) == 2  # replaced
    default = DEFAULTS["triton"]["sm_90"]["dgated"]
    assert blocks.blocks_for("triton", "dgated", "sm_90", "bfloat16", (14336, 4096)) == fast
    assert blocks.blocks_for("triton", "dgated", "sm_90", "float16", (14336, 4096)) == default
    assert blocks.blocks_for("triton", "dgated", "sm_90", "bfloat16", (14336, 8192)) == default
    assert blocks.paths_for("triton", "sm_90", "bfloat16", (14336, 4096)) == Paths(up="dual")
    assert blocks.paths_for("triton", "sm_90", "bfloat16", (14336, 8192)) == UNMEASURED
    assert blocks.paths_for("triton", "sm_90", "float32", (14336, 4096)) == FLOAT32
    assert blocks.paths_for("pallas", "sm_90", "bfloat16", (14336, 4096)) == PALLAS_UNMEASURED


def entry(rows: int, **changes) -> dict:
    key = {"kernels": "triton", "op": "dgated", "architecture": "sm_90", "dtype": "bfloat16", "shape": [64, 32]}
    return key | changes | {"blocks": asdict(Blocks(rows=rows, columns=64, depth=32))}


def rows_of(shape: tuple[int, int] = (64, 32)) -> int:
    blocks._tuned.cache_clear()
    return blocks.blocks_for("triton", "dgated", "sm_90", "bfloat16", shape).rows


def test_the_users_table_comes_before_the_projects_and_this_before_the_defaults(table, tmp_path, monkeypatch):
    blocks.write_tuned([entry(32), entry(32, shape=[8, 8])], table)
    monkeypatch.delenv("TILED_TUNED_BLOCKS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "config" / "tiled-mlp" / "tuned_blocks.json"
    assert blocks.user_table() == own
    assert (blocks.tables(), rows_of()) == ((table,), 32)
    blocks.write_tuned([entry(256)], own)
    assert json.loads(table.read_text()) == [entry(32), entry(32, shape=[8, 8])], "the package's stays as it is"
    assert blocks.tables() == (own, table)
    assert [rows_of(shape) for shape in ((64, 32), (8, 8), (4, 4))] == [
        256,
        32,
        DEFAULTS["triton"]["sm_90"]["dgated"].rows,
    ]
    other = tmp_path / "other.json"
    monkeypatch.setenv("TILED_TUNED_BLOCKS", str(other))
    assert (blocks.tables(), rows_of()) == ((table,), 32), "which is not there yet"
    blocks.write_tuned([entry(16)], other)
    assert rows_of() == 16
    monkeypatch.setenv("TILED_TUNED_BLOCKS", "")
    assert (blocks.user_table(), rows_of()) == (None, 32)
    monkeypatch.delenv("TILED_TUNED_BLOCKS")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert blocks.user_table() == tmp_path / ".config" / "tiled-mlp" / "tuned_blocks.json"


@pytest.mark.parametrize("text", ["[{]", '[{"kernels": "triton"}]', '[{"blocks": 3}]', "3"])
def test_a_damaged_table_is_named(table, tmp_path, monkeypatch, text):
    own = tmp_path / "own.json"
    own.write_text(text)
    monkeypatch.setenv("TILED_TUNED_BLOCKS", str(own))
    with pytest.raises(SpecError, match=r"^blocks: the table of tune must be as tune wrote it, got .*own\.json with "):
        rows_of()


def test_only_a_record_chooses_what_may_lose():
    """Untried kernels are candidates; until they are measured the vendor makes the products, with one elementwise pass."""
    assert Paths(up="vendor", down="vendor") == UNMEASURED
    untried = {"dgated": PERSISTENT, "glu_up_aux": PAIR, "cross_entropy": ROW_ALONE}
    for op, blocks_ in untried.items():
        assert blocks_ in CANDIDATES["triton"][op]
        assert all(table[op] != blocks_ for table in DEFAULTS["triton"].values())
    assert not any(found.persistent for table in DEFAULTS["triton"].values() for found in table.values())


def test_the_committed_table_can_be_read():
    blocks._tuned.cache_clear()
    assert blocks.blocks_for("triton", "linear", "sm_90", "bfloat16", (1, 1)) == DEFAULTS["triton"]["sm_90"]["linear"]
    for entry in json.loads(blocks.TUNED.read_text()):
        assert ("paths" in entry) == (entry["op"] == "paths")


def test_a_deterministic_call_leaves_nothing_to_the_vendor():
    assert "vendor" not in asdict(DETERMINISTIC).values()
