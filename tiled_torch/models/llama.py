"""Llama and the many models that share its MLP: separate gate_proj, up_proj and down_proj."""

from typing import Any

from tiled_torch.models.family import Family, MLPWeights, present_biases


def _operands(mlp: Any) -> MLPWeights:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return MLPWeights(gate.weight, up.weight, down.weight, present_biases(gate=gate.bias, up=up.bias, down=down.bias))


# Each is built small and compared with its untiled self in tests/models/test_torch_models.py.
LLAMA = Family(
    "llama",
    frozenset({
        "CohereMLP", "CwmMLP", "Exaone4MLP", "Gemma2MLP", "Gemma3MLP", "GemmaMLP", "GraniteMLP", "HeliumMLP", "LlamaMLP",
        "Ministral3MLP", "MinistralMLP", "MistralMLP", "Olmo2MLP", "Olmo3MLP", "OlmoMLP", "PixtralMLP", "Qwen2MLP",
        "Qwen2_5_VLMLP", "Qwen3MLP", "Qwen3VLTextMLP", "SmolLM3MLP",
    }),
    ("gate_proj", "up_proj", "down_proj"),
    "act_fn",
    _operands,
)  # fmt: skip
