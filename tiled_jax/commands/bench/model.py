"""`bench --op model` in JAX: a Flax decoder in 32 and 16 bits, plain and tiled, against itself in float64."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.app.bench.model_errors import Array, Found, measure_model, tokens_of
from shared_specs.app.bench.workloads import ModelWorkload
from shared_specs.app.models.weights import ModelFiles, read_model
from shared_specs.config import Tiling
from tiled_jax.models import Llama, LlamaConfig, from_hf, to_hf

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
NOTE = (
    "plain is the decoder of tiled_jax without tiling, its cross entropy of all logits at once; float64 is the same model in "
    "float64 throughout, its angles of positions too"
)
TRUTH = {"plain": True, "dtype": "float64"}


def facts() -> dict[str, Any]:
    return {"model": NOTE, "threads": os.cpu_count()}


def measure(workload: ModelWorkload, repeats: int = 1, source: str | None = None) -> list[dict[str, Any]]:
    """Return one result a variant. source: a model on disk; None is SmolLM2-135M."""
    files = read_model(source)
    ids = tokens_of(workload, files)
    return measure_model(workload, truth_of(files, ids, workload.dtype), variants(files, ids, workload.dtype))


def variants(files: ModelFiles, ids: Array, dtype: str = "float32") -> dict[str, Callable[[], Found]]:
    """Name -> how to compute the loss and every gradient. dtype: of the products; weights are rounded to it."""
    tiling = {"tiling": Tiling(num_shards=4)}
    options: dict[str, dict[str, Any]] = {
        "plain": {"plain": True},
        "tiled": tiling,
        "tiled, scope block": tiling | {"scope": "block"},
    }
    return {
        name: partial(results_of, files, ids, own | {"dtype": dtype}, rounded_to=dtype) for name, own in options.items()
    }


def truth_of(files: ModelFiles, ids: Array, rounded_to: str = "float32") -> Found:
    """Return the loss of the next token and every gradient in float64."""
    # Flax's norms promote float64 and float32, the least they compute in, which strict promotion refuses.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return results_of(files, ids, TRUTH, rounded_to=rounded_to)


def results_of(files: ModelFiles, ids: Array, options: Mapping[str, Any], *, rounded_to: str = "float32") -> Found:
    """Return the loss of the next token and every gradient by its Hugging Face name.

    options: of `Llama`. rounded_to: a dtype that has the weights.
    """
    function, parameters = loss_and_gradients(files, ids, options)
    parameters = jax.tree.map(lambda a: a.astype(rounded_to).astype(a.dtype), parameters)
    loss, gradients = jax.jit(function)(parameters)
    return loss.item(), to_hf(gradients)


def loss_and_gradients(files: ModelFiles, ids: Array, options: Mapping[str, Any]) -> tuple[Callable[..., Any], Any]:
    """Return what computes both from the parameters, and the parameters. options: of `Llama`."""
    config, tokens = LlamaConfig.from_hf(files.config), jnp.asarray(ids, jnp.int32)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(0))))

    def loss_of(parameters: nnx.State) -> jax.Array:
        return nnx.merge(graph, parameters)(tokens, labels=tokens)

    return jax.value_and_grad(loss_of), from_hf(shapes, files.weights)
