"""Loops of the JAX ecosystem around tiled modules (optax in nnx and linen, MultiSteps, Orbax): the untiled curves."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32
from tiled_jax import TiledMLP, tile, tiled_linear_cross_entropy
from tiled_jax.modules.linen import TiledMLP as LinenTiledMLP

HIDDEN, INNER, VOCAB, STEPS = 16, 24, 31, 4
Batch = tuple[jax.Array, jax.Array]


@pytest.fixture(autouse=True)
def promotion_of_users() -> Iterator[None]:
    """optax's schedules and averages mix integers with floats, which the strict promotion of the tests refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def batches() -> Iterator[Batch]:
    """Sequences whose first tokens are a prompt: their labels do not count."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = rng.integers(0, VOCAB, (2, 13))
        targets = np.where(np.arange(12) < 3, -100, ids[:, 1:])
        yield jnp.asarray(ids[:, :-1], jnp.int32), jnp.asarray(targets, jnp.int32)


def whole_loss(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    counted = targets != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden @ head, jnp.where(counted, targets, 0))
    return jnp.sum(losses * counted) / jnp.sum(counted)


class PlainMLP(nnx.Module):
    """The same parameters under the same names."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        made = TiledMLP(HIDDEN, INNER, rngs=rngs)
        self.w_gate, self.w_up, self.w_down = made.w_gate, made.w_up, made.w_down

    def __call__(self, x: jax.Array) -> jax.Array:
        return (nnx.silu(x @ self.w_gate[...]) * (x @ self.w_up[...])) @ self.w_down[...]


class NnxModel(nnx.Module):
    def __init__(self, tiled: bool, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.norm = tile(norm, num_shards=4) if tiled else norm
        self.mlp = TiledMLP(HIDDEN, INNER, num_shards=5, rngs=rngs) if tiled else PlainMLP(rngs)
        self.tiled = tiled

    def __call__(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        x = self.embed(ids)
        hidden, head = x + self.mlp(self.norm(x)), self.embed.embedding[...].T
        if self.tiled:
            return tiled_linear_cross_entropy(hidden, head, targets, num_shards=3)
        return whole_loss(hidden, head, targets)


class LinenModel(linen.Module):
    tiled: bool

    @linen.compact
    def __call__(self, ids: jax.Array, targets: jax.Array) -> jax.Array:
        embed = linen.Embed(VOCAB, HIDDEN)
        x = embed(ids)
        mlp = LinenTiledMLP(HIDDEN, INNER, num_shards=5 if self.tiled else 1, name="mlp")
        if self.tiled:
            hidden = x + mlp(x)
            return tiled_linear_cross_entropy(hidden, embed.embedding.T, targets, num_shards=3)
        mlp(x[:, :1])  # makes the parameters
        w = mlp.variables["params"]
        hidden = x + (linen.silu(x @ w["w_gate"]) * (x @ w["w_up"])) @ w["w_down"]
        return whole_loss(hidden, embed.embedding.T, targets)


def optimizer(steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10)
    chain = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.1))
    return optax.MultiSteps(chain, steps).gradient_transformation() if steps > 1 else chain


def same(found: Any, expected: Any) -> None:
    ours, theirs = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (found, expected))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert relative_error(np.asarray(leaf), np.asarray(theirs[path])) <= MODEL_FLOAT32, path


def nnx_run(tiled: bool, steps: int) -> tuple[list[float], Any]:
    model = NnxModel(tiled, nnx.Rngs(0))
    state = nnx.Optimizer(model, optimizer(steps), wrt=nnx.Param)

    @nnx.jit
    def step(model: NnxModel, state: nnx.Optimizer[NnxModel], batch: Batch) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: model(*batch))(model)
        state.update(model, gradients)
        return loss

    curve = [float(step(model, state, batch)) for batch in batches()]
    return curve, nnx.to_pure_dict(nnx.state(model, nnx.Param))


def linen_run(tiled: bool, steps: int) -> tuple[list[float], Any]:
    model, first = LinenModel(tiled), next(batches())
    params = model.init(jax.random.key(0), *first)["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer(steps))

    @jax.jit
    def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda params: state.apply_fn({"params": params}, *batch))(state.params)
        return state.apply_gradients(grads=gradients), loss

    curve = []
    for batch in batches():
        state, loss = step(state, batch)
        curve.append(float(loss))
    return curve, state.params


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("run", "steps"), [(nnx_run, 2), (linen_run, 1)], ids=["nnx-multi-steps", "linen-each-step"])
def test_the_curve_of_an_optax_loop(run: Callable[[bool, int], tuple[list[float], Any]], steps: int) -> None:
    (found, weights), (expected, others) = run(True, steps), run(False, steps)
    assert found == pytest.approx(expected, rel=MODEL_FLOAT32)
    assert len(set(found)) == STEPS
    same(weights, others)


def test_orbax_restores_a_tiled_model_and_its_optimizer(tmp_path: Path) -> None:
    """Written after two steps of four, read into new objects, the curve goes on as if nothing had happened."""

    @nnx.jit
    def step(model: NnxModel, state: nnx.Optimizer[NnxModel], batch: Batch) -> jax.Array:
        loss, gradients = nnx.value_and_grad(lambda model: model(*batch))(model)
        state.update(model, gradients)
        return loss

    def made(seed: int) -> tuple[NnxModel, nnx.Optimizer[NnxModel]]:
        model = NnxModel(True, nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optimizer(2), wrt=nnx.Param)

    whole = made(0)
    expected = [float(step(*whole, batch)) for batch in batches()]
    first, (_, _, *last) = made(0), list(batches())
    for batch in list(batches())[:2]:
        step(*first, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", nnx.to_pure_dict(nnx.state(first)))
        checkpointer.wait_until_finished()
        other = made(1)
        target = nnx.state(other)
        restored = checkpointer.restore(tmp_path / "step", jax.eval_shape(lambda: nnx.to_pure_dict(target)))
    nnx.replace_by_pure_dict(target, restored)
    nnx.update(other, target)
    assert [float(step(*other, batch)) for batch in last] == expected[2:]
