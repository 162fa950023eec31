"""`parallelize`: one configuration applied to a finished model, in a fixed order, after everything was checked."""

import logging
import warnings
from collections import Counter
from hashlib import blake2b
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, fail_with
from shared_specs.plans.applied import applied_lines
from shared_specs.plans.checks import (
    check_axis_order,
    check_parallel_config,
    check_ring,
    refuse_context,
    refuse_context_kind,
)
from tiled_torch.collectives.consistency import check_everywhere
from tiled_torch.collectives.same_batch import compare_first_batch
from tiled_torch.core.tensors import dtype_name
from tiled_torch.linear.module import TiledLinear
from tiled_torch.loss.module import TiledLinearCrossEntropy
from tiled_torch.mlp.module import TiledMLP
from tiled_torch.models.tiling import tiling_paths
from tiled_torch.moe.module import TiledMoE
from tiled_torch.plans.compile import apply_compile, check_compile
from tiled_torch.plans.data import apply_data_parallel
from tiled_torch.plans.float8 import check_float8, reason_no_float8, use_float8
from tiled_torch.plans.recompute import apply_checkpointing, check_checkpointing, is_tiled_block, reason_not_offloaded
from tiled_torch.plans.registry import REGISTER, Plan, plan_of
from tiled_torch.plans.tensor import apply_tensor_parallel, reason_not_asynchronous

_LOG = logging.getLogger("tiled_torch")
_NAME = "parallelize"
_MARK = "_parallel_config"
_ONE_UNIT = "So the model is one unit: each rank gathers all of its weights for the whole step."


def parallelize(model: nn.Module, mesh: DeviceMesh | None, config: ParallelConfig) -> nn.Module:
    """Return the same model, spread over the ranks of a mesh.

    In this order: float8 products, tensor parallelism, context parallelism, activation checkpointing, torch.compile of each
    block, data parallelism. Every rank calls it with the same model and configuration. The definition of the loss does not
    change. With tensor and with context parallelism every rank of the axis gets the same batch. With data parallelism each
    rank gets its own part of the batch, and gradients are means over the parts. With context parallelism a rank computes with
    its own tokens (`context_slice`, "zigzag" with rings). Logits and hidden states are those of its own tokens, but the loss
    covers all tokens. `position_ids` that restart mark packed documents. The logger "tiled_torch" writes one INFO line for
    each applied step, on the first rank of the mesh.

    With `DataParallel(loss_mean="tokens")` all data ranks call a causal language model with labels. On every rank it returns
    the mean over the valid labels of all ranks, and gradients are those of this mean. If a step has several micro-batches,
    `num_items_in_batch` gives the number of valid labels in all micro-batches of this rank. Their losses then add up to the
    mean over all of them.

    Args:
        model: a model that has a plan: Hugging Face Llama, Mistral, Qwen and Gemma models (also after `tile_model`), Mixtral
            and Qwen3-MoE without tensor parallelism, any other model of transformers whose layers are in a list without tensor
            and context parallelism, a `TiledMLP`, a `TiledLinearCrossEntropy`, or any kind registered with `register_plan`. Any
            other module is one unit, whose weights are gathered at once, with a warning; without tensor and context parallelism
            and checkpointing. It is changed in place and may be on the meta device (see `materialize`).
        mesh: a mesh with named axes. The configuration must use all of them. None if it uses no axis.
        config: see `shared_specs.config.ParallelConfig`.
    Returns:
        The model itself; inside DistributedDataParallel with engine="ddp".
    Numerics: sums of gradients over data ranks are made in `config.data.reduce_dtype`, or in their own dtype. Those over
        tensor-parallel ranks are made by a tiled MLP and a tiled loss in float32 and by DTensor in the dtype of what is summed.
    Raises:
        SpecError, TypeError: the configuration cannot work on this mesh, or the model's sizes do not divide, or it was
            parallelized before.
        UnsupportedError: an option that this model or this machine does not support. In all of these cases no
            rank has changed anything. If one rank refuses, or gets different arguments, it is an error on all ranks.
    Source: the order is torchtitan's, arXiv 2410.06511.
    Example:
        >>> from shared_specs.config import Checkpointing
        >>> from tiled_torch import TiledMLP
        >>> config = ParallelConfig(checkpointing=Checkpointing())
        >>> type(parallelize(TiledMLP(8, 12), None, config)).__name__
        'TiledMLP'
    """
    plan = check_everywhere(_NAME, mesh, lambda: _checked(model, mesh, config), lambda: _said(model, mesh, config))
    submesh: Any = mesh
    inside = model
    first = mesh is None or not any(mesh.get_coordinate() or ())
    if first and plan.no_layers is not None and config.data is not None and config.data.engine == "fsdp":
        warnings.warn(f"{_NAME}: {plan.no_layers} {_ONE_UNIT} {REGISTER}", stacklevel=2)
    tiled = _tiled_in(model)
    if config.float8:
        use_float8(model, plan)
    if config.tensor is not None:
        apply_tensor_parallel(model, _along(submesh, config.tensor.axis), config.tensor, plan)
    fronts = _apply_context(model, submesh, config.data, plan)
    fronts = [*_apply_token_mean(model, submesh, config.data, plan), *fronts]  # it counts in whole sequences
    if config.tensor is not None and plan.same_batch:  # in front of everything: nothing was cut or gathered yet
        fronts = [*_compare_batches(model, _along(submesh, config.tensor.axis), config.tensor), *fronts]
    if config.checkpointing is not None:
        apply_checkpointing(model, config.checkpointing, plan)
    if config.compile is not None:
        apply_compile(model, config.compile, plan, split=config.tensor is not None)
    if config.data is not None:
        model = apply_data_parallel(model, submesh, config.data, plan)
    # In front of what fully_shard has put there: for what they refuse, nothing was gathered.
    for hook in reversed(fronts):
        inside._forward_pre_hooks.move_to_end(hook, last=False)  # type: ignore[attr-defined]
    setattr(model, _MARK, config)
    if first:
        for line in applied_lines(config, mesh_sizes(mesh), tiled):
            _LOG.info("%s: %s", _NAME, line)
    return model


