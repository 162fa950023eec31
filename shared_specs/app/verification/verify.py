"""`verify`: a module or a model of the user's own, tiled, against itself untiled: values, gradients, hooks, bytes, paths."""

import json
import math
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
from shared_specs.check.compare import error_of, least_of, length, limit_of
from shared_specs.core.rounding import Array
from shared_specs.tolerances import MODEL_FLOAT32

_DRAWS = "It draws random numbers, as dropout does; which ones a token gets depends on how tokens are cut."


@dataclass(frozen=True, kw_only=True)
class Computed:
    """One forward and backward.

    Attributes:
        results: what came out, as `named_results` names it, or the loss, and the gradient of the input ("dx") and of each
            parameter ("d" + its name).
        hooks: parameter -> how often a hook on its gradient fired and there was one; None where the framework has none.
    """

    results: Mapping[str, Array]
    hooks: Mapping[str, int] | None = None


class Subject(Protocol):
    """The module or the model that is verified, in one half; made of the options.

    Raises:
        InputError, UnsupportedError: it cannot be loaded, or nothing of it can be tiled.
    """

    dtypes: tuple[str, ...]  # in which it is computed: the first one, untiled, is the truth of all
    modes: tuple[str, ...]  # "evaluation", and "training" where that may be another function
    name: str

    def compute(self, dtype: str, tiled: bool, mode: str = "evaluation", draw: int = 0) -> Computed:
        """Compute the same input, forward and backward. draw: numbers that the module draws are the same for the same one."""
        ...

    def paths(self) -> Mapping[str, str]:
        """Return the name of each tiled part -> the path that ran."""
        ...

    def peak_bytes(self, tiled: bool) -> int:
        """Return the peak of a forward and backward in float32, without parameters and input."""
        ...


@dataclass(kw_only=True)
class Comparison:
    """Everything that `verify` prints. `errors`: mode, dtype and result -> relative error and its limit."""

    name: str
    paths: dict[str, str]
    errors: list[dict[str, Any]]
    hooks: dict[str, int] | None
    plain_bytes: int
    tiled_bytes: int
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


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
    found = _compared_in(subject, "evaluation")
    for mode in subject.modes[1:]:
        other = _compared_in(subject, mode)
        found.errors += other.errors
        found.wrong += [f"{wrong}, {mode}" for wrong in other.wrong]
        found.notes += other.notes
    found.plain_bytes, found.tiled_bytes = subject.peak_bytes(tiled=False), subject.peak_bytes(tiled=True)
    return found


def _compared_in(subject: Subject, mode: str) -> Comparison:
    """Return what is told of a subject in one mode, but for its bytes."""
    first, *_ = subject.dtypes
    try:
        truth = subject.compute(first, False, mode)
    except Exception as error:
        if isinstance(error, USER_ERRORS):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        where = ", untiled" if mode == "evaluation" else f", untiled, in {mode}"
        raise InputError(f"verify: {subject.name} fails by itself{where} ({reason}).") from error
    errors, wrong, hooks = [], [], None
    for dtype in subject.dtypes:
        plain = truth if dtype == first else subject.compute(dtype, False, mode)
        tiled = subject.compute(dtype, True, mode)
        # In training the numbers that are drawn may be others in another dtype.
        of, alone = (truth, len(subject.dtypes) == 1) if mode == "evaluation" else (plain, dtype == "float32")
        rows = _errors(dtype, of.results, plain.results, tiled.results, alone=alone)
        errors += [{"mode": mode} | row for row in rows]
        wrong += [f"{row['result']} in {dtype}" for row in rows if not row["right"]]
        hooks = None if tiled.hooks is None else dict(tiled.hooks)
        if hooks is not None and hooks != dict(plain.hooks or {}):
            more = [name for name, count in hooks.items() if count != (plain.hooks or {}).get(name)]
            wrong.append(f"the hook of {more[0] if more else 'a parameter'} in {dtype}")
    notes: list[str] = []
    if wrong and mode != "evaluation" and _draws(truth, subject.compute(first, False, mode, 1)):
        errors, wrong, notes = [], [], [f"{mode}: not comparable. {_DRAWS}"]
    return Comparison(
        name=subject.name,
        paths=dict(subject.paths()),
        errors=errors,
        hooks=hooks,
        plain_bytes=0,
        tiled_bytes=0,
        wrong=wrong,
        notes=notes,
    )


