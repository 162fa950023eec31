"""Ctrl-C and kill: the step in progress is finished and saved; a second signal ends at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(number: int | None) -> int:
    """Return the exit status that a shell reports for a process that a signal ended; 0 without one."""
    return 0 if number is None else 128 + number


class StopRequest:
    """Ask `signal` of it for the signal that came, or None: `with stop.listen(say):` around the steps, `stop.end()` after all.

    An error leaves the handlers in place until `end`: a launcher that sees another process fail kills this one, which must
    live long enough to say what it lost.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._say: Callable[[str], None] | None = None
        self._previous: dict[int, object] = {}

    @contextlib.contextmanager
    def listen(self, say: Callable[[str], None]) -> Iterator[None]:
        """Take note of signals inside.

        Args:
            say: called once, from the signal handler, with what happens next.
        """
        if threading.current_thread() is threading.main_thread():  # Python handles signals nowhere else
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        self._say = say
        try:
            yield
        except Exception:
            self._say = None
            raise
        except BaseException:
            self.end()
            raise
        self.end()

    def end(self) -> None:
        """Leave signals to whoever had them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.end()  # the next one is not waited for
        if self._say is not None:
            self._say("stopping after this step; once more stops at once and leaves the last checkpoint")
