"""What the decoder needs to know of a Hugging Face Llama configuration, and the refusal of what it cannot do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared_specs.config import HF_ACTIVATIONS, Activation
from shared_specs.errors import SpecError, UnsupportedError, error_text

_HERE = "LlamaConfig.from_hf"
# For every kind of scaling its terms by their Hugging Face name.
_ROPE_TERMS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_positions",
    },
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base `theta` and the scaling.

    Attributes:
        kind: "default" (none), "linear" (every frequency divided by `factor`) or "llama3" (long wavelengths divided
            by `factor`, short ones kept, a linear ramp between the two).
        low_freq_factor, high_freq_factor, original_positions: llama3 only; the ramp lies between the wavelengths
            original_positions / high_freq_factor and original_positions / low_freq_factor, in tokens.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a Llama decoder. Field names are those of Hugging Face, apart from `rope` and `activation`."""

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
    mlp_bias: bool
    rope: Rope

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """The configuration of a Hugging Face `config.json`, of transformers 5 (`rope_parameters`) or older.

        Raises:
            SpecError: a size is missing, or the heads do not share the keys evenly.
            UnsupportedError: an activation or a kind of rope scaling that this decoder does not have.
        """
        heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        self = cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden_size // heads,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=_activation(config.get("hidden_act", "silu")),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
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
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` as older configurations say it."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_TERMS:
        advice = "Convert the model, or use the PyTorch half."
        raise UnsupportedError(
            error_text(_HERE, "rope_type", f"one of {', '.join(_ROPE_TERMS)}", repr(kind), advice=advice)
        )
    if kind == "default":
        return Rope(theta=theta)
    missing = [name for name in _ROPE_TERMS[kind] if name not in given]
    if missing:
        rule = f"complete for rope_type {kind}, with {' and '.join(missing)}"
        raise SpecError(error_text(_HERE, "rope_parameters", rule, given))
    terms = {ours: given[theirs] for theirs, ours in _ROPE_TERMS[kind].items()}
    return Rope(theta=theta, kind=kind, **terms)
