"""What the nnx and the linen module share: shapes and names of parameters, and the call they make with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.config import JAX, Tiling
from shared_specs.errors import fail
from shared_specs.mlp import checks as mlp_checks
from tiled_jax import backends
from tiled_jax.core.activation_functions import activation_name
from tiled_jax.core.params import as_computed, check_sharding, held


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """The checked options of one module."""

    activation: str
    gated: bool
    fused_gate_up: bool
    tiling: Tiling
    backend: str

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the module's weights."""
        ups = ("w_gate_up",) if self.fused_gate_up else ("w_gate", "w_up") if self.gated else ("w_up",)
        return (*ups, "w_down")

    def held(self, function: str, module: Any) -> dict[str, jax.Array]:
        """Return the weights and biases that a module has now, by name: see `core.params.held`."""
        biases = (f"b_{name[2:]}" for name in self.weights)
        return held(function, module, self.weights, tuple(biases))

    def arguments(self, x: jax.Array, params: Mapping[str, jax.Array], dtype: Any) -> dict[str, Any]:
        """Return the arguments of `tiled_mlp`: x and the parameters (by name) `as_computed`."""
        x, params = as_computed(x, params, dtype)
        if self.fused_gate_up:
            params = _split_gate_up(params)
        return self.operands(x, params)

    def operands(self, x: jax.Array, params: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Return the arguments of `tiled_mlp` with x and the parameters (by name) as they are."""
        return {
            "x": x,
            "w_gate": params.get("w_gate"),
            "w_up": params["w_up"],
            "w_down": params["w_down"],
            "biases": {name[2:]: bias for name, bias in params.items() if name.startswith("b_")},
            "activation": self.activation,
            "tiling": self.tiling,
            "backend": self.backend,
        }


def make_config(
    activation: Any,
    gated: bool,
    fused_gate_up: bool,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    backend: str,
    *,
    function: str = "TiledMLP",
) -> MLPConfig:
    """Return the options of a module, checked when it is made and not when it is first called. function: the module, in
    messages.
    """
    activation = activation_name(function, activation)
    options = (activation, gated, fused_gate_up, num_shards, keep, tiling, backend)
    resolved = mlp_checks.module_tiling(function, *options, names=JAX, usable=backends.usable_backends())
    return MLPConfig(activation=activation, gated=gated, fused_gate_up=fused_gate_up, tiling=resolved, backend=backend)


param_shapes = partial(mlp_checks.module_shapes, names=JAX)  # weights [in, out]


def param_axes(sharding: Any, *, fused_gate_up: bool) -> Callable[[str], tuple[str | None, ...] | None]:
    """Name of a parameter -> mesh axes of its dims, or None without sharding.

    Gate and up are split by column and down by row, so that tensor-parallel ranks meet only in y.
    """
    if sharding is None:
        return lambda name: None
    check_sharding("TiledMLP", sharding, "intermediate")
    if fused_gate_up:
        advice = "A slice of [H, 2I] holds columns of gate or of up, never a rank's share of both."
        fail("TiledMLP", "sharding", "None with fused_gate_up", sharding, advice=advice)
    hidden, intermediate = sharding

    def axes(name: str) -> tuple[str | None, ...]:
        of_weight = (intermediate, hidden) if name.endswith("down") else (hidden, intermediate)
        return of_weight if name.startswith("w_") else of_weight[1:]

    return axes


def _split_gate_up(params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """w_gate_up [H, 2I] and b_gate_up [2I], gate first, as the two halves."""
    out = dict(params)
    for prefix in ("w", "b"):
        if (both := out.pop(f"{prefix}_gate_up", None)) is not None:
            out[f"{prefix}_gate"], out[f"{prefix}_up"] = jnp.split(both, 2, axis=-1)
    return out
