"""Llama 4: every expert gets all tokens there, x times its weight, which is 0 but for the experts that were chosen.

What 0 goes in comes out as 0, with gradients of 0: the activation is 0 there, and multiplies what has no bias. So the rows of
the chosen experts alone are computed: 1 in E of the products where one expert is chosen, and no [E T, H].
"""

from typing import Any

import torch
from torch import Tensor, nn

from tiled_torch.models.experts.marker import OfExperts
from tiled_torch.models.family import activation_of, reason_called

LLAMA4_BLOCKS = frozenset({"Llama4TextMoe"})
DENSE = frozenset({"Llama4TextExperts"})


def gate_of(experts: Any) -> Any:
    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return up * experts.act_fn(gate)

    return gate


def reason_not_zero(experts: Any) -> str | None:
    """Return why 0 might not stay 0."""
    if activation_of(experts.act_fn) is None:
        return f"act_fn is {type(experts.act_fn).__name__}"
    return reason_called("act_fn", experts.act_fn)


def of_all_tokens(experts: Any, forward: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """y [T, H] by the forward that gives every expert all tokens."""
    scores = weights.new_zeros(len(x), experts.num_experts).scatter(1, index, weights)
    routed = forward((x.repeat(experts.num_experts, 1)) * scores.T.reshape(-1, 1))
    return routed.view(experts.num_experts, *x.shape).sum(0)


class TiledMoe(OfExperts):
    """Forward of the block: its experts take x, the experts of every token and their weights."""

    _untiled: type[nn.Module]

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        weights, index = torch.topk(scores, self.top_k, dim=1)
        return self.shared_expert(x) + self.experts(x, index, weights), logits
