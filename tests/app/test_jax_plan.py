"""`plan` beside what XLA says of the JAX half's own step, compiled for one device and for eight."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.app.models.model_config import complete_config
from shared_specs.app.plan.decoder import decoder_of
from shared_specs.app.plan.step import RESERVE, Setting, parts_of
from shared_specs.tolerances import PLAN_BYTES
from tests.plans.jax_parallel_models import mesh_of
from tiled_jax import DataParallel, ParallelConfig, Tiling
from tiled_jax.models import Llama, LlamaConfig
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks

SIZES = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 4}


def held(config: dict[str, Any], setting: Setting) -> int:
    """Bytes of one device at the peak of a step, the optimizer's aside."""
    tiling = Tiling(shard_tokens=setting.shard_tokens)
    sizes = LlamaConfig.from_hf(config)
    model = nnx.eval_shape(lambda: Llama(sizes, scope="block", tiling=tiling, rngs=nnx.Rngs(0)))
    replicas = setting.gpus // setting.context
    mesh = mesh_of(dp_shard=replicas, **{"cp": setting.context} if setting.context > 1 else {})
    data = DataParallel(context_axis="cp" if setting.context > 1 else None)
    plan = parallelize(model, mesh, ParallelConfig(data=data))
    batch = jax.ShapeDtypeStruct((replicas, setting.tokens + 1), jnp.int32)
    found = plan.gradients.lower(plan.shapes.parameters, batch).compile().memory_analysis()
    return found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes


@pytest.mark.parametrize("vocab", [256, 32000], ids=["layers", "head"])
@pytest.mark.parametrize(("gpus", "context"), [(1, 1), (8, 1), (8, 4)])
def test_bytes_of_a_step(gpus: int, context: int, vocab: int) -> None:
    config = complete_config(
        {"model_type": "llama", "num_hidden_layers": 3, "vocab_size": vocab, **SIZES}, "the test's"
    )
    setting = Setting(
        tokens=4096 * context, gpus=gpus, context=context, dtype="float32", shard_tokens=1024, optimizer="sgd",
        device="cpu", half="jax",
    )  # fmt: skip
    found = held(config, setting)
    parts = parts_of(decoder_of(config, "the test's"), setting)
    predicted = parts.total - RESERVE
    print(f"{predicted / found:.3f}", found, parts.by_name)
    assert predicted == pytest.approx(found, rel=PLAN_BYTES)
