"""The README's tables are what its records say, and its local links and make targets exist."""

import re
from pathlib import Path

import pytest

from shared_specs.app.bench.records import FORMAT, read_records
from shared_specs.app.bench.tables import RECORDS, render

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_come_from_records() -> None:
    assert "No record yet" not in TEXT
    assert render(TEXT, read_records(RECORDS)) == TEXT, "run: python -m shared_specs.app.bench.tables"


def test_a_table_that_differs_is_noticed() -> None:
    results = [{"variant": "tiled", "workload": "w", "ratio_to_plain": 1.25}]
    record = {"kind": "mlp", "half": "tiled_torch", "date": "2026-01-01T00:00:00Z", "results": results, "versions": {}}
    record |= {"hardware": {"cpu": "c", "cores": 1, "memory_bytes": 2**30}}
    empty = "<!-- table: mlp-torch -->\n<!-- end -->"
    written = render(empty, [record])
    assert "| tiled | 1.25 |" in written
    assert render(written, [record]) == written
    tampered = written.replace("1.25", "1.05")
    assert render(tampered, [record]) != tampered


def test_records_are_complete() -> None:
    for record in read_records(RECORDS):
        assert record["format"] == FORMAT
        assert {"kind", "half", "date", "command", "commit", "hardware", "versions", "results"} <= set(record)
        assert record["results"]


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", TEXT))
def test_local_links_exist(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z0-9-]+)", TEXT))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
