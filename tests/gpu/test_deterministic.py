"""On a GPU: `Tiling(deterministic=True)` gives equal bits at every shard count, with the real order of tensor cores' sums."""

import numpy as np
import pytest

from shared_specs.config import Tiling

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INTERMEDIATE = 4096, 1024, 2816


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_jax_results_do_not_depend_on_the_number_of_shards(gated: bool) -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.fail("this test needs a GPU that JAX sees; set JAX_PLATFORMS=cuda,cpu")
    import jax.numpy as jnp

    from tiled_jax import tiled_mlp

    rng = np.random.default_rng(0)
    shapes = (TOKENS, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN), (TOKENS, HIDDEN)
    x, w_gate, w_up, w_down, dy = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    weights = (w_gate, w_up, w_down) if gated else (w_up, w_down)

    def results(num_shards: int) -> list[np.ndarray]:
        tiling = Tiling(num_shards=num_shards, deterministic=True)

        def call(x: jax.Array, *weights: jax.Array) -> jax.Array:
            operands = weights if gated else (None, *weights)
            return tiled_mlp(x, *operands, tiling=tiling, backend="pallas")

        @jax.jit
        def step(x: jax.Array, dy: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
            y, pull = jax.vjp(call, x, *weights)
            return y, *pull(dy)

        return [np.asarray(a).view(f"u{a.dtype.itemsize}") for a in step(x, dy, *(w / 32 for w in weights))]

    whole = results(1)
    for num_shards in (2, 32):  # each is compiled
        for found, expected in zip(results(num_shards), whole, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_torch_results_do_not_depend_on_the_number_of_shards(gated: bool, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    from tiled_torch import tiled_mlp

    kind, generator = getattr(torch, dtype), torch.Generator("cuda").manual_seed(0)
    shapes = (TOKENS, HIDDEN), (INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE), (TOKENS, HIDDEN)
    x, w_gate, w_up, w_down, dy = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    given = (x, *(w / 32 for w in (w_gate, w_up, w_down)))
    leaves = [a.to(kind).requires_grad_() for a in (given if gated else (x, *given[2:]))]

    def results(num_shards: int) -> list[torch.Tensor]:
        weights = leaves[1:] if gated else [None, *leaves[1:]]
        tiling = Tiling(num_shards=num_shards, deterministic=True)
        y = tiled_mlp(leaves[0], *weights, tiling=tiling, backend="triton")
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(kind))]

    whole = results(1)
    for num_shards in (2, 4, 8, 32):
        for found, expected in zip(results(num_shards), whole, strict=True):
            assert torch.equal(found, expected)
