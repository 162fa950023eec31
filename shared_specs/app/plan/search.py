"""What to set so that a context fits, how long a context fits with each lever, and the time that a step should take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, NamedTuple

from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.step import Parts, Setting, parts_of
from shared_specs.config import Half
from shared_specs.kernels.roofline import GPU

# Of a GPU's products in 16 bits, what attention reaches on long sequences, forward and backward together: between the
# causal forward and backward of FlashAttention-3 on an H100 (arXiv 2407.08608).
ATTENTION_REACHED = 0.55
LONGEST = 2**30  # tokens at which the search ends
STEP = 1024  # tokens to which the longest context is rounded down


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
_HOST = Lever("... and weights, gradients and optimizer on the host", {"host_state": True})


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
        seconds: a step should take on the GPU that was named; None for one of which only the memory is known.
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


def plan(
    decoder: Decoder,
    tokens: int,
    *,
    memory: int,
    host: int | None = None,
    gpus: int = 1,
    gpu: GPU | None = None,
    half: Half = "torch",
    **work: Any,
) -> Plan:
    """Return what to set for a context, and how far every lever reaches.

    The first setting that fits, in this order: state on the GPUs before state on the host, the fewest ranks that share a
    sequence, and of the levers the first. Communication is in neither bytes nor seconds.

    Args:
        tokens: of a sequence. memory: bytes of one GPU. host: bytes of host memory for each GPU; None is as many as it takes.
        gpus: how many. gpu: its rates, for the time.
        work: fields of `Setting`: sequences, dtype, optimizer, shard_tokens.
    """
    base = Setting(tokens=tokens, gpus=gpus, half=half, **work)

    def fits(setting: Setting) -> bool:
        parts = parts_of(decoder, setting)
        return parts.total <= memory and (host is None or parts.host <= host)

    setting = next(filter(fits, _settings(decoder, base)), None)
    levers = (*_LEVERS[half], Lever(_HOST.name, {**_LEVERS[half][-1].changes, **_HOST.changes}))
    found = (_longest(decoder, lever, base, fits) for lever in levers)
    return Plan(
        decoder=decoder,
        tokens=tokens,
        gpus=gpus,
        memory=memory,
        setting=setting,
        parts=None if setting is None else parts_of(decoder, setting),
        seconds=None if setting is None or gpu is None else step_seconds(decoder, setting, gpu),
        reach=tuple(reach for reach in found if reach is not None),
    )


def contexts(decoder: Decoder, gpus: int) -> list[int]:
    """Return how many ranks may share a sequence: divisors of the GPUs and of the query heads, ascending."""
    return [n for n in range(1, gpus + 1) if gpus % n == 0 and decoder.heads % n == 0]


def _settings(decoder: Decoder, base: Setting) -> Iterator[Setting]:
    for host in ({}, _HOST.changes):
        for ranks in contexts(decoder, base.gpus):
            if base.tokens % ranks == 0:
                for lever in _LEVERS[base.half]:
                    yield replace(base, context=ranks, **lever.changes, **host)


def _longest(decoder: Decoder, lever: Lever, base: Setting, fits: Callable[[Setting], bool]) -> Reach | None:
    ranks = contexts(decoder, base.gpus)[-1]
    unit = lcm(ranks, STEP)

    def at(units: int) -> Setting:
        return replace(base, tokens=units * unit, context=ranks, **lever.changes)

    low, high = 0, LONGEST // unit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(at(middle)) else (low, middle - 1)
    return None if low == 0 else Reach(lever=lever.name, setting=at(low), parts=parts_of(decoder, at(low)))


def step_flop(decoder: Decoder, setting: Setting) -> tuple[int, int]:
    """Return FLOP of one step of all GPUs: of products with weights, and of attention (causal: half of all pairs).

    All products of a checkpointed layer but the down-projection, and its attention, are computed twice; attention's backward
    is two and a half of its forwards; the loss has three products.
    """
    sequences = setting.sequences * (setting.gpus // setting.context)
    tokens = sequences * setting.tokens
    again = decoder.layer_products - decoder.hidden * decoder.intermediate
    products = decoder.layers * (6 * decoder.layer_products + 2 * again) * tokens
    loss = 6 * decoder.hidden * decoder.vocab * tokens
    forward = 2 * setting.tokens**2 * decoder.queries * sequences * decoder.layers
    return products + loss, int(4.5 * forward)


def step_seconds(decoder: Decoder, setting: Setting, gpu: GPU) -> float:
    """Return how long a step should take if nothing but products and attention did."""
    products, attention = step_flop(decoder, setting)
    reached = {2: gpu.flops_16, 4: gpu.flops_32}[setting.itemsize] * ATTENTION_REACHED
    return (products / gpu.flops(setting.itemsize) + attention / reached) / setting.gpus
