"""What the nnx and the linen module of a mixture of experts share: shapes and options, and the call they make with them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shared_specs.config import JAX, Tiling
from shared_specs.moe import checks as moe_checks
from tiled_jax.core.activation_functions import activation_name
from tiled_jax.core.params import as_computed, held, refuse_partitioned
from tiled_jax.moe.api import EXPERT_BACKENDS, tiled_moe
from tiled_jax.moe.loops import MOE_WEIGHTS

moe_shapes = partial(moe_checks.moe_shapes, names=JAX)  # weights [in, out]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The checked options of one module."""

    top_k: int
    scoring: str
    normalize_top_k: bool
    activation: str
    return_router_logits: bool
    tiling: Tiling
    backend: str

    def call(self, x: jax.Array, params: Mapping[str, jax.Array], dtype: Any) -> Any:
        """Return `tiled_moe` of x and the parameters (by name) `as_computed`."""
        x, params = as_computed(x, params, dtype)
        return tiled_moe(x, *(params[name] for name in MOE_WEIGHTS), **vars(self))

    def of_module(self, function: str, module: Any, x: jax.Array) -> Any:
        """Return the call of a module that has the parameters as attributes, and a dtype."""
        return self.call(x, held(function, module, MOE_WEIGHTS), module.dtype)


def make_moe_config(
    experts: int,
    top_k: int,
    scoring: str,
    normalize_top_k: bool,
    activation: Any,
    return_router_logits: bool,
    num_shards: int | None,
    tiling: Tiling | None,
    backend: str,
    *,
    function: str = "TiledMoE",
) -> MoEConfig:
    """Return the options of a module, checked when it is made and not when it is first called. function: in messages."""
    name = activation_name(function, activation)
    flags = {"normalize_top_k": normalize_top_k, "return_router_logits": return_router_logits}
    moe_checks.check_module_options(function, experts=experts, top_k=top_k, scoring=scoring, activation=name, **flags)
    resolved = moe_checks.moe_tiling(function, num_shards, tiling, backend, names=JAX, usable=EXPERT_BACKENDS)
    return MoEConfig(top_k=int(top_k), scoring=scoring, activation=name, tiling=resolved, backend=backend, **flags)


def drawn(function: str, kernel_init: Callable[..., Any], key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return a parameter, each matrix of it drawn by itself: an initialiser would take the experts for inputs."""

    def one(key: jax.Array) -> Any:
        return refuse_partitioned(function, kernel_init(key, shape[-2:], dtype))

    return one(key) if len(shape) == 2 else jax.vmap(one)(jax.random.split(key, shape[0]))
