"""Two ways of training one model, and two more that say what rounding does, in whichever half trains them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from shared_specs.check.checks import DRAWS, fail_running
from shared_specs.check.judge import judged
from shared_specs.check.report import CheckReport
from shared_specs.check.trained import Trained, furthest, is_finite
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import GPU_PEERS

Way = Literal["untiled", "tiled"]


class TrainsBothWays(Protocol):
    """A half's own: every training begins with the same state."""

    def wide(self) -> tuple[str, ...]:
        """Return the dtypes that have more digits than the model's own, those with most first."""
        ...

    def train(self, way: Way, *, seed: int, dtype: str = "", evaluates: bool = False, disturbed: str = "") -> Trained:
        """Return what training leaves behind. dtype: of state and batch, "" for their own. evaluates: in evaluation.

        disturbed: every parameter differs by the last digit that this dtype has.
        """
        ...

    def peak_bytes(self, way: Way, *, evaluates: bool = False) -> int: ...


@dataclass
class TwoWays:
    """One model. same_steps: both ways run one function a step."""

    trainer: TrainsBothWays
    seed: int
    same_steps: bool

    def report(self) -> CheckReport:
        """Compare; in evaluation where what is drawn depends on how tokens are cut."""
        plain, found = self._report(evaluates=False)
        forward = found.first is not None and found.first.kind in ("forward", "loss")
        if forward and plain.draws and self._draws(plain):
            _, found = self._report(evaluates=True)
            found.notes.append(DRAWS)
        return found

    def _report(self, *, evaluates: bool) -> tuple[Trained, CheckReport]:
        """Return the untiled training as well."""
        plain, tiled = (self._trained(way, evaluates=evaluates) for way in WAYS)
        disturbed = self._trained("untiled", evaluates=evaluates, disturbed=plain.computes)
        truth, reference, note = self._truth(plain, evaluates)
        peaks = [running(way, lambda way=way: self.trainer.peak_bytes(way, evaluates=evaluates)) for way in WAYS]
        report = CheckReport(
            results=judged(plain, tiled, truth, disturbed, same_steps=self.same_steps),
            paths=tiled.paths,
            hooks=dict(tiled.steps[-1].hooks),
            reference=reference,
            plain_bytes=peaks[0],
            tiled_bytes=peaks[1],
            notes=[text for text in (note, _tiled_already(plain.paths)) if text],
        )
        return plain, report

    def _trained(self, way: Way, **how: Any) -> Trained:
        return running(way, lambda: self.trainer.train(way, seed=self.seed, **how))

    def _draws(self, plain: Trained) -> bool:
        """Return whether the untiled model computes something else with other random numbers."""
        other = self.trainer.train("untiled", seed=self.seed + 1)
        return not np.array_equal(plain.steps[0].loss.array, other.steps[0].loss.array)

    def _truth(self, plain: Trained, evaluates: bool) -> tuple[Trained | None, str, str]:
        """Return the training that says what rounding does, its dtype, and why there is none."""
        reasons: list[str] = []
        for dtype in self.trainer.wide():
            try:
                found = self.trainer.train("untiled", seed=self.seed, dtype=dtype, evaluates=evaluates)
            except Exception as error:  # a kernel, an optimizer or a dtype of the model's own
                reasons.append(" ".join(f"{type(error).__name__}: {error}".split()))
                continue
            if found.computes in ("bfloat16", "float16"):
                reasons.append(f"parts of it stay in {found.computes}")
            elif is_finite(plain) and not is_finite(found):
                reasons.append(f"in {dtype} it comes to numbers that are not finite")
            elif plain.draws and furthest(plain.steps[0], found.steps[0]) > GPU_PEERS:
                reasons.append(f"it draws other random numbers in {dtype}")
            else:
                return found, dtype, ""
        why = reasons[0] if reasons else f"it is in {plain.computes}"
        return None, "", f"Limits are the usual ones: the untiled model has no training in higher precision ({why})."


def _tiled_already(paths: Mapping[str, str]) -> str:
    """Return what is to be said where the untiled model is tiled too."""
    tiled = [name or "the model itself" for name, path in paths.items() if not path.startswith("untiled")]
    if not tiled:
        return ""
    return (
        f"The untiled model has tiled parts as well, {tiled[0]} first: give it as it was before, or plain=untile_model."
    )


WAYS: tuple[Way, Way] = ("untiled", "tiled")


def running(what: Way | Literal["making the model"], run: Callable[[], Any]) -> Any:
    """Return what `run` returns; SpecError where something of the user's fails in it."""
    try:
        return run()
    except (SpecError, UnsupportedError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and str(error).startswith("check: "):
            raise
        fail_running(what if what not in WAYS else f"training, {what},", error)
