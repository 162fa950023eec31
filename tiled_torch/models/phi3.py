"""Phi-3 and GLM: gate and up are one linear layer, [gate; up], then down_proj."""

from typing import Any

from tiled_torch.core.gradients import fused_halves
from tiled_torch.models.family import Family, MLPWeights, present_biases


def _operands(mlp: Any) -> MLPWeights:
    gate, up = fused_halves(mlp.gate_up_proj.weight)
    both = mlp.gate_up_proj.bias
    b_gate, b_up = (None, None) if both is None else fused_halves(both)
    biases = present_biases(gate=b_gate, up=b_up, down=mlp.down_proj.bias)
    return MLPWeights(gate, up, mlp.down_proj.weight, biases)


PHI3 = Family(
    "phi3",
    frozenset({"Glm4MLP", "GlmMLP", "Phi3MLP"}),
    ("gate_up_proj", "down_proj"),
    "activation_fn",
    _operands,
)
