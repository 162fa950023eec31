"""The plan of Hugging Face decoders of the Llama kind: attention, MLP and vocabulary split, norms on the rank's own tokens.

Between the split layers hidden states are DTensors: replicated, or with sequence parallelism split along the tokens, whose
number need not be a multiple of the ranks.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
)

from shared_specs.config import TensorParallel
from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.plans.checks import TensorSizes, check_divides, refuse_fused
from tiled_torch.loss.ranks import vocab_parallel_cross_entropy
from tiled_torch.plans.decoder_context import apply_context, apply_token_mean, check_context
from tiled_torch.plans.registry import Plan, register_plan
from tiled_torch.plans.tensor_styles import Embedding, HeadStyle, Norm, Whole, check_embedding, run_mlp, split_loss

_NAME = "parallelize"
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# model_type -> the dim of the heads where queries and keys have norms of their own.
HEAD_NORMS: Mapping[str, int | None] = {
    "llama": None, "mistral": None, "qwen2": None, "qwen3": 2, "gemma": None, "gemma2": None, "gemma3_text": 1,
    "smollm3": None,
}  # fmt: skip


def decoder_plan(model: Any) -> Plan:
    """Return the plan of one Hugging Face model, bare or with a head of whatever kind, tiled or not."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    tied, called = _tied(model), hasattr(model, "lm_head") and not _is_tiled(model)
    return Plan(
        blocks=f"{prefix}layers",
        ends=(f"{prefix}embed_tokens", f"{prefix}norm", *(("lm_head",) if called else ())),
        # A unit's weights are gathered when its forward is called: a tied weight is used by two, a tiled loss calls no head.
        ends_apart=not tied and not _is_tiled(model),
        check=_check,
        styles=lambda model, tensor: _styles(model, tensor, prefix),
        finish=lambda model, mesh, tensor: _finish(model, mesh, tensor, tied=tied),
        context=apply_context,
        context_kinds=("ulysses", "ring", "2d"),
        check_context=check_context,
        token_mean=apply_token_mean if hasattr(model, "lm_head") else None,
    )


def fused_plan(model: Any) -> Plan:
    """Return the plan of a decoder whose projections are fused (Phi-3): all but what divides them or their heads."""
    return replace(decoder_plan(model), check=_refuse_fused, context=None)


def experts_plan(model: Any) -> Plan:
    """Return the plan of a decoder with a mixture of experts in its layers: all but what splits these."""
    return replace(decoder_plan(model), check=_refuse_experts)


for _kind in HEAD_NORMS:
    register_plan(_kind, decoder_plan)
register_plan("phi3", fused_plan)
for _kind in ("mixtral", "qwen3_moe"):
    register_plan(_kind, experts_plan)


def _refuse_fused(model: Any, *_: Any) -> None:
    refuse_fused(_NAME, type(model).__name__, "qkv_proj and gate_up_proj")


def _refuse_experts(model: Any, *_: Any) -> None:
    rule, got = "None for a model with experts", f"TensorParallel for {type(model).__name__}"
    advice = "Shard its weights with config.data, and its sequences with config.data.context_axis."
    raise UnsupportedError(error_text(_NAME, "config.tensor", rule, got, advice=advice))


def _tied(model: Any) -> bool:
    return hasattr(model, "lm_head") and model.lm_head.weight is model.model.embed_tokens.weight


def _is_tiled(model: nn.Module) -> bool:
    return hasattr(model, "_tiling")


