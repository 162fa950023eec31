"""Figures that others have published, beside what `plan` says of their hardware and of their way to use it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shared_specs.app.plan.decoder import MODELS, Decoder
from shared_specs.app.plan.search import longest, step_flop, step_seconds
from shared_specs.app.plan.step import Setting, parts_of
from shared_specs.kernels.roofline import GPUS

TRL = "TRL, Training beyond 1M tokens, 2026-09"
ALST = "ALST, arXiv 2506.13996"
MEMO = "Memo, arXiv 2407.12117"
FPDT = "FPDT, arXiv 2408.16978"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One figure.

    Attributes:
        what: is measured, of which model, tokens and GPUs. unit: of `figure`, and of what `planned` returns.
        assumption: how their setup is put in this planner's words.
    """

    source: str
    what: str
    figure: float
    unit: str
    assumption: str
    planned: Callable[[], float]


_QWEN, _LLAMA = MODELS["qwen3-8b"], MODELS["llama-3-8b"]
_MILLION = Setting(tokens=2**20, gpus=8, context=8)
_H100, _A100 = GPUS["h100"], GPUS["a100"]


def _gigabytes(setting: Setting) -> float:
    return parts_of(_QWEN, setting).total / 1e9


def _seconds(millions: int) -> float:
    gpus = 8 * millions
    tokens = 2**20 * millions
    return step_seconds(_QWEN, replace(_MILLION, tokens=tokens, gpus=gpus, context=gpus), _H100)


def _longest_millions(gpus: int) -> float:
    """With all that ALST has: MLP and loss tiled, layers' inputs and all state on the host."""
    setting = Setting(tokens=1, gpus=gpus, context=gpus, scope="mlp", offload=True, host_state=True)
    found = longest(setting, lambda at: parts_of(_LLAMA, at).total <= _H100.memory_bytes)
    return 0.0 if found is None else found.tokens / 1e6


def utilisation(decoder: Decoder, setting: Setting) -> float:
    """Return the share of a GPU's products, in percent, that a step without recomputation uses."""
    products, attention = step_flop(decoder, setting, recomputed=False)
    seconds = step_seconds(decoder, setting, _A100, recomputed=False)
    return 100 * (products + attention) / (seconds * setting.gpus * _A100.flops_16)


_RING = "a ring as a context of eight; state in float32"
_ALST = "scope mlp, inputs and all state on the host; Ulysses"
PUBLISHED = (
    Published(
        source=TRL,
        what="GB a GPU, Qwen3-8B, 1,048,576 tokens, 8 H100: naively",
        figure=288,
        unit="GB",
        assumption=f"checkpointed, whole logits; {_RING}",
        planned=lambda: _gigabytes(replace(_MILLION, scope="none")),
    ),
    Published(
        source=TRL,
        what="the same, inputs on the host, loss in chunks",
        figure=56.2,
        unit="GB",
        assumption=f"checkpointed, MLP whole, loss in chunks; {_RING}",
        planned=lambda: _gigabytes(replace(_MILLION, scope="none", offload=True, chunked_loss=True)),
    ),
    *(
        Published(
            source=TRL,
            what=f"seconds a step, {millions}M tokens, {8 * millions} H100",
            figure=376.0 * millions,
            unit="s",
            assumption="every layer computed twice; no communication",
            planned=lambda millions=millions: _seconds(millions),
        )
        for millions in (1, 2, 4)
    ),
    *(
        Published(
            source=ALST,
            what=f"longest context, Llama-8B, {gpus} H100",
            figure=tokens,
            unit="M tokens",
            assumption=_ALST,
            planned=lambda gpus=gpus: _longest_millions(gpus),
        )
        for gpus, tokens in ((1, 0.5), (8, 3.7), (32, 15.0))
    ),
    Published(
        source=MEMO,
        what="use of the GPUs' products, 7B, 1M tokens, 8 A800",
        figure=52.3,
        unit="%",
        assumption="nothing computed twice; no communication",
        planned=lambda: utilisation(MODELS["llama-2-7b"], _MILLION),
    ),
    Published(
        source=FPDT,
        what="use of the GPUs' products, 8B, 2M tokens, 4 A100",
        figure=55.0,
        unit="%",
        assumption="nothing computed twice; no communication",
        planned=lambda: utilisation(_LLAMA, replace(_MILLION, tokens=2**21, gpus=4, context=4)),
    ),
)

# What is published and not comparable, and why.
NOT_COMPARABLE = (
    (FPDT, "2M tokens of an 8B fit on 4 GPUs", "attention's operands wait in host memory as well"),
    (ALST, "32K tokens of an 8B fit without it", "the last power of two that ran, not the longest context"),
    ("Axolotl, PR 3666", "experts need tiling above 128K on 95 GB", "this planner has no mixtures of experts"),
    (TRL, "Qwen3-32B at 1M with the MLP in tiles", "no figure is given"),
)
