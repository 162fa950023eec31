"""`ParallelConfig(micro_batches=...)`: one update of all parts, their gradients added up in float32, exchanged once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError
from tests.core.jax_counting import collectives
from tests.plans.jax_parallel_models import (
    LEARNING_RATE,
    Blocks,
    assert_same,
    blocks_loss,
    llama,
    loss_and_gradients,
    mesh_of,
    padded,
    run_quickly,
    token_ids,
)
from tests.plans.test_jax_parallelize_variables import Model, without_keys
from tests.plans.test_jax_parallelize_variables import inputs as numbers
from tests.plans.test_jax_parallelize_variables import loss_fn as numbers_loss
from tiled_jax.models import next_token_loss
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks

DDP = DataParallel(engine="ddp", reduce_dtype=None, loss_mean="tokens")
FSDP = DataParallel(reduce_dtype=None)
CASES: dict[str, tuple[dict[str, int], Any, Any, int]] = {
    "one device": ({"dp_shard": 1}, FSDP, None, 4),
    "ddp": ({"dp_shard": 2}, DDP, None, 2),
    "replicas x fsdp": (
        {"replica": 2, "dp_shard": 2},
        DataParallel(replicate_axis="replica", reduce_dtype=None),
        None,
        2,
    ),
    "fsdp x context x tp": (
        {"dp_shard": 2, "cp": 2, "tp": 2},
        DataParallel(context_axis="cp", reduce_dtype=None),
        TensorParallel(),
        2,
    ),
}


SLOW = ("one device", "replicas x fsdp")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_micro_batches_are_one_batch(case: str, float64: None) -> None:
    """The mean over all of their labels, of which no two have as many."""
    axes, data, tensor, parts = CASES[case]
    tokens, model = padded(token_ids()), llama(num_hidden_layers=1)
    config = ParallelConfig(data=data, tensor=tensor, micro_batches=parts)
    plan = parallelize(model, mesh_of(**axes), config)
    assert_same(
        run_quickly(plan.gradients, plan.state.parameters, tokens, plan),
        loss_and_gradients(model, next_token_loss, tokens),
    )


def test_gradients_of_16_bits_are_added_up_in_float32(x64: None) -> None:
    model, x = (
        Blocks(nnx.Rngs(0), jnp.bfloat16),
        jnp.asarray(np.random.default_rng(0).standard_normal((8, 5, 6)), jnp.bfloat16),
    )
    parts = 8

    plans = {
        count: parallelize(
            model, mesh_of(dp_shard=1), ParallelConfig(data=FSDP, micro_batches=count), loss_fn=blocks_loss
        )
        for count in (1, parts)
    }
    parameters = plans[1].state.parameters
    each = [plans[1].gradients(parameters, part)[1] for part in jnp.split(x, parts)]
    together = plans[parts].gradients(parameters, x)[1]

    def mean(*parts_of: jax.Array) -> np.ndarray:
        return np.asarray(sum(np.asarray(a, np.float32) for a in parts_of) / np.float32(parts)).astype(jnp.bfloat16)

    for found, wanted in zip(*map(jax.tree.leaves, (together, jax.tree.map(mean, *each))), strict=True):
        np.testing.assert_array_equal(np.asarray(found), wanted)


def test_variables_go_from_part_to_part(x64: None) -> None:
    """What is drawn and recorded is what one call after the other draws and records."""
    model, x = Model(nnx.Rngs(0)), numbers()
    plans = {
        parts: parallelize(
            model, mesh_of(dp_shard=1), ParallelConfig(data=FSDP, micro_batches=parts), loss_fn=numbers_loss
        )
        for parts in (1, 2)
    }
    state = plans[1].state
    assert state is not None
    first = plans[1].gradients(state.parameters, x[: len(x) // 2], state.variables)
    second = plans[1].gradients(state.parameters, x[len(x) // 2 :], first[2])
    loss, gradients, variables = plans[2].gradients(state.parameters, x, state.variables)
    assert_same((loss, gradients), jax.tree.map(lambda a, b: (a + b) / 2, first[:2], second[:2]))
    assert_same(without_keys(variables), without_keys(second[2]))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("data", [FSDP, DDP], ids=["fsdp", "ddp"])
def test_variables_on_several_devices(data: DataParallel, x64: None) -> None:
    """Statistics that differ between devices are averaged after the last part; each has drawn twice."""
    config = ParallelConfig(data=data, micro_batches=2)
    update = optax.sgd(LEARNING_RATE)
    plan = parallelize(Model(nnx.Rngs(0)), mesh_of(dp_shard=2), config, loss_fn=numbers_loss, optimizer=update)
    assert plan.state is not None
    state, loss = run_quickly(plan.step, plan.state, numbers(), plan)
    assert np.isfinite(loss)
    counts = [leaf.get_value() for path, leaf in nnx.to_flat_state(state.variables) if path[-1] == "count"]
    assert [int(count) for count in counts] == [2, 2, 2]


def test_replicas_meet_once_a_step_for_each_parameter(float64: None) -> None:
    plan = parallelize(llama(num_hidden_layers=1), mesh_of(dp_shard=2), ParallelConfig(data=DDP, micro_batches=2))
    parameters = plan.shapes.parameters
    batch = jax.ShapeDtypeStruct((4, 9), jnp.int32, sharding=plan.batch_sharding)
    # And the count that gradients are divided by, and the sums of losses and of labels.
    assert collectives(plan.gradients.compiled, parameters, batch) == {
        False: len(jax.tree.leaves(parameters)) + 3,
        True: 0,
    }


def test_a_batch_that_does_not_divide_is_refused(float64: None) -> None:
    plan = parallelize(llama(num_hidden_layers=1), mesh_of(dp_shard=2), ParallelConfig(data=DDP, micro_batches=3))
    message = r"batch must be of a multiple of 6 sequences, for the 3 micro-batches of every data rank, got \[8, 25\]"
    with pytest.raises(SpecError, match=message):
        plan.gradients(plan.state.parameters, token_ids())
