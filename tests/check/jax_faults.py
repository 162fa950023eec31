"""Published silent faults as they look in JAX: what `check` must find, and the tensor it must name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.check.faults import Faults
from tests.check.jax_models import MLP, H, LinenMLP, T, TinyLM, cross_entropy, states, tokens

FAULTS = Faults()
fault = FAULTS.fault


def calls(module: nnx.Module, call: Callable[..., Any], name: str = "__call__") -> None:
    """Give a module another method."""
    object.__setattr__(module, "__class__", type("Changed", (type(module),), {name: call}))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor: float, x: jax.Array) -> jax.Array:
    return x


scaled.defvjp(lambda factor, x: (x, None), lambda factor, _, g: (g * factor,))


@fault("gradient", "mlp.router.kernel", "error 1.0e+00")
def dropped_router_gradient() -> dict[str, Any]:
    """Axolotl D-AX4, Unsloth D-UN2."""

    def tile(model: Any) -> None:
        calls(model.mlp, lambda self, x: self.mixed(x, jax.lax.stop_gradient(self.router(x))))

    return dict(model=TinyLM(moe=True), batch=tokens(), tile=tile)


@fault("forward", "mlp")
def dropped_adapter() -> dict[str, Any]:
    """A fused MLP that takes the kernel inside of the adapter's layer."""

    def tile(model: Any) -> None:
        calls(model.mlp, lambda self, x: self.down(nnx.silu(self.gate(x)) * self.up.base_module(x)))

    model = TinyLM()
    model.mlp.up = nnx.LoRA(
        H, 2, 12, base_module=model.mlp.up, rngs=nnx.Rngs(3), b_initializer=nnx.initializers.normal(0.3)
    )
    return dict(model=model, batch=tokens(), tile=tile, wrt=nnx.LoRAParam)


@fault("gradient", "head.kernel", "error 3.1e+01")
def head_gradient_32_fold() -> dict[str, Any]:
    """DeepSpeed D-DS2."""

    def tile(model: Any) -> None:
        calls(model, lambda self, x: x @ scaled(32.0, self.head.kernel[...]), "logits")

    return dict(model=TinyLM(), batch=tokens(), tile=tile)


@fault("gradient", "embed.embedding")
def tied_weight_with_half_its_gradient() -> dict[str, Any]:
    """The head takes a copy, whose gradient goes nowhere."""

    def tile(model: Any) -> None:
        calls(model, lambda self, x: x @ jax.lax.stop_gradient(self.embed.embedding[...]).T, "logits")

    return dict(model=TinyLM(tied=True), batch=tokens(), tile=tile)


