"""What a worker process of `bench --device gpu` does with one job, whichever framework its variants are made of.

Every variant runs once and is compared with the library's results; what is wrong or raises is a row that says so and is
never timed. Then the others are timed in turn. All that is known is told at once as a line of JSON, so that a process that
dies or hangs takes the row of one variant with it: `supervisor.py` reads the lines and starts another process.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared_specs.tolerances import between, between_rows

EVENTS = "TILED_EVENTS"  # the file descriptor that events are written to
REASON = 300  # characters of an error that a row keeps

FACTS = ("flop", "traffic", "predicted_bytes", "model_seconds", "peer")

Results = Mapping[str, Any]
Emit = Callable[[dict[str, Any]], None]


@dataclass(kw_only=True)
class Variant:
    """One way to compute something.

    Attributes:
        run: what is timed. before: what is run first, outside the clock.
        results: runs it once and returns what it computed by name; None where nothing can be compared.
        library: whether others are compared with it. peer: another project's, which may sum in 16 bits.
        chain: layers one behind the other. Their roundings are independent, so limits grow with its square root.
        flop, traffic: FLOP of its products, and the fewest bytes it has to move; None where the other one bounds it.
        predicted_bytes: what `costs.py` says of its memory. model_seconds: what `roofline.py` says of its time.
        facts: what else is known once it has run.
    """

    run: Callable[[], Any]
    results: Callable[[], Results] | None = None
    before: Callable[[], object] | None = None
    library: bool = False
    peer: bool = False
    chain: int = 1
    flop: float | None = None
    traffic: float | None = None
    predicted_bytes: int | None = None
    model_seconds: float | None = None
    facts: Callable[[], dict[str, Any]] = field(default=dict)


Groups = Mapping[str, Callable[[], Mapping[str, Variant]]]


class Device(Protocol):
    """Timing and memory of one framework on its device."""

    def seconds(self, variant: Variant) -> float: ...

    def peak(self, variant: Variant) -> int | None:
        """Run the variant once and return its peak: bytes above those in use before. None where the device does not count."""
        ...

    def distances(self, found: Results, expected: Results) -> dict[str, tuple[float, float]]:
        """Return the relative L2 distance of every result, whole and of its worst row; NaN where one is not finite."""
        ...

    def poisoned(self) -> AbstractContextManager[None]:
        """Fill new memory with NaN where the device allows it, so that a read of memory that nothing wrote is seen."""
        ...

    def healthy(self) -> bool:
        """Return whether the device still works: after some errors every later call of the process fails."""
        ...

    def forget(self) -> None:
        """Free the memory that is no longer in use."""
        ...


class Unhealthy(Exception):
    """Nothing more can be run in this process."""


def serve(job: Mapping[str, Any], groups: Groups, device: Device, emit: Emit) -> None:
    """Measures the groups of a job in turn, until its seconds are over."""
    end = time.monotonic() + job["seconds"]
    failed = {tuple(pair) for pair in job.get("failed", ())}
    for name in job["groups"]:
        emit({"event": "drawing", "group": name})
        reason = None
        try:
            variants = {key: value for key, value in groups[name]().items() if (name, key) not in failed}
            emit({"event": "group", "group": name, "variants": list(variants)})
            _measure(name, variants, job, device, emit, end)
        except Unhealthy:
            emit({"event": "unhealthy"})
            return
        except Exception as error:  # the data did not fit
            reason = reason_of(error)
        variants = {}
        if reason is not None:
            emit({"event": "group_left_out", "group": name, "reason": reason})
            if not device.healthy():
                emit({"event": "unhealthy"})
                return
        device.forget()
        emit({"event": "group_done", "group": name})
    emit({"event": "done"})


def reason_of(error: BaseException) -> str:
    """Return one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:REASON]


def _measure(
    group: str, variants: Mapping[str, Variant], job: Mapping[str, Any], device: Device, emit: Emit, end: float
) -> None:
    alive, seconds_of = _first_runs(group, variants, job, device, emit, end)
    names = list(alive)
    for turn in range(job["repeats"]):
        if not names or (turn and time.monotonic() + sum(seconds_of[name] for name in names) > end):
            break
        found = {}
        first = turn % len(names)
        for name in [*names[first:], *names[:first]]:
            emit({"event": "timing", "group": group, "variant": name})
            reason = None
            try:
                found[name] = device.seconds(alive[name])
            except Exception as error:
                reason = reason_of(error)
            if reason is not None:
                names.remove(name)
                _left_out({"group": group, "variant": name}, reason, device, emit)
        emit({"event": "turn", "group": group, "seconds": {name: found[name] for name in names}})


