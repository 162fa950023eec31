"""Attention of a Hugging Face model through a function of one's own, by transformers' registry of attention functions.

What a call of the model is given beside what transformers knows, such as `documents`, comes to every layer's attention.
"""

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.layers.attention import causal_attention
from tiled_torch.layers.documents import packed

# No mask is registered under this name, so that models make none: it would be one of a rank's own tokens.
NAME = "tiled_torch"
# As sdpa, masks included, but for calls with documents, which have none.
PACKED = "tiled_torch_packed"
# Of the models whose layers hand on what they are given, and say windows and caps to their attention.
PACKED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "smollm3"})
REPLACED = ("sdpa", "eager")  # implementations whose values `causal_attention` computes
# (q, k, v, the options of `causal_attention` by name) -> attention's result, [B, heads, tokens, d].
Route = Callable[..., Tensor]


def reason_not_routed(model: Any) -> str | None:
    """Return why this model's attention cannot be exchanged; None where it can."""
    used = model.config._attn_implementation
    if used not in REPLACED:
        return f"its attn_implementation is {used!r} and not one of {', '.join(REPLACED)}"
    if getattr(model.config, "use_bidirectional_attention", None):
        return "its attention is bidirectional"
    return None


def route_attention(model: nn.Module, attentions: Iterable[nn.Module], route: Route) -> None:
    """Make each of these modules call route(q, k, v, **options) from now on, whose options make its own of `causal_attention`.

    The model's configuration is replaced by a copy: another model may have been built from the same object.
    """
    AttentionInterface.register(NAME, _routed)
    _implement(model, NAME)
    for attention in attentions:
        attention._route = route  # type: ignore[assignment]


def _implement(model: nn.Module, name: str) -> None:
    given: Any = model.config
    config = copy(given)
    config._attn_implementation = name
    for module in model.modules():
        if getattr(module, "config", None) is given:
            module.config = config


def for_documents(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call, whose attention is told of documents instead of being given a mask of all tokens.

    The same, where positions do not restart, where there is a mask or a cache, or where the attention is none that is known.
    From its first such call on a model of transformers' "sdpa" has an implementation of our own, which is that one for other
    calls; the calls' arguments are with their layers, and so with what is computed again.
    """
    implementation = model.config._attn_implementation
    if (
        implementation not in ("sdpa", PACKED)
        or model.config.model_type not in PACKED_TYPES
        or torch.compiler.is_compiling()
    ):
        return given
    if any(given.get(name) is not None for name in ("attention_mask", "past_key_values")) or given.get(
        "output_attentions"
    ):
        return given
    documents = packed(given.get("position_ids"))
    if documents is None or getattr(model.config, "use_bidirectional_attention", None):
        return given
    if implementation != PACKED:
        AttentionInterface.register(PACKED, _packed)
        AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        _implement(model, PACKED)
    # A mask of four dims is handed on as it is.
    none = torch.empty((0, 0, 0, 0), device=documents.device)
    return given | {"attention_mask": none, "documents": documents, "use_cache": False}


def _packed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """The form of transformers' attention functions."""
    documents = options.pop("documents", None)
    if documents is not None:
        names = {"scaling": "scale", "sliding_window": "window", "softcap": "softcap", "dropout": "dropout"}
        own = {ours: options[theirs] for theirs, ours in names.items() if options.get(theirs) is not None}
        y = causal_attention(query, key, value, documents=documents, **own)
        return y.transpose(1, 2).contiguous(), None
    if mask is not None and not mask.numel():
        rule, got = "one whose layers hand documents on to their attention", type(module).__name__
        raise UnsupportedError(error_text("forward with documents", "model", rule, got))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **options)


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
    documents: Tensor | None = None,
    exchanged: bool = False,
    **_: Any,  # what every layer is handed and no attention function reads
) -> tuple[Tensor, None]:
    """The form of transformers' attention functions: [B, heads, tokens, d] -> [B, tokens, heads, d].

    exchanged: of all tokens of some heads, which ranks have been given already.
    """
    assert attention_mask is None
    options: dict[str, Any] = {"scale": scaling, "window": sliding_window, "softcap": softcap, "dropout": dropout}
    route = module._exchanged_route if exchanged else module._route
    y = route(query, key, value, documents=documents, **options)
    return y.transpose(1, 2).contiguous(), None
