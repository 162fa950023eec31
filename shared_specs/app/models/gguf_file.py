"""A GGUF file of the architecture `llama` or `qwen2` in Hugging Face terms: configuration and dequantised weights.

transformers reads such files too (`from_pretrained(gguf_file=...)`, 5.23), with the same float32 weights and, by its
`AutoTokenizer`, the same token ids. It is not used, because it dequantises every tensor of the file in every process before
the model has any of them (SmolLM2, 513 MiB in float32: a peak of 795 MiB above the imports, here 437 for one weight after
another and less for the rows that a process keeps); because it needs torch, which the JAX half does not have, and accelerate;
and because what is wrong with a file is said here in one line.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from shared_specs.app.finetune.stored import Index, StoredArray
from shared_specs.app.options import InputError

_ARCHITECTURES = ("llama", "qwen2")  # Mistral's files say llama
_CONFIG = {  # behind the name of the architecture
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_TOKENS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufModel:
    """An opened GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # the reader checks nothing: a damaged file shows as any kind of error
            raise InputError(f"finetune: --model {path}: not a readable GGUF file ({error}).") from error

    def field(self, name: str, default: Any = None) -> Any:
        """Return a value of the metadata, or `default` where the file has none."""
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def config(self) -> dict[str, Any]:
        """Return the configuration as a config.json would say it.

        Raises:
            InputError: the architecture is neither llama nor qwen2, or its positions are scaled in a way that is not
                linear.
        """
        architecture = self.field("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise InputError(
                f"finetune: --model {self.path} must have the architecture {' or '.join(_ARCHITECTURES)}, got "
                f"{architecture}. Choose another model."
            )
        names = {tensor.name for tensor in self._reader.tensors}
        fields = {f"{architecture}.{theirs}": ours for theirs, ours in _CONFIG.items()} | _TOKENS
        config = {ours: self.field(theirs) for theirs, ours in fields.items()}
        config = {key: value for key, value in config.items() if value is not None}
        config |= {"model_type": architecture, "tie_word_embeddings": "output.weight" not in names}
        if architecture == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in names
        config.setdefault("vocab_size", len(self.field("tokenizer.ggml.tokens", ())))
        scaling = self.field(f"{architecture}.rope.scaling.type", "none")
        if scaling == "linear":
            factor = self.field(f"{architecture}.rope.scaling.factor", 1.0)
            config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        elif scaling != "none" or "rope_freqs.weight" in names:
            raise InputError(
                f"finetune: --model {self.path} scales its rotary positions in a way that GGUF does not spell out. "
                "Use the model's Hugging Face folder."
            )
        return config

    def weights(self, config: dict[str, Any]) -> dict[str, StoredArray]:
        """Return float32 weights with Hugging Face names and layouts.

        Raises:
            InputError: one of them is none of a decoder, or quantised in a way that NumPy code cannot undo.
        """
        permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        if config["model_type"] != "llama":
            permuted = {}  # of other architectures llama.cpp turns the same pairs as Hugging Face
        weights, known = {}, set()
        for tensor in self._reader.tensors:
            if tensor.tensor_type not in known:
                self._dequantised(tensor, tensor.data[:1])
                known.add(tensor.tensor_type)
            heads = permuted.get(tensor.name.split(".")[-2])
            shape = tuple(int(size) for size in reversed(tensor.shape))
            weights[self._name(tensor.name)] = StoredArray(shape, partial(self._read, tensor, heads))
        return weights

    def _read(self, tensor: ReaderTensor, heads: int | None, index: Index) -> np.ndarray:
        """Return the part that an index selects; of the file only the rows that it names are read, and their memory is
        freed.
        """
        data = tensor.data
        slices = () if index is ... else index
        start, stop, step = slices[0].indices(data.shape[0]) if slices else (0, data.shape[0], 1)
        if heads is not None or step != 1:  # other rows of the file than those of the weight
            start, stop = 0, data.shape[0]
        row = data.nbytes // data.shape[0]
        # Not the reader's own memory-mapped array: its pages stay this process's as long as the reader.
        part = np.fromfile(
            self.path,
            data.dtype,
            count=max(stop - start, 0) * row // data.itemsize,
            offset=tensor.data_offset + start * row,
        )
        found = self._dequantised(tensor, part.reshape(-1, *data.shape[1:]))
        if heads is not None:
            found = unpermute_rotary(found, heads)
        if heads is None and step == 1 and slices:
            slices = (slice(None), *slices[1:])
        return found[slices]

    def _dequantised(self, tensor: ReaderTensor, data: np.ndarray) -> np.ndarray:
        try:
            return np.array(dequantize(data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise InputError(
                f"finetune: --model {self.path}: {tensor.name} is quantised as {tensor.tensor_type.name}, which has no "
                "NumPy dequantisation. Use another quantisation of this model."
            ) from error

    def _name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        parts = stem.split(".")
        if parts[0] == "blk" and len(parts) == 3 and parts[2] in _IN_LAYER:
            return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{suffix}"
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{suffix}"
        raise InputError(f"finetune: --model {self.path} has a weight that no decoder of this kind has: {name}.")


def unpermute_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of a query or key projection back in Hugging Face order.

    llama.cpp stores each head's rows with the two halves of the rotation interleaved, (0, d/2, 1, d/2 + 1, ...);
    Hugging Face's rotation pairs row i with row i + d/2.

    Args:
        weight: [heads * head_dim, H], or [heads * head_dim] for a bias.
        heads: query heads or key/value heads.
    """
    half = weight.shape[0] // heads // 2
    pairs = weight.reshape(heads, half, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
