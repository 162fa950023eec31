"""Several gloo ranks on one machine: start them once, send them functions by name, collect what each returns.

    with Ranks() as ranks:
        first, second = ranks.run("tests.mlp.ranks_torch_engines:ddp", checkpointed=True)

A function takes `rank`, `world` and the keyword arguments (JSON), runs inside its own process group, and returns JSON.
An error on any rank fails the call with every rank's traceback. A call that takes longer than HANG_SECONDS is reported
as a hang, with the stack of each rank. After either, fresh ranks serve the next call, so that one failure stays one.
Ranks that could not even meet (a stalled machine; nothing of the function has run yet), or whose sockets gloo could not
connect for a group of their own, are replaced once and asked again.
"""

import faulthandler
import gc
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
LOOPBACK = {} if sys.platform != "linux" else {"GLOO_SOCKET_IFNAME": "lo"}  # the host's own name need not resolve
GLOO_SECONDS = 60  # a rank that waits longer for another one raises
HANG_SECONDS = 120
START_SECONDS = 120
UNCONNECTED = "connectFullMesh failed"  # what gloo says where the sockets of a new group could not be made


class RankError(AssertionError):
    """What went wrong on the ranks, in the words of each."""


class Ranks:
    """`world` worker processes, started by the first call."""

    def __init__(self, world: int = 2, hang_seconds: float = HANG_SECONDS) -> None:
        self.world, self.hang_seconds, self.calls = world, hang_seconds, 0
        self.workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, function: str, **arguments: Any) -> list[Any]:
        """What `function` ("module:name") returns on every rank, in rank order."""
        try:
            return self._answers(function, arguments)
        except RankError as error:
            if UNCONNECTED not in str(error):
                raise
            print(f"A group's ranks could not connect in {function}; asking fresh ones. {error}", file=sys.stderr)
        return self._answers(function, arguments)

    def _answers(self, function: str, arguments: dict[str, Any]) -> list[Any]:
        answers = self._ask(function, arguments)
        if any(answer.get("met") is False for answer in answers):
            print(f"The ranks could not meet for {function}; asking fresh ones. {answers}", file=sys.stderr)
            self.end()
            answers = self._ask(function, arguments)
        errors = [f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        if errors:
            self.end()
            raise RankError(f"{function} failed.\n" + "\n".join(errors))
        return [answer["result"] for answer in answers]

    def _ask(self, function: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if not self.workers:
            self._start()
        self.calls += 1
        for worker in self.workers:
            worker.send({"call": self.calls, "function": function, "arguments": arguments})
        deadline = time.monotonic() + self.hang_seconds
        answers = [worker.receive(deadline) for worker in self.workers]
        if any(answer is None for answer in answers):
            stacks = "\n".join(f"rank {rank}:\n{worker.stack()}" for rank, worker in enumerate(self.workers))
            self.end()
            raise RankError(f"{function} did not return within {self.hang_seconds} s.\n{stacks}")
        return [answer for answer in answers if answer is not None]

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        logs = [Path(self.folder.name) / f"rank{rank}.log" for rank in range(self.world)]
        self.workers = [
            _Worker(rank, self.world, self.hang_seconds, self.store.port, log) for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + START_SECONDS
        ready = [worker.receive(deadline) for worker in self.workers]
        if any(answer is None for answer in ready):
            stacks = "\n".join(worker.stack() for worker in self.workers)
            self.end()
            raise RankError(f"the ranks did not start within {START_SECONDS} s.\n{stacks}")

    def end(self) -> None:
        """Ends the workers; a later call starts new ones."""
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.close()
        if self.workers:
            self.folder.cleanup()
            del self.store
        self.workers = []


class _Worker:
    def __init__(self, rank: int, world: int, hang_seconds: float, port: int, log: Path) -> None:
        self.log = log.open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", *map(str, (rank, world, hang_seconds, port))],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", **LOOPBACK},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")  # the process has ended

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """The next answer; None after the deadline."""
        try:
            line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None
        if not line:
            return {"error": f"the process ended.\n{self.stack()}"}
        return json.loads(line)

    def stack(self) -> str:
        """The end of the worker's log, where faulthandler writes the stack of a rank that hangs."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read()[-4000:]

    def close(self) -> None:
        self.reader.join(timeout=5)
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()


def serve(rank: int, world: int, hang_seconds: float, port: int) -> None:
    """A worker's life: answers calls until its input ends. Its groups meet at the store on `port`."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a function prints goes to the log
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    warnings.simplefilter("error")
    print(json.dumps({"error": None, "result": "ready"}), file=answers, flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        faulthandler.dump_traceback_later(hang_seconds * 0.8)
        answer = _answer(message, rank, world, store)
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=answers, flush=True)


def _answer(message: dict[str, Any], rank: int, world: int, store: Any) -> dict[str, Any]:
    import torch.distributed as dist

    gc.freeze()  # what is there already need not be searched for garbage again
    met = False
    try:
        group = dist.PrefixStore(f"call{message['call']}", store)
        timeout = timedelta(seconds=GLOO_SECONDS)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=timeout)
        met = True
        try:
            module, name = message["function"].split(":")
            function = getattr(importlib.import_module(module), name)
            result = function(rank=rank, world=world, **message["arguments"])
            return {"met": met, "error": None, "result": result}
        finally:
            dist.destroy_process_group()
            gc.collect()  # the group's sockets and threads go with the model that held on to it
    except Exception:
        return {"met": met, "error": traceback.format_exc(), "result": None}


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
