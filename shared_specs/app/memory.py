"""Peak memory of this process over a stretch of work."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size to the current one
_SAMPLE_SECONDS = 0.01


class PeakMemory:
    """`with PeakMemory() as peak: ...` and then `peak.bytes`: the largest resident set of the process inside.

    Linux keeps the peak itself and lets it be reset. Elsewhere a thread samples the resident set every 10 ms, which
    can miss a shorter peak; `exact` says which it was.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.exact = False
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self.exact = True
        except OSError:
            self._sampler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.exact:
            self.bytes = _peak_resident()
        else:
            self._done.set()
            self._sampler.join()

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self.bytes = max(self.bytes, process.memory_info().rss)
            if self._done.wait(_SAMPLE_SECONDS):
                return


def _peak_resident() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024  # the line is in kB


def resident_bytes() -> int:
    """Memory this process holds now."""
    return psutil.Process().memory_info().rss


def machine_bytes() -> int:
    """Memory of this machine."""
    return psutil.virtual_memory().total
