"""Blocks of experts whose forward is another one than transformers': it says the same in another order.

Non-reentrant checkpointing replays a block until its last tensor has been saved again. Where shared experts, or their gate,
save theirs after the routed experts, a replay would compute these in between, for nothing. So here they come first.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tiled_torch.models.experts import llama4
from tiled_torch.models.experts.marker import OfExperts
from tiled_torch.models.family import home_of, is_of


class SharedFirst(OfExperts):
    """routed experts + shared_experts(x), of DeepSeek-V3 and its many likes."""

    _untiled: type[nn.Module]

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        _, weights, index = self.gate(hidden_states)
        shared = self.shared_experts(hidden_states)
        routed = self.experts(hidden_states.view(-1, hidden_states.shape[-1]), index, weights)
        return routed.view(hidden_states.shape) + shared


class GatedSharedFirst(OfExperts):
    """routed experts + sigmoid(shared_expert_gate(x)) * shared_expert(x), of Qwen2-MoE and its likes."""

    _untiled: type[nn.Module]

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self.shared_expert(x)
        _, weights, index = self.gate(x)
        shared = F.sigmoid(self.shared_expert_gate(x)) * shared
        return (self.experts(x, index, weights) + shared).reshape(hidden_states.shape)


# By the name of the class whose forward is exactly that.
BLOCKS: dict[str, type[Any]] = {
    **dict.fromkeys(
        (
            "AXK2MoE", "BailingHybridMoE", "DeepseekOcr2TextMoe", "DeepseekV2Moe", "DeepseekV32MoE", "DeepseekV3MoE",
            "Dots1MoE", "Dots3NoteTextMoE", "ExaoneMoeSparseMoEBlock", "Glm4MoeLiteMoE", "Glm4MoeMoE", "Glm4vMoeTextMoE",
            "Glm5NextTextMoE", "GlmMoeDsaMoE", "HYV4MoE", "KimiLinearMoE", "Kolibri1SparseMoeBlock", "Mistral4MoE",
            "MistralLarge4TextMoE", "SolarOpenMoE", "UnlimitedOcrTextMoe",
        ),
        SharedFirst,
    ),
    **dict.fromkeys(
        (
            "Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3OmniMoeTalkerTextSparseMoeBlock",
            "Qwen3_5MoeSparseMoeBlock", "Qwen4ExpTextSparseMoeBlock",
        ),
        GatedSharedFirst,
    ),
    **dict.fromkeys(llama4.LLAMA4_BLOCKS, llama4.TiledMoe),
}  # fmt: skip


def kind_of_block(module: nn.Module) -> type[Any] | None:
    """Return the class that a block is given; None where it keeps its own forward."""
    if "forward" in vars(module):
        return None
    home = home_of(module)
    return BLOCKS.get(home.__name__) if is_of("transformers", home) else None
