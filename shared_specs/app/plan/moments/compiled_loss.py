"""Bytes of the loss with its gradients as XLA compiles it."""

from collections.abc import Iterator
from typing import Any

from shared_specs.app.plan.decoder import LOGIT_CAP, MASTER, UNCUT, Decoder
from shared_specs.app.plan.setting import Setting
from shared_specs.collectives.costs import gathered_plan, in_flight_bytes
from shared_specs.collectives.sequence_plan import plan_sequence
from shared_specs.layers.block_costs import WIDE
from shared_specs.loss.costs import LossShape, compiled_loss_peak_bytes, loss_accumulator_bytes
from shared_specs.shards import ShardPlan


def compiled_loss_moment(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """Return the bytes of the highest moment of the loss, by what they are of."""
    if setting.device == "cpu":
        return _on_cpu(decoder, setting)
    return max(_on_gpu(decoder, setting), key=lambda moment: sum(moment.values()))


def vocab_ranks(decoder: Decoder, setting: Setting) -> int:
    """Return how many devices split the vocabulary of the loss among them, with all tokens of each, instead of gathering the
    head: of one axis, where their tokens and gradients are less to move (`parallelize`)."""
    alone = setting.gpus in [setting.data, *setting.context_axes.values()]  # else several axes cut the parameters
    moved = 2 * setting.gpus * setting.rows * setting.itemsize
    fewer = moved <= decoder.vocab * (setting.itemsize + MASTER)
    return setting.gpus if setting.tensor == 1 and alone and fewer else 1


def _on_gpu(decoder: Decoder, setting: Setting) -> Iterator[dict[str, int]]:
    """The logits of a shard and their gradient, beside the sum of the head's gradient so far; where there is one shard, the
    product that makes that gradient; and where it is reduced, it and its parts for every device.

    Beside them lie the last layer's result, it normed, with that one's gradient, and the last layer's input, as it comes from
    the host.
    """
    b, ranks, trained = setting.itemsize, vocab_ranks(decoder, setting), decoder.head_trained > 0
    entries, shards = -(-decoder.vocab // ranks), _shards(setting, ranks)
    alone, rows = setting.gpus == setting.tensor, setting.own_rows * decoder.hidden
    of_head = ("loss", MASTER * decoder.hidden * entries * trained)
    logits = ("loss", shards.longest * entries * b)
    # A device alone has the head, and casts it.
    head = ("gathered", 0 if alone and b == MASTER else b * decoder.hidden * entries)
    beside = [("attention", rows * WIDE), ("attention", rows * b), ("attention", rows * b)]
    of_shard = shards.longest * decoder.hidden * b
    # The last layer's input is fetched, or cut out, before the loss where no gradient of a head alone comes in between.
    # Where there is none at all, some of that layer's weights are gathered by then.
    early = (decoder.tied and not alone) if trained else (setting.offload or len(setting.shards) == 1)
    ahead = 0 if trained or alone else 2 * decoder.mlp_weights // 3 * b
    inputs = ((0 if setting.offload else decoder.inputs) + early) * rows * WIDE
    moments = [[head, logits, logits, *[of_head] * (len(shards) > 1)], [head, logits, of_head]]
    moments += [] if alone else [[of_head, of_head]]
    for moment in moments:
        found = {"gathered": ahead, "inputs": inputs, "attention": 0, "shard": of_shard, "loss": 0}
        for name, size in _not_elsewhere(decoder, setting, [*moment, *beside]):
            found[name] += size
        yield found


def _shards(setting: Setting, ranks: int) -> ShardPlan:
    """Return how the tokens of the loss are cut: those of all ranks that split the vocabulary together."""
    return setting.shards if ranks == 1 else gathered_plan(_shared(setting, ranks))


def _shared(setting: Setting, ranks: int) -> Any:
    tokens = (setting.rows,) * ranks
    return plan_sequence("plan", tokens, shard_tokens=setting.shard_tokens, device=setting.device)


def _on_cpu(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """The same in one formula, which counts what is written over as what it was."""
    b, ranks, trained = setting.itemsize, vocab_ranks(decoder, setting), decoder.head_trained > 0
    entries, rows = -(-decoder.vocab // ranks), setting.own_rows * decoder.hidden * WIDE
    shape = LossShape(
        tokens=setting.rows,
        hidden=decoder.hidden,
        vocab=entries,
        itemsize=b,
        weight_itemsize=b,
        copied=setting.tensor > 1,
        bends=("logit_softcap",) * (LOGIT_CAP in decoder.caps),
    )
    loss = compiled_loss_peak_bytes(shape, _shards(setting, ranks), device="cpu")
    if setting.tensor > 1:
        loss += in_flight_bytes(shape, setting.split_shards)
    elif ranks > 1:
        loss += in_flight_bytes(shape, _shared(setting, ranks))
    if not trained:  # neither the sum of its gradient nor a shard's part of that
        loss -= loss_accumulator_bytes(shape) + max(MASTER, b) * decoder.hidden * entries
    elif b == MASTER and setting.gpus > 1:  # that sum is a result of one device
        loss += b * decoder.hidden * entries
    return {
        "gathered": 0 if setting.gpus == 1 and b == MASTER else b * decoder.hidden * entries,
        "inputs": (1 if setting.offload else decoder.inputs) * rows,
        "attention": rows * (2 if b < MASTER else 3 if setting.tensor == 1 else 1),
        "shard": 0,
        "loss": loss,
    }


def _not_elsewhere(decoder: Decoder, setting: Setting, arrays: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those arrays that XLA does not have in the room of the program's results, the gradients of all weights, which
    come later: one of these holds one array that is no larger."""
    if decoder.layer_trained < decoder.layer_parameters:
        return arrays
    of_mlp, queries, keys = decoder.mlp_weights // 3, decoder.hidden * decoder.queries, decoder.hidden * decoder.keys
    weights = [of_mlp, of_mlp, of_mlp, queries, queries, keys, keys]
    if decoder.kind in UNCUT:  # gate and up are one, and q, k and v
        weights = [2 * of_mlp, of_mlp, queries + 2 * keys, queries]
    ends = [decoder.hidden * decoder.vocab] * (1 if decoder.tied else 2)
    if decoder.tied and setting.gpus == 1:  # the gradient of one array in two parts
        ends = []
    ranks, left = setting.gpus // setting.tensor, []
    room = sorted(MASTER * weight // ranks for weight in [*(decoder.layers * weight for weight in weights), *ends])
    for name, array in sorted(arrays, key=lambda each: each[1], reverse=True):
        taken = next((size for size in room if size >= array), None)
        if taken is None:
            left.append((name, array))
        else:
            room.remove(taken)
    return left
