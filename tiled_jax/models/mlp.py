"""The untiled MLP, parameter for parameter the twin of `TiledMLP`, to compare with."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.config import Activation
from tiled_jax.layers.attention import precision_of

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


class PlainMLP(nnx.Module):
    """(activation(x w_gate) * (x w_up)) w_down, as three products and autodiff; kernels [in, out] as in TiledMLP.

    fused_gate_up: gate and up are one parameter `w_gate_up`, gate first.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        fused_gate_up: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.activation, self.fused, self.dtype = activation, fused_gate_up, dtype
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        shapes = {"gate": (hidden_size, intermediate_size), "up": (hidden_size, intermediate_size)}
        if fused_gate_up:
            shapes = {"gate_up": (hidden_size, 2 * intermediate_size)}
        shapes["down"] = (intermediate_size, hidden_size)
        for name, shape in shapes.items():
            setattr(self, f"w_{name}", nnx.Param(init(rngs.params(), shape, param_dtype)))
            setattr(self, f"b_{name}", nnx.Param(zeros(rngs.params(), shape[1:], param_dtype)) if bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden_size] -> the same, in `dtype`."""
        x = x.astype(self.dtype or x.dtype)
        if self.fused:
            gate, up = jnp.split(self._product("gate_up", x), 2, axis=-1)
        else:
            gate, up = self._product("gate", x), self._product("up", x)
        return self._product("down", _ACTIVATIONS[self.activation](gate) * up)

    def _product(self, name: str, x: jax.Array) -> jax.Array:
        weight, bias = getattr(self, f"w_{name}"), getattr(self, f"b_{name}")
        y = jnp.dot(x, weight[...].astype(x.dtype), precision=precision_of(x.dtype))
        return y if bias is None else y + bias[...].astype(x.dtype)
