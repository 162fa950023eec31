"""Bytes of the backward of one layer as XLA compiles it."""

from math import lcm

from shared_specs.app.plan.decoder import MASTER, Decoder
from shared_specs.app.plan.layer.sizes import block_sizes, mlp_shape, moe_shape
from shared_specs.app.plan.setting import Setting
from shared_specs.collectives.costs import in_flight_bytes
from shared_specs.layers.block_costs import WIDE, attention_groups, block_row_bytes, cudnn_block_row_bytes
from shared_specs.mlp.costs import compiled_peak_bytes
from shared_specs.moe.costs import compiled_moe_peak_bytes


def compiled_layer_bytes(decoder: Decoder, setting: Setting) -> tuple[int, int]:
    """Return the bytes of all tokens and of one shard in the backward of a layer, without the inputs of layers."""
    b, t, rows = setting.itemsize, setting.shards.longest, setting.rows
    sizes = block_sizes(decoder, setting)
    groups = cudnn_groups(decoder, setting)
    row = block_row_bytes(**sizes) if groups is None else cudnn_block_row_bytes(**sizes, groups=groups)
    row += compiled_context_row_bytes(decoder, setting)
    if decoder.experts:
        moe = moe_shape(decoder, setting)
        own = compiled_moe_peak_bytes(moe, setting.shards, device=setting.device)
        return row * rows, own - MASTER * (moe.weight_elements - decoder.mlp_trained)
    mlp = mlp_shape(decoder, setting)
    moved = 0 if setting.tensor == 1 else in_flight_bytes(mlp, setting.split_shards, upstream=decoder.hidden)
    own = compiled_peak_bytes(mlp, setting.shards, device=setting.device)
    own -= MASTER * (mlp.weight_elements - decoder.mlp_trained)
    if decoder.norms_behind:
        # Norms behind attention and the MLP: what they norm is made again, the MLP to its end, and lies there in float32.
        row += WIDE * decoder.hidden // setting.tensor
        own += 2 * t * decoder.intermediate * b
    return row * rows, own + moved


def cudnn_groups(decoder: Decoder, setting: Setting) -> int | None:
    """Return in how many groups of heads cuDNN attends in JAX; None where attention is in blocks of the library's own.

    These are there for float32, windows in any layer, rings, head dims that are no multiple of 8 and what has no cuDNN.
    """
    windowed = decoder.window is not None and decoder.window < setting.tokens
    if (
        not setting.fused
        or setting.attention == "blocks"
        or setting.itemsize != 2
        or windowed
        or setting.ring > 1
        or decoder.head_dim % 8
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
    return repeated + WIDE * decoder.queries + at_once * keys + (3 if setting.ring > 2 else 1) * sums
