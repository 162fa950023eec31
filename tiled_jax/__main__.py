"""`python -m tiled_jax <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import Command, main
from shared_specs.app.options import BenchOptions, FinetuneOptions, TuneOptions


def _finetune(options: FinetuneOptions) -> int:
    from shared_specs.app.finetune.loop import finetune
    from tiled_jax.commands.finetune.trainer import JaxTrainer

    return finetune(JaxTrainer(), options)


def _bench(options: BenchOptions) -> int:
    from shared_specs.app.output import check_records
    from tiled_jax.commands.bench.bench import bench

    check_records(options.out)
    return bench(options)


def _tune(options: TuneOptions) -> int:
    from tiled_jax.commands.gpu.tune import tune

    return tune(options)


COMMANDS = (
    Command(
        name="finetune",
        help="Fine-tune a causal language model on a text file at a given context length.",
        options=FinetuneOptions,
        extras="cli,jax",
        run=_finetune,
    ),
    Command(
        name="bench",
        help="Measure one operation against its plain form and against peers, and write a record.",
        options=BenchOptions,
        extras="cli,jax,test,torch",  # its parity tests drive both halves
        run=_bench,
    ),
    Command(
        name="tune",
        help="Measure the GPU kernels' block sizes for one model's widths and write them to the table.",
        options=TuneOptions,
        extras="cli,jax",
        run=_tune,
    ),
)

if __name__ == "__main__":
    sys.exit(main("tiled_jax", COMMANDS))
