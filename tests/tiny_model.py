"""A decoder of a few thousand weights on disk, in either form the commands read, and a text for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared_specs.app.models.model_config import complete_config, weight_shapes
from shared_specs.app.models.tokenizer import ModelTokenizer
from shared_specs.app.models.weights import write_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}

# What makes it another kind: of Mistral's the heads are wider than the hidden size, of Qwen2's some projections have biases.
MISTRAL: dict[str, Any] = {"model_type": "mistral", "head_dim": 16, "sliding_window": 48, "tie_word_embeddings": False}
QWEN2: dict[str, Any] = {"model_type": "qwen2", "head_dim": None}
# Mixtures of experts, whose arrays have other names in transformers' models (Mixtral) and which are one parameter there.
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 32}
QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 5, "moe_intermediate_size": 24} | {
    "num_experts_per_tok": 2
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The complete configuration of the tiny model with some terms changed."""
    return complete_config(CONFIG | changes, "tiny")


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by Hugging Face name; norms near one."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        values = random.standard_normal(shape) * (0.02 if "embed" in name else shape[-1] ** -0.5)
        weights[name] = (1 + values * 0.1 if "norm" in name else values).astype(np.float32)
    return weights


def vocabulary() -> list[str]:
    """The 256 bytes as byte-level letters, the two special tokens, then a few merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, "<|start|>", "<|end|>", *("".join(pair) for pair in MERGES)]


_PAIRS = "t+h th+e Ġ+the a+n i+n Ġ+a e+r o+n Ġ+o r+e s+t e+n o+u Ġ+Ġ"
MERGES = [(first, second) for first, second in (pair.split("+") for pair in _PAIRS.split())]  # the first win


def tiny_tokenizer() -> ModelTokenizer:
    """A byte-level tokenizer for the tiny model."""
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary())}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    config = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}'
    return ModelTokenizer(
        backend, {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": config.encode()}
    )


def write_tiny_folder(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder of the tiny model."""
    folder.mkdir(parents=True)
    config = tiny_config(**changes)
    write_model(folder, config, tiny_weights(config).items(), tiny_tokenizer())
    return folder


def write_tiny_gguf(path: Path, **changes: Any) -> Path:
    """A GGUF file of the tiny model, as llama.cpp's converter writes one.

    Matrices are Q8_0, and of a Llama the query and key rows are permuted.
    """
    config = tiny_config(**changes)
    writer = GGUFWriter(path, config["model_type"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    words = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if config["model_type"] == "llama" else config["model_type"])
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL if word.startswith("<|") else TokenType.NORMAL for word in words])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    for name, weight in tiny_weights(config).items():
        _add_tensor(writer, name, weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _add_tensor(writer: GGUFWriter, name: str, weight: np.ndarray, config: dict[str, Any]) -> None:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads and config["model_type"] == "llama":
        weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    for theirs, ours in _GGUF_NAMES.items():
        name = name.replace(theirs, ours)
    if weight.ndim == 1:
        writer.add_tensor(name, weight)
    else:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, quantize(weight, kind), raw_dtype=kind)


def write_inputs(folder: Path) -> Path:
    """The folder, with a model and a text in it."""
    write_tiny_folder(folder / "model")
    write_text(folder / "text")
    return folder


def write_text(path: Path, words: int = 2000, seed: int = 0) -> Path:
    """A file of random English-looking words."""
    random = np.random.default_rng(seed)
    stock = ["the", "and", "of", "tiles", "are", "on", "the", "sun", "in", "a", "house", "0", "42"]
    path.write_text(" ".join(random.choice(stock, size=words)), encoding="utf-8")
    return path


TEMPLATE = """{%- for message in messages %}<|start|>{{ message['role'] }}
{{ message['content'] }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def write_chat(folder: Path, conversations: int = 16, seed: int = 0) -> Path:
    """`model`, which has a chat template, and `chat`: conversations of one and two turns, of several lengths."""
    write_tiny_folder(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    random = np.random.default_rng(seed)
    lines = []
    for _ in range(conversations):
        words = [" ".join(random.choice(["the", "sun", "on", "a"], size=random.integers(1, 7))) for _ in range(4)]
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]
        lines.append(json.dumps({"messages": messages[: random.choice([2, 4])]}))
    (folder / "chat").write_text("\n".join(lines))
    return folder
