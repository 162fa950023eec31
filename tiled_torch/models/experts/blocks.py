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


class RoundedSharedFirst(OfExperts):
    """routed experts + shared_experts(x) of HY-V3, which may be rounded once: so are PyTorch's own sums of 16 bits, without
    copies of both in float32."""

    _untiled: type[nn.Module]

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(x, self.e_score_correction_bias)
        shared = self.shared_experts(x)
        found = self.experts(x, index, weights) + shared
        return (found.to(x.dtype) if self.enable_moe_fp32_combine else found).reshape(hidden_states.shape)


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
    "HYV3MoE": RoundedSharedFirst,
    **dict.fromkeys(llama4.LLAMA4_BLOCKS, llama4.TiledMoe),
}  # fmt: skip

# The MLP beside the experts of a block that only adds its result to theirs, by the name of the block's class.
_ADDED = {name: "shared_experts" for name, kind in BLOCKS.items() if kind in (SharedFirst, RoundedSharedFirst)}
_ADDED |= {"Ernie4_5_MoeSparseMoeBlock": "shared_experts"}
_ADDED |= {"HunYuanMoEV1Moe": "shared_mlp", "Llama4TextMoe": "shared_expert"}


def shared_that_is_added(block: nn.Module) -> nn.Module | None:
    """Return the MLP beside the experts of a block whose result is added to theirs, and not looked at; None where there is
    none."""
    home = home_of(block)
    name = _ADDED.get(home.__name__) if is_of("transformers", home) and "forward" not in vars(block) else None
    return None if name is None else getattr(block, name, None)


def kind_of_block(module: nn.Module) -> type[Any] | None:
    """Return the class that a block is given; None where it keeps its own forward."""
    if "forward" in vars(module):
        return None
    home = home_of(module)
    return BLOCKS.get(home.__name__) if is_of("transformers", home) else None
