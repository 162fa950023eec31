"""Who computes `causal_attention`: cuDNN on a GPU where it can, the blocks everywhere. Lowered for CUDA without a GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import PartitionSpec as P

from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import llama_config, mesh_of
from tiled_jax import backends
from tiled_jax.layers.attention import causal_attention, cudnn_refused
from tiled_jax.models import Llama
from tiled_jax.parallel import parallelize


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A default device that calls itself a GPU, without cuDNN."""
    cudnn_refused.cache_clear()
    monkeypatch.setattr(backends, "device_kind", lambda: "gpu")
    yield monkeypatch
    cudnn_refused.cache_clear()


@pytest.fixture
def cudnn(gpu: pytest.MonkeyPatch) -> None:
    """One with cuDNN 9.10, of the Hopper generation, as far as JAX's checks know."""
    gpu.setattr(fused, "check_cudnn_version", lambda: 91000)
    gpu.setattr(fused, "check_compute_capability", lambda capability: True)
    gpu.setattr(fused, "is_cuda_compute_capability_equal", lambda capability: False)


def shapes(dtype: Any = jnp.bfloat16, d: int = 64) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((2, 48, heads, d), dtype) for heads in (4, 2, 2)]


def for_cuda(attend: Any, *arrays: Any) -> str:
    def with_gradients(*arrays: Any) -> Any:
        y, pull = jax.vjp(attend, *arrays)
        return y, pull(y)

    return jax.jit(with_gradients).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("cudnn")
@pytest.mark.ranks
def test_a_gpu_takes_the_kernels_of_cudnn() -> None:
    """Forward and backward, inside `shard_map` as outside."""
    split = jax.shard_map(causal_attention, mesh=mesh_of(dp=2), in_specs=(P("dp"),) * 3, out_specs=P("dp"))
    for attend in (causal_attention, split):
        text = for_cuda(attend, *shapes())
        assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
        assert backends.last_run("causal_attention") == "cudnn"


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(
    ("arrays", "options", "reason"),
    [
        (shapes(jnp.float32), {}, "must be fp16/bf16"),
        (shapes(d=60), {}, "head dim must be <= "),
        (shapes(), {"documents": np.zeros((1, 48), np.int32)}, "It knows neither documents, masks, caps nor blocks"),
        (shapes(), {"block_tokens": 16}, "It knows neither documents, masks, caps nor blocks"),
    ],
    ids=["float32", "features", "documents", "blocks"],
)
def test_what_cudnn_cannot_do(arrays: Any, options: dict[str, Any], reason: str) -> None:
    jax.eval_shape(partial(causal_attention, **options), *arrays)
    assert backends.last_run("causal_attention") == "blocks"
    with pytest.raises(UnsupportedError, match=r"^causal_attention: backend must be 'auto' or 'blocks' .*" + reason):
        jax.eval_shape(partial(causal_attention, backend="cudnn", **options), *arrays)


@pytest.mark.deep
@pytest.mark.parametrize("tokens", [8, 9])
def test_of_an_odd_number_of_tokens_cudnn_sees_one_more(tokens: int, gpu: pytest.MonkeyPatch) -> None:
    """It wants an even one. With JAX's own attention in cuDNN's place values and gradients are those of the blocks."""
    own, seen = jax.nn.dot_product_attention, []

    def by_jax(q: jax.Array, *others: jax.Array, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        seen.append(q.shape[1])
        return own(q, *others, **options)

    gpu.setattr(jax.nn, "dot_product_attention", by_jax)
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((2, tokens, n, 8)), jnp.float32) for n in (4, 2, 2))

    def results(backend: str) -> list[Any]:
        y, pull = jax.vjp(partial(causal_attention, backend=backend), q, k, v)
        return [y, *pull(jnp.cos(y))]

    found, expected = results("auto"), results("blocks")
    assert set(seen) == {8 if tokens == 8 else 10}
    for a, b in zip(found, expected, strict=True):
        assert_within(np.asarray(a), np.asarray(b), limit(0.0, "float32"), "attention")


@pytest.mark.usefixtures("cudnn")
def test_the_blocks_may_be_asked_for() -> None:
    jax.eval_shape(partial(causal_attention, backend="blocks"), *shapes())
    assert backends.last_run("causal_attention") == "blocks"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_cudnn_takes_the_blocks() -> None:
    assert "cudnn" not in for_cuda(causal_attention, *shapes())
    with pytest.raises(UnsupportedError, match=r"'cudnn'\. cuDNN is not detected"):
        jax.eval_shape(partial(causal_attention, backend="cudnn"), *shapes())


def test_on_a_cpu() -> None:
    with pytest.raises(UnsupportedError, match=r"'cudnn'\. cuDNN needs a GPU"):
        jax.eval_shape(partial(causal_attention, backend="cudnn"), *shapes())
    with pytest.raises(SpecError, match=r"^causal_attention: backend must be one of auto, blocks, cudnn, got 'flash'"):
        jax.eval_shape(partial(causal_attention, backend="flash"), *shapes())


@pytest.mark.ranks
def test_a_decoder_asks_for_what_it_is_told() -> None:
    """And refuses where a ring has blocks of its own."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(llama_config(), attention="cudnn", rngs=nnx.Rngs(0))))
    with pytest.raises(UnsupportedError, match=r"'cudnn'\. cuDNN needs a GPU"):
        jax.eval_shape(lambda p: nnx.merge(graph, p)(np.zeros((1, 4), np.int32)), state)
    with pytest.raises(SpecError, match=r"^Llama: attention must be one of auto, blocks, cudnn, got 'flash'"):
        Llama(llama_config(), attention="flash", rngs=nnx.Rngs(0))
    config = ParallelConfig(data=DataParallel(context_axis="cp", context="ring"))
    plan = partial(parallelize, nnx.merge(graph, state), mesh_of(dp_shard=1, cp=2))
    with pytest.raises(
        UnsupportedError, match=r"^parallelize: the model's attention must be .* with rings, got 'cudnn'"
    ):
        plan(config)
    plan = plan(ParallelConfig(data=DataParallel(context_axis="cp")))
    with pytest.raises(UnsupportedError, match=r"'cudnn'\. cuDNN needs a GPU"):
        plan.gradients.lower(plan.shapes.parameters, np.zeros((1, 5), np.int32))
