"""`verify`: a module or a model of the user's own, tiled, against itself untiled: values, gradients, hooks, bytes, paths."""

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from shared_specs.app.finetune.processes import USER_ERRORS
from shared_specs.app.options import InputError, VerifyOptions
from shared_specs.app.progress import show_bytes
from shared_specs.core.rounding import Array
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32, limit

# A gradient that is shorter than this part of all together is rounding, as that of a bias in front of a softmax is.
_NOTHING = 1e-6


@dataclass(frozen=True, kw_only=True)
class Computed:
    """One forward and backward.

    Attributes:
        results: the output or the loss, and the gradient of the input ("dx") and of each parameter ("d" + its name).
        hooks: parameter -> how often a hook on its gradient fired; None where the framework has none.
    """

    results: Mapping[str, Array]
    hooks: Mapping[str, int] | None = None


class Subject(Protocol):
    """The module or the model that is verified, in one half; made of the options.

    Raises:
        InputError, UnsupportedError: it cannot be loaded, or nothing of it can be tiled.
    """

    dtypes: tuple[str, ...]  # in which it is computed: the first one, untiled, is the truth of all
    name: str

    def compute(self, dtype: str, tiled: bool) -> Computed:
        """Compute the same input, forward and backward."""
        ...

    def paths(self) -> Mapping[str, str]:
        """Return the name of each tiled part -> the path that ran."""
        ...

    def peak_bytes(self, tiled: bool) -> int:
        """Return the peak of a forward and backward in float32, without parameters and input."""
        ...


@dataclass(kw_only=True)
class Comparison:
    """Everything that `verify` prints. `errors`: dtype and result -> relative error and its limit."""

    name: str
    paths: dict[str, str]
    errors: list[dict[str, Any]]
    hooks: dict[str, int] | None
    plain_bytes: int
    tiled_bytes: int
    wrong: list[str] = field(default_factory=list)


def verify(
    options: VerifyOptions, half: str, load: Callable[[VerifyOptions], Subject], console: Console | None = None
) -> int:
    """Compare, print and return the exit code: 1 where a result is over its limit, or a hook did not fire as it does untiled.

    Args:
        half: the package, such as "tiled_torch".
    """
    console = console or Console(stderr=options.json)
    with console.status("loading and computing"):
        found = compared(load(options))
    if options.json:
        print(json.dumps(asdict(found), indent=2))
    else:
        _print(half, options, found, console)
    return 1 if found.wrong else 0


def compared(subject: Subject) -> Comparison:
    """Return everything that is told of a subject."""
    first, *_ = subject.dtypes
    try:
        truth = subject.compute(first, tiled=False)
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"verify: {subject.name} fails by itself, untiled ({reason}).") from error
    errors, wrong, hooks = [], [], None
    for dtype in subject.dtypes:
        plain = truth if dtype == first else subject.compute(dtype, tiled=False)
        tiled = subject.compute(dtype, tiled=True)
        rows = _errors(dtype, truth.results, plain.results, tiled.results, alone=len(subject.dtypes) == 1)
        errors += rows
        wrong += [f"{row['result']} in {dtype}" for row in rows if not row["right"]]
        hooks = None if tiled.hooks is None else dict(tiled.hooks)
        if hooks is not None and hooks != dict(plain.hooks or {}):
            more = [name for name, count in hooks.items() if count != (plain.hooks or {}).get(name)]
            wrong.append(f"the hook of {more[0] if more else 'a parameter'} in {dtype}")
    return Comparison(
        name=subject.name,
        paths=dict(subject.paths()),
        errors=errors,
        hooks=hooks,
        plain_bytes=subject.peak_bytes(tiled=False),
        tiled_bytes=subject.peak_bytes(tiled=True),
        wrong=wrong,
    )


