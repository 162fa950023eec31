"""Hugging Face names and layouts to the decoder's parameters and back, one table for both directions.

Layers are stacked (leading dim num_hidden_layers) and kernels are [in, out] here, one array a layer and [out, in] there.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

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
    tensors: Mapping[str, Any],
    device: "jax.Device | nnx.State | None" = None,  # pyright: ignore[reportInvalidTypeForm]  # of which jax has no stub
) -> nnx.State:
    """Return the parameters with the values of `tensors`, copied, in the dtype of each parameter.

    Args:
        parameters: what `nnx.split(model)` or, without memory, `nnx.split(nnx.eval_shape(...))` gives.
        tensors: arrays by Hugging Face name, [out, in]: NumPy's, or what has a `shape` and gives one for a tuple of slices,
            such as an array in a file. Every parameter has to be there and nothing else.
        device: where the copies go; None is JAX's default. An nnx.State of the same paths has a sharding for each, of
            which this process fills its own devices, and of `tensors` asks for no more than they hold.
    Memory: one parameter on the host beside those that are done; the layers' are one parameter.
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

    def take(name: str, shape: tuple[int, ...], path: Path) -> Any:
        if name not in tensors:
            raise SpecError(error_text("from_hf", "tensors", f"complete for this model, with {name}", "none of it"))
        unused.discard(name)
        wanted = shape[::-1] if path[-1] in _TRANSPOSED else shape
        if tensors[name].shape != wanted:
            raise SpecError(error_text("from_hf", name, show_shape(wanted), show_shape(tensors[name].shape)))
        return tensors[name]

    def value(path: Path, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
        if path in _HF_OUTER:
            layers = [take(_HF_OUTER[path], like.shape, path)]
        else:
            names = [f"model.layers.{layer}.{_HF_IN_LAYER[path]}" for layer in range(like.shape[0])]
            layers = [take(name, like.shape[1:], path) for name in names]
        transposed = path[-1] in _TRANSPOSED

        def part(index: Any) -> np.ndarray:
            """Return a new array, since XLA may take the memory of the one it is given."""
            found = np.empty([len(range(size)[s]) for size, s in zip(like.shape, index, strict=True)], like.dtype)
            chosen, inner = (layers, index) if path in _HF_OUTER else (layers[index[0]], index[1:])
            targets = [found] if path in _HF_OUTER else found
            for target, layer in zip(targets, chosen, strict=True):
                target[...] = layer[inner[::-1]].T if transposed else layer[inner]
            return found

        if isinstance(device, nnx.State):
            return jax.make_array_from_callback(like.shape, places[path], part)
        return jnp.array(part((slice(None),) * len(like.shape)), device=device)

    filled = [(path, leaf.replace(value(path, leaf.get_value()))) for path, leaf in nnx.to_flat_state(parameters)]
    if unused:
        raise SpecError(error_text("from_hf", "tensors", "free of names this model has no parameter for", min(unused)))
    return nnx.from_flat_state(filled)


def each_hf(parameters: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays of `to_hf`, one layer's at a time, also where several processes share them: all of them take each.

    Memory: one array, on the host and on each device that has a part of it.
    """
    for path, leaf in nnx.to_flat_state(parameters):
        value = leaf.get_value()
        place = value.sharding
        if isinstance(place, NamedSharding):
            place = NamedSharding(place.mesh, PartitionSpec())
        if path in _HF_OUTER:
            whole = [(_HF_OUTER[path], jax.jit(jnp.copy, out_shardings=place)(value))]
        else:
            layer = jax.jit(partial(jax.lax.dynamic_index_in_dim, axis=0, keepdims=False), out_shardings=place)
            whole = (
                (f"model.layers.{number}.{_HF_IN_LAYER[path]}", layer(value, number)) for number in range(len(value))
            )
        for name, array in whole:
            host = np.asarray(array.addressable_data(0))
            yield name, host.T if path[-1] in _TRANSPOSED else host


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
