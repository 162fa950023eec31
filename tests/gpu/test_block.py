"""Layers of scope="block" in JAX on a GPU: attention by cuDNN gives what attention in blocks gives."""

import numpy as np
import pytest

from shared_specs.core.rounding import relative_error
from shared_specs.layers import block_costs
from shared_specs.tolerances import between
from tests.tiny_model import tiny_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("dtype", "group_rows"), [("bfloat16", 1), ("float16", 2**17)])
def test_cudnn_gives_what_the_blocks_give(dtype: str, group_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of heads at a time, and all at once."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.fail("this test needs a GPU that JAX sees; set JAX_PLATFORMS=cuda,cpu")
    from flax import nnx

    from shared_specs.config import Tiling
    from tiled_jax import backends
    from tiled_jax.models import Llama, LlamaConfig

    monkeypatch.setattr(block_costs, "GROUP_ROWS", group_rows)
    config = LlamaConfig.from_hf(tiny_config(hidden_size=64, head_dim=64))
    tokens = np.random.default_rng(0).integers(0, 256, (2, 96))

    def results(attention: str) -> list[np.ndarray]:
        tiling = Tiling(shard_tokens=40)
        options = {"tiling": tiling, "scope": "block", "attention": attention, "dtype": dtype}
        graph, parameters = nnx.split(Llama(config, **options, rngs=nnx.Rngs(0)))
        loss = jax.value_and_grad(lambda p: nnx.merge(graph, p)(tokens, labels=tokens))
        found = jax.tree.leaves(jax.jit(loss)(parameters))
        assert backends.last_run("causal_attention") == ("cudnn" if attention == "auto" else attention)
        return [np.asarray(a) for a in found]

    for by_cudnn, by_blocks in zip(results("auto"), results("blocks"), strict=True):
        assert relative_error(by_cudnn, by_blocks) <= 2 * between(dtype)