def _errors(
    dtype: str, truth: Mapping[str, Array], plain: Mapping[str, Array], tiled: Mapping[str, Array], *, alone: bool
) -> list[dict[str, Any]]:
    """Return the error of each result against its limit. alone: the truth itself is in this dtype, of a whole model."""
    every = [truth[name].astype(np.float64) for name in truth if name[0] == "d" and name != "dx"]
    length = math.sqrt(sum(float(np.square(array).sum()) for array in every))
    rows = []
    for name in dict.fromkeys((*truth, *tiled)):
        if name not in truth or name not in tiled or truth[name].shape != tiled[name].shape:
            error, most = math.inf, 0.0
        else:
            least = _NOTHING * length if name[0] == "d" else 0.0
            error = _error(tiled[name], truth[name], least)
            most = limit(_error(plain[name], truth[name], least), dtype)
            most = max(MODEL_FLOAT32, most) if alone else max(most, DISTRIBUTED_FLOAT64)
            if np.linalg.norm(truth[name].ravel()) < least:
                most = max(
                    most, float(np.finfo(dtype).eps) / _NOTHING
                )  # of which no digit is known, in no order of sums
        right = error <= most
        shown = error if math.isfinite(error) else str(error)
        rows.append({"dtype": dtype, "result": name, "error": shown, "limit": most, "right": right})
    return rows


def _error(actual: Array, expected: Array, least: float) -> float:
    """Return the relative L2 distance; of what is shorter than `least`, that to `least`."""
    expected = expected.astype(np.float64)
    distance = float(np.linalg.norm((actual.astype(np.float64) - expected).ravel()))
    length = max(float(np.linalg.norm(expected.ravel())), least)
    return distance / length if length else distance


def named_object(target: str) -> Any:
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
        raise InputError(f"verify: {module} cannot be imported ({type(error).__name__}: {error}).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise InputError(f"verify: the module must be package.module:name, got {target}: {module} has no {name}.")
        found = getattr(found, part)
    return found


def made(target: str, found: Any, hidden: int, **known: Any) -> Any:
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
    try:
        return found(*[hidden] * len(rest), **given)
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        raise InputError(f"verify: {target} fails ({type(error).__name__}: {error}).") from error


def _print(half: str, options: VerifyOptions, found: Comparison, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(f"{half} verify: {found.name}, {options.tokens} tokens in {options.num_shards} shards")
    by_path: dict[str, list[str]] = {}
    for name, path in found.paths.items():
        by_path.setdefault(path, []).append(name or "the module itself")
    for path, names in by_path.items():
        say(f"path {path}: {names[0] if len(names) == 1 else f'{len(names)} parts, {names[0]} to {names[-1]}'}")
    table = Table(
        Column("dtype"),
        Column("result", overflow="fold"),
        Column("error", justify="right"),
        Column("limit", justify="right"),
        box=SIMPLE,
    )
    for row in _shown(found.errors):
        error = row["error"] if isinstance(row["error"], str) else f"{row['error']:.1e}"
        table.add_row(row["dtype"], row["result"], error + " wrong" * (not row["right"]), f"{row['limit']:.1e}")
    console.print(table)
    if found.hooks is not None:
        counts = sorted(set(found.hooks.values()))
        say(
            f"hooks on gradients: of {len(found.hooks)} parameters each fired {' or '.join(map(str, counts)) or 'no'} time"
        )
    say(f"peak in float32: {_size(found.plain_bytes)} untiled, {_size(found.tiled_bytes)} tiled")
    if not found.wrong:
        say("right: the same values and gradients")
        return
    say(f"wrong: {'; '.join(found.wrong)}")
    if "" in found.paths:
        say("What looks at other tokens, as attention does, cannot be tiled whole: name the part that does not.")


def _size(count: int) -> str:
    return show_bytes(count) if count >> 27 else f"{count / 2**20:.2f} MiB"


def _shown(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of results, and of gradients of parameters those that are wrong, else the nearest to its limit."""
    rows = [row for row in errors if row["result"][0] != "d" or row["result"] == "dx"]
    for dtype in dict.fromkeys(row["dtype"] for row in errors):
        gradients = [row for row in errors if row["dtype"] == dtype and row not in rows]
        wrong = [row for row in gradients if not row["right"]]
        rows += wrong or sorted(gradients, key=lambda row: row["error"] / row["limit"])[-1:]
    return sorted(rows, key=lambda row: errors[0]["dtype"] != row["dtype"])
