"""Which results of a tiled training differ from the untiled one by more than the untiled one differs from higher precision."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shared_specs.check.compare import UNIT, error_of, least_of, length, limit_of
from shared_specs.check.report import CheckedResult, ResultKind
from shared_specs.check.trained import Trained, TrainedStep, Value
from shared_specs.core.rounding import Array
from shared_specs.tolerances import KNOWN_SIGN, between

Values = Mapping[str, Value | None]


def judged(
    plain: Trained, tiled: Trained, truth: Trained | None, disturbed: Trained, *, same_steps: bool
) -> list[CheckedResult]:
    """Return every result of every step, in the order in which they are made.

    A result may err by what the untiled computation errs, and by what it errs in half of the results of this kind: one of a
    few numbers is exact by chance. From the second step on differences of the first one move all results together; then it may
    also err by what a training errs that begins with other last digits. Without a truth the untiled computation is it, and two
    ways to compute one thing differ by what `tolerances.between` says.

    The change of a parameter may also err by the square root of what its gradient errs by, and is compared where the sign of
    the gradient is known: an optimizer may divide by the gradient's own size, as Adam does.

    Args:
        disturbed: the untiled training of parameters whose last digit is another one.
        same_steps: both run one function a step, so that hooks run equally often.
    """
    found: list[CheckedResult] = []
    gradients = _Gradients({}, {})
    usual = max(between(plain.computes), between(tiled.computes)) if truth is None else 0.0
    for number, (a, b, other) in enumerate(zip(plain.steps, tiled.steps, disturbed.steps, strict=True)):
        others = [other] if truth is None else [a, other][: 1 + (number > 0)]
        judge = _Judge(number + 1, a, b, a if truth is None else truth.steps[number], others, usual)
        found += judge.results(same_steps, gradients)
    return found


@dataclass(frozen=True)
class _Gradients:
    """Of each parameter, up to a step: the largest error of its untiled gradient, and where the sign of that is known."""

    errors: dict[str, float]
    known: dict[str, Array]

    def add(self, name: str, plain: Value, truth: Value, least: float) -> None:
        expected = truth.array.astype(np.float64)
        noise = length((plain.array - expected,)) / math.sqrt(max(expected.size, 1))
        known = np.abs(expected) > KNOWN_SIGN * noise if length((expected,)) > least else np.zeros(expected.shape, bool)
        self.known[name] = self.known.get(name, known) & known
        self.errors[name] = max(self.errors.get(name, 0.0), error_of(plain.array, expected, least))

    def masked(self, name: str, change: Value) -> Value:
        """Return a change that is 0 where the sign of the gradient is not known."""
        known = self.known.get(name)
        return change if known is None else Value(np.where(known, change.array, 0), change.dtype)


class _Judge:
    """One step. others: the trainings whose errors rounding explains; usual: an error that is right anyway."""

    def __init__(
        self,
        step: int,
        plain: TrainedStep,
        tiled: TrainedStep,
        truth: TrainedStep,
        others: list[TrainedStep],
        usual: float,
    ) -> None:
        self._step, self._plain, self._tiled = step, plain, tiled
        self._truth, self._others, self._usual = truth, others, usual

    def results(self, same_steps: bool, gradients: _Gradients) -> Iterator[CheckedResult]:
        """Return every result of the step. gradients: are brought up to date."""
        yield from self._forward()
        forward = self._baselines(lambda step: step.forward).values()
        yield from self._compared("loss", lambda step: {"loss": step.loss}, beside=forward)
        truth = self._truth.gradients
        least = least_of(value.array for value in truth.values() if value is not None)
        yield from self._compared("gradient", lambda step: step.gradients, least=least)
        yield from self._hooks(same_steps)
        for other in self._others:
            for name, value in other.gradients.items():
                true = truth.get(name)
                if value is not None and true is not None:
                    gradients.add(name, value, true, least)
        rough = {name: math.sqrt(error) for name, error in gradients.errors.items() if math.isfinite(error)}
        changes = lambda step: {n: gradients.masked(n, v) for n, v in step.updates.items()}  # noqa: E731
        yield from self._compared("parameter", changes, rough=rough)
        common = [name for name in self._plain.buffers if name in self._tiled.buffers]
        yield from self._compared("buffer", lambda step: {n: step.buffers.get(n) for n in common})

    def _forward(self) -> list[CheckedResult]:
        """Return the results of modules, of those that differ that one first whose argument does not."""
        plain, tiled = self._plain.forward, self._tiled.forward
        # What is called with a part of the tokens or of the batch has results of another shape.
        common = [n for n in plain if n in tiled and plain[n].array.shape == tiled[n].array.shape]
        found = list(self._compared("forward", lambda step: {n: step.forward.get(n) for n in common}))
        if all(result.right for result in found):
            return found
        common = [n for n in common if n in self._plain.given and n in self._tiled.given]
        given = self._compared("forward", lambda step: {n: step.given.get(n) for n in common})
        wrong = {result.name for result in given if not result.right}
        return sorted(found, key=lambda result: not result.right and result.name in wrong)

    def _compared(
        self,
        kind: ResultKind,
        part: Callable[[TrainedStep], Values],
        *,
        least: float = 0.0,
        beside: Iterable[float] = (),
        rough: Mapping[str, float] | None = None,
    ) -> Iterator[CheckedResult]:
        """Compare results of one kind. beside, rough: baselines of others, and by name."""
        plain, tiled, truth = part(self._plain), part(self._tiled), part(self._truth)
        baselines = self._baselines(part, least)
        usual = [*baselines.values(), *beside]
        typical = float(np.median(usual)) if usual else 0.0
        for name in dict.fromkeys((*plain, *tiled)):
            a, b, true = plain.get(name), tiled.get(name), truth.get(name)
            reason = _reason(a, b)
            if reason or a is None or b is None or a.dtype not in UNIT:
                yield self._result(kind, name, math.inf if reason else 0.0, 0.0, reason)
                continue
            # What overflows, as rows of padding may, does so in both; elsewhere numbers are compared.
            finite = np.isfinite(a.array) & (True if true is None else np.isfinite(true.array))
            other, expected = (np.where(finite, v.array, 0) for v in (b, true or a))
            baseline = max(typical, baselines.get(name, 0.0), (rough or {}).get(name, 0.0))
            limit = limit_of(baseline, a.dtype, rounding=length((expected,)) < least, floor=self._usual)
            yield self._result(kind, name, error_of(other, expected, least), limit)

    def _baselines(self, part: Callable[[TrainedStep], Values], least: float = 0.0) -> dict[str, float]:
        """Return by how much the others err at most."""
        found: dict[str, float] = {}
        truth = part(self._truth)
        for other in self._others:
            for name, a in part(other).items():
                true = truth.get(name)
                if a is None or true is None or a.dtype not in UNIT or a.array.shape != true.array.shape:
                    continue
                finite = np.isfinite(a.array) & np.isfinite(true.array)
                error = error_of(np.where(finite, a.array, 0), np.where(finite, true.array, 0), least)
                found[name] = max(found.get(name, 0.0), error)
        return found

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
    """Return what is wrong without regard to how much: missing, another shape, other whole numbers, no numbers."""
    if plain is None or tiled is None:
        present = plain or tiled
        nothing = present is None or not np.any(present.array)  # a gradient of zeros is none to most frameworks
        return "" if nothing else "there is none" + (" tiled" if tiled is None else " untiled")
    if plain.array.shape != tiled.array.shape:
        return f"shape {list(tiled.array.shape)}, {list(plain.array.shape)} untiled"
    if plain.dtype not in UNIT:
        same = np.array_equal(plain.array, tiled.array)
        return "" if same else f"{_short(tiled.array)}, {_short(plain.array)} untiled"
    same = np.array_equal(np.isfinite(plain.array), np.isfinite(tiled.array))
    return "" if same else "other numbers are not finite than untiled"


def _short(array: Array) -> str:
    return str(array.item()) if array.size == 1 else "other values"
