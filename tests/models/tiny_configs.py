"""Tiny models of any class of transformers: its own configuration with every size made small, and what one needs besides."""

import inspect
import re
import warnings
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCAB = 64
# Names of sizes in configurations -> tiny ones, the first that matches.
SIZES: tuple[tuple[str, int], ...] = (
    (r"^(vocab_size|n_vocab|.*_vocab_size|vocab_size_per_layer_input)$", VOCAB),
    (r"^(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_(en|de)coder_layers|depth)$", 2),
    (r"^(hidden_size|d_model|n_embd|dim|embedding_size|d_embed|hidden_dim|embed_dim|emb_dim|word_embed_proj_dim)$", 32),
    (r"^(num_attention_heads|n_head|n_heads|num_heads|decoder_attention_heads|encoder_attention_heads)$", 4),
    (r"^(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)$", 4),
    (r"^(head_dim|d_kv|attention_head_size|(v|qk_nope|qk_rope|index|global)_head_dim|rotary_dim)$", 8),
    (r"^(hidden_size_per_layer_input|linear_(key|value)_head_dim|zaya_mlp_expansion)$", 8),
    (r"^(linear_num_(key|value)_heads|swa_num_(attention|key_value)_heads|mamba_n_groups|swa_num_heads)$", 4),
    (r"^(.*intermediate_size|n_inner|ffn_dim|(en|de)coder_ffn_dim|d_ff|d_inner|feed_forward_size|dim_ff|ffn_hidden_size)$", 40),
    (r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$", 4),
    (r"^(num_experts_per_tok|num_experts_per_token|moe_top_k|moe_k|top_k_experts|moe_topk)$", 2),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length)$", 64),
    (r"^(q_lora_rank|kv_lora_rank|index_topk)$", 8),
    (r"^(n_group|topk_group|num_expert_group)$", 1),
    (r"^(mamba_n_heads|mamba_num_heads)$", 4),
    (r"^(pad_token_id)$", 0),
    (r"^(bos_token_id)$", 1),
    (r"^(eos_token_id|decoder_start_token_id)$", 2),
    (r"^(image_size)$", 16),
    (r"^(patch_size)$", 4),
)  # fmt: skip


NONE_TOO = re.compile(
    r".*token_id|head_dim|num_key_value_heads|n_routed_experts|num_experts_per_tok"
)  # of which None stands for a size


def tiny_sizes(defaults: dict[str, Any]) -> dict[str, Any]:
    """The sizes among a configuration's values, made small, and no dropout."""
    found: dict[str, Any] = {}
    for name, value in defaults.items():
        size = next((size for pattern, size in SIZES if re.match(pattern, name)), None)
        if size is not None and (isinstance(value, int) or (value is None and NONE_TOO.fullmatch(name))):
            found[name] = size
        elif isinstance(value, float) and ("dropout" in name or "pdrop" in name or name.endswith("_drop")):
            found[name] = 0.0
    return found


def tiny_config(kind: str, overrides: dict[str, Any]) -> Any:
    """The configuration of a model type; overrides: besides, for the class and for configurations in it by their names."""
    return _tiny(transformers.CONFIG_MAPPING[kind], overrides)


def _tiny(made: Any, overrides: dict[str, Any]) -> Any:
    values = _values(made)
    inner = {name: value for name, value in values.items() if isinstance(value, transformers.PreTrainedConfig)}
    made_inner = {name: _tiny(type(value), overrides.get(name, {})) for name, value in inner.items()}
    flat = {name: value for name, value in overrides.items() if name not in inner}
    known = {theirs: name for name, theirs in getattr(made, "attribute_map", {}).items()}
    sizes = {name: value for name, value in tiny_sizes(values).items() if known.get(name) not in values}
    wanted = sizes | made_inner | flat
    return made(**{name: value for name, value in wanted.items() if value is not DROPPED})


DROPPED = object()  # an override: the size stays what it is


def _values(made: Any) -> dict[str, Any]:
    default, found = made(), {}
    for name in (*inspect.signature(made.__init__).parameters, *vars(default)):
        if name != "self" and not name.startswith("_"):
            try:
                found[name] = getattr(default, name, None)
            except (AttributeError, RuntimeError):  # one that every layer has its own of
                continue
    return found


def tiny_model(config: Any, auto: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The model of a configuration, with random weights that are far from where they start."""
    torch.manual_seed(0)
    for each in (config, config.get_text_config()):
        each.use_cache = False
    options = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Casting complex values")  # of rotary angles, in both models alike
        model = auto.from_config(config, **options).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
                parameter.add_(0.05 * noise)
    return model
