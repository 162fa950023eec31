"""The fields of the commands' options: help, flags, sizes in words, and the error of a value that cannot be used."""

import re
from dataclasses import field
from typing import Any

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class InputError(ValueError):
    """An option, a file or a folder that a user gave a command cannot be used. The message is one line."""


def option(
    default: Any,
    *,
    help: str,
    metavar: str | None = None,
    fixed: bool = False,
    size: bool = False,
    positional: bool = False,
) -> Any:
    """Return a field with its help.

    Args:
        fixed: it decides the losses, so a resumed run repeats it. size: bytes, see parse_size. positional: it is a word
            without a flag.
    """
    told = {"help": help, "metavar": metavar, "fixed": fixed, "size": size, "positional": positional}
    return field(default=default, metadata=told)


def flag(name: str) -> str:
    """Return the command-line flag of a field: dashes for underscores."""
    return "--" + name.replace("_", "-")


def parse_size(text: str, option: str = "finetune: --memory-budget") -> int:
    """Return bytes of a size such as `512MiB`, `2GB` or `1048576`. option: what it is of, for messages.

    Raises:
        InputError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise InputError(f"{option} must be a size, got '{text}'. Write for example 512MiB or 2GB.")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size == float("inf"):
        raise InputError(f"{option} must be a size that a machine can have. Write for example 512MiB or 2GB.")
    return int(size)
