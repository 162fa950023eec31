"""Right ways of training tiny models of transformers, of which `check` must say nothing: no false alarm."""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.check.torch_models import LoRA
from tiled_torch import tile_model

V, T = 48, 16
_SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 8, "attn_implementation": "eager", "sliding_window": 32}),
    "mixtral": ("Mixtral", _EXPERTS),
}
WAYS = ("whole", "adapters", "frozen", "accumulation", "padding", "packed", "adamw")


@dataclass(frozen=True)
class Setup:
    family: str
    scope: str
    dtype: str
    checkpointing: bool
    way: str

    def __str__(self) -> str:
        return "-".join((self.family, self.scope, self.dtype, "checkpointing" * self.checkpointing or "kept", self.way))

    def arguments(self) -> dict[str, Any]:
        """Return those of `check`."""
        found: dict[str, Any] = dict(model=self._model(), batch=self._batch(), tile=self._tile)
        if self.way == "accumulation":
            found |= dict(step=partial(_accumulates, autocast=self.dtype == "autocast"), plain_step=self._step)
        elif self.dtype == "autocast":
            found |= dict(step=self._step)
        if self.way == "adamw":
            found |= dict(optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3))
        return found

    def _model(self) -> Any:
        name, more = FAMILIES[self.family]
        torch.manual_seed(3)
        config = getattr(transformers, f"{name}Config")(**_SIZES | more)
        # With its cache, which nobody reads in training, transformers does not see that documents are packed.
        config.use_cache = False
        model = getattr(transformers, f"{name}ForCausalLM")(config).train()
        model = model.to(torch.bfloat16 if self.dtype == "bfloat16" else torch.float32)
        if self.way == "adapters":
            model.requires_grad_(False)
            for layer in model.model.layers:
                _adapt(layer.self_attn, "q_proj")
                if self.family != "mixtral":
                    _adapt(layer.mlp, "up_proj")
        elif self.way == "frozen":
            model.model.embed_tokens.requires_grad_(False)
            model.model.layers[0].requires_grad_(False)
            model.model.layers[1].mlp.requires_grad_(False)
        if self.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        return model

    def _batch(self) -> dict[str, Tensor]:
        ids = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(4))
        labels = ids.clone()
        found = {"input_ids": ids, "labels": labels}
        if self.way == "padding":
            mask = torch.ones_like(ids)
            mask[0, :5] = 0
            return {"input_ids": ids * mask, "labels": labels.masked_fill(mask == 0, -100), "attention_mask": mask}
        if self.way == "packed":
            labels[:, 6] = -100
            return found | {"position_ids": torch.cat([torch.arange(6), torch.arange(T - 6)]).expand(2, T)}
        return found

    def _tile(self, model: Any) -> Any:
        return tile_model(model, scope=self.scope, num_shards=3)  # type: ignore[arg-type]

    def _step(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "autocast"):
            return model(**batch).loss


def _adapt(module: Any, name: str) -> None:
    linear: nn.Linear = getattr(module, name)
    setattr(module, name, LoRA(linear).to(linear.weight.dtype))


def _accumulates(model: Any, batch: dict[str, Tensor], autocast: bool) -> Tensor:
    losses = []
    for number in range(2):
        half = {name: value.chunk(2)[number] for name, value in batch.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(**half).loss)
        (losses[-1] / 2).backward()
    return torch.stack(losses).mean().detach()


EVERY = [
    Setup(*chosen)
    for chosen in itertools.product(
        FAMILIES, ("mlp", "block"), ("float32", "bfloat16", "autocast"), (False, True), WAYS
    )
]
# One after the other goes through all values of each.
FEW = [EVERY[(number * 55) % len(EVERY)] for number in range(12)]
