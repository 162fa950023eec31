"""Turns option dataclasses into a command line (typer) and runs it: the same words and errors in both halves."""

import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from shared_specs.app.finetune.processes import USER_ERRORS, SaidElsewhere, let_first_speak
from shared_specs.app.options import (
    BenchOptions,
    CheckOptions,
    DoctorOptions,
    FinetuneOptions,
    ParityOptions,
    PlanOptions,
    TuneOptions,
    VerifyOptions,
    flag,
    parse_size,
)
from shared_specs.app.plain_help import EXIT_CODES, asks_for_help, lacking, print_help
from shared_specs.version import own_version

_LONGEST_WORD = 300


@dataclass(frozen=True, kw_only=True)
class Command:
    """One word after `python -m <package>`.

    Attributes:
        name: the word.
        help: one line for --help.
        options: a dataclass of `shared_specs.app.options`.
        extras: of the package tiled-mlp, with which all that the command imports is installed.
        run: does the work and returns the exit code; imports its framework itself, so that --help needs none.
    """

    name: str
    help: str
    options: type
    extras: str
    run: Callable[[Any], int]


# Name -> help and options of what both halves can do.
SHARED: dict[str, tuple[str, type]] = {
    "finetune": ("Fine-tune a causal language model on a text file at a given context length.", FinetuneOptions),
    "bench": ("Measure one operation against its plain form and against peers, and write a record.", BenchOptions),
    "plan": (
        "Say how long a context fits, what to set for it, where its bytes are and how long a step takes.",
        PlanOptions,
    ),
    "doctor": (
        'Say what is installed, what can run here and why the rest cannot, and what "auto" takes.',
        DoctorOptions,
    ),
    "parity": (
        "Compute the specification's cases on this machine's devices, and compare them with float64.",
        ParityOptions,
    ),
    "verify": (
        "Compare a module or a model of your own, tiled, with itself untiled: values, gradients, hooks and bytes.",
        VerifyOptions,
    ),
    "check": (
        "Train a model of your own for a few steps, tiled and untiled, and say which tensor differs first.",
        CheckOptions,
    ),
    "tune": ("Measure the GPU kernels' block sizes for one model's widths and write them to your table.", TuneOptions),
}


def shared_command(name: str, extras: str, run: Callable[[Any], int]) -> Command:
    """Return a half's command of this name in `SHARED`."""
    text, options = SHARED[name]
    return Command(name=name, help=text, options=options, extras=extras, run=run)


def main(package: str, commands: Sequence[Command], arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments (default: those of the process), run one command and return its exit code.

    `--version` alone says the project's version; `--help` needs nothing but Python.

    Returns:
        0: done. 1: done, and what was looked for is not as it should be: a result over its limit, a loss that is no number, a
        framework that is missing, a process that was lost. 2: nothing was done, for a reason that the user can mend (options,
        files, packages, models that are not supported): one line on stderr; or the disk was full. 128 + the number of the
        signal that stopped a run. Everything else is a fault of this project: a traceback, and Python's own 1.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may have characters that the terminal has not
            stream.reconfigure(errors="backslashreplace")
    if words == ["--version"]:
        print(f"{package} {own_version()}")
        return 0
    try:
        return _run(package, commands, words)
    except SaidElsewhere:
        return 2
    except USER_ERRORS as error:
        return _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "typer" and asks_for_help(words):
            return print_help(package, commands, words)
        if missing in ("", "shared_specs", "tiled_torch", "tiled_jax"):
            raise
        wanted = next((command.extras for command in commands if command.name in words), commands[0].extras)
        extras = lacking(wanted)
        text = f"{package}: the package {missing} is not installed. Install it with pip install 'tiled-mlp[{extras}]'."
        return _fail(text)


def _run(package: str, commands: Sequence[Command], words: Sequence[str]) -> int:
    import typer  # here, so that main can say that it is missing

    # A shell completes the words behind a program's name, which `python -m` is none of.
    script = Path(sys.argv[0]).stem == package.replace("_", "-")
    program = Path(sys.argv[0]).stem if script else f"python -m {package}"
    app = typer.Typer(add_completion=script, pretty_exceptions_enable=False)
    # With a callback a single command keeps its name instead of becoming the whole program.
    text = f"Token-wise layers of long-context training, tiled: {package}. --version alone says which."
    app.callback(help=text, epilog=EXIT_CODES)(lambda: None)
    for command in commands:
        app.command(command.name, help=command.help)(_typed_function(command))
    try:
        code = app(args=words or ["--help"], prog_name=program, standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_told(package, commands, words, error.format_message()))
    return code if isinstance(code, int) else 0


def _told(package: str, commands: Sequence[Command], words: Sequence[str], message: str) -> str:
    """typer's message in our words, where it is about a value that is none of its option's kind."""
    command = next((each for each in commands if each.name in words[:1]), None)
    found = re.match(r"Invalid value for '(--[a-z-]+)'", message)
    if command is None or found is None:
        return f"{command.name if command else package}: {message}"
    field = next(field for field in dataclasses.fields(command.options) if flag(field.name) == found[1])
    rule = "a number" if float in (field.type, *get_args(field.type)) else "a whole number"
    if get_origin(field.type) is Literal:
        rule = f"one of {', '.join(get_args(field.type))}"
    pairs = [(*word.split("=", 1), following)[:2] for word, following in zip(words, (*words[1:], ""), strict=True)]
    given = [value for name, value in pairs if name == found[1]]
    return f"{command.name}: {found[1]} must be {rule}, got {given[-1]}."


def _fail(message: str) -> int:
    """Return one line, whatever the message was made of; a value of a thousand letters is not all shown."""
    let_first_speak()
    line = " ".join(word if len(word) <= _LONGEST_WORD else f"{word[:_LONGEST_WORD]}..." for word in message.split())
    print(line, file=sys.stderr)
    return 2


def _typed_function(command: Command) -> Callable[..., int]:
    """Return a function whose signature is the dataclass's fields, which is what typer reads."""

    def run(**values: Any) -> int:
        for field in fields:
            if field.metadata["size"] and values[field.name] is not None:
                values[field.name] = parse_size(values[field.name], f"{command.name}: {flag(field.name)}")
        options = command.options(**values)
        options.check()
        return command.run(options)

    fields = dataclasses.fields(command.options)
    parameters = [_parameter(field) for field in fields]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(field: dataclasses.Field) -> inspect.Parameter:
    import typer

    kind = str | None if field.metadata["size"] else field.type
    if field.metadata["positional"]:
        word = typer.Argument(help=field.metadata["help"], metavar=field.metadata["metavar"], show_default=False)
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, word]
        )
    # The bare flag for a switch: `--plain`, without a `--no-plain` that would do nothing.
    option = typer.Option(
        flag(field.name),
        help=field.metadata["help"],
        metavar=field.metadata["metavar"],
        show_default=field.default is not None and field.type is not bool,
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[kind, option]
    )
