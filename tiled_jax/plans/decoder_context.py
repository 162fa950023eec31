"""The tokens of the Llama decoder on one device of a context: which ones it has, where they stand, and how they attend."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.errors import UnsupportedError, error_text
from shared_specs.layers.ring import Order
from tiled_jax.collectives.conjugates import mesh_axis
from tiled_jax.core.loops import vary_over
from tiled_jax.layers.attention_blocks import Scoring
from tiled_jax.layers.context import context_attention, context_slice, runs_of
from tiled_jax.layers.documents import checked_documents, documents_of_positions, first_keys, positions_in
from tiled_jax.layers.ring import ring_of
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.layer import Angles, Attention
from tiled_jax.models.llama import LayerKinds, checked_positions
from tiled_jax.models.loss import inputs_and_targets
from tiled_jax.models.rope import rotate
from tiled_jax.plans.data import Mapped

HERE = "parallelize"


@dataclass(frozen=True)
class OwnTokens:
    """This device's part of the tokens of a batch.

    Args:
        inputs, targets: [sequences, tokens]. positions: [sequences or 1, tokens] int32.
        attending: the positions of the tokens whose queries this device has while it attends: those of the devices that share
            its heads, or its place in a ring, together.
        places: [sequences or 1, S] int32, the positions of all tokens.
        documents: [sequences or 1, S] of all tokens; None where each sequence is one.
    """

    inputs: jax.Array
    targets: jax.Array
    positions: jax.Array
    attending: jax.Array
    places: jax.Array
    documents: jax.Array | None

    def kinds(self, config: LlamaConfig, dtype: jnp.dtype, mapped: Mapped) -> LayerKinds:
        """Return what the layers have of these tokens."""
        places, axes = self.places, mapped.axes.batch
        if axes and any(kind.rope is not None and kind.rope.kind == "longrope" for kind in config.kinds):
            # One position beyond the original ones changes the angles of all sequences, whoever has it.
            places = lax.pmax(vary_over(jnp.max(places, keepdims=True), axes), axes)
        return LayerKinds(config, self.attending, dtype, places)

    def first_keys(self, kinds: LayerKinds, mapped: Mapped) -> list[jax.Array | None]:
        """Return of each kind of layer the place of the first key that each of the attending tokens sees; None: the first."""
        found = kinds.first_keys(None if self.documents is None else first_keys(self.documents), self.places.shape[1])
        return [None if first is None else _attending(first, mapped) for first in found]


def own_tokens(batch: Any, mapped: Mapped) -> OwnTokens:
    """Return this device's part; batch: as `next_token_loss` takes it, whole along the axes of a context."""
    found = inputs_and_targets(batch)
    inputs, targets, given, documents = found.inputs, found.targets, found.position_ids, found.segment_ids
    if found.attention_mask is not None:
        rule, advice = "None over a mesh", "Pad behind the tokens, with labels of -100, or give segment_ids."
        raise UnsupportedError(error_text(HERE, "batch['attention_mask']", rule, "an array", advice=advice))
    if documents is not None:
        documents = checked_documents(HERE, documents, *inputs.shape)
        given = positions_in(documents) if given is None else given
    places = checked_positions(HERE, given, inputs.shape)
    if documents is None and given is not None:
        documents = documents_of_positions(places)
    attending = _attending(places, mapped)
    if not mapped.axes.context:
        return OwnTokens(inputs, targets, places, attending, places, documents)
    axes = mapped.axes.context
    order: Order = "tokens" if mapped.axes.ring is None else "zigzag"
    parts = {"input_ids": inputs, "shift_labels": targets, "position_ids": places}
    mine = context_slice(parts, order=order, axis_name=axes if len(axes) == 2 else axes[0])
    return OwnTokens(mine["input_ids"], mine["shift_labels"], mine["position_ids"], attending, places, documents)


def _attending(a: jax.Array, mapped: Mapped) -> jax.Array:
    """Return what belongs to the tokens that attend on this device, of [sequences or 1, S]."""
    ring = mapped.axes.ring
    return a if ring is None else runs_of(a, mesh_axis(HERE, ring))


def attended(
    module: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    angles: Angles,
    tokens: OwnTokens,
    first: jax.Array | None,
    kind: jax.Array | None,
    mapped: Mapped,
) -> jax.Array:
    """Return attention of this device's tokens, rows of heads.

    angles, first: of the attending tokens, and of the layer's kind, as `OwnTokens.first_keys` has them.
    """
    d, config = module.head_dim, module.config
    q, k, v = (a.reshape(tokens.inputs.shape[0], -1, a.shape[-1] // d, d) for a in (q, k, v))
    ring, heads = mapped.axes.ring, mapped.axes.heads

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if ring is None:
            return module.attend(q, k, v, tokens.documents, None, kind)
        how = Scoring(config.attention_scale, config.attention_softcap)
        return ring_of(q, k, v, first, how, mesh_axis(HERE, ring))

    def turned(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if alone:
            q, k = module.normed(q, k)
        return attend(rotate(q, *angles), rotate(k, *angles), v)

    # Of one device attention is computed again; that of a ring, which would send everything again, keeps its own result.
    alone = ring is None and heads is None
    again = jax.checkpoint(turned) if ring is None else turned
    if module.q_norm is not None and not alone:
        q, k = jax.checkpoint(module.normed)(q, k)  # of this device's tokens, whose heads may be sent to others
    y = again(q, k, v) if heads is None else context_attention(q, k, v, again, axis_name=heads)
    return y.reshape(-1, y.shape[2] * d)
