"""`python -m tiled_torch <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import Command, main
from shared_specs.cli import FinetuneOptions


def _finetune(options: FinetuneOptions) -> int:
    from shared_specs.app.loop import finetune
    from tiled_torch.commands.finetune import TorchTrainer

    return finetune(TorchTrainer(), options)


COMMANDS = (
    Command(
        name="finetune",
        help="Fine-tune a causal language model on a text file at a given context length.",
        options=FinetuneOptions,
        run=_finetune,
    ),
)

if __name__ == "__main__":
    sys.exit(main("tiled_torch", COMMANDS))
