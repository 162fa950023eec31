"""`TiledMLP` as a Flax linen module: the parameters of the nnx one, and its call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.nn.initializers import Initializer

from shared_specs.config import Tiling
from tiled_jax.core.params import (
    Sharding,
    check_dtypes,
    check_initialisers,
    check_precision,
    chosen_bias,
    init_bias,
    init_weight,
    refuse_partitioned,
)
from tiled_jax.mlp import module as nnx_module
from tiled_jax.mlp.api import tiled_mlp
from tiled_jax.mlp.params import make_config, param_axes, param_shapes
from tiled_jax.mlp.projections import check_products


class TiledMLP(nn.Module):
    """`tiled_jax.TiledMLP` as a linen module; its fields and parameters have the same names.

    `sharding` boxes the parameters in nn.Partitioned, as nn.with_partitioning does; linen needs no mesh for it.

    Example:
        >>> mlp, x = TiledMLP(8, 12, num_shards=4), jnp.ones((2, 5, 8))
        >>> mlp.apply(mlp.init(jax.random.key(0), x), x).shape
        (2, 5, 8)
    """

    hidden_size: int
    intermediate_size: int
    activation: str | Callable[..., Any] = "silu"
    gated: bool = True
    bias: bool = False
    fused_gate_up: bool = False
    num_shards: int | None = None
    keep: float = 0.0
    tiling: Tiling | None = None
    backend: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = init_weight
    bias_init: Initializer = init_bias
    sharding: Sharding | None = None
    use_bias: bool | None = None
    precision: Any = None
    dot_general: Callable[..., Any] | None = None
    promote_dtype: Callable[..., Any] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H]."""
        config = make_config(
            self.activation, self.gated, self.fused_gate_up, self.num_shards, self.keep, self.tiling, self.backend
        )
        bias = chosen_bias("TiledMLP", self.bias, self.use_bias, False)
        kind: dict[str, Any] = {"gated": self.gated, "bias": bias, "fused_gate_up": self.fused_gate_up}
        shapes = param_shapes("TiledMLP", self.hidden_size, self.intermediate_size, **kind)
        check_dtypes("TiledMLP", self.dtype, self.param_dtype)
        check_initialisers("TiledMLP", self.kernel_init, self.bias_init)
        check_precision("TiledMLP", self.precision)
        axes = param_axes(self.sharding, fused_gate_up=self.fused_gate_up)
        params = {}
        for name, shape in shapes.items():
            init = self.kernel_init if name.startswith("w_") else self.bias_init

            def made(*given: Any, init: Any = init) -> Any:
                return refuse_partitioned("TiledMLP", init(*given))

            init = made if (names := axes(name)) is None else nn.with_partitioning(made, names)
            params[name] = self.param(name, init, shape, self.param_dtype)
        if own := {name: value for name, value in self._products().items() if value is not None}:
            return self._with_products(own, x, params)
        return tiled_mlp(**config.arguments(x, params, self.dtype))

    def _products(self) -> dict[str, Any]:
        return check_products("TiledMLP", {"dot_general": self.dot_general, "promote_dtype": self.promote_dtype})

    def _with_products(self, own: dict[str, Any], x: jax.Array, params: dict[str, jax.Array]) -> jax.Array:
        """Return what the nnx module computes of these parameters with products of its own."""
        options: dict[str, Any] = {"activation": self.activation, "tiling": self.tiling, "keep": self.keep}
        options |= {"num_shards": self.num_shards, "backend": self.backend, "dtype": self.dtype}
        kind = {"gated": self.gated, "fused_gate_up": self.fused_gate_up, "precision": self.precision}
        module = nnx_module.TiledMLP(
            1, 1, rngs=nnx.Rngs(0), use_bias=self.use_bias, bias=self.bias, **options, **kind, **own
        )
        for name, value in params.items():
            setattr(module, name, nnx.Param(value))
        return module(x)
