"""`python -m tiled_jax <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import main, shared_command
from shared_specs.app.options import BenchOptions, FinetuneOptions, PlanOptions, TuneOptions


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


def _plan(options: PlanOptions) -> int:
    from shared_specs.app.plan.show import show_plan

    return show_plan(options, "jax")


COMMANDS = (
    shared_command("finetune", "cli,jax", _finetune),
    shared_command("bench", "cli,jax,test,torch", _bench),  # its parity tests drive both halves
    shared_command("plan", "cli", _plan),
    shared_command("tune", "cli,jax", _tune),
)

if __name__ == "__main__":
    sys.exit(main("tiled_jax", COMMANDS))
