"""`python -m tests.app.torch_failing_finetune finetune ...`: the PyTorch command whose process 1 fails in its second step."""

import sys

import torch
import torch.distributed as dist

from shared_specs.app.command import Command, main
from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.loop import finetune
from shared_specs.app.options import FinetuneOptions
from tiled_torch.commands.finetune.trainer import TorchTrainer


class Failing(TorchTrainer):
    """Fails with a collective under way that the others do not join."""

    steps = 0

    def step(self, batch: Batch) -> float:
        self.steps += 1
        if self.steps == 2 and self._team.rank == 1:
            dist.all_reduce(torch.ones(3), async_op=True)
            raise KeyError("the fault of process 1 alone")
        return super().step(batch)


if __name__ == "__main__":
    command = Command(
        name="finetune",
        help="Fine-tune.",
        options=FinetuneOptions,
        extras="cli",
        run=lambda options: finetune(Failing(), options),
    )
    sys.exit(main("tiled_torch", [command]))
