"""A decoder with scope="block" compiled for an H200: its inputs wait in host memory, and the rest does not grow with layers."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import Checkpointing, Tiling
from shared_specs.layers.block_costs import block_row_bytes
from shared_specs.tolerances import COST_BYTES
from tests.aot import h200
from tests.tiny_model import tiny_config
from tiled_jax import backends
from tiled_jax.layers import attention_blocks
from tiled_jax.layers.attention import cudnn_refused
from tiled_jax.models import Llama, LlamaConfig, next_token_loss

H = 512
CONFIG = tiny_config(
    hidden_size=H,
    intermediate_size=1792,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=256,
)
SHORT, LONG = 4096, 8192
DTYPES: Any = ["bfloat16", "float32"]


def temporary_bytes(tokens: int, layers: int, dtype: str) -> tuple[int, int]:
    """On the device and in host memory, of loss and gradients."""
    config = LlamaConfig.from_hf(CONFIG | {"num_hidden_layers": layers})
    options: Any = {"scope": "block", "checkpointing": Checkpointing(offload=True), "tiling": Tiling(shard_tokens=256)}
    graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, **options, rngs=nnx.Rngs(0))))
    parameters = jax.tree.map(lambda a: h200.shape(a.dtype, *a.shape), parameters)
    loss = jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens))
    found = h200.compiled(loss, parameters, h200.shape(jnp.int32, 1, tokens + 1)).memory_analysis()
    return found.temp_size_in_bytes, found.host_temp_size_in_bytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_a_token_with_offloaded_inputs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At two lengths and two depths; in arrays [T, H] of the residual stream, whose dtype is float32."""
    # The processor that compiles is no GPU.
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 128, "gpu": 128})
    found = {(tokens, layers): temporary_bytes(tokens, layers, dtype) for tokens in (SHORT, LONG) for layers in (2, 4)}
    few, many = ((found[LONG, layers][0] - found[SHORT, layers][0]) / (LONG - SHORT) for layers in (2, 4))
    itemsize = jnp.dtype(dtype).itemsize
    predicted = block_row_bytes(hidden=H, heads=16, kv_heads=4, head_dim=32, itemsize=itemsize)
    print(dtype, found, few / (4 * H), many / (4 * H), predicted / (4 * H))
    assert found[LONG, 4][1] == 4 * LONG * H * 4  # in host memory
    assert few == many == pytest.approx(predicted, rel=COST_BYTES)
    assert few <= 7 * 4 * H


def first_dim(a: Any) -> P:
    """The first dim that eight devices divide, of arrays with several."""
    dims = [dim for dim, size in enumerate(a.shape) if size % 8 == 0 and a.ndim > 1]
    return P(*[None] * dims[0], "data") if dims else P()


# Scope -> how weights are laid out -> the sequences of sixteen that a call of cuDNN has; None: as XLA chooses, but no error.
LAYOUTS: list[Any] = [
    ("block", lambda a: P(), 2),
    ("block", first_dim, 2),
    ("mlp", first_dim, 2),
    ("mlp", lambda a: P(None, "data") if a.ndim > 1 else P(), None),
]


@pytest.mark.parametrize(
    ("scope", "layout", "sequences"), LAYOUTS, ids=["whole", "first dim", "first dim, mlp", "second dim, mlp"]
)
def test_cudnn_attends_on_a_mesh(
    scope: str, layout: Any, sequences: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under plain `jit` on eight H200s, tokens cut by sequences: q, k and v are laid out alike however weights are."""
    cudnn_refused.cache_clear()
    monkeypatch.setattr(backends, "device_kind", lambda: "gpu")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    mesh = topologies.make_mesh(h200.topology("1x8x1"), (8,), ("data",))
    config = LlamaConfig.from_hf(CONFIG | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128})
    model = nnx.eval_shape(lambda: Llama(config, scope=scope, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    loss = jax.value_and_grad(lambda p, tokens: next_token_loss(nnx.merge(graph, p), tokens))

    def on_mesh(a: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    tokens = on_mesh(jax.ShapeDtypeStruct((16, 65), jnp.int32), P("data"))
    laid_out = jax.tree.map(lambda a: on_mesh(a, layout(a)), parameters)
    text = h200.compiled(loss, laid_out, tokens).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line]
    found = [re.search(r"= \(bf16\[(\d+),16,64,32\]", call) for call in calls]
    assert len(found) == 3
    assert all(one is not None and sequences in (None, int(one[1])) for one in found)
    cudnn_refused.cache_clear()
