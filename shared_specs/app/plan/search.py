"""What to set so that a context fits, how long a context fits with each lever, and the time that a step should take."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any, NamedTuple

from shared_specs.app.options import InputError, parse_size
from shared_specs.app.plan.decoder import WHOLE, Decoder, tensor_ranks
from shared_specs.app.plan.moments.compiled import cudnn_groups
from shared_specs.app.plan.setting import NODE
from shared_specs.app.plan.step import Parts, Setting, parts_of
from shared_specs.config import Half
from shared_specs.kernels.roofline import GPU, GPUS, gpu_of_users
from shared_specs.layers.ring import ring_multiple

# Of a GPU's products in 16 bits, what attention reaches on long sequences, forward and backward together: between the
# causal forward and backward of FlashAttention-3 on an H100 (arXiv 2407.08608).
ATTENTION_REACHED = 0.55
LONGEST = 2**30  # tokens at which the search ends
STEP = 1024  # tokens to which the longest context is rounded down
LEAST_MEMORY = 2**30  # of a GPU: a smaller number was meant in another unit


class Lever(NamedTuple):
    """One way to spend less memory, in the order in which they are tried: what costs nothing first."""

    name: str
    changes: dict[str, Any]


_LEVERS: dict[Half, tuple[Lever, ...]] = {
    "torch": (
        Lever("checkpointing alone", {"scope": "none"}),
        Lever("MLP and loss tiled", {"scope": "mlp"}),
        Lever("all but attention tiled", {"scope": "block"}),
        Lever("all but attention tiled, inputs on the host", {"scope": "block", "offload": True}),
    ),
    "jax": (
        Lever("all but attention tiled", {"scope": "block"}),
        Lever("all but attention tiled, inputs on the host", {"scope": "block", "offload": True}),
    ),
}
# Of layers that are measured, where none of them runs as a block.
_MEASURED = (
    Lever("MLP and loss tiled", {"scope": "mlp"}),
    Lever("MLP and loss tiled, inputs on the host", {"scope": "mlp", "offload": True}),
)
# Of a model that is measured whole: it is what it is.
_WHOLE = (Lever("the model as it is", {"scope": "none"}),)
# What is tried where nothing else fits. A compiled step of JAX reads its parameters from the devices' memory (`parallelize`
# refuses cpu_offload); its attention in blocks takes several times as long as cuDNN's.
_LAST: dict[Half, Lever] = {
    "torch": Lever("all but attention tiled, inputs and all state on the host", {"host_state": True}),
    "jax": Lever("all but attention tiled, inputs on the host, attention in blocks", {"attention": "blocks"}),
}


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The longest context with one lever and every GPU in one context: tokens, and what takes the memory there."""

    lever: str
    setting: Setting
    parts: Parts

    @property
    def tokens(self) -> int:
        return self.setting.tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The findings of `plan`.

    Attributes:
        memory: bytes of one GPU. setting, parts: what to set for the tokens that were asked for; None where nothing fits.
        seconds: a step should take on the GPU that was named; None for one of which only the memory is known, and for layers
            that are measured.
        reach: the longest context of every lever that reaches any.
    """

    decoder: Decoder
    tokens: int
    gpus: int
    memory: int
    setting: Setting | None
    parts: Parts | None
    seconds: float | None
    reach: tuple[Reach, ...]

    @property
    def note(self) -> str:
        """Return where the numbers come from."""
        if self.decoder.has_formulas:
            return "From formulas: nothing was run."
        if self.decoder.whole is not None:
            found = "From the model's own step, without values at a few lengths, and from lines through what it takes there."
        else:
            found = (
                "From formulas, but for the layers: one of each kind ran without values, by transformers' own code and "
                "without kernels of other packages."
            )
        most = self.decoder.positions
        return found + ("" if most is None else f" The model has {most} positions: no sequence is longer.")


def plan(
    decoder: Decoder,
    tokens: int,
    *,
    memory: int,
    host: int | None = None,
    gpus: int = 1,
    gpu: GPU | None = None,
    half: Half = "torch",
    tp: int | None = None,
    **work: Any,
) -> Plan:
    """Return what to set for a context, and how far every lever reaches.

    The first setting that fits, in this order: state on the GPUs before state on the host (in JAX attention by cuDNN before
    blocks), the fewest ranks that split
    layers, the fewest that share a sequence, and of the levers the first. Communication is in neither bytes nor seconds.

    Args:
        tokens: of a sequence. memory: bytes of one GPU. host: bytes of host memory for each GPU; None is as many as it takes.
        gpus: how many. gpu: its rates, for the time.
        tp: ranks that split every layer; None tries as many as a node has where one alone does not do.
        work: fields of `Setting`: sequences, dtype, optimizer, shard_tokens.
    """
    base = Setting(tokens=tokens, gpus=gpus, half=half, **work)
    tensors = splits(decoder, base, tp)

    def fits(setting: Setting) -> bool:
        if decoder.positions is not None and setting.tokens > decoder.positions:
            return False
        parts = parts_of(decoder, setting)
        return parts.total <= memory and (host is None or parts.host <= host)

    setting = next(filter(fits, _settings(decoder, base, tensors)), None)
    widest = contexts(decoder, replace(base, tensor=tensors[0] if setting is None else setting.tensor))[-1]
    levers = levers_of(decoder, widest)
    last = Lever(_LAST[half].name, levers[-1].changes | _LAST[half].changes)
    if levers is _MEASURED:
        last = last._replace(name="MLP and loss tiled, inputs and all state on the host")
    if decoder.whole is None and (half == "torch" or cudnn_groups(decoder.split(widest.tensor), widest) is not None):
        levers = (*levers, last)
    found = (_reach(decoder, lever, widest, fits) for lever in levers)
    return Plan(
        decoder=decoder,
        tokens=tokens,
        gpus=gpus,
        memory=memory,
        setting=setting,
        parts=None if setting is None else parts_of(decoder, setting),
        seconds=step_seconds(decoder, setting, gpu) if setting and gpu and decoder.has_formulas else None,
        reach=tuple(reach for reach in found if reach is not None),
    )


def levers_of(decoder: Decoder, setting: Setting) -> tuple[Lever, ...]:
    """Return what may be set, what costs nothing first, but for state on the host.

    With a ring something is tiled: of one in an untiled model on a GPU no formula is close enough. With windows, for which
    transformers makes masks of all pairs, and in families with more norms or fused projections everything but attention is.
    Where layers are split it is as well: there are formulas of that alone.
    """
    levers = _LEVERS[setting.half]
    if decoder.whole is not None:
        return _WHOLE
    if decoder.measured is not None and decoder.scope == "mlp":
        return _MEASURED
    if decoder.window is not None or decoder.by_structure or decoder.kind not in WHOLE or setting.tensor > 1:
        return tuple(lever for lever in levers if lever.changes["scope"] == "block")
    return levers if setting.ring == 1 else tuple(lever for lever in levers if lever.changes["scope"] != "none")


def memory_of(gpu: str, option: str) -> tuple[int, GPU | None]:
    """Return bytes of a GPU, and its rates where it is one that is known. gpu: a name, or a size; option: for messages.

    Raises:
        InputError: it is neither, or a size that no GPU has.
    """
    found = gpu_of_users(gpu)
    if found is not None:
        return int(found.memory_bytes), found
    if not gpu[:1].isdigit():
        raise InputError(f"{option} must be one of {', '.join(GPUS)}, or a size such as 80GB, got {gpu}.")
    size = parse_size(gpu, option)
    if size < LEAST_MEMORY:
        raise InputError(f"{option} must be at least 1GiB, got {gpu}, which is {size} bytes. Write for example 80GB.")
    return size, None


def splits(decoder: Decoder, base: Setting, tp: int | None) -> list[int]:
    """Return the numbers of ranks that are tried as those that split every layer: the one that was asked for, or all that can
    be in one node, since they wait for each other within each layer."""
    if tp is not None:
        return [tp]
    return [ranks for ranks in tensor_ranks(decoder, base.gpus, base.half) if ranks <= NODE]


def contexts(decoder: Decoder, base: Setting) -> list[Setting]:
    """Return the setting with every number of ranks that may share a sequence, ascending: divisors of the GPUs that are left
    of those that split layers.

    They exchange tokens for heads where they divide the query heads of a rank. Otherwise as many as divide both do, in each
    place of a ring (as `finetune.context.context_axes`).
    """
    gpus = base.gpus // base.tensor
    most = 1 if decoder.whole is not None or (decoder.uncut and base.half == "torch") else gpus
    numbers = [n for n in range(1, most + 1) if gpus % n == 0]
    heads = decoder.split(base.tensor).heads
    return [_attending(replace(base, context=n), gcd(n, heads)) for n in numbers]


def _attending(base: Setting, inside: int) -> Setting:
    if inside == base.context:
        return base
    return replace(base, context_kind="ring") if inside == 1 else replace(base, context_kind="2d", inside=inside)


def parts_of_sequence(setting: Setting) -> int:
    """Return what divides the tokens of a sequence that the ranks of a context share.

    In JAX those that split its layers, too, have as many rows each.
    """
    parts = setting.context if setting.ring == 1 else ring_multiple(setting.ring, setting.exchanging)
    if setting.half == "torch":
        return parts
    return lcm(parts, setting.context * (setting.tensor // gcd(setting.tensor, setting.sequences)))


def _settings(decoder: Decoder, base: Setting, tensors: Sequence[int]) -> Iterator[Setting]:
    for last in ({},) if decoder.whole is not None else ({}, _LAST[base.half].changes):
        for tensor in tensors:
            for shared in contexts(decoder, replace(base, tensor=tensor)):
                if base.tokens % parts_of_sequence(shared) == 0:
                    for lever in levers_of(decoder, shared):
                        yield replace(shared, **lever.changes, **last)


def _reach(decoder: Decoder, lever: Lever, base: Setting, fits: Callable[[Setting], bool]) -> Reach | None:
    found = longest(replace(base, **lever.changes), fits)
    return None if found is None else Reach(lever=lever.name, setting=found, parts=parts_of(decoder, found))


def longest(base: Setting, fits: Callable[[Setting], bool]) -> Setting | None:
    """Return the setting with as many tokens as fit, a multiple of STEP and of what the ranks share; None where none do."""
    unit = lcm(parts_of_sequence(base), STEP)

    def at(units: int) -> Setting:
        return replace(base, tokens=units * unit)

    low, high = 0, LONGEST // unit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(at(middle)) else (low, middle - 1)
    return None if low == 0 else at(low)


def step_flop(decoder: Decoder, setting: Setting, *, recomputed: bool = True) -> tuple[int, int]:
    """Return FLOP of one step of all GPUs: of products with weights, and of attention (causal: `Decoder.pairs`).

    All products of a checkpointed layer but the down-projection, and its attention, are computed twice; attention's backward
    is two and a half of its forwards; the loss has three products. Frozen weights have no product for a gradient.
    recomputed: False counts nothing twice.
    """
    sequences = setting.sequences * setting.data
    tokens = sequences * setting.tokens
    adapters = decoder.layer_gathered - decoder.layer_parameters
    down = decoder.hidden * decoder.intermediate * max(1, decoder.chosen)
    again = adapters + decoder.layer_products - down if recomputed else 0
    products = decoder.layers * (4 * (decoder.layer_products + adapters) + 2 * again) * tokens
    products += 2 * min(decoder.layers_trained, decoder.layers * (decoder.layer_products + adapters)) * tokens
    loss = (4 * decoder.hidden * decoder.vocab + 2 * decoder.head_trained) * tokens
    forward = 4 * decoder.pairs(setting.tokens) * decoder.attended * sequences
    return products + loss, int((4.5 if recomputed else 3.5) * forward)


def step_seconds(decoder: Decoder, setting: Setting, gpu: GPU, *, recomputed: bool = True) -> float:
    """Return how long a step should take if nothing but products and attention did."""
    products, attention = step_flop(decoder, setting, recomputed=recomputed)
    reached = {2: gpu.flops_16, 4: gpu.flops_32}[setting.itemsize] * ATTENTION_REACHED
    return (products / gpu.flops(setting.itemsize) + attention / reached) / setting.gpus
