"""In what the decoder layers of Hugging Face differ from one another, as data: what `Block` has to know to run one."""

from dataclasses import dataclass
from typing import Any

OUT, DOWN = "self_attn.o_proj", "mlp.down_proj"  # where a family says nothing else


@dataclass(frozen=True, kw_only=True)
class BlockFamily:
    """Names of a decoder layer's attributes. Llama's are the defaults; None is a part that a layer does not have.

    Args:
        before: the norm in front of q, k and v. between: the one in front of the MLP; with `parallel` that reads what `before`
            made of the layer's input, and both branches are added to it.
        behind_attention, behind_mlp: what a branch goes through before it is added: another norm, or dropout.
        qkv: its projections, three or a fused one. up: those of gate and up, two or a fused one, or without gate the one of up.
        down: the projection behind them. gated: whether there is a gate. activation: of the MLP.
        of_columns: whether q_norm and k_norm are of all heads together instead of each head.
        turned: an attribute of the attention that says whether positions are rotary ones.
        multiplier: an attribute of the layer that a branch is multiplied by.
        options: arguments of attention functions, each with the attribute of the attention, or of its configuration.
        without: attributes of attention, MLP or their configuration that have to be None or 0: what they add is not computed.

    The MLP may be a mixture of experts: it then is called with all tokens of the layer, and goes through them by itself.
    """

    before: str | None = "input_layernorm"
    between: str | None = "post_attention_layernorm"
    behind_attention: str | None = None
    behind_mlp: str | None = None
    parallel: bool = False
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = DOWN
    gated: bool = True
    activation: str = "act_fn"
    of_columns: bool = False
    turned: str | None = None
    multiplier: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    without: tuple[str, ...] = ()


_WINDOW = (("sliding_window", "sliding_window"),)
_FUSED_UP = ("mlp.gate_up_proj",)
_LLAMA, _WINDOWED = BlockFamily(), BlockFamily(options=_WINDOW)
_NORMS = {"between": "pre_feedforward_layernorm", "behind_attention": "post_attention_layernorm"}
_NORMS |= {"behind_mlp": "post_feedforward_layernorm"}
_OLMO2 = {"before": None, **_NORMS, "between": None, "of_columns": True}
_TWO_MATRICES = BlockFamily(up=("mlp.up_proj",), gated=False)
_GLM4 = {"behind_attention": "post_self_attn_layernorm", "behind_mlp": "post_mlp_layernorm"}

# Each is built small and compared with its untiled self in tests/models/test_torch_block.py.
BLOCK_FAMILIES: dict[str, BlockFamily] = {
    "ArceeDecoderLayer": _TWO_MATRICES,
    "CohereDecoderLayer": BlockFamily(between=None, parallel=True),
    "CwmDecoderLayer": _WINDOWED,
    "Dots1DecoderLayer": _WINDOWED,
    "Ernie4_5DecoderLayer": _LLAMA,
    "Ernie4_5_MoeDecoderLayer": _LLAMA,
    "FlexOlmoDecoderLayer": BlockFamily(**_OLMO2),  # type: ignore[arg-type]
    "Gemma2DecoderLayer": BlockFamily(**_NORMS, options=(*_WINDOW, ("softcap", "attn_logit_softcapping"))),  # type: ignore[arg-type]
    "Gemma3DecoderLayer": BlockFamily(**_NORMS, options=_WINDOW),  # type: ignore[arg-type]
    "GemmaDecoderLayer": _LLAMA,
    "Glm4DecoderLayer": BlockFamily(**_GLM4, up=_FUSED_UP, activation="activation_fn"),  # type: ignore[arg-type]
    "Glm4MoeDecoderLayer": _LLAMA,
    "GlmDecoderLayer": BlockFamily(up=_FUSED_UP, activation="activation_fn"),
    "GraniteDecoderLayer": BlockFamily(multiplier="residual_multiplier"),
    "HeliumDecoderLayer": _LLAMA,
    "HyperCLOVAXDecoderLayer": BlockFamily(
        behind_attention="post_norm1", behind_mlp="post_norm2", multiplier="residual_multiplier"
    ),
    "Jais2DecoderLayer": _TWO_MATRICES,
    "LlamaDecoderLayer": _LLAMA,
    "MellumDecoderLayer": _WINDOWED,
    "MinistralDecoderLayer": _WINDOWED,
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
    "Qwen2DecoderLayer": _WINDOWED,
    "Qwen2MoeDecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _WINDOWED,
    "Qwen3MoeDecoderLayer": _WINDOWED,
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


def has_experts(layer: Any) -> bool:
    """Return whether the MLP of a decoder layer is a mixture of experts."""
    return hasattr(layer.mlp, "experts")


def linears_of(layer: Any) -> tuple[str, ...]:
    """Return all projections of a layer, but for those of a mixture of experts."""
    family = family_of_block(layer)
    return (*family.qkv, OUT, *(() if has_experts(layer) else (*family.up, family.down)))


def family_of_block(layer: Any) -> BlockFamily:
    """Return the description of a decoder layer, by the name of its class or of the class it had before tiling or sharding."""
    return next(BLOCK_FAMILIES[base.__name__] for base in type(layer).__mro__ if base.__name__ in BLOCK_FAMILIES)
