"""Which results of a tiled training differ from the untiled one by more than the untiled one differs from higher precision."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np

from shared_specs.check.compare import UNIT, error_of, least_of, length, limit_of
from shared_specs.check.report import CheckedResult, ResultKind
from shared_specs.check.trained import Trained, TrainedStep, Value
from shared_specs.core.rounding import Array
from shared_specs.tolerances import between

Values = Mapping[str, Value | None]


def judged(plain: Trained, tiled: Trained, truth: Trained | None, *, same_steps: bool) -> list[CheckedResult]:
    """Return every result of every step, in the order in which they are made.

    A result may err by what the untiled computation errs, and by what it errs in half of the results of this kind: one of a
    few numbers is exact by chance. Without a truth the untiled computation is it, and two ways to compute one thing differ by
    what `tolerances.between` says.

    Args:
        same_steps: both run one function a step, so that hooks run equally often.
    """
    found: list[CheckedResult] = []
    unknown: set[str] = set()
    for number, (a, b) in enumerate(zip(plain.steps, tiled.steps, strict=True), 1):
        usual = max(between(plain.computes), between(tiled.computes))
        judge = _Judge(number, a, b, None if truth is None else truth.steps[number - 1], usual)
        found += judge.results(same_steps, unknown)
    return found


class _Judge:
    """One step."""

    def __init__(
        self, step: int, plain: TrainedStep, tiled: TrainedStep, truth: TrainedStep | None, usual: float
    ) -> None:
        self._step, self._plain, self._tiled = step, plain, tiled
        self._known, self._truth, self._usual = truth is not None, truth or plain, usual

    def results(self, same_steps: bool, unknown: set[str]) -> Iterator[CheckedResult]:
        """unknown: parameters whose gradients were rounding up to here, whose change may be any."""
        plain, tiled, truth = self._plain, self._tiled, self._truth
        yield from self._forward()
        losses = ({"loss": s.loss} for s in (plain, tiled, truth))
        yield from self._compared("loss", *losses, beside=self._baselines(plain.forward, truth.forward, 0.0))
        least = least_of(value.array for value in truth.gradients.values() if value is not None)
        yield from self._compared("gradient", plain.gradients, tiled.gradients, truth.gradients, least=least)
        yield from self._hooks(same_steps)
        unknown |= {
            name for name, value in truth.gradients.items() if value is not None and length((value.array,)) < least
        }
        updates = ({n: v for n, v in s.updates.items() if n not in unknown} for s in (plain, tiled, truth))
        yield from self._compared("parameter", *updates)
        common = [name for name in plain.buffers if name in tiled.buffers]
        yield from self._compared("buffer", *({n: s.buffers.get(n) for n in common} for s in (plain, tiled, truth)))

    def _forward(self) -> list[CheckedResult]:
        """Return the results of modules, of those that differ that one first whose argument does not."""
        common = [name for name in self._plain.forward if name in self._tiled.forward]
        # What is called with a part of the tokens or of the batch has results of another shape.
        common = [n for n in common if not _reason(self._plain.forward[n], self._tiled.forward[n])]
        sides = (self._plain, self._tiled, self._truth)
        found = list(self._compared("forward", *({n: s.forward.get(n) for n in common} for s in sides)))
        if all(result.right for result in found):
            return found
        given = self._compared("forward", *({n: s.given[n] for n in common if n in s.given} for s in sides))
        wrong = {result.name for result in given if not result.right}
        return sorted(found, key=lambda result: not result.right and result.name in wrong)

    def _compared(
        self,
        kind: ResultKind,
        plain: Values,
        tiled: Values,
        truth: Values,
        *,
        least: float = 0.0,
        beside: list[float] | None = None,
    ) -> Iterator[CheckedResult]:
        usual = self._baselines(plain, truth, least) + (beside or [])
        typical = float(np.median(usual)) if usual else 0.0
        for name in dict.fromkeys((*plain, *tiled)):
            a, b, true = plain.get(name), tiled.get(name), truth.get(name)
            reason = _reason(a, b)
            if reason or a is None or b is None or true is None:
                yield self._result(kind, name, math.inf if reason else 0.0, 0.0, reason)
            elif a.dtype not in UNIT or not (np.isfinite(a.array).all() and np.isfinite(b.array).all()):
                same = np.array_equal(a.array, b.array, equal_nan=a.dtype in UNIT)
                yield self._result(
                    kind, name, 0.0 if same else math.inf, 0.0, "" if same else _values(a.array, b.array)
                )
            else:
                yield self._result(
                    kind, name, error_of(b.array, true.array, least), self._limit(a, true, typical, least)
                )

    def _limit(self, plain: Value, truth: Value, typical: float, least: float) -> float:
        rounding = length((truth.array,)) < least
        baseline = max(typical, error_of(plain.array, truth.array, least))
        return limit_of(baseline, plain.dtype, rounding=rounding, floor=0.0 if self._known else self._usual)

    def _baselines(self, plain: Values, truth: Values, least: float) -> list[float]:
        """Return what the untiled computation errs by, where digits are known."""
        pairs = [(value, truth.get(name)) for name, value in plain.items()]
        return [
            error_of(a.array, b.array, least)
            for a, b in pairs
            if a is not None
            and b is not None
            and a.dtype in UNIT
            and np.isfinite(a.array).all()
            and length((b.array,)) > least
        ]

    def _hooks(self, same_steps: bool) -> Iterator[CheckedResult]:
        plain, tiled = self._plain.hooks, self._tiled.hooks
        common = [name for name in plain if name in tiled]
        # Of so many micro-batches all hooks run as often.
        factor = 1.0
        if not same_steps:
            ratios = Counter(tiled[name] / plain[name] for name in common if plain[name] and tiled[name])
            factor = ratios.most_common(1)[0][0] if ratios else 1.0
        for name in common:
            wanted = plain[name] * factor
            yield self._result("hook", name, tiled[name], wanted, right=tiled[name] == wanted)

    def _result(
        self, kind: ResultKind, name: str, error: float, limit: float, reason: str = "", *, right: bool | None = None
    ) -> CheckedResult:
        right = error <= limit and not reason if right is None else right
        return CheckedResult(
            step=self._step, kind=kind, name=name, error=error, limit=limit, right=right, reason=reason
        )


def _reason(plain: Value | None, tiled: Value | None) -> str:
    """Return what is wrong where one is missing or of another shape."""
    if plain is None or tiled is None:
        present = plain or tiled
        nothing = present is None or not np.any(present.array)  # a gradient of zeros is none to most frameworks
        return "" if nothing else "there is none" + (" tiled" if tiled is None else " untiled")
    if plain.array.shape != tiled.array.shape:
        return f"shape {list(tiled.array.shape)}, {list(plain.array.shape)} untiled"
    return ""


def _values(plain: Array, tiled: Array) -> str:
    if not np.issubdtype(plain.dtype, np.floating):
        return f"{_short(tiled)}, {_short(plain)} untiled"
    return "numbers that are not finite are others"


def _short(array: Array) -> str:
    return str(array.item()) if array.size == 1 else "other values"
