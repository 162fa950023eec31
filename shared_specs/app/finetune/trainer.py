"""What a half has to provide so that the shared training loop can drive it: one small class.

The loop owns text, windows, log, progress, checkpoints and signals; a trainer owns the model, the optimizer, the
devices and the processes. Everything that crosses between them is NumPy with Hugging Face names and layouts, so a
checkpoint written by one half can be resumed by the other; only what several ranks save is in their framework's own form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.budget import Buffers
from shared_specs.app.finetune.processes import Team
from shared_specs.app.finetune.step_progress import Heard
from shared_specs.app.finetune.stored import Array
from shared_specs.app.options import FinetuneOptions


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Hyperparameters of the optimizer of both halves that are no options."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8


ADAMW = AdamW()


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """All that training continues from.

    Attributes:
        weights: the model's parameters, float32, Hugging Face names and layout ([out, in]); a tied head is not listed.
        optimizer: for every name in `weights` the moments `m.<name>` (first) and `v.<name>` (second, of squares), both
            float32 in the layout of the weight and not bias-corrected, and `step`, an int64 scalar array: the number
            of updates done.

    What is continued from may lie in a file (`stored.StoredArray`); what a trainer returns are NumPy arrays.
    """

    weights: Mapping[str, Array]
    optimizer: Mapping[str, Array]


class Trainer(Protocol):
    """One half's model and optimizer, built empty (`TorchTrainer()`) and driven in the order of the methods.

    With several processes each has a trainer, and all of them call the same methods in the same order.
    """

    name: str  # "tiled_torch" or "tiled_jax", for the log and the plot
    gradient_norm: float | None  # of the last step, over all parameters of all ranks, before --clip; None without it
    shard_format: str  # what save_shards writes: noted in a checkpoint, and the only one that load_shards is given

    @property
    def sharded(self) -> bool:
        """After join: whether checkpoints are written by save_shards instead of state."""
        ...

    def join(self, options: FinetuneOptions) -> Team:
        """Become one of the processes of the run; its ranks are `options.dp`, `fsdp`, `cp` and `tp`.

        Raises:
            InputError: they are not the ranks that there are (`team.check_layout`).
            UnsupportedError: this machine cannot do it.
        """
        ...

    def leave(self) -> None:
        """Give up what `join` took; also after an error."""
        ...

    def versions(self) -> dict[str, str]:
        """Versions of the packages and the device that decide the numbers, for the log."""
        ...

    def buffers(self, config: dict[str, Any], options: FinetuneOptions) -> Buffers:
        """Return how the tiled layers of this model would be computed; `config` as in `load`, which comes after."""
        ...

    def load(self, config: dict[str, Any], weights: Mapping[str, Array] | None, options: FinetuneOptions) -> None:
        """Build the model and the optimizer (all moments zero).

        Reads of the weights one at a time, and of each what this process keeps: none ever holds the whole model unless it
        trains the whole.

        Args:
            config: Hugging Face terms of a `decoders.DECODERS`, complete: model_type, hidden_size, intermediate_size,
                num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, vocab_size, rms_norm_eps,
                hidden_act, tie_word_embeddings, max_position_embeddings and rope_parameters
                ({"rope_type": "default" | "linear" | ..., "rope_theta": float, "factor": float for linear}); the terms
                of one model_type as `decoders` lists them. A sliding window is no shorter than a sequence.
                `--rope-scale` is already in rope_parameters; a trainer does not look at options.rope_scale.
            weights: float32 by Hugging Face name, in files; `lm_head.weight` is absent where the head is tied. None where
                load_shards follows.
            options: tiling (plain, num_shards, shard_tokens, memory_budget, keep), checkpointing, dtype, device, and those of
                the optimizer: lr, schedule and warmup (`schedule.learning_rate` of the updates done), weight_decay (of what
                `schedule.decays`) and clip.

        Raises:
            UnsupportedError: something this half or machine cannot do; its text is shown to the user as one line.
        """
        ...

    def watch(self, heard: Heard) -> None:
        """Call heard("forward" or "backward", layers), from the next step on, whenever one of the model's layers is through.

        It may be called from other threads, and again for a layer that backward computes again. Called on process 0, after
        `load`; a trainer whose steps are short may keep still.
        """
        ...

    def step(self, batch: Batch) -> float:
        """Do one AdamW update on a batch of options.batch x options.grad_accumulation rows; returns the loss before it.

        Every process is given the whole batch, takes its part, and returns the loss of the whole.
        The loss is the mean cross-entropy in float32 over all labels that count, of all micro-batches and ranks together.
        Returns after the update is complete, so that the loop's clock and memory meter see the whole step.
        """
        ...

    def evaluate(self, batch: Batch) -> float:
        """Return the loss of options.batch rows, as `step` does of one micro-batch, without an update.

        Some of the rows may have nothing to predict, but never all of them.
        """
        ...

    def peak_memory_bytes(self) -> int | None:
        """Return peak device bytes of the last step; None on a CPU, where the loop measures the process instead."""
        ...

    def state(self) -> TrainerState:
        """Return weights and optimizer after the last step, copied to the host."""
        ...

    def load_state(self, state: TrainerState) -> None:
        """Continue from a state; `load` was called before, with the same config."""
        ...

    def full_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """Return the weights of `state`, one at a time on process 0, and anything on the others, which take as many."""
        ...

    def save_shards(self, folder: Path) -> None:
        """Write this process's part of the state into an existing folder, beside those of the others."""
        ...

    def load_shards(self, folder: Path) -> None:
        """Continue from what any number of ranks saved with save_shards; `load` was called before."""
        ...
