"""What `check` found: every result beside what its dtype allows, the first one that differs, and how the tiled parts ran."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

ResultKind = Literal["forward", "loss", "gradient", "hook", "parameter", "buffer"]


@dataclass(frozen=True, kw_only=True)
class CheckedResult:
    """One result of one step.

    Attributes:
        step: from 1. kind, name: forward of a module; loss; gradient, change ("parameter") or hook of a parameter; hook of a
            module; buffer.
        error: relative L2 distance to the untiled computation in higher precision; for a hook, how often it ran.
        limit: the largest allowed error; for a hook, how often it runs in the untiled training.
        reason: what is wrong, if an error number cannot say it.
    """

    step: int
    kind: ResultKind
    name: str
    error: float
    limit: float
    right: bool
    reason: str = ""

    def __str__(self) -> str:
        what = {"loss": "the loss", "parameter": "the change of", "forward": "the result of"}.get(
            self.kind, f"the {self.kind} of"
        )
        where = f"step {self.step}, {what}{'' if self.kind == 'loss' else f' {self.name}'}"
        if self.kind == "hook":
            return f"{where}: ran {self.error:g} times, {self.limit:g} untiled"
        return f"{where}: {self.reason or f'error {self.error:.1e}, limit {self.limit:.1e}'}"


@dataclass(kw_only=True)
class CheckReport:
    """The result of `check`. `str` of it is the text that the command prints.

    Attributes:
        results: every compared result, in the order of computation.
        paths: tiled part -> the path that ran, as of `tiling_paths`.
        hooks: hook of a module or a parameter -> how often it ran in a step.
        reference: the dtype of the untiled reference computation, which sets the allowed rounding error; "" if there was none.
        plain_bytes, tiled_bytes: peak bytes of one step, without parameters and batch.
        notes: which results could not be compared, and why.
    """

    results: list[CheckedResult]
    paths: dict[str, str]
    hooks: dict[str, int]
    reference: str
    plain_bytes: int
    tiled_bytes: int
    notes: list[str] = field(default_factory=list[str])

    @property
    def first(self) -> CheckedResult | None:
        """The first result that differs. Steps run forward, loss, gradients from the loss back, hooks, parameters, buffers."""
        return next((result for result in self.results if not result.right), None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.first is None

    def to_json(self) -> dict[str, Any]:
        """Return the whole report, with `equal` and `first`, as values that JSON can represent."""
        found = asdict(self) | {"equal": self.equal, "first": None if self.first is None else str(self.first)}
        for result in found["results"]:
            for name in ("error", "limit"):
                result[name] = result[name] if math.isfinite(result[name]) else str(result[name])
        return found

    def __str__(self) -> str:
        lines = [f"path {path}: {_some(names)}" for path, names in _by_value(self.paths).items()]
        lines += [
            f"hooks that ran {_times(count)} a step: {_some(names)}" for count, names in _by_value(self.hooks).items()
        ]
        for kind, results in _by_kind(self.results).items():
            numbers = [result for result in results if math.isfinite(result.error / (result.limit or 1.0))]
            worst = max(numbers, key=lambda result: result.error / (result.limit or 1.0), default=results[0])
            lines.append(
                f"{kind}: {len(results)} compared, {sum(not r.right for r in results)} differ; nearest to its limit: {worst}"
            )
        lines.append(f"reference: {f'untiled in {self.reference}' if self.reference else 'none in higher precision'}")
        lines.append(f"peak of a step: {_mib(self.plain_bytes)} untiled, {_mib(self.tiled_bytes)} tiled")
        lines += self.notes
        lines.append("equal" if self.first is None else f"differs first at {self.first}")
        return "\n".join(lines)


def _by_kind(results: list[CheckedResult]) -> dict[str, list[CheckedResult]]:
    found: dict[str, list[CheckedResult]] = {}
    for result in results:
        if result.kind != "hook":
            found.setdefault(result.kind, []).append(result)
    return found


def _by_value(named: Mapping[str, Any]) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for name, value in named.items():
        found.setdefault(value, []).append(name or "the model itself")
    return found


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parts, {names[0]} to {names[-1]}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _mib(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"
