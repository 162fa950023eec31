"""The PyTorch half of `finetune`: a Hugging Face Llama, tiled, under AdamW."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from shared_specs.app.trainer import ADAMW, TrainerState
from shared_specs.cli import FinetuneOptions
from shared_specs.errors import UnsupportedError

_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


class TorchTrainer:
    """See `shared_specs.app.trainer.Trainer`.

    Parameters, gradients and moments are float32; with `--dtype bfloat16` the forward runs under autocast.
    """

    name = "tiled_torch"

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if torch.cuda.is_available():
            versions["gpu"] = torch.cuda.get_device_name()
        return versions | {"threads": str(torch.get_num_threads())}

    def load(self, config: dict[str, Any], tensors: dict[str, np.ndarray], options: FinetuneOptions) -> None:
        self._device = _device(options.device)
        self._dtype = getattr(torch, options.dtype)
        self._model = build_model(config, tensors, self._device)
        self._tiling = options.tiling()
        if self._tiling is not None:
            from tiled_torch.models import tile_model

            tile_model(self._model, tiling=self._tiling)
        if options.checkpointing:
            # The second name is the older one within transformers 5, deprecated where the first exists.
            enable = getattr(self._model, "activation_checkpointing_enable", None)
            (enable or self._model.gradient_checkpointing_enable)({"use_reentrant": False})
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=options.lr,
            betas=(ADAMW.beta1, ADAMW.beta2),
            eps=ADAMW.eps,
            weight_decay=ADAMW.weight_decay,
            fused=True,  # no temporaries of the size of the model
        )

    def step(self, tokens: np.ndarray) -> float:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        ids = torch.from_numpy(tokens).to(self._device, torch.long)
        loss = self._loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._tiling is not None:
                # The model's own loss; the targets are shifted already.
                return self._model(input_ids=inputs, shift_labels=targets, use_cache=False).loss
            logits = self._model(input_ids=inputs, use_cache=False).logits
        log_probabilities = logits.flatten(0, 1).float().log_softmax(-1)
        del logits
        return F.nll_loss(log_probabilities, targets.flatten())

    def peak_memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def state(self) -> TrainerState:
        weights = {name: _to_numpy(parameter) for name, parameter in self._parameters.items()}
        optimizer = {"step": np.array(0, dtype=np.int64)}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            optimizer |= {f"{ours}.{name}": _to_numpy(moments[theirs]) for ours, theirs in _MOMENTS.items()}
            optimizer["step"] = np.array(int(moments["step"].item()), dtype=np.int64)
        return TrainerState(weights=weights, optimizer=optimizer)

    def load_state(self, state: TrainerState) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(_to_tensor(state.weights[name]))
        step = torch.tensor(float(state.optimizer["step"]))
        moments = {
            index: {"step": step.clone()}
            | {theirs: _to_tensor(state.optimizer[f"{ours}.{name}"]) for ours, theirs in _MOMENTS.items()}
            for index, name in enumerate(self._parameters)
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})


def build_model(config: dict[str, Any], tensors: dict[str, np.ndarray], device: torch.device) -> LlamaForCausalLM:
    """A Llama in training mode with these weights (copied), its attention in blocks (SDPA).

    Built without memory first: a random initialisation would be thrown away.
    """
    hf_config = LlamaConfig(**config)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(hf_config, attn_implementation="sdpa", dtype=torch.float32)
    weights = {name: _to_tensor(array).to(device) for name, array in tensors.items()}
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    # Its frequencies are a buffer that no state dict holds.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=hf_config).to(device)
    return model.train()


def _device(name: str) -> torch.device:
    if name == "gpu" and not torch.cuda.is_available():
        raise UnsupportedError("finetune: --device must be cpu or auto here, got gpu. PyTorch sees no CUDA GPU.")
    gpu = name == "gpu" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if gpu else "cpu")


def _to_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy in one piece: torch.tensor keeps the strides, and fused AdamW reads the memory of all its inputs in order."""
    return torch.tensor(np.ascontiguousarray(array))


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()
