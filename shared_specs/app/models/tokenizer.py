"""The model's tokenizer: from a Hugging Face folder or a GGUF file's metadata, saved as `transformers` loads it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared_specs.app.models.gguf_file import GgufModel
from shared_specs.app.options import InputError

_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_CONTROL = 3  # GGUF's token type of a special token
_USER_DEFINED = 4
# How Llama 3 cuts text into words before its byte-pair merges (published in that model's tokenizer.json), and Qwen2, which
# takes digits one by one.
_LLAMA3_WORDS, _QWEN2_WORDS = (
    "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            digits,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer and the files that make up its saved form (name to content)."""

    backend: Tokenizer
    files: dict[str, bytes]

    def encode(self, text: str) -> np.ndarray:
        """Return [tokens] int32 ids of the text, nothing added in front or behind."""
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and what else came with them."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


def tokenizer_from_folder(folder: Path) -> ModelTokenizer:
    """Return the tokenizer of a Hugging Face folder; its files are kept byte for byte.

    Raises:
        InputError: there is no tokenizer.json, or it cannot be read.
    """
    files = {name: (folder / name).read_bytes() for name in _FOLDER_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise InputError(f"finetune: --model {folder} has no tokenizer.json. Save the model's fast tokenizer there.")
    try:
        backend = Tokenizer.from_buffer(files["tokenizer.json"])
    except Exception as error:  # the Rust parser raises plain Exception
        raise InputError(f"finetune: --model {folder}: tokenizer.json cannot be read ({error}).") from error
    backend.no_truncation()
    backend.no_padding()
    return ModelTokenizer(backend, files)


def tokenizer_from_gguf(model: GgufModel, config: dict[str, Any]) -> ModelTokenizer:
    """Return the byte-pair tokenizer that a GGUF file describes.

    Raises:
        InputError: the file describes another kind of tokenizer, or cuts text into words in an unknown way.
    """
    kind, words = model.field("tokenizer.ggml.model"), model.field("tokenizer.ggml.pre", "default")
    tokens = model.field("tokenizer.ggml.tokens")
    if kind != "gpt2" or words not in _WORDS or not tokens:
        raise InputError(
            f"finetune: --model {model.path}: its tokenizer is of the kind {kind}/{words}, and only gpt2 with "
            f"{', '.join(_WORDS)} can be rebuilt from GGUF. Use the model's Hugging Face folder."
        )
    merges = [tuple(pair.split(" ")) for pair in model.field("tokenizer.ggml.merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=words in _WHOLE_WORDS))
    if words in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_WORDS[words]())
    backend.decoder = decoders.ByteLevel()
    types = model.field("tokenizer.ggml.token_type", [0] * len(tokens))
    backend.add_special_tokens([_added(token) for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL])
    backend.add_tokens([_added(token) for token, type_ in zip(tokens, types, strict=True) if type_ == _USER_DEFINED])
    if model.field("tokenizer.ggml.add_bos_token", False):
        first = tokens[config["bos_token_id"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, config["bos_token_id"])]
        )
    saved = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": _saved_config(model, config, tokens),
    }
    return ModelTokenizer(backend, {name: text.encode() for name, text in saved.items()})


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


# The ways of cutting text into words, by the name llama.cpp gives them.
_WORDS = {
    "default": lambda: [_byte_level()],
    "gpt-2": lambda: [_byte_level()],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), _byte_level()],
    "llama-bpe": lambda: [pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"), _byte_level(use_regex=False)],
    "qwen2": lambda: [pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated"), _byte_level(use_regex=False)],
}
_WHOLE_WORDS = ("llama-bpe",)  # a word that is in the vocabulary is taken whole
_COMPOSED = ("qwen2",)  # letters and their accents become one character first


def _saved_config(model: GgufModel, config: dict[str, Any], tokens: list[str]) -> str:
    saved: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for kind in ("bos", "eos", "pad"):
        if f"{kind}_token_id" in config:
            saved[f"{kind}_token"] = tokens[config[f"{kind}_token_id"]]
    template = model.field("tokenizer.chat_template")
    if template is not None:
        saved["chat_template"] = template
    return json.dumps(saved, indent=2, ensure_ascii=False) + "\n"
