"""The loss of a Hugging Face causal language model, tiled: `model(..., labels=...).loss` without the logits.

The formula is that of transformers' ForCausalLMLoss: labels shifted by one unless `shift_labels` is given, the sum divided
by `num_items_in_batch` where it is given, the mean over valid labels otherwise.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from shared_specs.config import LossOptions, Tiling
from tiled_torch.functional.any_loss import tiled_loss
from tiled_torch.functional.loss import tiled_linear_cross_entropy
from tiled_torch.models.family import reason_linear_is_not_plain
from tiled_torch.models.pickling import Remade

# Classes whose forward is: the decoder `model`, then lm_head, then what is named here, then loss_function.
PLAIN = frozenset({
    "CwmForCausalLM", "Exaone4ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM", "GlmForCausalLM", "HeliumForCausalLM",
    "LlamaForCausalLM", "Ministral3ForCausalLM", "MinistralForCausalLM", "MistralForCausalLM", "Olmo2ForCausalLM",
    "Olmo3ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
})  # fmt: skip
SOFTCAPPED = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
SCALED: dict[str, Callable[[Any], float]] = {
    "CohereForCausalLM": lambda model: model.logit_scale,
    "GraniteForCausalLM": lambda model: 1 / model.config.logits_scaling,
}


def is_causal_lm(module: nn.Module) -> bool:
    """Whether the module is of a class whose loss is known, also after tiling or sharding changed its class."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & (PLAIN | SOFTCAPPED | SCALED.keys())) and hasattr(module, "lm_head")


def reason_logits_are_needed(model: Any) -> str | None:
    """Why this model's loss has to see the logits; None where it is the one that is tiled."""
    if getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        return f"its loss_function is {getattr(model.loss_function, '__name__', type(model.loss_function).__name__)}"
    return None


def loss_path(model: Any) -> str:
    """How the loss runs now: "tiled_linear_cross_entropy", or another way and the reason."""
    if "_linear_loss" in vars(model):
        return "vocab_parallel_linear_cross_entropy"
    reason = reason_logits_are_needed(model)
    if reason is not None:
        return f"untiled: {reason}"
    reason = reason_linear_is_not_plain("lm_head", model.lm_head)
    return "tiled_linear_cross_entropy" if reason is None else f"tiled_loss: {reason}"


def loss_options(model: Any, num_valid: Any, ignore_index: int) -> LossOptions:
    """The options of the model's own logits and loss."""
    names = {base.__name__ for base in type(model).__mro__}
    scale = next((read(model) for name, read in SCALED.items() if name in names), 1.0)
    cap = model.config.final_logit_softcapping if names & SOFTCAPPED else None
    return LossOptions(ignore_index=ignore_index, logit_scale=scale, logit_softcap=cap, num_valid=num_valid)


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """What each position predicts: the next label; nothing for the last."""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


def linear_loss(
    model: Any, hidden: Tensor, targets: Tensor, options: LossOptions, tiling: Tiling, backend: str
) -> Tensor:
    """The loss of hidden states, through whichever path the head allows."""
    head = model.lm_head
    if reason_linear_is_not_plain("lm_head", head) is None:
        found = tiled_linear_cross_entropy(
            hidden, head.weight, targets, bias=head.bias, loss=options, tiling=tiling, backend=backend
        )
        assert isinstance(found, Tensor)
        return found

    def sums(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden).float() * options.logit_scale
        if options.logit_softcap is not None:
            logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
        return F.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=options.ignore_index, reduction="sum"
        )

    count = options.num_valid
    if count is None:
        count = (targets != options.ignore_index).sum().clamp(min=1)
    return tiled_loss(sums, hidden, targets, tiling=tiling) / count


class TiledCausalLM(Remade):
    """Forward of a causal language model whose loss is tiled; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _linear_loss = staticmethod(linear_loss)  # `parallelize` puts the one of a split head into the instance


def _forward_of(untiled: type[nn.Module]) -> Callable[..., Any]:
    """untiled's forward with the loss tiled: the same signature, which Hugging Face's Trainer reads."""
    signature = inspect.signature(untiled.forward)

    @wraps(untiled.forward)
    @can_return_tuple
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        extra = given.pop("kwargs", {})
        labels, targets = given.get("labels"), extra.get("shift_labels")
        if (labels is None and targets is None) or reason_logits_are_needed(self) is not None:
            return untiled.forward(self, *args, **kwargs)
        return _with_loss(self, given, extra)

    return forward


def _with_loss(model: Any, given: dict[str, Any], extra: dict[str, Any]) -> CausalLMOutputWithPast:
    """`given`: the named arguments of forward; `extra`: its kwargs, the loss's among them."""
    given = {name: value for name, value in given.items() if name != "self"}
    labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
    extra = dict(extra)
    count, targets = extra.pop("num_items_in_batch", None), extra.pop("shift_labels", None)
    ignore_index = extra.pop("ignore_index", -100)
    outputs = model.model(**given, **extra)
    hidden = outputs.last_hidden_state
    targets = shifted(labels, ignore_index) if targets is None else targets.reshape(hidden.shape[:-1])
    options = loss_options(model, count, ignore_index)
    loss = model._linear_loss(model, hidden, targets.to(hidden.device), options, model._tiling, model._backend)
    logits = None
    if not isinstance(keep, int) or keep > 0:
        rows = hidden[:, -keep:] if isinstance(keep, int) else hidden[:, keep]
        logits = model.lm_head(rows)
        if options.logit_scale != 1.0:
            logits = logits * options.logit_scale
        if options.logit_softcap is not None:
            logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
    return CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        past_key_values=outputs.past_key_values,
        hidden_states=outputs.hidden_states,
        attentions=outputs.attentions,
    )


@cache
def tiled_causal_lm(untiled: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `untiled` whose loss is tiled."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "forward": _forward_of(untiled)}
    attributes["_made_by"] = staticmethod(tiled_causal_lm)
    # The same name: save_pretrained writes it into the configuration.
    return type(untiled.__name__, (TiledCausalLM, untiled), attributes)
