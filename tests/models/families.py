"""The families of decoder, each tiny and with all that it has of its own, at values at which each part shows."""

from typing import Any

VOCAB = 272
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 256, "eos_token_id": 257}
WINDOW = {"sliding_window": 4}
ALTERNATING = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral"} | WINDOW,
    "qwen3": {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1, "attention_bias": True}
    | WINDOW,
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0}
    | {"final_logit_softcapping": 3.0}
    | ALTERNATING,
    "gemma3": {"model_type": "gemma3_text", "query_pre_attn_scalar": 5} | ALTERNATING,
    "phi3": {"model_type": "phi3", "hidden_size": 32} | WINDOW,
    "phi3-long": {"model_type": "phi3", "hidden_size": 32, "tie_word_embeddings": True}
    | {"rope_parameters": LONG, "original_max_position_embeddings": 10},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": True}
    | {"layer_types": ["full_attention", "sliding_attention"]}
    | WINDOW,
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
    | {"norm_topk_prob": True},
    "qwen3_moe-unnormalised": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 20, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
