"""Models of many families, and steps of them over simulated ranks: cases as JSON on stdin, a line of what is held for each."""

import json
import sys
from dataclasses import asdict
from typing import Any

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
}  # fmt: skip
LARGE = {
    "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 256,
}  # fmt: skip
COMMON = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 16384}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    "moe_intermediate_size": 48,
}
DENSE = (
    "granite", "cohere", "gpt_neox", "phi", "starcoder2", "olmo2", "gemma", "glm4", "arcee", "apertus", "cohere2", "cwm",
    "ernie4_5", "exaone4", "glm", "helium", "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "jais2", "ministral",
    "ministral3", "nemotron", "olmo", "olmo3", "seed_oss",
)  # fmt: skip
MIXTURES = (
    "qwen2_moe", "glm4_moe", "olmoe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "hunyuan_v1_moe", "hy_v3", "mellum",
    "minimax_m2", "solar_open",
)  # fmt: skip
MORE = {
    "cohere2": {"sliding_window": 512},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "dots1": {"n_shared_experts": 1},
    "olmo3": {"sliding_window": 512},
    "qwen2_moe": {"shared_expert_intermediate_size": 1792},
    "seed_oss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
}
# Queries, and keys with values, are projected twice; a head of values has another size.
LATENTS = ("deepseek_v3", "minicpm3", "deepseek_v2", "glm4_moe_lite", "youtu")
# Layers that no formula knows, so that they are measured, with what differs from the sizes of all: attention in chunks, with
# masks, as all pairs; linear attention, a state space beside attention; a table of positions.
MEASURED: dict[str, dict[str, Any]] = {
    "stablelm": {},
    "gemma2": {"sliding_window": 512, "query_pre_attn_scalar": 64},
    "gpt2": {"n_embd": 512, "n_head": 8, "n_layer": 3, "attn_pdrop": 0.0, "n_positions": 16384},
    "llama4_text": EXPERTS | {"attention_chunk_size": 2048, "intermediate_size_mlp": 896},
    "cohere2_moe": EXPERTS | {"sliding_window": 512},
    "gpt_oss": EXPERTS,
    "falcon_h1": {},
    "qwen3_next": EXPERTS,
    "deepseek_v4": EXPERTS,
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 3,
        "vocab_size_per_layer_input": 256,
    },
    "granite+adapters": {},
    "diffllama": {},
    "minimax": EXPERTS,
    "dbrx": {
        "d_model": 512,
        "n_heads": 8,
        "n_layers": 3,
        "max_seq_len": 16384,
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 896, "moe_num_experts": 4, "moe_top_k": 2, "moe_loss_weight": 0.0},
    },
    "longcat_flash": EXPERTS
    | {
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "head_dim": 32,
        "ffn_hidden_size": 1792,
        "expert_ffn_hidden_size": 896,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "num_layers": 3,
        "num_key_value_heads": 8,
        "num_hidden_layers": 6,
    },
    "rembert": {
        "is_decoder": True,
        "input_embedding_size": 64,
        "output_embedding_size": 96,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "cpmant": {"dim_head": 64, "num_heads": 8, "dim_ff": 1792, "dropout_p": 0.0},
    "hrm_text": {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1, 2]},
}
# Whose step is measured whole: its loss is not tiled; it has a loss_fn; its layers are in a list, of which nothing is known.
WHOLE: dict[str, dict[str, Any]] = {
    "prophetnet": {
        "pad_token_id": 0,
        "num_hidden_layers": None,
        "num_attention_heads": None,
        "num_decoder_layers": 3,
        "num_decoder_attention_heads": 8,
        "decoder_ffn_dim": 1792,
    },
    "gpt_neox": {},
    "gpt_neox+unit": {},  # from then on in a process
}
# Their first layer has no experts. In a deep model the second one's neighbours have.
DENSE_FIRST = ("glm4_moe", "ernie4_5_moe", "exaone_moe", "hy_v3", "deepseek_v3", "deepseek_v2", "glm4_moe_lite")
# No mixture first: ten of every form run in `make test`.
KINDS = (*DENSE[:6], *MIXTURES[:3], *LATENTS[:1], *DENSE[6:], *MIXTURES[3:], *LATENTS[1:])


def config_of(kind: str, *, large: bool = False) -> dict[str, Any]:
    """The dictionary of a config.json."""
    sizes, name = LARGE if large else SIZES, kind.partition("+")[0]
    inside, head = sizes["intermediate_size"] // 2, sizes["head_dim"]
    more: dict[str, Any] = {}
    if kind not in (*DENSE, *MEASURED, *WHOLE):
        more = EXPERTS | {"intermediate_size": inside, "moe_intermediate_size": inside}
    if kind in LATENTS:
        more |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": head // 2, "v_head_dim": head}
        more |= {"q_lora_rank": 2 * head, "kv_lora_rank": head, "qk_nope_head_dim": head, "qk_rope_head_dim": head // 2}
        more |= {"n_group": 1, "topk_group": 1}
    if large and kind in DENSE_FIRST:
        more |= {"num_hidden_layers": 4}
    more = more | MORE.get(kind, {}) | ((MEASURED | WHOLE).get(kind, {}) if large else {})
    left_out = {key for key, value in more.items() if value is None}
    found = {"model_type": name} | sizes | COMMON | more
    return {key: value for key, value in found.items() if key not in left_out}


def as_one_unit(kind: str) -> None:
    """Let the layers of a type of models be unknown in this process."""
    from tiled_torch.parallel import Plan, register_plan

    register_plan(kind.partition("+")[0], Plan(blocks="", no_layers="Nobody knows them."), replace=True)


def main() -> None:
    import torch
    import transformers

    from shared_specs.app.plan.step import Setting
    from tests.app.torch_frozen_steps import freeze, simulate_frozen
    from tiled_torch.commands.plan.simulate import simulate_model

    simulate_frozen()
    for kind, more in json.load(sys.stdin):
        setting = Setting(**{"optimizer": "sgd", "shard_tokens": 1024, "gpus": 8, "kernels": False} | more)

        def build(kind: str = kind) -> Any:
            config = transformers.AutoConfig.for_model(**config_of(kind, large=True))
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, dtype=torch.float32)
            if kind.endswith("+unit"):
                as_one_unit(kind)
            elif "+" in kind:
                freeze(model, ["self_attn", "mlp"])
            return model

        found = simulate_model(build, setting)
        print(json.dumps({"set": asdict(setting), "device": found.device, "host": found.host}), flush=True)


if __name__ == "__main__":
    main()
