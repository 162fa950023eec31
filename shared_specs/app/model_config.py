"""A Llama-style model's configuration in Hugging Face terms: completed, checked, with rotary scaling applied."""

from numbers import Integral, Real
from typing import Any

from shared_specs.cli import InputError

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_KINDS = {
    **{"hidden_act": (str, "a name"), "rms_norm_eps": (Real, "a number"), "rope_theta": (Real, "a number")},
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), (bool, "true or false")),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, "a dictionary")),
}
_DEFAULT_THETA = 10000.0


def complete_config(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """A copy of `raw` in which every term of a Llama decoder has its value.

    Rotary parameters become one dictionary, `rope_parameters`, whichever of the two spellings the file has
    (`rope_theta` + `rope_scaling`, or `rope_parameters`).

    Args:
        raw: the dictionary of a config.json.
        source: the file or folder, for messages.

    Raises:
        InputError: the architecture is not Llama's, or a term is missing, of a wrong kind or at odds with another one.
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
    config = _DEFAULTS | {key: value for key, value in raw.items() if value is not None or key not in _DEFAULTS}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = raw.get("num_key_value_heads") or heads
    _check_divides("hidden_size", config["hidden_size"], "num_attention_heads", heads, source)
    _check_divides("num_attention_heads", heads, "num_key_value_heads", config["num_key_value_heads"], source)
    config["head_dim"] = raw.get("head_dim") or config["hidden_size"] // heads
    _check_divides("head_dim", config["head_dim"], "what a rotary position turns at a time", 2, source)
    config["rope_parameters"] = _rope_parameters(config, source)
    for old in ("rope_scaling", "rope_theta"):
        config.pop(old, None)
    config["architectures"] = ["LlamaForCausalLM"]
    return config


def _check_architecture(raw: dict[str, Any], source: str) -> None:
    architectures = raw.get("architectures") or ["LlamaForCausalLM"]
    if raw.get("model_type") != "llama" or "LlamaForCausalLM" not in architectures:
        name = raw.get("model_type") if raw.get("model_type") != "llama" else architectures[0]
        raise InputError(
            f"finetune: --model must be a Llama-style causal language model (model_type llama), got {name} "
            f"({source}). Choose another model."
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
    for key in _SIZES:
        value = raw.get(key)
        if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or value < 1):
            raise _unusable(source, key, "a whole number >= 1", value)
    for key, (kind, words) in _KINDS.items():
        value = raw.get(key)
        if value is not None and not (_is_number(value) if kind is Real else isinstance(value, kind)):
            raise _unusable(source, key, words, value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_divides(name: str, value: int, by: str, divisor: int, source: str) -> None:
    if value % divisor:
        raise _unusable(source, name, f"a multiple of {by}, {divisor}", value)


def _unusable(source: str, name: str, rule: str, value: object) -> InputError:
    return InputError(f"finetune: --model {source}: {name} must be {rule}, got {value!r}. Mend its configuration.")


def _rope_parameters(config: dict[str, Any], source: str) -> dict[str, Any]:
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = given.pop("type", None)
    given.setdefault("rope_type", kind or "default")
    given.setdefault("rope_theta", float(config.get("rope_theta") or _DEFAULT_THETA))
    for name in ("rope_theta", *(("factor",) if given["rope_type"] == "linear" else ())):
        value = given.get(name)
        if not _is_number(value) or not value > 0:
            raise _unusable(source, f"{name} of its rotary positions", "a number > 0", value)
    return given


def scale_positions(config: dict[str, Any], factor: float | None) -> dict[str, Any]:
    """The configuration with linear rotary scaling by `factor`, which replaces the model's own; None leaves it.

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
    """Refuse a context longer than the positions the model has, scaling included."""
    positions = config["max_position_embeddings"]
    factor = config["rope_parameters"].get("factor", 1.0) if config["rope_parameters"]["rope_type"] == "linear" else 1.0
    if tokens > positions * factor:
        raise InputError(
            f"finetune: --tokens must be <= {int(positions * factor)}, the positions of this model, got {tokens}. "
            f"Pass --rope-scale {-(-tokens // positions)} to stretch its positions."
        )


def saved_config(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says: the configuration, plus the older spelling of the rotary parameters.

    A reader that knows only `rope_theta` and `rope_scaling` would otherwise compute with wrong positions silently.
    """
    rope = config["rope_parameters"]
    saved = config | {"model_type": "llama", "dtype": "float32", "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        saved["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    saved.pop("torch_dtype", None)
    return saved


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of the model, Hugging Face names, [out, in]; no head where it is tied."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    linears = {
        "self_attn.q_proj": (query, hidden, config["attention_bias"]),
        "self_attn.k_proj": (key, hidden, config["attention_bias"]),
        "self_attn.v_proj": (key, hidden, config["attention_bias"]),
        "self_attn.o_proj": (hidden, query, config["attention_bias"]),
        "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{start}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{start}{name}.bias"] = (rows,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{start}{norm}.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes
