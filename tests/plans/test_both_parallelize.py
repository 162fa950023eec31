"""`parallelize` of both halves with one configuration object and the weights of one Llama: losses and gradients in float64.

The halves' own losses and updates against one process are tested in test_torch_ranks_plans.py and test_jax_parallelize.py.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import mesh_of, run_quickly
from tests.plans.ranks_torch_parity_plans import Lines
from tests.ranks import Ranks
from tests.tiny_model import tiny_config, tiny_weights
from tiled_jax.models import Llama, LlamaConfig, from_hf, to_hf
from tiled_jax.models.rope import rotary_angles
from tiled_jax.parallel import parallelize
from tiled_torch.plans import tensor_styles

pytestmark = pytest.mark.ranks

SHARDED = DataParallel(reduce_dtype=None)
CONTEXT = DataParallel(context_axis="cp", reduce_dtype=None)
UNTIED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
# The 16 tokens that JAX's layers see divide by the ranks; PyTorch's also see the last one, whose prediction nobody scores.
TOKENS = np.random.default_rng(1).integers(0, 272, (4, 17)).astype(np.int32)
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A mesh, what is asked for on it and what the model has."""

    axes: dict[str, int]
    config: ParallelConfig
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return int(np.prod(list(self.axes.values())))


CASES = {
    "fsdp 2": Case({"dp_shard": 2}, ParallelConfig(data=SHARDED, checkpointing=Checkpointing())),
    "fsdp 2, untied": Case({"dp_shard": 2}, ParallelConfig(data=SHARDED), UNTIED),
    "ddp 2": Case({"dp_shard": 2}, ParallelConfig(data=DataParallel(engine="ddp", reduce_dtype=None)), UNTIED),
    "replicas 2 x fsdp 2": Case(
        {"replica": 2, "dp_shard": 2}, ParallelConfig(data=DataParallel(replicate_axis="replica", reduce_dtype=None))
    ),
    "sp 2": Case({"tp": 2}, ParallelConfig(tensor=TensorParallel())),
    "sp 2, untied": Case(
        {"tp": 2}, ParallelConfig(tensor=TensorParallel(), checkpointing=Checkpointing(mode="op")), UNTIED
    ),
    "fsdp 2 x sp 2": Case({"dp_shard": 2, "tp": 2}, ParallelConfig(data=SHARDED, tensor=TensorParallel())),
    "fsdp 2 x cp 2": Case({"dp_shard": 2, "cp": 2}, ParallelConfig(data=CONTEXT, checkpointing=Checkpointing())),
    "fsdp 2 x tp 2": Case(
        {"dp_shard": 2, "tp": 2},
        ParallelConfig(
            data=SHARDED, tensor=TensorParallel(sequence_parallel=False), checkpointing=Checkpointing(mode="products")
        ),
        UNTIED,
    ),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(4) as four:
        yield {2: two, 4: four}


def for_torch(case: Case) -> dict[str, Any]:
    config = {
        name: asdict(getattr(case.config, name))
        for name in ("data", "tensor", "checkpointing")
        if getattr(case.config, name) is not None
    }
    model = LlamaConfig.from_hf(tiny_config(**case.changes))
    with jax.enable_x64(True):
        turned = rotary_angles(model.rope, model.head_dim, TOKENS.shape[1], jnp.float64)
        angles = [np.asarray(a).tolist() for a in turned]
    return {"axes": case.axes, "config": config, "changes": case.changes, "angles": angles}


def llama(changes: dict[str, Any]) -> Llama:
    """The same weights, and everything computed, in float64."""
    config = tiny_config(**changes)
    build = lambda: Llama(LlamaConfig.from_hf(config), tiling=Tiling(num_shards=3), rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    parameters = jax.tree.map(lambda a: a.astype(jnp.float64), from_hf(parameters, tiny_weights(config)))
    model = nnx.merge(graph, parameters)
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", None) is not None:
            module.dtype = jnp.dtype(jnp.float64)
    return model


def on_devices(case: Case) -> tuple[float, dict[str, Array], list[str]]:
    """Loss, gradients by Hugging Face's names, and what was logged."""
    # Flax's norms promote their float32 constants, which strict promotion refuses beside float64.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        with Lines("tiled_jax") as log:
            plan = parallelize(llama(case.changes), mesh_of(**case.axes), case.config)
        assert plan.state is not None
        loss, gradients = run_quickly(plan.gradients, plan.state.parameters, TOKENS, plan)
        assert loss.dtype == jnp.float64
        return float(loss), to_hf(gradients), log.lines


# What combines parts that other cases check.
SLOW = {"fsdp 2", "sp 2", "replicas 2 x fsdp 2", "fsdp 2, untied", "sp 2, untied", "fsdp 2 x tp 2"}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_losses_and_gradients(pools: Any, name: str) -> None:
    case = CASES[name]
    if tensor_styles._EVEN_TOKENS and case.config.tensor is not None and case.config.tensor.sequence_parallel:
        pytest.skip("PyTorch 2.11 refuses sequence parallelism of tokens that ranks do not divide: test_ranks_plans.py")
    answers = pools[case.ranks].run(
        "tests.plans.ranks_torch_parity_plans:models", tokens=TOKENS.tolist(), cases=[for_torch(case)]
    )
    loss, ours, log = on_devices(case)
    assert log
    assert [answer["log"] for (answer,) in answers] == [log, *[[]] * (case.ranks - 1)], "the same words, on one rank"
    for rank, (answer,) in enumerate(answers):
        assert_within(np.asarray(answer["loss"]), np.asarray(loss), DISTRIBUTED_FLOAT64, f"{name}: loss of rank {rank}")
    theirs = answers[0][0]["gradients"]
    assert set(theirs) == set(ours) == set(tiny_weights(tiny_config(**case.changes)))
    for parameter, gradient in ours.items():
        assert_within(np.asarray(theirs[parameter]), gradient, DISTRIBUTED_FLOAT64, f"{name}: {parameter}")
