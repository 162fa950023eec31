"""Layers of scope="block" whose attention cuDNN computes: lowered for CUDA without a GPU, and with the formula in its place."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.errors import UnsupportedError
from shared_specs.layers import block_costs
from tests.models.test_jax_block import assert_same, both, layer_of, rows, y_and_gradients
from tests.plans.jax_parallel_models import llama_config
from tiled_jax import backends
from tiled_jax.layers import attention
from tiled_jax.layers.attention import cudnn_refused
from tiled_jax.models import Llama, next_token_loss
from tiled_jax.models.block import cudnn


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A default device that calls itself a Hopper GPU with cuDNN 9.10, as far as JAX's checks know."""
    cudnn_refused.cache_clear()
    monkeypatch.setattr(backends, "device_kind", lambda: "gpu")
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)
    yield monkeypatch
    cudnn_refused.cache_clear()


@pytest.fixture
def by_jax(gpu: pytest.MonkeyPatch) -> None:
    """What cuDNN would compute is the formula written out, in float64 too."""
    gpu.setattr(attention, "cudnn_refused", lambda *operands: None)
    gpu.setattr(attention, "_cudnn", written_out)


def written_out(q: jax.Array, k: jax.Array, v: jax.Array, scores: Any) -> jax.Array:
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    found = scores.scale * jnp.einsum("bqnd,bknd->bnqk", q, k)
    seen = jnp.tril(jnp.ones(found.shape[2:], bool))
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(jnp.where(seen, found, -jnp.inf)), v)


def lowered(tokens: Any, **options: Any) -> str:
    """The program of loss and gradients for CUDA; options: of the loss."""
    config = replace(llama_config(), head_dim=64)
    model = nnx.eval_shape(lambda: Llama(config, scope="block", dtype="bfloat16", rngs=nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    loss = jax.value_and_grad(lambda p, tokens: nnx.merge(graph, p)(tokens, labels=tokens, **options))
    return jax.jit(loss).trace(parameters, tokens).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("gpu")
def test_a_layer_takes_the_kernels_of_cudnn() -> None:
    """Forward, forward again in backward, and backward: once each for all layers, which are one loop. Of an odd number of
    tokens too."""
    text = lowered(jnp.zeros((2, 15), jnp.int32))
    assert backends.last_run("causal_attention") == "cudnn"
    assert (text.count("@__cudnn$fmhaSoftmax("), text.count("@__cudnn$fmhaSoftmaxBackward(")) == (2, 1)


@pytest.mark.usefixtures("gpu")
def test_groups_of_heads_are_a_loop_that_keeps_no_operand_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what cuDNN's backward needs the log-sum-exp alone is kept of every group, [groups, B, heads of a group, S]."""
    monkeypatch.setattr(block_costs, "GROUP_ROWS", 1)
    q, k = (jnp.zeros((2, 16, heads, 64), jnp.bfloat16) for heads in (8, 4))
    attend = attention.cudnn_attention(q, k, k, scale=None, known=True, backend="auto")
    assert attend is not None
    made = cudnn._of_group(attend, [a[:, :, : a.shape[2] // 4] for a in (q, k, k)])
    output, *kept = made.program.out_avals
    assert output.shape == (2, 16, 2, 64)
    assert [a.shape for a in kept if a.size] == [(2, 2, 16)]
    text = lowered(jnp.zeros((2, 16), jnp.int32))
    assert (text.count("@__cudnn$fmhaSoftmax("), text.count("@__cudnn$fmhaSoftmaxBackward(")) == (2, 1)


def test_how_many_groups() -> None:
    """As many as leave each of them enough rows, a divisor of the key heads."""
    found = [block_costs.attention_groups(tokens, 32, 8) for tokens in (4096, 8192, 16384, 32768, 2**20)]
    assert found == [1, 2, 4, 8, 8]
    assert block_costs.attention_groups(32768, 12, 6) == 3


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["segment_ids", "attention_mask"])
def test_documents_and_padding_take_the_blocks(name: str) -> None:
    text = lowered(jnp.zeros((2, 16), jnp.int32), **{name: np.ones((2, 16), np.int32)})
    assert backends.last_run("causal_attention") == "blocks"
    assert "cudnn" not in text


@pytest.mark.ranks
@pytest.mark.usefixtures("gpu")
def test_a_mesh_cuts_sequences_apart_and_nothing_else() -> None:
    """cuDNN takes no operand whose tokens are on several devices: q, k, v and y in both forwards, and their gradients."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        text = lowered(jax.device_put(jnp.zeros((8, 16), jnp.int32), NamedSharding(mesh, P("data"))))
    kept = [line for line in text.splitlines() if "sharding_constraint" in line and "[{?}, {}, {}, {}]" in line]
    assert len(kept) == 12


@pytest.mark.deep_but(1)
@pytest.mark.usefixtures("by_jax")
@pytest.mark.parametrize(("tokens", "group_rows"), [(21, 2**17), (21, 1), (64, 2 * 64 * 2)])
def test_gradients_through_its_attention(
    tokens: int, group_rows: int, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All heads at once, and a key head with its query heads at a time."""
    monkeypatch.setattr(block_costs, "GROUP_ROWS", group_rows)
    graph, p = layer_of(16)
    x, dy = rows(2 * tokens, 1), rows(2 * tokens, 2)
    plain, block = (partial(y_and_gradients, fn) for fn in both(graph, 2, tokens))
    found = jax.jit(block)(p, x, dy)
    assert backends.last_run("causal_attention") == "cudnn"
    assert_same(found, jax.jit(plain)(p, x, dy))


@pytest.mark.deep
@pytest.mark.usefixtures("by_jax")
def test_forward_mode_takes_the_blocks(float64: None) -> None:
    """Kernels have no tangents."""
    graph, p = layer_of(16)
    x, dx = rows(2 * 21, 1), rows(2 * 21, 2)
    plain, block = both(graph, 2, 21)
    found = jax.jvp(partial(block, p), (x,), (dx,))
    assert backends.last_run("causal_attention") == "blocks"
    assert_same(found, jax.jvp(partial(plain, p), (x,), (dx,)))


def test_on_a_cpu_it_is_refused_by_name() -> None:
    model = Llama(llama_config(), scope="block", attention="cudnn", rngs=nnx.Rngs(0))
    with pytest.raises(UnsupportedError, match=r"^causal_attention: backend must be .*'cudnn'\. cuDNN needs a GPU"):
        next_token_loss(model, np.zeros((1, 5), np.int32))
