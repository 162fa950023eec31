"""What the decoder needs to know of a Hugging Face configuration, and the refusal of what it cannot do."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared_specs.app.models.decoders import DECODERS, PARTIAL, ROPE_TERMS, biases, rope_parameters, sliding_window
from shared_specs.config import HF_ACTIVATIONS, Activation
from shared_specs.errors import SpecError, UnsupportedError, error_text

_HERE = "LlamaConfig.from_hf"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base `theta` and the scaling.

    Attributes:
        kind: "default" (none), "linear" (every frequency divided by `factor`), "llama3" or "yarn" (long wavelengths
            divided by `factor`, short ones kept, a linear ramp between the two).
        original_positions: of the model before it was scaled, llama3 and yarn only.
        low_freq_factor, high_freq_factor: llama3 only; the ramp is linear in the turns that a pair makes over the
            original positions, and lies between these two numbers of them.
        beta_slow, beta_fast, truncate: yarn only; the ramp is linear in the number of the pair, and lies between those
            that make so many turns, which with `truncate` are rounded away from each other.
        attention_factor: yarn only; what cosines and sines are multiplied with.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a Llama decoder, or of a Mistral or Qwen2 one, which differ in their biases and windows.

    Field names are those of Hugging Face, apart from `rope` and `activation`.

    Attributes:
        attention_bias: of the projections of queries, keys and values. attention_out_bias: of the one behind attention.
        sliding_window: tokens that a query of the model sees, its own included; None for all before it. The decoder
            has no windows, so a sequence may be no longer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    rope: Rope

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Return the configuration of a Hugging Face `config.json`, of transformers 5 (`rope_parameters`) or older.

        Args:
            config: its `model_type` is llama, mistral or qwen2, or missing, which is llama; other terms that are missing
                have transformers' defaults of that model_type.
        Raises:
            SpecError: a size is missing, or the heads do not share the keys evenly.
            UnsupportedError: a model_type, an activation or a kind of rope scaling that this decoder does not have.
        """
        model_type = config.get("model_type", "llama")
        if model_type not in DECODERS:
            raise UnsupportedError(error_text(_HERE, "model_type", f"one of {', '.join(DECODERS)}", repr(model_type)))
        config = {"model_type": model_type, **DECODERS[model_type].defaults, **config}
        has = biases(config)
        heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        self = cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config["num_key_value_heads"] or heads,
            head_dim=config.get("head_dim") or hidden_size // heads,
            rms_norm_eps=float(config["rms_norm_eps"]),
            activation=_activation(config["hidden_act"]),
            tie_word_embeddings=bool(config["tie_word_embeddings"]),
            attention_bias=has.qkv,
            attention_out_bias=has.out,
            mlp_bias=has.mlp,
            sliding_window=sliding_window(config),
            rope=_rope(config),
        )
        if heads % self.num_key_value_heads:
            rule = f"a divisor of num_attention_heads={heads}"
            raise SpecError(error_text(_HERE, "num_key_value_heads", rule, self.num_key_value_heads))
        if self.head_dim % 2:
            raise SpecError(error_text(_HERE, "head_dim", "even, because rotary positions turn pairs", self.head_dim))
        return self


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise SpecError(error_text(_HERE, name, "an integer >= 1", value, advice="Complete the configuration."))
    return value


def _activation(name: str) -> Activation:
    if name not in HF_ACTIVATIONS:
        known = ", ".join(HF_ACTIVATIONS)
        raise UnsupportedError(error_text(_HERE, "hidden_act", f"one of {known}", repr(name)))
    return HF_ACTIVATIONS[name]


def _rope(config: Mapping[str, Any]) -> Rope:
    given = rope_parameters(config)
    kind, theta = given["rope_type"], float(given["rope_theta"])
    if kind not in ROPE_TERMS:
        advice = "Convert the model, or use the PyTorch half."
        raise UnsupportedError(
            error_text(_HERE, "rope_type", f"one of {', '.join(ROPE_TERMS)}", repr(kind), advice=advice)
        )
    if given.get(PARTIAL, 1) != 1:
        raise UnsupportedError(error_text(_HERE, PARTIAL, "1 or left out", given[PARTIAL]))
    missing = [name for name in ROPE_TERMS[kind] if given.get(name) is None]
    if missing:
        rule = f"complete for rope_type {kind}, with {' and '.join(missing)}"
        raise SpecError(error_text(_HERE, "rope_parameters", rule, given))
    theirs = {"original_max_position_embeddings": "original_positions"}
    terms = {theirs.get(name, name): given[name] for name in ROPE_TERMS[kind]}
    return Rope(theta=theta, kind=kind, **terms, **(_yarn(given) if kind == "yarn" else {}))


def _yarn(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of yarn that may be left out, as transformers fills them in."""
    found: dict[str, Any] = {name: given[name] for name in ("beta_fast", "beta_slow") if given.get(name)}
    attention, factor = given.get("attention_factor"), given["factor"]
    if attention is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1)
    return found | {"truncate": bool(given.get("truncate", True)), "attention_factor": float(attention)}


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
