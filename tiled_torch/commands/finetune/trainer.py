"""The PyTorch half of `finetune`: a Hugging Face decoder, tiled, under AdamW, in one process or in those of torchrun."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared_specs.app.data.batches import IGNORED, Batch
from shared_specs.app.finetune.budget import Buffers
from shared_specs.app.finetune.processes import ALONE, Team
from shared_specs.app.finetune.step_progress import Heard
from shared_specs.app.finetune.stored import Array
from shared_specs.app.finetune.trainer import TrainerState
from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.options import FinetuneOptions
from shared_specs.config import Checkpointing, ParallelConfig
from shared_specs.errors import UnsupportedError
from shared_specs.shards import KERNEL_MULTIPLE
from tiled_torch import backends
from tiled_torch.commands.finetune import optimizing, processes, sharded_checkpoint
from tiled_torch.commands.finetune.experts import FolderNames
from tiled_torch.commands.finetune.watched_layers import watch_layers
from tiled_torch.core.tensors import device_kind

_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


class TorchTrainer:
    """See `shared_specs.app.finetune.trainer.Trainer`.

    Parameters, gradients and moments are float32; with `--dtype bfloat16` the forward runs under autocast.
    """

    name = "tiled_torch"
    gradient_norm: float | None = None
    shard_format = sharded_checkpoint.FORMAT
    _team: Team = ALONE

    @property
    def sharded(self) -> bool:
        return self._team.count > 1

    def join(self, options: FinetuneOptions) -> Team:
        self._device = _device(options.device)
        self._team = processes.join(options, self._device)
        return self._team

    def leave(self) -> None:
        if isinstance(self._team, processes.TorchTeam):
            self._team.leave()
        self._team = ALONE

    def versions(self) -> dict[str, str]:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if torch.cuda.is_available():
            versions["gpu"] = torch.cuda.get_device_name()
        return versions | {"threads": str(torch.get_num_threads())}

    def buffers(self, config: dict[str, Any], options: FinetuneOptions) -> Buffers:
        kernels = backends.choose("finetune", "auto", self._device, getattr(torch, options.dtype)) == "triton"
        kind = device_kind(self._device)
        return Buffers(device=kind, kernels=kernels, multiple_of=KERNEL_MULTIPLE if kernels else 1)

    def load(self, config: dict[str, Any], weights: Mapping[str, Array] | None, options: FinetuneOptions) -> None:
        self._device, self._options = _device(options.device), options
        if options.keep and DECODERS[config["model_type"]].experts:
            text = f"finetune: --keep must be 0.0 with experts, got {options.keep}."
            raise UnsupportedError(f"{text} They are computed again in backward.")
        self._dtype = getattr(torch, options.dtype)
        self._tiling, self._names = options.tiling(), FolderNames(config)
        weights = None if weights is None else self._names.parameters(weights)
        self._model: Any = self._spread(config, weights) if self.sharded else self._alone(config, weights)
        named = dict(self._model.named_parameters())
        self._parameters = {name.removeprefix("module."): parameter for name, parameter in named.items()}
        self._optimizer = optimizing.adamw(self._parameters, options)

    def _alone(self, config: dict[str, Any], weights: Mapping[str, Array] | None) -> Any:
        model = self._tiled(build_model(config, weights, self._device))
        if self._options.offload:
            from tiled_torch.plans.api import parallelize

            return parallelize(model, None, ParallelConfig(checkpointing=Checkpointing(offload=True)))
        if self._options.checkpointing:
            # The second name is the older one within transformers 5, deprecated where the first exists.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        return model

    def _spread(self, config: dict[str, Any], weights: Mapping[str, Array] | None) -> Any:
        """Return the model over all ranks: each takes its part of the weights, and none the whole unless it is a replica."""
        from tiled_torch.plans.api import parallelize
        from tiled_torch.plans.meta_device import materialize

        mesh, parallel = processes.mesh_and_config(self._options, config["num_attention_heads"], self._device)
        if parallel.data is not None and parallel.data.engine == "ddp":
            return parallelize(self._tiled(build_model(config, weights, self._device)), mesh, parallel)
        model = parallelize(self._tiled(empty_model(config)), mesh, parallel)
        parts = None
        if weights is not None:
            parts = {name: sharded_checkpoint.CheckpointParts(array) for name, array in weights.items()}
        materialize(model, device=self._device, weights=parts)
        return with_positions(model, self._device).train()

    def _tiled(self, model: PreTrainedModel) -> PreTrainedModel:
        if self._tiling is not None:
            from tiled_torch.models import tile_model

            tile_model(model, scope=self._options.scope, tiling=self._tiling)
        return model

    def watch(self, heard: Heard) -> None:
        watch_layers(getattr(self._model, "module", self._model).base_model.layers, heard)

    def step(self, batch: Batch) -> float:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        parts, valid = self._mine(batch, self._options.grad_accumulation)
        losses = []
        for number, part in enumerate(parts, 1):
            with self._reducing(last=number == len(parts)):
                loss = self._loss_of(part, valid)
                loss.backward()
            losses.append(loss.detach())
        norm = optimizing.update(self._optimizer, self._options)
        self.gradient_norm = None if norm is None else norm.item()
        return torch.stack(losses).sum().item()  # every rank has that of the whole

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        (part,), valid = self._mine(batch, 1)
        self._model.eval()
        try:
            return self._loss_of(part, valid).item()
        finally:
            self._model.train()

    def _mine(self, batch: Batch, micro_batches: int) -> tuple[list[Batch], torch.Tensor]:
        """Return this rank's part of each micro-batch, and how many labels of them all count."""
        parts = batch.micro_batches(micro_batches, processes.rows(self._options, self._team.rank))
        return parts, torch.tensor(sum(part.valid for part in parts), device=self._device)

    def _loss_of(self, part: Batch, valid: torch.Tensor) -> torch.Tensor:
        arrays = part.arrays().items()
        given = {name: torch.from_numpy(array).to(self._device, torch.long) for name, array in arrays}
        return self._loss(given.pop("input_ids"), given.pop("shift_labels"), valid, **given)

    def _reducing(self, *, last: bool) -> AbstractContextManager[None]:
        """Let replicas add up their gradients after the last micro-batch alone; those of shards are never kept whole."""
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        if isinstance(self._model, FSDPModule):
            self._model.set_requires_all_reduce(last)
        return nullcontext()

    def _loss(
        self, inputs: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor | None = None, **more: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum over this micro-batch, divided by `valid`, which of several ranks is added up; None counts here.

        more: position_ids, of rows of several documents.
        """
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            if self._tiling is not None or self.sharded:
                # The model's own loss, of which ranks compute parts; targets are shifted already, but without labels
                # transformers has no loss.
                more |= {"labels": targets, "shift_labels": targets}
                return self._model(input_ids=inputs, num_items_in_batch=valid, use_cache=False, **more).loss
            logits = self._model(input_ids=inputs, use_cache=False, **more).logits
        log_probabilities = logits.flatten(0, 1).float().log_softmax(-1)
        del logits
        total = F.nll_loss(log_probabilities, targets.flatten(), reduction="sum")
        return total / ((targets != IGNORED).sum() if valid is None else valid)

    def peak_memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def state(self) -> TrainerState:
        weights, optimizer = {}, {"step": np.array(0, dtype=np.int64)}
        for name, parameter in self._parameters.items():
            moments = self._optimizer.state[parameter]
            weights |= self._named(name, parameter)
            for ours, theirs in _MOMENTS.items():
                optimizer |= {f"{ours}.{there}": array for there, array in self._named(name, moments[theirs])}
            optimizer["step"] = np.array(int(moments["step"].item()), dtype=np.int64)
        return TrainerState(weights=weights, optimizer=optimizer)

    def _named(self, parameter: str, whole: torch.Tensor) -> Iterator[tuple[str, np.ndarray]]:
        """Yield copies of the arrays that a parameter, or a moment of it, is in a model folder, with their names."""
        for name, part in self._names.arrays(parameter, whole):
            yield name, _to_numpy(part)

    def load_state(self, state: TrainerState) -> None:
        sharded_checkpoint.empty_moments(self._parameters, self._optimizer, float(state.optimizer["step"][...]))
        weights = self._names.parameters(state.weights)
        moments = {
            theirs: self._names.parameters({name: state.optimizer[f"{ours}.{name}"] for name in state.weights})
            for ours, theirs in _MOMENTS.items()
        }
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                sharded_checkpoint.fill(parameter.detach(), sharded_checkpoint.CheckpointParts(weights[name]))
                for theirs, arrays in moments.items():
                    moment = self._optimizer.state[parameter][theirs]
                    sharded_checkpoint.fill(moment, sharded_checkpoint.CheckpointParts(arrays[name]))

    def full_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, parameter in self._parameters.items():
            whole = parameter.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            for there, part in self._names.arrays(name, whole.cpu()):
                yield there, part.numpy()

    def save_shards(self, folder: Path) -> None:
        sharded_checkpoint.save(folder, self._parameters, self._optimizer, getattr(self._team, "control", None))

    def load_shards(self, folder: Path) -> None:
        sharded_checkpoint.load(folder, self._parameters, self._optimizer, getattr(self._team, "control", None))


def empty_model(config: dict[str, Any]) -> PreTrainedModel:
    """Return transformers' own model of this model_type on the meta device, its attention in blocks (SDPA), if it has no caps.

    Raises:
        UnsupportedError: transformers cannot make one of this configuration.
    """
    kind = DECODERS[config["model_type"]]
    capped = "attn_logit_softcapping" in kind.defaults and config["attn_logit_softcapping"] is not None
    attention = "eager" if capped else "sdpa"
    try:
        with torch.device("meta"):
            own = AutoConfig.for_model(**config)
            return AutoModelForCausalLM.from_config(own, attn_implementation=attention, dtype=torch.float32)
    except Exception as error:  # transformers says by all kinds of it what is wrong with a configuration
        reason = f"{type(error).__name__}: {error}"
        text = "finetune: --model must have a configuration that transformers makes a model of"
        raise UnsupportedError(f"{text}, got one with {reason}") from error


def build_model(config: dict[str, Any], weights: Mapping[str, Array] | None, device: torch.device) -> PreTrainedModel:
    """Return a model in training mode with these weights (copied one at a time), or zeros where a checkpoint is loaded next.

    weights: by the names of the parameters, of which `FolderNames` makes what a folder has.
    Built without memory first: a random initialisation would be thrown away.
    """
    model = empty_model(config)
    if weights is None:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        found = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    else:
        found = {name: sharded_checkpoint.CheckpointParts(array)[...].to(device) for name, array in weights.items()}
    if config["tie_word_embeddings"]:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    model.load_state_dict(found, strict=True, assign=True)
    model.tie_weights()
    return with_positions(model, device).train()


def with_positions(model: Any, device: torch.device) -> Any:
    """Return the same model with the buffers that no state dict holds: frequencies of positions, the scale of an embedding."""
    embedding = model.model.embed_tokens
    if hasattr(embedding, "scalar_embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    return model


def _device(name: str) -> torch.device:
    if name == "gpu" and not torch.cuda.is_available():
        raise UnsupportedError("finetune: --device must be cpu or auto here, got gpu. PyTorch sees no CUDA GPU.")
    gpu = name == "gpu" or (name == "auto" and torch.cuda.is_available())
    if gpu and "LOCAL_RANK" in os.environ:  # one GPU for each process of torchrun
        place, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if place >= count:
            text = f"finetune: torchrun's --nproc-per-node must be <= {count}, the GPUs that PyTorch sees here"
            raise UnsupportedError(f"{text}, got a process {place}. Or pass --device cpu.")
        torch.cuda.set_device(place)
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cuda" if gpu else "cpu")


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()
