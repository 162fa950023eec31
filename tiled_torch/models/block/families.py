"""In what the decoder layers of Hugging Face differ from one another, as data: what `Block` has to know to run one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# An attribute of the attention, or of its configuration, or a function of the attention.
Said = str | Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class BlockFamily:
    """Names of a decoder layer's attributes. Llama's are the defaults; None is a part that a layer does not have.

    Args:
        attention: the attribute that holds it. cache: the argument of the layer that is the cache.
        before: the norm in front of q, k and v. between: the one in front of the MLP.
        parallel: whether the MLP reads the layer's input through `between`, or, without that, what `before` made of it. Both
            branches are added to the input. A name is the layer's attribute that says so.
        behind_attention, behind_mlp: what a branch goes through before it is added: another norm, or dropout.
        qkv: its projections, three or a fused one. of_heads: whether a fused one has q, k and v of every head side by side.
        latent: whether q, or k and v, are projected twice, as DeepSeek's, with a key that has the positions of all heads.
        out: the projection behind attention.
        up: those of gate and up, two or a fused one, or without gate the one of up. down: the projection behind them.
        gated: whether there is a gate. activation: of the MLP.
        head_dim: an attribute of the attention. head_norms: of q and k, where there are any. of_columns: whether these are of
            all heads together instead of each head. normed_last: whether they come behind the positions.
        turned: whether positions are rotary ones. rotary: the name of the model's function for them. turned_dims: how many of
            a head's dims it is given.
        scaled: the name of the model's function of positions that queries are multiplied by, Llama 4's.
        sinks: parameters of the attention, of one number a head, that the model's attention function reads.
        multiplier: an attribute of the layer that a branch is multiplied by.
        options: arguments of attention functions.
        without: attributes of attention, MLP or their configuration that have to be None or 0: what they add is not computed.

    The MLP may be a mixture of experts: it then is called with all tokens of the layer, and goes through them by itself.
    """

    before: str | None = "input_layernorm"
    between: str | None = "post_attention_layernorm"
    behind_attention: str | None = None
    behind_mlp: str | None = None
    attention: str = "self_attn"
    cache: str = "past_key_values"
    parallel: bool | str = False
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    of_heads: bool = False
    latent: bool = False
    out: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    gated: bool = True
    activation: str = "act_fn"
    head_dim: str = "head_dim"
    head_norms: tuple[str, str] = ("q_norm", "k_norm")
    of_columns: bool = False
    normed_last: bool = False
    turned: Said | None = None
    rotary: str | Callable[[Any], str] = "apply_rotary_pos_emb"
    turned_dims: str | None = None
    scaled: str | None = None
    sinks: tuple[str, ...] = ()
    multiplier: str | None = None
    options: tuple[tuple[str, Said], ...] = ()
    without: tuple[str, ...] = ()


def said_of(attention: Any, what: Said) -> Any:
    """Return what a family says of an attention; None where neither it nor its configuration has the attribute."""
    if not isinstance(what, str):
        return what(attention)
    return getattr(attention, what) if hasattr(attention, what) else getattr(attention.config, what, None)


def _window_of_exaone(attention: Any) -> int | None:
    return attention.sliding_window if attention.is_sliding else None  # type: ignore[no-any-return]


def _turned_in_exaone(attention: Any) -> bool:
    return attention.sliding_window is None or attention.is_sliding


def _rotary_of_latent(attention: Any) -> str:
    return f"apply_rotary_pos_emb{'_interleave' if attention.config.rope_interleave else ''}"


_WINDOW = (("sliding_window", "sliding_window"),)
_FUSED_UP = ("mlp.gate_up_proj",)
_SCALED = "get_llama_4_attn_scale"
_LLAMA, _WINDOWED = BlockFamily(), BlockFamily(options=_WINDOW)
_NORMS = {"between": "pre_feedforward_layernorm", "behind_attention": "post_attention_layernorm"}
_NORMS |= {"behind_mlp": "post_feedforward_layernorm"}
_OLMO2 = {"before": None, **_NORMS, "between": None, "of_columns": True}
_TWO_MATRICES = BlockFamily(up=("mlp.up_proj",), gated=False)
_LATENT = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # one of q's, or two
_MLA = {"latent": True, "qkv": tuple(f"self_attn.{name}" for name in _LATENT)}
_DEEPSEEK = BlockFamily(**_MLA, rotary=_rotary_of_latent)  # type: ignore[arg-type]
_EXAONE = {"turned": _turned_in_exaone, "options": (("sliding_window", _window_of_exaone),)}
_HUNYUAN = BlockFamily(head_norms=("query_layernorm", "key_layernorm"), normed_last=True)
_GLM4 = {"behind_attention": "post_self_attn_layernorm", "behind_mlp": "post_mlp_layernorm"}

# Each is built small and compared with its untiled self in tests/models/test_torch_block*.py.
BLOCK_FAMILIES: dict[str, BlockFamily] = {
    "ApertusDecoderLayer": BlockFamily(
        before="attention_layernorm", between="feedforward_layernorm", up=("mlp.up_proj",), gated=False
    ),
    "ArceeDecoderLayer": _TWO_MATRICES,
    "Cohere2DecoderLayer": BlockFamily(between=None, parallel=True, turned="sliding_window", options=_WINDOW),
    "CohereDecoderLayer": BlockFamily(between=None, parallel=True),
    "CwmDecoderLayer": _WINDOWED,
    "DeepseekV2DecoderLayer": BlockFamily(**_MLA, rotary="apply_rotary_emb"),  # type: ignore[arg-type]
    "DeepseekV3DecoderLayer": _DEEPSEEK,
    "Dots1DecoderLayer": _WINDOWED,
    "Ernie4_5DecoderLayer": _LLAMA,
    "Ernie4_5_MoeDecoderLayer": _LLAMA,
    "Exaone4DecoderLayer": BlockFamily(
        before=None,
        between=None,
        behind_attention="post_attention_layernorm",
        behind_mlp="post_feedforward_layernorm",
        **_EXAONE,  # type: ignore[arg-type]
    ),
    "ExaoneMoeDecoderLayer": BlockFamily(**_EXAONE),  # type: ignore[arg-type]
    "FlexOlmoDecoderLayer": BlockFamily(**_OLMO2),  # type: ignore[arg-type]
    "Gemma2DecoderLayer": BlockFamily(**_NORMS, options=(*_WINDOW, ("softcap", "attn_logit_softcapping"))),  # type: ignore[arg-type]
    "Gemma3DecoderLayer": BlockFamily(**_NORMS, options=_WINDOW),  # type: ignore[arg-type]
    "GPTNeoXLayer": BlockFamily(
        attention="attention",
        cache="layer_past",
        behind_attention="post_attention_dropout",
        behind_mlp="post_mlp_dropout",
        parallel="use_parallel_residual",
        qkv=("attention.query_key_value",),
        of_heads=True,
        out="attention.dense",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        gated=False,
        activation="act",
        head_dim="head_size",
    ),
    "GemmaDecoderLayer": _LLAMA,
    "Glm4DecoderLayer": BlockFamily(**_GLM4, up=_FUSED_UP, activation="activation_fn"),  # type: ignore[arg-type]
    "Glm4MoeDecoderLayer": _LLAMA,
    "GlmDecoderLayer": BlockFamily(up=_FUSED_UP, activation="activation_fn"),
    "GptOssDecoderLayer": BlockFamily(sinks=("sinks",), options=(*_WINDOW, ("s_aux", "sinks"))),
    "GraniteDecoderLayer": BlockFamily(multiplier="residual_multiplier"),
    "HeliumDecoderLayer": _LLAMA,
    "HYV3DecoderLayer": _LLAMA,
    "HunYuanDenseV1DecoderLayer": _HUNYUAN,
    "HunYuanMoEV1DecoderLayer": _HUNYUAN,
    "HyperCLOVAXDecoderLayer": BlockFamily(
        behind_attention="post_norm1", behind_mlp="post_norm2", multiplier="residual_multiplier"
    ),
    "Jais2DecoderLayer": _TWO_MATRICES,
    "LlamaDecoderLayer": _LLAMA,
    "MellumDecoderLayer": _WINDOWED,
    "MiniCPM3DecoderLayer": BlockFamily(**_MLA, multiplier="residual_scale"),  # type: ignore[arg-type]
    "MiniMaxM2DecoderLayer": BlockFamily(of_columns=True, without=("jitter_noise",)),
    "Ministral3DecoderLayer": BlockFamily(scaled=_SCALED, options=_WINDOW),
    "MinistralDecoderLayer": _WINDOWED,
    "Mistral4DecoderLayer": BlockFamily(**_MLA, rotary=_rotary_of_latent, scaled=_SCALED),  # type: ignore[arg-type]
    "MistralDecoderLayer": _WINDOWED,
    "MixtralDecoderLayer": BlockFamily(options=_WINDOW, without=("jitter_noise",)),
    "NemotronDecoderLayer": _TWO_MATRICES,
    "Olmo2DecoderLayer": BlockFamily(**_OLMO2),  # type: ignore[arg-type]
    "Olmo3DecoderLayer": BlockFamily(**_OLMO2, options=_WINDOW),  # type: ignore[arg-type]
    "OlmoDecoderLayer": BlockFamily(without=("clip_qkv",)),
    "OlmoeDecoderLayer": BlockFamily(of_columns=True, options=_WINDOW, without=("clip_qkv",)),
    "Phi3DecoderLayer": BlockFamily(
        behind_attention="resid_attn_dropout",
        behind_mlp="resid_mlp_dropout",
        qkv=("self_attn.qkv_proj",),
        up=_FUSED_UP,
        activation="activation_fn",
        options=_WINDOW,
    ),
    "PhiDecoderLayer": BlockFamily(
        between=None,
        behind_attention="resid_dropout",
        behind_mlp="resid_dropout",
        parallel=True,
        out="self_attn.dense",
        up=("mlp.fc1",),
        down="mlp.fc2",
        gated=False,
        activation="activation_fn",
        head_norms=("q_layernorm", "k_layernorm"),
        turned_dims="rotary_ndims",
    ),
    "Qwen2DecoderLayer": _WINDOWED,
    "Qwen2MoeDecoderLayer": _LLAMA,
    "Qwen2VLDecoderLayer": _WINDOWED,
    "Qwen2_5OmniDecoderLayer": _WINDOWED,
    "Qwen2_5_VLDecoderLayer": _WINDOWED,
    "Qwen3DecoderLayer": _WINDOWED,
    "Qwen3MoeDecoderLayer": _WINDOWED,
    "Qwen3VLMoeTextDecoderLayer": _LLAMA,
    "Qwen3VLTextDecoderLayer": _LLAMA,
    "SeedOssDecoderLayer": BlockFamily(without=("residual_dropout",)),
    "SmolLM3DecoderLayer": BlockFamily(turned="use_rope", options=_WINDOW),
    "SolarOpenDecoderLayer": _LLAMA,
    "Starcoder2DecoderLayer": BlockFamily(
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        gated=False,
        activation="act",
        options=_WINDOW,
        without=("residual_dropout",),
    ),
    "VaultGemmaDecoderLayer": BlockFamily(
        between="pre_feedforward_layernorm", options=(*_WINDOW, ("softcap", "attn_logit_softcapping"))
    ),
}
