"""Bytes of one training step on one GPU, part by part, from the formulas that the tests of each capability count.

The step is that of `parallelize`: `fully_shard` over all GPUs, float32 parameters, gradients and optimizer state, products
in another dtype, every layer checkpointed. Letters: T tokens of a rank, H hidden, V vocabulary, b bytes of the products.
"""

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.plan.decoder import MASTER as MASTER
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.setting import Scope as Scope
from shared_specs.app.plan.setting import Setting as Setting
from shared_specs.collectives.costs import gathered_plan, in_flight_bytes
from shared_specs.collectives.sequence_plan import plan_sequence
from shared_specs.layers.block_costs import (
    WIDE,
    WINDOW_BLOCK_TOKENS,
    attention_groups,
    block_row_bytes,
    cudnn_block_row_bytes,
    eager_block_moments,
)
from shared_specs.layers.heads import attention_turns
from shared_specs.loss.costs import LossShape, compiled_loss_peak_bytes, loss_accumulator_bytes, loss_peak_bytes
from shared_specs.loss.sequence_costs import sequence_loss_peak_bytes
from shared_specs.mlp.costs import MLPShape, accumulator_bytes, block_rows, compiled_peak_bytes, peak_bytes
from shared_specs.moe.costs import MoEShape, moe_peak_bytes, moe_saved_bytes

MOMENTS = {"adamw": 2, "sgd": 0}
# What no tensor shows: CUDA's context, the communication library's buffers, what the allocator cannot use.
RESERVE = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes on one GPU at the peak of a step, and in host memory for it.

    Attributes:
        gathered: whole weights of the layers at work, of embedding and head, and their gradients before they are cut.
        inputs: of the layers, as checkpointing keeps them. attention: all tokens of one layer's backward.
        shard: what one shard of a layer takes beside these. loss: logits of a shard and the sums of the head's gradient.
        host: beside the GPU, not part of its total.
    """

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    inputs: int
    attention: int
    shard: int
    loss: int
    reserve: int
    host: int

    @property
    def by_name(self) -> dict[str, int]:
        """Return every part that is on the GPU."""
        return {name: size for name, size in vars(self).items() if name != "host"}

    @property
    def total(self) -> int:
        return sum(self.by_name.values())


def parts_of(decoder: Decoder, setting: Setting) -> Parts:
    """Return the bytes of one step, at the highest of its high points: the last layer's backward, the first one's, the loss;
    and the embedding's where it is split."""
    decoder = decoder.split(setting.tensor)
    host = decoder.layers * setting.own_rows * decoder.hidden * setting.stream if setting.offload else 0
    ranks = setting.gpus // setting.tensor
    weights, trained = decoder.weight_bytes // ranks, decoder.trained_bytes // ranks
    state = {"weights": weights, "gradients": trained, "optimizer": MOMENTS[setting.optimizer] * trained}
    if setting.host_state:
        host += sum(state.values())
        state = dict.fromkeys(state, 0)
    # Gradients of the step before are gone, and those of this one come as inputs go; XLA has the room of its results from
    # beginning to end.
    early = {} if setting.half == "jax" else {"gradients": 0}
    kept = 0 if setting.offload else decoder.layers
    embeds = decoder.held is None or decoder.held.trains_embedding
    moments = [
        early | _at_layer(decoder, setting, kept),  # the last layer's backward
        {} if setting.half == "jax" else _at_layer(decoder, setting, min(kept, 1)),  # the first one's
        early | _at_loss(decoder, setting),
        _at_embedding(decoder, setting) if setting.half == "torch" and setting.tensor > 1 and embeds else {},
    ]
    found = (Parts(**state | moment, reserve=RESERVE, host=host) for moment in moments if moment)
    return max(found, key=lambda parts: parts.total)


