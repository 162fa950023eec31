"""What users do to a model in JAX: precision and random numbers. See jax_habits.py."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization
from flax.training.train_state import TrainState

from tests.habits.jax_habits import (
    IDS,
    SHARDS,
    H,
    Habit,
    I,
    PlainLinenMLP,
    X,
    check_habit,
    every_habit,
    habit,
    loss_of,
    of_step,
)
from tiled_jax import linen

# Precision.


@habit("mlp", "block", deep="mlp block")
def casts_parameters_to_bfloat16(model: Any) -> Any:
    """Weights that bfloat16 holds, and computes in float32 with them."""
    graph, params = nnx.split(model)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    return {"loss": jax.jit(lambda p: loss_of(nnx.merge(graph, p), IDS))(half)}


@habit("module", deep="module")
def rounds_weights_inside_the_loss(model: Any) -> Any:
    """As in training for fewer bits: rounded forward, straight through backward."""
    graph, params = nnx.split(model)

    def rounded(a: jax.Array) -> jax.Array:
        return a + jax.lax.stop_gradient(a.astype(jnp.bfloat16).astype(a.dtype) - a)

    def loss(params: Any) -> jax.Array:
        return loss_of(nnx.merge(graph, jax.tree.map(rounded, params)), IDS)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    return {"loss": value, "gradients": gradients}


@habit("theirs", deep="theirs")
def gives_inputs_in_bfloat16(model: Any) -> Any:
    return {"y": model.layers[0].mlp(X[..., :8].astype(jnp.bfloat16))}


@habit("module", deep="module")
def computes_in_float64(model: Any) -> Any:
    with jax.enable_x64(True):
        graph, params = nnx.split(model)
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        run = lambda p: nnx.merge(graph, p)(X.astype(jnp.float64))  # noqa: E731
        loss, gradients = jax.jit(jax.value_and_grad(run))(wide)
        return {"loss": loss, "gradients": gradients}


# linen.


@cache
def initialised(model: Any) -> Any:
    return jax.jit(model.init)(jax.random.key(0), X)


@habit("linen", deep="linen")
def trains_with_a_train_state(model: Any) -> Any:
    state = TrainState.create(apply_fn=model.apply, params=initialised(model)["params"], tx=optax.adam(1e-2))

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: state.apply_fn({"params": p}, x))(state.params)
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for x in (X, 2 * X):
        state, loss = step(state, x)
        losses.append(loss)
    return {"losses": losses, "parameters": state.params}


@habit("linen")
def saves_bytes(model: Any) -> Any:
    variables = initialised(model)
    read = serialization.from_bytes(jax.tree.map(jnp.zeros_like, variables), serialization.to_bytes(variables))
    return {"loss": model.apply(read, X), "variables": read}


@habit("linen")
def binds(model: Any) -> Any:
    bound = model.bind(initialised(model))
    module, variables = bound.mlp.unbind()
    return {"y": bound.mlp(X), "again": module.apply(variables, X), "loss": bound(X)}


@habit("linen")
def captures_intermediates(model: Any) -> Any:
    loss, kept = model.apply(initialised(model), X, capture_intermediates=True)
    return {"loss": loss, "kept": kept}


@habit("linen", deep="linen")
def freezes_with_labels(model: Any) -> Any:
    params = initialised(model)["params"]
    labels = {
        name: jax.tree.map(lambda _, n=name: "on" if n == "mlp" else "off", tree) for name, tree in params.items()
    }
    transform = optax.multi_transform({"on": optax.adam(1e-2), "off": optax.set_to_zero()}, labels)
    gradients = jax.jit(jax.grad(lambda p: model.apply({"params": p}, X)))(params)
    updates, _ = transform.update(gradients, transform.init(params), params)
    return {"gradients": gradients, "parameters": optax.apply_updates(params, updates)}


@habit("linen", deep="linen")
def becomes_an_nnx_module(model: Any) -> Any:
    made = nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(X)
    loss, gradients = nnx.jit(nnx.value_and_grad(lambda made: made(X)))(made)
    return {"loss": loss, "gradients": nnx.state(gradients, nnx.Param)}


@habit("linen")
def normalizes_weights(model: Any) -> Any:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            named: dict[str, Any] = {"name": "inner"}
            plain = model.form == "plain"
            inner = PlainLinenMLP(**named) if plain else linen.TiledMLP(H, I, num_shards=SHARDS, **named)
            return nn.WeightNorm(inner)(x)

    made = Normed()
    variables = made.init(jax.random.key(0), X)
    gradients = jax.grad(lambda v: jnp.sum(jnp.square(jnp.asarray(made.apply(v, X)))))(variables)
    return {"y": made.apply(variables, X), "gradients": gradients}


# Random numbers.


def with_dropout(model: Any) -> Any:
    """A dropout layer behind each MLP: one stream, drawn once a call."""
    for i, layer in enumerate(model.layers):
        layer.mlp = nnx.Sequential(layer.mlp, nnx.Dropout(0.5, rngs=nnx.Rngs(i)))
    return model


@habit("theirs", deep="theirs")
def drops_behind_the_mlp(model: Any) -> Any:
    with_dropout(model)
    found = [of_step(model), of_step(model)]
    model.eval()
    return [*found, loss_of(model)]


@pytest.mark.deep_but(16)
@every_habit(__name__)
def test_habit(do: Habit, form: str) -> None:
    check_habit(do, form)
