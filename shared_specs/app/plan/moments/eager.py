"""Bytes of the backward of one layer in PyTorch, of all tokens and of one shard. Letters as in `step.py`; t: of a shard."""

from dataclasses import replace

from shared_specs.app.plan.decoder import MASTER, Decoder
from shared_specs.app.plan.moments.ring import beside_ring_row_bytes, exchanged_row_bytes, head_norm_row_bytes
from shared_specs.app.plan.moments.sizes import block_sizes, mlp_shape, moe_shape
from shared_specs.app.plan.setting import Setting
from shared_specs.layers.block_costs import WIDE, WINDOW_BLOCK_TOKENS, eager_block_moments
from shared_specs.layers.heads import attention_turns
from shared_specs.mlp.costs import accumulator_bytes, peak_bytes
from shared_specs.moe.costs import moe_peak_bytes, moe_saved_bytes

# Arrays [t, I] and [T, I] at once in the backward of the gated MLP of a shard of scope="block", and of a whole untiled one.
BLOCK_ARRAYS, PLAIN_ARRAYS = 6, 6
NUMBERS = 42  # bytes of a pair of a token and an expert in transformers' own experts: where it is, where it was, what it counts
UNGATED_ARRAYS = 3  # of a shard without a gate: what the activation is given, its result, and the gradient of one


def eager_layer_bytes(decoder: Decoder, setting: Setting, kept: int) -> tuple[int, int]:
    """Return the bytes of all tokens and of one shard in the backward of a layer, without the kept inputs of all layers.

    The larger of two moments: attention's backward, in which there is no shard, and that of a shard of the MLP. Where layers
    were measured, what was measured.

    Args:
        kept: layers whose inputs are on the device.
    """
    b, rows = setting.itemsize, setting.rows
    if decoder.measured is not None:
        # What waits on the host is there, and what comes next. The weights' gradients are the only part without tokens.
        waited, of_weights = 2 * rows * decoder.stream * b * setting.offload, b * decoder.layer_trained
        return max(0, decoder.measured(setting) - of_weights) + waited, of_weights
    return (
        _block_bytes(decoder, setting, kept)
        if setting.scope == "block"
        else _checkpointed_bytes(decoder, setting, kept)
    )


def _block_bytes(decoder: Decoder, setting: Setting, kept: int) -> tuple[int, int]:
    """Return the same of a layer with scope="block"."""
    b, rows = setting.itemsize, setting.rows
    hidden = decoder.hidden // setting.tensor  # of a token, between the layers
    exchanged = exchanged_row_bytes(decoder, setting)
    sizes = block_sizes(decoder, setting) | {"value_dim": decoder.value_dim, "kept_layers": kept}
    context = {"exchanging": setting.exchanging, "ring": setting.ring > 1}
    positions = 2 * decoder.head_dim * (WIDE - b) if decoder.wide_positions and b < WIDE else 0
    attention, behind = (
        row + positions + _window_row_bytes(decoder, setting) * (moment == 0) - kept * hidden * b
        for moment, row in enumerate(eager_block_moments(**sizes, **context))
    )
    of_shard = _block_shard_bytes(decoder, setting)
    masks = _window_mask_bytes(decoder, setting)
    wide = (
        MASTER if len(setting.shards) > 1 else b
    )  # of the weights' gradients, which are sums where there are several shards
    of_weights = wide * decoder.layer_trained
    if decoder.experts:
        of_weights += (b - wide) * decoder.mlp_trained
        of_shard = _mixture_bytes(decoder, setting)
    found = max(((attention + exchanged) * rows, masks), (behind * rows, masks + of_shard), key=sum)
    return found[0], found[1] + of_weights


