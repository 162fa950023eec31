"""Commands of a half in processes of their own that need not import PyTorch again: copies, as the ranks of tests/ranks.py.

What only a launch from nothing can show is for tests that use subprocess.
"""

import os
import runpy
import sys
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

from tests.ranks import CONTEXT, LOOPBACK


def command(module: str, *words: str, environment: dict[str, str] | None = None, log: Path | None = None) -> Any:
    """`python -m module words`, begun: a process of multiprocessing, whose output is in `log`."""
    return _begun(_run, [module, *words], environment or {}, log)


def torchrun(ranks: int, module: str, *words: str, log: Path) -> Any:
    """`torchrun --standalone --nproc-per-node ranks -m module words`, begun, with its own agent, store and closing report.

    The ranks' numbers are in files beside `log`: see `rank_pids`.
    """
    return _begun(_agent, [str(ranks), str(log), module, *words], LOOPBACK, log)


def rank_pids(log: Path) -> dict[int, int]:
    """The process of each rank of a run that has begun."""
    return {int(file.suffix[1:]): int(file.read_text()) for file in log.parent.glob(f"{log.name}.*")}


def _begun(target: Any, words: list[str], environment: dict[str, str], log: Path | None) -> Any:
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        arguments = (target, words, os.environ | environment, str(log or os.devnull))
        process = CONTEXT.Process(target=_in_place_of_a_shell, args=arguments)
        process.start()
    return process


def _in_place_of_a_shell(target: Any, words: list[str], environment: dict[str, str], log: str) -> None:
    os.environ |= environment
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(written, number)
    target(*words)


def _run(module: str, *words: str) -> None:
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _agent(ranks: str, log: str, module: str, *words: str) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    here = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": uuid.uuid4().hex}
    config = LaunchConfig(1, 1, int(ranks), start_method="fork", max_restarts=0, **here)
    record(elastic_launch(config, _rank))(log, module, *words)


def _rank(log: str, module: str, *words: str) -> None:
    Path(f"{log}.{os.environ['RANK']}").write_text(str(os.getpid()))
    _run(module, *words)