def _at_layer(decoder: Decoder, setting: Setting, kept: int) -> dict[str, int]:
    """In the backward of a layer: the head's gradient waits, in PyTorch for those of the other ends, which are one unit.

    kept: inputs of layers that are on the device.
    """
    b, layer = setting.itemsize, decoder.layer_gathered
    if setting.half == "torch":
        # The layer's weights, those of the next one on their way, the gradients of the one before, in float32, being cut.
        # What comes from host memory is there once more on its way.
        units = 3 if setting.host_state else 2
        gathered = units * b * layer + MASTER * decoder.layer_trained + b * decoder.end_parameters
    else:  # and the sums that `compiled_peak_bytes` does not count
        gathered = _gathered_by_xla(decoder, setting) + MASTER * (decoder.layer_trained - decoder.mlp_trained)
    inputs = kept * setting.own_rows * decoder.hidden * setting.stream
    rows, shard = _layer_bytes(decoder, setting, kept)
    of_head = (b if setting.half == "torch" else MASTER) * decoder.head_trained // vocab_ranks(decoder, setting)
    return {"gathered": gathered, "inputs": inputs, "attention": rows, "shard": shard, "loss": of_head}


def _gathered_by_xla(decoder: Decoder, setting: Setting, layers: int = 1) -> int:
    """So many layers and the head, of the table no more than the rows that are asked for; on one GPU only what is cast."""
    alone = setting.gpus == 1 and setting.itemsize == MASTER
    head = decoder.hidden * decoder.vocab // vocab_ranks(decoder, setting)
    return 0 if alone else setting.itemsize * (layers * decoder.layer_gathered + head)


def vocab_ranks(decoder: Decoder, setting: Setting) -> int:
    """Return how many devices split the vocabulary of the loss among them, with all tokens of each, instead of gathering the
    head: in JAX, of one axis, where their tokens and gradients are less to move (`parallelize`)."""
    alone = setting.context in (1, setting.gpus)  # both axes would cut the parameters
    moved = 2 * setting.gpus * setting.rows * setting.itemsize
    fewer = moved <= decoder.vocab * (setting.itemsize + MASTER)
    return setting.gpus if setting.half == "jax" and setting.tensor == 1 and alone and fewer else 1


