"""The loss of a Hugging Face causal language model, tiled: `model(..., labels=...).loss` without the logits.

The formula is that of transformers' ForCausalLMLoss: labels shifted by one unless `shift_labels` is given, the sum divided by
`num_items_in_batch` where it is given, the mean over valid labels otherwise. Where position_ids restart (one is not larger than
the one before it), the last token of a document predicts nothing, as if its successor's label were ignored, which transformers
leaves to who packs. `outputs.logits` are computed when they are read.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import cache, wraps
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput, can_return_tuple

from shared_specs.config import LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text
from shared_specs.layers.documents import NOTHING_LEFT
from tiled_torch.core.autocast import autocast_dtype
from tiled_torch.core.operands import has_values
from tiled_torch.core.partitioned import called_once, is_partitioned
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.layers.documents import documents_of_restarts, shifted_labels
from tiled_torch.loss.api import tiled_linear_cross_entropy
from tiled_torch.loss.call import counted_rows
from tiled_torch.models.attention import for_documents
from tiled_torch.models.experts import aux_loss
from tiled_torch.models.family import reason_linear_is_not_plain
from tiled_torch.models.heads.swap import is_swapped
from tiled_torch.models.later import LaterOutputs, later_outputs
from tiled_torch.models.logits import adjusted, lazy_logits, refused_logits
from tiled_torch.models.pickling import Remade
from tiled_torch.models.reports import inside_forward, report, tell
from tiled_torch.tile.loss import tiled_loss_of

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

# Beside images or sounds: the head and the loss of their text, past a `model` that puts all of it together.
MULTIMODAL = frozenset({
    "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration",
})  # fmt: skip
KNOWN = PLAIN | SOFTCAPPED | SCALED.keys() | MULTIMODAL | aux_loss.WITH_EXPERTS
SPLIT = "vocab_parallel_linear_cross_entropy"
WITHOUT_LABELS = "it was called without labels, which makes the logits of all tokens"


def is_causal_lm(module: nn.Module) -> bool:
    """Return whether the module is of a class whose loss is known, also after tiling or sharding changed its class."""
    names = {base.__name__ for base in type(module).__mro__}
    return bool(names & KNOWN) and hasattr(module, "lm_head")


def reason_logits_are_needed(model: Any) -> str | None:
    """Return why this model's loss has to see the logits; None where it is the one that is tiled."""
    function = model.loss_function
    name = getattr(function, "__name__", type(function).__name__)
    home = getattr(function, "__module__", "").partition(".")[0]
    # By its name: `parallelize` has a twin of it for logits that are split.
    if name != "ForCausalLMLoss" or home not in ("transformers", __name__.partition(".")[0]):
        return f"its loss_function is {name}"
    return None


def loss_path(model: Any) -> str:
    """Return how the loss of a call with labels runs: "tiled_linear_cross_entropy", or another way and the reason."""
    if "_linear_loss" in vars(model):
        return SPLIT
    reason = reason_logits_are_needed(model)
    if reason is not None:
        return f"untiled: {reason}"
    reason = reason_linear_is_not_plain("lm_head", model.lm_head, gathered=True, unit=True)
    return "tiled_linear_cross_entropy" if reason is None else f"tiled_loss: {reason}"


def loss_options(model: Any, num_valid: Any, ignore_index: int) -> LossOptions:
    """Return the options of the model's own logits and loss."""
    names = {base.__name__ for base in type(model).__mro__}
    scale = next((read(model) for name, read in (SCALED | aux_loss.SCALED_EXPERTS).items() if name in names), 1.0)
    cap = model.config.final_logit_softcapping if names & SOFTCAPPED else None
    return LossOptions(ignore_index=ignore_index, logit_scale=scale, logit_softcap=cap, num_valid=num_valid)


def documents_of_call(given: Mapping[str, Any]) -> Tensor | None:
    """Return which document every token is in for the loss: those given, or by positions that restart, where transformers
    looks at them; None elsewhere.
    """
    if given.get("documents") is not None:
        return given["documents"]
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return None
    told = mask is None and given.get("past_key_values") is None
    return documents_of_restarts(positions) if told else None


def linear_loss(
    model: Any, hidden: Tensor, targets: Tensor, options: LossOptions, tiling: Tiling, backend: str
) -> Tensor:
    """Return the loss of hidden states, through whichever path the head allows."""
    return loss_through(model.lm_head, hidden, targets, options, tiling, backend)


