"""Runs jobs in worker processes, each within its time, and makes rows of what they tell.

A worker is a fresh process that runs one job (`worker.py`). One that hangs is killed, one that has lost its device or
dies is replaced, and the variant it was at becomes a row with the reason; the rest of the job goes on in the next process.
The next job's worker is started while a job runs, so that its imports are done when its turn comes.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shared_specs.app.bench.bench import summarise
from shared_specs.app.gpu.worker import EVENTS
from shared_specs.app.options import InputError

ROOT = Path(__file__).parents[3]
# A killed process gives the device's memory back within this.
GRACE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one worker: groups of variants, each group interleaved and with its reference first.

    Attributes:
        name: of the record. op: what the groups are of. groups: in their order.
        seconds: all it may take. first_seconds: what drawing data or a variant's first run may take, compilation
            included. run_seconds: what a timed run may take.
        repeats: turns of each group. facts: the rest that a worker has to know, such as sizes; part of the record.
    """

    name: str
    op: str
    groups: tuple[str, ...]
    seconds: float
    repeats: int
    dtype: str = "bfloat16"
    first_seconds: float = 60.0
    run_seconds: float = 20.0
    facts: Mapping[str, Any] = field(default_factory=dict)


Rows = list[dict[str, Any]]


class Worker:
    """A process that waits for a job and then tells events."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        readable, writable = os.pipe()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env, EVENTS: str(writable)},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                pass_fds=(writable,),
                process_group=0,
            )
        os.close(writable)
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, args=(readable,), daemon=True).start()

    def _read(self, readable: int) -> None:
        with os.fdopen(readable, encoding="utf-8") as lines:
            for line in lines:
                with contextlib.suppress(json.JSONDecodeError):  # cut off as it died
                    self.events.put(json.loads(line))
        self.events.put(None)

    def send(self, job: Mapping[str, Any]) -> None:
        """Send a job to the worker. A worker that has ended by now is noticed by its events."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """Return the next event, None where there are no more; queue.Empty after so many seconds."""
        return self.events.get(timeout=max(0.0, seconds))

    def kill(self) -> int:
        """End the worker with all that it has started, wait, and return its exit status."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        return self.process.returncode or 0

    def status(self) -> str:
        """Return how it ended, in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        code = self.kill()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


class Found:
    """The results of one job's variants so far, from the events of all its workers."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.turns: dict[str, list[dict[str, float]]] = {}
        self.left_out: dict[tuple[str, str], dict[str, Any]] = {}
        self.done: list[str] = []
        self.group: str | None = None
        self.variant: str | None = None
        self.device: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        kind, group = event["event"], event.get("group")
        if kind == "device":
            self.device = dict(event["device"])
        elif kind == "drawing":
            self.group, self.variant = group, None
            self.turns[str(group)] = []
        elif kind == "group":
            for name in event["variants"]:
                self.rows[str(group), name] = {}
        elif kind in ("begin", "timing"):
            self.variant = event["variant"]
        elif kind == "ready":
            self.rows[str(group), event["variant"]] = event["facts"]
            self.variant = None
        elif kind == "turn":
            self.turns[str(group)].append(event["seconds"])
            self.variant = None
        elif kind == "left_out":
            self._leave_out((str(group), event["variant"]), event["reason"], event)
            self.variant = None
        elif kind == "group_left_out":
            self.give_up(str(group), event["reason"])
        elif kind == "group_done":
            self.done.append(str(group))
            self.group = None

    def _leave_out(self, key: tuple[str, str], reason: str, event: Mapping[str, Any] | None = None) -> None:
        told = event or {}
        facts = {name: value for name, value in told.get("facts", {}).items() if name in ("compared_with", "errors")}
        self.left_out[key] = {"left_out": reason, **facts, **({"wrong": True} if told.get("wrong") else {})}

    def fail(self, reason: str, *, whose: str = "variant") -> None:
        """Record that the worker is gone, by its variant or (whose="job") with its time.

        A group that has a whole turn is done and keeps it, another one begins again without this variant.
        """
        group, variant = self.group, self.variant
        self.group = self.variant = None
        if group is None or group in self.done:
            return
        timed = bool(self.turns[group])
        if variant is not None and not (timed and whose == "job"):
            self._leave_out((group, variant), reason)
        elif variant is None:
            self.give_up(group, reason)
        if timed and group not in self.done:
            self.done.append(group)

    def give_up(self, group: str, reason: str) -> None:
        """Leave out every variant of the group that has no time; a line of its own where none was named yet."""
        keys = [key for key in self.rows if key[0] == group] or [(group, "all")]
        for key in keys:
            if not self._times(key) and key not in self.left_out:
                self._leave_out(key, reason)
        if group not in self.done:
            self.done.append(group)

    def pending(self) -> list[str]:
        return [group for group in self.job.groups if group not in self.done]

    def failed(self) -> list[tuple[str, str]]:
        """Return the variants that the next worker must not try again: a group that begins again leaves these out."""
        return list(self.left_out)

    def _times(self, key: tuple[str, str]) -> list[float]:
        group, name = key
        return [turn[name] for turn in self.turns.get(group, []) if name in turn]

    def lines(self) -> Rows:
        """Return one row a variant, in the groups' order: times and rates, or why there are none."""
        made: Rows = []
        for group in self.job.groups:
            keys = [key for key in self.rows if key[0] == group]
            keys += [key for key in self.left_out if key[0] == group and key not in keys]
            whole = {name: self._times((group, name)) for _, name in keys if (group, name) not in self.left_out}
            whole = {name: times for name, times in whole.items() if times}
            reference = next(iter(whole), "")
            summary = summarise(whole, reference) if whole else {}
            for key in keys:
                row = {"group": group, "variant": key[1]}
                if key in self.left_out:
                    made.append({**row, **self.left_out[key]})
                elif key[1] in summary:
                    facts = self.rows[key]
                    turns = {"reference": reference, "turns": len(whole[key[1]]), **facts}
                    made.append({**row, **turns, **rates(facts, summary[key[1]]["median_seconds"]), **summary[key[1]]})
                else:
                    made.append({**row, "left_out": "no time was left for it"})
        return made


