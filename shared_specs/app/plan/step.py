"""Bytes of one training step on one GPU, part by part, from the formulas that the tests of each capability count.

The step is that of `parallelize`: `fully_shard` over all GPUs, float32 parameters, gradients and optimizer state, products
in another dtype, every layer checkpointed. Letters: T tokens of a rank, H hidden, V vocabulary, b bytes of the products.
"""

from dataclasses import dataclass
from typing import Literal

from shared_specs.app.plan.decoder import Decoder
from shared_specs.config import Half
from shared_specs.layers.block_costs import WIDE, block_row_bytes, eager_block_moments
from shared_specs.loss.costs import LossShape, compiled_loss_peak_bytes, loss_peak_bytes
from shared_specs.mlp.costs import MLPShape, compiled_peak_bytes, peak_bytes
from shared_specs.shards import ShardPlan, plan_tokens

Scope = Literal["none", "mlp", "block"]
Optimizer = Literal["adamw", "sgd"]
ITEMSIZE = {"bfloat16": 2, "float32": 4}
MOMENTS = {"adamw": 2, "sgd": 0}
MASTER = 4  # bytes of a parameter, of its gradient and of each moment
# What no tensor shows: CUDA's context, the communication library's buffers, what the allocator cannot use.
RESERVE = 3 * 2**30


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A choice of all that one may set, and the sizes of the work.

    Attributes:
        tokens: of a sequence. sequences: that a rank, or the ranks of a context together, work on at a time.
        gpus: in all. context: ranks that cut every sequence among them.
        scope: of `tile_model`; "none" is transformers' own layers and loss. offload: layers' inputs wait in host memory.
        host_state: parameters, gradients and moments are in host memory (`DataParallel(cpu_offload=True)`).
        shard_tokens: of a shard; None is what the library chooses.
        device: "cpu" is what a test on one measures: no kernels, and products of 16-bit operands in float32.
    """

    tokens: int
    sequences: int = 1
    gpus: int = 1
    context: int = 1
    scope: Scope = "block"
    offload: bool = False
    host_state: bool = False
    shard_tokens: int | None = None
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    half: Half = "torch"
    device: Literal["gpu", "cpu"] = "gpu"

    @property
    def rows(self) -> int:
        """T: tokens that one rank has."""
        return self.sequences * -(-self.tokens // self.context)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def stream(self) -> int:
        """Bytes of a number between layers: in JAX float32 whatever the products are."""
        return self.itemsize if self.half == "torch" else WIDE

    @property
    def shards(self) -> ShardPlan:
        """How a rank's tokens are cut."""
        if self.scope == "none":
            return ShardPlan(self.rows, max(1, self.rows))
        return plan_tokens(self.rows, shard_tokens=self.shard_tokens, device=self.device)


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
        """Every part that is on the GPU."""
        return {name: size for name, size in vars(self).items() if name != "host"}

    @property
    def total(self) -> int:
        return sum(self.by_name.values())


def parts_of(decoder: Decoder, setting: Setting) -> Parts:
    """Return the bytes of one step, at the higher of its two high points: a layer's backward or the loss."""
    host = decoder.layers * setting.rows * decoder.hidden * setting.stream if setting.offload else 0
    master = MASTER * decoder.parameters // setting.gpus
    state = {"weights": master, "gradients": master, "optimizer": MOMENTS[setting.optimizer] * master}
    if setting.host_state:
        host += sum(state.values())
        state = dict.fromkeys(state, 0)
    layer = Parts(**state | _at_layer(decoder, setting), reserve=RESERVE, host=host)
    # Gradients of the step before are gone; XLA has the room of its results from beginning to end.
    gradients = 0 if setting.half == "torch" else state["gradients"]
    loss = Parts(**state | {"gradients": gradients} | _at_loss(decoder, setting), reserve=RESERVE, host=host)
    return max(layer, loss, key=lambda parts: parts.total)


