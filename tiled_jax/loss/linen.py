"""`TiledLinearCrossEntropy` as a Flax linen module: the parameters of the nnx one, and its call."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from shared_specs.config import LossOptions, Tiling
from tiled_jax.core.params import (
    Sharding,
    check_dtypes,
    check_initialisers,
    check_precision,
    chosen_bias,
    init_bias,
    init_weight,
)
from tiled_jax.loss.params import loss_param_axes, loss_param_shapes, make_loss_config


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
    kernel_init: Initializer = init_weight
    bias_init: Initializer = init_bias
    sharding: Sharding | None = None
    use_bias: bool | None = None
    precision: Any = None

    @nn.compact
    def __call__(
        self, x: jax.Array, targets: jax.Array, *, num_valid: Any = None, token_weight: jax.Array | None = None
    ) -> Any:
        """[..., H], [...] and token_weight [...] -> the loss, or a `LossResult`. `num_valid` replaces that of the options."""
        config = make_loss_config(self.loss, self.num_shards, self.tiling, self.backend)
        check_dtypes("TiledLinearCrossEntropy", self.dtype, self.param_dtype)
        check_initialisers("TiledLinearCrossEntropy", self.kernel_init, self.bias_init)
        check_precision("TiledLinearCrossEntropy", self.precision)
        bias = chosen_bias("TiledLinearCrossEntropy", self.bias, self.use_bias, False)
        axes = loss_param_axes(self.sharding)
        params = {}
        for name, shape in loss_param_shapes(self.hidden_size, self.vocab_size, bias=bias).items():
            init = self.kernel_init if name == "weight" else self.bias_init
            params[name] = self.param(
                name, nn.with_partitioning(init, axes[name]) if axes else init, shape, self.param_dtype
            )
        return config.apply(x, targets, params, self.dtype, num_valid=num_valid, token_weight=token_weight)
