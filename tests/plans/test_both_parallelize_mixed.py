"""`parallelize` of both halves in bfloat16 with one configuration object: each as right as a plain bfloat16 model is."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from flax import nnx

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import mesh_of, run_quickly
from tests.ranks import Ranks
from tests.tiny_model import tiny_config, tiny_weights
from tiled_jax.models import Llama, LlamaConfig, from_hf, to_hf
from tiled_jax.parallel import parallelize
from tiled_torch.plans import tensor_styles

pytestmark = pytest.mark.ranks

DATA = DataParallel(param_dtype="bfloat16")
# Sharded weights; columns, rows and tokens over two ranks, whose partial sums are rounded before they are added up.
CASES: dict[str, tuple[dict[str, int], ParallelConfig]] = {
    "fsdp 2": ({"dp_shard": 2}, ParallelConfig(data=DATA)),
    "sp 2": ({"dp_shard": 1, "tp": 2}, ParallelConfig(data=DATA, tensor=TensorParallel())),
}
# The 16 tokens that JAX's layers see divide by the ranks; PyTorch's also see the last one, whose prediction nobody scores.
TOKENS = np.random.default_rng(1).integers(0, 272, (4, 17)).astype(np.int32)

REASON = "PyTorch 2.11 refuses sequence parallelism of tokens that ranks do not divide: tests/plans/test_torch_ranks_plans.py"


def can(config: ParallelConfig) -> bool:
    """Whether this PyTorch can: see REASON."""
    return config.tensor is None or not tensor_styles._EVEN_TOKENS


def for_torch(config: ParallelConfig) -> dict[str, Any]:
    return {name: asdict(part) for name in ("data", "tensor") if (part := getattr(config, name)) is not None}


@pytest.fixture(scope="module")
def in_torch() -> dict[str, Any]:
    cases = {name: (axes, for_torch(config)) for name, (axes, config) in CASES.items() if can(config)}
    with Ranks(2) as ranks:
        return ranks.run("tests.plans.ranks_torch_parity_mixed:models", tokens=TOKENS.tolist(), cases=cases)[0]


def on_devices(axes: dict[str, int], parallel: ParallelConfig) -> dict[str, Any]:
    """Loss and gradients by Hugging Face's names."""
    config = tiny_config()
    shapes = nnx.eval_shape(lambda: Llama(LlamaConfig.from_hf(config), tiling=Tiling(num_shards=3), rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(shapes)
    model = nnx.merge(graph, from_hf(parameters, tiny_weights(config)))
    plan = parallelize(model, mesh_of(**axes), parallel)
    assert plan.state is not None
    loss, gradients = run_quickly(plan.gradients, plan.state.parameters, TOKENS, plan)
    return {"loss": float(loss), "gradients": to_hf(gradients)}


@pytest.mark.deep
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(in_torch: dict[str, Any], case: str) -> None:
    """The limit of bfloat16: twice the error of Hugging Face's model, untiled, in one process, and a floor."""
    if not can(CASES[case][1]):
        pytest.skip(REASON)
    oracle, plain = in_torch["oracle"], in_torch["plain"]
    for half, found in (("torch", in_torch[case]), ("jax", on_devices(*CASES[case]))):
        allowed = limit(relative_error(np.asarray(plain["loss"]), np.asarray(oracle["loss"])), "bfloat16")
        assert_within(np.asarray(found["loss"]), np.asarray(oracle["loss"]), allowed, f"{half}: loss")
        assert found["gradients"].keys() == oracle["gradients"].keys()
        for name, gradient in found["gradients"].items():
            exact = np.asarray(oracle["gradients"][name])
            allowed = limit(relative_error(np.asarray(plain["gradients"][name]), exact), "bfloat16")
            assert_within(np.asarray(gradient, np.float64), exact, allowed, f"{half}: {name}")
