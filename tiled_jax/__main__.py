"""`python -m tiled_jax <command>`; `--help` lists the commands."""

import sys
from typing import TYPE_CHECKING

from shared_specs.app.command import main, shared_command
from shared_specs.app.options import (
    BenchOptions,
    CheckOptions,
    DoctorOptions,
    FinetuneOptions,
    ParityOptions,
    PlanOptions,
    TuneOptions,
    VerifyOptions,
)
from shared_specs.app.plan.simulated import Simulator

if TYPE_CHECKING:
    from shared_specs.app.doctor import Machine


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

    return show_plan(options, "jax", _simulator)


def _simulator() -> Simulator:
    from tiled_jax.commands.plan.simulate import SIMULATOR

    return SIMULATOR


def _doctor(options: DoctorOptions) -> int:
    from shared_specs.app.doctor import doctor
    from shared_specs.version import own_version

    def find() -> "Machine":
        from tiled_jax.commands.doctor import machine

        return machine()

    return doctor(options, "tiled_jax", find, own_version())


def _parity(options: ParityOptions) -> int:
    from shared_specs.app.parity import parity
    from tiled_jax.commands.parity import JaxRunner

    return parity(options, "tiled_jax", JaxRunner())


def _verify(options: VerifyOptions) -> int:
    from shared_specs.app.verification.verify import verify
    from tiled_jax.commands.verify import JaxSubject

    return verify(options, "tiled_jax", JaxSubject)


def _check(options: CheckOptions) -> int:
    from shared_specs.app.verification.check import check_command
    from tiled_jax.check.api import check

    return check_command(options, "tiled_jax", check)


COMMANDS = (
    shared_command("finetune", "cli,jax", _finetune),
    shared_command("bench", "cli,jax,test,torch", _bench),  # its parity tests drive both halves
    shared_command("plan", "cli", _plan),
    shared_command("doctor", "cli", _doctor),
    shared_command("parity", "cli,jax", _parity),
    shared_command("verify", "cli,jax", _verify),
    shared_command("check", "cli,jax", _check),
    shared_command("tune", "cli,jax", _tune),
)


def run() -> int:
    """Run the process's own command line: the console script."""
    return main("tiled_jax", COMMANDS)


if __name__ == "__main__":
    sys.exit(run())