def _check(model: Any, tensor: TensorParallel, ranks: int) -> None:
    config = model.config
    even = {name: getattr(config, name) for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size")}
    check_divides(_NAME, TensorSizes(even=even, vocab=config.vocab_size), tensor.axis, ranks)
    check_embedding(_NAME, model.base_model.embed_tokens)
    for number, layer in enumerate(model.base_model.layers):
        for name in (*(f"self_attn.{name}" for name in _ATTENTION), *(f"mlp.{name}" for name in _MLP)):
            kind = type(layer.get_submodule(name))
            if kind is not nn.Linear:
                path = f"layers.{number}.{name}"
                advice = "Adapters and quantised layers cannot be split."
                raise UnsupportedError(error_text(_NAME, path, "nn.Linear", kind.__name__, advice=advice))
        reason = _reason_mlp_is_called(layer.mlp) if _has_tiled_mlp(layer) else None
        if reason is not None:
            advice = "Or untile_model(model) first."
            rule, path = "of tiled_mlp's formula where it is tiled", f"layers.{number}.mlp"
            raise UnsupportedError(error_text(_NAME, path, rule, reason, advice=advice))
    if _is_tiled(model) and not tensor.loss_parallel:
        advice = "Or untile_model(model) first."
        fail(_NAME, "config.tensor.loss_parallel", "True where the loss is tiled", False, advice=advice)


def _has_tiled_mlp(layer: Any) -> bool:
    return hasattr(layer.mlp, "_tiling")


def _reason_mlp_is_called(mlp: Any) -> str | None:
    from tiled_torch.models.mlps.tiled import reason_not_plain

    return reason_not_plain(mlp)


def _styles(model: Any, tensor: TensorParallel, prefix: str) -> dict[str, ParallelStyle]:
    stream: Placement = Shard(1) if tensor.sequence_parallel else Replicate()  # between the layers
    found: dict[str, ParallelStyle] = {
        f"{prefix}embed_tokens": Embedding(stream),
        f"{prefix}norm": Norm(stream) if hasattr(model, "lm_head") else Norm(stream, "whole"),
    }
    for name, style in _block_styles(model, stream).items():
        found[f"{prefix}layers.*.{name}"] = style
    if hasattr(model, "lm_head"):
        found["lm_head"] = HeadStyle(gathered=not tensor.loss_parallel)
    return found


def _block_styles(model: Any, stream: Placement) -> dict[str, ParallelStyle]:
    layer = model.base_model.layers[0]
    norms = (name for name, _ in layer.named_children() if name.endswith("layernorm"))
    found: dict[str, ParallelStyle] = {name: Norm(stream) for name in norms}
    found["self_attn"] = Whole()
    found |= {f"self_attn.{name}": ColwiseParallel() for name in _ATTENTION[:-1]}
    found["self_attn.o_proj"] = RowwiseParallel(output_layouts=stream, use_local_output=False)
    heads = HEAD_NORMS[model.config.model_type]
    if heads is not None:
        found |= {f"self_attn.{name}": Norm(Shard(heads), "local") for name in ("q_norm", "k_norm")}
    # A tiled MLP reads the weights of its projections and gathers shard by shard; these styles then only split them.
    found |= {f"mlp.{name}": ColwiseParallel(input_layouts=stream) for name in _MLP[:-1]}
    found["mlp.down_proj"] = RowwiseParallel(output_layouts=stream, use_local_output=False)
    if not _has_tiled_mlp(layer):
        found["mlp"] = Whole()
    return found


def _finish(model: Any, mesh: DeviceMesh, tensor: TensorParallel, *, tied: bool) -> None:
    for layer in model.base_model.layers:
        if _has_tiled_mlp(layer):
            layer.mlp._run_split = MethodType(_mlp_runner(mesh, tensor.sequence_parallel), layer.mlp)
    if not hasattr(model, "lm_head"):
        return
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight  # the styles made two of it
    if tensor.loss_parallel and getattr(model.loss_function, "__name__", "") == ForCausalLMLoss.__name__:
        model.loss_function = ForCausalLMLoss
    if _is_tiled(model):
        model._linear_loss = _tiled_loss


def _mlp_runner(mesh: DeviceMesh, sequence_parallel: bool) -> Any:
    from tiled_torch.models.mlps.tiled import activation_now, known_of

    def run(module: Any, x: Tensor) -> Tensor:
        known = known_of(module)
        assert known is not None
        operands = known.operands(module)
        options = {"activation": activation_now(module, known), "tiling": module._tiling, "backend": module._backend}
        weights = (operands.w_gate, operands.w_up, operands.w_down)
        return run_mlp(x, weights, operands.biases, options, mesh, sequence_parallel=sequence_parallel)

    return run


def _tiled_loss(model: Any, hidden: Tensor, targets: Tensor, options: Any, tiling: Any, backend: str) -> Tensor:
    """Return the loss of `tile_model` where the head is split by vocabulary."""
    head = model.lm_head
    return split_loss(hidden, head.weight, targets, bias=head.bias, loss=options, tiling=tiling, backend=backend)


def ForCausalLMLoss(  # the name by which transformers and tile_model know this formula
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' loss of the same name, of logits that are split by vocabulary."""
    if not isinstance(logits, DTensor):
        fail(_NAME, "logits", "a DTensor", type(logits).__name__)
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    targets = torch.where(shift_labels == ignore_index, -100, shift_labels).to(logits.device)
    total = vocab_parallel_cross_entropy(logits, targets).sum()
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)
