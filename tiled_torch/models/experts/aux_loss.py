"""Losses of causal language models with experts: which of them are tiled, and the term that balances the load of experts.

transformers adds `router_aux_loss_coef` times that term to the loss where the routers' logits are asked for. It is computed
by transformers' own function, of the logits of all tokens.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

# Classes whose forward is that of a plain causal language model.
UNBALANCED = frozenset({
    "AXK1ForCausalLM", "AXK2ForCausalLM", "AfmoeForCausalLM", "BailingHybridForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "Dots1ForCausalLM", "ExaoneMoeForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "HYV3ForCausalLM", "HunYuanMoEV1ForCausalLM", "KimiLinearForCausalLM",
    "Kolibri1ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "LongcatFlashForCausalLM", "MiMoV2FlashForCausalLM",
    "Mistral4ForCausalLM", "SolarOpenForCausalLM", "ZayaForCausalLM",
})  # fmt: skip
# The same, then the term.
BALANCED = frozenset({
    "DeepseekV4ForCausalLM", "Ernie4_5_MoeForCausalLM", "FlexOlmoForCausalLM", "FlintForCausalLM", "GptOssForCausalLM",
    "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM",
    "JambaForCausalLM", "LagunaForCausalLM", "MellumForCausalLM", "MiniMaxForCausalLM", "MiniMaxM2ForCausalLM",
    "MiniMaxM3VLForCausalLM", "MixtralForCausalLM", "OlmoeForCausalLM", "PhimoeForCausalLM", "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM",
})  # fmt: skip
SCALED_EXPERTS: dict[str, Callable[[Any], float]] = {
    name: lambda model: 1 / model.config.logits_scaling for name in BALANCED if name.startswith("Granite")
}
WITH_EXPERTS = UNBALANCED | BALANCED


def asks_for_router_logits(model: Any, given: dict[str, Any]) -> bool:
    """Return whether a call adds the term, and let the decoder record what it takes."""
    if not {base.__name__ for base in type(model).__mro__} & BALANCED:
        return False
    if given.get("output_router_logits") is None:
        given["output_router_logits"] = model.config.output_router_logits
    return bool(given["output_router_logits"])


def balanced(model: Any, loss: Tensor, outputs: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the loss with the term, and the term. mask: of attention; what it hides does not count."""
    home = next(base for base in type(model).__mro__ if base.__name__ in BALANCED)
    term = sys.modules[home.__module__].load_balancing_loss_func(
        outputs.router_logits, _number(model, "num_experts"), _number(model, "num_experts_per_tok"), mask
    )
    return loss + (_number(model, "router_aux_loss_coef") * term).to(loss), term


def _number(model: Any, name: str) -> Any:
    return getattr(model if hasattr(model, name) else model.config.get_text_config(), name)
