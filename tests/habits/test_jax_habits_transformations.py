"""What users do to a model in JAX: batches and JAX's transformations. See jax_habits.py."""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.habits.jax_habits import (
    IDS,
    LABELS,
    OTHER_IDS,
    SHARDS,
    H,
    Habit,
    I,
    X,
    check_habit,
    copied,
    evaluated,
    every_habit,
    habit,
    logits_of,
    loss_of,
    of_step,
    stacked,
    stepped,
)
from tiled_jax import TiledMLP
from tiled_jax.models.mlp import PlainMLP

# Batches.


@habit("mlp", deep="mlp")
def gives_labels_without_a_sign(model: Any) -> Any:
    return {"loss": evaluated(model, {"input_ids": IDS, "labels": IDS.astype(jnp.uint16)})}


@habit("mlp", deep="mlp")
def ignores_all_of_a_row(model: Any) -> Any:
    return of_step(model, {"input_ids": IDS, "labels": LABELS.at[1].set(-100)})


@habit("mlp", deep="mlp")
def pads_on_the_left(model: Any) -> Any:
    mask = jnp.ones((2, 9), jnp.int32).at[1, :3].set(0)
    labels = jnp.where(mask == 0, -100, IDS)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    return of_step(model, {"input_ids": IDS, "labels": labels, "attention_mask": mask, "position_ids": positions})


@habit("mlp", deep="mlp")
def packs_documents_by_position(model: Any) -> Any:
    positions = jnp.asarray([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 0]])
    return of_step(model, {"input_ids": IDS, "labels": IDS, "position_ids": positions})


@habit("mlp", deep="mlp")
def has_a_last_small_batch(model: Any) -> Any:
    return [evaluated(model, IDS), evaluated(model, IDS[:1, :5])]


@habit("mlp", deep="mlp")
def gives_numpy_arrays(model: Any) -> Any:
    ids = np.asarray(IDS, np.int64)
    return {"logits": logits_of(model, ids), "loss": stepped(model, jnp.asarray(ids))[0]}


@habit("mlp", "block", deep="mlp block")
def computes_its_loss_from_logits(model: Any) -> Any:
    logits = logits_of(model, IDS % 16)
    return {"logits": logits, "best": logits.argmax(-1), "loss": optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], IDS[:, 1:] % 16).mean()}  # fmt: skip


# Transformations.


@habit("module", deep="module")
def runs_without_jit(model: Any) -> Any:
    loss, gradients = nnx.value_and_grad(loss_of)(model, IDS)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def trains_in_one_program_that_donates(model: Any) -> Any:
    graph, params = nnx.split(model)
    transform = optax.sgd(0.3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), ids))(params)
        updates, state = transform.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    params, state = copied(params), transform.init(params)
    losses = []
    for ids in (IDS, OTHER_IDS):
        params, state, loss = step(params, state, ids)
        losses.append(loss)
    return {"parameters": params, "losses": losses}


@habit("module", deep="module")
def trains_in_a_scan_over_batches(model: Any) -> Any:
    graph, params = nnx.split(model)

    @jax.jit
    def run(params: Any, batches: jax.Array) -> Any:
        def step(params: Any, ids: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(lambda p: loss_of(nnx.merge(graph, p), ids))(params)
            return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients), loss

        return jax.lax.scan(step, params, batches)

    params, losses = run(params, jnp.stack([IDS, OTHER_IDS]))
    return {"parameters": params, "losses": losses}


@habit("module", deep="module")
def trains_as_nnx_objects_in_one_program(model: Any) -> Any:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, ids: jax.Array) -> jax.Array:
        loss, gradients = nnx.value_and_grad(loss_of)(model, ids)
        optimizer.update(model, gradients)
        return loss

    cached = nnx.cached_partial(step, model, optimizer)
    losses = [cached(ids) for ids in (IDS, OTHER_IDS)]
    return {"losses": losses, "parameters": nnx.state(model)}


@habit("module", deep="module")
def recomputes_the_whole_model(model: Any) -> Any:
    @nnx.jit
    def run(model: Any) -> Any:
        return nnx.value_and_grad(nnx.remat(lambda model: loss_of(model, IDS)))(model)

    loss, gradients = run(model)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def checkpoints_with_a_policy(model: Any) -> Any:
    graph, params = nnx.split(model)
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    run = jax.checkpoint(lambda params: loss_of(nnx.merge(graph, params), IDS), policy=policy)
    loss, gradients = jax.jit(jax.value_and_grad(run))(params)
    return {"loss": loss, "gradients": gradients}


