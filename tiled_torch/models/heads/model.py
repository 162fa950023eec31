"""Any language model with its loss tiled: its own forward runs, its head's logits are made where something reads them.

Nothing is known of the class. What comes between the head and `torch.nn.functional.cross_entropy` is followed as it happens;
where it is more than that, the logits are made there and the call is the untiled model's, and says so.
"""

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tiled_torch.models.causal_lm import KNOWN, WITHOUT_LABELS, TiledCausalLM, is_causal_lm
from tiled_torch.models.family import forward_in_place_of
from tiled_torch.models.heads.planned import planned_path
from tiled_torch.models.heads.run import HeadRun
from tiled_torch.models.heads.swap import as_before, is_swapped, swapped
from tiled_torch.models.mlps.layout import sizes_of
from tiled_torch.models.reports import inside_forward, report, tell, warn_untiled

COMPILED = "torch.compile traces its forward, in which the logits of all tokens are made"

# What forwards call the tokens to predict: transformers', and many others' that follow nanoGPT.
LABELS = ("labels", "targets")

# The same of any loss: of answers too, which are places in the tokens.
_TARGETS = (*LABELS, "start_positions")

NO_HEAD = "its output embeddings are no linear layer"


class TiledAnyLM(TiledCausalLM):
    """Forward of a language model of any class whose loss is tiled."""

    _before: str | None = None  # what a probe found that a first call would do


def head_of(model: Any) -> tuple[str, nn.Module] | None:
    """Return the name of a model's output embeddings inside it, and the module; None where there are none.

    Of a model that is not transformers' they are its `lm_head`, where its forward takes labels: its loss is then its own.
    """
    if not isinstance(model, PreTrainedModel):
        head = model._modules.get("lm_head") if isinstance(model, nn.Module) else None
        if head is None or sizes_of(head) is None or _labels_of(type(model)) is None:
            return None
        return "lm_head", head
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    if not isinstance(head, nn.Module) or sizes_of(head) is None:
        return None
    return next(((name, module) for name, module in model.named_modules() if module is head), None)


def other_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return what a model of transformers has beside its base model for a loss that is no language model's, by name: the heads
    of classification, rewards, answers. They have few outputs for a token.
    """
    if not isinstance(model, PreTrainedModel) or head_of(model) is not None:
        return {}
    base = model._modules.get(model.base_model_prefix)
    if base is None or not any(name in inspect.signature(model.forward).parameters for name in _TARGETS):
        return {}
    others = ((name, child) for name, child in model.named_children() if child is not base)
    return {name: child for name, child in others if next(child.parameters(), None) is not None}


def reason_not_any(model: nn.Module) -> str | None:
    """Return why the loss of a model with output embeddings cannot be tiled by a swapped head; None where it can."""
    if "forward" in vars(model):
        own = vars(model)["forward"]
        return f"its forward is {getattr(own, '__name__', type(own).__name__)}"
    return None if _labels_of(type(model)) else f"the forward of {type(model).__name__} takes no labels"


def _labels_of(kind: type[Any]) -> tuple[int, str] | None:
    """Return which argument of forward the labels are, and its name; None where it has none. What hands anything on is looked
    through."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            parameters = inspect.signature(vars(base)["forward"]).parameters
            name = next((name for name in LABELS if name in parameters), None)
            if name is not None:
                return [*parameters].index(name), name
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                return None
    return None


def is_exact(model: nn.Module) -> bool:
    """Return whether a model's loss runs by a forward of our own, or would: that of a class that is known."""
    if isinstance(model, TiledCausalLM):
        return not isinstance(model, TiledAnyLM)
    return is_causal_lm(model) and forward_in_place_of(model, KNOWN) is None


def decoder_of(model: Any) -> nn.Module | None:
    """Return the layers of text in a language model; None where it does not say which they are."""
    try:
        found = model.get_decoder()
    except (AttributeError, NotImplementedError):
        found = None
    return found if isinstance(found, nn.Module) and found is not model else None


def path_before(model: Any) -> str:
    """Return the path of a model that was not called yet: what a copy of it without memory does with labels."""
    known = vars(model).get("_before")
    if known is None:
        untiled = model._untiled if isinstance(model, TiledAnyLM) else type(model)
        known = planned_path(model, untiled, head_of, (_labels_of(untiled) or (0, "labels"))[1])
        if isinstance(model, TiledAnyLM):
            model._before = known
    return known


def _forward_of(untiled: type[nn.Module]) -> Callable[..., Any]:
    """untiled's forward with its head swapped: the same signature, which Hugging Face's Trainer reads."""
    place, named = _labels_of(untiled) or (0, "labels")
    place -= 1  # without self

    @wraps(untiled.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _tell_of_compiling(untiled.__name__)
            return untiled.forward(self, *args, **kwargs)
        labels = args[place] if len(args) > place else kwargs.get(named)
        name, head = head_of(self) or ("", None)
        # Its forward inside itself: generate in a hook, say.
        if is_swapped(head) and vars(head)["_tiled_run"].model is self:
            with as_before(head):
                return forward(self, *args, **kwargs)
        if is_swapped(head):  # inside another forward with the same head
            self._ran = None
            return untiled.forward(self, *args, **kwargs)
        with inside_forward():
            if not isinstance(labels, Tensor):
                report(self, f"untiled: {WITHOUT_LABELS}")
                _tell_of_logits(self)
                return untiled.forward(self, *args, **kwargs)
            if head is None:
                report(self, f"untiled: {NO_HEAD}")
                tell(self, NO_HEAD, "The logits of all tokens are made for it.")
                return untiled.forward(self, *args, **kwargs)
            run = HeadRun(name, head, self._tiling, self._backend, model=self)
            with swapped(head, run):
                found = untiled.forward(self, *args, **kwargs)
            report(self, run.path)
            _tell_of_path(self, run)
            return found

    return forward


@torch.compiler.assume_constant_result
def _tell_of_compiling(name: str) -> bool:
    """Warn once for a graph: this runs while it is traced."""
    warn_untiled(name, COMPILED, "Compile its layers, or the model inside it, instead.")
    return True


def _tell_of_logits(model: Any) -> None:
    if model.training and torch.is_grad_enabled():
        advice = "Pass labels; Trainer takes them out for label_smoothing_factor and compute_loss_func."
        tell(model, WITHOUT_LABELS, advice)


def _tell_of_path(model: Any, run: HeadRun) -> None:
    way, _, reason = run.path.partition(": ")
    if way == "untiled":
        tell(model, reason, "The logits of all tokens are made for it.")
    elif reason:
        tell(model, reason, f"{way} calls it for every shard instead.")


@cache
def any_lm(untiled: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of `untiled` whose loss is tiled wherever it is the cross entropy of its head's logits."""
    attributes = {"_untiled": untiled, "__module__": untiled.__module__, "forward": _forward_of(untiled)}
    attributes["_made_by"] = staticmethod(any_lm)
    # The same name: save_pretrained writes it into the configuration.
    return type(untiled.__name__, (TiledAnyLM, untiled), attributes)
