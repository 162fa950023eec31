"""`python -m tiled_jax <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import Command, main
from shared_specs.cli import FinetuneOptions


def _finetune(options: FinetuneOptions) -> int:
    from shared_specs.app.loop import finetune
    from tiled_jax.commands.finetune import JaxTrainer

    return finetune(JaxTrainer(), options)


COMMANDS = (
    Command(
        name="finetune",
        help="Fine-tune a causal language model on a text file at a given context length.",
        options=FinetuneOptions,
        run=_finetune,
    ),
)

if __name__ == "__main__":
    sys.exit(main("tiled_jax", COMMANDS))
