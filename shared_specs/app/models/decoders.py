"""The kinds of Hugging Face decoder that the library trains: in what they differ, and what a missing term means.

All of them are one decoder: norms, rotary positions, grouped heads, a gated MLP or several of which a router picks. What a
kind has beside Llama is data here, one entry each.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Rule = Callable[
    [Mapping[str, Any], int], bool
]  # of a configuration with its defaults filled in, and the number of a layer


@dataclass(frozen=True, kw_only=True)
class ExpertTerms:
    """How a kind of decoder names its experts.

    Attributes:
        count, chosen, intermediate: the terms that say how many there are, how many a token has, the features inside one.
        count_too: another name of the first, which transformers 5 writes.
        normalised: the term that says whether the weights of a token's experts add up to one; None: they always do.
        inside: the module that holds them and the router. gate, up, down: projections of one.
    """

    count: str
    chosen: str = "num_experts_per_tok"
    intermediate: str = "intermediate_size"
    count_too: str | None = None
    normalised: str | None = None
    inside: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def counted(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration as a dictionary in which the number of experts has its first name alone."""
        found = dict(config)
        given = None if self.count_too is None else found.pop(self.count_too, None)
        if found.get(self.count) is None and given is not None:
            found[self.count] = given
        return found


@dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """One `model_type`. Llama's names and options are the defaults.

    Attributes:
        causal_lm: the class in transformers.
        defaults: values of the terms that a configuration may leave out.
        activation: the term that names the MLP's.
        norms: of a layer, in front of attention and of the MLP; with `branch_norms` also behind each, in the order of a layer.
        head_norms: q and k are normalised, each head by itself.
        norm_offset: what is added to the weights of norms before they multiply.
        scaled_embedding: rows of the embedding table are multiplied by the root of the hidden size.
        qkv, gate_up: projections, apart or fused.
        qkv_bias: those of q, k and v have biases, and that behind attention has none.
        windowed: which layers attend through the window, where the configuration does not list them; None: none.
        typed: whether the configuration may list them, as `layer_types`.
        turned: which layers turn queries and keys by their positions; None: all.
        thetas: the base of rotary positions where none is given; of layers with a window, where those have one of their own.
        experts: of an MLP that is several experts, of which a token has a few; None: it is one MLP.
        refused: terms that have to be absent, null, false or 0. fixed: terms that have to be absent, null or this value.
    """

    causal_lm: str
    defaults: Mapping[str, Any]
    activation: str = "hidden_act"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    head_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    qkv_bias: bool = False
    windowed: Rule | None = None
    typed: bool = False
    turned: Rule | None = None
    thetas: tuple[float, float | None] = (10000.0, None)
    experts: ExpertTerms | None = None
    refused: tuple[str, ...] = ("attention_dropout",)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def branch_norms(self) -> bool:
        """Return whether what attention and the MLP return is normalised before it is added."""
        return len(self.norms) == 4


def _every(config: Mapping[str, Any], layer: int) -> bool:
    return True


def _late(config: Mapping[str, Any], layer: int) -> bool:
    return layer >= config["max_window_layers"]


def _unturned(config: Mapping[str, Any], layer: int) -> bool:
    return not _turned(config, layer)


def _turned(config: Mapping[str, Any], layer: int) -> bool:
    listed = config.get("no_rope_layers")
    return bool(listed[layer]) if listed else (layer + 1) % config["no_rope_layer_interval"] != 0


def _but_each(interval: int) -> Rule:
    """All but the last of so many layers; the configuration may say another number."""
    return lambda config, layer: (layer + 1) % (config.get("sliding_window_pattern") or interval) != 0


