"""The entries of the vocabulary with the largest logits of each token: of a part of it, of several parts, of several ranks.

Letters: t tokens, k entries of each. Logits are compared as they are stored: scale and softcap keep their order, or turn it
round.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tiled_torch.core.tensors import wide_dtype
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.math import Part, Rules, Statistics


class Ranking(NamedTuple):
    """The k best entries of each token, the best one first.

    compared: [t, k], their logits in the wide dtype, negated where the smallest is the best. entries: [t, k], int64. Places for
    which a part has no entry: -inf, and V, behind every entry.
    """

    compared: Tensor
    entries: Tensor

    def merge(self, other: "Ranking") -> "Ranking":
        """Return as many of both, of equal ones the first entries."""
        both = (torch.cat(pair, 1) for pair in zip(self, other, strict=True))
        return _sorted(*both).first(self.compared.shape[1])

    def first(self, k: int) -> "Ranking":
        return Ranking(self.compared[:, :k], self.entries[:, :k])

    def over_ranks(self, gather: Callable[[Tensor], Tensor]) -> "Ranking":
        """Return the best of all ranks, by one collective. gather: [...] of every rank -> [R, ...]."""
        whole = torch.int32 if self.compared.dtype == torch.float32 else torch.int64
        bits = torch.stack([self.compared.contiguous().view(whole), self.entries.to(whole)])
        compared, entries = gather(bits).permute(1, 2, 0, 3).flatten(2).unbind()  # [t, R k] each
        found = _sorted(compared.contiguous().view(self.compared.dtype), entries.long())
        return found.first(self.compared.shape[1])

    def log_probs(self, rules: Rules, found: Statistics) -> Tensor:
        """Return [t, k]. found: over the whole vocabulary."""
        logits = -self.compared if _turned(rules) else self.compared
        z, _ = loss_math.transform(rules, logits, slope=False, copy=True)
        return (z - found.top[:, None]) - found.total.log()[:, None]


def ranking_of(rules: Rules, logits: Tensor, part: Part, k: int) -> Ranking:
    """Return the best of the logits [t, v] of a part, which stay what they are."""
    here, largest = min(k, part.entries), not _turned(rules)
    if here == 1:  # the first of equal ones
        values, entries = logits.max(1, keepdim=True) if largest else logits.min(1, keepdim=True)
    else:
        values, entries = logits.topk(here, 1, largest=largest)
    compared = values.to(wide_dtype(logits.dtype))
    found = Ranking(compared if largest else -compared, entries + part.start)
    found = _sorted(*found) if here > 1 else found
    if here == k:
        return found
    room = (logits.shape[0], k - here)
    nothing = Ranking(compared.new_full(room, -torch.inf), entries.new_full(room, rules.vocab))
    return Ranking(*(torch.cat(pair, 1) for pair in zip(found, nothing, strict=True)))


def _sorted(compared: Tensor, entries: Tensor) -> Ranking:
    """Return them with the best one first, of equal ones the first entry."""
    order = entries.argsort(1)
    compared, entries = compared.gather(1, order), entries.gather(1, order)
    compared, order = compared.sort(dim=1, descending=True, stable=True)
    return Ranking(compared, entries.gather(1, order))


def _turned(rules: Rules) -> bool:
    """Return whether the smallest logit has the largest z."""
    return rules.options.logit_scale < 0
