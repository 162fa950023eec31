"""The sizes of a model of transformers whose family has no formulas of its own, read from its layers.

What `scope="block"` costs follows from a layer's heads, its MLP and its parameters, whatever else is in it. So any model whose
layers all run as blocks can be planned with that scope; layers of other models are measured. Sequences are not shared among
ranks and layers are not split.
"""

from typing import Any

import torch
from torch import nn

from shared_specs.app.option_fields import InputError
from shared_specs.app.plan.decoder import FAMILIES, Decoder
from tiled_torch.core.partitioned import whole_shape
from tiled_torch.models.attention import WINDOWED_TYPES
from tiled_torch.models.block.families import BlockFamily, said_of
from tiled_torch.models.block.known import attention_of, family_of_block, has_experts, is_block, reason_more
from tiled_torch.models.block.layer import TiledBlock
from tiled_torch.models.block.parts import is_norm
from tiled_torch.models.experts.blocks import shared_that_is_added
from tiled_torch.models.experts.forms import experts_form_of
from tiled_torch.plan.measured import MeasuredLayers, measured_layers
from tiled_torch.plan.twin import table_of
from tiled_torch.plan.whole import whole_decoder
from tiled_torch.plans.any_model import structural_plan

_ADVICE = "Or pass a loss_fn that calls the model with all that it needs."
_CHOSEN = ("top_k", "num_experts_per_tok")  # experts of a token, as routers and mixtures call them


def decoder_by_structure(model: Any, what: str, tokens: int | None = None) -> Decoder:
    """Return the sizes of a model by its layers, still without its parameters; or with them, and its step measured, where its
    layers cannot be.

    Args:
        what: the function and argument, for messages. tokens: of a sequence, for a step of a model that takes no other ones;
            None: no step is measured.
    Raises:
        InputError: its layers have no formula, and neither they nor its step can be measured.
    """
    inside = text_model(model)
    found, measured = structural_plan(inside), None
    layers: list[Any] = [] if isinstance(found, str) else list(inside.get_submodule(found.blocks))
    reason: Any = found if isinstance(found, str) else _reason_no_ends(inside)
    if reason is None and not (isinstance(found, str) or _has_formula(inside, layers, found.blocks)):
        measured = measured_layers(inside, what)
        reason = measured
    if isinstance(reason, str):
        known = f"a model_type of {', '.join(FAMILIES)}, or layers that can run without values"
        if tokens is None:
            raise InputError(f"{what} must have {known}, got {model.config.model_type}. {reason}")
        try:
            return whole_decoder(what.partition(":")[0], inside, None, tokens)
        except InputError as error:
            step = f"Nor does its step: {str(error).partition('values: ')[2]}"
            told = f"{reason.rstrip('.')}. {step.rstrip('.')}. {_ADVICE}"
            raise InputError(f"{what} must have {known}, got {model.config.model_type}. {told}") from error
    head, table = inside.get_output_embeddings(), inside.get_input_embeddings()
    ends: dict[str, Any] = {
        "hidden": whole_shape(head.weight)[1],
        "vocab": whole_shape(head.weight)[0],
        "tied": head.weight is table.weight,
        "kind": model.config.model_type,
        "by_structure": True,
    }
    if isinstance(measured, MeasuredLayers):
        return Decoder(
            **ends,
            **_said_sizes(inside),
            layers=len(measured.layers),
            measured=measured.bytes_of,
            scope=measured.scope,
            lists=measured.paths,
            kept=measured.inputs,
            between=measured.between if measured.between != ends["hidden"] else None,
            positions=measured.positions,
        )
    layer = max(layers, key=has_experts)
    family = family_of_block(layer)
    windows = [window for each in layers if (window := _window_of(each)) is not None]
    return Decoder(
        **ends,
        layers=len(layers),
        **_head_sizes(layer, family),
        **_mlp_sizes(layer, family),
        normed=is_norm(layer, family.behind_mlp),
        wide_positions=_has_wide_positions(inside),
        window=max(windows, default=None),
        windowed=len(windows),
    )


