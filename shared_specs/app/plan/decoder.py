"""The sizes of a decoder: by the name of a published model, or from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared_specs.app.options import InputError


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a decoder with grouped heads and a gated MLP, as the formulas read them.

    Attributes:
        tied: whether the head is the embedding. biased: q, k and v have biases. head_norms: q and k are normalised.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    biased: bool = False
    head_norms: bool = False

    @property
    def queries(self) -> int:
        """Columns of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_products(self) -> int:
        """Parameters of one layer that are factors of products."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.intermediate)

    @property
    def layer_parameters(self) -> int:
        """Return parameters of one layer."""
        biases = self.queries + 2 * self.keys if self.biased else 0
        return self.layer_products + 2 * self.hidden + biases + (2 * self.head_dim if self.head_norms else 0)

    @property
    def end_parameters(self) -> int:
        """Return parameters of embedding, final norm and head."""
        return self.hidden * (self.vocab * (1 if self.tied else 2) + 1)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.end_parameters


def _of(sizes: tuple[int, ...], head_dim: int = 128, **more: Any) -> Decoder:
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "vocab")
    return Decoder(**dict(zip(names, sizes, strict=True)), head_dim=head_dim, **more)


_QWEN2, _QWEN3 = {"biased": True}, {"head_norms": True}
# hidden, intermediate, layers, heads, key-value heads, vocabulary: those of each model's published config.json.
MODELS: Mapping[str, Decoder] = {
    "llama-2-7b": _of((4096, 11008, 32, 32, 32, 32000)),
    "llama-2-13b": _of((5120, 13824, 40, 40, 40, 32000)),
    "llama-3-8b": _of((4096, 14336, 32, 32, 8, 128256)),
    "llama-3-70b": _of((8192, 28672, 80, 64, 8, 128256)),
    "llama-3.2-1b": _of((2048, 8192, 16, 32, 8, 128256), 64, tied=True),
    "llama-3.2-3b": _of((3072, 8192, 28, 24, 8, 128256), tied=True),
    "mistral-7b": _of((4096, 14336, 32, 32, 8, 32768)),
    "qwen2.5-0.5b": _of((896, 4864, 24, 14, 2, 151936), 64, tied=True, **_QWEN2),
    "qwen2.5-1.5b": _of((1536, 8960, 28, 12, 2, 151936), tied=True, **_QWEN2),
    "qwen2.5-3b": _of((2048, 11008, 36, 16, 2, 151936), tied=True, **_QWEN2),
    "qwen2.5-7b": _of((3584, 18944, 28, 28, 4, 152064), **_QWEN2),
    "qwen2.5-14b": _of((5120, 13824, 48, 40, 8, 152064), **_QWEN2),
    "qwen2.5-32b": _of((5120, 27648, 64, 40, 8, 152064), **_QWEN2),
    "qwen2.5-72b": _of((8192, 29568, 80, 64, 8, 152064), **_QWEN2),
    "qwen3-0.6b": _of((1024, 3072, 28, 16, 8, 151936), tied=True, **_QWEN3),
    "qwen3-1.7b": _of((2048, 6144, 28, 16, 8, 151936), tied=True, **_QWEN3),
    "qwen3-4b": _of((2560, 9728, 36, 32, 8, 151936), tied=True, **_QWEN3),
    "qwen3-8b": _of((4096, 12288, 36, 32, 8, 151936), **_QWEN3),
    "qwen3-14b": _of((5120, 17408, 40, 40, 8, 151936), **_QWEN3),
    "qwen3-32b": _of((5120, 25600, 64, 64, 8, 151936), **_QWEN3),
    "smollm2-135m": _of((576, 1536, 30, 9, 3, 49152), 64, tied=True),
    "smollm2-360m": _of((960, 2560, 32, 15, 5, 49152), 64, tied=True),
    "smollm2-1.7b": _of((2048, 8192, 24, 32, 32, 49152), 64, tied=True),
}

_TERMS = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def decoder_named(model: str) -> Decoder:
    """Return a decoder's sizes.

    Args:
        model: a name of `MODELS`, the path of a config.json, or a Hugging Face folder that has one.
    Raises:
        InputError: it is none of these, or the file is of another kind of model.
    """
    known = MODELS.get(model.lower())
    if known is not None:
        return known
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        names = ", ".join(MODELS)
        raise InputError(f"plan: --model must be a config.json, a folder with one, or one of {names}; got {model}.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"plan: --model {path} cannot be read: {error}.") from error
    return decoder_of(config, str(path))


def decoder_of(config: object, source: str) -> Decoder:
    """Return the sizes that the dictionary of a config.json says. source: the file, for messages.

    Raises:
        InputError: it is of another kind of model, or a size is missing or none.
    """
    if not isinstance(config, dict) or config.get("model_type") not in _FAMILIES:
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise InputError(f"plan: --model {source} must have a model_type of {', '.join(_FAMILIES)}, got {kind}.")
    sizes: dict[str, Any] = {name: config.get(term) for name, term in _TERMS.items()}
    sizes["kv_heads"] = config.get("num_key_value_heads") or sizes["heads"]
    bad = [_TERMS.get(name, name) for name, size in sizes.items() if type(size) is not int or size < 1]
    if bad:
        raise InputError(f"plan: --model {source} must have whole numbers >= 1 for {', '.join(bad)}.")
    kind = config["model_type"]
    return Decoder(
        **sizes,
        head_dim=config.get("head_dim") or sizes["hidden"] // sizes["heads"],
        tied=bool(config.get("tie_word_embeddings", False)),
        biased=kind == "qwen2" or bool(config.get("attention_bias")),
        head_norms=kind == "qwen3",
    )
