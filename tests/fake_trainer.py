"""A trainer without a framework, so that the loop can be tested, interrupted and killed anywhere in milliseconds.

`python -m tests.fake_trainer finetune ...` is the command with it; FAKE_STEP_SECONDS slows its steps down.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from shared_specs.app.command import Command, main
from shared_specs.app.data.batches import IGNORED, Batch
from shared_specs.app.finetune import loop
from shared_specs.app.finetune.budget import Buffers
from shared_specs.app.finetune.loop import finetune
from shared_specs.app.finetune.processes import ALONE, Team, check_layout
from shared_specs.app.finetune.schedule import learning_rate
from shared_specs.app.finetune.step_progress import Heard
from shared_specs.app.finetune.stored import Array
from shared_specs.app.finetune.trainer import TrainerState
from shared_specs.app.options import FinetuneOptions
from shared_specs.app.plots import save_figure

_EMBED = "model.embed_tokens.weight"


class OneDevice:
    """What a trainer that runs on one device in one process has instead of teams and shards."""

    gradient_norm: float | None = None
    shard_format = ""
    sharded = False

    def join(self, options: FinetuneOptions) -> Team:
        check_layout(options, 1, "devices", "This half trains on one device.")
        return ALONE

    def leave(self) -> None:
        pass

    def buffers(self, config: dict[str, Any], options: FinetuneOptions) -> Buffers:
        return Buffers()

    def full_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(self.state().weights.items())  # type: ignore[attr-defined]

    def watch(self, heard: Heard) -> None:
        self.heard = heard

    def save_shards(self, folder: Path) -> None:
        raise NotImplementedError

    def load_shards(self, folder: Path) -> None:
        raise NotImplementedError


class FakeTrainer(OneDevice):
    """Momentum descent on a made-up loss of the embedding: every loss depends on all windows and updates before."""

    name = "fake"
    diverge_at: int | None = None

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def load(self, config: dict[str, Any], weights: Mapping[str, Array], options: FinetuneOptions) -> None:
        self.config, self.options = config, options
        self.weights = {name: np.array(array[...]) for name, array in weights.items()}
        self.momentum = np.zeros_like(self.weights[_EMBED])
        self.steps = 0

    def step(self, batch: Batch) -> float:
        shape = self.options.batch * self.options.grad_accumulation, self.options.tokens
        assert {(array.shape, array.dtype) for array in batch.arrays().values()} == {(shape, np.dtype(np.int32))}
        valid = batch.shift_labels != IGNORED
        tokens = np.concatenate((batch.input_ids.ravel(), batch.shift_labels[valid]))
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", "0")))
        for phase in ("forward", "backward"):
            for _ in range(2):
                self.heard(phase, 2)
        embed = self.weights[_EMBED]
        loss = float(np.square(embed[tokens] - 1).mean())
        gradient = np.zeros_like(embed)
        np.add.at(gradient, tokens.ravel(), embed[tokens.ravel()] - 1)
        self.momentum = np.float32(0.9) * self.momentum + gradient
        embed -= np.float32(learning_rate(self.options, self.steps)) * self.momentum
        self.steps += 1
        return float("nan") if self.steps == self.diverge_at else loss

    def evaluate(self, batch: Batch) -> float:
        assert batch.input_ids.shape == (self.options.batch, self.options.tokens)
        return float(np.square(self.weights[_EMBED][batch.shift_labels[batch.shift_labels != IGNORED]] - 1).mean())

    def peak_memory_bytes(self) -> int | None:
        return None

    def state(self) -> TrainerState:
        weights = {name: array.copy() for name, array in self.weights.items()}
        # A transposed view: what is saved has to be made contiguous by whoever saves it.
        optimizer = {f"m.{_EMBED}": self.momentum.T.copy().T, "step": np.array(self.steps, np.int64)}
        return TrainerState(weights=weights, optimizer=optimizer)

    def load_state(self, state: TrainerState) -> None:
        self.weights = {name: np.array(array[...]) for name, array in state.weights.items()}
        self.momentum = np.array(state.optimizer[f"m.{_EMBED}"][...])
        self.steps = int(state.optimizer["step"][...])


def empty_picture(runs: object, path: Path, held_out: object = None) -> None:
    """In place of `plot_runs`: a file of the same name, written in the same way."""
    save_figure(Figure(figsize=(1, 1)), path)


COMMAND = Command(
    name="finetune",
    help="Fine-tune.",
    options=FinetuneOptions,
    extras="cli",
    run=lambda options: finetune(FakeTrainer(), options),
)

if __name__ == "__main__":
    loop.plot_runs = empty_picture
    sys.exit(main("fake", [COMMAND]))
