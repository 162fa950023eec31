"""The public face: names, arguments, order and defaults. A test compares both halves with this list."""

from dataclasses import dataclass
from typing import Any

from shared_specs.config import HALVES, Half, LossOptions


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()
VARIADIC: Any = "*"  # the "default" of `*args`


@dataclass(frozen=True)
class Argument:
    """One argument; `halves` names where it exists (a framework's own, like rngs or device, exists in one)."""

    name: str
    default: Any = REQUIRED
    keyword_only: bool = False
    halves: tuple[Half, ...] = HALVES


def _keyword(name: str, default: Any = REQUIRED, halves: tuple[Half, ...] = HALVES) -> Argument:
    return Argument(name, default, keyword_only=True, halves=halves)


_TORCH: tuple[Half, ...] = ("torch",)
_JAX: tuple[Half, ...] = ("jax",)
_TILING = (_keyword("num_shards", None), _keyword("keep", 0.0), _keyword("tiling", None), _keyword("backend", "auto"))
_LOSS_TILING = (_keyword("num_shards", None), _keyword("tiling", None), _keyword("backend", "auto"))
_LOSS = (_keyword("bias", None), _keyword("loss", LossOptions()), *_LOSS_TILING)
_VOCAB_PARALLEL = (
    _keyword("vocab_size", None),
    _keyword("group", None, _TORCH),  # a process group; None: all ranks
    _keyword("axis_name", REQUIRED, _JAX),  # a mesh axis of the surrounding shard_map
)

# path inside the package -> arguments in order. "Class" stands for the arguments of its constructor.
SIGNATURES: dict[str, tuple[Argument, ...]] = {
    "tiled_mlp": (
        Argument("x"),
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        _keyword("biases", None),
        _keyword("activation", "silu"),
        *_TILING,
    ),
    "tile": (
        Argument("fn"),
        _keyword("num_shards", None),
        _keyword("tiling", None),
        _keyword("rngs", None, _JAX),
    ),
    "TiledMLP": (
        Argument("hidden_size"),
        Argument("intermediate_size"),
        _keyword("activation", "silu"),
        _keyword("gated", True),
        _keyword("bias", False),
        _keyword("fused_gate_up", False),
        *_TILING,
        _keyword("device", None, _TORCH),
        _keyword("dtype", None),
        _keyword("param_dtype", REQUIRED, _JAX),  # the default is jax.numpy.float32, which this file cannot name
        _keyword("rngs", REQUIRED, _JAX),
        _keyword("sharding", None, _JAX),
    ),
    "TiledMLP.from_weights": (
        Argument("w_gate"),
        Argument("w_up"),
        Argument("w_down"),
        _keyword("biases", None),
        _keyword("activation", "silu"),
        _keyword("fused_gate_up", False),
        *_TILING,
    ),
    "tiled_linear_cross_entropy": (Argument("x"), Argument("weight"), Argument("targets"), *_LOSS),
    "tiled_loss": (
        Argument("fn"),
        Argument("x"),
        Argument("args", VARIADIC),
        _keyword("num_shards", None),
        _keyword("tiling", None),
    ),
    "TiledLinearCrossEntropy": (
        Argument("hidden_size"),
        Argument("vocab_size"),
        _keyword("bias", False),
        _keyword("loss", LossOptions()),
        *_LOSS_TILING,
        _keyword("device", None, _TORCH),
        _keyword("dtype", None),
        _keyword("param_dtype", REQUIRED, _JAX),  # jax.numpy.float32
        _keyword("rngs", REQUIRED, _JAX),
        _keyword("sharding", None, _JAX),
    ),
    "TiledLinearCrossEntropy.from_weights": (
        Argument("weight"),
        _keyword("bias", None),
        _keyword("loss", LossOptions()),
        *_LOSS_TILING,
    ),
    "vocab_parallel_cross_entropy": (
        Argument("vocab_parallel_logits"),
        Argument("target"),
        Argument("label_smoothing", 0.0),
        *_VOCAB_PARALLEL,
    ),
    "vocab_parallel_linear_cross_entropy": (
        Argument("x"),
        Argument("weight"),
        Argument("targets"),
        *_LOSS,
        *_VOCAB_PARALLEL,
    ),
    "usable_backends": (),
}

# Public names of the package root, both halves.
PUBLIC = (
    "LossOptions",
    "LossResult",
    "SpecError",
    "TiledLinearCrossEntropy",
    "TiledMLP",
    "Tiling",
    "UnsupportedError",
    "tile",
    "tiled_linear_cross_entropy",
    "tiled_loss",
    "tiled_mlp",
    "usable_backends",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
)
PUBLIC_ONLY: dict[Half, tuple[str, ...]] = {"torch": ("tile_model", "untile_model"), "jax": ("linen",)}
