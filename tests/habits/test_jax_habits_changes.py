"""What users do to a model in JAX: copies, state, and changes of weights and parts. See jax_habits.py."""

import copy
import io
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.habits.jax_habits import (
    IDS,
    MODELS,
    OTHER_IDS,
    VOCAB,
    H,
    Habit,
    X,
    check_habit,
    evaluated,
    every_habit,
    habit,
    of_step,
    stepped,
)
from tests.models.jax_other_models import Decoder
from tiled_jax.models import Llama

# Copies and state.


@habit("mlp", "block", "module", "theirs", deep="block theirs")
def splits_and_merges(model: Any) -> Any:
    return of_step(nnx.merge(*nnx.split(model)))


@habit("mlp", "block", "module", "theirs", deep="block theirs")
def clones_and_copies(model: Any) -> Any:
    twins = [nnx.clone(model), copy.deepcopy(model)]
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))  # each has weights of its own
    return [of_step(twin) for twin in twins]


@habit("mlp", "block", deep="block")
def pickles(model: Any) -> Any:
    return of_step(pickle.loads(pickle.dumps(model)))


@habit("module")
def pickles_state(model: Any) -> Any:
    graph, state = nnx.split(model)
    return of_step(nnx.merge(graph, pickle.loads(pickle.dumps(jax.device_get(state)))))


@habit("mlp", "block", "theirs", deep="block theirs")
def saves_a_pure_dictionary(model: Any) -> Any:
    state = nnx.state(model)
    pure = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    nnx.update(model, jax.tree.map(jnp.zeros_like, state))
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(model, state)
    return {"keys": {str(path): 1 for path in nnx.traversals.flatten_mapping(pure)}} | of_step(model)


@habit("block", deep="block")
def saves_arrays_by_path(model: Any) -> Any:
    file = io.BytesIO()
    arrays: Any = {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(nnx.state(model))}
    np.savez(file, **arrays)
    file.seek(0)
    read = np.load(file)
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    flat = [(p, v.replace(jnp.asarray(read["/".join(map(str, p))]))) for p, v in nnx.to_flat_state(nnx.state(model))]
    nnx.update(model, nnx.from_flat_state(flat))
    return {"names": sorted(read).index("head/kernel"), **of_step(model)}


@habit("mlp", "module", "theirs", deep="theirs")
def goes_on_from_a_saved_optimizer(model: Any) -> Any:
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    optimizer.update(model, stepped(model, IDS)[1])
    saved = jax.device_get((nnx.state(model), nnx.state(optimizer)))
    again = nnx.clone(model)
    twin = nnx.Optimizer(again, optax.adam(1e-2), wrt=nnx.Param)
    nnx.update(again, jax.tree.map(jnp.asarray, saved[0]))
    nnx.update(twin, jax.tree.map(jnp.asarray, saved[1]))
    twin.update(again, stepped(again, OTHER_IDS)[1])
    return {"parameters": nnx.state(again), "optimizer": nnx.state(twin)}


@habit("mlp", "block", "theirs", deep="block theirs")
def loads_what_the_untiled_model_saved(model: Any) -> Any:
    kind = MODELS["theirs" if isinstance(model, Decoder) else "mlp"]
    other = kind("plain")
    nnx.update(model, jax.tree.map(lambda a: 1.5 * a, nnx.state(other)))
    return of_step(model)


@habit("mlp", "block", deep="block")
def scales_all_of_a_state(model: Any) -> Any:
    graph, state = nnx.split(model)
    return of_step(nnx.merge(graph, jax.tree.map(lambda a: 0.5 * a, state)))


@habit("mlp", "module", "theirs", deep="theirs mlp")
def asks_for_shapes_first(model: Any) -> Any:
    shapes = nnx.eval_shape(lambda: nnx.clone(model))
    graph, state = nnx.split(shapes)
    values = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), state)
    return of_step(nnx.merge(graph, values)) | {"shapes": [list(a.shape) for a in jax.tree.leaves(state)]}


@habit("module", deep="module")
def asks_for_a_table(model: Any) -> Any:
    return {"rows": "mlp" in nnx.tabulate(model, X, console_kwargs={"width": 300}), **of_step(model)}


@habit("mlp", "block")
def counts_parameters(model: Any) -> Any:
    state = nnx.state(model)
    return {
        "parameters": sum(a.size for a in jax.tree.leaves(state)),
        "bytes": sum(a.nbytes for a in jax.tree.leaves(state)),
    }


