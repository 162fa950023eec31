"""What the nnx and the linen `TiledLinear` share: checks, shapes and initial values of the parameters, and the call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from shared_specs.config import JAX
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from shared_specs.linear import checks as linear_checks
from tiled_jax.core.arrays import array, operand
from tiled_jax.core.params import (
    Sharding,
    as_operands,
    check_initialisers,
    compute_dtype,
    init_bias,
    init_weight,
    refuse_partitioned,
)
from tiled_jax.linear.autodiff import Cut, Tiles, tiled_linear

_PLAIN = {"nnx.Linear": nnx.Linear, "nn.Dense": nn.Dense}
# What an nnx.Linear computes with, and the tiles do not know of.
_PLAINLY = {"precision": None, "dot_general": lax.dot_general, "preferred_element_type": None}
_PASSED = ("use_bias", "dtype", "param_dtype", "rngs")
_HONOURED = ("kernel_init", "bias_init")
_STACKED = "Here tiles are one stacked array that a loop runs over, and no layers of their own; `tile` takes any layer."

# Arrays, or what TiledLinearReturnBias leaves to its caller.
Outputs = jax.Array | list[jax.Array]


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """The checked options of one module."""

    function: str
    tiles: Tiles
    axes: Sharding
    input_is_already_split: bool
    combine_out_splits: bool

    def apply(self, x: Any, params: Mapping[str, jax.Array], dtype: Any, *, add_bias: bool = True) -> Outputs:
        """x @ weight, with the bias where there is one: one array, or a list of the output splits.

        float32 parameters beside a 16-bit dtype are handed over as they are, so that their gradients stay float32.
        """
        parts = self._parts(x)
        others = {f"x[{part}]": value for part, value in enumerate(parts[1:], 1)}
        dtype = compute_dtype(parts[0], {**params, **others}, dtype)
        params = as_operands(params, dtype)
        parts = [part.astype(dtype) for part in parts]
        joined = self.tiles.inputs.join(parts) if self.input_is_already_split else self.tiles.inputs.pad(parts[0])
        bias = params.get("bias") if add_bias else None
        y = tiled_linear(self.function, joined, params["weight"], bias, self.tiles, self.axes)
        return self.tiles.outputs.strip(y) if self.combine_out_splits else self.tiles.outputs.split(y)

    def bias(self, bias: jax.Array) -> Outputs:
        """Return the bias in the form of the outputs."""
        outputs = self.tiles.outputs
        return bias if self.combine_out_splits else [outputs.run(bias, part) for part in range(outputs.parts)]

    def _parts(self, x: Any) -> list[jax.Array]:
        if not self.input_is_already_split:
            x = array(self.function, "x", x)
            linear_checks.check_linear_input(self.function, x.shape, self.tiles.inputs.features)
            return [x]
        if not isinstance(x, list | tuple):
            fail_type(self.function, "x", "a list or tuple of arrays", type(x).__name__)
        parts = [array(self.function, f"x[{part}]", value) for part, value in enumerate(x)]
        linear_checks.check_linear_parts(self.function, [part.shape for part in parts], self.tiles.inputs.sizes)
        return parts


def make_linear_config(
    function: str,
    in_features: int,
    out_features: int,
    in_splits: int,
    out_splits: int,
    input_is_already_split: bool,
    combine_out_splits: bool,
    sharding: Sharding | None,
    *,
    bias: bool,
) -> LinearConfig:
    """Return the options of a module, checked when it is made and not when it is first called."""
    flags = {"input_is_already_split": input_is_already_split, "combine_out_splits": combine_out_splits, "bias": bias}
    linear_checks.check_tiled_linear(function, in_features, out_features, in_splits, out_splits, **flags)
    if sharding is not None and (not isinstance(sharding, tuple) or len(sharding) != 2):
        fail_type(function, "sharding", "(axis of in, axis of out) or None", type(sharding).__name__)
    return LinearConfig(
        function=function,
        tiles=Tiles(Cut(in_features, in_splits), Cut(out_features, out_splits)),
        axes=sharding or (None, None),
        input_is_already_split=input_is_already_split,
        combine_out_splits=combine_out_splits,
    )


def initialisers(
    function: str, linear_cls: Any, linear_args: Any, kernel_init: Any, bias_init: Any, plain: str = "nnx.Linear"
) -> dict[str, Any]:
    """Return the initialisers of weight and bias: those given, or those that `linear_args` names for the plain class.

    The plain class is an nnx.Linear or nn.Dense.

    Raises:
        SpecError: one is given both ways. TypeError: one cannot be called.
        UnsupportedError: another class than `plain`, or an argument of it that is about more than initial values.
    """
    linear_checks.check_linear_class(function, linear_cls, linear_args, _PASSED)
    if linear_cls is not None and linear_cls is not _PLAIN[plain]:
        name = getattr(linear_cls, "__name__", repr(linear_cls))
        raise UnsupportedError(error_text(function, "linear_cls", f"None or {plain} here", name, advice=_STACKED))
    args = dict(linear_args or {})
    for name in args:
        if name not in _HONOURED:
            rule = f"of {', '.join(_HONOURED)} here"
            raise UnsupportedError(error_text(function, "linear_args", rule, repr(name), advice=_STACKED))
    given = {"kernel_init": (kernel_init, init_weight), "bias_init": (bias_init, init_bias)}
    for name, (init, default) in given.items():
        if name in args and init is not default:
            fail(function, name, "left out where linear_args has one", getattr(init, "__name__", repr(init)))
    weight, bias = args.get("kernel_init", kernel_init), args.get("bias_init", bias_init)
    check_initialisers(function, weight, bias)
    return {"weight": weight, "bias": bias}


def stacked_init(init: Any, tiles: Tiles) -> Any:
    """Return an initialiser of stacked tiles: those of the one whole weight that `init` draws, for every number of tiles."""

    def draw(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        assert tuple(shape) == tiles.shape
        drawn = init(key, (tiles.inputs.features, tiles.outputs.features), dtype)
        return tiles.stack(refuse_partitioned("TiledLinear", drawn))

    return draw


def plain_params(function: str, argument: str, linear: Any) -> tuple[jax.Array, jax.Array | None]:
    """Weight [in, out] and bias of a plain layer: an nnx.Linear, or anything with a `kernel`."""
    kernel = getattr(linear, "kernel", None)
    if kernel is None:
        fail_type(function, argument, "a layer with a weight", type(linear).__name__)
    bias = getattr(linear, "bias", None)
    weight = array(function, f"{argument}.kernel", kernel)
    # An nnx.Linear without a bias holds a variable of None in some releases.
    value = bias[...] if isinstance(bias, nnx.Variable) and bias.get_value() is not None else bias
    value = None if isinstance(value, nnx.Variable) else value
    return weight, None if value is None else jnp.asarray(value)


def refuse_more_than_plain(function: str, linear: Any) -> None:
    """Raise UnsupportedError where a layer is more than x @ kernel + bias at JAX's default precision."""
    own = isinstance(linear, nnx.Linear) and type(linear).__call__ is not nnx.Linear.__call__
    got = f"{type(linear).__name__} with a call of its own" if own else None
    for option, default in _PLAINLY.items():
        value = getattr(linear, option, default)
        if value is not default:
            got = f"{type(linear).__name__} with {option}={getattr(value, '__name__', value)}"
    if got is not None:
        advice = "Construct the layer and call copy_params_from."
        raise UnsupportedError(error_text(function, "linear", "a plain layer", got, advice=advice))


def check_plain(
    function: str, prefix: str, weight: jax.Array, bias: jax.Array | None, tiles: Tiles, *, has_bias: bool
) -> None:
    """Raise SpecError where a plain layer's parameters do not fit the tiles."""
    linear_checks.check_linear_params(
        function,
        prefix,
        operand(weight).shape,
        None if bias is None else operand(bias).shape,
        in_features=tiles.inputs.features,
        out_features=tiles.outputs.features,
        has_bias=has_bias,
        names=JAX,
    )
