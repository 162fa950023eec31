"""`python -m tiled_torch <command>`; `--help` lists the commands."""

import sys
from typing import TYPE_CHECKING, Any

from shared_specs.app.command import main, shared_command
from shared_specs.app.options import (
    BenchOptions,
    CheckOptions,
    DoctorOptions,
    FinetuneOptions,
    InputError,
    ParityOptions,
    PlanOptions,
    TuneOptions,
    VerifyOptions,
)
from shared_specs.app.plan.simulated import Simulator

if TYPE_CHECKING:
    from shared_specs.app.doctor import Machine
    from shared_specs.app.plan.decoder import Decoder


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

    return show_plan(options, "torch", _simulator, _other_family)


def _other_family(config: dict[str, Any], what: str) -> "Decoder":
    try:
        from tiled_torch.commands.plan.any_config import decoder_of_config
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tiled_torch"):
            raise
        hint = f"{error.name} is not installed. Install it with pip install 'tiled-mlp[torch]'."
        raise InputError(f"{what} has model_type {config.get('model_type')}, whose layers are read; {hint}") from error
    return decoder_of_config(config, what)


def _simulator() -> Simulator:
    from tiled_torch.commands.plan.simulate import SIMULATOR

    return SIMULATOR


def _doctor(options: DoctorOptions) -> int:
    from shared_specs.app.doctor import doctor
    from shared_specs.version import own_version

    def find() -> "Machine":
        from tiled_torch.commands.doctor import machine

        return machine()

    return doctor(options, "tiled_torch", find, own_version())


def _parity(options: ParityOptions) -> int:
    from shared_specs.app.parity import parity
    from tiled_torch.commands.parity import TorchRunner

    return parity(options, "tiled_torch", TorchRunner())


def _verify(options: VerifyOptions) -> int:
    from shared_specs.app.verification.verify import verify
    from tiled_torch.commands.verify import TorchSubject

    return verify(options, "tiled_torch", TorchSubject)


def _check(options: CheckOptions) -> int:
    from shared_specs.app.verification.check import check_command
    from tiled_torch.check.api import check

    return check_command(options, "tiled_torch", check)


COMMANDS = (
    shared_command("finetune", "cli,torch", _finetune),
    shared_command("bench", "bench,jax,test,torch", _bench),  # its parity tests drive both halves
    shared_command("plan", "cli", _plan),
    shared_command("doctor", "cli", _doctor),
    shared_command("parity", "cli,torch", _parity),
    shared_command("verify", "cli,torch", _verify),
    shared_command("check", "cli,torch", _check),
    shared_command("tune", "cli,torch", _tune),
)


def run() -> int:
    """Run the process's own command line: the console script."""
    return main("tiled_torch", COMMANDS)


if __name__ == "__main__":
    sys.exit(run())
