"""The list of mutants stays true: each still applies to its file, once, and the tests that must notice it exist."""

import shlex
from pathlib import Path

from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


def test_every_mutant_applies_once_and_changes_code() -> None:
    assert len(MUTANTS) >= 100
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        text = (ROOT / mutant.path).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: its text stands {text.count(mutant.old)} times"
        compile(text.replace(mutant.old, mutant.new), mutant.path, "exec")


def test_the_tests_that_must_notice_exist() -> None:
    for mutant in MUTANTS:
        files = [word for word in shlex.split(mutant.tests) if word.startswith("tests/")]
        assert files, mutant.name
        assert all((ROOT / name).exists() for name in files), f"{mutant.name}: {mutant.tests}"
