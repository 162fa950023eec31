"""`parallelize` of models with random keys and statistics: what each data rank draws, and what all go on with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError, UnsupportedError
from tests.plans.jax_parallel_models import LEARNING_RATE, QUICKLY, assert_same, mesh_of, run_quickly
from tiled_jax import tiled_model_loss
from tiled_jax.parallel import ModelRules, parallelize, register_rules

pytestmark = pytest.mark.ranks

FSDP = DataParallel(reduce_dtype=None)
HYBRID = DataParallel(replicate_axis="replica", reduce_dtype=None)
WHOLE = TensorParallel(sequence_parallel=False, loss_parallel=False)


class Block(nnx.Module):
    """A linear layer, dropout, and the mean of everything that ever came by."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, param_dtype=jnp.float64, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jnp.mean(x, axis=(0, 1))
        return x + self.dropout(jnp.tanh(self.linear(x))) - self.mean[...]


class Model(nnx.Module):
    """Blocks in a list, dropout outside of it, an array that is no variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.table = jnp.linspace(0.5, 1.5, 8)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.dropout(x) * self.table


register_rules(Model, ModelRules(axes={"layers.*.linear.kernel": ("hidden", "intermediate")}))


def loss_fn(model: Model, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - jnp.cos(x)) ** 2)


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((8, 3, 8)))


def by_hand(model: Model, ranks: int) -> Callable[[Any, jax.Array], tuple[jax.Array, Any, Any]]:
    """On one device: (variables, x) -> loss, gradients, variables, a run of the batch after another, each with its keys."""
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)

    def mean(parameters: Any, variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        def of_rank(rank: Any, x: jax.Array) -> tuple[jax.Array, Any]:
            def fold(a: Any) -> Any:
                return jax.random.fold_in(a, rank) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a

            found = nnx.merge(graph, parameters, jax.tree.map(fold, variables), copy=True)
            loss = loss_fn(found, x)
            return loss, jax.tree.map(lambda a: a, nnx.split(found, nnx.Param, ...)[2])

        losses, after = jax.vmap(of_rank)(jnp.arange(ranks), x.reshape(ranks, -1, *x.shape[1:]))

        def merged(given: Any, values: Any) -> Any:
            if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
                return given
            return jnp.mean(values, 0) if jnp.issubdtype(values.dtype, jnp.floating) else values[0]

        return jnp.mean(losses), jax.tree.map(merged, variables, after)

    step = jax.jit(jax.value_and_grad(mean, has_aux=True)).lower(parameters, variables, inputs()).compile(QUICKLY)

    def run(variables: Any, x: jax.Array) -> tuple[jax.Array, Any, Any]:
        (loss, after), gradients = step(parameters, variables, x)
        return loss, gradients, after

    return run


def without_keys(variables: Any) -> Any:
    return jax.tree.map(
        lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a, variables
    )


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("axes", "config"),
    [
        ({"dp_shard": 4}, {"data": FSDP, "checkpointing": Checkpointing()}),
        ({"dp_shard": 4}, {"data": DataParallel(engine="ddp", reduce_dtype=None)}),
        ({"replica": 2, "dp_shard": 2, "tp": 2}, {"data": HYBRID, "tensor": WHOLE}),
    ],
    ids=["fsdp, recomputed", "ddp", "replicas, fsdp and tp"],
)
def test_dropout_and_statistics(axes: dict[str, int], config: dict[str, Any], x64: None) -> None:
    """Two steps: what is recomputed sees the same dropout, each data rank another one, each step another one."""
    model, x = Model(nnx.Rngs(0)), inputs()
    plan = parallelize(
        model, mesh_of(**axes), ParallelConfig(**config), loss_fn=loss_fn, optimizer=optax.sgd(LEARNING_RATE)
    )
    assert plan.state is not None
    assert plan.step is not None
    expected = by_hand(model, 4)
    first = expected(nnx.split(model, nnx.Param, ...)[2], x)
    step = plan.step.lower(plan.state, x).compile(QUICKLY)
    x = jax.device_put(x, plan.batch_sharding)
    state, loss = step(jax.tree.map(jnp.copy, plan.state), x)
    assert_same(loss, first[0])
    update = jax.tree.map(
        lambda a, b: (np.asarray(b) - np.asarray(a)) / LEARNING_RATE, state.parameters, plan.state.parameters
    )
    assert_same(update, jax.tree.map(np.asarray, first[1]))
    assert_same(without_keys(state.variables), without_keys(first[2]))
    assert jax.tree.map(lambda a: a.sharding, state) == plan.shardings
    state, loss = step(plan.state._replace(variables=state.variables), x)
    second = expected(first[2], inputs())
    assert_same(loss, second[0])
    assert_same(without_keys(state.variables), without_keys(second[2]))
    counts = [leaf.get_value() for path, leaf in nnx.to_flat_state(state.variables) if path[-1] == "count"]
    assert [int(count) for count in counts] == [2, 2, 2]


def test_gradients_of_a_model_with_variables(x64: None) -> None:
    """`gradients` takes and returns them; nothing is donated."""
    model, x = Model(nnx.Rngs(0)), inputs()
    plan = parallelize(model, mesh_of(dp_shard=2), ParallelConfig(data=FSDP), loss_fn=loss_fn)
    assert plan.state is not None
    given = plan.state.parameters, x, plan.state.variables
    found = plan.gradients.lower(*given).compile(QUICKLY)(given[0], jax.device_put(x, plan.batch_sharding), given[2])
    expected = by_hand(model, 2)(nnx.split(model, nnx.Param, ...)[2], x)
    assert_same(found[:2], expected[:2])
    assert_same(without_keys(found[2]), without_keys(expected[2]))


class WithHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.model, self.head = Model(rngs), nnx.Linear(8, 5, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.model(x))


def test_the_loss_of_logits_that_are_never_made(x64: None) -> None:
    """Statistics and random streams of modules in a list are afterwards what they are with the logits."""
    x = inputs()

    def targets(x: jax.Array) -> jax.Array:
        return jnp.argmax(x[..., :5], -1)

    def whole(model: WithHead, x: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), targets(x)).mean()

    def tiled(model: WithHead, x: jax.Array) -> jax.Array:
        found: jax.Array = tiled_model_loss(model, targets(x), x, num_shards=2)
        return found

    found = []
    for loss in (tiled, whole):
        plan = parallelize(WithHead(nnx.Rngs(0)), mesh_of(dp_shard=2), ParallelConfig(data=FSDP), loss_fn=loss)
        assert plan.state is not None
        found.append(plan.gradients(plan.state.parameters, x, plan.state.variables))
    assert_same(found[0][:2], found[1][:2])
    assert_same(without_keys(found[0][2]), without_keys(found[1][2]))
    before = nnx.split(WithHead(nnx.Rngs(0)), nnx.Param, ...)[2]
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, map(without_keys, (before, found[0][2]))), strict=True)
    ]
    assert sum(changed) >= 5  # two statistics, three counts


def test_the_loss_alone_draws_as_a_step_does_and_takes_a_batch_that_no_micro_batch_divides(x64: None) -> None:
    """Of three micro-batches for each of two ranks, eight sequences are no batch of `gradients`."""
    model, x = Model(nnx.Rngs(0)), inputs()
    config = ParallelConfig(data=FSDP, micro_batches=3)
    plan = parallelize(model, mesh_of(dp_shard=2), config, loss_fn=loss_fn)
    assert plan.state is not None
    given = plan.state.parameters, x, plan.state.variables
    with pytest.raises(SpecError, match="batch must be of a multiple of 6 sequences"):
        plan.gradients(*given)
    found = plan.loss.lower(*given).compile(QUICKLY)(given[0], jax.device_put(x, plan.batch_sharding), given[2])
    assert_same(found, by_hand(model, 2)(nnx.split(model, nnx.Param, ...)[2], x)[0])


def test_variables_of_a_model_of_shapes() -> None:
    """They are given to `init` with the parameters."""
    mesh, config = mesh_of(dp_shard=2), ParallelConfig(data=DataParallel())
    shapes = nnx.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    plan = parallelize(shapes, mesh, config, loss_fn=lambda model, x: jnp.mean(model(x)))
    _, parameters, variables = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Param, ...)
    assert plan.state is None
    state = plan.init(parameters, variables)
    assert jax.tree.map(lambda a: a.sharding, state) == plan.shardings
    assert float(plan.gradients(state.parameters, jnp.ones((2, 64)), state.variables)[0]) != 1.0
    with pytest.raises(SpecError, match=r"^parallelize: init: variables must be given for a model of shapes"):
        plan.init(parameters)


class Replaces(nnx.Module):
    """Its call does something with its variables that cannot be carried along."""

    def __init__(self, what: str) -> None:
        self.what, self.rngs = what, nnx.Rngs(0)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.what == "key":
            self.rngs.default.key[...] = self.rngs()
        if self.what == "count":
            self.count[...] += jnp.sum(x > 0, dtype=jnp.int32)
        if self.what == "new":
            self.seen = nnx.Variable(x)
        return x


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("key", "without random keys that a call replaces, got .*key.*Draw from nnx.Rngs"),
        ("count", r"the same on all devices, or floating-point \(int32\), got .*count"),
        ("new", "the same after a call as before, got .*seen.*nnx.pop"),
    ],
)
@pytest.mark.parametrize("listed", [False, True], ids=["outside", "in a list"])
def test_variables_that_cannot_be_carried_along(what: str, message: str, listed: bool) -> None:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(4))
            self.layers = nnx.List([Replaces(what)]) if listed else nnx.Dict(only=Replaces(what))
            if listed:
                self.layers[0].w = nnx.Param(jnp.ones(4))

        def __call__(self, x: jax.Array) -> jax.Array:
            return (self.layers[0] if listed else self.layers["only"])(x * self.w[...])

    plan = parallelize(
        Outer(), mesh_of(dp_shard=2), ParallelConfig(data=DataParallel()), loss_fn=lambda m, x: jnp.mean(m(x))
    )
    assert plan.state is not None
    with pytest.raises(UnsupportedError, match="^parallelize: the model's variables must be " + message):
        plan.gradients(plan.state.parameters, jnp.ones((2, 4)), plan.state.variables)


def test_checkpoint_at_another_device_count(tmp_path: Path) -> None:
    """Orbax writes what two devices have, keys and counts included, and four go on from it."""

    def plan(devices: int) -> Any:
        config = ParallelConfig(data=DataParallel(), donate=False)
        dropout = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
        return parallelize(
            dropout,
            mesh_of(dp_shard=devices),
            config,
            loss_fn=lambda m, x: jnp.mean(m(x) ** 2),
            optimizer=optax.sgd(0.1),
        )

    two, four = plan(2), plan(4)
    state, _ = run_quickly(two.step, two.state, jnp.ones((4, 4)), two)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "state", four.shapes)
    assert jax.tree.map(lambda a: a.sharding, found) == four.shardings
    pairs = zip(jax.tree.leaves(without_keys(found)), jax.tree.leaves(without_keys(state)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert np.isfinite(float(run_quickly(four.step, found, jnp.ones((4, 4)), four)[1]))
