"""The examples in docstrings run and print what they say, each module's where its framework is installed."""

import doctest
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
NEEDS = {"shared_specs": "numpy", "tiled_torch": "torch", "tiled_jax": "jax"}
FILES = [path for package in NEEDS for path in sorted((ROOT / package).rglob("*.py")) if ">>> " in path.read_text()]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]


def run_examples(module: ModuleType) -> doctest.TestResults:
    return doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    pytest.importorskip(NEEDS[name.split(".")[0]])
    results = run_examples(importlib.import_module(name))
    assert results.failed == 0, "the captured output shows what the example printed instead"
    assert results.attempted > 0, "there are examples here that doctest does not find"


@pytest.mark.parametrize(("example", "failed"), [(">>> 1 + 1\n2", 0), (">>> 1 + 1\n3", 1), (">>> 1 / 0\n0", 1)])
def test_a_wrong_example_fails(example, failed):
    module = ModuleType("specimen", example)
    assert run_examples(module) == (failed, 1)
