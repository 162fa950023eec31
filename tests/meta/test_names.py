"""A name means one thing inside one half, and inside shared_specs: a class's with or without its underscore, a public one's.

Files of the same name in two capabilities have the same parts (`forward` of `mlp/loops.py` and of `loss/loops.py`), and a
kernel has the name of what it computes. Programs (`commands/`, `app/`) are not what others import, and the names in `compat/`
are other libraries'.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Name -> why two classes of one package share it.
EXCEPTIONS = {
    "tiled_torch": {"Tiled": "the mixin of a tiled model's MLPs and the result of tile(): pickles hold both names"}
    | dict.fromkeys(
        (
            "CheckpointWithoutOutput",
            "ColumnParallelLinear",
            "RowParallelLinear",
            "TiledLinear",
            "TiledLinearReturnBias",
            "TiledMLP",
            "VocabParallelEmbedding",
        ),
        "ours, and in compat the class of another library by that library's name and signature",
    ),
    "tiled_jax": dict.fromkeys(
        ("TiledLinear", "TiledLinearReturnBias", "TiledLinearCrossEntropy", "TiledMLP", "TiledMoE"),
        "one module for Flax NNX, one for Flax linen, in files that are named so",
    ),
    "shared_specs": {},
}
# The same for other public names.
OTHERS = {
    "tiled_torch": {
        "Tiled": EXCEPTIONS["tiled_torch"]["Tiled"],
        "all_to_all": "the public function and, as transport.all_to_all, the movement, beside transport.all_gather",
    },
    "tiled_jax": EXCEPTIONS["tiled_jax"]
    | dict.fromkeys(
        ("forward", "backward", "tangents"),
        "what a derivative consists of, called by the name of its file: ring_steps.forward",
    ),
    "shared_specs": {},
}


def defined_twice(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the files of every class name, its underscores stripped, that more than one of (path, source) defines."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                found[node.name.strip("_")].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def names_of(node: ast.stmt) -> list[str]:
    """Return the public names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def other_meanings(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the files of every public name that files with different parts define differently."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path, source in sources:
        rooms = Path(path).parts[1:-1]
        if {"commands", "app", "kernels", "compat"} & set(rooms) or Path(path).stem == "__main__":
            continue
        for node in ast.parse(source).body:
            for name in names_of(node):
                if not name.startswith("_"):
                    found[name][path] = ast.unparse(node)
    return {
        name: sorted(places)
        for name, places in found.items()
        if len({Path(path).name for path in places}) > 1 and len(set(places.values())) > 1
    }


@pytest.mark.parametrize("package", EXCEPTIONS)
def test_a_public_name_means_one_thing(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = other_meanings((path.relative_to(ROOT).as_posix(), path.read_text()) for path in files)
    assert found.keys() == OTHERS[package].keys(), found


@pytest.mark.parametrize("package", EXCEPTIONS)
def test_a_class_name_means_one_thing(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    found = defined_twice((path.relative_to(ROOT).as_posix(), path.read_text()) for path in files)
    assert found.keys() == EXCEPTIONS[package].keys(), found


def test_a_second_meaning_is_found() -> None:
    sources = [("a.py", "class Call: ...\nclass _Own: ..."), ("b.py", "class _Call: ...\nclass _Part: ...")]
    assert defined_twice(sources) == {"Call": ["a.py", "b.py"]}
    assert defined_twice(sources[:1]) == {}


def test_another_meaning_is_found() -> None:
    here = ("p/mlp/loops.py", "Sums = dict\ndef run(): ...\nFEW: int = 3")
    assert other_meanings([here, ("p/loss/loops.py", "def run(x): ...")]) == {}
    assert other_meanings([here, ("p/loss/call.py", "Sums = dict\ndef _run(x): ...")]) == {}
    assert other_meanings([here, ("p/mlp/kernels/sums.py", "def run(x): ...")]) == {}
    assert other_meanings([here, ("p/core/few.py", "def run(x): ...\nFEW = 4\nSums = list")]).keys() == {
        "run",
        "FEW",
        "Sums",
    }
