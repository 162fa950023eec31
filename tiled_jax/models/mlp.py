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
    """(activation(x w_gate) * (x w_up)) w_down, as three products and autodiff; kernels [in, out] as in TiledMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.activation, self.dtype = activation, dtype
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
        shapes = {"gate": (hidden_size, intermediate_size), "up": (hidden_size, intermediate_size)}
        shapes["down"] = (intermediate_size, hidden_size)
        for name, shape in shapes.items():
            setattr(self, f"w_{name}", nnx.Param(init(rngs.params(), shape, jnp.float32)))
            setattr(self, f"b_{name}", nnx.Param(zeros(rngs.params(), shape[1:], jnp.float32)) if bias else None)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., hidden_size] -> the same, in `dtype`."""
        x = x.astype(self.dtype or x.dtype)
        gate, up = self._product("gate", x), self._product("up", x)
        return self._product("down", _ACTIVATIONS[self.activation](gate) * up)

    def _product(self, name: str, x: jax.Array) -> jax.Array:
        weight, bias = getattr(self, f"w_{name}"), getattr(self, f"b_{name}")
        y = jnp.dot(x, weight[...].astype(x.dtype), precision=precision_of(x.dtype))
        return y if bias is None else y + bias[...].astype(x.dtype)