@fault("forward", "attention")
def packing_leaks() -> dict[str, Any]:
    """trl#6843, axolotl#3608."""

    def tile(model: Any) -> None:
        kind = type(model.attention)
        calls(model.attention, lambda self, x, document, padding: kind.__call__(self, x))

    return dict(model=TinyLM(), batch=tokens(document=jnp.broadcast_to(jnp.arange(T) // 6, (2, T))), tile=tile)


@fault("forward", "attention")
def context_axis_is_off() -> dict[str, Any]:
    """Megatron-Bridge#2667."""

    def tile(model: Any) -> None:
        model.attention.windows = 2

    return dict(model=TinyLM(), batch=tokens(), tile=tile)


@fault("forward", "mlp")
def wrong_activation() -> dict[str, Any]:
    """The one formula of gelu for the other."""

    def runs_with(approximate: bool) -> Callable[[Any], None]:
        def change(model: Any) -> None:
            calls(model.mlp, lambda self, x: self.down(jax.nn.gelu(self.gate(x), approximate) * self.up(x)))

        return change

    return dict(model=TinyLM(), batch=tokens(), plain=runs_with(False), tile=runs_with(True))


@fault("loss", "loss")
def ignored_labels_counted_in_the_mean() -> dict[str, Any]:
    """The sum is divided by all tokens."""

    def tile(model: Any) -> None:
        calls(model, lambda self, x, labels: cross_entropy(self.logits(x), labels, counted=True), "loss")

    labels = jnp.where(jnp.arange(T) % 3 == 0, -100, tokens()["ids"])
    return dict(model=TinyLM(), batch=tokens(labels=labels), tile=tile)


@fault("loss", "loss")
def labels_shifted_twice() -> dict[str, Any]:
    """By the loader and by the model."""

    def tile(model: Any) -> None:
        calls(model, lambda self, x, labels: cross_entropy(self.logits(x), jnp.roll(labels, -1, 1)), "loss")

    return dict(model=TinyLM(), batch=tokens(), tile=tile)


@fault("gradient", "mlp.down.bias")
def last_shard_dropped() -> dict[str, Any]:
    """DeepSpeed D-DS1."""

    def tile(model: Any) -> None:
        def call(self: Any, x: jax.Array) -> jax.Array:
            y = MLP.__call__(self, x)
            return jnp.concatenate([y[:, :12], jax.lax.stop_gradient(y[:, 12:])], 1)

        calls(model.mlp, call)

    return dict(model=TinyLM(), batch=tokens(), tile=tile)


@fault("buffer", "mlp.calls", "4, 1 untiled")
def state_updated_once_a_shard() -> dict[str, Any]:
    """A statistic that a module keeps moves with every shard."""

    def counted(self: Any, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return MLP.__call__(self, x)

    def plain(model: Any) -> None:
        calls(model.mlp, counted)

    def tile(model: Any) -> None:
        calls(model.mlp, lambda self, x: jnp.concatenate([counted(self, a) for a in jnp.split(x, 4, 1)], 1))

    model = TinyLM()
    model.mlp.calls = nnx.BatchStat(jnp.asarray(0, jnp.int32))
    return dict(model=model, batch=tokens(), plain=plain, tile=tile)


def gradients_of(model: nnx.Module, batch: Any) -> tuple[jax.Array, Any]:
    return nnx.value_and_grad(lambda model: model(**batch))(model)


@fault("gradient", "head.kernel", "error 5.0e-01")
def accumulation_divides_twice() -> dict[str, Any]:
    """The mean of micro-batches, divided by their number again."""

    def step(model: Any, batch: Any) -> Any:
        halves = [jax.tree.map(lambda a, n=n: jnp.split(a, 2)[n], batch) for n in range(2)]
        (one, first), (other, second) = (gradients_of(model, half) for half in halves)
        return (one + other) / 2, jax.tree.map(lambda a, b: (a + b) / 2 / 2, first, second)

    def whole(model: Any, batch: Any) -> Any:
        return model(**batch)

    return dict(model=TinyLM(), batch=tokens(4), tile=lambda model: model, step=step, plain_step=whole)


@jax.custom_vjp
def summed_in_16_bits(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _backward(kept: Any, dy: jax.Array) -> Any:
    x, w = kept
    pairs = x.reshape(-1, 1, H), dy.reshape(-1, 1, H)
    dw, _ = jax.lax.scan(lambda dw, pair: (dw + pair[0].T @ pair[1], None), jnp.zeros_like(w), pairs)
    return dy @ w.T, dw


summed_in_16_bits.defvjp(lambda x, w: (x @ w, (x, w)), _backward)


@fault("gradient", "kernel")
def weight_gradient_summed_in_bfloat16() -> dict[str, Any]:
    """torch_peers 5.5: plain `lax.scan` sums in the dtype of the parameter."""
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = nnx.Linear(H, H, use_bias=False, rngs=nnx.Rngs(0), **kinds)
    x = jnp.abs(jax.random.normal(jax.random.key(1), (1, 256, H))).astype(jnp.bfloat16)

    def tile(model: Any) -> None:
        calls(model, lambda self, x: summed_in_16_bits(x, self.kernel[...]))

    def step(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x).astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32))

    return dict(model=model, batch=x, tile=tile, step=step)


@fault("gradient", "down.bias", "error 1.0e+00")
def forgotten_bias_gradient_of_a_function() -> dict[str, Any]:
    """transformers' kernels D-HF2, in linen."""
    module = LinenMLP()
    variables = module.init(jax.random.key(0), states())

    def tile(pair: Any) -> Any:
        apply, variables = pair

        def without(variables: Any, x: jax.Array) -> jax.Array:
            down = variables["params"]["down"]
            frozen = down | {"bias": jax.lax.stop_gradient(down["bias"])}
            return apply({"params": variables["params"] | {"down": frozen}}, x)

        return without, variables

    return dict(model=(module.apply, variables), batch=states(), tile=tile)
