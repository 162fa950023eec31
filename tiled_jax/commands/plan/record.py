"""`python -m tiled_jax.commands.plan.record FOLDER MODEL GPUS [TOKENS ...]`: simulations at real size, for a table."""

import sys

from shared_specs.app.plan.record import record_simulations
from tiled_jax.commands.plan.simulate import SIMULATOR

if __name__ == "__main__":
    record_simulations(SIMULATOR, "jax", ("jax", "jaxlib", "flax"), sys.argv[1:])