def _first_runs(
    group: str, variants: Mapping[str, Variant], job: Mapping[str, Any], device: Device, emit: Emit, end: float
) -> tuple[dict[str, Variant], dict[str, float]]:
    """Return (the variants that are right, the seconds of one run of each); the first library's result is what is right."""
    alive: dict[str, Variant] = {}
    seconds_of: dict[str, float] = {}
    expected: tuple[str, Results] | None = None
    for name, variant in variants.items():
        line = {"group": group, "variant": name}
        # One turn of what is alive has to fit yet.
        if time.monotonic() + sum(seconds_of.values()) > end:
            emit({**line, "event": "left_out", "reason": "no time was left for it"})
            continue
        emit({**line, "event": "begin"})
        reason, wrong, facts = None, False, {}
        try:
            start = time.monotonic()
            found: Any = None
            if variant.results is None:
                variant.run()
            else:
                own = not (variant.library or variant.peer)
                with device.poisoned() if own else nullcontext():
                    found = variant.results()
            facts["first_seconds"] = time.monotonic() - start
            if found is not None:
                reason, told = _compare(found, expected, variant, job["dtype"], device)
                facts |= told
                wrong = reason is not None
                if variant.library and expected is None and not wrong:
                    expected = name, found
            found = None
            if not wrong:
                start = time.monotonic()
                facts["peak_bytes"] = device.peak(variant)
                seconds_of[name] = time.monotonic() - start
                facts |= {key: getattr(variant, key) for key in FACTS} | variant.facts()
        except Exception as error:  # out of memory, a peer's own refusal: a line in the record
            reason = reason_of(error)
        if reason is None:
            alive[name] = variant
            emit({**line, "event": "ready", "facts": facts})
        else:  # here the error is gone, and with its traceback what the variant had taken
            seconds_of.pop(name, None)
            _left_out({**line, "facts": facts, "wrong": wrong}, reason, device, emit)
    return alive, seconds_of


def _compare(
    found: Results, expected: tuple[str, Results] | None, variant: Variant, dtype: str, device: Device
) -> tuple[str | None, dict[str, Any]]:
    """Return (what is wrong with these results, or None; what a row says of the comparison).

    Where no library's form has run there is nothing to compare with but what is finite: the row says so.
    """
    name, right = (None, found) if expected is None else expected
    distances = device.distances(found, right)
    whole, row = (limit(dtype, peer=variant.peer) * variant.chain**0.5 for limit in (between, between_rows))
    faults = [
        f"{key}: relative error {error:.1e}, worst row {worst:.1e}, allowed {whole:.1e} and {row:.1e}"
        for key, (error, worst) in distances.items()
        if not (error <= whole and worst <= row)
    ]
    told: dict[str, Any] = {"compared_with": name}
    if name is not None:
        told["errors"] = {key: error if math.isfinite(error) else None for key, (error, _) in distances.items()}
    return ("wrong: " + "; ".join(faults))[:REASON] if faults else None, told


def _left_out(line: Mapping[str, Any], reason: str, device: Device, emit: Emit) -> None:
    emit({**line, "event": "left_out", "reason": reason})
    if not device.healthy():
        raise Unhealthy
    device.forget()


def channel() -> Emit:
    """Return a function that writes events to whoever started this process; to stdout where nobody says where to."""
    told = os.environ.get(EVENTS)
    if told:
        os.set_inheritable(int(told), False)  # or a compiler's process would keep it open when this one has died
    stream = os.fdopen(int(told), "w", buffering=1) if told else sys.stdout

    def emit(event: dict[str, Any]) -> None:
        stream.write(json.dumps(event) + "\n")
        stream.flush()

    return emit


def receive() -> dict[str, Any]:
    """Return the job, once it is sent: the process is started early, so that its imports are done by then.

    From then on the process ends when its input does: whoever started it is gone.
    """
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    if os.environ.get(EVENTS):
        threading.Thread(target=_end_with_input, daemon=True).start()
    return json.loads(line)


def _end_with_input() -> None:
    while os.read(0, 4096):  # past sys.stdin, whose lock would be held as the interpreter ends
        pass
    os._exit(4)
