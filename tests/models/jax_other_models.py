"""Small Flax models in the forms that other libraries write theirs in: the same attributes and calls, none of their code."""

import dataclasses
import enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

H, I = 8, 12  # noqa: E741


class Remat(enum.Enum):
    NONE = 1
    BLOCK = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """Options as such libraries hand them down; `dtype` is that of products."""

    dtype: Any = None
    param_dtype: Any = jnp.float32
    remat: Remat = Remat.NONE
    init: Any = nnx.nn.linear.default_kernel_init


def linear(config: Config, rngs: nnx.Rngs, *sizes: int, bias: bool = False) -> nnx.Linear:
    options = {"dtype": config.dtype, "param_dtype": config.param_dtype, "kernel_init": config.init}
    return nnx.Linear(*sizes, use_bias=bias, bias_init=nnx.initializers.normal(), rngs=rngs, **options)


class GatedMLP(nnx.Module):
    """gate_proj, up_proj, down_proj; its call may be rematerialised, in a scope of its own name."""

    def __init__(self, config: Config, rngs: nnx.Rngs, activation: Any = nnx.silu, bias: bool = False) -> None:
        self.config, self.activation = config, activation
        self.gate_proj, self.up_proj = (linear(config, rngs, H, I, bias=bias) for _ in range(2))
        self.down_proj = linear(config, rngs, I, H, bias=bias)

    def block(self, x: jax.Array) -> jax.Array:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))

    @jax.named_scope("feed_forward")
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.config.remat is Remat.BLOCK:
            return nnx.remat(type(self).block)(self, x)
        return self.block(x)


class W123(nnx.Module):
    """w1 is the gate, w3 up, w2 down."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.w1, self.w3 = (linear(config, rngs, H, I) for _ in range(2))
        self.w2 = linear(config, rngs, I, H)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.w2(jax.nn.gelu(self.w1(x), approximate=False) * self.w3(x))


class Einsum(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs, equation: str, shape: tuple[int, ...]) -> None:
        self.equation, self.shape, self.dtype = equation, shape, config.dtype
        self.w = nnx.Param(nnx.initializers.normal(0.4)(rngs.params(), shape, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.w[...]
        dtype = self.dtype or jnp.result_type(x, w)
        return jnp.einsum(self.equation, x.astype(dtype), w.astype(dtype))


class GatingEinsum(nnx.Module):
    """Gate and up as one array [2, intermediate, hidden]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.gating_einsum = Einsum(config, rngs, "...D,NFD->...NF", (2, I, H))
        self.linear = Einsum(config, rngs, "...F,FD->...D", (I, H))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.moveaxis(self.gating_einsum(x), -2, 0)
        return self.linear(nnx.gelu(gate) * up)


class Arrays(nnx.Module):
    """Parameters without layers: wi_0 and wi_1 [hidden, intermediate], wo."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.lecun_normal()
        self.wi_0, self.wi_1 = (nnx.Param(draw(rngs.params(), (H, I), config.param_dtype)) for _ in range(2))
        self.wo = nnx.Param(draw(rngs.params(), (I, H), config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wi_0, wi_1, wo = (w[...].astype(x.dtype) for w in (self.wi_0, self.wi_1, self.wo))
        return (jax.nn.silu(x @ wi_0) * (x @ wi_1)) @ wo


class Fused(nnx.Module):
    """Up and gate as one layer, up first, with biases."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.gate_up_proj = linear(config, rngs, H, 2 * I, bias=True)
        self.down_proj = linear(config, rngs, I, H, bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, gate = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(nnx.silu(gate) * up)


class TwoLayers(nnx.Module):
    """fc1, an activation, dropout at a rate, fc2."""

    def __init__(self, config: Config, rngs: nnx.Rngs, activation: Any = nnx.gelu, rate: float = 0.0) -> None:
        self.fc1, self.fc2 = linear(config, rngs, H, I, bias=True), linear(config, rngs, I, H, bias=True)
        self.dropout, self.activation = nnx.Dropout(rate, rngs=rngs), activation

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


def in_sequence(config: Config, rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(linear(config, rngs, H, I), lambda a: jnp.square(jax.nn.relu(a)), linear(config, rngs, I, H))


FORMS: dict[str, Any] = {
    "gate_proj": GatedMLP,
    "gate_proj, remat": lambda config, rngs: GatedMLP(dataclasses.replace(config, remat=Remat.BLOCK), rngs),
    "gate_proj, biases": partial(GatedMLP, bias=True, activation=jax.nn.relu),
    "w1 w3 w2": W123,
    "gating_einsum": GatingEinsum,
    "wi_0 wi_1 wo": Arrays,
    "fused": Fused,
    "fc1 fc2": TwoLayers,
    "Sequential": in_sequence,
}


class Decoder(nnx.Module):
    """A token embedding, layers of a norm and an MLP, and a head."""

    def __init__(self, *mlps: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, H, rngs=rngs)
        self.layers = nnx.List([Layer(mlp, rngs) for mlp in mlps])
        self.lm_head = nnx.Linear(H, 16, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


class Layer(nnx.Module):
    def __init__(self, mlp: Any, rngs: nnx.Rngs) -> None:
        self.pre_ffw_norm, self.mlp = nnx.RMSNorm(H, rngs=rngs), mlp

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(self.pre_ffw_norm(x)).astype(x.dtype)
