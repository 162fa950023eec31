"""Options as frozen, keyword-only data. What a field means is said here once, for both halves."""

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

# The names Hugging Face configurations use for the same functions.
HF_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}

Half = Literal["torch", "jax"]
HALVES: tuple[Half, ...] = ("torch", "jax")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How T tokens are cut into shards: the long form of `num_shards` and `keep`, which it excludes.

    At most one of the first three is given; with none of them the plan chooses (`shards.plan_tokens`).

    Args:
        num_shards: at most this many shards, >= 1.
        shard_tokens: tokens per shard, >= 1.
        memory_budget: bytes the call may use above its inputs, outputs and gradients; the longest shard that
            fits is taken (`costs.shard_tokens_within`).
        keep: fraction of the shards, in [0, 1], whose gate and up are kept for backward instead of recomputed.
    """

    num_shards: int | None = None
    shard_tokens: int | None = None
    memory_budget: int | None = None
    keep: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HalfNames:
    """The words in which the two halves differ: all that `{layout}`, `{backends}` and `{package}` may become."""

    half: Half
    package: str
    backends: tuple[str, ...]
    input_dim_first: bool

    @property
    def layout(self) -> str:
        return "[in, out]" if self.input_dim_first else "[out, in]"

    def weight_shape(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Shape of a weight from `inputs` to `outputs` features in this half's layout."""
        return (inputs, outputs) if self.input_dim_first else (outputs, inputs)


TORCH = HalfNames(half="torch", package="tiled_torch", backends=("auto", "eager", "triton"), input_dim_first=False)
JAX = HalfNames(half="jax", package="tiled_jax", backends=("auto", "xla", "pallas"), input_dim_first=True)
NAMES: dict[Half, HalfNames] = {"torch": TORCH, "jax": JAX}
