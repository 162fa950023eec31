"""What a model makes of its head's result, entry by entry, before it looks at any: a bias, factors, casts, tanh."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shared_specs.config import LossOptions


@dataclass(frozen=True)
class Step:
    """One operation on every logit. by: the factor or divisor. dtype: of a cast. columns: how many entries are left.
    bias: what is added to them, one number an entry of the vocabulary."""

    kind: Literal["times", "over", "tanh", "cast", "first", "plus"]
    by: float = 1.0
    dtype: torch.dtype | None = None
    columns: int = 0
    bias: Tensor | None = None

    def of(self, logits: Tensor) -> Tensor:
        if self.kind == "cast":
            return logits.to(self.dtype)
        if self.kind == "tanh":
            return torch.tanh(logits)
        if self.kind == "first":
            return logits[..., : self.columns]
        if self.bias is not None:
            return logits + self.bias
        return logits * self.by if self.kind == "times" else logits / self.by


Steps = tuple[Step, ...]


def finished(logits: Tensor, steps: Steps) -> Tensor:
    """Return the logits after these steps, in their order."""
    for step in steps:
        logits = step.of(logits)
    return logits


def columns_of(steps: Steps) -> int | None:
    """Return how many entries of the vocabulary are left; None for all."""
    return next((step.columns for step in reversed(steps) if step.kind == "first"), None)


def bias_of(steps: Steps) -> Tensor | None:
    """Return what is added to the logits, [V]; None for nothing. It comes before all steps but casts."""
    return next((step.bias for step in steps if step.kind == "plus"), None)


def as_options(steps: Steps) -> LossOptions | None:
    """Return the scale and the cap that these steps are together; None where they are something else.

    b tanh(a z) = b tanh((a b) z / b). A cast to a narrower dtype rounds, and is no factor.
    A bias (`bias_of`) is part of neither.
    """
    before, after, capped = 1.0, 1.0, False
    for step in steps:
        if step.kind == "tanh":
            if capped:
                return None
            before, after, capped = after, 1.0, True
        elif step.kind == "first" or step.dtype not in (None, torch.float32, torch.float64):
            return None
        elif step.kind in ("cast", "plus"):
            continue
        else:
            after *= step.by if step.kind == "times" else 1 / step.by
    if not capped:
        return LossOptions(logit_scale=after)
    return LossOptions(logit_scale=before * after, logit_softcap=after) if after > 0 else None
