"""The learning rate of each step, and which parameters decay: one formula for both halves."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shared_specs.app.options import FinetuneOptions


def learning_rate(options: FinetuneOptions, done: Any, xp: Any = np) -> Any:
    """Return the learning rate of the update that follows `done` others.

    It rises in `warmup` equal parts to `lr`; behind them it stays, or falls to what would be zero behind the last step, in
    equal parts (linear) or as a half wave (cosine).

    Args:
        done: a number, or an array of `xp` of a floating-point dtype.
        xp: numpy or jax.numpy.
    Example:
        >>> options = FinetuneOptions(lr=0.1, schedule="linear", warmup=2, steps=6)
        >>> [round(float(learning_rate(options, done)), 6) for done in range(6)]
        [0.05, 0.1, 0.1, 0.075, 0.05, 0.025]
    """
    rate = options.lr
    behind = options.steps - options.warmup
    if options.schedule != "constant" and behind > 0:
        way = xp.clip((done - options.warmup) / behind, 0.0, 1.0)
        rate = rate * (1.0 - way if options.schedule == "linear" else 0.5 + 0.5 * xp.cos(np.pi * way))
    return rate * xp.minimum((done + 1) / options.warmup, 1.0) if options.warmup else rate


def is_scheduled(options: FinetuneOptions) -> bool:
    """Return whether the learning rate ever changes."""
    return options.schedule != "constant" or options.warmup > 0


def decays(path: Iterable[object]) -> bool:
    """Return whether `--weight-decay` is of this parameter: matrices are, scales of norms and biases are not.

    Args:
        path: its name in either half, in parts.
    """
    parts = [str(part) for part in path]
    return not (any("norm" in part for part in parts) or parts[-1] == "bias" or parts[-1].startswith("b_"))