# Changes of weights and parts.


@habit("mlp", "block", deep="block")
def changes_weights_in_place(model: Any) -> Any:
    first = of_step(model)
    model.layers.mlp.w_down[...] *= 0.5
    model.layers.attention.q.kernel[...] += 0.1
    model.head.kernel[...] = model.head.kernel[...].at[0].set(0.3)
    return [first, of_step(model)]


@habit("mlp", "block", deep="block")
def assigns_a_new_parameter(model: Any) -> Any:
    first = of_step(model)
    model.layers.mlp.w_gate = nnx.Param(jnp.flip(model.layers.mlp.w_gate[...], -1))
    model.layers.mlp_norm.scale = nnx.Param(2 * model.layers.mlp_norm.scale[...])
    model.norm.scale = nnx.Param(2 * model.norm.scale[...])
    return [first, of_step(model)]


@habit("module", deep="module")
def shares_one_parameter_of_two_names(model: Any) -> Any:
    model.mlp.w_gate = model.mlp.w_up
    return of_step(model)


@habit("mlp", deep="mlp")
def ties_the_head_to_the_embedding(model: Any) -> Any:
    model.head = None
    return of_step(model)


@habit("theirs", deep="theirs")
def shares_one_mlp_between_layers(model: Any) -> Any:
    model.layers[1].mlp = model.layers[0].mlp
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def makes_the_vocabulary_larger(model: Any) -> Any:
    more = jnp.full((8, H), 0.1)
    model.embed.embedding = nnx.Param(jnp.concatenate([model.embed.embedding[...], more]))
    model.head.kernel = nnx.Param(jnp.concatenate([model.head.kernel[...], more.T], axis=1))
    return {"loss": evaluated(model, IDS.at[0, 0].set(VOCAB + 2))}


class Doubled(nnx.Linear):
    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        return 2.0 * super().__call__(*args, **options)


@habit("mlp", "block", deep="mlp block")
def replaces_linear_layers_by_a_subclass(model: Any) -> Any:
    model.layers.attention.k.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def replaces_the_head_by_a_subclass(model: Any) -> Any:
    model.head.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def replaces_a_projection_of_their_mlp_by_a_subclass(model: Any) -> Any:
    model.layers[0].mlp.up_proj.__class__ = Doubled
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def changes_their_activation(model: Any) -> Any:
    first = evaluated(model, IDS)
    model.layers[1].mlp.activation = nnx.relu
    return [first, evaluated(model, IDS)]


@habit("mlp", deep="mlp")
def takes_layers_out(model: Any) -> Any:
    graph, state = nnx.split(model.layers)
    model.layers = nnx.merge(graph, jax.tree.map(lambda a: a[:1], state))
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def ties_the_head_by_a_module(model: Any) -> Any:
    class Tied(nnx.Module):
        def __init__(self, embed: Any) -> None:
            self.embed = embed

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.embed.attend(x)

    model.head = Tied(model.embed)
    return {"loss": evaluated(model, IDS)}


class Tempered(Llama):
    def logits(self, hidden: jax.Array) -> jax.Array:
        return 0.5 * super().logits(hidden)


@habit("mlp", deep="mlp")
def overrides_logits(model: Any) -> Any:
    object.__setattr__(model, "__class__", Tempered)
    return {"loss": evaluated(model, IDS)}


@habit("mlp", deep="mlp")
def keeps_the_head_in_bfloat16(model: Any) -> Any:
    model.head.kernel = nnx.Param(model.head.kernel[...].astype(jnp.bfloat16))
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def makes_their_mlp_wider(model: Any) -> Any:
    part = model.layers[0].mlp
    for layer in (part.gate_proj, part.up_proj):
        layer.kernel = nnx.Param(jnp.concatenate([layer.kernel[...], 0.1 + layer.kernel[...]], axis=1))
    part.down_proj.kernel = nnx.Param(jnp.concatenate([part.down_proj.kernel[...]] * 2, axis=0))
    return {"loss": evaluated(model, IDS)}


@habit("theirs", deep="theirs")
def swaps_their_projections(model: Any) -> Any:
    part = model.layers[0].mlp
    part.gate_proj, part.up_proj = part.up_proj, part.gate_proj
    return of_step(model)


@pytest.mark.deep_but(8)
@every_habit(__name__)
def test_habit(do: Habit, form: str) -> None:
    check_habit(do, form)