def rates(facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """TFLOP/s and GB/s of a row, and its share of what the model of the time says."""
    flop, traffic, model = (facts.get(name) for name in ("flop", "traffic", "model_seconds"))
    return {
        "tflops": flop / seconds / 1e12 if flop else None,
        "gbytes_per_second": traffic / seconds / 1e9 if traffic else None,
        "of_the_model": model / seconds if model else None,
    }


def run_jobs(
    jobs: Sequence[Job],
    command: Sequence[str],
    seconds: float,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    spare: bool = True,
    imports: float = 120.0,
) -> Generator[tuple[Job, Rows, dict[str, Any]], None, None]:
    """Yield every job with its rows and its device as it is done; after `seconds` the rest are not begun.

    env: of the workers, beside this process's own. spare: a worker more is started while one runs. imports: seconds that a
    worker may take to begin. Raises InputError where a worker says that it cannot measure here at all.
    """
    end = time.monotonic() + seconds
    waiting: list[Worker] = []

    def worker() -> Worker:
        return waiting.pop() if waiting else Worker(command, log, env or {})

    current: Worker | None = None
    try:
        for number, job in enumerate(jobs):
            found, left = Found(job), job.seconds
            while found.pending() and left > 0 and time.monotonic() < end:
                current = worker()
                if spare and not waiting and (number + 1 < len(jobs) or len(found.pending()) > 1):
                    waiting.append(Worker(command, log, env or {}))
                before = len(found.done) + len(found.left_out)
                left -= _follow(current, found, left, end, imports)
                current.kill()
                # It died before it came to any group.
                if len(found.done) + len(found.left_out) == before and time.monotonic() < end:
                    found.give_up(found.pending()[0], "the process did not come to it")
            for group in found.pending():
                found.give_up(group, "no time was left for it")
            yield job, found.lines(), found.device
    finally:
        for one in [*waiting, *([] if current is None else [current])]:
            one.kill()


def _follow(worker: Worker, found: Found, left: float, end: float, imports: float) -> float:
    """Take the events of one worker, until it is done, dies, hangs, or the job's time is over.

    Returns the seconds of the job's time that it took: from the first event on, when its imports are done.
    """
    job = found.job
    # The worker stops by itself a little before it is stopped, so that what it has is told.
    seconds = 0.92 * max(0.0, min(left, end - time.monotonic()))
    worker.send({**asdict(job), "groups": found.pending(), "failed": found.failed(), "seconds": seconds})
    limit, until, begun = imports, end, None
    while True:
        try:
            event = worker.next(min(limit, until - time.monotonic()))
        except queue.Empty:
            if time.monotonic() >= until:
                found.fail("the time of its job was over", whose="job")
            else:
                found.fail(f"it took more than its {limit:g} s")
            break
        if begun is None:
            begun = time.monotonic()
            until = min(end, begun + left)
        if event is None:
            found.fail(f"its process ended with {worker.status()}")
            break
        found.take(event)
        kind = event["event"]
        if kind == "refused":
            raise InputError(event["reason"])
        if kind == "unhealthy":
            _after_unhealthy(found)
        if kind in ("done", "unhealthy"):
            break
        limit = job.run_seconds if kind == "timing" else job.first_seconds
    return 0.0 if begun is None else time.monotonic() - begun


def _after_unhealthy(found: Found) -> None:
    """Its variant has its row already; the group goes on in another process where it has no whole turn."""
    group = found.group
    if group is not None and found.turns[group]:
        found.done.append(group)
    found.group = found.variant = None
