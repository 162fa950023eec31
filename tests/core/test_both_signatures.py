"""Both halves show the same names, arguments, order and defaults: those of shared_specs/signatures.py."""

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from shared_specs.config import HALVES, NAMES, Half
from shared_specs.signatures import (
    KEYWORDS,
    PARALLEL_ONLY,
    PARALLEL_SIGNATURES,
    PUBLIC,
    PUBLIC_ONLY,
    REQUIRED,
    SIGNATURES,
    VARIADIC,
    Argument,
    exists_in,
)

PARALLEL = [(half, path) for half in HALVES for path in PARALLEL_SIGNATURES if exists_in(half, path)]


def resolve(half: Half, path: str, room: str = "") -> object:
    found: object = import_module(NAMES[half].package + room)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def assert_signature(found: object, arguments: Sequence[Argument], half: Half) -> None:
    # Of a class its __init__: flax's metaclass hides it behind (*args, **kwargs).
    parameters = list(inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters.values())
    parameters = parameters[1:] if inspect.isclass(found) else parameters
    expected = [argument for argument in arguments if half in argument.halves]
    assert [p.name for p in parameters] == [argument.name for argument in expected]
    for parameter, argument in zip(parameters, expected, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.keyword_only, parameter
        if argument.default is VARIADIC:
            assert parameter.kind is inspect.Parameter.VAR_POSITIONAL, parameter
        elif argument.default is KEYWORDS:
            assert parameter.kind is inspect.Parameter.VAR_KEYWORD, parameter
        elif argument.default is REQUIRED:
            if len(argument.halves) == len(HALVES):
                assert parameter.default is inspect.Parameter.empty, parameter
        else:
            assert parameter.default == argument.default, parameter


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str, half: Half) -> None:
    assert_signature(resolve(half, path), SIGNATURES[path], half)


@pytest.mark.parametrize(("half", "path"), PARALLEL)
def test_signature_of_what_runs_across_ranks(half: Half, path: str) -> None:
    assert_signature(resolve(half, path, ".parallel"), PARALLEL_SIGNATURES[path], half)


@pytest.mark.parametrize("half", HALVES)
def test_public_names(half: Half) -> None:
    package = import_module(NAMES[half].package)
    assert sorted(package.__all__) == sorted((*PUBLIC, *PUBLIC_ONLY.get(half, ())))
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("half", HALVES)
def test_public_names_of_what_runs_across_ranks(half: Half) -> None:
    package = import_module(f"{NAMES[half].package}.parallel")
    of_root = ("vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy")
    here = [path for path in PARALLEL_SIGNATURES if exists_in(half, path)]
    assert sorted(package.__all__) == sorted((*here, *PARALLEL_ONLY[half], *of_root))
    assert not [name for name in package.__all__ if inspect.ismodule(getattr(package, name))]
    # What loads on first use must not have the name of a file: importing that submodule first would hide it.
    assert package.__file__ is not None
    files = {path.stem for path in Path(package.__file__).parent.glob("*.py")}
    assert not files & set(getattr(package, "_ON_FIRST_USE", ()))
