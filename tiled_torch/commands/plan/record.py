"""`python -m tiled_torch.commands.plan.record FOLDER MODEL GPUS [TOKENS ...]`: simulations at real size, for a table."""

import sys

from shared_specs.app.plan.record import record_simulations
from tiled_torch.commands.plan.simulate import SIMULATOR

if __name__ == "__main__":
    record_simulations(SIMULATOR, "torch", ("torch", "transformers"), sys.argv[1:])
