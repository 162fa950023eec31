"""`python -m tiled_jax <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import Command, main
from shared_specs.cli import BenchOptions, FinetuneOptions


def _finetune(options: FinetuneOptions) -> int:
    from shared_specs.app.loop import finetune
    from tiled_jax.commands.finetune import JaxTrainer

    return finetune(JaxTrainer(), options)


def _bench(options: BenchOptions) -> int:
    from tiled_jax.commands.bench import bench

    return bench(options)


COMMANDS = (
    Command(
        name="finetune",
        help="Fine-tune a causal language model on a text file at a given context length.",
        options=FinetuneOptions,
        run=_finetune,
    ),
    Command(
        name="bench",
        help="Time one operation against its plain form and against peers, and write a record.",
        options=BenchOptions,
        run=_bench,
    ),
)

if __name__ == "__main__":
    sys.exit(main("tiled_jax", COMMANDS))
