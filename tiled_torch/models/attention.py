"""Attention of a Hugging Face model through a function of one's own, by transformers' registry of attention functions.

What a call of the model is given beside what transformers knows, such as `documents`, comes to every layer's attention.
"""

from collections.abc import Callable, Iterable
from copy import copy
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.core.operands import has_values
from tiled_torch.layers.attention import causal_attention, visible_keys
from tiled_torch.layers.documents import packed

# No mask is registered under this name, so that models make none: it would be one of a rank's own tokens.
NAME = "tiled_torch"
# As sdpa, masks included, but for windows and for calls with documents, which have none.
SDPA = "tiled_torch_sdpa"
# Of the models whose layers hand on what they are given, and say windows and caps to their attention.
PACKED_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "smollm3"})
# Of the models whose layers hand on their mask as it is made, and ask nowhere for an implementation by its name.
WINDOWED_TYPES = frozenset({
    "afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "gemma3_text", "gemma3n_text", "laguna",
    "mellum", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder", "olmo3", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
})  # fmt: skip
REPLACED = ("sdpa", SDPA, "eager")  # implementations whose values `causal_attention` computes
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
    _put(model, given, name)


def _put(model: nn.Module, given: Any, name: str) -> None:
    """Give every module that holds this configuration a copy with another implementation."""
    config = copy(given)
    config._attn_implementation = name
    for module in model.modules():
        if vars(module).get("config") is given:
            module.config = config


def attend_by_windows(model: nn.Module) -> None:
    """Let layers that attend to a window of tokens through transformers' sdpa do so without a mask of all pairs.

    Of the models whose types are known, inside any other too. Attention is `causal_attention` by blocks of queries; a call with
    padding, a cache that has tokens or a mask of one's own is transformers' own, as is compiled code.
    """
    for config in _configs(model):
        windowed = config.model_type in WINDOWED_TYPES and isinstance(getattr(config, "sliding_window", None), int)
        if windowed and config._attn_implementation == "sdpa":
            _put(model, config, SDPA)


def attend_as_before(model: nn.Module) -> None:
    """Give transformers' own sdpa back to a model."""
    for config in _configs(model):
        if config._attn_implementation == SDPA:
            _put(model, config, "sdpa")


def _configs(model: nn.Module) -> list[Any]:
    found = {
        id(held): held for module in model.modules() if isinstance(held := vars(module).get("config"), PreTrainedConfig)
    }
    return list(found.values())


def _mask(**given: Any) -> Tensor | None:
    """Return the mask that sdpa gets, in the form of transformers' functions that make them; of a window only its size.

    That is a tensor without elements, [0, 0, 0, window].
    """
    window = None if torch.compiler.is_compiling() else _window_alone(given)
    if window is None:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given)  # type: ignore[no-any-return]
    return torch.empty((0, 0, 0, window), dtype=torch.bool, device=given.get("device"))


def _window_alone(given: dict[str, Any]) -> int | None:
    """Return the window, if a mask is to say that one and nothing else: every query sees keys up to its own position."""
    window, asked, padding = (given.get(name) for name in ("local_size", "mask_function", "attention_mask"))
    tokens: Any = given.get("q_length")  # not in transformers' first version 5, whose masks stay
    offsets = given.get("q_offset", 0), given.get("kv_offset", 0)
    if type(window) is not int or given.get("kv_length") != tokens or tokens < window:
        return None  # transformers makes a mask also where the window has as many tokens as the sequence
    if any(type(offset) is not int or offset for offset in offsets):
        return None
    if not _same(asked, sliding_window_causal_mask_function(window)):
        return None
    whole = padding is None or (has_values(padding) and bool(padding.all()))
    return window if whole else None


def _same(one: Any, other: Any) -> bool:
    """Return whether two functions are of one piece of code, over the same functions and numbers."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        held = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
        return one.__code__ is other.__code__ and _same(*map(tuple, held))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) is int and one == other


def for_documents(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call, whose attention is told of documents instead of being given a mask of all tokens.

    The same, where positions do not restart, where there is a mask or a cache, or where the attention is none that is known.
    From its first such call on a model of transformers' "sdpa" has an implementation of our own, which is that one for other
    calls; the calls' arguments are with their layers, and so with what is computed again.
    """
    implementation = model.config._attn_implementation
    if (
        implementation not in ("sdpa", SDPA)
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
    if implementation != SDPA:
        _implement(model, SDPA)
    # A mask of four dims is handed on as it is.
    none = torch.empty((0, 0, 0, 0), device=documents.device)
    return given | {"attention_mask": none, "documents": documents, "use_cache": False}


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> Any:
    """The form of transformers' attention functions."""
    documents = options.pop("documents", None)
    if documents is not None:
        names = {"scaling": "scale", "sliding_window": "window", "softcap": "softcap", "dropout": "dropout"}
        own = {ours: options[theirs] for theirs, ours in names.items() if options.get(theirs) is not None}
        y = causal_attention(query, key, value, documents=documents, **own)
        return y.transpose(1, 2).contiguous(), None
    window = 0 if attention_mask is None or attention_mask.numel() else attention_mask.shape[-1]
    if window:
        # Code that is being compiled has one operation instead of one for every block.
        more = any(options.get(name) is not None for name in _BESIDE) or torch.compiler.is_compiling()
        if not more and query.shape[2] == key.shape[2]:
            own = {"scale": options.get("scaling"), "dropout": options.get("dropout", 0.0), "window": window}
            return causal_attention(query, key, value, **own).transpose(1, 2).contiguous(), None
        attention_mask = visible_keys(query.shape[2], key.shape[2], window, query.device)[None, None]
    elif attention_mask is not None and not attention_mask.numel():
        rule, got = "one whose layers hand documents on to their attention", type(module).__name__
        raise UnsupportedError(error_text("forward with documents", "model", rule, got))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)


_BESIDE = ("softcap", "position_bias", "cache")  # what sdpa adds to scores, refuses, or takes keys from
AttentionInterface.register(SDPA, _attend)
AttentionMaskInterface.register(SDPA, _mask)


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
