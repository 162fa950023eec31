"""The kinds of Hugging Face decoder that the library trains, and what transformers takes for a term that is missing.

All of them are one decoder: norms in front, rotary positions, grouped heads, a gated MLP. They differ in which of their
projections have biases and in whether attention has a window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """One `model_type`.

    Attributes:
        causal_lm: the class in transformers.
        defaults: values of the terms that a configuration may leave out.
    """

    causal_lm: str
    defaults: Mapping[str, Any]


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
# Those of transformers' configuration classes, which a test compares.
DECODERS: Mapping[str, DecoderKind] = {
    "llama": DecoderKind(
        causal_lm="LlamaForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 2048, "num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": DecoderKind(
        causal_lm="MistralForCausalLM",
        defaults=_COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": DecoderKind(
        causal_lm="Qwen2ForCausalLM",
        defaults=_COMMON
        | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096}
        | {"use_sliding_window": False, "max_window_layers": 28},
    ),
}

# For every kind of rotary scaling the terms that it cannot do without.
ROPE_TERMS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Of yarn, besides these, `truncate`; each may be left out or null.
YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
# Heads of which only a part turns: in other decoders, not in these.
PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_THETA = 10000.0


@dataclass(frozen=True)
class Biases:
    """Which projections of a layer have one: queries, keys and values; the output of attention; all of the MLP."""

    qkv: bool
    out: bool
    mlp: bool


def biases(config: Mapping[str, Any]) -> Biases:
    """Of a configuration with its defaults filled in."""
    if config["model_type"] == "llama":
        return Biases(bool(config["attention_bias"]), bool(config["attention_bias"]), bool(config["mlp_bias"]))
    return Biases(config["model_type"] == "qwen2", False, False)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return tokens that a query sees in some layer, its own included; None where every layer sees all tokens before.

    config: with its defaults filled in.
    """
    if config["model_type"] == "mistral":
        return config["sliding_window"]
    if config["model_type"] != "qwen2" or not config["use_sliding_window"]:
        return None
    kinds = config.get("layer_types")
    some = "sliding_attention" in kinds if kinds else config["max_window_layers"] < config["num_hidden_layers"]
    return config["sliding_window"] if some else None


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary positions as one dictionary, whichever of the two spellings the configuration has.

    These are `rope_theta` with `rope_scaling`, and `rope_parameters`. What can be missing is filled in as transformers
    does: no scaling, a base of 10000, scaling that began at max_position_embeddings.
    """
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    older = given.pop("type", None)
    kind = given.setdefault("rope_type", older or "default")
    given.setdefault("rope_theta", float(config.get("rope_theta") or _THETA))
    part = given.pop(PARTIAL, None)  # null is as good as none
    part = config.get(PARTIAL) if part is None else part
    if part is not None:
        given[PARTIAL] = part
    if kind in ("llama3", "yarn"):
        outside = config.get(_ORIGINAL)  # which transformers prefers
        if outside is not None:
            given[_ORIGINAL] = outside
        given.setdefault(_ORIGINAL, config.get("max_position_embeddings"))
    return given
