"""Turns option dataclasses into a command line (typer) and runs it: the same words and errors in both halves."""

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from shared_specs.app.team import USER_ERRORS, SaidElsewhere, let_first_speak
from shared_specs.cli import flag, parse_size


@dataclass(frozen=True, kw_only=True)
class Command:
    """One word after `python -m <package>`.

    Attributes:
        name: the word.
        help: one line for --help.
        options: a dataclass of `shared_specs.cli`.
        run: does the work and returns the exit code; imports its framework itself, so that --help needs none.
    """

    name: str
    help: str
    options: type
    run: Callable[[Any], int]


def main(package: str, commands: Sequence[Command], arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments (default: those of the process), run one command and return its exit code.

    What the user can mend (options, files, unsupported models) is one line on stderr and exit code 2.
    """
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    # With a callback a single command keeps its name instead of becoming the whole program.
    app.callback(help=f"Token-wise layers of long-context training, tiled: {package}.")(lambda: None)
    for command in commands:
        app.command(command.name, help=command.help)(_typed_function(command))
    try:
        code = app(args=arguments, prog_name=f"python -m {package}", standalone_mode=False)
    except SaidElsewhere:
        return 2
    except USER_ERRORS as error:
        return _fail(str(error))
    except typer.TyperException as error:
        return _fail(error.format_message())
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "shared_specs", "tiled_torch", "tiled_jax"):
            raise
        return _fail(
            f"{package}: the package {missing} is not installed. Install it with pip install 'tiled-mlp[all]'."
        )
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    """One line, whatever the message was made of."""
    let_first_speak()
    print(" ".join(message.split()), file=sys.stderr)
    return 2


def _typed_function(command: Command) -> Callable[..., int]:
    """A function whose signature is the dataclass's fields, which is what typer reads."""

    def run(**values: Any) -> int:
        for field in fields:
            if field.metadata["size"] and values[field.name] is not None:
                values[field.name] = parse_size(values[field.name])
        options = command.options(**values)
        options.check()
        return command.run(options)

    fields = dataclasses.fields(command.options)
    parameters = [_parameter(field) for field in fields]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(field: dataclasses.Field) -> inspect.Parameter:
    kind = str | None if field.metadata["size"] else field.type
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