def _tiled_in(model: nn.Module) -> Counter[str]:
    """Return how modules are tiled -> how many are, of tile_model's and of this library's own."""
    own = {TiledMLP: "tiled_mlp", TiledMoE: "tiled_moe", TiledLinear: "TiledLinear"}
    own |= {TiledLinearCrossEntropy: "tiled_linear_cross_entropy"}
    found = Counter(tiling_paths(model).values())
    found.update(name for module in model.modules() for kind, name in own.items() if isinstance(module, kind))
    return found


def _along(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """mesh[axis], the same object for every model on the mesh.

    DTensor remembers meshes by what they look like. Where it finds an older one than the program that is compiled was given,
    PyTorch 2.13 derives it there by an operator that inductor does not know ("device_mesh._get_submesh is not an OpOverload").
    """
    found = vars(mesh).setdefault("_tiled_torch_axes", {})
    if axis not in found:
        found[axis] = mesh[axis]
    return found[axis]


def _compare_batches(model: nn.Module, mesh: Any, tensor: TensorParallel) -> list[int]:
    """Ranks that split a model's weights compute one result: with other batches they would train on, wrongly."""
    function = f"forward with tensor parallelism over '{tensor.axis}'"
    return compare_first_batch(function, model, mesh, "Deal batches out to the ranks of the data axes alone.")


def _apply_context(model: nn.Module, mesh: Any, data: DataParallel | None, plan: Plan) -> list[int]:
    """Return which hooks in front of the model's forward context parallelism has put there."""
    if data is None or all(mesh[axis].size() == 1 for axis in data.context_axes):
        return []
    assert plan.context is not None
    before = set(model._forward_pre_hooks)
    over = _along(mesh, data.context_axes[0]) if len(data.context_axes) == 1 else mesh[data.context_axes]
    plan.context(model, over, *(() if data.context == "ulysses" else (data.context,)))
    return [hook for hook in model._forward_pre_hooks if hook not in before]


def _apply_token_mean(model: nn.Module, mesh: Any, data: DataParallel | None, plan: Plan) -> list[int]:
    """Return the hook that counts in front of the model's forward, where there is one."""
    axes = [] if data is None or data.loss_mean != "tokens" else [data.replicate_axis, data.shard_axis]
    along = [_along(mesh, axis) for axis in axes if axis is not None and mesh[axis].size() > 1]
    if not along:
        return []
    assert plan.token_mean is not None
    before = set(model._forward_pre_hooks)
    plan.token_mean(model, along)
    return [hook for hook in model._forward_pre_hooks if hook not in before]


def _checked(model: Any, mesh: Any, config: Any) -> Plan:
    """Return the plan of the model, once all that is asked for can be done."""
    if not isinstance(model, nn.Module):
        fail_type(_NAME, "model", "an nn.Module", type(model).__name__)
    checkpointing = getattr(config, "checkpointing", None)
    reasons = {
        "tensor.asynchronous": reason_not_asynchronous(),
        "float8": reason_no_float8(),
        "checkpointing.offload": reason_not_offloaded(checkpointing),
    }
    axes = mesh_sizes(mesh)
    check_parallel_config(_NAME, config, axes, "torch", reasons)
    check_axis_order(_NAME, config.data, axes)
    check_compile(_NAME, config, model)
    _check_fresh(model)
    if config.data is not None and config.data.engine == "ddp" and any(p.is_meta for p in model.parameters()):
        advice = 'Materialize it first, or use engine="fsdp".'
        fail(_NAME, "model", 'on a device with engine="ddp"', "one on the meta device", advice=advice)
    _check_reductions(model, config)
    plan = plan_of(model)
    _check_paths(model, plan, config)
    _check_blocks(plan, model, config)
    if config.float8:
        check_float8(_NAME, config, model, plan)
    if config.tensor is not None:
        if plan.styles is None:
            advice = "Register a plan with styles."
            fail(_NAME, "config.tensor", "None for a model whose plan has no styles", "TensorParallel", advice=advice)
        plan.check(model, config.tensor, axes[config.tensor.axis])
    if config.data is not None and config.data.loss_mean == "tokens" and plan.token_mean is None:
        rule = "None or 'ranks' for a model whose loss is not its own"
        advice = "Divide the sum of each rank's losses by the number of all ranks' labels, times the ranks."
        raise UnsupportedError(error_text(_NAME, "config.data.loss_mean", rule, "'tokens'", advice=advice))
    if config.data is not None and config.data.context_axis is not None:
        if plan.context is None:
            refuse_context(_NAME, type(model).__name__, config.data.context_axis)
        if config.data.context not in plan.context_kinds:
            refuse_context_kind(_NAME, type(model).__name__, config.data.context, plan.context_kinds)
        dividing = {} if config.tensor is None else {config.tensor.axis: axes[config.tensor.axis]}
        dividing |= {axis: 1 if axis == config.data.ring_axis else axes[axis] for axis in config.data.context_axes}
        plan.check_context(model, dividing)
        if config.data.ring_axis is not None:
            check_ring(_NAME, getattr(getattr(model, "config", None), "attention_dropout", 0.0))
    return plan


def _check_blocks(plan: Plan, model: nn.Module, config: ParallelConfig) -> None:
    """Check what cannot be asked of layers that are one function each, or are not known."""
    blocks = plan.blocks_of(model)
    check_checkpointing(_NAME, config.checkpointing, blocks, plan.no_layers)
    if config.float8 and any(map(is_tiled_block, blocks)):
        advice = "Such a layer is one function, which makes its products itself. Or use scope='mlp'."
        raise UnsupportedError(error_text(_NAME, "config.float8", "False with scope='block'", True, advice=advice))


def _check_reductions(model: nn.Module, config: ParallelConfig) -> None:
    """A reduction in another dtype is a hook of DDP's, which compiled autograd does not trace."""
    data, compiled = config.data, config.compile
    if data is None or data.reduce_dtype is None or compiled is None or not compiled.compiled_autograd:
        return
    for name, parameter in model.named_parameters():
        dtype = dtype_name(parameter.dtype)
        if parameter.requires_grad and dtype != data.reduce_dtype:
            rule = "None, or the dtype of all parameters, with config.compile.compiled_autograd"
            got = f"{data.reduce_dtype!r} ({name} is {dtype})"
            raise UnsupportedError(error_text(_NAME, "config.data.reduce_dtype", rule, got))


def _said(model: nn.Module, mesh: Any, config: ParallelConfig) -> dict[str, Any]:
    """Return the facts that have to be alike on all ranks of a mesh."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    digest = blake2b(repr(parameters).encode(), digest_size=4).hexdigest()
    elements = sum(p.numel() for p in model.parameters())
    return {
        "the axes of mesh": mesh_sizes(mesh),
        "config": config,
        "the class of model": type(model).__name__,
        "the parameters of model": f"{len(parameters)} of {elements} elements, digest {digest}",
    }


def _check_paths(model: nn.Module, plan: Plan, config: ParallelConfig) -> None:
    """Check that every module that the plan names is there."""
    for path in (plan.blocks, *plan.towers, *plan.ends):
        try:
            model.get_submodule(path)
        except AttributeError:
            advice = f"The plan of its kind looks for '{path}'. Parallelize the model inside it, or register a plan."
            fail(_NAME, "model", f"one with a '{path}'", type(model).__name__, advice=advice)
    if config.compile is not None and config.compile.ends and not plan.ends:
        fail(_NAME, "config.compile.ends", "False for a model whose plan has no ends", True)


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Return the number of ranks by name of axis; empty for None."""
    if mesh is None:
        return {}
    if not isinstance(mesh, DeviceMesh):
        fail_type(_NAME, "mesh", "a DeviceMesh or None", type(mesh).__name__)
    if mesh.mesh_dim_names is None:
        advice = "Pass mesh_dim_names to init_device_mesh."
        fail(_NAME, "mesh", "a DeviceMesh with names for its axes", "one without", advice=advice)
    if mesh.get_coordinate() is None:
        fail_with(_NAME, "this rank is not in mesh", advice="Call it only on the ranks of the mesh.")
    return dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True))


def _check_fresh(model: nn.Module) -> None:
    wrapped = isinstance(model, DistributedDataParallel) or any(isinstance(m, FSDPModule) for m in model.modules())
    if wrapped or hasattr(model, _MARK) or any(isinstance(p, DTensor) for p in model.parameters()):
        advice = "Build it anew, or pass one configuration with all that is wanted."
        fail(_NAME, "model", "one that has not been parallelized", type(model).__name__, advice=advice)
