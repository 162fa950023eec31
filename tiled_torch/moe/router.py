"""The router of one call: which experts a token has and what each of them counts, a shard of tokens at a time.

Its logits [T, E] exist for one shard, unless the caller asks for them; backward computes them again, for the experts chosen in
forward. Letters: T tokens, H hidden, E experts, k of them for each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared_specs.shards import ShardPlan
from tiled_torch.core.autocast import without_autocast
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.tensors import wide_dtype


@dataclass(frozen=True)
class Router:
    """The static part of it. x: [T, H]; w: [E, H]."""

    dtype: torch.dtype
    shard_tokens: int
    top_k: int
    scoring: str
    normalize: bool

    def forward(self, x: Tensor, w: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what every expert of a token counts and its number, both [T, k]. kept: [T, E], for the logits."""
        with torch.no_grad(), without_autocast(x):
            tokens, w = x.shape[0], w.to(self.dtype)
            weights = torch.empty((tokens, self.top_k), dtype=self.wide, device=x.device)
            index = torch.empty((tokens, self.top_k), dtype=torch.int32, device=x.device)
            for start, stop in ShardPlan(tokens, self.shard_tokens).spans:
                logits = self._logits(x[start:stop].to(self.dtype), w)
                if kept is not None:
                    kept[start:stop] = logits
                chosen = logits.topk(self.top_k, dim=-1).indices
                share = self._scores(logits).gather(-1, chosen)
                weights[start:stop] = share.div_(share.sum(-1, keepdim=True)) if self.normalize else share
                index[start:stop] = chosen
        return weights, index

    def backward(
        self,
        x: Tensor,
        w: Tensor,
        index: Tensor,
        dweights: Tensor | None,
        dlogits: Tensor | None,
        dx: Tensor | None,
        total: GradientSum | None,
    ) -> None:
        """Add to dx [T, H], in place, and to the sum of the router's gradient."""
        with torch.no_grad(), without_autocast(x):
            cast = w.to(self.dtype)
            for start, stop in ShardPlan(x.shape[0], self.shard_tokens).spans:
                rows = slice(start, stop)
                taken = x[rows].to(self.dtype)
                if dweights is None:
                    assert dlogits is not None
                    d = dlogits[rows].to(self.dtype)
                else:
                    d = self._of_logits(self._logits(taken, cast), index[rows].long(), dweights[rows].to(self.wide))
                    d = (d if dlogits is None else d.add_(dlogits[rows])).to(self.dtype)
                if dx is not None:
                    dx[rows] += d @ cast
                if total is not None:
                    total.add_product(d, taken)

    def _of_logits(self, logits: Tensor, index: Tensor, dweights: Tensor) -> Tensor:
        """Return the gradient of the logits of one shard from that of what its experts count."""
        scores = self._scores(logits)
        if self.normalize:
            share = scores.gather(-1, index)
            total = share.sum(-1, keepdim=True)
            dweights = (dweights - (dweights * (share / total)).sum(-1, keepdim=True)) / total
        d = torch.zeros_like(scores).scatter_(-1, index, dweights)
        if self.scoring == "sigmoid":
            return d.mul_(scores).mul_(1 - scores)
        return (d - (d * scores).sum(-1, keepdim=True)).mul_(scores)

    def _scores(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) if self.scoring == "sigmoid" else torch.softmax(logits, dim=-1)

    def _logits(self, x: Tensor, w: Tensor) -> Tensor:
        """x @ w.T in float32 (float64 for float64)."""
        if x.dtype == self.wide:
            return x @ w.T
        if x.device.type == "cuda":
            return torch.mm(x, w.T, out_dtype=self.wide)
        return x.to(self.wide) @ w.T.to(self.wide)

    @property
    def wide(self) -> torch.dtype:
        return wide_dtype(self.dtype)
