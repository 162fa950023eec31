"""Models in float64, meshes and a plain reference for the tests of `parallelize`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

from shared_specs.config import Tiling
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.tiny_model import tiny_config
from tiled_jax import TiledMLP
from tiled_jax.models import Llama, LlamaConfig
from tiled_jax.parallel import Parallelized

# Compiling is most of the time of these tests, and neither numbers nor buffers nor collectives depend on how well LLVM does it.
QUICKLY: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LEARNING_RATE = 100.0  # an update of this size has the digits of its gradient


def mesh_of(kind: AxisType = AxisType.Auto, **axes: int) -> jax.sharding.Mesh:
    """The first devices as a mesh of these axes."""
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    devices = np.asarray(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(*axes.values())
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(kind,) * len(axes))


def llama_config(**changes: Any) -> LlamaConfig:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 4}
    return LlamaConfig.from_hf(tiny_config(**heads | {"num_hidden_layers": 3} | changes))


def llama(num_shards: int = 3, plain: bool = False, scope: str = "mlp", **changes: Any) -> Llama:
    """Weights, compute and norms in float64, no parameter zero."""
    options: Any = {"tiling": None if plain else Tiling(num_shards=num_shards), "plain": plain, "scope": scope}
    shapes = nnx.eval_shape(lambda: Llama(llama_config(**changes), **options, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shapes)
    random = np.random.default_rng(0)
    values = [
        (path, leaf.replace(jnp.asarray(("norm" in str(path)) + 0.2 * random.standard_normal(leaf.get_value().shape))))
        for path, leaf in nnx.to_flat_state(state)
    ]
    return computing_in(nnx.merge(graph, nnx.from_flat_state(values)), jnp.float64)


def computing_in(model: Any, dtype: Any) -> Any:
    """A copy with parameters of this dtype, whose modules with a `dtype` of the computation have this one."""
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda a: a.astype(dtype), state))
    for _, module in nnx.iter_modules(model):
        if getattr(module, "dtype", None) is not None:
            module.dtype = jnp.dtype(dtype)
    return model


def token_ids(sequences: int = 8, tokens: int = 24) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 272, (sequences, tokens + 1)).astype(np.int32)


def padded(tokens: np.ndarray) -> np.ndarray:
    """With rows that end in -100, of several lengths: no two devices have as many tokens to predict."""
    lengths = tokens.shape[1] - np.arange(len(tokens)) % (tokens.shape[1] // 2)
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, np.int32(-100))


def packed(sequences: int = 8, tokens: int = 24) -> dict[str, np.ndarray]:
    """Documents of other lengths in each sequence, and labels of -100 anywhere: a prompt, say."""
    random = np.random.default_rng(2)
    ids = random.integers(0, 272, (sequences, tokens)).astype(np.int32)
    labels = np.where(random.random(ids.shape) < 0.3, np.int32(-100), ids)
    ends = 1 + np.arange(sequences)[:, None] % (tokens - 2), np.full((sequences, 1), tokens - 2)
    places = np.arange(tokens)[None]
    starts = np.where(places >= ends[1], ends[1], np.where(places >= ends[0], ends[0], 0))
    return {"input_ids": ids, "labels": labels, "position_ids": (places - starts).astype(np.int32)}


class Blocks(nnx.Module):
    """A linear layer, two residual MLPs in a list, a linear layer."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = jnp.float64) -> None:
        self.first = nnx.Linear(6, 8, param_dtype=dtype, rngs=rngs)
        mlp = [TiledMLP(8, 16, num_shards=3, bias=True, param_dtype=dtype, rngs=rngs) for _ in range(2)]
        self.layers = nnx.List(mlp)
        self.last = nnx.Linear(8, 6, param_dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def blocks_loss(model: Blocks, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - jnp.cos(x)) ** 2)


def loss_and_gradients(model: nnx.Module, loss_fn: Any, batch: Any) -> tuple[jax.Array, Any]:
    """On one device."""
    graph, state = nnx.split(model)
    lowered = jax.jit(jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p), batch))).lower(state)
    return lowered.compile(QUICKLY)(state)


def quickly(jitted: Any, *arguments: Any) -> Any:
    """jitted(*arguments), compiled without optimization."""
    return jitted.lower(*arguments).compile(QUICKLY)(*arguments)


def run_quickly(fn: Any, state: Any, batch: Any, plan: Parallelized) -> Any:
    """fn(state, batch) of a plan, compiled without optimization."""
    return fn.lower(state, batch).compile(QUICKLY)(state, jax.device_put(batch, plan.batch_sharding))


def assert_same(actual: Any, expected: Any) -> None:
    found, wanted = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, jax.tree_util.keystr(path))
