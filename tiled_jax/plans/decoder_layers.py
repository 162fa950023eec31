"""Layers of the Llama decoder whose projections are one parameter, as layers whose projections are parameters of their own.

A mesh holds and gathers such a parameter as it is; what computes with a layer sees its parts, which are gone with it.
"""

from dataclasses import replace
from typing import Any

from flax import nnx

from tiled_jax.models import Llama
from tiled_jax.models.block.params import parts_of
from tiled_jax.models.layer import DecoderLayer, mlp_of
from tiled_jax.plans.data import Opened


def layer_apart(model: Llama) -> tuple[nnx.GraphDef, Opened | None]:
    """Return the graph of one layer, and what makes its parameters of those of the model; None: they are the same."""
    if not model.config.fused:
        return nnx.graphdef(model.layers), None
    config, layers = replace(model.config, fused=False), model.layers
    mlp: Any = layers.mlp
    tiling = None if model.plain else mlp.config.tiling

    def build() -> DecoderLayer:
        rngs = nnx.Rngs(0)
        mlp = mlp_of(config, tiling, model.plain, model.dtype, rngs)
        return DecoderLayer(config, mlp=mlp, dtype=model.dtype, attention=layers.attention.backend, rngs=rngs)

    def opened(state: nnx.State) -> nnx.State:
        found = []
        for (first, *rest), leaf in nnx.to_flat_state(state):
            # attention.qkv.kernel and attention.qkv.bias; mlp.w_gate_up and mlp.b_gate_up
            name, after = str(rest[0]), rest[1:]
            kind, whole = ("", name) if first == "attention" else (name[:2], name[2:])
            parts = parts_of(config, whole, leaf.get_value())
            found += [((first, kind + part, *after), leaf.replace(a)) for part, a in parts.items()]
        return nnx.from_flat_state(found)

    return nnx.graphdef(nnx.eval_shape(build)), opened
