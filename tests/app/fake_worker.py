"""A worker without a framework: `python -m tests.app.fake_worker`. Variants do what their names say.

"hang" never ends, "die" ends the process, "sick" breaks the device for good, "wrong" computes something else, "nan" too,
"raise" raises; "late-die" dies when it is timed a second time. A group "nothing" cannot draw its data.
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from shared_specs.app.gpu.worker import Variant, channel, receive, serve


class FakeDevice:
    """Arrays are lists of numbers; a run takes no time."""

    def __init__(self) -> None:
        self.sick = False

    def seconds(self, variant: Variant) -> float:
        if self.sick:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        variant.run()
        return 0.5

    def peak(self, variant: Variant) -> int | None:
        variant.run()
        return 7

    def distances(self, found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        found = {name: math.dist(a, expected[name]) for name, a in found.items()}
        return {name: (error, error) for name, error in found.items()}

    @contextmanager
    def poisoned(self) -> Iterator[None]:
        yield

    def healthy(self) -> bool:
        return not self.sick

    def forget(self) -> None:
        if self.sick:  # as torch.cuda.empty_cache does
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def variant(name: str, device: FakeDevice) -> Variant:
    runs = []

    def run() -> None:
        if name == "hang":
            time.sleep(600)
        if name == "die":
            os._exit(9)
        if name == "raise":
            raise MemoryError("out of memory")
        if name == "sick":
            device.sick = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        runs.append(name)
        if name == "late-die" and len(runs) > 3:  # compared, its peak, timed once
            os._exit(9)

    def results() -> dict[str, list[float]]:
        run()
        return {"y": [{"wrong": 2.0, "nan": math.nan}.get(name, 1.0)]}

    return Variant(run=run, results=results, library=name.startswith("plain"), flop=3e12)


def main() -> None:
    emit, job = channel(), receive()
    device = FakeDevice()

    def draw(group: str) -> dict[str, Variant]:
        if group == "nothing":
            raise MemoryError("no room for the data")
        return {name: variant(name, device) for name in job["facts"][group]}

    if job["facts"].get("refused"):
        emit({"event": "refused", "reason": "bench: no GPU"})
        return
    if job["facts"].get("stillborn"):
        os._exit(3)
    print("what a library prints does no harm", flush=True)
    emit({"event": "device", "device": {"name": "fake", "process": os.getpid()}})
    serve(job, {group: lambda group=group: draw(group) for group in job["groups"]}, device, emit)


if __name__ == "__main__":
    main()
