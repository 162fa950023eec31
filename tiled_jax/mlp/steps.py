"""What one shard of the MLP goes through, step by step: by XLA, which runs on every device.

`mlp/steps_kernels.py` has the same steps by Pallas kernels; the loops of `mlp/loops.py` take either.
Letters and formulas are those of `mlp/math.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax

from tiled_jax.core import products
from tiled_jax.mlp import math as shard_math
from tiled_jax.mlp.math import ArrayMap


@dataclass(frozen=True)
class MLPSteps:
    """The steps by XLA. Static: a part of what a compiled program is found by.

    `multiple`: of which the tokens of a shard and the columns of a device are multiples.
    """

    backend: ClassVar[str] = "xla"
    multiple: ClassVar[int] = 1

    linear = staticmethod(products.linear)
    activated = staticmethod(shard_math.activated)
    activation_gradients = staticmethod(shard_math.activation_gradients)
    dx = staticmethod(shard_math.dx)
    added = staticmethod(shard_math.added)

    def gate_and_up(self, x: jax.Array, w: ArrayMap) -> dict[str, jax.Array]:
        """Return the pre-activations [t, I] that backward needs again: gate and up, or up alone in a plain MLP."""
        pre = {}
        for name in ("gate", "up"):
            if f"w_{name}" in w:
                pre[name] = self.linear(x, w[f"w_{name}"], w.get(f"b_{name}"))
        return pre

    def hidden(
        self, x: jax.Array, w: ArrayMap, activation: str, *, keep: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return h [t, I] of one shard in the dtype of x, and with `keep` the pre-activations it was made from."""
        pre = self.gate_and_up(x, w)
        return self.activated(pre, activation), pre if keep else {}

    def pre_activation_gradients(
        self, dy: jax.Array, pre: ArrayMap, w_down: jax.Array, activation: str
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return h, and dgate and dup by name, all [t, I] in the dtype of x."""
        return self.activation_gradients(self.dx({"up": dy}, {"up": w_down}), pre, activation)

    def gradients(
        self, x: jax.Array, dy: jax.Array, pre: ArrayMap, w: ArrayMap, activation: str, sums: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Return for every name in `sums` the gradient of one shard: that of x in its own dtype, those of weights and
        biases added to the sums over the shards before this one (`sum_shape`).

        Every [t, I] value is rounded to the dtype of x before its products: a float32 operand would make them float32
        products, many times slower on a GPU.
        """
        if {*sums} <= {"w_down", "b_down"}:
            h, d = self.activated(pre, activation), {}
        else:
            h, d = self.pre_activation_gradients(dy, pre, w["w_down"], activation)
        out = {}

        def add(name: str, rows: jax.Array, d: jax.Array) -> None:
            for operand, a in ((f"w_{name}", rows), (f"b_{name}", None)):
                if operand in sums:
                    out[operand] = self.added(sums[operand], a, d)

        add("down", h, dy)
        if "w_down" in out:
            x = self.later(out["w_down"], x)
        for name, value in d.items():
            add(name, x, value)
        if "x" in sums:
            out["x"] = self.dx({name: d[name] for name in pre}, {name: w[f"w_{name}"] for name in pre})
        return out

    def later(self, first: jax.Array, x: jax.Array) -> jax.Array:
        """Return x, which on a CPU is transposed for its products, but not while h is still needed for `first`."""
        return products.after(first, x) if first.size and jax.default_backend() == "cpu" else x

    def sum_shape(self, operand: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the sum over shards of the gradient of a weight or bias of this shape."""
        return shape


XLA = MLPSteps()
