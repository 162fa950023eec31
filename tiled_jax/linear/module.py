"""`TiledLinear` and `TiledLinearReturnBias` for Flax nnx: the tiles of one linear layer and one call. No math."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.nn.initializers import Initializer

from tiled_jax.core.params import Sharding, check_precision, chosen_bias, init_bias, init_weight
from tiled_jax.linear.params import (
    Outputs,
    check_plain,
    initialisers,
    make_linear_config,
    plain_params,
    refuse_more_than_plain,
    stacked_init,
)
from tiled_jax.tile.module_state import check_module_rngs


class TiledLinear(nnx.Module):
    """A linear layer whose weight is in_splits x out_splits stacked tiles; a loop uses one of them at a time.

    y = x w + b. Where the tiles are stored split over a mesh axis (`sharding`), the loop gathers one, uses it and drops
    it, in forward and again in backward: no device holds the whole weight, or the whole weight's gradient.

    Args:
        in_features, out_features: of the whole layer.
        bias: whether it has one.
        in_splits, out_splits: tiles along each dim, in [1, features]. Sizes differ by at most one
            (shared_specs.collectives.partitions.bounds); a shorter tile is stored with a zero behind it, which nothing reads
            and whose gradient is zero.
        input_is_already_split: x is a list of in_splits arrays. combine_out_splits: one result, or a list of out_splits.
        linear_cls: None or nnx.Linear. linear_args: kernel_init and bias_init, as nnx.Linear takes them.
        init_linear: a plain layer to take the initial values from.
        dtype: of the computation; None is what x and the parameters promote to, as in nnx.Linear.
        param_dtype: of the parameters. float32 beside a 16-bit dtype are master weights with float32 gradients; tiles
            are then gathered in 16 bits.
        rngs: its `params` stream draws the whole weight as nnx.Linear does and cuts it: the same layer at every split.
            Required.
        sharding: mesh axes that the (in, out) dims of every tile are split over, such as ("fsdp", None). Making a module
            with it needs a mesh (`jax.set_mesh`). A call inside `jax.shard_map` takes this device's part of the weight
            and gathers it itself; elsewhere the mesh must be set, too, for a tile at a time to be gathered.
        kernel_init, bias_init: initialisers, as nnx.Linear takes them; of the whole weight. Or in linear_args.
        use_bias: Flax's name for bias; None leaves it to bias.
        precision: None or lax.Precision.HIGHEST, which products have anyway.
    Parameters are `weight` [in_splits, out_splits, in / in_splits, out / out_splits], rounded up, and `bias` [out].
    Returns:
        [..., out_features], or a list of arrays [..., size].
    Numerics: sums over tiles are float32 (float64 for float64) and y, dx and every dw are rounded once.
    Memory: keeps x for backward. Compiled temporary bytes hold one gathered tile and, in backward, one tile's gradient.
    Raises:
        SpecError, TypeError: sizes, splits or shapes out of range.
        UnsupportedError: another linear_cls, or linear_args that are about more than initial values.
    Source: the interface is DeepSpeed's TiledLinear (ZeRO-Infinity, arXiv 2104.07857, section 5.1.3).
    Example:
        >>> layer = TiledLinear(8, 6, in_splits=2, out_splits=4, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 8))).shape
        (2, 5, 6)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Any = None,
        linear_args: Mapping[str, Any] | None = None,
        init_linear: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs | None = None,
        sharding: Sharding | None = None,
        kernel_init: Initializer = init_weight,
        bias_init: Initializer = init_bias,
        use_bias: bool | None = None,
        precision: Any = None,
    ) -> None:
        name = type(self).__name__
        rngs, bias = check_module_rngs(name, rngs), chosen_bias(name, bias, use_bias, True)
        check_precision(name, precision)
        forms = input_is_already_split, combine_out_splits
        config = make_linear_config(name, in_features, out_features, in_splits, out_splits, *forms, sharding, bias=bias)
        inits = initialisers(name, linear_cls, linear_args, kernel_init, bias_init)
        plain = None if init_linear is None else plain_params(name, "init_linear", init_linear)
        if plain is not None:
            check_plain(name, "init_linear.", *plain, config.tiles, has_bias=bias)
        draw = stacked_init(inits["weight"], config.tiles)
        metadata: dict[str, Any] = {} if sharding is None else {"out_sharding": (None, None, *config.axes)}
        # Drawn in the order of nnx.Linear. `init_linear` changes values, never the number of draws.
        self.weight = nnx.Param(draw(rngs.params(), config.tiles.shape, param_dtype), **metadata)
        key = rngs.params() if bias else None
        self.bias = None if key is None else nnx.Param(inits["bias"](key, (out_features,), param_dtype))
        self.config, self.dtype = config, dtype
        if plain is not None:
            self._copy(*plain)

    @classmethod
    def from_linear(
        cls,
        linear: Any,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
    ) -> Self:
        """Return the tiles of one plain layer (nnx.Linear), in its dtypes; the values are copied.

        UnsupportedError where it is more than its kernel and bias: a subclass with a call of its own, a precision, a
        dot_general.
        """
        weight, bias = plain_params(f"{cls.__name__}.from_linear", "linear", linear)
        refuse_more_than_plain(f"{cls.__name__}.from_linear", linear)
        return cls(
            *weight.shape,
            bias=bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            input_is_already_split=input_is_already_split,
            combine_out_splits=combine_out_splits,
            init_linear=linear,
            dtype=getattr(linear, "dtype", None),
            param_dtype=weight.dtype,
            rngs=nnx.Rngs(0),
        )

    def to_linear(self) -> nnx.Linear:
        """Return one plain layer with the values of the tiles, which are copied."""
        tiles, has_bias = self.config.tiles, self.bias is not None
        weight = self.weight[...]
        linear = nnx.Linear(1, 1, use_bias=has_bias, dtype=self.dtype, param_dtype=weight.dtype, rngs=nnx.Rngs(0))
        linear.in_features, linear.out_features = tiles.inputs.features, tiles.outputs.features
        linear.kernel = nnx.Param(tiles.unstack(weight))
        if self.bias is not None:
            linear.bias = nnx.Param(jnp.array(self.bias[...]))
        return linear

    def copy_params_from(self, linear: Any) -> None:
        """Overwrite the tiles with the parameters of a plain layer, cast to the tiles' dtype.

        Raises:
            SpecError: other sizes, or a bias on one side only. TypeError: no layer.
        """
        function = f"{type(self).__name__}.copy_params_from"
        weight, bias = plain_params(function, "linear", linear)
        check_plain(function, "", weight, bias, self.config.tiles, has_bias=self.bias is not None)
        self._copy(weight, bias)

    def _copy(self, weight: jax.Array, bias: jax.Array | None) -> None:
        values = {"weight": self.config.tiles.stack(weight)} | ({} if bias is None else {"bias": bias})
        for name, value in values.items():
            old = getattr(self, name)[...]
            value = value.astype(old.dtype)
            traced = isinstance(old, Tracer) or isinstance(value, Tracer)
            getattr(self, name)[...] = value if traced else jax.device_put(value, old.sharding)

    def _params(self) -> dict[str, jax.Array]:
        return {"weight": self.weight[...]} | ({} if self.bias is None else {"bias": self.bias[...]})

    def __call__(self, x: jax.Array | Sequence[jax.Array]) -> Any:
        """[..., in] -> [..., out]; lists of splits where the options say so."""
        return self.config.apply(x, self._params(), self.dtype)


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` that returns (y, bias) and does not add the bias, for callers that fuse the sum with what follows.

    The bias is None without one, [out_features], or a list of its splits where the outputs are not combined.

    Example:
        >>> y, bias = TiledLinearReturnBias(8, 6, out_splits=2, rngs=nnx.Rngs(0))(jnp.ones((5, 8)))
        >>> y.shape, bias.shape
        ((5, 6), (6,))
    """

    def __call__(self, x: jax.Array | Sequence[jax.Array]) -> tuple[Outputs, Outputs | None]:
        """[..., in] -> [..., out] without the bias, and the bias."""
        params = self._params()
        y = self.config.apply(x, params, self.dtype, add_bias=False)
        return y, self.config.bias(params["bias"]) if "bias" in params else None