def _checkpointed_bytes(decoder: Decoder, setting: Setting, kept: int) -> tuple[int, int]:
    """Return the same of one of transformers' layers under a checkpoint, with its MLP tiled or as it is."""
    b, t, rows = setting.itemsize, setting.shards.longest, setting.rows
    exchanged, mlp = exchanged_row_bytes(decoder, setting), mlp_shape(decoder, setting)
    # An input that has come back from the host; in float32 simulated ranks hold one row more, in both moments.
    back = (kept == 0) * (2 if b == MASTER else 1) * decoder.hidden * b
    unkept = [rows * decoder.hidden * b for rows in _unkept_rows(decoder)]
    attention, around_mlp = (
        row + back - less for row, less in zip(checkpointed_row_bytes(decoder, b), unkept, strict=True)
    )
    if setting.context > 1:
        # The result of attention as ranks exchange it; where several key heads have several query heads each, q and that in
        # another order of heads besides.
        several = setting.ring == 1 and decoder.heads > decoder.kv_heads > setting.exchanging
        around_mlp += (3 if several else 1) * decoder.queries * b
    of_mlp = b * decoder.mlp_trained
    if setting.ring > 1:
        # Behind attention its result is there in the order of heads, and in that of tokens.
        beside = beside_ring_row_bytes(decoder, setting) - unkept[0]
        attention = max(attention + decoder.queries * b, beside + exchanged + back)
    else:
        attention += exchanged
    if setting.scope == "mlp" and decoder.mlp_adapted:  # its projections are called, by autograd
        own = t * (BLOCK_ARRAYS * decoder.intermediate + decoder.hidden) * b
        attention += 2 * decoder.hidden * b
        around_mlp += decoder.hidden * b
    elif setting.scope == "mlp":
        own = peak_bytes(mlp, setting.shards, device=setting.device, kernels=setting.fused)
        if accumulator_bytes(mlp, setting.shards):  # float32 sums, beside which all gradients are cast at the end
            cast = peak_bytes(mlp, setting.shards, device="gpu", kernels=True) + of_mlp
            own = max(own, cast) - accumulator_bytes(mlp, setting.shards) + MASTER * decoder.mlp_trained
        else:  # the gradients are the sums
            own += of_mlp
    else:
        own = PLAIN_ARRAYS * rows * decoder.intermediate * b + of_mlp // decoder.matrices
        around_mlp -= decoder.hidden * b  # the gradient is not written to a place of its own
        if decoder.experts:
            own = _untiled_experts_bytes(decoder, setting)
    return max((attention * rows, of_mlp), (around_mlp * rows, own), key=sum)


def _untiled_experts_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes of transformers' own experts in their backward, of the rows of all pairs of a token and an expert.

    The larger of two moments. Where the gradient of gate and up is multiplied, beside it what it is multiplied with, and the
    gradient of that; all weights' gradients are there. And before any of them, where rows of the result have their gradients,
    in float32 where the router's choices count in that.
    """
    b, pairs = setting.itemsize, setting.rows * decoder.chosen
    multiplied = 2 * (decoder.hidden + decoder.intermediate) * b
    wide = b < MASTER and decoder.kind == "mixtral"
    returned = ((8 if wide else 5) * decoder.hidden + 4 * decoder.intermediate) * b + NUMBERS
    return max(pairs * multiplied + b * decoder.mlp_trained, pairs * returned)


def _block_shard_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes of a shard of the second part of a layer with scope="block", in its backward.

    Where the gradients of gate and up are made, beside these arrays [t, I] what the norm keeps: its input, in float32, and what
    is normed, before and after its weight; attention's rows, and the result. Layers without gates have LayerNorm, one
    operator. Norms behind the branches keep as much, and at the one behind the MLP, in 16 bits, ten arrays [t, H] are there in
    float32.
    """
    b, t = setting.itemsize, setting.shards.longest
    own = t // setting.tensor * decoder.hidden  # rows of this rank, where every rank's are gathered for the MLP
    gated = decoder.matrices == 3
    arrays = BLOCK_ARRAYS if gated else UNGATED_ARRAYS + decoder.bent
    inside = t * decoder.intermediate * b
    found = arrays * inside + (3 * b + WIDE * gated) * own + b * t * decoder.hidden
    if setting.device == "cpu" and b < WIDE:  # whose products of 16 bits are of float32 copies
        found += WIDE * own
    if not decoder.norms_behind:
        return found
    behind = (10 * WIDE + 3 * b) * own + (BLOCK_ARRAYS - 2) * inside if b < WIDE else 0
    return max(found + 2 * b * own, behind)


