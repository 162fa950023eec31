"""A Llama-style model's configuration in Hugging Face terms: completed, checked, with rotary scaling applied."""

from numbers import Integral, Real
from typing import Any, TypeGuard

from shared_specs.app.models.decoders import (
    DECODERS,
    FULL,
    LAYER_TYPES,
    LONGROPE_LISTS,
    PARTIAL,
    ROPE_TERMS,
    SLIDING,
    YARN_NUMBERS,
    biases,
    local_rope_parameters,
    rope_parameters,
)
from shared_specs.app.options import MOST_ROPE_SCALE, InputError

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
# Of some kinds, which have a default for them.
_OWN_SIZES = (
    *("sliding_window", "num_local_experts", "num_experts_per_tok", "no_rope_layer_interval"),
    *("num_experts", "moe_intermediate_size"),
)
_NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")
_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")
_KINDS = {
    **dict.fromkeys(("hidden_act", "hidden_activation"), (str, "a name")),
    **dict.fromkeys((*_NUMBERS, *_CAPS), (Real, "a number")),
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob"),
        (bool, "true or false"),
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "a dictionary")),
}
# null is a value: as many as query heads, no window, no cap.
_NULLABLE = ("num_key_value_heads", "sliding_window", *_CAPS)


def complete_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a copy of `raw` in which every term of the decoder has its value, that of its model_type where `raw` has none.

    Rotary parameters become one dictionary, `rope_parameters`, whichever of the two spellings the file has
    (`rope_theta` + `rope_scaling`, or `rope_parameters`).

    Args:
        raw: the dictionary of a config.json.
        source: the file or folder, for messages.

    Raises:
        InputError: the architecture is none of `decoders.DECODERS`, or a term is missing, of a wrong kind or at odds with
            another one.
    """
    if not isinstance(raw, dict):
        raise InputError(
            f"finetune: --model {source}: its configuration must be a dictionary, got {type(raw).__name__}."
        )
    _check_architecture(raw, source)
    experts = DECODERS[raw["model_type"]].experts
    raw = raw if experts is None else experts.counted(raw)
    missing = [key for key in _REQUIRED if not isinstance(raw.get(key), int)]
    if missing:
        raise InputError(f"finetune: --model {source}: its configuration has no usable {', '.join(missing)}.")
    _check_terms(raw, source)
    kind = DECODERS[raw["model_type"]]
    given = {key: value for key, value in raw.items() if value is not None or key in _NULLABLE}
    config: dict[str, Any] = {**raw, **kind.defaults, **given}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = config["num_key_value_heads"] or heads
    _check_divides("hidden_size", config["hidden_size"], "num_attention_heads", heads, source)
    _check_divides("num_attention_heads", heads, "num_key_value_heads", config["num_key_value_heads"], source)
    config["head_dim"] = given.get("head_dim") or kind.defaults.get("head_dim") or config["hidden_size"] // heads
    _check_divides("head_dim", config["head_dim"], "what a rotary position turns at a time", 2, source)
    if experts is not None and config[experts.chosen] > config[experts.count]:
        raise _unusable(source, experts.chosen, f"<= {experts.count}, {config[experts.count]}", config[experts.chosen])
    _settle_layers(config, source)
    config["rope_parameters"] = _all_rope_parameters(config, source)
    for old in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
        config.pop(old, None)
    config["architectures"] = [kind.causal_lm]
    return config


def _settle_layers(config: dict[str, Any], source: str) -> None:
    """Check lists that have an entry for each layer. As in transformers' Qwen2Config, a window that is not used is none."""
    kind, layers = DECODERS[config["model_type"]], config["num_hidden_layers"]
    used = config.get("use_sliding_window", True)
    if kind.typed:
        kinds, types = LAYER_TYPES if used else (FULL,), config.get("layer_types")
        if types is not None and not (isinstance(types, list) and all(each in kinds for each in types)):
            raise _unusable(source, "layer_types", f"a list of {' and '.join(kinds)}", types)
        _check_entries("layer_types", types, layers, source)
    if kind.turned is not None:
        listed = config.get("no_rope_layers")
        if listed is not None and not (isinstance(listed, list) and all(each in (0, 1) for each in listed)):
            raise _unusable(source, "no_rope_layers", "a list of 0 and 1", listed)
        _check_entries("no_rope_layers", listed, layers, source)
    if not used:
        config["sliding_window"] = None


