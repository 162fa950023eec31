"""Both halves show the same names, arguments, order and defaults: those of shared_specs/signatures.py."""

import inspect
from importlib import import_module

import pytest

from shared_specs.config import HALVES, NAMES, Half
from shared_specs.signatures import PUBLIC, PUBLIC_ONLY, REQUIRED, SIGNATURES, VARIADIC


def resolve(half: Half, path: str) -> object:
    found: object = import_module(NAMES[half].package)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str, half: Half) -> None:
    found = resolve(half, path)
    # Of a class its __init__: flax's metaclass hides it behind (*args, **kwargs).
    parameters = list(inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters.values())
    parameters = parameters[1:] if inspect.isclass(found) else parameters
    expected = [argument for argument in SIGNATURES[path] if half in argument.halves]
    assert [p.name for p in parameters] == [argument.name for argument in expected]
    for parameter, argument in zip(parameters, expected, strict=True):
        assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.keyword_only, parameter
        if argument.default is VARIADIC:
            assert parameter.kind is inspect.Parameter.VAR_POSITIONAL, parameter
        elif argument.default is REQUIRED:
            if len(argument.halves) == len(HALVES):
                assert parameter.default is inspect.Parameter.empty, parameter
        else:
            assert parameter.default == argument.default, parameter


@pytest.mark.parametrize("half", HALVES)
def test_public_names(half: Half) -> None:
    package = import_module(NAMES[half].package)
    assert sorted(package.__all__) == sorted((*PUBLIC, *PUBLIC_ONLY.get(half, ())))
    assert all(hasattr(package, name) for name in package.__all__)
