"""What `make docs` makes of a docstring before it is parsed."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "docstring_sections.py"

DOCSTRING = """Return y.

Args:
    x: > 0, or None.
        More of x[0][1].
Returns:
    y.
Numerics: in float32
    throughout.
Raises:
    SpecError: it is wrong.
Source: a paper.
Example:
    >>> y[0][1] > 0
    True"""

PARSED = """Return y.


Args:
    x: \\> 0, or None.
        More of x[0]\\[1].

Returns:
    y.

**Numerics.** in float32
throughout.

Raises:
    SpecError: it is wrong.

**Source.** a paper.

Examples:
    >>> y[0][1] > 0
    True"""


@pytest.fixture
def rewritten(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The function, without griffe, which .venv-docs alone has."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    return runpy.run_path(str(FILE))["rewritten"]


def test_sections_are_told_apart(rewritten: Callable[[str], str]) -> None:
    assert rewritten(DOCSTRING) == PARSED
