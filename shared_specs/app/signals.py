"""Ctrl-C and kill: the step in progress is finished and saved; a second signal ends at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: int | None) -> int:
    """Return the exit status that a shell reports for a process that a signal ended; 0 without one."""
    return 0 if number is None else 128 + number


class StopRequest:
    """`with StopRequest(say) as stop:`; `stop.signal` is the signal that came, or None.

    Args:
        say: called once, from the signal handler, with what happens next.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._say = say
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()  # the next one is not waited for
        self._say("stopping after this step; once more stops at once and leaves the last checkpoint")
