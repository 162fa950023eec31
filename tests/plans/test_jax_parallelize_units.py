"""Modules in a list, whose parameters `parallelize` gathers in their calls: used elsewhere, and shared with others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig
from shared_specs.errors import UnsupportedError
from tests.plans.jax_parallel_models import assert_same, loss_and_gradients, mesh_of
from tiled_jax import tile_model, tiled_model_loss, tiling_paths
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks
FSDP = DataParallel(reduce_dtype=None)


class Layers(nnx.Module):
    """Linear layers in a list, one behind them; `shared` have the last one's weights."""

    def __init__(self, shared: tuple[int, ...] = ()) -> None:
        rngs = nnx.Rngs(0)
        last = nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs)
        if len(shared) < 2:
            self.first = last
        self.layers = nnx.List([nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs) for _ in range(2)])
        for index in shared:
            self.layers[index].kernel = last.kernel
        self.output = last

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.output(x)


def loss_fn(model: Layers, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 8)))


def test_weights_shared_with_a_module_outside(x64: None) -> None:
    model, x = Layers(shared=(0,)), inputs()
    plan = parallelize(model, mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=loss_fn)
    assert plan.state is not None
    assert_same(plan.gradients(plan.state.parameters, x), loss_and_gradients(model, loss_fn, x))


def logits_loss(model: Layers, x: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(x), targets_of(x)).mean()


def tiled_logits_loss(model: Layers, x: jax.Array) -> jax.Array:
    found: jax.Array = tiled_model_loss(model, targets_of(x), x, num_shards=2)
    return found


def targets_of(x: jax.Array) -> jax.Array:
    return jnp.argmax(x, -1)


def test_the_loss_of_logits_that_are_never_made(x64: None) -> None:
    """`tiled_model_loss` traces the model, whose modules in a list gather their parameters themselves."""
    model, x = Layers(), inputs()
    plan = parallelize(model, mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=tiled_logits_loss)
    assert plan.state is not None
    assert_same(plan.gradients(plan.state.parameters, x), loss_and_gradients(model, logits_loss, x))


class Sequentials(nnx.Module):
    """MLPs that are lists of layers: one outside of any other list, one in it."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first, *last = (
            nnx.Sequential(
                nnx.Linear(8, 32, param_dtype=jnp.float64, rngs=rngs),
                nnx.silu,
                nnx.Linear(32, 8, param_dtype=jnp.float64, rngs=rngs),
            )
            for _ in range(2)
        )
        self.layers = nnx.List(last)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[0](x + self.first(x))


def sequentials_loss(model: Sequentials, x: jax.Array) -> jax.Array:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize("checkpointing", [None, Checkpointing()], ids=["kept", "checkpointed"])
def test_a_tiled_mlp_that_is_a_list_of_layers(checkpointing: Checkpointing | None, x64: None) -> None:
    """Its layers do not gather for themselves: it would not be what was probed, and run through `tile` with a warning."""
    model, x = tile_model(Sequentials(), num_shards=2), inputs()
    expected = loss_and_gradients(Sequentials(), sequentials_loss, x)
    assert tiling_paths(model) == {"first": "tiled_mlp", "layers.0": "tiled_mlp"}
    config = ParallelConfig(data=FSDP, checkpointing=checkpointing)
    plan = parallelize(model, mesh_of(dp_shard=4), config, loss_fn=sequentials_loss)
    assert plan.state is not None
    assert_same(plan.gradients(plan.state.parameters, x), expected)


def test_a_tiled_mlp_that_is_the_model(x64: None) -> None:
    model, x = tile_model(Sequentials().first, num_shards=2), inputs()
    plan = parallelize(model, mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=sequentials_loss)
    assert plan.state is not None
    expected = loss_and_gradients(Sequentials().first, sequentials_loss, x)
    assert_same(plan.gradients(plan.state.parameters, x), expected)


USES: dict[str, Callable[[Layers], Any]] = {
    "all of the state": lambda model: sum(jnp.sum(a**2) for a in jax.tree.leaves(nnx.state(model, nnx.Param))),
    "a weight": lambda model: model.layers[1].kernel[...].sum(),
    "its shape": lambda model: 1.0 / model.layers[1].kernel.shape[0],
    "a product": lambda model: jnp.sum(jnp.ones(8) @ model.layers[1].kernel),
}


@pytest.mark.parametrize("use", USES)
def test_weights_that_are_not_whole_are_not_read_as_if_they_were(use: str, x64: None) -> None:
    """A penalty on a part of the weights would be wrong without a word; with whole ones it is what one device has."""

    def penalised(model: Layers, x: jax.Array) -> jax.Array:
        return loss_fn(model, x) + 0.1 * USES[use](model)

    model, x = Layers(), inputs()
    plan = parallelize(model, mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=penalised)
    assert plan.state is not None
    with pytest.raises(
        UnsupportedError, match=r"^parallelize: layers\.\d\.\w+ must be read in the call of its own module"
    ):
        plan.gradients(plan.state.parameters, x)


def test_penalties_with_whole_weights(x64: None) -> None:
    def penalised(model: Layers, x: jax.Array) -> jax.Array:
        return loss_fn(model, x) + 0.1 * USES["all of the state"](model)

    model, x = Layers(), inputs()
    config = ParallelConfig(data=DataParallel(engine="ddp", reduce_dtype=None))
    plan = parallelize(model, mesh_of(dp_shard=4), config, loss_fn=penalised)
    assert plan.state is not None
    assert_same(plan.gradients(plan.state.parameters, x), loss_and_gradients(model, penalised, x))


def test_weights_shared_between_lists_are_refused(x64: None) -> None:
    plan = parallelize(Layers(shared=(0, 1)), mesh_of(dp_shard=4), ParallelConfig(data=FSDP), loss_fn=loss_fn)
    assert plan.state is not None
    with pytest.raises(UnsupportedError, match=r"^parallelize: layers\.0\.kernel must be read in the call of its own"):
        plan.gradients(plan.state.parameters, inputs())
