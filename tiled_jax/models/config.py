"""What the decoder needs to know of a Hugging Face configuration, and the refusal of what it cannot do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shared_specs.app.models.decoders import (
    DECODERS,
    LONGROPE_LISTS,
    PARTIAL,
    ROPE_TERMS,
    ExpertTerms,
    biases,
    layer_windows,
    layers_turned,
    local_rope_parameters,
    rope_parameters,
    sliding_window,
)
from shared_specs.config import HF_ACTIVATIONS, Activation
from shared_specs.errors import SpecError, UnsupportedError, error_text

_HERE = "LlamaConfig.from_hf"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base `theta` and the scaling.

    Attributes:
        kind: "default" (none), "linear" (every frequency divided by `factor`), "llama3" or "yarn" (long wavelengths
            divided by `factor`, short ones kept, a linear ramp between the two), or "longrope" (every pair by a factor of
            its own, of `long_factor` where a sequence has positions beyond the original ones, else of `short_factor`).
        original_positions: of the model before it was scaled; llama3, yarn and longrope.
        low_freq_factor, high_freq_factor: llama3 only; the ramp is linear in the turns that a pair makes over the
            original positions, and lies between these two numbers of them.
        beta_slow, beta_fast, truncate: yarn only; the ramp is linear in the number of the pair, and lies between those
            that make so many turns, which with `truncate` are rounded away from each other.
        attention_factor: yarn and longrope; what cosines and sines are multiplied with.
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
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """In what the attention of one layer may differ from that of the next.

    Attributes:
        window: tokens that a query sees, its own included; None for all before it.
        rope: None where positions turn nothing.
    """

    window: int | None = None
    rope: Rope | None


@dataclass(frozen=True, kw_only=True)
class Experts:
    """`count` MLPs, of which a router picks the `chosen` best of every token."""

    count: int
    chosen: int
    normalised: bool = True  # the weights of a token's experts add up to one


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a decoder: Llama's, and those of every other family of shared_specs.app.models.decoders.

    Field names are those of Hugging Face, apart from `rope`, `activation` and those with a default.

    Attributes:
        attention_bias: of the projections of queries, keys and values. attention_out_bias: of the one behind attention.
        sliding_window: tokens that a query of some layer sees, its own included; None for all before it in every layer.
        rope: of layers without a window.
        layers: of every layer its kind; empty where all have `sliding_window` and `rope`.
        fused: q, k and v are one parameter, and so are gate and up.
        head_norms: q and k are normalised before they turn, each head by itself.
        branch_norms: so is what attention and the MLP return, before it is added.
        norm_offset: what is added to the scales of norms.
        embedding_scale: rows of the embedding table are multiplied by it.
        attention_scale: so are scores; None is head_dim**-0.5.
        attention_softcap, logit_softcap: c tanh(a / c) replaces a score, or a logit; None: as it is.
        experts: None for one MLP.
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
    layers: tuple[LayerKind, ...] = ()
    fused: bool = False
    head_norms: bool = False
    branch_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Return the kinds of layer that there are, each once."""
        return tuple(dict.fromkeys(self.layers)) or (LayerKind(window=self.sliding_window, rope=self.rope),)

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Return of every layer which of `kinds` it is of."""
        return tuple(map(self.kinds.index, self.layers)) or (0,) * self.num_hidden_layers

    def windows(self, tokens: int) -> tuple[int | None, ...]:
        """Return the window of every one of `kinds`, None where it holds a sequence of so many tokens."""
        return tuple(None if k.window is None or k.window >= tokens else k.window for k in self.kinds)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Return the configuration of a Hugging Face `config.json`, of transformers 5 (`rope_parameters`) or older.

        Args:
            config: its `model_type` is one of shared_specs.app.models.decoders.DECODERS, or missing, which is llama; other
                terms that are missing have transformers' defaults of that model_type.
        Raises:
            SpecError: a size is missing, or the heads do not share the keys evenly.
            UnsupportedError: a model_type, an activation or a kind of rope scaling that this decoder does not have, dropout,
                or a loss of the router.
        """
        model_type = config.get("model_type", "llama")
        if model_type not in DECODERS:
            raise UnsupportedError(error_text(_HERE, "model_type", f"one of {', '.join(DECODERS)}", repr(model_type)))
        kind = DECODERS[model_type]
        config = config if kind.experts is None else kind.experts.counted(config)
        config = {"model_type": model_type, **kind.defaults, **config}
        for term in kind.refused:
            if config.get(term):
                raise UnsupportedError(error_text(_HERE, term, "false, 0 or left out", config[term]))
        for term, only in kind.fixed.items():
            if config.get(term, only) not in (only, None):
                raise UnsupportedError(error_text(_HERE, term, f"{only} or left out", config[term]))
        has = biases(config)
        heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        self = cls(
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, kind.experts.intermediate if kind.experts else "intermediate_size"),
            num_hidden_layers=_size(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config["num_key_value_heads"] or heads,
            head_dim=config.get("head_dim") or hidden_size // heads,
            rms_norm_eps=float(config["rms_norm_eps"]),
            activation=_activation(kind.activation, config[kind.activation]),
            tie_word_embeddings=bool(config["tie_word_embeddings"]),
            attention_bias=has.qkv,
            attention_out_bias=has.out,
            mlp_bias=has.mlp,
            sliding_window=sliding_window(config),
            rope=_rope(config, rope_parameters(config)),
            layers=_layers(config),
            fused=len(kind.qkv) == 1,
            head_norms=kind.head_norms,
            branch_norms=kind.branch_norms,
            norm_offset=kind.norm_offset,
            embedding_scale=hidden_size**0.5 if kind.scaled_embedding else 1.0,
            attention_scale=_of(kind.defaults, config, "query_pre_attn_scalar", lambda a: a**-0.5),
            attention_softcap=_of(kind.defaults, config, "attn_logit_softcapping", float),
            logit_softcap=_of(kind.defaults, config, "final_logit_softcapping", float),
            experts=None if kind.experts is None else _experts(config, kind.experts),
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


def _of(
    defaults: Mapping[str, Any], config: Mapping[str, Any], name: str, then: Callable[[float], float]
) -> float | None:
    """Return a term that kinds of decoder without a default for it do not read."""
    return None if name not in defaults or config[name] is None else then(config[name])


def _activation(term: str, name: str) -> Activation:
    if name not in HF_ACTIVATIONS:
        known = ", ".join(HF_ACTIVATIONS)
        raise UnsupportedError(error_text(_HERE, term, f"one of {known}", repr(name)))
    return HF_ACTIVATIONS[name]


def _experts(config: Mapping[str, Any], terms: ExpertTerms) -> Experts:
    found = Experts(
        count=_size(config, terms.count),
        chosen=_size(config, terms.chosen),
        normalised=terms.normalised is None or bool(config[terms.normalised]),
    )
    if found.chosen > found.count:
        raise SpecError(error_text(_HERE, terms.chosen, f"<= {terms.count}={found.count}", found.chosen))
    return found


def _layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    rope, local = _rope(config, rope_parameters(config)), local_rope_parameters(config)
    of_window = rope if local is None else _rope(config, local)
    pairs = zip(layer_windows(config), layers_turned(config), strict=True)
    return tuple(
        LayerKind(window=window, rope=(rope if window is None else of_window) if turned else None)
        for window, turned in pairs
    )


def _rope(config: Mapping[str, Any], given: Mapping[str, Any]) -> Rope:
    kind, theta = given["rope_type"], float(given["rope_theta"])
    if kind not in ROPE_TERMS:
        advice = "Convert the model, or use the PyTorch half."
        raise UnsupportedError(
            error_text(_HERE, "rope_type", f"one of {', '.join(ROPE_TERMS)}", repr(kind), advice=advice)
        )
    if given.get(PARTIAL, 1) != 1:
        raise UnsupportedError(error_text(_HERE, PARTIAL, "1 or left out", given[PARTIAL]))
    needed = (*ROPE_TERMS[kind], *(LONGROPE_LISTS if kind == "longrope" else ()))
    missing = [name for name in needed if given.get(name) is None]
    if missing:
        rule = f"complete for rope_type {kind}, with {' and '.join(missing)}"
        raise SpecError(error_text(_HERE, "rope_parameters", rule, given))
    theirs = {"original_max_position_embeddings": "original_positions"}
    terms = {theirs.get(name, name): given[name] for name in ROPE_TERMS[kind]}
    more = {"yarn": _yarn, "longrope": partial(_longrope, config)}
    return Rope(theta=theta, kind=kind, **terms, **(more[kind](given) if kind in more else {}))


def _longrope(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of the pairs, and that of attention as transformers takes it from how far positions are stretched."""
    original = given["original_max_position_embeddings"]
    stretched = given.get("factor") or config["max_position_embeddings"] / original
    attention = given.get("attention_factor")
    if attention is None:
        attention = 1.0 if stretched <= 1 else math.sqrt(1 + math.log(stretched) / math.log(original))
    pairs = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
    for name in LONGROPE_LISTS:
        if len(given[name]) != pairs:
            raise SpecError(error_text(_HERE, name, f"of {pairs} numbers, one a pair of a head", len(given[name])))
    factors = {name: tuple(map(float, given[name])) for name in LONGROPE_LISTS}
    return {"attention_factor": float(attention), **factors}


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
