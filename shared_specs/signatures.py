"""The public face: names, arguments, order and defaults. A test compares both halves with this list."""

from dataclasses import dataclass
from typing import Any

from shared_specs.config import HALVES, Half


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Any = _Required()


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
    "usable_backends": (),
}

# Public names of the package root, both halves.
PUBLIC = ("SpecError", "Tiling", "TiledMLP", "UnsupportedError", "tile", "tiled_mlp", "usable_backends")
PUBLIC_ONLY: dict[Half, tuple[str, ...]] = {"torch": ("tile_model", "untile_model"), "jax": ("linen",)}