def _at_loss(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """Where the loss is made, with its gradients: beside it the hidden states, normed, and their gradient.

    In JAX, where 16 bits are those of products alone, also these states in float32.
    """
    b, rows = setting.itemsize, setting.own_rows * decoder.hidden * setting.stream
    ranks = vocab_ranks(decoder, setting)
    entries = -(-decoder.vocab // ranks)
    sizes: dict[str, Any] = {"hidden": decoder.hidden, "vocab": entries, "itemsize": b, "weight_itemsize": b}
    shape = LossShape(tokens=setting.rows, copied=setting.tensor > 1, **sizes)
    if setting.scope == "none" and not setting.chunked_loss:  # transformers lets its 16-bit logits go
        loss = 3 * MASTER * setting.rows * decoder.vocab
    elif setting.half == "torch" and setting.tensor > 1:
        loss = sequence_loss_peak_bytes(shape, setting.split_shards, device=setting.device, kernels=setting.fused)
    elif setting.half == "torch":
        loss = loss_peak_bytes(shape, setting.shards, device=setting.device, kernels=setting.fused)
    else:
        loss = _compiled_loss_bytes(shape, setting, ranks)
    trained = decoder.head_trained > 0
    if not trained and not (setting.scope == "none" and not setting.chunked_loss):
        loss -= loss_accumulator_bytes(shape)  # nor, where it is compiled, a shard's part of that sum
        loss -= max(MASTER, b) * decoder.hidden * entries if setting.half == "jax" else 0
    inputs = (0 if setting.offload else decoder.layers) * rows
    if trained and (setting.half == "torch" or b == MASTER):  # in 16 bits JAX has but the sum that makes it
        loss += b * decoder.hidden * entries  # the head's gradient
    if setting.half == "jax" and setting.tensor > 1 and setting.device == "cpu":
        loss += MASTER * decoder.hidden * entries  # zeros, to which the embedding's gradient is added later
    if setting.half == "jax":
        return {
            "gathered": _gathered_by_xla(decoder, setting, layers=0),
            "inputs": inputs,
            "attention": rows if b == MASTER else 2 * rows,
            "shard": 0,
            "loss": loss,
        }
    gathered = b * (decoder.layer_gathered + decoder.end_parameters)
    return {"gathered": gathered, "inputs": inputs, "attention": 3 * rows, "shard": 0, "loss": loss}


def _compiled_loss_bytes(shape: LossShape, setting: Setting, ranks: int) -> int:
    """Return the temporary bytes of the compiled loss, with the sum of the head's gradient in 16 bits.

    Ranks that split the vocabulary, those of the layers or else `ranks`, have a shard's tokens of all. On a GPU logits in 16
    bits are gone when the product of their gradient is made, of which the formula counts both.
    """
    shards, moved = setting.shards, 0
    if setting.tensor > 1:
        moved = in_flight_bytes(shape, setting.split_shards)
    elif ranks > 1:
        shared = plan_sequence(
            "plan", (setting.rows,) * ranks, shard_tokens=setting.shard_tokens, device=setting.device
        )
        shards, moved = gathered_plan(shared), in_flight_bytes(shape, shared)
    found = compiled_loss_peak_bytes(shape, shards, device=setting.device) + moved
    if setting.device == "cpu" or shape.itemsize == MASTER:
        return found
    return found - shape.vocab * min(shape.itemsize * shards.longest, MASTER * shape.hidden)


def _at_embedding(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """In the backward of an embedding that is split by vocabulary: the gradient of a rank's own tokens, and of a shard of all
    ranks' tokens as it came and without the rows of others' entries; beside it those of all layers, and of the ends, whole.
    """
    kept = MASTER * decoder.layers_trained // (setting.gpus // setting.tensor)
    return {
        "gradients": 0 if setting.host_state else kept,
        "gathered": (setting.itemsize + MASTER) * decoder.end_parameters,
        "inputs": 0,
        "attention": setting.own_rows * decoder.hidden * setting.itemsize,
        "shard": 2 * setting.shards.longest * decoder.hidden * setting.itemsize,
        "loss": 0,
    }


def _layer_bytes(decoder: Decoder, setting: Setting, kept: int) -> tuple[int, int]:
    """Return the bytes of all tokens and of one shard in the backward of a layer, without the kept inputs of all layers.

    The larger of two moments: attention's backward, in which there is no shard, and that of a shard of the MLP.
    """
    b, t, rows = setting.itemsize, setting.shards.longest, setting.rows
    if decoder.measured is not None:
        # What waits on the host is there, and what comes next. The weights' gradients are the only part without tokens.
        waited, of_weights = 2 * rows * decoder.hidden * b * (kept == 0), b * decoder.layer_trained
        return max(0, decoder.measured(setting) - of_weights) + waited, of_weights
    hidden = decoder.hidden // setting.tensor  # of a token, between the layers
    sizes: dict[str, Any] = {
        "hidden": hidden,
        "heads": decoder.heads,
        "kv_heads": decoder.kv_heads,
        "itemsize": b,
    }
    mlp = MLPShape(tokens=rows, hidden=decoder.hidden, intermediate=decoder.intermediate, itemsize=b, weight_itemsize=b)
    if setting.half == "jax":
        sizes["head_dim"] = decoder.head_dim
        groups = cudnn_groups(decoder, setting)
        row = block_row_bytes(**sizes) if groups is None else cudnn_block_row_bytes(**sizes, groups=groups)
        row += compiled_context_row_bytes(decoder, setting)
        moved = 0 if setting.tensor == 1 else in_flight_bytes(mlp, setting.split_shards, upstream=decoder.hidden)
        own = compiled_peak_bytes(mlp, setting.shards, device=setting.device)
        own -= MASTER * (mlp.weight_elements - decoder.mlp_trained)
        if len(DECODERS[decoder.kind].norms) > 2:
            # Norms behind attention and the MLP: what they norm is made again, the MLP to its end, and lies there in float32.
            row += WIDE * hidden
            own += 2 * t * decoder.intermediate * b
        return row * rows, own + moved
    exchanged = exchanged_row_bytes(decoder, setting)
    if setting.scope == "block":
        context: dict[str, Any] = {"exchanging": setting.exchanging, "ring": setting.ring > 1}
        attention, behind = (
            row + _window_row_bytes(decoder, setting) * (moment == 0) - kept * hidden * b
            for moment, row in enumerate(
                eager_block_moments(
                    **sizes, **context, head_dim=decoder.head_dim, value_dim=decoder.value_dim, kept_layers=kept
                )
            )
        )
        arrays = BLOCK_ARRAYS if decoder.matrices == 3 else UNGATED_ARRAYS
        of_shard = (ADAPTED_BLOCK_ARRAYS if decoder.adapted else arrays) * t * decoder.intermediate * b
        if setting.device == "gpu" and not setting.fused:
            of_shard += 5 * WIDE * block_rows(t, decoder.intermediate, "gpu") * decoder.intermediate
        if setting.tensor > 1:  # what the MLP is given, and the gradient of what it returns, of every rank's tokens
            of_shard += 2 * t * decoder.hidden * b
        masks = _window_mask_bytes(decoder, setting)
        if decoder.experts:
            of_mlp = b * decoder.mlp_trained
            shared = replace(mlp, intermediate=decoder.shared)
            of_shared = peak_bytes(shared, setting.shards, device=setting.device, kernels=setting.fused)
            of_shard = max(_experts_bytes(decoder, setting), rows * decoder.hidden * b + of_shared)
            found = max(((attention + exchanged) * rows, masks), (behind * rows, masks + of_shard), key=sum)
            return found[0], found[1] + MASTER * (decoder.layer_trained - decoder.mlp_trained) + of_mlp
        found = max(((attention + exchanged) * rows, masks), (behind * rows, masks + of_shard), key=sum)
        # The sums of the weight gradients; that of gate and up is rounded as one where they are.
        fused = 2 * decoder.hidden * decoder.intermediate * b if decoder.mlp_rounded else 0
        return found[0], found[1] + MASTER * decoder.layer_trained + fused
    attention, around_mlp = checkpointed_row_bytes(decoder, b)
    if setting.ring > 1:
        attention = max(attention, beside_ring_row_bytes(decoder, b) + exchanged)
    else:
        attention += exchanged
    if setting.scope == "mlp" and decoder.mlp_adapted:
        own = ADAPTED_MLP_ARRAYS * t * decoder.intermediate * b
    elif setting.scope == "mlp":
        own = peak_bytes(mlp, setting.shards, device=setting.device, kernels=setting.fused)
        own -= max(0, accumulator_bytes(mlp, setting.shards) - MASTER * decoder.mlp_trained)
    else:
        own = PLAIN_ARRAYS * rows * decoder.intermediate * b
    return max((attention * rows, 0), (around_mlp * rows, own), key=sum)


def _experts_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes of a mixture of experts in the backward of its layer, but for the gradients of its weights.

    The choice of every token, the gradient of what the experts are given, and what `moe_peak_bytes` counts or, when the router
    is at work behind them, the gradient of what it was given and of a shard its logits.
    """
    shape = MoEShape(
        tokens=setting.rows,
        hidden=decoder.hidden,
        intermediate=decoder.intermediate,
        experts=decoder.experts,
        top_k=decoder.chosen,
        itemsize=setting.itemsize,
        weight_itemsize=setting.itemsize,
    )
    given = setting.rows * decoder.hidden * setting.itemsize
    of_router = given + setting.shards.longest * (6 * decoder.experts + decoder.hidden) * WIDE
    return given + moe_saved_bytes(shape) + max(moe_peak_bytes(shape, setting.shards, device=setting.device), of_router)


def exchanged_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs attention's backward where the ranks of a context share sequences.

    Where they exchange tokens for heads, q, k and v with the heads of a rank, and attention's output; key heads that are
    repeated, where there are fewer of them than ranks, are gone by then. XLA has room for all this in what is there, and with
    scope="block" it is there in place of what it was made of (`eager_block_moments`). In places of a ring it is what the ring
    counts.
    """
    if setting.ring > 1:
        return ring_row_bytes(decoder, setting)
    if setting.context == 1 or setting.scope == "block":
        return 0
    return (2 * decoder.queries + 2 * decoder.keys) * setting.itemsize


def ring_row_bytes(decoder: Decoder, setting: Setting) -> int:
    """Return the bytes that one more token costs attention's backward in a ring, on the rank with most.

    There are dq and this rank's own dk and dv, in float32, and with more than two ranks those of two others, of which one is on
    its way, there and here; k and v of the next rank, on their way; and of one part the operands as kernels want them and what
    they return, beside that of the part before. The first of all parts is causal, for which a CPU's kernel wants key heads
    repeated. With scope="block" all this is of one key-value group, whose gradients are counted without a ring as well. Ranks
    that exchange tokens for heads have as many more of the tokens as they have fewer heads; key heads that do not reach for all
    of them are repeated, and a group is one head of a rank.
    """
    b, block = setting.itemsize, setting.scope == "block"
    copies = lcm(decoder.kv_heads, setting.exchanging) // decoder.kv_heads
    groups = max(1, decoder.kv_heads // setting.exchanging) if block else 1
    queries, keys = decoder.queries // groups, 2 * copies * decoder.keys // groups
    sums = 4 if setting.ring > 2 else 2
    later = (WIDE + 5 * b) * queries + (sums * WIDE + 3 * b) * keys
    first = (WIDE + 6 * b) * queries + (WIDE + 3 * b) * keys if setting.device == "cpu" else 0
    return max(first, later) - (b * (queries + keys) if block else 0)


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


# Arrays [t, I] and [T, I] at once in the backward of the MLP of a shard of scope="block", and of a whole untiled one.
BLOCK_ARRAYS, PLAIN_ARRAYS = 6, 6
UNGATED_ARRAYS = 5  # of a shard without a gate, whose activation may be of several operators
# The same where projections have adapters, which are called: what these return is scaled and added to what the layer does.
ADAPTED_BLOCK_ARRAYS, ADAPTED_MLP_ARRAYS = 8, 11


def checkpointed_row_bytes(decoder: Decoder, itemsize: int) -> tuple[int, int]:
    """Return the bytes that one more token costs the backward of one of transformers' layers: in attention, and in the MLP.

    The MLP's own are not counted. In 16 bits the norms and the rotary positions work in float32 and leave more behind.
    """
    heads = 2 * decoder.queries + 2 * decoder.keys + 2 * decoder.head_dim
    attention, mlp = (17, 8) if itemsize < MASTER else (9, 5)
    both = heads * itemsize + 4 * decoder.heads + head_norm_row_bytes(decoder, itemsize)
    return attention * decoder.hidden * itemsize + both, mlp * decoder.hidden * itemsize + both


def beside_ring_row_bytes(decoder: Decoder, itemsize: int) -> int:
    """Return the bytes that one more token costs beside a ring's backward in one of transformers' layers.

    What the norm before it keeps (in 16 bits its input and what is normed in float32, and rounded), the gradient behind it, q,
    k and v in part and attention's output. With a large H a layer has its peak elsewhere.
    """
    hidden = 7 if itemsize < MASTER else 5
    both = 4 * decoder.heads + head_norm_row_bytes(decoder, itemsize)
    return (hidden * decoder.hidden + 2 * decoder.queries) * itemsize + both


def head_norm_row_bytes(decoder: Decoder, itemsize: int) -> int:
    """Return the bytes that one more token costs the norms of heads in one of transformers' layers.

    Of queries and keys what is normed in float32, and rounded.
    """
    return (decoder.queries + decoder.keys) * (WIDE + itemsize) if DECODERS[decoder.kind].head_norms else 0


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
