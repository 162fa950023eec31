"""Bytes of one training step on one GPU, part by part, from the formulas that the tests of each capability count.

The step is that of `parallelize`: `fully_shard` over all GPUs, float32 parameters, gradients and optimizer state, products
in another dtype, every layer checkpointed. Letters: T tokens of a rank, H hidden, V vocabulary, b bytes of the products.
"""

from dataclasses import dataclass
from typing import Any

from shared_specs.app.plan.decoder import LOGIT_CAP, Decoder
from shared_specs.app.plan.decoder import MASTER as MASTER
from shared_specs.app.plan.moments.compiled import compiled_layer_bytes
from shared_specs.app.plan.moments.compiled_loss import compiled_loss_moment
from shared_specs.app.plan.moments.eager import eager_layer_bytes
from shared_specs.app.plan.setting import Optimizer
from shared_specs.app.plan.setting import Scope as Scope
from shared_specs.app.plan.setting import Setting as Setting
from shared_specs.collectives.sequence_plan import plan_sequence
from shared_specs.loss.costs import LossShape, loss_accumulator_bytes, loss_peak_bytes
from shared_specs.loss.sequence_costs import sequence_loss_peak_bytes

# Moments of a parameter that an optimizer keeps. In 8 bits they have a scale, in float32, for so many entries.
MOMENTS = {"adamw": 2, "adamw_8bit": 2, "sgd": 0}
_SCALED = 256
# What no tensor shows: CUDA's context, the communication library's buffers, what the allocator cannot use.
RESERVE = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes on one GPU at the peak of a step, and in host memory for it.

    Attributes:
        gradients: of the layers whose backward is done.
        gathered: whole weights of the layers at work, of embedding and head, and their gradients before they are cut.
        inputs: of the layers, as checkpointing keeps them. attention: all tokens of one layer's backward, and their ids.
        shard: what one shard of a layer takes beside these. loss: logits of a shard and the sums of the head's gradient.
        program: of a model that is measured whole, all but its parameters and gradients; 0 of others.
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
    program: int = 0

    @property
    def by_name(self) -> dict[str, int]:
        """Return every part that is on the GPU."""
        return {name: size for name, size in vars(self).items() if name != "host" and (size or name != "program")}

    @property
    def total(self) -> int:
        return sum(self.by_name.values())


def parts_of(decoder: Decoder, setting: Setting) -> Parts:
    """Return the bytes of one step, at the highest of its high points: the last layer's backward, the first one's, the loss;
    and the embedding's where it is split."""
    decoder = decoder.split(setting.tensor)
    host = decoder.inputs * setting.own_rows * decoder.stream * setting.stream if setting.offload else 0
    ranks = setting.gpus // setting.tensor
    weights, trained = decoder.weight_bytes // ranks, decoder.trained_bytes // ranks
    state = {
        "weights": weights,
        "gradients": trained,
        "optimizer": optimizer_bytes(decoder, setting.optimizer) // ranks,
    }
    if decoder.whole is not None:
        rest = max(0, decoder.whole(setting) - weights - trained)
        names = ("gathered", "inputs", "attention", "shard", "loss", "host")
        return Parts(**state, **dict.fromkeys(names, 0), program=rest, reserve=RESERVE)
    if setting.host_state:
        host += sum(state.values())
        state = dict.fromkeys(state, 0)
    # Gradients of the step before are gone, and those of this one come as inputs go. XLA has the room of its results from
    # beginning to end.
    early = {} if setting.half == "jax" else {"gradients": 0}
    embeds = decoder.held is None or decoder.held.trains_embedding
    # Layers whose backward is done: at the last layer, at the one before, at the second and at the first.
    last = decoder.layers - 1
    done = {0} if setting.half == "jax" else {0, min(1, last), max(0, last - 1), last}
    moments = [
        *(_at_layer(decoder, setting, count) for count in sorted(done)),
        early | _at_loss(decoder, setting),
        _at_embedding(decoder, setting) if setting.half == "torch" and embeds else {},
        _in_split_embedding(decoder, setting) if setting.half == "torch" and embeds else {},
    ]
    found = (Parts(**state | moment, reserve=RESERVE, host=host) for moment in moments if moment)
    return max(found, key=lambda parts: parts.total)


