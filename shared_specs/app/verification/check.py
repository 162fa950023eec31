"""`check`: a function of the user's own says what is trained and how; printed is whether it trains tiled as untiled."""

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from shared_specs.app.finetune.processes import USER_ERRORS
from shared_specs.app.options import CheckOptions, InputError
from shared_specs.app.verification.target import named_object
from shared_specs.check.report import CheckReport


def check_command(
    options: CheckOptions, half: str, check: Callable[..., CheckReport], console: Console | None = None
) -> int:
    """Call the function, check what it returns, print the report and return the exit code: 1 where something differs.

    Args:
        half: the package, such as "tiled_torch". check: its function of this name.
    Raises:
        InputError: what was named is no such function, or it fails.
    """
    console = console or Console(stderr=options.json)
    with console.status("training tiled and untiled"):
        try:
            report = check(**arguments(str(options.target), check))
        except TypeError as error:
            if not str(error).startswith("check: "):
                raise
            raise InputError(str(error)) from error
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        for line in (f"{half} check: {options.target}", *str(report).splitlines()):
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    return 0 if report.equal else 1


def arguments(target: str, check: Callable[..., Any]) -> Mapping[str, Any]:
    """Return what the named function returns: arguments of `check` by name."""
    make = named_object(target, "check")
    if not callable(make):
        raise InputError(f"check: {target} must be a function that returns a dict, got {type(make).__name__}.")
    try:
        found = make()
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        raise InputError(f"check: {target} fails ({type(error).__name__}: {error}).") from error
    known = inspect.signature(check).parameters
    if not isinstance(found, Mapping):
        raise InputError(f"check: {target} must return a dict with model and batch, got {type(found).__name__}.")
    missing = [name for name in ("model", "batch") if name not in found]
    if missing:
        raise InputError(f"check: {target} must return a dict with model and batch, got one without {missing[0]}.")
    unknown = [str(name) for name in found if name not in known]
    if unknown:
        raise InputError(f"check: {target} must return arguments of check ({', '.join(known)}), got {unknown[0]}.")
    return found
