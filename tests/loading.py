"""What a process takes of memory while it loads its part of a model, which must not be the whole."""

import gc
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shared_specs.app.finetune.stored import StoredArray
from shared_specs.app.finetune.trainer import Trainer
from shared_specs.app.memory import PeakMemory, resident_bytes
from shared_specs.app.models.model_config import weight_shapes
from shared_specs.app.models.weights import read_model
from shared_specs.app.options import FinetuneOptions
from tests.tiny_model import tiny_config, write_tiny_folder, write_tiny_gguf

# 80 MB of weights, of which no single one is more than a fortieth.
_BIG: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}
BIG_BYTES = 4 * sum(prod(shape) for shape in weight_shapes(tiny_config(**_BIG)).values())


def write_big(folder: Path, gguf: bool) -> Path:
    """A model whose weights can be told from what a process otherwise has."""
    return write_tiny_gguf(folder / "big.gguf", **_BIG) if gguf else write_tiny_folder(folder / "big", **_BIG)


def memory_of_loading(trainer: Trainer, options: FinetuneOptions) -> dict[str, int]:
    """Bytes: `peak`, the most that this process has beyond what it had before; `read`, the largest part read at once."""
    files, largest = read_model(options.model), [0]

    def noted(found: np.ndarray) -> np.ndarray:
        largest[0] = max(largest[0], found.nbytes)
        return found

    weights = {
        name: StoredArray(stored.shape, lambda index, stored=stored: noted(stored[index]))
        for name, stored in files.weights.items()
    }
    gc.collect()
    before = resident_bytes()
    with PeakMemory() as peak:
        trainer.load(files.config, weights, options)
    return {"peak": peak.bytes - before, "read": largest[0]}


def assert_no_whole_model(kept: int, peak: int, read: int, moments: int = 0, beside: float = 0.25) -> None:
    """Of a model in two parts: a process held its own, `kept` bytes and those of its moments, and little more, and read
    parts of single weights only.

    beside: the fraction of the model that may be held besides, of which the other part would be half.
    """
    assert 0.45 * BIG_BYTES < kept < 0.6 * BIG_BYTES
    assert peak < kept + moments + beside * BIG_BYTES, f"{peak} bytes of {BIG_BYTES}"
    assert read <= 512 * 1024 * 4 / 2, "half of the largest weight"
