"""The README's tables are what its records say, and its local links and make targets exist."""

import re
from pathlib import Path

import pytest

from shared_specs.app.tables import BLOCK, RECORDS, render
from shared_specs.records import FORMAT, read_records

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_come_from_records() -> None:
    records = read_records(RECORDS)
    assert BLOCK.search(TEXT)
    assert "No record yet" not in TEXT
    assert render(TEXT, records) == TEXT, "run: python -m shared_specs.app.tables"


def test_a_changed_number_is_noticed() -> None:
    tampered = re.sub(r"\| (\d+)\.(\d+) \|", "| 9.99 |", TEXT, count=1)
    assert tampered != TEXT
    assert render(tampered, read_records(RECORDS)) != tampered


def test_records_are_complete() -> None:
    for record in read_records(RECORDS):
        assert record["format"] == FORMAT
        assert {"kind", "half", "date", "command", "commit", "hardware", "versions", "results"} <= set(record)
        assert record["results"]


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", TEXT))
def test_local_links_exist(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([a-z-]+)", TEXT))))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