def _draws(one: Computed, other: Computed) -> bool:
    """Return whether two computations, which drew other numbers, have other results."""
    pairs = ((array, other.results.get(name)) for name, array in one.results.items())
    return any(b is None or not np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def check_subject(options: VerifyOptions, takes_tokens: bool) -> None:
    """Raise InputError for options that do not go with what was loaded: a language model, or a module of hidden states."""
    if not takes_tokens and options.hidden is None:
        raise InputError("verify: --hidden must be given with a module that takes no input_ids.")
    if takes_tokens and options.tokens < 2:
        raise InputError(f"verify: --tokens must be >= 2 with a language model, got {options.tokens}.")
    if options.scope == "block" and not takes_tokens:
        raise InputError("verify: --scope block needs a language model: its layers are what runs a shard at a time.")


def _errors(
    dtype: str, truth: Mapping[str, Array], plain: Mapping[str, Array], tiled: Mapping[str, Array], *, alone: bool
) -> list[dict[str, Any]]:
    """Return the error of each result against its limit. alone: the truth itself is in this dtype, of a whole model."""
    nothing = least_of(truth[name] for name in truth if name[0] == "d" and name != "dx")
    rows = []
    for name in dict.fromkeys((*truth, *tiled)):
        if name not in truth or name not in tiled or truth[name].shape != tiled[name].shape:
            error, most = math.inf, 0.0
        else:
            least = nothing if name[0] == "d" else 0.0
            error = error_of(tiled[name], truth[name], least)
            baseline = error_of(plain[name], truth[name], least)
            rounding = length((truth[name],)) < least
            most = limit_of(baseline, dtype, rounding=rounding, floor=MODEL_FLOAT32 if alone else 0.0)
        right = error <= most
        shown = error if math.isfinite(error) else str(error)
        rows.append({"dtype": dtype, "result": name, "error": shown, "limit": most, "right": right})
    return rows


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
        Column("mode"),
        Column("dtype"),
        Column("result", overflow="fold"),
        Column("error", justify="right"),
        Column("limit", justify="right"),
        box=SIMPLE,
    )
    for row in _shown(found.errors):
        error = row["error"] if isinstance(row["error"], str) else f"{row['error']:.1e}"
        table.add_row(
            row["mode"], row["dtype"], row["result"], error + " wrong" * (not row["right"]), f"{row['limit']:.1e}"
        )
    console.print(table)
    if found.hooks is not None:
        counts = sorted(set(found.hooks.values()))
        say(
            f"hooks on gradients: of {len(found.hooks)} parameters each fired {' or '.join(map(str, counts)) or 'no'} time"
        )
    say(f"peak in float32: {_size(found.plain_bytes)} untiled, {_size(found.tiled_bytes)} tiled")
    for note in found.notes:
        say(note)
    if not found.wrong:
        say("right: the same values and gradients")
        return
    say(f"wrong: {'; '.join(found.wrong)}")
    if "" in found.paths:
        say("What looks at other tokens, as attention does, cannot be tiled whole: name the part that does not.")


def _size(count: int) -> str:
    return show_bytes(count) if count >> 27 else f"{count / 2**20:.2f} MiB"


def _shown(errors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of results, and of gradients of parameters those that are wrong, else the nearest to its limit; of any
    mode but the first one of results, too.
    """
    order = list(dict.fromkeys((row["mode"], row["dtype"]) for row in errors))
    first = order[0][0]
    rows = [row for row in errors if row["mode"] == first and (row["result"][0] != "d" or row["result"] == "dx")]
    for mode, dtype in order:
        others = [row for row in errors if (row["mode"], row["dtype"]) == (mode, dtype) and row not in rows]
        wrong = [row for row in others if not row["right"]]
        rows += wrong or sorted(others, key=lambda row: row["error"] / row["limit"])[-1:]
    return sorted(rows, key=lambda row: order.index((row["mode"], row["dtype"])))
