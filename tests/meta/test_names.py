"""A class name means one thing inside one half, and inside shared_specs."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Name -> why two classes of one package share it.
EXCEPTIONS = {
    "tiled_torch": {"Tiled": "the mixin of a tiled model's MLPs and the result of tile(): pickles hold both names"},
    "tiled_jax": dict.fromkeys(
        ("TiledLinear", "TiledLinearReturnBias", "TiledLinearCrossEntropy", "TiledMLP"),
        "one module for Flax NNX, one for Flax linen, in files that are named so",
    ),
    "shared_specs": {},
}


def defined_twice(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the files of every class name without underscore that more than one of (path, source) defines."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


@pytest.mark.parametrize("package", EXCEPTIONS)
def test_a_class_name_means_one_thing(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = defined_twice((path.relative_to(ROOT).as_posix(), path.read_text()) for path in files)
    assert found.keys() == EXCEPTIONS[package].keys(), found


def test_a_second_meaning_is_found() -> None:
    sources = [("a.py", "class Call: ...\nclass _Own: ..."), ("b.py", "class Call: ...\nclass _Own: ...")]
    assert defined_twice(sources) == {"Call": ["a.py", "b.py"]}
    assert defined_twice(sources[:1]) == {}