def loss_through(
    head: Any,
    hidden: Tensor,
    targets: Tensor,
    options: LossOptions,
    tiling: Tiling,
    backend: str,
    finish: Callable[[Tensor], Tensor] | None = None,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
) -> Tensor:
    """Return the loss of hidden states through a head that is called head or lm_head.

    A head that is more than a weight and a bias (an adapter, hooks) is called for every shard of the rows whose label counts,
    where a sixteenth or more do not; how many is read from the device once a call.

    finish: what becomes of the head's result, where that is more than the options say; it is then called for every shard.
    bias: [V], added to a plain head's result besides its own. token_weight: of a plain head alone.
    """
    if finish is None and reason_linear_is_not_plain("lm_head", head, gathered=True, unit=True) is None:

        def fused(hidden: Tensor) -> Any:
            added = head.bias if bias is None else bias if head.bias is None else head.bias + bias
            given: dict[str, Any] = {
                "loss": options,
                "tiling": tiling,
                "backend": backend,
                "token_weight": token_weight,
            }
            return tiled_linear_cross_entropy(hidden, head.weight, targets, bias=added, **given)

        is_plain = reason_linear_is_not_plain("lm_head", head) is None
        return fused(hidden) if is_plain else called_once(head, fused, hidden)

    rules: dict[str, Any] = {"ignore_index": options.ignore_index, "weight": options.class_weight}
    rules["label_smoothing"] = options.label_smoothing

    def sums(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden)
        logits = adjusted(_wide(logits), options) if finish is None else _wide(finish(logits))
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", **rules)

    def chosen() -> Tensor | None:
        found = counted_rows(targets.reshape(-1), options.ignore_index)
        # Of no label still one row, so that every parameter gets its gradient, zeros.
        return found if found is None or found.numel() else found.new_zeros(1)

    total = tiled_loss_of(sums, hidden, targets, tiling=tiling, chosen=chosen)
    return total if options.reduction == "sum" else total / _denominator(targets, options)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(wide_dtype(logits.dtype))


def _denominator(targets: Tensor, options: LossOptions) -> Any:
    if options.num_valid is not None:
        return options.num_valid
    valid = targets != options.ignore_index
    if options.class_weight is None:
        return valid.sum().clamp(min=1)
    return options.class_weight[targets[valid]].sum()


Outputs = tuple[type[Any], type[Any], tuple[str, ...]]


class TiledCausalLM(Remade):
    """Forward of a causal language model whose loss is tiled; comes before the original class in the order of methods."""

    _untiled: type[nn.Module]
    _tiling: Tiling
    _backend: str
    _linear_loss = staticmethod(linear_loss)  # `parallelize` puts the one of a split head into the instance
    _ran: str | None = None
    _told: tuple[str, ...] = ()
    _seams_are_known: bool = False

    @property
    def _model_name(self) -> str:
        return type(self).__name__


def _forward_of(untiled: type[nn.Module]) -> Callable[..., Any]:
    """untiled's forward with the loss tiled: the same signature, which Hugging Face's Trainer reads."""
    signature = inspect.signature(untiled.forward)
    made = _outputs_of(signature)
    # Not signature.bind, which torch.compile traces only once.
    names = tuple(name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]

    @wraps(untiled.forward)
    @can_return_tuple
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or any(name in given for name in kwargs):
            return untiled.forward(self, *args, **kwargs)  # raises what Python raises
        if is_swapped(self.lm_head):  # inside a model whose head it is too, and whose loss
            self._ran = None
            return untiled.forward(self, *args, **kwargs)
        given |= {name: value for name, value in kwargs.items() if name in names}
        extra = {name: value for name, value in kwargs.items() if name not in names}
        called = given | extra
        told = for_documents(self, called)
        if "documents" in told:
            args, kwargs = (), told
            given = {name: value for name, value in told.items() if name in names}
            extra = {name: value for name, value in told.items() if name not in names}
        with nullcontext() if torch.compiler.is_compiling() else inside_forward():
            path = _path_of(self, given.get("labels"), extra.get("shift_labels"))
            if path.startswith("untiled"):
                report(self, path)
                return untiled.forward(self, *args, **kwargs)
            # Attention's documents are others.
            found = _with_loss(self, given, extra, documents_of_call(called), made)
            report(self, path)  # past what called it inside its own forward
            return found

    return forward


