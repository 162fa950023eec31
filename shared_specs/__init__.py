"""The specification that both halves obey: shard math, oracle, tolerances, cases and costs, as data and NumPy.

Needs numpy and ml_dtypes only; importing it loads neither torch nor jax. Start with `shared_specs/README.md`.
"""

from shared_specs.config import (
    ACTIVATIONS,
    Activation,
    Checkpointing,
    Compile,
    DataParallel,
    LossOptions,
    LossResult,
    ParallelConfig,
    ParallelLinearOptions,
    TensorParallel,
    Tiling,
)
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.shards import ShardPlan

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Checkpointing",
    "Compile",
    "DataParallel",
    "LossOptions",
    "LossResult",
    "ParallelConfig",
    "ParallelLinearOptions",
    "ShardPlan",
    "SpecError",
    "TensorParallel",
    "Tiling",
    "UnsupportedError",
]


def __getattr__(name: str) -> str:
    """Return the version of the project, looked up when it is asked for."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shared_specs.version import package_version

    return package_version()
