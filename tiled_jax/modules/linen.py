"""The modules for Flax linen: the same options, names and calls as the nnx modules."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from shared_specs.config import LossOptions, Tiling
from tiled_jax.modules.linear_params import LinearConfig, Outputs, initialisers, make_linear_config, stacked_init
from tiled_jax.modules.loss_params import loss_param_axes, loss_param_shapes, make_loss_config
from tiled_jax.modules.params import Sharding, check_dtypes, make_config, param_axes, param_shapes

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
        check_dtypes("TiledMLP", self.dtype, self.param_dtype)
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
        check_dtypes("TiledLinearCrossEntropy", self.dtype, self.param_dtype)
        axes = loss_param_axes(self.sharding)
        params = {}
        for name, shape in loss_param_shapes(self.hidden_size, self.vocab_size, bias=self.bias).items():
            init = _init_weight if name == "weight" else _init_bias
            params[name] = self.param(
                name, nn.with_partitioning(init, axes[name]) if axes else init, shape, self.param_dtype
            )
        return config.apply(x, targets, params, self.dtype, num_valid=num_valid)


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

    def _config(self) -> LinearConfig:
        sizes = self.in_features, self.out_features, self.in_splits, self.out_splits
        forms = self.input_is_already_split, self.combine_out_splits
        return make_linear_config(type(self).__name__, *sizes, *forms, self.sharding, bias=self.bias)

    def _params(self, config: LinearConfig) -> dict[str, jax.Array]:
        default = {"weight": _init_weight, "bias": _init_bias}
        inits = initialisers(config.function, self.linear_cls, self.linear_args, default, "nn.Dense")
        draw = stacked_init(inits["weight"], config.tiles)
        if self.sharding is not None:
            draw = nn.with_partitioning(draw, (None, None, *config.axes))
        # What `param` returns is out of its box.
        params: dict[str, Any] = {"weight": self.param("weight", draw, config.tiles.shape, self.param_dtype)}
        if self.bias:
            params["bias"] = self.param("bias", inits["bias"], (self.out_features,), self.param_dtype)
        return params

    def tile_params(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters of this layer from those of an nn.Dense: kernel [in, out] and bias."""
        tiles, rest = self._config().tiles, {name: value for name, value in params.items() if name != "kernel"}
        return {"weight": tiles.stack(params["kernel"]), **rest}

    def untile_params(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The parameters of an nn.Dense from those of this layer."""
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