def _at_layer(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """In the backward of a layer: the head's gradient waits, in PyTorch for those of the other ends, which are one unit."""
    b, layer = setting.itemsize, decoder.layer_parameters
    if setting.half == "torch":
        # The layer's weights, those of the next one on their way, the gradients of the one before, in float32, being cut.
        gathered = (2 * b + MASTER) * layer + b * decoder.end_parameters
    else:  # and the sums that `compiled_peak_bytes` does not count
        gathered = _gathered_by_xla(decoder, setting) + MASTER * (layer - 3 * decoder.hidden * decoder.intermediate)
    kept = 0 if setting.offload else decoder.layers
    inputs = kept * setting.rows * decoder.hidden * setting.stream
    rows, shard = _layer_bytes(decoder, setting)
    of_head = b * decoder.hidden * decoder.vocab
    return {"gathered": gathered, "inputs": inputs, "attention": rows, "shard": shard, "loss": of_head}


def _gathered_by_xla(decoder: Decoder, setting: Setting) -> int:
    """One layer and the head, of the table no more than the rows that are asked for; on one GPU only what is cast."""
    alone = setting.gpus == 1 and setting.itemsize == MASTER
    return 0 if alone else setting.itemsize * (decoder.layer_parameters + decoder.hidden * decoder.vocab)


def _at_loss(decoder: Decoder, setting: Setting) -> dict[str, int]:
    """Where the loss is made, with its gradients: beside it the hidden states, normed, and their gradient."""
    b, rows = setting.itemsize, setting.rows * decoder.hidden * setting.stream
    shape = LossShape(tokens=setting.rows, hidden=decoder.hidden, vocab=decoder.vocab, itemsize=b, weight_itemsize=b)
    if setting.scope == "none":  # transformers lets its 16-bit logits go
        loss = 3 * MASTER * setting.rows * decoder.vocab
    elif setting.half == "torch":
        loss = loss_peak_bytes(shape, setting.shards, device=setting.device, kernels=setting.device == "gpu")
    else:
        loss = compiled_loss_peak_bytes(shape, setting.shards, device=setting.device)
    inputs = (0 if setting.offload else decoder.layers) * rows
    loss += b * decoder.hidden * decoder.vocab  # the head's gradient
    if setting.half == "jax":
        return {
            "gathered": _gathered_by_xla(decoder, setting),
            "inputs": inputs,
            "attention": rows,
            "shard": 0,
            "loss": loss,
        }
    gathered = b * (decoder.layer_parameters + decoder.end_parameters)
    return {"gathered": gathered, "inputs": inputs, "attention": 3 * rows, "shard": 0, "loss": loss}


def _layer_bytes(decoder: Decoder, setting: Setting) -> tuple[int, int]:
    """Of all tokens and of one shard, in the backward of a layer, without the kept inputs of all layers.

    The larger of two moments: attention's backward, in which there is no shard, and that of a shard of the MLP.
    """
    b, t, rows = setting.itemsize, setting.shards.longest, setting.rows
    sizes = {"hidden": decoder.hidden, "heads": decoder.heads, "kv_heads": decoder.kv_heads, "itemsize": b}
    mlp = MLPShape(tokens=rows, hidden=decoder.hidden, intermediate=decoder.intermediate, itemsize=b, weight_itemsize=b)
    exchanged = exchanged_row_bytes(decoder, setting)
    if setting.half == "jax":
        row = block_row_bytes(**sizes, head_dim=decoder.head_dim)
        return row * rows, compiled_peak_bytes(mlp, setting.shards, device=setting.device)
    if setting.scope == "block":
        kept = 0 if setting.offload else decoder.layers
        attention, behind = (
            row - kept * decoder.hidden * b
            for row in eager_block_moments(**sizes, head_dim=decoder.head_dim, kept_layers=kept)
        )
        of_shard = BLOCK_ARRAYS * t * decoder.intermediate * b
        found = max(((attention + exchanged[0]) * rows, 0), ((behind + exchanged[1]) * rows, of_shard), key=sum)
        return found[0], found[1] + MASTER * decoder.layer_parameters  # the sums of the weight gradients
    attention, around_mlp = checkpointed_row_bytes(decoder, b)
    if setting.scope == "mlp":
        own = peak_bytes(mlp, setting.shards, device=setting.device, kernels=setting.device == "gpu")
    else:
        own = PLAIN_ARRAYS * rows * decoder.intermediate * b
    return max(((attention + exchanged[0]) * rows, 0), (around_mlp * rows, own), key=sum)


def exchanged_row_bytes(decoder: Decoder, setting: Setting) -> tuple[int, int]:
    """Return the bytes that one more token costs where the ranks of a context exchange tokens for heads around attention.

    In attention's backward and behind it: q, k and v with the heads of a rank, and attention's output; the second with
    scope="block" alone, whose attention waits for its backward. In the first then also the gradient of that output, what is on
    its way of one group, and gradients of a group, which is as many heads as leave every rank a key head. Key heads that are
    repeated, where there are fewer of them than ranks, are gone by then. XLA has room for all this in what is there.
    """
    if setting.context == 1:
        return 0, 0
    of_all = decoder.queries + 2 * decoder.keys
    waiting = of_all + decoder.queries
    if setting.scope != "block":
        return waiting * setting.itemsize, 0
    groups = max(1, decoder.kv_heads // setting.context)
    more = decoder.queries + decoder.queries // groups + of_all // groups - of_all // decoder.kv_heads
    return (waiting + more) * setting.itemsize, waiting * setting.itemsize


# Arrays [t, I] and [T, I] at once in the backward of the MLP of a shard of scope="block", and of a whole untiled one.
BLOCK_ARRAYS, PLAIN_ARRAYS = 6, 6


def checkpointed_row_bytes(decoder: Decoder, itemsize: int) -> tuple[int, int]:
    """Return the bytes that one more token costs the backward of one of transformers' layers: in attention, and in the MLP.

    The MLP's own are not counted. In 16 bits the norms and the rotary positions work in float32 and leave more behind.
    """
    heads = 2 * decoder.queries + 2 * decoder.keys + 2 * decoder.head_dim
    attention, mlp = (17, 8) if itemsize < MASTER else (8, 5)
    both = heads * itemsize + 4 * decoder.heads
    return attention * decoder.hidden * itemsize + both, mlp * decoder.hidden * itemsize + both
