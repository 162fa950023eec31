"""Tiny Hugging Face decoders whose every step is float64, and their losses and gradients in one process."""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

BATCH, LENGTH, VOCAB = 4, 10, 37
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "ministral3": Ministral3Config,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "phi3": Phi3Config,
    "smollm3": SmolLM3Config,
}


def small_config(kind: str, **changes: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 4, "vocab_size": VOCAB, "max_position_embeddings": 32}
    if kind in ("mixtral", "qwen3_moe"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
        sizes |= {"moe_intermediate_size": 24} if kind == "qwen3_moe" else {}
    return CONFIGS[kind](**sizes | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes)


def decoder(kind: str = "llama", **changes: Any) -> Any:
    """A model in float64 whose norms are too, with the same weights for the same kind."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIGS[kind]]._from_config(small_config(kind, **changes)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    return exact(model).train()


def exact(model: Any) -> Any:
    """The same model without the float32 in its norms, which would hide what a sum in another order costs."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "CohereLayerNorm", "Cohere2LayerNorm")):
            module.__class__ = _exact_norm(type(module))
    return model


@cache
def _exact_norm(kind: type[nn.Module]) -> type[nn.Module]:
    offset = 1.0 if "Gemma" in kind.__name__ else 0.0

    def forward(self: Any, x: Tensor) -> Tensor:
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        x = x - x.mean(-1, keepdim=True) if "LayerNorm" in kind.__name__ else x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.weight + offset)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and labels of the whole batch; as many labels are ignored in every sequence."""
    ids = torch.randint(0, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[:, 2] = -100
    return ids, labels


def loss_of(model: Any, ids: Tensor, labels: Tensor, inside: bool, cache: bool | None = None) -> Tensor:
    """The loss: by the model itself, or of its logits in float64."""
    if inside:
        return model(input_ids=ids, labels=labels, use_cache=cache).loss
    logits = model(input_ids=ids, use_cache=cache).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def truth(
    kind: str, length: int = LENGTH, device: torch.device | str = "cpu", **changes: Any
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by name, untiled, in one process, over the whole batch.

    device: cosines and sines of rotary angles are float32, whose last digit differs from device to device.
    """
    model = decoder(kind, **changes).to(device)
    loss = loss_of(model, *(a.to(device) for a in batch(length)), inside=False)
    loss.backward()
    return loss.item(), {name: p.grad if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}
