"""A Llama-style model's configuration in Hugging Face terms: completed, checked, with rotary scaling applied."""

from numbers import Integral, Real
from typing import Any, TypeGuard

from shared_specs.app.models.decoders import (
    DECODERS,
    PARTIAL,
    ROPE_TERMS,
    YARN_NUMBERS,
    biases,
    rope_parameters,
    sliding_window,
)
from shared_specs.app.options import MOST_ROPE_SCALE, InputError

_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_KINDS = {
    **{"hidden_act": (str, "a name"), "rms_norm_eps": (Real, "a number"), "rope_theta": (Real, "a number")},
    **dict.fromkeys(
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), (bool, "true or false")
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "a dictionary")),
}
_NULLABLE = ("num_key_value_heads", "sliding_window")  # null is a value: as many as query heads, no window


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
    config["head_dim"] = raw.get("head_dim") or config["hidden_size"] // heads
    _check_divides("head_dim", config["head_dim"], "what a rotary position turns at a time", 2, source)
    config["rope_parameters"] = _rope_parameters(config, source)
    for old in ("rope_scaling", "rope_theta"):
        config.pop(old, None)
    if config["model_type"] == "qwen2":
        _settle_window(config, source)
    config["architectures"] = [kind.causal_lm]
    return config


def _settle_window(config: dict[str, Any], source: str) -> None:
    """As transformers' Qwen2Config: a window that is not used is none."""
    kinds = ("full_attention", "sliding_attention") if config["use_sliding_window"] else ("full_attention",)
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(each in kinds for each in types)):
        raise _unusable(source, "layer_types", f"a list of {' and '.join(kinds)}", types)
    if not config["use_sliding_window"]:
        config["sliding_window"] = None


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
    if raw.get("attention_dropout"):
        raise InputError(
            f"finetune: --model {source} has attention_dropout {raw['attention_dropout']}, which neither half trains "
            "with. Set it to 0 in config.json."
        )


def _check_terms(raw: dict[str, Any], source: str) -> None:
    """The terms that are there have values of their kind; null is as good as none."""
    own = DECODERS[raw["model_type"]].defaults
    for key in (*_SIZES, *(("sliding_window",) if "sliding_window" in own else ())):
        value = raw.get(key)
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise _unusable(source, key, "a whole number >= 1", value)
    for key, (kind, words) in _KINDS.items():
        value = raw.get(key)
        if value is not None and not (_is_number(value) if kind is Real else isinstance(value, kind)):
            raise _unusable(source, key, words, value)
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


def _rope_parameters(config: dict[str, Any], source: str) -> dict[str, Any]:
    given = rope_parameters(config)
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
    rope = config["rope_parameters"]
    if rope["rope_type"] not in ("default", "linear"):
        raise InputError(
            f"finetune: --rope-scale must be left out for a model with rope_type {rope['rope_type']}, got {factor:g}. "
            "Linear scaling would replace the model's own."
        )
    scaled = {"rope_type": "linear", "rope_theta": rope["rope_theta"], "factor": float(factor)}
    return config | {"rope_parameters": scaled}


def check_context(config: dict[str, Any], tokens: int) -> None:
    """Refuse a context longer than the positions the model has, scaling included, or than the window of its attention.

    Raises:
        InputError: the context, in tokens, is too long.
    """
    positions, rope = config["max_position_embeddings"], config["rope_parameters"]
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
    window = sliding_window(config)
    if window is not None and tokens > window:
        raise InputError(
            f"finetune: --tokens must be <= {window}, the sliding window of this model's attention, got {tokens}. "
            "Longer contexts would need attention with a window, which finetune does not train."
        )


def saved_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json: the configuration, plus the older spelling of the rotary parameters.

    A reader that knows only `rope_theta` and `rope_scaling` would otherwise compute with wrong positions silently.
    """
    rope = config["rope_parameters"]
    saved = config | {"dtype": "float32", "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        saved["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    saved.pop("torch_dtype", None)
    return saved


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model, Hugging Face names, [out, in]; no head where it is tied."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    bias = biases(config)
    linears = {
        "self_attn.q_proj": (query, hidden, bias.qkv),
        "self_attn.k_proj": (key, hidden, bias.qkv),
        "self_attn.v_proj": (key, hidden, bias.qkv),
        "self_attn.o_proj": (hidden, query, bias.out),
        "mlp.gate_proj": (inner, hidden, bias.mlp),
        "mlp.up_proj": (inner, hidden, bias.mlp),
        "mlp.down_proj": (hidden, inner, bias.mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, (rows, columns, biased) in linears.items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if biased:
                shapes[f"{start}{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{start}{norm}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