def text_model(model: Any) -> Any:
    """Return the model of transformers in one of peft's; any other as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _reason_no_ends(model: Any) -> str | None:
    """Return why the ends of a model, the embedding and the head with the loss, have no formula; None where they have."""
    ends = table_of(model), model.get_output_embeddings()
    if not isinstance(ends[0], nn.Embedding) or not isinstance(ends[1], nn.Linear):
        return "It has no embedding and head that are one weight each."
    return None


def _has_formula(model: Any, layers: list[Any], path: str) -> bool:
    """Return whether the layers of a model, which are at a path, run as blocks, and nothing but them and the ends is there.

    Eager attention, and that with sinks or a cap, writes the scores of all pairs, and with a window of some types takes a mask
    of them; experts of an unknown form are called with all tokens.
    """
    if any(hasattr(module, "base_layer") for module in model.modules()):  # adapters
        return False
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if whole_shape(table) != whole_shape(head):
        return False
    known = {id(table), id(head)}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known and not name.startswith(f"{path}."):
            return False
    if getattr(model.config, "_attn_implementation", None) == "eager":
        return False
    if getattr(model.config, "final_logit_softcapping", None) or not all(map(_is_known, layers)):
        return False
    return model.config.model_type in WINDOWED_TYPES or all(_window_of(layer) is None for layer in layers)


def _is_known(layer: Any) -> bool:
    if not issubclass(type(layer), TiledBlock) and not is_block(layer):
        return False
    family, attention = family_of_block(layer), attention_of(layer)
    caps = (name for name, what in family.options if name == "softcap" and said_of(attention, what))
    if reason_more(layer) is not None or family.sinks or next(caps, None) is not None:
        return False
    return not has_experts(layer) or experts_form_of(layer.mlp.experts) is not None


def _said_sizes(model: Any) -> dict[str, Any]:
    """Return the fields of a decoder that its layers would have, by the configuration; 0 for what it does not say."""
    config = model.config.get_text_config()
    heads = _said(config, "num_attention_heads")
    return {
        "intermediate": _said(config, "intermediate_size"),
        "heads": heads,
        "kv_heads": _said(config, "num_key_value_heads") or heads,
        "head_dim": _said(config, "head_dim"),
    }


def _said(config: Any, name: str) -> int:
    try:
        value = getattr(config, name, None)
    except Exception:  # of a configuration whose layers have values of their own
        return 0
    return value if type(value) is int else 0


def _head_sizes(layer: Any, family: BlockFamily) -> dict[str, int]:
    """Return the fields of a decoder that its attention has."""
    attention = attention_of(layer)
    heads = _count(attention, "num_attention_heads")
    of_output = layer.get_submodule(family.out).in_features // heads
    if family.latent:  # as many of keys as of queries
        return {"heads": heads, "kv_heads": heads, "head_dim": attention.qk_head_dim, "value_dim": of_output}
    columns = sum(whole_shape(layer.get_submodule(name).weight)[0] for name in family.qkv)
    return {"heads": heads, "kv_heads": (columns // of_output - heads) // 2, "head_dim": of_output}


def _mlp_sizes(layer: Any, family: BlockFamily) -> dict[str, Any]:
    """Return the fields of a decoder that its MLP has: of a mixture those of one expert."""
    if not has_experts(layer):
        down = layer.get_submodule(family.down)
        sizes: dict[str, Any] = {"intermediate": down.in_features, "fused": family.gated and len(family.up) == 1}
        return sizes | ({} if family.gated else {"matrices": 2, "bent": _bent(getattr(layer.mlp, family.activation))})
    experts = layer.mlp.experts
    form, shape = experts_form_of(experts), whole_shape(experts.down_proj)
    assert form is not None
    chosen = (getattr(module, name, None) for module in layer.mlp.modules() for name in _CHOSEN)
    chosen = next((each for each in chosen if isinstance(each, int)), None)
    linears = (module for name, module in layer.mlp.named_modules() if "down_proj" in name)
    shared = max((module.in_features for module in linears if isinstance(module, nn.Linear)), default=0)
    return {
        "shared": shared,
        "shared_is_read": shared > 0 and shared_that_is_added(layer.mlp) is None,
        "intermediate": shape[1 if form.transposed else 2],
        "experts": shape[0],
        "chosen": _count(layer.mlp.experts, "num_experts_per_tok") if chosen is None else chosen,
        "matrices": 3 if form.gated else 2,
    }


def _bent(activation: Any) -> int:
    """Return how many arrays of its input's size an activation makes in backward beside its input and that one's gradient."""
    name = type(activation).__name__
    if isinstance(activation, nn.GELU | nn.ReLU | nn.SiLU) or name in ("GELUActivation", "GELUTanh", "SiLUActivation"):
        return 0
    return 2 if name == "ReLUSquaredActivation" else 4  # several operators


def _window_of(layer: Any) -> int | None:
    """Return the tokens that a query of a layer sees; None: all before it."""
    options = dict(family_of_block(layer).options)
    what = options.get("sliding_window")
    return None if what is None else said_of(attention_of(layer), what)


def _has_wide_positions(model: Any) -> bool:
    """Return whether a model's rotary positions are float32 where its products are not. Those that nobody can ask are not."""
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    buffer = None if rotary is None else next(rotary.buffers(), None)
    if rotary is None or buffer is None:
        return False
    device = buffer.device
    x, places = (
        torch.zeros(1, 1, 1, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, dtype=torch.long, device=device),
    )
    try:
        cos, _ = rotary(x, places)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return False
    return isinstance(cos, torch.Tensor) and cos.dtype == torch.float32


def _count(module: Any, name: str) -> int:
    """Return what a module's configuration says of a number; 0 where it does not."""
    return getattr(module.config, name, None) or 0