_ACTIVATION, _COMMON = {"hidden_act": "silu"}, {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_LLAMA = _ACTIVATION | _COMMON
_QWEN = _LLAMA | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
_QWEN |= {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "head_dim": 256}
_GEMMA |= {"num_key_value_heads": 4, "attention_bias": False, "sliding_window": 4096, "query_pre_attn_scalar": 256}
_GEMMA_LAYER: dict[str, Any] = {
    "activation": "hidden_activation",
    "norms": (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    "norm_offset": 1.0,
    "scaled_embedding": True,
    "typed": True,
    "refused": ("attention_dropout", "use_bidirectional_attention"),
}
# Those of transformers' configuration classes, which a test compares.
DECODERS: Mapping[str, DecoderKind] = {
    "llama": DecoderKind(
        causal_lm="LlamaForCausalLM",
        defaults=_LLAMA
        | {"max_position_embeddings": 2048, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": DecoderKind(
        causal_lm="MistralForCausalLM",
        defaults=_LLAMA | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windowed=_every,
    ),
    "qwen2": DecoderKind(causal_lm="Qwen2ForCausalLM", defaults=_QWEN, qkv_bias=True, windowed=_late, typed=True),
    "qwen3": DecoderKind(
        causal_lm="Qwen3ForCausalLM",
        defaults=_QWEN | {"head_dim": 128, "attention_bias": False},
        head_norms=True,
        windowed=_late,
        typed=True,
    ),
    "gemma2": DecoderKind(
        causal_lm="Gemma2ForCausalLM",
        defaults=_GEMMA
        | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        windowed=_but_each(2),
        **_GEMMA_LAYER,
    ),
    "gemma3_text": DecoderKind(
        causal_lm="Gemma3ForCausalLM",
        defaults=_GEMMA | {"max_position_embeddings": 131072, "final_logit_softcapping": None},
        head_norms=True,
        windowed=_but_each(6),
        thetas=(1e6, 10000.0),
        **_GEMMA_LAYER,
    ),
    "phi3": DecoderKind(
        causal_lm="Phi3ForCausalLM",
        defaults=_LLAMA
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
        | {"num_key_value_heads": None, "sliding_window": None},
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        windowed=_every,
        refused=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    "smollm3": DecoderKind(
        causal_lm="SmolLM3ForCausalLM",
        defaults=_LLAMA
        | {"tie_word_embeddings": True, "max_position_embeddings": 32768, "num_key_value_heads": 4}
        | {"attention_bias": False, "mlp_bias": False, "sliding_window": None, "use_sliding_window": False}
        | {"no_rope_layer_interval": 4},
        windowed=_unturned,
        typed=True,
        turned=_turned,
        thetas=(2e6, None),
    ),
    "mixtral": DecoderKind(
        causal_lm="MixtralForCausalLM",
        defaults=_LLAMA
        | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": None}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        windowed=_every,
        thetas=(1e6, None),
        experts=ExpertTerms(count="num_local_experts", inside="block_sparse_moe", gate="w1", up="w3", down="w2"),
        refused=("attention_dropout", "router_jitter_noise", "output_router_logits"),
    ),
    "qwen3_moe": DecoderKind(
        causal_lm="Qwen3MoeForCausalLM",
        defaults=_LLAMA
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "attention_bias": False}
        | {"sliding_window": 4096, "use_sliding_window": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False},
        head_norms=True,
        windowed=_every,
        experts=ExpertTerms(
            count="num_experts",
            count_too="num_local_experts",
            intermediate="moe_intermediate_size",
            normalised="norm_topk_prob",
        ),
        refused=("attention_dropout", "output_router_logits", "mlp_only_layers"),
        fixed={"decoder_sparse_step": 1},
    ),
}

# For every kind of rotary scaling the terms that it cannot do without.
ROPE_TERMS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
# Of yarn, besides these, `truncate`; each may be left out or null.
YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Of longrope: a factor for each pair of features.
LONGROPE_LISTS = ("short_factor", "long_factor")
# Heads of which only a part turns: in other decoders, not in these.
PARTIAL = "partial_rotary_factor"
FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Biases:
    """Which projections of a layer have one: queries, keys and values; the output of attention; all of the MLP."""

    qkv: bool
    out: bool
    mlp: bool


def biases(config: Mapping[str, Any]) -> Biases:
    """Return the biases of a configuration with its defaults filled in."""
    kind = DECODERS[config["model_type"]]

    def has(term: str) -> bool:
        return term in kind.defaults and bool(config[term])

    return Biases(kind.qkv_bias or has("attention_bias"), has("attention_bias"), has("mlp_bias"))


def layer_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return of every layer the tokens that a query sees, its own included; None where it sees all tokens before.

    config: with its defaults filled in.
    """
    kind, layers = DECODERS[config["model_type"]], range(config["num_hidden_layers"])
    rule, window = kind.windowed, config.get("sliding_window")
    if rule is None or window is None or not config.get("use_sliding_window", True):
        return (None,) * len(layers)
    listed = config.get("layer_types") if kind.typed else None
    return tuple(window if (listed[layer] == SLIDING if listed else rule(config, layer)) else None for layer in layers)


def layers_turned(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return of every layer whether positions turn its queries and keys; config: with its defaults filled in."""
    rule = DECODERS[config["model_type"]].turned
    return tuple(rule is None or rule(config, layer) for layer in range(config["num_hidden_layers"]))


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return tokens that a query sees in some layer, its own included; None where every layer sees all tokens before.

    config: with its defaults filled in.
    """
    return next((window for window in layer_windows(config) if window is not None), None)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary positions as one dictionary, whichever of the two spellings the configuration has.

    These are `rope_theta` with `rope_scaling`, and `rope_parameters`. What can be missing is filled in as transformers
    does: no scaling, the base of its model_type, scaling that began at max_position_embeddings. Where layers with a window
    have positions of their own, these are those of the other layers, and `local_rope_parameters` has theirs.
    """
    kind = DECODERS[config.get("model_type", "llama")]
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if FULL in given or SLIDING in given:
        given = dict(given.get(FULL) or {})
    older = given.pop("type", None)
    name = given.setdefault("rope_type", older or "default")
    if config.get("model_type") == "phi3" and name in ("su", "yarn"):  # older names, as transformers reads them
        name = given["rope_type"] = "longrope"
    given.setdefault("rope_theta", float(config.get("rope_theta") or kind.thetas[0]))
    part = given.pop(PARTIAL, None)  # null is as good as none
    part = config.get(PARTIAL) if part is None else part
    if part is not None:
        given[PARTIAL] = part
    if name in ("llama3", "yarn", "longrope"):
        outside = config.get(_ORIGINAL)  # which transformers prefers
        if outside is not None:
            given[_ORIGINAL] = outside
        given.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
    return given


def local_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary positions of layers with a window; None where they have those of the others."""
    theta = DECODERS[config.get("model_type", "llama")].thetas[1]
    if theta is None:
        return None
    given = dict((config.get("rope_parameters") or {}).get(SLIDING) or {})
    given.setdefault("rope_type", "default")
    given.setdefault("rope_theta", float(config.get("rope_local_base_freq") or theta))
    return given
