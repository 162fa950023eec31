"""Adapters of low rank beside the projections of a decoder layer: nnx.LoRA around a plain layer, or nnx.LoRALinear.

A projection is x w + b + (x l) r, its three products rounded to the dtype of the products each, as Flax's modules round them.
Letters: t tokens of a shard, r the rank. `w` has beside w_name and b_name l_name [in, r] and r_name [r, out] of what has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from tiled_jax.core.products import linear, product, product_of_rows, wide
from tiled_jax.mlp.projections import ORDER, reason_not_plain
from tiled_jax.mlp.steps import XLA, MLPSteps

ArrayMap = Mapping[str, jax.Array]
ADAPTED = "lr"  # how the names of an adapter's two matrices begin


class Projection(NamedTuple):
    """A layer as its parts: what has the kernel and the bias, and the adapter, None where there is none."""

    base: Any
    adapter: Any

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the variables by the names of the block's steps."""
        found = {f"w_{name}": self.base.kernel}
        if getattr(self.base, "bias", None) is not None:
            found[f"b_{name}"] = self.base.bias
        if self.adapter is not None:
            found |= {f"l_{name}": self.adapter.lora_a, f"r_{name}": self.adapter.lora_b}
        return found


def projection_of(layer: Any) -> Projection:
    """Return the parts of a layer; itself where it is no known adapter."""
    if type(layer) is nnx.LoRA:
        return Projection(layer.base_module, layer)
    if type(layer) is nnx.LoRALinear:
        return Projection(layer, layer.lora)
    return Projection(layer, None)


def reason_not_projection(name: str, layer: Any) -> str | None:
    """Return why a layer is more than x kernel + bias with at most one adapter beside it; None where that is all."""
    base, adapter = projection_of(layer)
    if adapter is None:
        return reason_not_plain(name, layer)
    if adapter is not layer and (type(adapter) is not nnx.LoRA or adapter.base_module is not None):
        return f"{name}.lora is more than an adapter"
    return reason_not_plain(name, base, type(base) if base is layer else nnx.Linear) or _reason_of(name, adapter, base)


def _reason_of(name: str, adapter: Any, base: Any) -> str | None:
    if adapter.promote_dtype is not dtypes.promote_dtype:
        return f"{name} has an adapter with a promote_dtype of its own"
    # Its input is in the wide dtype, as norms return it, or in that of the products: None follows it and the parameters.
    found = jnp.dtype(
        adapter.dtype or jnp.result_type(adapter.lora_a.dtype, adapter.lora_b.dtype, wide(base.kernel.dtype))
    )
    wanted = base.dtype
    if wanted is None or found != jnp.dtype(wanted):
        return f"{name} has an adapter with dtype={adapter.dtype!r}, which computes in {found.name} beside {wanted!r}"
    more = [
        key
        for key, value in vars(adapter).items()
        if isinstance(value, nnx.Variable) and key not in ("lora_a", "lora_b")
    ]
    return f"{name} has an adapter with {more[0]} besides lora_a and lora_b" if more else None


def mlp_projections(mlp: Any) -> dict[str, Projection]:
    """Return the projections of a `TiledMLP` that are layers to be called."""
    found = {name: getattr(mlp, name, None) for name in ORDER}
    return {name: projection_of(layer) for name, layer in found.items() if layer is not None}


def dtype_of_products(mlp: Any) -> Any:
    """Return the dtype in which an MLP, or experts, compute; of an MLP that says none, that of the layers that it calls."""
    if mlp.dtype is not None:
        return mlp.dtype
    return next((found.base.dtype for found in mlp_projections(mlp).values() if found.base.dtype is not None), None)


def with_adapter(y: jax.Array, x: jax.Array, w: ArrayMap, name: str) -> jax.Array:
    """Return y [t, out] with what an adapter of the projection makes of x [t, in]."""
    if f"l_{name}" not in w:
        return y
    return y + linear(linear(x, w[f"l_{name}"], None), w[f"r_{name}"], None).astype(y.dtype)


def projected(x: jax.Array, w: ArrayMap, name: str, *, bias: bool = True) -> jax.Array:
    """Return what a projection makes of x [t, in]; without `bias` before it is added."""
    return with_adapter(linear(x, w[f"w_{name}"], w.get(f"b_{name}") if bias else None), x, w, name)


def input_gradient(d: jax.Array, w: ArrayMap, name: str, out: Any) -> jax.Array:
    """Return in the dtype `out` the gradient of a projection's input, from that of its output d [t, out]."""
    found = product(d, w[f"w_{name}"], (1, 1), out)
    if f"l_{name}" not in w:
        return found
    inner = product(d, w[f"r_{name}"], (1, 1), d.dtype)
    return found + product(inner, w[f"l_{name}"], (1, 1), out)


def adapter_gradients(x: jax.Array, d: jax.Array, w: ArrayMap, name: str, sums: ArrayMap) -> dict[str, jax.Array]:
    """Return what a shard adds to those of the sums that are of the projection's adapter, in the wide dtype."""
    found, acc = {}, wide(d.dtype)
    if f"l_{name}" in sums:
        found[f"l_{name}"] = product_of_rows(x, product(d, w[f"r_{name}"], (1, 1), d.dtype), acc)
    if f"r_{name}" in sums:
        found[f"r_{name}"] = product_of_rows(linear(x, w[f"l_{name}"], None), d, acc)
    return found


@dataclass(frozen=True)
class AdaptedSteps(MLPSteps):
    """The steps of an MLP of which projections have adapters, by XLA. Gate and up again in backward, down never. Static."""

    def gate_and_up(self, x: jax.Array, w: ArrayMap) -> dict[str, jax.Array]:
        """See `MLPSteps`."""
        return {name: with_adapter(y, x, w, name) for name, y in super().gate_and_up(x, w).items()}

    def gradients(
        self, x: jax.Array, dy: jax.Array, pre: ArrayMap, w: ArrayMap, activation: str, sums: ArrayMap
    ) -> dict[str, jax.Array]:
        """See `MLPSteps`. Sums of adapters are of the names l_gate, r_gate and so on."""
        h, d = self.activation_gradients(input_gradient(dy, w, "down", x.dtype), pre, activation)
        out: dict[str, jax.Array] = {}

        def add(name: str, rows: jax.Array, d: jax.Array) -> None:
            for operand, a in ((f"w_{name}", rows), (f"b_{name}", None)):
                if operand in sums:
                    out[operand] = self.added(sums[operand], a, d)
            more = adapter_gradients(rows, d, w, name, sums)
            out.update({operand: sums[operand] + part for operand, part in more.items()})

        add("down", h, dy)
        for name, of in d.items():
            add(name, x, of)
        if "x" in sums:
            parts = [input_gradient(d[name], w, name, wide(x.dtype)) for name in pre]
            out["x"] = sum(parts[1:], parts[0]).astype(x.dtype)
        return out


def steps_with_adapters(steps: MLPSteps, w: ArrayMap) -> MLPSteps:
    """Return the steps of an MLP with these parameters: as they are where no projection has an adapter."""
    return AdaptedSteps() if any(f"l_{name}" in w for name in ORDER) else steps


def without_kernels(steps: MLPSteps) -> MLPSteps:
    """Return steps that have tangents, which kernels do not."""
    return steps if steps.backend == XLA.backend else XLA
