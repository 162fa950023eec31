"""`parity`: the cases of the specification against its float64 oracle, on the devices and backends of this machine."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from shared_specs import reference
from shared_specs.app.options import InputError, ParityOptions
from shared_specs.config import LOSS_OUTPUTS
from shared_specs.core.rounding import DTYPES, Array, compute_dtype, relative_error
from shared_specs.errors import UnsupportedError
from shared_specs.linear.cases import LINEAR_CASES, LinearCase, linear_baseline, linear_oracle
from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.mlp.cases import MLP_CASES, MLPCase
from shared_specs.tolerances import limit

Case = MLPCase | LossCase | LinearCase
# Layouts in memory, weights that are one and shards that are kept are `tiled_mlp`'s; of the rest an MLP of the framework's
# own functions is a token-wise function as any other.
_TILED = tuple(
    case
    for case in MLP_CASES
    if not (case.fused or case.keep) and (case.x_layout, case.dy_layout) == ("contiguous", "contiguous")
)
GROUPS: Mapping[str, Sequence[Case]] = {"mlp": MLP_CASES, "loss": LOSS_CASES, "linear": LINEAR_CASES, "tile": _TILED}
# Fields of which `--fast` takes one case each, in every dtype.
_TOLD_APART: Mapping[str, tuple[str, ...]] = {
    "mlp": ("activation", "gated", "keep", "fused"),
    "loss": ("reduction", "outputs", "vocab_shards", "bias"),
    "linear": ("in_splits", "out_splits", "return_bias"),
    "tile": ("gated", "biases"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where cases run: a device and, of operations with several, a backend."""

    device: str
    backend: str


@dataclass(kw_only=True)
class Row:
    """The errors of the cases of one group, dtype and place.

    Attributes:
        cases: that ran. refused: that the backend has no kernel for.
        worst: the largest error of a result over its limit: above 1 it is wrong; infinite where a result is missing, has
            another shape or dtype, or is no number. case, quantity: whose it is.
    """

    group: str
    dtype: str
    place: Place
    cases: int = 0
    refused: int = 0
    worst: float = 0.0
    case: str = ""
    quantity: str = ""

    def take(self, case: Case, found: Mapping[str, Array | None]) -> None:
        """Count a case that ran."""
        self.cases += 1
        for quantity, ratio in ratios(case, found).items():
            if not ratio <= self.worst:
                self.worst, self.case, self.quantity = ratio, case.id, quantity

    @property
    def right(self) -> bool:
        return self.worst <= 1.0


class Runner(Protocol):
    """A half, which computes cases: NumPy arrays in the layout of the specification."""

    def places(self, group: str) -> Iterable[Place]:
        """Return where cases of a group can run on this machine."""
        ...

    def run(self, group: str, case: Any, place: Place) -> Mapping[str, Array | None]:
        """Return every result and the gradient of every operand that is not frozen.

        Raises:
            UnsupportedError: the backend has no kernel for it.
        """
        ...


def parity(options: ParityOptions, half: str, runner: Runner, console: Console | None = None) -> int:
    """Run the cases, print what came of them and return the exit code: 1 where a result is over its limit.

    Args:
        half: the package, such as "tiled_torch".
    """
    console = console or Console(stderr=options.json)
    groups = [options.op] if options.op != "all" else list(GROUPS)
    rows = []
    with console.status("") as status:
        for row in measured(runner, groups, options.fast, status.update):
            rows.append(row)
    if not rows:
        raise InputError("parity: no case was found, of which nothing can be said.")
    if options.json:
        print(json.dumps([asdict(row) | {"worst": _plain(row.worst), "right": row.right} for row in rows], indent=2))
    else:
        _print(half, rows, console)
    return 0 if all(row.right for row in rows) else 1


def measured(runner: Runner, groups: Iterable[str], fast: bool, say: Any = lambda text: None) -> Iterator[Row]:
    """Yield the rows of all groups, one after another."""
    for group in groups:
        cases = chosen(group, fast)
        for place in runner.places(group):
            rows: dict[str, Row] = {}
            for number, case in enumerate(cases, 1):
                say(f"{group} on {place.device} with {place.backend}: case {number} of {len(cases)}")
                row = rows.setdefault(case.dtype, Row(group=group, dtype=case.dtype, place=place))
                try:
                    found = runner.run(group, case, place)
                except UnsupportedError:
                    row.refused += 1
                    continue
                row.take(case, found)
            yield from rows.values()


def chosen(group: str, fast: bool) -> list[Case]:
    """Return the cases of a group; `fast`: the first of each kind."""
    if not fast:
        return list(GROUPS[group])
    found: dict[Any, Case] = {}
    for case in GROUPS[group]:
        for name in ("dtype", *_TOLD_APART[group]):
            found.setdefault((case.dtype, name, getattr(case, name)), case)
    return list(dict.fromkeys(found.values()))


def ratios(case: Case, found: Mapping[str, Array | None]) -> dict[str, float]:
    """Return each result's error over its limit."""
    truth, plain = _truth(case)
    told = dict.fromkeys(found.keys() - truth.keys(), math.inf)
    for name, expected in truth.items():
        actual = found.get(name)
        dtype = compute_dtype(case.dtype) if name in ("loss", *LOSS_OUTPUTS) else DTYPES[case.dtype]
        told[name] = math.inf
        if actual is not None and actual.shape == expected.shape and actual.dtype == dtype:
            error = relative_error(actual, expected) / limit(relative_error(plain[name], expected), case.dtype)
            told[name] = error if error == error else math.inf
    return told


def _truth(case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
    """The oracle's results and those of a plain implementation."""
    if isinstance(case, LinearCase):
        return linear_oracle(case), linear_baseline(case)
    return reference.oracle(case), reference.baseline(case)


def _plain(number: float) -> float | str:
    """JSON has no infinity."""
    return number if math.isfinite(number) else str(number)


def _print(half: str, rows: Sequence[Row], console: Console) -> None:
    table = Table(
        Column("cases of"),
        Column("dtype"),
        Column("device"),
        Column("backend"),
        Column("cases", justify="right"),
        Column("worst / limit", justify="right"),
        box=SIMPLE,
    )
    for row in rows:
        count = f"{row.cases}" + f" ({row.refused} refused)" * (row.refused > 0)
        worst = f"{row.worst:.2g}" if row.cases else "-"
        table.add_row(
            row.group, row.dtype, row.place.device, row.place.backend, count, worst + " wrong" * (not row.right)
        )
    console.print(table)
    for row in rows:
        if not row.right:
            text = f"{half} parity: wrong: {row.quantity} of {row.case} ({row.place.device}, {row.place.backend})"
            console.print(text, highlight=False, soft_wrap=True)
    total = sum(row.cases for row in rows)
    wrong = sum(not row.right for row in rows)
    end = (
        "every error is within its limit" if not wrong else f"{wrong} of {len(rows)} rows have an error over its limit"
    )
    console.print(f"{total} cases: {end}", highlight=False, soft_wrap=True)
