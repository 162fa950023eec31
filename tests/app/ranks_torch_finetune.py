"""What the ranks run of `finetune`: whole runs, in processes that have their imports behind them. See tests/ranks.py."""

import io
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor

from shared_specs.app.finetune import loop
from shared_specs.app.finetune.loop import finetune
from shared_specs.app.finetune.processes import USER_ERRORS
from shared_specs.app.options import FinetuneOptions
from tests.fake_trainer import empty_picture
from tests.loading import memory_of_loading
from tiled_torch.commands.finetune.trainer import TorchTrainer


def runs(rank: int, world: int, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each run, one after another, as in the processes of torchrun: the exit code, or the error, and what was shown."""
    store, init = dist.distributed_c10d._get_default_store(), dist.init_process_group
    dist.destroy_process_group()  # the one of this call: the command makes its own
    found = []
    for number, given in enumerate(options):
        met = {"store": dist.PrefixStore(f"run{number}", store), "rank": rank, "world_size": world}
        with mock.patch.object(dist, "init_process_group", partial(init, **met)), warnings.catch_warnings():
            warnings.simplefilter("default")  # as the command has them
            found.append(_run(FinetuneOptions(**given), world))
    return found


def _run(options: FinetuneOptions, world: int) -> dict[str, Any]:
    shown = io.StringIO()
    pictures = mock.patch.object(loop, "plot_runs", empty_picture)
    with pictures, mock.patch.dict("os.environ", {"WORLD_SIZE": str(world)}):
        try:
            code = finetune(TorchTrainer(), options, Console(file=shown, width=200))
        except USER_ERRORS as error:
            return {"error": [type(error).__name__, str(error)], "shown": shown.getvalue()}
    return {"code": code, "shown": shown.getvalue()}


def loading(rank: int, world: int, options: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Of each run, one after another, what loading its weights takes of this process's memory: see tests/loading.py."""
    found = []
    for given in options:
        trainer = TorchTrainer()
        trainer._device, trainer._team = torch.device("cpu"), SimpleNamespace(count=world, rank=rank)  # type: ignore[assignment]
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            measured = memory_of_loading(trainer, FinetuneOptions(**given))
        parts = (p.to_local() if isinstance(p, DTensor) else p for p in trainer._parameters.values())
        found.append(measured | {"kept": sum(part.nbytes for part in parts)})
    return found
