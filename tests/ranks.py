"""Several gloo ranks on one machine: start them once, send them functions by name, collect what each returns.

    with Ranks() as ranks:
        first, second = ranks.run("tests.mlp.ranks_torch_engines:ddp", checkpointed=True)

A function takes `rank`, `world` and the keyword arguments (JSON), runs inside its own process group, and returns JSON.
An error on any rank fails the call with every rank's traceback. A call that takes longer than HANG_SECONDS is reported
as a hang, with the stack of each rank. After either, fresh ranks serve the next call, so that one failure stays one.
Nothing is asked again here: a test that uses ranks has a second try, which the closing lines name (tests/second_tries.py).

The ranks are copies of one process that has imported the libraries once (on Linux), so that a rank costs milliseconds and not
the seconds of its imports. Unlike the processes of a real launch they have one seed for the hashes of strings: an order that
depends on it is for the tests of the command under torchrun to find.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest import mock

ROOT = Path(__file__).parents[1]
LOOPBACK = {} if sys.platform != "linux" else {"GLOO_SOCKET_IFNAME": "lo"}  # the host's own name need not resolve
GLOO_SECONDS = 60  # a rank that waits longer for another one raises
HANG_SECONDS = 120
START_SECONDS = 120
# PyTorch keeps some groups for ever, and each of their threads wakes a hundred times a second: after all tests there were four
# hundred, a third of a core. A rank that has more of them than these is replaced.
MOST_GROUPS = 12

CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
# None of our own, which may be those of another folder there; what is not installed is left out.
multiprocessing.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama"]
)


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
        answers = self._ask(function, arguments)
        errors = [f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        if errors or any(answer.get("groups", 0) > MOST_GROUPS for answer in answers):
            self.end()
        if errors:
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
            worker.end()
        if self.workers:
            self.folder.cleanup()
            del self.store
        self.workers = []


class _Worker:
    def __init__(self, rank: int, world: int, hang_seconds: float, port: int, log: Path) -> None:
        self.log = log
        self.pipe, theirs = CONTEXT.Pipe()
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **LOOPBACK}):
            arguments = (rank, world, hang_seconds, port, str(log), dict(os.environ), theirs)
            self.process = CONTEXT.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
        theirs.close()  # so that the pipe ends with the process

    def send(self, message: dict[str, Any]) -> None:
        self.pipe.send_bytes(json.dumps(message).encode())

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """The next answer; None after the deadline."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return None
        try:
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return {"error": f"the process ended.\n{self.stack()}"}

    def stack(self) -> str:
        """The end of the worker's log, where faulthandler writes the stack of a rank that hangs."""
        return self.log.read_text()[-4000:] if self.log.exists() else ""

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def serve(
    rank: int, world: int, hang_seconds: float, port: int, log: str, environment: dict[str, str], pipe: Connection
) -> None:
    """A worker's life: answers calls until its pipe ends. Its groups meet at the store on `port`."""
    os.environ |= environment
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)  # whatever a function prints goes to the log
    os.dup2(written, 2)
    faulthandler.enable(file=2)
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_SECONDS))
    warnings.simplefilter("error")
    _send(pipe, {"error": None, "result": "ready"})
    while True:
        try:
            message = json.loads(pipe.recv_bytes())
        except EOFError:  # whoever asked is gone
            return
        faulthandler.dump_traceback_later(hang_seconds * 0.8, file=2)
        answer = _answer(message, rank, world, store)
        faulthandler.cancel_dump_traceback_later()
        _send(pipe, answer | {"groups": _groups()})


def _groups() -> int:
    """How many of gloo's groups have a thread in this process still (on Linux)."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found += path.read_text().startswith("gloo")
    return found


def _send(pipe: Connection, answer: dict[str, Any]) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


def _forget_layouts() -> None:
    """Clear what DTensor remembers of operations: a result on an equal mesh would be on that of groups that are gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    import torch
    from torch.distributed.tensor import DTensor

    torch._C._clear_DTensor_sharding_propagator_cache()
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()


def _answer(message: dict[str, Any], rank: int, world: int, store: Any) -> dict[str, Any]:
    import torch.distributed as dist

    gc.freeze()  # what is there already need not be searched for garbage again
    gc.set_threshold(100_000, 50, 100)  # as in conftest
    try:
        group = dist.PrefixStore(f"call{message['call']}", store)
        timeout = timedelta(seconds=GLOO_SECONDS)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=timeout)
        # A rank with nothing to do would close its sockets while others still connect to it.
        if group.add("met", 1) == world:
            group.set("all have met", "")
        group.wait(["all have met"], timeout)
        try:
            module, name = message["function"].split(":")
            function = getattr(importlib.import_module(module), name)
            result = function(rank=rank, world=world, **message["arguments"])
            return {"error": None, "result": result}
        finally:
            if dist.is_initialized():  # a function may have ended it
                dist.destroy_process_group()
            _forget_layouts()
            gc.collect()  # the group's sockets and threads go with the model that held on to it
    except Exception:
        return {"error": traceback.format_exc(), "result": None}