def _check_entries(name: str, entries: list[Any] | None, layers: int, source: str) -> None:
    if entries and len(entries) < layers:
        raise _unusable(source, name, f"of {layers} entries, one a layer", f"{len(entries)} of them")


def _check_architecture(raw: dict[str, Any], source: str) -> None:
    name = raw.get("model_type")
    kind = DECODERS.get(name) if isinstance(name, str) else None
    architectures = raw.get("architectures") or ([kind.causal_lm] if kind else [])
    if kind is None or kind.causal_lm not in architectures:
        *others, last = DECODERS
        raise InputError(
            f"finetune: --model must be a Llama-style causal language model (model_type {', '.join(others)} or {last}), "
            f"got {name if kind is None else architectures[0]} ({source}). Choose another model."
        )
    if raw.get("quantization_config"):
        raise InputError(f"finetune: --model {source} is quantised. Use its unquantised folder or a GGUF file.")
    for term in kind.refused:
        if raw.get(term):
            off = "false" if raw[term] is True else [] if isinstance(raw[term], list) else 0
            raise InputError(
                f"finetune: --model {source} has {term} {raw[term]}, which neither half trains with. "
                f"Set it to {off} in config.json."
            )

    for term, only in kind.fixed.items():
        if raw.get(term, only) not in (only, None):
            raise _unusable(source, term, f"{only}, the value that both halves train with", raw[term])


def _check_terms(raw: dict[str, Any], source: str) -> None:
    """The terms that are there have values of their kind; null is as good as none."""
    own = DECODERS[raw["model_type"]].defaults
    for key in (*_SIZES, *(term for term in _OWN_SIZES if term in own)):
        value = raw.get(key)
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise _unusable(source, key, "a whole number >= 1", value)
    for key, (kind, words) in _KINDS.items():
        value = raw.get(key)
        if value is not None and not (_is_number(value) if kind is Real else isinstance(value, kind)):
            raise _unusable(source, key, words, value)
    for key in (*_CAPS, "query_pre_attn_scalar"):
        if key in own and raw.get(key) is not None and not raw[key] > 0:
            raise _unusable(source, key, "a number > 0", raw[key])
    layers = raw.get("max_window_layers")
    if layers is not None and (not isinstance(layers, Integral) or isinstance(layers, bool)):
        raise _unusable(source, "max_window_layers", "a whole number", layers)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_divides(name: str, value: int, by: str, divisor: int, source: str) -> None:
    if value % divisor:
        raise _unusable(source, name, f"a multiple of {by}, {divisor}", value)


def _unusable(source: str, name: str, rule: str, value: object) -> InputError:
    return InputError(f"finetune: --model {source}: {name} must be {rule}, got {value!r}. Mend its configuration.")


