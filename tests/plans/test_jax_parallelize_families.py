"""`parallelize` of the families with parts of their own: loss and gradients in float64 are the plain model's on one device.

Fused projections (Phi3), norms of branches, offsets of norms, caps and scales of scores (Gemma 2 and 3), and windows shorter
than a sequence, in all layers or in some.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.errors import UnsupportedError
from shared_specs.tolerances import COST_BYTES
from tests.plans.jax_parallel_models import (
    QUICKLY,
    assert_same,
    llama,
    llama_config,
    loss_and_gradients,
    mesh_of,
    packed,
    padded,
    run_quickly,
    token_ids,
)
from tiled_jax.models import Llama, next_token_loss
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks

TWO: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 4, "sliding_window": 7}
ALTERNATING = TWO | {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 5}
# Documents of more than 16 tokens, which some sequences alone have, turn those of all by the long factors.
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": TWO | {"model_type": "phi3", "tie_word_embeddings": False},
    "phi3-long": TWO
    | {"model_type": "phi3", "sliding_window": None, "rope_parameters": LONG, "original_max_position_embeddings": 16},
    "gemma2": ALTERNATING
    | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "attention_bias": True},
    "gemma3": ALTERNATING | {"model_type": "gemma3_text"},
    "mistral": TWO | {"model_type": "mistral"},
}
FSDP = DataParallel(reduce_dtype=None)
CONTEXT = DataParallel(context_axis="cp", reduce_dtype=None)
RING = DataParallel(context_axis="cp", context="ring", reduce_dtype=None)
RINGS = DataParallel(context_axis=("ring", "cp"), context="2d", reduce_dtype=None)
KEPT = DataParallel(reduce_dtype=None, reshard="never")
WHOLE = TensorParallel(sequence_parallel=False, loss_parallel=False)
SP, FULL = TensorParallel(), Checkpointing()
ALL = {"dp_shard": 2, "cp": 2, "tp": 2}
# family, scope, axes, data, tensor, checkpointing
CASES: dict[str, tuple[str, str, dict[str, int], Any, Any, Any]] = {
    "phi3, packed, fsdp 2 x context 2": ("phi3", "mlp", {"dp_shard": 2, "cp": 2}, CONTEXT, None, None),
    "phi3, block, packed, fsdp 2 x rings 2 x 2": (
        "phi3",
        "block",
        {"dp_shard": 2, "ring": 2, "cp": 2},
        RINGS,
        None,
        None,
    ),
    "phi3-long, packed, fsdp 4 x ring 2": ("phi3-long", "mlp", {"dp_shard": 4, "cp": 2}, RING, None, FULL),
    "gemma2, packed, fsdp 2 x context 2 x sp 2": ("gemma2", "mlp", ALL, CONTEXT, SP, FULL),
    "gemma2, block, fsdp 2 x ring 2 x sp 2": ("gemma2", "block", ALL, RING, SP, None),
    "gemma3, packed, fsdp 2 x ring 2 x tp 2": ("gemma3", "mlp", ALL, RING, WHOLE, None),
    "gemma3, block, packed, fsdp 2 x context 2 x tp 2": ("gemma3", "block", ALL, CONTEXT, WHOLE, FULL),
}
SLOW: dict[str, tuple[str, str, dict[str, int], Any, Any, Any]] = {
    "phi3, fsdp 4, kept": ("phi3", "mlp", {"dp_shard": 4}, KEPT, None, None),
    "phi3, plain, fsdp 2": ("phi3", "plain", {"dp_shard": 2}, FSDP, None, FULL),
    "phi3-long, block, packed, fsdp 2 x context 2": (
        "phi3-long",
        "block",
        {"dp_shard": 2, "cp": 2},
        CONTEXT,
        None,
        Checkpointing(mode="layers", every=2),
    ),
    "gemma2, plain, fsdp 2 x sp 2": ("gemma2", "plain", {"dp_shard": 2, "tp": 2}, FSDP, SP, None),
    "gemma2, plain, tp 2, whole head": ("gemma2", "plain", {"tp": 2}, None, WHOLE, None),
    "gemma2, tp 2, whole head": ("gemma2", "mlp", {"tp": 2}, None, WHOLE, None),
    "gemma2, block, packed, fsdp 2 x tp 2": ("gemma2", "block", {"dp_shard": 2, "tp": 2}, FSDP, WHOLE, None),
    "gemma3, fsdp 8": ("gemma3", "mlp", {"dp_shard": 8}, FSDP, None, Checkpointing(mode="op")),
    "gemma3, block, packed, fsdp 2 x rings 2 x 2": (
        "gemma3",
        "block",
        {"dp_shard": 2, "ring": 2, "cp": 2},
        RINGS,
        None,
        FULL,
    ),
    "mistral, packed, fsdp 2 x ring 2 x sp 2": ("mistral", "mlp", ALL, RING, SP, None),
    "mistral, block, packed, fsdp 2 x context 2 x sp 2": ("mistral", "block", ALL, CONTEXT, SP, None),
}


def batch_of(case: str) -> Any:
    return packed() if "packed" in case else padded(token_ids())


@cache
def reference(family: str, case: str) -> Any:
    return loss_and_gradients(llama(plain=True, **FAMILIES[family]), next_token_loss, batch_of(case))


@pytest.mark.deep
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_loss_and_gradients_are_the_plain_model_s(case: str, float64: None) -> None:
    """Slow ones combine the same parts in other ways."""
    family, scope, axes, data, tensor, checkpointing = (CASES | SLOW)[case]
    form: dict[str, Any] = {"plain": True} if scope == "plain" else {"scope": scope}
    config = ParallelConfig(data=data, tensor=tensor, checkpointing=checkpointing)
    plan = parallelize(llama(**form, **FAMILIES[family]), mesh_of(**axes), config)
    found = run_quickly(plan.gradients, plan.state.parameters, batch_of(case), plan)
    assert_same(found, reference(family, "packed" if "packed" in case else "padded"))


@pytest.mark.deep
@pytest.mark.parametrize("scope", ["mlp", "block"])
def test_of_fused_projections_no_more_is_kept_than_of_others(scope: str) -> None:
    """Nor gathered more: a layer's parameters are let go with their parts."""
    found = {}
    for kind in ("llama", "phi3"):
        config = llama_config(model_type=kind, hidden_size=64, intermediate_size=256, head_dim=8, num_hidden_layers=6)
        options: Any = {"tiling": Tiling(num_shards=2), "scope": scope}
        model = nnx.eval_shape(lambda config=config, options=options: Llama(config, **options, rngs=nnx.Rngs(0)))
        plan = parallelize(model, mesh_of(dp_shard=2), ParallelConfig(data=DataParallel()))
        batch = jax.ShapeDtypeStruct((2, 9), jnp.int32)
        program = plan.gradients.lower(plan.shapes.parameters, batch).compile(QUICKLY)
        found[kind] = program.memory_analysis().temp_size_in_bytes
    assert found["phi3"] <= found["llama"] + (1 + COST_BYTES) * 4 * 3 * 64 * 256, found


def test_tensor_parallelism_of_fused_projections_is_refused() -> None:
    """In the words of the other half."""
    model = nnx.eval_shape(lambda: Llama(llama_config(model_type="phi3"), rngs=nnx.Rngs(0)))
    text = (
        r"^parallelize: config\.tensor must be None where projections are fused, got TensorParallel for Llama\. "
        r"Its layers\.attention\.qkv and layers\.mlp\.w_gate_up are fused: a rank's part would be of other heads\."
    )
    with pytest.raises(UnsupportedError, match=text):
        parallelize(model, mesh_of(tp=2), ParallelConfig(tensor=TensorParallel()))
