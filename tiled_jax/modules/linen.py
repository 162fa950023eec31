"""`TiledMLP` and `TiledLinearCrossEntropy` for Flax linen: the same options, names and calls as the nnx modules."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from shared_specs.config import LossOptions, Tiling
from tiled_jax.modules.loss_params import loss_param_axes, loss_param_shapes, make_loss_config
from tiled_jax.modules.params import Sharding, make_config, param_axes, param_shapes

_init_weight, _init_bias = nn.initializers.lecun_normal(), nn.initializers.zeros_init()


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
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    fused_gate_up: bool = False
    num_shards: int | None = None
    keep: float = 0.0
    tiling: Tiling | None = None
    backend: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H]."""
        config = make_config(
            self.activation, self.gated, self.fused_gate_up, self.num_shards, self.keep, self.tiling, self.backend
        )
        shapes = param_shapes(
            self.hidden_size,
            self.intermediate_size,
            gated=self.gated,
            bias=self.bias,
            fused_gate_up=self.fused_gate_up,
        )
        axes = param_axes(self.sharding, fused_gate_up=self.fused_gate_up)
        params = {}
        for name, shape in shapes.items():
            init = _init_weight if name.startswith("w_") else _init_bias
            if (names := axes(name)) is not None:
                init = nn.with_partitioning(init, names)
            params[name] = self.param(name, init, shape, self.param_dtype)
        return config.apply(x, params, self.dtype)


class TiledLinearCrossEntropy(nn.Module):
    """`tiled_jax.TiledLinearCrossEntropy` as a linen module; its fields and parameters have the same names.

    `sharding` boxes the parameters in nn.Partitioned, as nn.with_partitioning does; linen needs no mesh for it.

    Example:
        >>> head, x = TiledLinearCrossEntropy(8, 16, num_shards=4), jnp.ones((2, 5, 8))
        >>> targets = jnp.zeros((2, 5), jnp.int32)
        >>> head.apply(head.init(jax.random.key(0), x, targets), x, targets).shape
        ()
    """

    hidden_size: int
    vocab_size: int
    bias: bool = False
    loss: LossOptions = LossOptions()
    num_shards: int | None = None
    tiling: Tiling | None = None
    backend: str = "auto"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    sharding: Sharding | None = None

    @nn.compact
    def __call__(self, x: jax.Array, targets: jax.Array, *, num_valid: Any = None) -> Any:
        """[..., H] and [...] -> the loss, or a `LossResult`. `num_valid` replaces that of the options."""
        config = make_loss_config(self.loss, self.num_shards, self.tiling, self.backend)
        axes = loss_param_axes(self.sharding)
        params = {}
        for name, shape in loss_param_shapes(self.hidden_size, self.vocab_size, bias=self.bias).items():
            init = _init_weight if name == "weight" else _init_bias
            params[name] = self.param(
                name, nn.with_partitioning(init, axes[name]) if axes else init, shape, self.param_dtype
            )
        return config.apply(x, targets, params, self.dtype, num_valid=num_valid)