def _all_rope_parameters(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the rotary positions, or, as transformers has them, those of both types of layer where they differ."""
    given = _checked_rope(rope_parameters(config), config, source)
    local = local_rope_parameters(config)
    return given if local is None else {FULL: given, SLIDING: _checked_rope(local, config, source)}


def _checked_rope(given: dict[str, Any], config: dict[str, Any], source: str) -> dict[str, Any]:
    kind = given["rope_type"]
    if not isinstance(kind, str) or kind not in ROPE_TERMS:
        raise _unusable(source, "rope_type of its rotary positions", f"one of {', '.join(ROPE_TERMS)}", kind)
    for name in ("rope_theta", *ROPE_TERMS[kind]):
        value = given.get(name)
        if not _is_number(value) or not value > 0:
            raise _unusable(source, f"{name} of its rotary positions", "a number > 0", value)
    for name in YARN_NUMBERS if kind == "yarn" else ():
        if given.get(name) is not None and not _is_number(given[name]):
            raise _unusable(source, f"{name} of its rotary positions", "a number", given[name])
    for name in LONGROPE_LISTS if kind == "longrope" else ():
        value, pairs = given.get(name), config["head_dim"] // 2
        if not isinstance(value, list) or len(value) != pairs or not all(_is_number(a) and a > 0 for a in value):
            raise _unusable(source, f"{name} of its rotary positions", f"a list of {pairs} numbers > 0", value)
    if given.get(PARTIAL, 1) != 1:
        raise _unusable(source, f"{PARTIAL} of its rotary positions", "1 or left out", given[PARTIAL])
    return given


def scale_positions(config: dict[str, Any], factor: float | None) -> dict[str, Any]:
    """Return the configuration with linear rotary scaling by `factor`, which replaces the model's own; None leaves it.

    Raises:
        InputError: the model scales its positions in another way already.
    """
    if factor is None:
        return config
    rope = rope_parameters(config)
    if rope["rope_type"] not in ("default", "linear"):
        raise InputError(
            f"finetune: --rope-scale must be left out for a model with rope_type {rope['rope_type']}, got {factor:g}. "
            "Linear scaling would replace the model's own."
        )
    scaled = {"rope_type": "linear", "rope_theta": rope["rope_theta"], "factor": float(factor)}
    if FULL in config["rope_parameters"]:  # a window reaches no further than before
        scaled = config["rope_parameters"] | {FULL: scaled}
    return config | {"rope_parameters": scaled}


def check_context(config: dict[str, Any], tokens: int) -> None:
    """Refuse a context longer than the positions the model has, scaling included.

    Raises:
        InputError: the context, in tokens, is too long.
    """
    positions, rope = config["max_position_embeddings"], rope_parameters(config)
    reach = positions
    if rope["rope_type"] == "linear":
        reach = positions * rope["factor"]
    elif rope["rope_type"] == "yarn":  # published with the positions before scaling, or with those after it
        reach = max(positions, rope["original_max_position_embeddings"] * rope["factor"])
    if tokens > reach:
        scale = -(-tokens // positions)
        hint = f"Pass --rope-scale {scale} to stretch its positions."
        if scale > MOST_ROPE_SCALE:
            hint = f"--rope-scale stretches them {MOST_ROPE_SCALE} times at most."
        if rope["rope_type"] not in ("default", "linear"):
            hint = "They are scaled already."
        raise InputError(
            f"finetune: --tokens must be <= {int(reach)}, the positions of this model, got {tokens}. {hint}"
        )


def saved_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json: the configuration, plus the older spelling of the rotary parameters.

    A reader that knows only `rope_theta` and `rope_scaling` would otherwise compute with wrong positions silently.
    """
    rope, local = rope_parameters(config), local_rope_parameters(config)
    saved = config | {"dtype": "float32", "rope_theta": rope["rope_theta"]}
    if local is not None:
        saved["rope_local_base_freq"] = local["rope_theta"]
    if rope["rope_type"] != "default":
        saved["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    saved.pop("torch_dtype", None)
    return saved


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model, Hugging Face names, [out, in]; no head where it is tied."""
    kind, hidden, head = DECODERS[config["model_type"]], config["hidden_size"], config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, (rows, columns, biased) in (_attention_linears(config) | _mlp_linears(config)).items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{start}{name}.bias"] = (rows,)
        shapes |= {f"{start}{norm}.weight": (hidden,) for norm in kind.norms}
        if kind.head_norms:
            shapes |= {f"{start}self_attn.{name}_norm.weight": (head,) for name in "qk"}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _attention_linears(config: dict[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """Return outputs, inputs and whether there is a bias, by name."""
    kind, hidden, bias = DECODERS[config["model_type"]], config["hidden_size"], biases(config)
    query, key = (config[f"num_{heads}_heads"] * config["head_dim"] for heads in ("attention", "key_value"))
    rows = (query + 2 * key,) if len(kind.qkv) == 1 else (query, key, key)
    linears = {f"self_attn.{name}": (size, hidden, bias.qkv) for name, size in zip(kind.qkv, rows, strict=True)}
    return linears | {"self_attn.o_proj": (hidden, query, bias.out)}


def _mlp_linears(config: dict[str, Any]) -> dict[str, tuple[int, int, bool]]:
    kind, hidden, inner = DECODERS[config["model_type"]], config["hidden_size"], config["intermediate_size"]
    if kind.experts:
        terms = kind.experts
        moe, count, inner = terms.inside, config[terms.count], config[terms.intermediate]
        sizes = dict.fromkeys((terms.gate, terms.up), (inner, hidden, False)) | {terms.down: (hidden, inner, False)}
        each = {f"{moe}.experts.{n}.{name}": size for n in range(count) for name, size in sizes.items()}
        return {f"{moe}.gate": (count, hidden, False)} | each
    bias, rows = biases(config).mlp, 2 * inner // len(kind.gate_up)
    linears = {f"mlp.{name}": (rows, hidden, bias) for name in kind.gate_up}
    return linears | {"mlp.down_proj": (hidden, inner, bias)}
