"""AdamW as the options have it: which parameters decay, the learning rate of each step, and the length of the gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shared_specs.app.finetune.schedule import decays, is_scheduled, learning_rate
from shared_specs.app.finetune.trainer import ADAMW
from shared_specs.app.options import FinetuneOptions


class Clipped(NamedTuple):
    """State of `clip`. gradient_norm: of the last gradients, before they were scaled."""

    gradient_norm: jax.Array


def adamw(options: FinetuneOptions) -> optax.GradientTransformation:
    """Return the optimizer; its state has one count a learning rate that changes, beside that of the moments."""

    def scheduled(count: Any) -> jax.Array:
        return learning_rate(options, jnp.asarray(count, jnp.float32), jnp)

    rate: Any = scheduled if is_scheduled(options) else options.lr
    update = optax.adamw(
        rate, b1=ADAMW.beta1, b2=ADAMW.beta2, eps=ADAMW.eps, weight_decay=options.weight_decay, mask=_decaying
    )
    return update if options.clip is None else optax.chain(clip(options.clip), update)


def clip(longest: float) -> optax.GradientTransformation:
    """Return what scales all gradients down to this norm where they are longer, and keeps the norm that they had.

    It is that of the whole gradients, however they lie on devices: the update sees whole arrays.
    """

    def init(params: Any) -> Any:
        return Clipped(jnp.zeros((), jnp.float32))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates).astype(jnp.float32)
        scale = jnp.minimum(longest / norm, 1.0)
        return jax.tree.map(lambda gradient: gradient * scale.astype(gradient.dtype), updates), Clipped(norm)

    return optax.GradientTransformation(init, update)


def count(state: Any) -> Any:
    """Return the number of updates done: all counts of the state are the same."""
    return optax.tree.get_all_with_path(state, "count")[0][1]


def with_count(state: Any, done: int, placed: Callable[[np.ndarray], jax.Array]) -> Any:
    """Return the state after so many updates, its moments as they are.

    Each count is an array of its own, since a step is donated them all. placed: puts a scalar where those of the state are.
    """
    for name, value in (("count", np.int32(done)), ("gradient_norm", np.float32(0))):
        for place, _ in optax.tree.get_all_with_path(state, name):
            at_place = {name: placed(np.asarray(value))}
            state = optax.tree.set(state, lambda path, _, place=place: path == place, **at_place)
    return state


def _decaying(parameters: nnx.State) -> nnx.State:
    return nnx.from_flat_state([(path, leaf.replace(decays(path))) for path, leaf in nnx.to_flat_state(parameters)])
