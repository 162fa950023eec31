"""Hugging Face names and layouts to the decoder's parameters and back, one table for both directions.

Layers are stacked (leading dim num_hidden_layers), experts within them (the next dim), and kernels are [in, out] here; there
one array is of one layer or expert, and [out, in]. Which family a model is of shows in the parameters that it has.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shared_specs.app.models.decoders import DECODERS
from shared_specs.errors import SpecError, error_text, fail_type, show_shape

Path = tuple[Any, ...]

_OUTER: dict[Path, str] = {
    ("embed", "embedding"): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head", "kernel"): "lm_head.weight",
}
_NORMS: dict[Path, str] = {
    ("attention_norm", "scale"): "input_layernorm.weight",
    ("mlp_norm", "scale"): "post_attention_layernorm.weight",
}
_BRANCH_NORMS: dict[Path, str] = _NORMS | {
    ("attention_out_norm", "scale"): "post_attention_layernorm.weight",
    ("mlp_norm", "scale"): "pre_feedforward_layernorm.weight",
    ("mlp_out_norm", "scale"): "post_feedforward_layernorm.weight",
}
_ATTENTION: dict[Path, str] = {
    **{
        ("attention", name, ours): f"self_attn.{name}_proj.{theirs}"
        for name in ("q", "k", "v", "qkv", "o")
        for theirs, ours in (("weight", "kernel"), ("bias", "bias"))
    },
    **{("attention", f"{name}_norm", "scale"): f"self_attn.{name}_norm.weight" for name in "qk"},
}
_MLP: dict[Path, str] = {
    ("mlp", f"{ours}_{name}"): f"mlp.{name}_proj.{theirs}"
    for name in ("gate", "up", "gate_up", "down")
    for theirs, ours in (("weight", "w"), ("bias", "b"))
}
_ROUTER: Path = ("mlp", "router", "kernel")
_TRANSPOSED = ("kernel", "w_gate", "w_up", "w_gate_up", "w_down")


def _experts_of(kind: str) -> dict[Path, str]:
    terms = DECODERS[kind].experts
    assert terms is not None
    return {_ROUTER: f"{terms.inside}.gate.weight"} | {
        ("mlp", f"w_{name}"): f"{terms.inside}.experts.{{}}.{theirs}.weight"
        for name, theirs in (("gate", terms.gate), ("up", terms.up), ("down", terms.down))
    }


class _TensorNames:
    """The Hugging Face names of the parameters of one model."""

    def __init__(self, paths: Iterable[Path]):
        there = {path[1:] for path in paths if path[0] == "layers"}
        norms = _BRANCH_NORMS if ("attention_out_norm", "scale") in there else _NORMS
        experts = _experts_of("qwen3_moe" if ("attention", "q_norm", "scale") in there else "mixtral")
        self._in_layer = norms | _ATTENTION | (experts if _ROUTER in there else _MLP)

    def stacked(self, path: Path) -> int:
        """Return how many leading dims are layers and experts."""
        return 0 if path in _OUTER else 1 + ("{}" in self._in_layer[path[1:]])

    def of(self, path: Path, place: tuple[int, ...]) -> str:
        """Return the name of one array; place: its layer, and its expert."""
        if path in _OUTER:
            return _OUTER[path]
        return f"model.layers.{place[0]}.{self._in_layer[path[1:]].format(*place[1:])}"

    def places(self, path: Path, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the places of all arrays of a parameter of this shape."""
        return product(*map(range, shape[: self.stacked(path)]))


def _check_state(function: str, parameters: Any) -> None:
    if not isinstance(parameters, nnx.State):
        advice = "nnx.state(model, nnx.Param) returns it."
        fail_type(function, "parameters", "the nnx.State of a model", type(parameters).__name__, advice=advice)


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
        SpecError: a tensor is missing, unknown or of another shape. TypeError: parameters are no nnx.State.
    Example:
        graph, parameters = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
        model = nnx.merge(graph, from_hf(parameters, tensors))
    """
    _check_state("from_hf", parameters)
    unused, flat = set(tensors), nnx.to_flat_state(parameters)
    names = _TensorNames(path for path, _ in flat)
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
        stacked = names.stacked(path)
        arrays = {
            place: take(names.of(path, place), like.shape[stacked:], path) for place in names.places(path, like.shape)
        }
        transposed = path[-1] in _TRANSPOSED

        def part(index: Any) -> np.ndarray:
            """Return a new array, since XLA may take the memory of the one it is given."""
            chosen = [range(size)[s] for size, s in zip(like.shape, index, strict=True)]
            found, inner = np.empty([len(each) for each in chosen], like.dtype), index[stacked:]
            for at in product(*(range(len(each)) for each in chosen[:stacked])):
                array = arrays[tuple(each[i] for each, i in zip(chosen, at, strict=False))]
                found[at] = array[inner[::-1]].T if transposed else array[inner]
            return found

        if isinstance(device, nnx.State):
            return jax.make_array_from_callback(like.shape, places[path], part)
        return jnp.array(part((slice(None),) * len(like.shape)), device=device)

    filled = [(path, leaf.replace(value(path, leaf.get_value()))) for path, leaf in flat]
    if unused:
        raise SpecError(error_text("from_hf", "tensors", "free of names this model has no parameter for", min(unused)))
    return nnx.from_flat_state(filled)


def each_hf(parameters: nnx.State) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays of `to_hf`, one layer's at a time, also where several processes share them: all of them take each.

    Memory: one array, on the host and on each device that has a part of it.
    """
    flat = nnx.to_flat_state(parameters)
    names = _TensorNames(path for path, _ in flat)
    for path, leaf in flat:
        value = leaf.get_value()
        where = value.sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, PartitionSpec())
        one = jax.jit(_copied, out_shardings=where)
        for place in names.places(path, value.shape):
            host = np.asarray(one(value, place).addressable_data(0))
            yield names.of(path, place), host.T if path[-1] in _TRANSPOSED else host


def _copied(value: jax.Array, place: tuple[jax.Array, ...]) -> jax.Array:
    """Return the array at a place, a copy."""
    for number in place:
        value = jax.lax.dynamic_index_in_dim(value, number, axis=0, keepdims=False)
    return value if place else jnp.copy(value)


def to_hf(parameters: nnx.State) -> dict[str, np.ndarray]:
    """Arrays on the host by Hugging Face name, [out, in]: read-only copies, each in one piece.

    Args:
        parameters: of a model, or anything with the same paths, such as its gradients or an optimizer's moments.
    """
    _check_state("to_hf", parameters)
    tensors, flat = {}, nnx.to_flat_state(parameters)
    names = _TensorNames(path for path, _ in flat)
    for path, leaf in flat:
        value = leaf.get_value()
        # NumPy looks at JAX's own copy: a view of the parameter itself would keep it from being donated.
        host = np.asarray(jnp.matrix_transpose(value) if path[-1] in _TRANSPOSED else jnp.copy(value))
        tensors |= {names.of(path, place): host[place] for place in names.places(path, value.shape)}
    return tensors
