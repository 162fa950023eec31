"""What single model types need beside small sizes to be built tiny, by type; and what is given to their forward."""

from typing import Any

import torch

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _turned(*sections: int, **more: Any) -> dict[str, Any]:
    """Of a text whose positions have parts, of an image's time, height and width: how many pairs of a head each turns."""
    return {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [*sections]} | more}}


OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 4, "clip_qkv": 8.0}},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "deepseek_v32": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": [40, 40]},
    "glm_moe_dsa": {"mlp_layer_types": ["dense", "sparse"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},  # of its 256 hardly a token would choose another
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 8},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [3, 3],
        "lsh_attn_chunk_length": 9,
        "local_attn_chunk_length": 9,
    },
    **dict.fromkeys(
        ("cosmos3_edge", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"), _turned(2, 1, 1)
    ),
    **dict.fromkeys(("glm46v", "glm4v", "glm_ocr", "glmga"), _turned(2, 1, 1, partial_rotary_factor=1.0)),
    "glm4v_moe": _turned(1, 1, 0, partial_rotary_factor=0.5),
    "ernie4_5_vl_moe": _turned(1, 1, 2),
    "hunyuan_vl": _turned(1, 1, 1, 1),
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}},
    "glm5_next": {"text_config": {"index_kpool": 4, "qk_rope_head_dim": 0}},
    "granite_docling": {"vision_config": {"out_hidden_size": 32}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "udop": {"decoder_start_token_id": 0},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}

# Types whose code fails in float64.
FLOAT32 = frozenset({"inkling2_text", "xglm", "xlnet"})

# Types whose files transformers itself does not read back as they were written, untiled models' too.
FILES_DIFFER = frozenset({"youtu"})

# Types that transformers itself does not generate from so few tokens, and whose layers it does not checkpoint.
NOT_GENERATED = frozenset({"reformer"})
NOT_CHECKPOINTED = frozenset("cpmant ctrl gpt_neox_japanese jetmoe openai-gpt reformer xlm xlnet".split())

# Layers that peft does not adapt in these types: it refuses some, and others are called in ways of their own.
NOT_ADAPTED = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj"),
    **dict.fromkeys(("llama4", "llama4_text", "phimoe"), "router"),
    "deepseek_v4": "o_a_proj",
}

# What goes with the tokens.
_PIXELS = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)
INPUTS: dict[str, dict[str, Any]] = {
    "blip": {"pixel_values": _PIXELS},
    "git": {"pixel_values": torch.zeros(2, 3, 16, 16)},
    "molmo2": {"mm_token_type_ids": torch.zeros(2, 9, dtype=torch.long)},
    "udop": {"bbox": torch.zeros(2, 9, 4)},
    "vision-encoder-decoder": {"pixel_values": _PIXELS},
}

# Types that are not built tiny -> why.
NOT_BUILT: dict[str, str] = {
    "blt": "its patchers' sizes follow from one another; not built tiny",
    "dots3_note": "the configuration of its text names 46 layers one by one; see dots3_note_text",
    "gemma3n": "its tower of images is timm's",
    "gemma4_assistant": "it drafts for another model, and takes no labels",
    "gemma4_unified_assistant": "it drafts for another model, and takes no labels",
    "musicgen": "AutoModelForCausalLM finds two texts in its configuration",
    "musicgen_melody": "AutoModelForCausalLM finds two texts in its configuration",
}