def _path_of(model: Any, labels: Tensor | None, shifted_labels: Tensor | None) -> str:
    """Return the path of this call, and a warning where it makes the logits of a step of training, or more than one shard's."""
    if labels is None and shifted_labels is None:
        if model.training and torch.is_grad_enabled():
            advice = "Pass labels; Trainer takes them out for label_smoothing_factor and compute_loss_func."
            tell(model, WITHOUT_LABELS, advice)
        return f"untiled: {WITHOUT_LABELS}"
    path = loss_path(model)
    way, _, reason = path.partition(": ")
    if way == "tiled_loss" and any(map(is_partitioned, model.lm_head.parameters())):
        advice = "Call the model without labels for its logits, or use ZeRO stage 1 or 2."
        rule = "a plain linear layer under ZeRO-3, which would gather it for every shard"
        raise UnsupportedError(error_text("tile_model", "lm_head", rule, reason, advice=advice))
    if way == "untiled":
        tell(model, reason, "The logits of all tokens are made for it.")
    elif reason:
        tell(model, reason, f"{way} calls it for every shard instead.")
    return path


def _outputs_of(signature: inspect.Signature) -> Outputs:
    """Return the result type of the untiled forward: the class, compiled code's, and the fields beside loss and logits."""
    annotated = signature.return_annotation
    kinds = [
        kind for kind in (annotated, *get_args(annotated)) if inspect.isclass(kind) and issubclass(kind, ModelOutput)
    ]
    kind: Any = kinds[0] if kinds else CausalLMOutputWithPast
    return (
        kind,
        later_outputs(kind),
        tuple(field.name for field in fields(kind) if field.name not in ("loss", "logits")),
    )


def _with_loss(
    model: Any, given: dict[str, Any], extra: dict[str, Any], documents: Tensor | None, made: Outputs
) -> Any:
    """`given`: the named arguments of forward; `extra`: its kwargs, the loss's among them; `made`: what it returns."""
    labels, keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
    count, targets = extra.pop("num_items_in_batch", None), extra.pop("shift_labels", None)
    ignore_index = extra.pop("ignore_index", -100)
    balances = aux_loss.asks_for_router_logits(model, given)
    outputs = model.model(**given, **extra)
    hidden = outputs.last_hidden_state
    if targets is None:
        targets = shifted_labels(labels, documents, ignore_index)
        if documents is not None:
            _tell_where_nothing_is_left(model, labels, targets, ignore_index)
    else:
        targets = targets.reshape(hidden.shape[:-1])
    options = loss_options(model, count, ignore_index)
    loss = model._linear_loss(model, hidden, targets.to(hidden.device), options, model._tiling, model._backend)
    kind, later, rest = made
    found = {name: getattr(outputs, name, None) for name in rest}
    if balances:
        loss, found["aux_loss"] = aux_loss.balanced(model, loss, outputs, given.get("attention_mask"))
    rows = _kept(hidden, keep)
    if "_linear_loss" in vars(model):
        return kind(loss=loss, logits=refused_logits(rows, model.config.get_text_config().vocab_size), **found)
    cast = autocast_dtype(rows)
    if torch.compiler.is_compiling():
        compiled = later(loss=loss, **found)
        compiled._wait(LaterOutputs(model, rows, options, cast))
        return compiled
    return kind(loss=loss, logits=lazy_logits(model, rows, options, cast), **found)


def _tell_where_nothing_is_left(model: Any, labels: Tensor, targets: Tensor, ignore_index: int) -> None:
    """Warn, of the first call with positions, where every label looks across a seam, so that the loss is 0."""
    if torch.compiler.is_compiling() or model._seams_are_known or not has_values(targets):
        return
    model._seams_are_known = True  # no wait for the device in any other step
    if bool((targets == ignore_index).all()) and bool((labels[:, 1:] != ignore_index).any()):
        warnings.warn(f"tile_model: the loss of {model._model_name} is 0: {NOTHING_LEFT}", UserWarning, stacklevel=3)


def _kept(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """Return the rows whose logits are asked for, in each of the forms that transformers knows."""
    if isinstance(keep, int):
        return hidden[:, -keep:] if keep else hidden
    if keep.ndim == 2:
        return hidden[keep] if keep.dtype == torch.bool else torch.take_along_dim(hidden, keep[..., None], dim=1)
    return hidden[:, keep]


@cache
def tiled_causal_lm(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `untiled` whose loss is tiled."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "forward": _forward_of(untiled)}
    attributes["_made_by"] = staticmethod(tiled_causal_lm)
    # The same name: save_pretrained writes it into the configuration.
    return type(untiled.__name__, (TiledCausalLM, untiled), attributes)
