"""Linear layers whose weights are split over a mesh axis, as functions for use inside `jax.shard_map`.

Gradients are exact with check_vma=True and with check_vma=False, as in `tiled_jax.collectives.conjugates`. "The same on all
devices" is what in_specs that do not name the axis give.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax

from shared_specs.collectives import checks as collective_checks
from shared_specs.config import JAX, ParallelLinearOptions
from shared_specs.errors import fail
from shared_specs.layers import checks as layer_checks
from tiled_jax.collectives import conjugates
from tiled_jax.collectives.conjugates import Axis, mesh_axis
from tiled_jax.core.arrays import array, operand
from tiled_jax.core.loops import varying
from tiled_jax.core.products import product, wide

DEFAULTS = ParallelLinearOptions()

UNUSED: Mapping[str, str] = {
    "disable_grad_reduce": "The type of x says it in JAX: jax.lax.pcast(x, axis_name, to='varying') is not summed.",
    "is_expert": "Which devices sum a gradient is read from its sharding in JAX.",
    "gradient_accumulation_fusion": "Gradients are values in JAX, there is no main_grad to add to.",
    "async_grad_reduce": "XLA schedules communication beside computation by itself.",
    "defer_weight_grad": "XLA schedules products by itself.",
    "wgrad_deferral_limit": "XLA schedules products by itself.",
}


def column_parallel_linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    gather_output: bool = False,
    sequence_parallel: bool = False,
    options: ParallelLinearOptions = DEFAULTS,
    axis_name: str,
) -> jax.Array:
    """Return x @ weight + bias for this device's columns of the weight.

    In backward the input gradients of all devices are summed; with sequence_parallel x is gathered first and its gradient
    reduce-scattered.

    Args:
        x: [..., in], the same on all devices; with sequence_parallel this device's tokens along options.sequence_dim.
        weight: [in, out / R]. bias: [out / R]. All of one floating dtype.
        gather_output: return the concatenated outputs of all devices, [..., out], the same on all of them.
        options: sequence_dim, stride and explicit_expert_comm; the rest stays at its defaults. stride is the number of parts
            of a fused weight; this device has a run of each part. Only a gathered output depends on it: it has the order of
            the undivided weight. With explicit_expert_comm x varies over the axis, and its gradient is each device's own part.
        axis_name: of the surrounding `jax.shard_map`. Other axes may split the tokens.
    Returns:
        [..., out / R] or [..., out], all tokens, in the dtype of x.
    Numerics: products accumulate in float32 (float64 for float64) and are rounded to the dtype of x before a bias is added
        and before devices are summed.
    Memory: keeps x (gathered) and the weight for backward.
    Raises:
        SpecError: wrong shapes or dtypes, sizes that do not divide, an option that JAX does not use, no such axis. TypeError:
        a wrong kind of value.
    Source: Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198.
    Example:
        y = jax.shard_map(
            partial(column_parallel_linear, axis_name="tp"), mesh=mesh,
            in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P(None, "tp"),
        )(x, weight, bias)
    """
    name = "column_parallel_linear"
    layer_checks.check_flags(name, gather_output=gather_output)
    if isinstance(options, ParallelLinearOptions) and options.explicit_expert_comm:
        layer_checks.check_explicit(name, gather_output=(gather_output, False))
    call = LinearCall.of(name, "column", x, weight, bias, sequence_parallel, options, axis_name)
    y = call.column(call.weight)
    return gathered_columns(y, call.axis, options.stride) if gather_output else y


def row_parallel_linear(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    input_is_parallel: bool = False,
    sequence_parallel: bool = False,
    options: ParallelLinearOptions = DEFAULTS,
    axis_name: str,
) -> jax.Array:
    """Return the sum over devices of x @ weight, plus bias, where each device has some rows of the weight.

    Args:
        x: [..., in / R] with input_is_parallel. Otherwise [..., in], the same on all devices; each device takes its slice.
        weight: [in / R, out]. bias: [out], the same on all devices, added once.
        sequence_parallel: each device gets its own tokens of the sum, along options.sequence_dim, by a reduce-scatter.
        options: sequence_dim, stride and explicit_expert_comm; the rest stays at its defaults. stride is the number of parts
            of a fused input; this device takes a slice of each part.
        axis_name: of the surrounding `jax.shard_map`. Other axes may split the tokens.
    Returns:
        [..., out] in the dtype of x, the same on all devices, or this device's tokens of it, or with
        options.explicit_expert_comm this device's part of the sum, without bias.
    Numerics: each device's product is rounded to the dtype of x; the sum over devices is taken in that dtype.
    Memory: keeps this device's x and the weight for backward.
    Raises, Source: as `column_parallel_linear`.
    Example:
        y = jax.shard_map(
            partial(row_parallel_linear, input_is_parallel=True, axis_name="tp"), mesh=mesh,
            in_specs=(P(None, "tp"), P("tp", None), P()), out_specs=P(),
        )(x, weight, bias)
    """
    name = "row_parallel_linear"
    layer_checks.check_flags(name, input_is_parallel=input_is_parallel)
    call = LinearCall.of(
        name, "row", x, weight, bias, sequence_parallel, options, axis_name, whole=not input_is_parallel
    )
    layer_checks.check_explicit_bias(name, options, added=bias is not None)
    if options.explicit_expert_comm:
        layer_checks.check_explicit(name, input_is_parallel=(input_is_parallel, True))
        return call.part()
    return plus(call.row(), call.bias)


def linear_with_frozen_weight(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    sequence_parallel: bool = False,
    options: ParallelLinearOptions = DEFAULTS,
    axis_name: str,
) -> jax.Array:
    """`column_parallel_linear` whose weight gets no gradient: x is not kept, and backward computes one product instead of two.

    Args:
        x, weight, bias, sequence_parallel, options, axis_name: as there. bias gets its gradient.
    Returns:
        [..., out / R].
    Numerics, Raises, Source: as there. Memory: keeps the weight for backward.
    """
    name = "linear_with_frozen_weight"
    call = LinearCall.of(name, "column", x, weight, bias, sequence_parallel, options, axis_name)
    return call.column(lax.stop_gradient(call.weight))


@dataclass(frozen=True)
class LinearCall:
    """One checked call of a linear layer."""

    function: str
    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    axis: Axis
    tokens: int | None  # the dim of them that sequence parallelism splits
    stride: int
    whole: bool  # x has the features of all devices
    explicit: bool  # the caller makes the collectives

    @classmethod
    def of(
        cls,
        function: str,
        kind: str,
        x: Any,
        weight: Any,
        bias: Any,
        sequence_parallel: bool,
        options: Any,
        axis_name: object,
        *,
        whole: bool = False,
    ) -> "LinearCall":
        layer_checks.check_flags(function, sequence_parallel=sequence_parallel)
        layer_checks.check_linear_options(
            function, options, kind=kind, sequence_parallel=sequence_parallel, unused=UNUSED
        )
        x, weight = array(function, "x", x), array(function, "weight", weight)
        bias = None if bias is None else array(function, "bias", bias)
        axis, tokens = mesh_axis(function, axis_name), None
        if sequence_parallel:
            tokens, _ = layer_checks.check_sequence_dim(function, options.sequence_dim, None, x.shape, axis.size)
            if whole:
                advice = "The gradient of a whole x would be gathered twice."
                fail(function, "input_is_parallel", "True with sequence_parallel", False, advice=advice)
            if kind == "row":
                collective_checks.check_even(function, x.shape, tokens, axis.size, sizes="")
        inputs = x.shape[-1] if x.ndim else 0
        if whole:
            layer_checks.check_split(function, "x's last dim", inputs, axis.size, options.stride)
            inputs //= axis.size
        given = None if bias is None else operand(bias)
        layer_checks.check_parallel_linear(
            function, x=operand(x), weight=operand(weight), bias=given, inputs=inputs, names=JAX
        )
        if given is not None:
            layer_checks.check_bias(function, given, weight.shape[1])
        if kind == "column":
            layer_checks.check_split(function, "weight's columns", weight.shape[1], 1, options.stride)
        return cls(function, x, weight, bias, axis, tokens, options.stride, whole, options.explicit_expert_comm)

    def with_x(self, x: jax.Array) -> "LinearCall":
        """Return the same call of an x of the same shape and dtype."""
        return replace(self, x=x)

    def column(self, weight: jax.Array) -> jax.Array:
        """Return all tokens and this device's columns."""
        x, axis = self.x, self.axis
        if self.explicit and axis.typed and axis.name not in varying(x):
            rule = "varying over the axis with options.explicit_expert_comm, whose gradient no device sums"
            advice = f"Gather its tokens, or jax.lax.pcast(x, {axis.name!r}, to='varying')."
            fail(self.function, "x", rule, "one that is the same on all devices", advice=advice)
        if self.tokens is None:
            x = conjugates.copy_to(x, axis)
        else:
            x = conjugates.all_gather(x, axis, self.tokens, same=False)
        return plus(_product(x, weight), self.bias)

    def part(self) -> jax.Array:
        """Return this device's part of `row`, of all tokens."""
        x = scattered_columns(self.x, self.axis, self.stride) if self.whole else self.x
        return _product(x, self.weight)

    def row(self) -> jax.Array:
        """Return the sum over devices of their parts, all tokens or this device's, without the bias."""
        part = self.part()
        if self.tokens is None:
            return conjugates.all_reduce(part, self.axis)
        return conjugates.reduce_scatter(part, self.axis, self.tokens)


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return product(x, weight, (x.ndim - 1, 0), x.dtype)


def plus(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    # Rounded before the bias is added: a float32 result would be differentiated with float32 products.
    return y if bias is None else (y.astype(wide(y.dtype)) + bias.astype(wide(y.dtype))).astype(y.dtype)


def gathered_columns(y: jax.Array, axis: Axis, stride: int) -> jax.Array:
    """Return [..., out / R] of every device as [..., out], in the order of the undivided weight."""
    parts = y.reshape(*y.shape[:-1], stride, y.shape[-1] // stride)
    whole = conjugates.all_gather(parts, axis, parts.ndim - 1, same=True)
    return whole.reshape(*y.shape[:-1], y.shape[-1] * axis.size)


def scattered_columns(x: jax.Array, axis: Axis, stride: int) -> jax.Array:
    """Return this device's [..., in / R] of [..., in]: a stretch of each of the `stride` parts."""
    parts = x.reshape(*x.shape[:-1], stride, x.shape[-1] // stride)
    return conjugates.take_part(parts, axis, parts.ndim - 1).reshape(*x.shape[:-1], x.shape[-1] // axis.size)
