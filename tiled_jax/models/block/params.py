"""The parameters of a decoder layer by the names that its steps have for them, and projections that are one parameter.

These stay one in what is kept for backward, where they are the model's own arrays, and are copied into their parts where a
layer computes. s_* are the scales of norms, w_* and b_* matrices and biases, l_* and r_* the two matrices of an adapter.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tiled_jax.core.linear_call import Arrays
from tiled_jax.core.params import as_operands, held
from tiled_jax.mlp.projections import ORDER, check_once
from tiled_jax.models.block.adapters import dtype_of_products, mlp_projections, projection_of
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.experts import WEIGHTS

QKV = ("q", "k", "v")
_PARTS = {"qkv": QKV, "gate_up": ("gate", "up")}
# The scales of a layer's norms; those of branches are behind what attention and the MLP return.
_NORMS = {
    "s_attention": "attention_norm",
    "s_attention_out": "attention_out_norm",
    "s_mlp": "mlp_norm",
    "s_mlp_out": "mlp_out_norm",
}


def parameters_of(layer: Any) -> Arrays:
    """Return the parameters of a `DecoderLayer` by name, projections in the dtype of the products or as masters of it."""
    attention = layer.attention
    norms = {name: getattr(layer, theirs) for name, theirs in _NORMS.items()}
    norms |= {"s_q": attention.q_norm, "s_k": attention.k_norm}
    w: dict[str, Any] = {name: norm.scale for name, norm in norms.items() if norm is not None}
    for name in ("qkv", "o") if attention.config.fused else (*QKV, "o"):
        w |= projection_of(getattr(attention, name)).parameters(name)
    if attention.config.experts is None:
        called = mlp_projections(layer.mlp)
        for name, projection in called.items():
            w |= projection.parameters(name)
    found = {name: value[...] for name, value in w.items()}
    if attention.config.experts is not None:
        found |= {"w_router": layer.mlp.router.kernel[...]} | held("Llama", layer.mlp, WEIGHTS)
    elif called:
        check_once("Llama", layer.mlp, tuple(called))
        others = [name for name in ORDER if name not in called]
        found |= held("Llama", layer.mlp, [f"w_{name}" for name in others], [f"b_{name}" for name in others])
    else:
        found |= layer.mlp.config.held("Llama", layer.mlp)
    dtype = dtype_of_products(layer.mlp)
    if dtype is None:
        return found
    return found | as_operands({name: a for name, a in found.items() if not name.startswith("s_")}, dtype)


def apart(config: LlamaConfig, operands: Arrays) -> Arrays:
    """Return operands with projections that are one parameter as copies of their parts."""
    found = {}
    for name, a in operands.items():
        kind, whole = name[:2], name[2:]
        if whole not in _PARTS:
            found[name] = a
            continue
        found |= {kind + part: cut for part, cut in parts_of(config, whole, a).items()}
    return found


def parts_of(config: LlamaConfig, name: str, a: jax.Array) -> Arrays:
    """Return the parts of a parameter [..., columns] of the projection `name`, by their names; of any other it itself."""
    if name not in _PARTS:
        return {name: a}
    keys = config.num_key_value_heads * config.head_dim
    queries, half = a.shape[-1] - 2 * keys, a.shape[-1] // 2
    ends = (queries, queries + keys) if name == "qkv" else (half,)
    return dict(zip(_PARTS[name], jnp.split(a, ends, axis=-1), strict=True))


def names_apart(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the operands that `apart` makes of these."""
    return tuple(name[:2] + part for name in names for part in _PARTS.get(name[2:], (name[2:],)))


def together(found: Arrays, names: tuple[str, ...]) -> Arrays:
    """Return gradients by the names of the operands; found: of those that `apart` makes of them."""

    def of(name: str) -> jax.Array:
        parts = _PARTS.get(name[2:])
        return found[name] if parts is None else jnp.concatenate([found[name[:2] + part] for part in parts], axis=-1)

    return {name: of(name) for name in names if names_apart((name,))[0] in found}
