"""Attention of a Hugging Face model through a function of one's own, by transformers' registry of attention functions."""

from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from tiled_torch.layers.attention import causal_attention

# No mask is registered under this name, so that models make none: it would be one of a rank's own tokens.
NAME = "tiled_torch"
REPLACED = ("sdpa", "eager")  # implementations whose values `causal_attention` computes
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Route = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


def reason_not_routed(model: Any) -> str | None:
    """Return why this model's attention cannot be exchanged; None where it can."""
    used = model.config._attn_implementation
    if used not in REPLACED:
        return f"its attn_implementation is {used!r} and not one of {', '.join(REPLACED)}"
    if getattr(model.config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    return None


def route_attention(model: nn.Module, attentions: Iterable[nn.Module], route: Route) -> None:
    """From now on each of these modules calls route(q, k, v, attend), where attend is its own causal attention.

    The model's configuration is replaced by a copy: another model may have been built from the same object.
    """
    AttentionInterface.register(NAME, _routed)
    given: Any = model.config
    config = copy(given)
    config._attn_implementation = NAME
    for module in model.modules():
        if getattr(module, "config", None) is given:
            module.config = config
    for attention in attentions:
        attention._route = route  # type: ignore[assignment]


def _routed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,  # what every layer is handed and no attention function reads
) -> tuple[Tensor, None]:
    """The form of transformers' attention functions: [B, heads, tokens, d] -> [B, tokens, heads, d]."""
    assert attention_mask is None
    attend = partial(causal_attention, scale=scaling, window=sliding_window, softcap=softcap, dropout=dropout)
    return module._route(query, key, value, attend).transpose(1, 2).contiguous(), None
