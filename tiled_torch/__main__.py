"""`python -m tiled_torch <command>`; `--help` lists the commands."""

import sys

from shared_specs.app.command import main, shared_command
from shared_specs.app.options import BenchOptions, FinetuneOptions, PlanOptions, TuneOptions


def _finetune(options: FinetuneOptions) -> int:
    from shared_specs.app.finetune.loop import finetune
    from tiled_torch.commands.finetune.trainer import TorchTrainer

    return finetune(TorchTrainer(), options)


def _bench(options: BenchOptions) -> int:
    from shared_specs.app.output import check_records
    from tiled_torch.commands.bench.bench import bench

    check_records(options.out)
    return bench(options)


def _tune(options: TuneOptions) -> int:
    from tiled_torch.commands.gpu.tune import tune

    return tune(options)


def _plan(options: PlanOptions) -> int:
    from shared_specs.app.plan.show import show_plan

    return show_plan(options, "torch")


COMMANDS = (
    shared_command("finetune", "cli,hf,torch", _finetune),
    shared_command("bench", "bench,jax,test,torch", _bench),  # its parity tests drive both halves
    shared_command("plan", "cli", _plan),
    shared_command("tune", "cli,torch", _tune),
)

if __name__ == "__main__":
    sys.exit(main("tiled_torch", COMMANDS))