@habit("module", deep="module")
def runs_modules_of_several_seeds_at_once(model: Any) -> Any:
    graph, params = nnx.split(model)
    several = jax.tree.map(lambda a: jnp.stack([a, 1.5 * a, 0.5 * a]), params)
    losses, gradients = jax.jit(jax.vmap(jax.value_and_grad(lambda p: nnx.merge(graph, p)(X))))(several)
    return {"losses": losses, "gradients": gradients}


@habit("module", deep="module")
def maps_over_the_batch(model: Any) -> Any:
    axes = nnx.StateAxes({...: None})
    return {"losses": nnx.jit(nnx.vmap(lambda m, x, t: m(x, t), in_axes=(axes, 0, 0)))(model, X, LABELS)}


@habit("module", deep="module")
def scans_over_stacked_modules(model: Any) -> Any:
    kind = PlainMLP if isinstance(model.mlp, PlainMLP) else partial(TiledMLP, num_shards=SHARDS)
    layers = stacked(lambda rngs: kind(H, I, rngs=rngs))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def through(x: jax.Array, layer: Any) -> jax.Array:
        return x + layer(x)

    loss, gradients = nnx.jit(nnx.value_and_grad(lambda layers, x: model(through(x, layers))))(layers, X)
    return {"loss": loss, "gradients": nnx.state(gradients)}


@habit("module", deep="module")
def takes_gradients_of_inputs(model: Any) -> Any:
    graph, params = nnx.split(model)
    of = jax.jit(jax.grad(lambda p, x: nnx.merge(graph, p)(x), argnums=(0, 1)))(params, X)
    return {"gradients": of[0], "gradient_of_x": of[1]}


@habit("module", deep="module")
def multiplies_by_the_hessian(model: Any) -> Any:
    graph, params = nnx.split(model)
    loss = lambda p: loss_of(nnx.merge(graph, p), LABELS)  # noqa: E731
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), params)
    gradients, product = jax.jit(lambda p, v: jax.jvp(jax.grad(loss), (p,), (v,)))(params, direction)
    return {"gradients": gradients, "product": product}


@habit("module", deep="module")
def differentiates_forward(model: Any) -> Any:
    graph, params = nnx.split(model)
    direction = jax.tree.map(lambda a: jnp.ones_like(a), params)
    value, slope = jax.jit(lambda p, v: jax.jvp(lambda p: loss_of(nnx.merge(graph, p), IDS), (p,), (v,)))(
        params, direction
    )
    return {"loss": value, "slope": slope}


@habit("module", deep="module")
def compiles_ahead_of_time(model: Any) -> Any:
    graph, params = nnx.split(model)
    step = jax.jit(jax.value_and_grad(lambda p, ids: loss_of(nnx.merge(graph, p), ids)))
    compiled = step.lower(params, jax.ShapeDtypeStruct(IDS.shape, IDS.dtype)).compile()
    loss, gradients = compiled(params, IDS)
    return {"loss": loss, "gradients": gradients}


@habit("module")
def exports(model: Any) -> Any:
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    run = jax.jit(lambda *leaves: loss_of(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), IDS))
    return {"loss": jax.export.export(run)(*leaves).call(*leaves)}


@habit("mlp", "block", deep="block mlp")
def evaluates_between_steps(model: Any) -> Any:
    optimizer, found = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param), []
    for batch in (IDS, OTHER_IDS):
        model.train()
        optimizer.update(model, stepped(model, batch)[1])
        model.eval()
        found.append(logits_of(model, IDS))
    return found


@habit("mlp", "block", "theirs", deep="block theirs")
def goes_on_after_an_error(model: Any) -> Any:
    for wrong in (IDS.astype(jnp.float32), IDS[0, 0]):
        with contextlib.suppress(Exception):
            stepped(model, wrong)
            raise AssertionError
    return of_step(model)


@pytest.mark.deep_but(1)
@every_habit(__name__)
def test_habit(do: Habit, form: str) -> None:
    check_habit(do, form)
