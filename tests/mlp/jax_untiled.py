"""The MLP and the loss without shards, as anyone would write them, and what differentiates them: the things to compare
with."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.config import LossOptions, LossResult

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda a: jax.nn.gelu(a, approximate=False),
    "gelu_tanh": lambda a: jax.nn.gelu(a, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda a: jnp.square(jax.nn.relu(a)),
}


def mlp(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    activation: str = "silu",
    biases: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    def linear(name: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.dot(x, w, precision="highest")
        return y + biases[name] if biases and name in biases else y

    up = linear("up", x, w_up)
    act = ACTIVATIONS[activation]
    h = act(up) if w_gate is None else act(linear("gate", x, w_gate)) * up
    return linear("down", h, w_down)


def operands(
    *lead: int, hidden: int = 8, intermediate: int = 12, dtype: Any = None, seed: int = 0, layers: int | None = None
) -> list[Any]:
    """x [*lead, H], w_gate, w_up, w_down; the weights with a leading dim of `layers` where it is given."""
    stack = () if layers is None else (layers,)
    shapes = [(*lead, hidden), *[(*stack, hidden, intermediate)] * 2, (*stack, intermediate, hidden)]
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(shape) / (1 if i == 0 else shape[-2] ** 0.5) for i, shape in enumerate(shapes)]
    return [jnp.asarray(value, dtype or jnp.float64) for value in values]


def y_and_gradients(fn: Callable[..., jax.Array]) -> Callable[..., list[jax.Array]]:
    """y and the gradient of every argument, for an upstream gradient that differs from row to row."""

    def run(*arguments: Any) -> list[jax.Array]:
        y, pull = jax.vjp(fn, *arguments)
        return [y, *pull(jnp.cos(y))]  # of y itself, so that on an Explicit mesh it is sharded as y is

    return run


def cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    bias: jax.Array | None = None,
    *,
    loss: LossOptions = LossOptions(),
) -> Any:
    """What `tiled_linear_cross_entropy` computes, with all logits at once and left to automatic differentiation."""
    z = loss.logit_scale * (jnp.dot(x, weight, precision="highest") + (0 if bias is None else bias))
    if loss.logit_softcap is not None:
        z = loss.logit_softcap * jnp.tanh(z / loss.logit_softcap)
    valid = targets != loss.ignore_index
    labels = jnp.where(valid, targets, 0)
    lse = jax.nn.logsumexp(z, axis=-1)
    log_p = z - lse[..., None]
    omega = jnp.ones(weight.shape[1], z.dtype) if loss.class_weight is None else loss.class_weight
    of_target = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
    smooth = loss.label_smoothing
    each = -(1 - smooth) * omega[labels] * of_target - smooth * jnp.mean(omega * log_p, axis=-1)
    each = jnp.where(valid, each + loss.z_loss * lse**2, 0)
    right = jnp.where(valid & (of_target == jnp.max(log_p, axis=-1)), 1.0, 0.0).astype(z.dtype)
    count = jnp.sum(valid, dtype=z.dtype) if loss.num_valid is None else loss.num_valid
    total = jnp.sum(jnp.where(valid, omega[labels], 0)) if loss.num_valid is None else loss.num_valid
    reduce = {
        "none": lambda a, n: a,
        "sum": lambda a, n: jnp.sum(a),
        "mean": lambda a, n: jnp.sum(a) / n,
    }[loss.reduction]
    outputs = {
        "log_probs": jnp.where(valid, of_target, 0),
        "lse": lse,
        "entropy": -jnp.sum(jnp.exp(log_p) * log_p, axis=-1),
        "accuracy": jax.lax.stop_gradient(reduce(right, count)),
    }
    value = reduce(each, total)
    return LossResult(value, **{name: outputs[name] for name in loss.outputs}) if loss.outputs else value


def loss_operands(*lead: int, hidden: int = 8, vocab: int = 13, dtype: Any = None, seed: int = 0) -> list[Any]:
    """x [*lead, H], weight [H, V] and targets [*lead], every fourth of them ignored."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((*lead, hidden)), rng.standard_normal((hidden, vocab))
    targets = rng.integers(0, vocab, lead)
    targets.reshape(-1)[1::4] = -100
    return [*(jnp.asarray(value, dtype or jnp.float64) for value in values), jnp.asarray(targets, jnp.int32)]
