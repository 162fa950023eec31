"""What users do to a model in JAX: optimizers, frozen parameters and adapters. See jax_habits.py."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from tests.habits.jax_habits import (
    IDS,
    LAYERS,
    MODELS,
    OTHER_IDS,
    SHARDS,
    VOCAB,
    H,
    Habit,
    I,
    check_habit,
    copied,
    evaluated,
    every_habit,
    habit,
    loss_of,
    noisy,
    of_step,
    stacked,
    stepped,
    trained,
)
from tiled_jax import TiledMLP, tiling_paths
from tiled_jax.models import Llama
from tiled_jax.models.mlp import PlainMLP

# Optimizers.


@habit("mlp", "block", "module", "theirs", deep="mlp block theirs")
def trains_with_adamw_and_a_schedule(model: Any) -> Any:
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 1, 4)
    return trained(model, optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule, weight_decay=0.1)))


@habit("mlp", "block", deep="block")
def trains_with_momentum(model: Any) -> Any:
    return trained(model, optax.sgd(0.1, momentum=0.9, nesterov=True))


@habit("block", "module", deep="block")
def trains_with_lion(model: Any) -> Any:
    return trained(model, optax.lion(1e-3))


@habit("module", deep="module")
def accumulates_with_multi_steps(model: Any) -> Any:
    return trained(model, optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2), batches=(IDS, OTHER_IDS, IDS, IDS))


@habit("block", "module", deep="block")
def masks_weight_decay_of_vectors(model: Any) -> Any:
    mask = lambda params: jax.tree.map(lambda a: a.ndim > 2, params)  # noqa: E731
    return trained(model, optax.adamw(1e-2, weight_decay=0.5, mask=mask))


@habit("mlp", "block", deep="block")
def gives_each_part_an_optimizer(model: Any) -> Any:
    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "mlp" if "mlp" in str(path) else "rest", params)

    return trained(model, optax.multi_transform({"mlp": optax.sgd(0.1), "rest": optax.adam(1e-2)}, labels))


@habit("mlp", "module")
def adds_gradients_of_micro_batches(model: Any) -> Any:
    found = [stepped(model, batch)[1] for batch in (IDS, OTHER_IDS)]
    total = jax.tree.map(lambda a, b: (a + b) / 2, *found)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    optimizer.update(model, total)
    return {"parameters": nnx.state(model), "gradients": nnx.state(total)}


@habit("block", "theirs", deep="block theirs")
def keeps_a_moving_average(model: Any) -> Any:
    average, optimizer = copied(nnx.state(model, nnx.Param)), nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    for batch in (IDS, OTHER_IDS):
        optimizer.update(model, stepped(model, batch)[1])
        average = optax.incremental_update(nnx.state(model, nnx.Param), average, 0.1)
    nnx.update(model, average)
    return {"loss": stepped(model, IDS)[0], "average": average}


@habit("mlp", deep="mlp")
def trains_a_flat_vector(model: Any) -> Any:
    graph, state = nnx.split(model)
    flat, unravel = ravel_pytree(state)
    for batch in (IDS, OTHER_IDS):
        gradient, _ = ravel_pytree(nnx.state(stepped(nnx.merge(graph, unravel(flat)), batch)[1]))
        flat = flat - 0.1 * gradient
    return {"parameters": flat, "loss": stepped(nnx.merge(graph, unravel(flat)), IDS)[0]}


# Freezing.


@habit("mlp", "block", deep="block")
def trains_a_part_by_its_path(model: Any) -> Any:
    part = nnx.All(nnx.Param, nnx.PathContains("mlp"))
    return trained(model, optax.adam(1e-2), wrt=part)


@habit("theirs", deep="theirs")
def differentiates_a_part_by_its_path(model: Any) -> Any:
    part = nnx.All(nnx.Param, nnx.PathContains("mlp"))
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, part)))(model, IDS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=part)
    optimizer.update(model, gradients)
    return {"loss": loss, "gradients": nnx.state(gradients), "parameters": nnx.state(model)}


@habit("mlp", deep="mlp")
def differentiates_the_norms_alone(model: Any) -> Any:
    part = nnx.DiffState(0, lambda path, _: "scale" in path)
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=part))(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


class Frozen(nnx.Variable[Any]):
    """What no filter for nnx.Param finds."""


@habit("module", deep="module")
def freezes_by_type_of_variable(model: Any) -> Any:
    model.mlp.w_up = Frozen(model.mlp.w_up[...])
    model.norm.scale = Frozen(model.norm.scale[...])
    loss, gradients = stepped(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("mlp", "block", deep="block")
def sets_gradients_of_a_part_to_zero(model: Any) -> Any:
    kept = optax.masked(
        optax.set_to_zero(), lambda p: jax.tree_util.tree_map_with_path(lambda k, _: "embed" in str(k), p)
    )
    return trained(model, optax.chain(kept, optax.sgd(0.3)))


# Adapters. The second factor of each is drawn: at zero it has no effect.


def with_lora(plain: Any) -> Any:
    """The same stack of linear layers, each with an adapter."""
    sizes = plain.in_features, plain.out_features
    made = stacked(lambda rngs: nnx.LoRALinear(*sizes, lora_rank=2, use_bias=False, rngs=rngs))
    made.kernel = plain.kernel
    return made


def of_adapters(model: Any) -> dict[str, Any]:
    """Loss and gradients, of all and of the adapters alone."""
    part = nnx.DiffState(0, nnx.LoRAParam)
    loss, gradients = nnx.jit(nnx.value_and_grad(loss_of, argnums=part))(model, IDS)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    optimizer.update(model, gradients)
    return {"loss": loss, "gradients": nnx.state(gradients), "parameters": nnx.state(model)}


@habit("block", deep="block")
def adapts_projections_of_attention(model: Any) -> Any:
    attention = model.layers.attention
    attention.q, attention.v = with_lora(attention.q), with_lora(attention.v)
    return of_adapters(model)


@habit("mlp", deep="mlp")
def wraps_the_output_of_attention(model: Any) -> Any:
    kernel = model.layers.attention.o.kernel

    def make(rngs: nnx.Rngs) -> Any:
        return nnx.LoRA(H, 2, H, base_module=nnx.Linear(H, H, use_bias=False, rngs=rngs), rngs=rngs)

    model.layers.attention.o = stacked(make)
    model.layers.attention.o.base_module.kernel = kernel
    return of_adapters(model)


class LayersMLP(nnx.Module):
    """An MLP of three layers that are called."""

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        self.gate, self.up, self.down = gate, up, down

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


@habit("block", deep="block")
def adapts_projections_of_the_mlp(model: Any) -> Any:
    def layers(rngs: nnx.Rngs) -> Any:
        linear = partial(nnx.LoRALinear, lora_rank=2, use_bias=False, rngs=rngs)
        made = linear(H, I), linear(H, I), linear(I, H)
        return LayersMLP(*made) if plain else TiledMLP.from_linears(*made, num_shards=SHARDS)

    holder = model.layers if isinstance(model, Llama) else model
    plain = isinstance(holder.mlp, PlainMLP)
    holder.mlp = stacked(layers) if isinstance(model, Llama) else noisy(layers(nnx.Rngs(1)))
    return of_adapters(model)


@habit("theirs", deep="theirs")
def adapts_a_projection_of_their_mlp(model: Any) -> Any:
    for i, name in enumerate(("gate_proj", "down_proj")):
        plain = getattr(model.layers[i].mlp, name)
        sizes = plain.in_features, 2, plain.out_features
        setattr(model.layers[i].mlp, name, noisy(nnx.LoRA(*sizes, base_module=plain, rngs=nnx.Rngs(3))))
    return of_adapters(model)


@habit("mlp", deep="mlp")
def adapts_the_head(model: Any) -> Any:
    plain = model.head
    model.head = noisy(nnx.LoRALinear(H, VOCAB, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1)))
    model.head.kernel = plain.kernel
    return of_adapters(model)


@habit("mlp", deep="mlp")
def wraps_the_head(model: Any) -> Any:
    model.head = noisy(nnx.LoRA(H, 2, VOCAB, base_module=model.head, rngs=nnx.Rngs(1)))
    return of_adapters(model)


@habit("mlp", deep="mlp")
def gives_the_head_a_bias(model: Any) -> Any:
    kernel = model.head.kernel
    model.head = noisy(nnx.Linear(H, VOCAB, rngs=nnx.Rngs(0)))
    model.head.kernel = kernel
    return {"loss": evaluated(model, IDS)}


@habit("mlp", "block", deep="block")
def merges_an_adapter(model: Any) -> Any:
    a, b = (jnp.asarray(RANDOM_OF[name]) for name in ("a", "b"))
    model.layers.mlp.w_up[...] += a @ b
    return of_step(model)


RANDOM_OF = {
    "a": np.full((LAYERS, H, 2), 0.1, np.float32),
    "b": np.linspace(-1, 1, 2 * I, dtype=np.float32).reshape(2, I),
}


def test_the_models_are_tiled() -> None:
    """And the untiled ones are not."""
    paths = {
        "mlp": {"layers.mlp": "tiled_mlp"},
        "block": {"layers": "tiled_block"},
        "module": {"mlp": "tiled_mlp"},
        "theirs": {f"layers.{i}.mlp": "tiled_mlp" for i in range(LAYERS)},
    }
    for form, expected in paths.items():
        assert tiling_paths(MODELS[form](form)) == expected
        assert tiling_paths(MODELS[form]("plain")) == {}


@pytest.mark.deep_but(7)
@every_habit(__name__)
def test_habit(do: Habit, form: str) -> None:
    check_habit(do, form)
