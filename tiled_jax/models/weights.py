"""Hugging Face names and layouts to the decoder's parameters and back, one table for both directions.

Layers are stacked (leading dim num_hidden_layers) and kernels are [in, out] here, one array a layer and [out, in] there.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.errors import SpecError, error_text, show_shape

Path = tuple[Any, ...]

_OUTER: dict[str, Path] = {
    "model.embed_tokens.weight": ("embed", "embedding"),
    "model.norm.weight": ("norm", "scale"),
    "lm_head.weight": ("head", "kernel"),
}
_IN_LAYER: dict[str, Path] = {
    "input_layernorm.weight": ("attention_norm", "scale"),
    "post_attention_layernorm.weight": ("mlp_norm", "scale"),
    **{
        f"self_attn.{name}_proj.{theirs}": ("attention", name, ours)
        for name in "qkvo"
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    },
    **{
        f"mlp.{name}_proj.{theirs}": ("mlp", f"{ours}_{name}")
        for name in ("gate", "up", "down")
        for theirs, ours in (("weight", "w"), ("bias", "b"))
    },
}
_HF_OUTER = {path: name for name, path in _OUTER.items()}
_HF_IN_LAYER: dict[tuple[Any, ...], str] = {("layers", *path): name for name, path in _IN_LAYER.items()}
_TRANSPOSED = ("kernel", "w_gate", "w_up", "w_down")


def from_hf(
    parameters: nnx.State,
    tensors: Mapping[str, np.ndarray],
    device: "jax.Device | nnx.State | None" = None,  # pyright: ignore[reportInvalidTypeForm]  # of which jax has no stub
) -> nnx.State:
    """The parameters with the values of `tensors`, copied, in the dtype of each parameter.

    Args:
        parameters: what `nnx.split(model)` or, without memory, `nnx.split(nnx.eval_shape(...))` gives.
        tensors: arrays by Hugging Face name, [out, in]. Every parameter has to be there and nothing else.
        device: where the copies go; None is JAX's default. An nnx.State of the same paths has a sharding for each, of
            which this process fills its own devices.
    Raises:
        SpecError: a tensor is missing, unknown or of another shape.
    Example:
        graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
        model = nnx.merge(graph, from_hf(parameters, tensors))
    """
    unused = set(tensors)
    places = (
        {path: leaf.get_value() for path, leaf in nnx.to_flat_state(device)} if isinstance(device, nnx.State) else {}
    )

    def take(name: str, shape: tuple[int, ...], path: Path) -> np.ndarray:
        if name not in tensors:
            raise SpecError(error_text("from_hf", "tensors", f"complete for this model, with {name}", "none of it"))
        unused.discard(name)
        array = tensors[name].T if path[-1] in _TRANSPOSED else tensors[name]
        if array.shape != shape:
            wanted = show_shape(shape[::-1] if path[-1] in _TRANSPOSED else shape)
            raise SpecError(error_text("from_hf", name, wanted, show_shape(tensors[name].shape)))
        return array

    def value(path: Path, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        if path in _HF_OUTER:
            host = take(_HF_OUTER[path], like.shape, path)
        else:
            names = [f"model.layers.{layer}.{_HF_IN_LAYER[path]}" for layer in range(like.shape[0])]
            host = np.stack([take(name, like.shape[1:], path) for name in names])
        if not isinstance(device, nnx.State):
            return jnp.array(host, dtype=like.dtype, device=device)
        # Copies too: XLA may take a NumPy array's memory as it is.
        dtype, place = like.dtype, places[path]
        return jax.make_array_from_callback(host.shape, place, lambda index: np.array(host[index], dtype=dtype))

    filled = [(path, leaf.replace(value(path, leaf.get_value()))) for path, leaf in nnx.to_flat_state(parameters)]
    if unused:
        raise SpecError(error_text("from_hf", "tensors", "free of names this model has no parameter for", min(unused)))
    return nnx.from_flat_state(filled)


def to_hf(parameters: nnx.State) -> dict[str, np.ndarray]:
    """Arrays on the host by Hugging Face name, [out, in]: read-only copies, each in one piece.

    Args:
        parameters: of a model, or anything with the same paths, such as its gradients or an optimizer's moments.
    """
    tensors = {}
    for path, leaf in nnx.to_flat_state(parameters):
        value = leaf.get_value()
        # NumPy looks at JAX's own copy: a view of the parameter itself would keep it from being donated.
        host = np.asarray(jnp.matrix_transpose(value) if path[-1] in _TRANSPOSED else jnp.copy(value))
        if path in _HF_OUTER:
            tensors[_HF_OUTER[path]] = host
        else:
            name = _HF_IN_LAYER[path]
            tensors |= {f"model.layers.{layer}.{name}": array for layer, array in enumerate(host)}
    return tensors
