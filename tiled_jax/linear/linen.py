"""The modules for Flax linen: the same options, names and calls as the nnx modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.nn.initializers import Initializer

from tiled_jax.core.params import Sharding, check_precision, chosen_bias, init_bias, init_weight
from tiled_jax.linear.params import LinearConfig, Outputs, initialisers, make_linear_config, stacked_init


class TiledLinear(nn.Module):
    """`tiled_jax.TiledLinear` as a linen module; its fields and parameters have the same names. linear_cls: None or nn.Dense.

    The values of a plain layer come in and out by `tile_params` and `untile_params`, since linen keeps none itself: there
    is no init_linear.
    `sharding` boxes the weight in nn.Partitioned, as nn.with_partitioning does; linen needs no mesh for it. A call whose
    tiles the compiler gathers does (`jax.set_mesh`); inside `jax.shard_map` linen itself refuses a device's part.

    Example:
        >>> layer, x = TiledLinear(8, 6, in_splits=2, out_splits=4), jnp.ones((2, 5, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (2, 5, 6)
    """

    in_features: int
    out_features: int
    bias: bool = True
    in_splits: int = 1
    out_splits: int = 1
    input_is_already_split: bool = False
    combine_out_splits: bool = True
    linear_cls: Any = None
    linear_args: Mapping[str, Any] | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    sharding: Sharding | None = None
    kernel_init: Initializer = init_weight
    bias_init: Initializer = init_bias
    use_bias: bool | None = None
    precision: Any = None

    def _config(self) -> LinearConfig:
        sizes = self.in_features, self.out_features, self.in_splits, self.out_splits
        forms = self.input_is_already_split, self.combine_out_splits
        check_precision(type(self).__name__, self.precision)
        return make_linear_config(type(self).__name__, *sizes, *forms, self.sharding, bias=self._has_bias)

    @property
    def _has_bias(self) -> bool:
        return chosen_bias(type(self).__name__, self.bias, self.use_bias, True)

    def _params(self, config: LinearConfig) -> dict[str, jax.Array]:
        given = self.linear_cls, self.linear_args, self.kernel_init, self.bias_init
        inits = initialisers(config.function, *given, "nn.Dense")
        draw = stacked_init(inits["weight"], config.tiles)
        if self.sharding is not None:
            draw = nn.with_partitioning(draw, (None, None, *config.axes))
        # What `param` returns is out of its box.
        params: dict[str, Any] = {"weight": self.param("weight", draw, config.tiles.shape, self.param_dtype)}
        if self._has_bias:
            params["bias"] = self.param("bias", inits["bias"], (self.out_features,), self.param_dtype)
        return params

    def tile_params(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the parameters of this layer from those of an nn.Dense: kernel [in, out] and bias."""
        tiles, rest = self._config().tiles, {name: value for name, value in params.items() if name != "kernel"}
        return {"weight": tiles.stack(params["kernel"]), **rest}

    def untile_params(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return the parameters of an nn.Dense from those of this layer."""
        tiles, rest = self._config().tiles, {name: value for name, value in params.items() if name != "weight"}
        return {"kernel": tiles.unstack(params["weight"]), **rest}

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[..., in] -> [..., out]; lists of splits where the options say so."""
        config = self._config()
        return config.apply(x, self._params(config), self.dtype)


class TiledLinearReturnBias(TiledLinear):
    """`tiled_jax.TiledLinearReturnBias` as a linen module: (y, bias), the bias not added."""

    @nn.compact
    def __call__(self, x: Any) -> tuple[Outputs, Outputs | None]:
        """[..., in] -> [..., out] without the bias, and the bias."""
        config = self._config()
        params = self._params(config)
        y = config.apply(x, params, self.dtype, add_bias=False)
        return y, config.bias(params["bias"]) if "bias" in params else None
