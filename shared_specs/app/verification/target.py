"""What a command is given by name: `package.module:name`, and what it makes."""

import importlib
import inspect
import sys
from typing import Any

from shared_specs.app.finetune.processes import USER_ERRORS
from shared_specs.app.options import InputError

_WHAT = {"verify": "the module", "check": "the function"}


def named_object(target: str, command: str = "verify") -> Any:
    """Return what `package.module:name` says, with the current folder among those that are looked in.

    Raises:
        InputError: it cannot be imported, or there is no such name in it.
    """
    module, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        raise InputError(f"{command}: {module} cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(
                f"{command}: {_WHAT[command]} must be package.module:name, got {target}: {module} has no {name}."
            )
        found = getattr(found, part)
    return found


def made(target: str, found: Any, hidden: int | None, **known: Any) -> Any:
    """Return what a class or a function returns, called without arguments or with those that it needs.

    Args:
        hidden: for the one parameter that is needed and is not among `known`, name -> value.
    Raises:
        InputError: it needs more, or it fails.
    """
    # A metaclass may hide what a class is made of.
    maker = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters.values()
    parameters = list(maker)[1:] if inspect.isclass(found) else maker
    empty, many = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is empty and p.kind not in many]
    given = {name: known[name] for name in needed if name in known}
    rest = [name for name in needed if name not in known]
    if len(rest) > 1:
        raise InputError(
            f"verify: {target} must need no argument, or the hidden size alone, got one that needs {', '.join(rest)}. "
            "Write a function that gives them."
        )
    if rest and hidden is None:
        raise InputError(f"verify: --hidden must be given: {target} needs {rest[0]}.")
    try:
        return found(*[hidden] * len(rest), **given)
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        raise InputError(f"verify: {target} fails ({type(error).__name__}: {error}).") from error
