"""`--help` where typer is not installed: the same words, from the same options, without colours; and what to install."""

import dataclasses
import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Literal, Protocol, get_args, get_origin

from shared_specs.app.option_fields import flag

EXIT_CODES = (
    "Exit codes: 0, done; 1, done, and something is not as it should be; 2, refused in one line that says what to do; "
    "128 + the signal that stopped a run."
)
_INDENT = 26
# What the extra cli brings, by the names that are imported.
OF_CLI = ("gguf", "jinja2", "matplotlib", "packaging", "psutil", "rich", "safetensors", "tokenizers", "typer")
_KINDS = {int: "INTEGER", float: "FLOAT", str: "TEXT"}


class Told(Protocol):
    """The part of a command that its help is made of: see `shared_specs.app.command.Command`."""

    @property
    def name(self) -> str: ...

    @property
    def help(self) -> str: ...

    @property
    def options(self) -> type: ...

    @property
    def extras(self) -> str: ...


def lacking(extras: str) -> str:
    """Return some extras, as pip takes them, without cli where all that it brings is there."""
    there = all(importlib.util.find_spec(package) for package in OF_CLI)
    return extras.removeprefix("cli,") if there else extras


def asks_for_help(words: Sequence[str]) -> bool:
    """Return whether a command line does nothing but to ask what there is."""
    return not words or "--help" in words


def print_help(package: str, commands: Sequence[Told], words: Sequence[str]) -> int:
    """Print the commands, or the options of the one that is named, and return the exit code."""
    named = next((command for command in commands if command.name in words[:1]), None)
    if named is None and words and not words[0].startswith("-"):
        print(f"{package}: No such command '{words[0]}'.", file=sys.stderr)
        return 2
    print("\n".join(_of_package(package, commands) if named is None else _of_command(package, named)))
    return 0


def _of_package(package: str, commands: Sequence[Told]) -> list[str]:
    lines = [f"Usage: python -m {package} COMMAND [OPTIONS]", "", "Commands:"]
    for command in commands:
        lines += _entry(command.name, command.help)
    lines += ["", "Options:"]
    lines += _entry("--help", "Show this, or with a command its options.") + _entry("--version", "Show the version.")
    enough = dict.fromkeys(f"{command.name} 'tiled-mlp[{command.extras}]'" for command in commands)
    return [
        *lines,
        "",
        *_wrapped(EXIT_CODES, ""),
        "",
        *_wrapped(f"What a command needs: pip install for {', for '.join(enough)}.", ""),
    ]


def _of_command(package: str, command: Told) -> list[str]:
    fields = dataclasses.fields(command.options)
    word = "".join(f" [{field.metadata['metavar']}]" for field in fields if field.metadata["positional"])
    lines = [
        f"Usage: python -m {package} {command.name} [OPTIONS]{word}",
        "",
        *_wrapped(command.help, ""),
        "",
        "Options:",
    ]
    for field in fields:
        shown = field.default not in (None, False)
        default = f" [default: {field.default}]" if shown else ""
        name = field.metadata["metavar"] if field.metadata["positional"] else f"{flag(field.name)} {_value(field)}"
        lines += _entry(name.rstrip(), field.metadata["help"] + default)
    return [*lines, "", *_wrapped(f"To run it: pip install 'tiled-mlp[{command.extras}]'.", "")]


def _value(field: dataclasses.Field) -> str:
    """Return the kind of an option's value, empty for a switch."""
    if field.metadata["metavar"]:
        return field.metadata["metavar"]
    if get_origin(field.type) is Literal:
        return f"[{'|'.join(get_args(field.type))}]"
    kinds = (field.type, *get_args(field.type))
    return next((name for kind, name in _KINDS.items() if kind in kinds), "")


def _entry(name: str, text: str) -> list[str]:
    first = f"  {name}"
    if len(first) > _INDENT - 2:
        return [first, *_wrapped(text, " " * _INDENT)]
    lines = _wrapped(text, " " * _INDENT)
    return [first.ljust(_INDENT) + lines[0].lstrip(), *lines[1:]]


def _wrapped(text: str, indent: str) -> list[str]:
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