def optimizer_bytes(decoder: Decoder, optimizer: Optimizer) -> int:
    """Return the bytes that an optimizer keeps of all trained parameters from step to step: in their dtype, or in 8 bits."""
    if optimizer == "adamw_8bit":
        return MOMENTS[optimizer] * (decoder.trained + MASTER * -(-decoder.trained // _SCALED))
    return MOMENTS[optimizer] * decoder.trained_bytes


def _at_layer(decoder: Decoder, setting: Setting, done: int) -> dict[str, int]:
    """In the backward of a layer: in PyTorch the head's gradient waits for those of the other ends, which are one unit.

    done: layers behind it, whose backward has been. In JAX, where all layers are one loop, 0.
    """
    b, layer, moment = setting.itemsize, decoder.layer_gathered, {}
    kept = 0 if setting.offload else max(0, decoder.inputs - done)  # of layers, on the device
    apart, gathered = _head_apart(decoder, setting), 0
    if setting.half == "torch":
        # The layer's weights, those of the next one on their way, the gradients of the unit before, in float32, being cut.
        before = decoder.layer_trained if done else decoder.head_trained * apart
        gathered = (1 + (done < decoder.layers - 1 and not _is_alone(setting))) * b * layer + MASTER * before
        gathered += 0 if apart else b * decoder.end_parameters
        moment = {"gradients": _cut_bytes(decoder, setting, done, decoder.head_trained * apart)}
    inputs = kept * setting.own_rows * decoder.stream * setting.stream
    if setting.half == "torch":
        rows, shard = eager_layer_bytes(decoder, setting, kept)
    else:
        rows, gathered, shard = compiled_layer_bytes(decoder, setting)
    rows += _id_bytes(setting)
    of_head = b * decoder.head_trained * (not apart)
    if setting.half == "jax":  # cut already; where it is the embedding's too, it waits for the other part of that
        waits = decoder.tied and (setting.gpus == 1 or setting.gpus > setting.tensor)
        of_head = MASTER * decoder.head_trained // (setting.gpus // setting.tensor) * waits
    return moment | {"gathered": gathered, "inputs": inputs, "attention": rows, "shard": shard, "loss": of_head}


def _cut_bytes(decoder: Decoder, setting: Setting, layers: int, more: int = 0) -> int:
    """Return the bytes of a rank's part of the gradients of so many layers, and of so many more parameters."""
    of_layers = decoder.layers_trained * layers // decoder.layers
    found = decoder.trained_bytes * (of_layers + more) // max(1, decoder.trained)
    return 0 if setting.host_state else found // (setting.gpus // setting.tensor)


def _is_alone(setting: Setting) -> bool:
    """Return whether weights are not cut, so that none are on their way."""
    return setting.gpus == setting.tensor


def _id_bytes(setting: Setting) -> int:
    """Return the bytes of tokens, positions and labels in PyTorch, which every rank of a context has whole."""
    return 3 * 8 * setting.sequences * setting.tokens if setting.half == "torch" else 0


def _head_apart(decoder: Decoder, setting: Setting) -> bool:
    """Return whether the head is a unit of its own, whose gradient is cut before that of the last layer: in models of
    transformers that are as they were (`Plan.ends_apart`)."""
    return setting.half == "torch" and setting.scope == "none" and not decoder.tied and not decoder.by_structure


def _at_loss(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """Where the loss is made, with its gradients: beside it the hidden states, normed, and their gradient.

    In JAX, where 16 bits are those of products alone, also these states in float32.
    """
    if setting.half == "jax":
        return compiled_loss_moment(decoder, setting)
    b, rows, trained = setting.itemsize, setting.own_rows * decoder.hidden * setting.stream, decoder.head_trained > 0
    sizes: dict[str, Any] = {"hidden": decoder.hidden, "vocab": decoder.vocab, "itemsize": b, "weight_itemsize": b}
    # What bends logits is fused with what follows on a GPU.
    bends = ("logit_softcap",) * (LOGIT_CAP in decoder.caps and setting.device == "cpu")
    shape = LossShape(tokens=setting.rows, copied=setting.tensor > 1, bends=bends, **sizes)
    of_head, plain = b * decoder.head_trained, setting.scope == "none" and not setting.chunked_loss
    if plain:  # transformers lets its 16-bit logits go
        loss = 3 * MASTER * setting.rows * decoder.vocab
    elif setting.tensor > 1:
        loss = sequence_loss_peak_bytes(shape, setting.split_shards, device=setting.device, kernels=setting.fused)
    else:
        loss = loss_peak_bytes(shape, setting.shards, device=setting.device, kernels=setting.fused)
    if not plain:
        loss -= 0 if trained else loss_accumulator_bytes(shape)
        if b == MASTER:
            loss += of_head
        elif trained:  # and is rounded when the logits are gone
            loss = max(loss, loss_accumulator_bytes(shape) + of_head)
    inputs = (0 if setting.offload else decoder.inputs) * rows * decoder.stream // decoder.hidden
    # The last layer's weights, and while backward has not begun the buffer in which they came.
    ends = decoder.hidden * decoder.vocab if _head_apart(decoder, setting) else decoder.end_parameters
    gathered = b * ((1 if plain or _is_alone(setting) else 2) * decoder.layer_gathered + ends)
    # The last layer's result, normed, and its gradient; where transformers norms it, what that keeps.
    rows *= 3 + (setting.scope != "block") * (1 + (b < MASTER)) - plain
    return {"gathered": gathered, "inputs": inputs, "attention": rows + _id_bytes(setting), "shard": 0, "loss": loss}


def _at_embedding(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """Behind the backward of the embedding: the gradients of all layers, and of the ends whole, in float32, beside what they
    are copied from or cut into, and then rounded where parameters are of 16 bits; a rank alone cuts nothing that autograd has
    summed.

    Where it is split by vocabulary there are the gradient of a rank's own tokens, and that of a shard of all ranks' tokens as
    it came and without the rows of others' entries.
    """
    ranks = setting.gpus // setting.tensor
    kept = decoder.trained_bytes // decoder.trained  # of one parameter's gradient, which is float32 until it is cut
    cut = (MASTER + (kept if kept < MASTER else 0)) // ranks
    if ranks == 1 and setting.scope == "none":
        cut = 0
    split = setting.tensor > 1
    return {
        "gradients": _cut_bytes(decoder, setting, decoder.layers),
        "gathered": (MASTER + max(setting.itemsize, cut)) * decoder.end_parameters,
        "inputs": 0,
        "attention": setting.own_rows * decoder.hidden * setting.itemsize * split,
        "shard": 2 * setting.shards.longest * decoder.hidden * setting.itemsize * split,
        "loss": 0,
    }


def _in_split_embedding(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """In the backward of an embedding of 16 bits that is split by vocabulary and goes through the tokens by shards.

    Its gradient so far, that of a shard and both together, in float32, beside what makes it; the embedding itself, and the
    gradient of a head that is not the embedding, and of a rank's own tokens. That of the first layer is being cut.
    """
    shards = plan_sequence("plan", (setting.own_rows,) * setting.tensor, device=setting.device)
    if setting.tensor == 1 or setting.itemsize == MASTER or len(shards) == 1:
        return {}
    entries = decoder.hidden * decoder.vocab
    return {
        "gradients": _cut_bytes(decoder, setting, decoder.layers),
        "gathered": (3 * MASTER + 2 * setting.itemsize) * entries + MASTER * decoder.layer_trained,
        "inputs": 0,
        "attention": setting.own_rows * decoder.hidden * setting.itemsize,
        "shard": 0,
        "loss": setting.itemsize * entries * (not decoder.tied),
    }
