"""Memory against context: what a step of the demo's model takes without tiling and with each way to take less."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from shared_specs.app.finetune.plain_memory import plain_step
from shared_specs.app.memory import machine_bytes
from shared_specs.app.plan.decoder import decoder_of
from shared_specs.app.plan.step import Scope, Setting, parts_of
from shared_specs.app.plots import GIB

_FLOAT32, _FOUR = 4, 4  # bytes of a number; parameters, their gradients and two moments, as the optimizer steps
# Contexts of the curves, ascending.
CURVE_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True, kw_only=True)
class ContextVariant:
    """One way to run a step.

    Attributes:
        flags: of `finetune`.
        model_bytes: (config, tokens) -> bytes of a first float32 step on one sequence, without what the process had before.
            AdamW's moments are made at its end, when activations are gone.
    """

    flags: tuple[str, ...]
    model_bytes: Callable[[dict[str, Any], int], int]


def _planned(scope: Scope) -> Callable[[dict[str, Any], int], int]:
    """Return the planner's bytes of a PyTorch step in one process, which gathers no weights and needs no reserve."""

    def bytes_of(config: dict[str, Any], tokens: int) -> int:
        decoder = decoder_of(config, "the demo's model")
        parts = parts_of(decoder, Setting(tokens=tokens, scope=scope, dtype="float32", device="cpu"))
        backward = parts.total - parts.optimizer - parts.reserve - parts.gathered
        return max(backward, _FOUR * _FLOAT32 * decoder.parameters)

    return bytes_of


def _plain(config: dict[str, Any], tokens: int) -> int:
    step = plain_step(config, tokens)
    return max(step.weights + step.activations + 3 * step.logits, _FOUR * step.weights)


VARIANTS: dict[str, ContextVariant] = {
    "plain": ContextVariant(flags=("--plain",), model_bytes=_plain),
    "checkpointed": ContextVariant(flags=("--plain", "--checkpointing"), model_bytes=_planned("none")),
    "tiled": ContextVariant(flags=("--checkpointing",), model_bytes=_planned("mlp")),
    "block-tiled": ContextVariant(flags=("--scope", "block"), model_bytes=_planned("block")),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Peak memory of the process of one run."""

    variant: str
    tokens: int
    peak_bytes: int


def draw_contexts(
    axes: Axes, config: dict[str, Any], before: int, measured: Sequence[Measured], machine: int | None = None
) -> None:
    """Draw what is predicted as curves and what was measured as points on them.

    Args:
        config: of the model, as in the log of a run.
        before: bytes that a process has before it loads the model.
        machine: bytes of the machine that measured; None for this one.
    """
    for place, (variant, how) in enumerate(VARIANTS.items()):
        sizes = [(before + how.model_bytes(config, tokens)) / GIB for tokens in CURVE_TOKENS]
        width = 4.5 - place  # curves that lie on one another show that there are several
        (line,) = axes.plot(CURVE_TOKENS, sizes, label=f"{variant}, predicted", linewidth=width)
        points = [(each.tokens, each.peak_bytes / GIB) for each in measured if each.variant == variant]
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=line.get_color(), label=f"{variant}, measured")
    ceiling, label = (
        (machine_bytes(), "memory of this machine") if machine is None else (machine, "memory of the machine")
    )
    axes.axhline(ceiling / GIB, color="black", linestyle="--", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(CURVE_TOKENS)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("context (tokens)")
    axes.set_title("peak memory of a first step in PyTorch (GiB)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
