"""Bytes of the backward of one layer as XLA compiles it."""

from collections.abc import Iterator
from math import lcm
from typing import NamedTuple

from shared_specs.app.plan.decoder import MASTER, SCORE_CAP, Decoder
from shared_specs.app.plan.moments.sizes import block_sizes, mlp_shape, moe_shape
from shared_specs.app.plan.setting import Setting
from shared_specs.collectives.costs import in_flight_bytes
from shared_specs.layers.block_costs import WIDE, attention_groups, block_row_bytes, cudnn_block_row_bytes
from shared_specs.mlp.costs import compiled_peak_bytes
from shared_specs.moe.costs import compiled_moe_peak_bytes


class LayerBytes(NamedTuple):
    """Bytes of a moment in the backward of a layer: of all tokens, of weights and their gradients on their way, and of a shard
    and the sums of gradients."""

    rows: int
    gathered: int
    shard: int


def compiled_layer_bytes(decoder: Decoder, setting: Setting) -> LayerBytes:
    """Return the bytes of the highest moment in the backward of a layer, without the inputs of layers."""
    return max(_moments(decoder, setting), key=sum)


def _moments(decoder: Decoder, setting: Setting) -> Iterator[LayerBytes]:
    """A shard of the MLP; attention's backward, when the MLP's weights are gone and their gradients wait; and where ranks
    exchange tokens for heads q, k and v as they arrive, and as attention and its backward want them, and the same with the
    gradient of attention's output."""
    b, rows, groups = setting.itemsize, setting.rows, cudnn_groups(decoder, setting)
    sizes, queries = block_sizes(decoder, setting), decoder.queries * b
    row = block_row_bytes(**sizes) if groups is None else cudnn_block_row_bytes(**sizes, groups=groups)
    of_sums = 2 * decoder.keys * WIDE if groups is None else 0  # of dk and dv, which attention's backward makes
    keys = lcm(decoder.kv_heads, setting.exchanging) // decoder.kv_heads * decoder.keys  # repeated ones too
    sums, weights = MASTER * decoder.layer_trained, b * decoder.layer_gathered
    # On GPUs the gradients of the layer before are still whole; of a single shard they are made when its products are gone.
    before = sums if setting.device == "gpu" and setting.gpus > setting.tensor else 0
    at_once = setting.device == "gpu" and len(setting.shards) == 1 and not decoder.experts
    behind, of_shard = _behind_bytes(decoder, setting)
    found = row - of_sums + behind + 2 * (keys - decoder.keys) * b
    yield LayerBytes(found * rows, weights + before, of_shard + sums * (not at_once))
    if at_once:
        of_gate_and_up = 2 * setting.shards.longest * decoder.intermediate * b
        yield LayerBytes(found * rows, weights + before * 2 // 3, of_gate_and_up + sums)
    yield LayerBytes((row + compiled_context_row_bytes(decoder, setting)) * rows, before, sums)
    if setting.exchanging > 1:
        between = row - (2 * queries + 2 * decoder.keys * b + of_sums) if groups is None else 2 * sizes["hidden"] * WIDE
        arrived = (4 if setting.device == "gpu" else 3) * queries + 3 * keys * b
        yield LayerBytes((between + arrived) * rows, weights + before, 0)
        yield LayerBytes((between + 3 * queries + 2 * keys * b + keys * WIDE) * rows, before, sums)


def _behind_bytes(decoder: Decoder, setting: Setting) -> tuple[int, int]:
    """Return the bytes of a token and of a shard in the backward of the MLP or of the experts, without sums of gradients."""
    if decoder.experts:
        moe = moe_shape(decoder, setting)
        return 0, compiled_moe_peak_bytes(moe, setting.shards, device=setting.device) - MASTER * moe.weight_elements
    mlp = mlp_shape(decoder, setting)
    found = compiled_peak_bytes(mlp, setting.shards, device=setting.device) - MASTER * mlp.weight_elements
    if setting.tensor > 1:
        found += in_flight_bytes(mlp, setting.split_shards, upstream=decoder.hidden)
    elif setting.device == "gpu" and not decoder.norms_behind:
        # x and the gradient of what is normed; attention's output, and what is normed.
        found += 2 * setting.shards.longest * decoder.hidden * (WIDE + setting.itemsize)
    if setting.device == "gpu" and not decoder.mlp_trained:  # down's operand, which makes its gradient alone
        found -= setting.shards.longest * decoder.intermediate * setting.itemsize
    if decoder.mlp_adapted and setting.device == "cpu":
        # What adapters add to gate, up and the gradient of h, which a GPU's products add to what is there.
        found += 3 * setting.shards.longest * decoder.intermediate * setting.itemsize
    if not decoder.norms_behind:
        return 0, found
    # Norms behind attention and the MLP: what they norm is made again, the MLP to its end, and lies there in float32.
    more = 2 * setting.shards.longest * decoder.intermediate * setting.itemsize
    return WIDE * decoder.hidden // setting.tensor, found + more


def cudnn_groups(decoder: Decoder, setting: Setting) -> int | None:
    """Return in how many groups of heads cuDNN attends in JAX; None where attention is in blocks of the library's own.

    These are there for float32, windows in any layer, caps, rings, head dims that are no multiple of 8 and what has no cuDNN.
    """
    windowed = decoder.window is not None and decoder.window < setting.tokens
    if (
        not setting.fused
        or setting.attention == "blocks"
        or setting.itemsize != 2
        or windowed
        or setting.ring > 1
        or decoder.head_dim % 8
        or SCORE_CAP in decoder.caps
    ):
        return None
    copies = lcm(decoder.kv_heads, setting.exchanging) // decoder.kv_heads
    heads, kv_heads = (n // setting.exchanging for n in (decoder.heads, copies * decoder.kv_heads))
    return attention_groups(setting.sequences * setting.tokens, heads, kv_heads)


def compiled_context_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs a context in the compiled attention of JAX, beside `block_row_bytes`.

    For what ranks exchange there is room in what is there, but for key heads that are repeated, where they do not reach for all
    ranks, and their gradients. In a ring dq is in float32, and k and v of the next rank are on their way. Beside this rank's
    own dk and dv there are with more than two ranks those that are sent, that arrive and that are made, else those of the
    other. Of four ranks a CPU's program has no loop over turns, and sends every k and v first.
    """
    copies = lcm(decoder.kv_heads, setting.exchanging) // decoder.kv_heads
    keys, sums = 2 * copies * decoder.keys * setting.itemsize, 2 * copies * decoder.keys * WIDE
    repeated = (keys + sums) // copies * (copies - 1)
    if setting.ring == 1:
        return repeated
    at_once = 3 if setting.device == "cpu" and setting.ring == 4 else 1
    if setting.device == "gpu" and setting.exchanging > 1 and setting.itemsize < WIDE:
        at_once = 2  # they are copied
    return repeated + WIDE * decoder.queries + at_once * keys + (3 if setting.ring > 2 else 1) * sums