def _mixture_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes of a mixture of experts in the backward of its layer, but for the gradients of all its weights.

    The largest of three moments, in all of which there are the choice of every token and the gradient of what the experts are
    given. The experts': what `moe_peak_bytes` counts, and the result of the MLP beside them where that is read; the gradients
    of this MLP's weights are still to come. Their router's: the gradient of what it was given, and of a shard its logits, or
    then the sum of both gradients. And the MLP's beside them: the gradients of its input and, where it was read, of its
    result. With norms behind the branches all have the gradient of the mixture's result besides.
    """
    shape, b = moe_shape(decoder, setting), setting.itemsize
    row = setting.rows * decoder.hidden * b
    of_experts = moe_peak_bytes(shape, setting.shards, device=setting.device) + row * decoder.shared_is_read
    of_router = row + max(row, setting.shards.longest * (6 * decoder.experts + decoder.hidden) * WIDE)
    of_shared = 0
    if decoder.shared:
        shared, coming = replace(mlp_shape(decoder, setting), intermediate=decoder.shared), b * decoder.shared_weights
        of_experts -= coming
        of_shared = peak_bytes(shared, setting.shards, device=setting.device, kernels=setting.fused)
        of_shared += row * (1 + decoder.shared_is_read) - coming * (accumulator_bytes(shared, setting.shards) > 0)
    return row * (1 + decoder.norms_behind) + moe_saved_bytes(shape) + max(of_experts, of_router, of_shared)


def checkpointed_row_bytes(decoder: Decoder, itemsize: int) -> tuple[int, int]:
    """Return the bytes that one more token costs the backward of one of transformers' layers: in attention, and in the MLP.

    The MLP's own are not counted. In 16 bits the norms and the rotary positions work in float32 and leave more behind.
    """
    heads = 2 * decoder.queries + 2 * decoder.keys + 2 * decoder.head_dim
    attention, mlp = (17, 10) if itemsize < MASTER else (8, 7)
    both = heads * itemsize + 4 * decoder.heads + head_norm_row_bytes(decoder, itemsize)
    return attention * decoder.hidden * itemsize + both, mlp * decoder.hidden * itemsize + both


def _unkept_rows(decoder: Decoder) -> tuple[int, int]:
    """Return how many rows of H what is not trained does not keep, in attention and in the MLP.

    They are what each norm multiplies with its weight, and what q, k and v are made of.
    """
    if decoder.held is None:
        return 0, 0
    norm, given = not decoder.held.trains_norms, not decoder.held.trains_attention
    return norm + given, 2 * norm + given


def _window_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs a window in attention's backward, of what attends at once.

    Keys and values repeated for the query heads, with their gradients; where ranks exchange tokens for heads also what blocks
    of queries return, apart and in one.
    """
    if decoder.window is None or decoder.window >= setting.tokens:
        return 0
    turns = attention_turns(decoder.heads, decoder.kv_heads, setting.exchanging, parts=setting.ring == 1)
    return (4 if setting.exchanging == 1 else 6) * decoder.queries // turns.count * setting.itemsize


def _window_mask_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes of what a window adds to scores in PyTorch: in every turn once for all blocks of queries, and once for
    the shorter last one.
    """
    if decoder.window is None or decoder.window >= setting.tokens or setting.ring > 1:
        return 0
    turns = attention_turns(decoder.heads, decoder.kv_heads, setting.exchanging)
    blocks = (WINDOW_BLOCK_TOKENS, (setting.tokens - decoder.window) % WINDOW_BLOCK_TOKENS)
    return turns.count * sum(block * (block + decoder.window) for block in blocks) * setting.itemsize
