"""How far a step has come: what a trainer tells of its layers, as the fraction of the step that is done."""

from collections.abc import Callable
from typing import Literal, get_args

Phase = Literal["forward", "backward"]
# What a trainer calls when one more of so many layers is done; of a layer that backward computes again it may tell again.
Heard = Callable[[Phase, int], None]
# Backward in units of forward: two products for each of forward's, and forward once more where it is recomputed.
BACKWARD, RECOMPUTED_BACKWARD = 2.0, 3.0


class StepProgress:
    """Counts the layers of the micro-batches of one step.

    Args:
        show: what is called with (fraction of the step in (0, 1], the phase, layers done in it, layers of a micro-batch).
        backward: what a layer's backward costs in units of its forward.
        micro_batches: how many a step has, >= 1.
    """

    def __init__(
        self, show: Callable[[float, Phase, int, int], None], *, backward: float = BACKWARD, micro_batches: int = 1
    ) -> None:
        self._show, self._backward, self._micro_batches = show, backward, micro_batches
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self._done: dict[Phase, int] = dict.fromkeys(get_args(Phase), 0)

    def heard(self, phase: Phase, layers: int) -> None:
        """One more layer of `layers` is done. Of a micro-batch no more than all count: the others were recomputed."""
        backward = self._done["backward"]
        most = layers * self._micro_batches if phase == "backward" else layers * (1 + backward // layers)
        if self._done[phase] >= min(most, layers * self._micro_batches):
            return
        self._done[phase] += 1
        whole = layers * self._micro_batches * (1 + self._backward)
        fraction = (self._done["forward"] + self._backward * self._done["backward"]) / whole
        self._show(fraction, phase, (self._done[phase] - 1) % layers + 1, layers)
