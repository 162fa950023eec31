"""One call of a model with a swapped head: the way by which its loss was computed, or the operation that read its logits."""

from functools import partial
from typing import Any

from torch import Tensor

from shared_specs.config import LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.core.autocast import autocast_dtype
from tiled_torch.core.partitioned import is_partitioned
from tiled_torch.core.replay import random_state
from tiled_torch.models.causal_lm import loss_through
from tiled_torch.models.family import reason_linear_is_not_plain
from tiled_torch.models.heads.rows import HeadCall, HeadRows
from tiled_torch.models.heads.steps import as_options, bias_of, finished
from tiled_torch.models.heads.swap import as_before
from tiled_torch.models.mlps.layout import sizes_of

UNSEEN = "its forward computes no cross entropy of its head's logits"


class HeadRun:
    """One call of a model. way: of its loss. read: what read the logits, while the call was running."""

    def __init__(
        self, name: str, head: Any, tiling: Tiling, backend: str, *, model: Any = None, planned: bool = False
    ) -> None:
        self.name, self.head, self.tiling, self.backend = name, head, tiling, backend
        self.model = model
        self.planned = planned  # nothing is computed: the question is only what would be
        self.way: str | None = None
        self.read: str | None = None
        self.open = True
        self.last = "an operation"

    @property
    def path(self) -> str:
        if self.read is not None:
            return f"untiled: {self.read} reads the logits of all tokens"
        return self.way or f"untiled: {UNSEEN}"

    def note(self, operation: str) -> None:
        """Hear of an operation on logits that is not known; made: that their values were asked for."""
        self.last = operation

    def made(self) -> None:
        if self.open and self.read is None:
            self.read = self.last

    def take(self, x: Tensor) -> Tensor:
        """Return what stands for the head's result."""
        with as_before(self.head):
            plain = reason_linear_is_not_plain(self.name, self.head) is None
            _, entries = sizes_of(self.head) or (0, 0)
        random = None if plain else random_state(x.device)
        return HeadRows(HeadCall(self.head, entries, autocast_dtype(x), random, self), x).logits()

    def loss(self, rows: HeadRows, targets: Tensor, **rules: Any) -> Any:
        """The cross entropy of rows, tiled; NotImplemented where there is no tiled way to it."""
        options, finish = as_options(rows.steps), None
        with as_before(self.head):
            reason = reason_linear_is_not_plain(self.name, self.head, gathered=True, unit=True)
            if options is None:
                options, finish = LossOptions(), partial(finished, steps=rows.steps)
                reason = reason or "more than a scale and a cap comes between the head and its loss"
            bias = bias_of(rows.steps)
            if reason is not None and (rules["reduction"] == "none" or bias is not None):
                return NotImplemented
            self.way = "tiled_linear_cross_entropy" if reason is None else f"tiled_loss: {reason}"
            if self.planned:
                return rows.rows.sum().float()
            if reason is not None and any(map(is_partitioned, self.head.parameters())):
                advice = "Call the model without labels for its logits, or use ZeRO stage 1 or 2."
                rule = "a plain linear layer under ZeRO-3, which would gather it for every shard"
                raise UnsupportedError(error_text("tile_model", self.name, rule, reason, advice=advice))
            known = {"logit_scale": options.logit_scale, "logit_softcap": options.logit_softcap}
            made = LossOptions(**known, **rules)
            return loss_through(self.head, rows.rows, targets, made, self.tiling, self.backend, finish, bias)
