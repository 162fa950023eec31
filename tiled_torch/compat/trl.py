"""`tile_trainer`: trl's SFT, DPO, GRPO, ... trainers of a tiled model, their log-probabilities through the tiled loss.

trl (1.14 and newer) puts a head of its own into the model, which computes log-probabilities from the hidden states in pieces.
Here it is handed the tiled head instead; what the trainer makes of the log-probabilities stays trl's.
"""

from collections.abc import Callable
from functools import wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shared_specs.config import LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail_type
from tiled_torch.loss.api import tiled_linear_cross_entropy
from tiled_torch.models.causal_lm import TiledCausalLM
from tiled_torch.models.family import reason_linear_is_not_plain
from tiled_torch.models.reports import inside_forward, report
from tiled_torch.tile.api import tile

Trainer = TypeVar("Trainer")

_NAME = "tile_trainer"
_HEAD = "_ChunkedLogProbFunction"
PATH = "tiled_linear_cross_entropy: in the head of trl"


def tile_trainer(trainer: Trainer) -> Trainer:
    """Return the same trl trainer, the log-probabilities of its tiled models computed by `tiled_linear_cross_entropy`.

    Entropies (with gradients) and the accuracy of tokens come from the same call; mean logits and sums of squared
    probabilities, which have no gradient, from one more product by shards of tokens where a trainer asks for them.

    Args:
        trainer: of trl, made with a model from `tile_model`; of its `model` and, if tiled, its `ref_model` the head changes.
    Returns:
        The trainer itself.
    Raises:
        TypeError: trainer has no model.
        UnsupportedError: the model is not tiled, or this version of trl puts no head into it that could be replaced; in a
            step: a head with an adapter.
    Memory: of a head's call one shard of logits, as in `tiled_linear_cross_entropy` with reduction "none".
    Source: trl's add_fused_lm_head (Hugging Face, trl 1.16), whose results these are.
    Example: `trainer = tile_trainer(SFTTrainer(model=tile_model(model), args=settings, train_dataset=rows))`
    """
    if not isinstance(getattr(trainer, "model", None), nn.Module):
        fail_type(_NAME, "trainer", "a trainer of trl", type(trainer).__name__)
    models = {"model": _bare(trainer.model)}  # type: ignore[attr-defined]
    reference = getattr(trainer, "ref_model", None)
    if isinstance(reference, nn.Module) and isinstance(_bare(reference), TiledCausalLM):
        models["ref_model"] = _bare(reference)
    for name, model in models.items():
        _check(f"trainer.{name}", model)
    for model in models.values():
        model.forward = MethodType(_with_tiled_head(vars(model)["forward"]), model)
    return trainer


def _bare(model: Any) -> Any:
    """Return the model inside peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check(name: str, model: nn.Module) -> None:
    if not isinstance(model, TiledCausalLM):
        rule, advice = "a tiled causal language model", "Call tile_model(model) before the trainer is made."
        raise UnsupportedError(error_text(_NAME, name, rule, type(model).__name__, advice=advice))
    given = vars(model).get("forward")
    code = getattr(given, "__code__", None)
    if "fused_lm_head" not in getattr(code, "co_varnames", ()) or _HEAD not in getattr(code, "co_names", ()):
        rule, got = "one whose head trl has replaced", "none that is known"
        advice = "trl 1.14 to 1.16 are known; give the trainer to tile_trainer once, right after it is made."
        raise UnsupportedError(error_text(_NAME, name, rule, got, advice=advice))


def _with_tiled_head(given: MethodType) -> Callable[..., Any]:
    """Return trl's forward of a model with another head inside it; trl's module stays as it is, for other threads too."""

    @wraps(given)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return given(*args, **kwargs)
        head = self.get_output_embeddings()
        reason = reason_linear_is_not_plain("lm_head", head, gathered=True, unit=True)
        if reason is not None:
            raise UnsupportedError(error_text(_NAME, "lm_head", "a plain linear layer", reason))
        with inside_forward():
            report(self, PATH)
            return _beside(given, **{_HEAD: _TiledHead(self._tiling, self._backend)})(
                *args, fused_lm_head=True, **kwargs
            )

    return forward


def _beside(method: MethodType, **names: Any) -> MethodType:
    """Return a copy of a method that sees these values under these names of its module."""
    function: Any = method.__func__
    copied = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copied, method.__self__)


class _TiledHead(NamedTuple):
    """Stands for trl's autograd function inside its forward."""

    tiling: Tiling
    backend: str

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,  # trl's tiles of the vocabulary: the plan is the model's own
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1 [N], None where not asked for."""
        del chunk_size
        cap = None if softcap is None else softcap / temperature
        asked: tuple[Any, ...] = ("log_probs", *(("entropy",) if "entropy" in outputs else ()))
        asked += ("accuracy",) if "is_top1" in outputs else ()
        options = LossOptions(
            ignore_index=-100, reduction="none", logit_scale=scale / temperature, logit_softcap=cap, outputs=asked
        )
        found: Any = tiled_linear_cross_entropy(
            hidden, weight, targets, bias=bias, loss=options, tiling=self.tiling, backend=self.backend
        )
        squares, mean = self._of_logits(hidden, weight, bias, options, outputs)
        top = found.accuracy if found.accuracy is None else found.accuracy.bool()
        return found.log_probs, found.entropy, squares, mean, top

    def _of_logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: LossOptions, outputs: tuple[str, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return log_sum_sq_probs and mean_logits, by shards of tokens and without gradients."""
        if not {"log_sum_sq_probs", "mean_logits"} & set(outputs):
            return None, None

        def both(rows: Tensor) -> tuple[Tensor, Tensor]:
            logits = nn.functional.linear(rows, weight, bias).float() * options.logit_scale
            if options.logit_softcap is not None:
                logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
            return torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1), logits.mean(-1)

        with torch.no_grad():
            squares, mean = tile(both, tiling=self.tiling)(hidden)
        return squares if "log_sum_sq_probs" in outputs else None, mean if "mean_logits" in outputs else None
