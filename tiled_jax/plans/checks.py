"""What `parallelize` requires in JAX beside the checks that both halves share; all of it is known before compiling."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

from shared_specs.config import ParallelConfig
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.scope import check_block_ranks
from shared_specs.plans.checks import (
    check_context_heads,
    check_context_tokens,
    check_divides,
    check_parallel_config,
    refuse_context,
    refuse_fused,
)
from tiled_jax.layers.recompute import offload_refused
from tiled_jax.models import Llama
from tiled_jax.plans.registry import MeshAxes, ModelRules, Placement

HERE = "parallelize"
_NO_HOST_MEMORY = "A compiled step reads its parameters from the memory of the devices: shard them over more devices."


def checked_axes(config: ParallelConfig, mesh: jax.sharding.Mesh) -> MeshAxes:
    """Return the axes by what they do, once the configuration can work on them."""
    size = dict(mesh.shape)
    unsupported = {"data.cpu_offload": _NO_HOST_MEMORY, "checkpointing.offload": offload_refused(config.checkpointing)}
    check_parallel_config(HERE, config, size, "jax", unsupported)
    data, tensor = config.data, config.tensor
    if data is None:
        return MeshAxes(batch=(), shard=(), context=(), ring=None, heads=None, tensor=tensor and tensor.axis, size=size)
    replicas = () if data.replicate_axis is None else (data.replicate_axis,)
    shard = () if data.engine == "ddp" else (data.shard_axis,)
    return MeshAxes(
        batch=(*replicas, data.shard_axis),
        shard=(*shard, *data.context_axes),
        context=data.context_axes,
        ring=data.ring_axis,
        heads=data.heads_axis,
        tensor=None if tensor is None else tensor.axis,
        size=size,
    )


def check_model(
    model: nnx.Module, mesh: jax.sharding.Mesh, config: ParallelConfig, axes: MeshAxes, rules: ModelRules | None
) -> None:
    """Check that the model can be split as asked; `rules`: of a model whose loss is written for shard_map, else None.

    Raises:
        SpecError: the ranks do not divide its sizes.
        UnsupportedError: the model's loss, layers or attention cannot be split this way.
    """
    if isinstance(model, Llama) and model.scope == "block":
        check_block_ranks(HERE, split_by_compiler=axes.tensor is not None and rules is None)
    if rules is None:
        _check_own_loss(mesh, config)
        return
    if rules.check is not None:
        rules.check(model)
    if rules.sizes is None:
        return
    sizes = rules.sizes(model)
    if axes.tensor is not None and isinstance(model, Llama):
        _check_split_layers(model)
    if axes.tensor is not None and isinstance(model, Llama) and model.config.fused:
        refuse_fused(HERE, type(model).__name__, "layers.attention.qkv and layers.mlp.w_gate_up")
    if axes.tensor is not None:
        check_divides(HERE, sizes, axes.tensor, axes.size[axes.tensor])
    if axes.ring is not None and isinstance(model, Llama) and model.layers.attention.backend == "cudnn":
        advice = "A ring attends in blocks of its own."
        _unsupported("the model's attention", "'auto' or 'blocks' with rings", "'cudnn'", advice)
    if axes.heads is not None:
        both = (axes.heads,) if axes.tensor is None else (axes.tensor, axes.heads)
        heads = sizes.even.get("num_attention_heads")
        if heads is not None:
            check_context_heads(HERE, heads, {axis: axes.size[axis] for axis in both})


def _check_split_layers(model: Llama) -> None:
    """Refuse layers of which tensor parallelism cannot split what stands in the place of a weight.

    Raises:
        UnsupportedError: there are experts; a projection of the MLP is a layer; the output projection holds its bias elsewhere.
    """
    if model.config.experts is not None:
        _unsupported(
            "the model", "one of one MLP a layer with config.tensor", "experts", "Take data and context parallelism."
        )
    mlp: Any = model.layers.mlp
    for name in getattr(mlp, "_layers", tuple)():
        advice = "Put adapters on the projections of attention, or leave config.tensor out."
        _unsupported(
            f"layers.mlp.{name}", "a weight of the MLP with config.tensor", type(getattr(mlp, name)).__name__, advice
        )
    o = model.layers.attention.o
    if not hasattr(o, "bias"):
        advice = "nnx.LoRALinear is one; its sum over devices has the bias once."
        _unsupported("layers.attention.o", "an nnx.Linear, or a subclass, with config.tensor", type(o).__name__, advice)


def _check_own_loss(mesh: jax.sharding.Mesh, config: ParallelConfig) -> None:
    """Refuse the parts of a configuration that a loss_fn written for one device cannot have."""
    tensor, data = config.tensor, config.data
    if data is not None and data.context_axis is not None:
        refuse_context(HERE, "loss_fn", data.context_axis)
    if tensor is None:
        return
    kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[tensor.axis]
    if kind is not AxisType.Auto:
        advice = "XLA splits the products of such a model by itself."
        _unsupported(f"the mesh axis '{tensor.axis}'", "of axis type Auto with loss_fn", kind, advice)
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(tensor, name):
            advice = "Leave loss_fn out where the rules of the model's class have a loss, or register such rules."
            _unsupported(f"config.tensor.{name}", "False with loss_fn, which is written for one device", True, advice)


def check_split(
    mesh: jax.sharding.Mesh, config: ParallelConfig, placements: Iterable[Placement], dtypes: Iterable[Any], own: bool
) -> None:
    """Check that tensor parallelism has a parameter to split, and that XLA can compute the sums that it needs.

    Args:
        placements, dtypes: of the parameters. own: the loss is written for shard_map, else XLA splits the products.

    Raises:
        SpecError: there is none, or it cannot.
    """
    tensor, data = config.tensor, config.data
    if tensor is None:
        return
    if all(placement.tensor_dim is None for placement in placements):
        advice = "Register rules for the model's class (register_rules), or give its parameters sharding metadata."
        fail(HERE, "config.tensor", "None for a model of which no parameter is split", repr(tensor.axis), advice=advice)
    if own or data is None or mesh.devices.flat[0].platform != "cpu":
        return
    summed = {data.reduce_dtype} if data.reduce_dtype is not None else {data.param_dtype, *map(str, dtypes)}
    if summed & {"bfloat16", "float16"}:
        # XLA's pass that widens such sums (AllReducePromotion) ends the process.
        advice = "XLA cannot sum 16 bits there over some axes of a mesh while it splits others itself."
        rule = "float32 on a CPU with loss_fn and config.tensor"
        _unsupported("config.data.reduce_dtype", rule, repr(data.reduce_dtype), advice)


def _unsupported(argument: str, rule: str, got: object, advice: str) -> None:
    raise UnsupportedError(error_text(HERE, argument, rule, got, advice=advice))


def check_batch(batch: Any, axes: MeshAxes) -> None:
    """Check that every array of a batch has sequences for all data ranks and positions for all context ranks.

    A mapping has arrays of the tokens of a sequence, an array of these and one more.

    Raises:
        SpecError: one has not.
        TypeError: a leaf is no array.
    """
    ranks, more = axes.ranks(axes.batch), 0 if isinstance(batch, Mapping) else 1
    for leaf in jax.tree.leaves(batch):
        if not hasattr(leaf, "shape"):
            fail_type(HERE, "batch", "a pytree of arrays", type(leaf).__name__)
        shape = tuple(leaf.shape)
        if not shape or shape[0] % ranks:
            rule = f"of a multiple of {ranks} sequences, for the devices of the mesh axes {', '.join(axes.batch)}"
            fail(HERE, "batch", rule, show_shape(shape))
        if axes.context:
            if len(shape) < 2:
                fail(HERE, "batch", "[sequences, tokens + 1]" if more else "of [sequences, tokens]", show_shape(shape))
            inside = 1 if axes.ring is None or axes.heads is None else axes.size[axes.heads]
            order = "tokens" if axes.ring is None else "zigzag"
            held = axes.ranks(axes.context)
            check_context_tokens(HERE, "batch", shape[1] - more, held, shape, order=order, inside=inside)


def check_micro_batches(batch: Any, axes: MeshAxes, parts: int) -> None:
    """Check that every data rank has as many sequences for each micro-batch.

    Raises:
        SpecError: it has not.
    """
    multiple = axes.ranks(axes.batch) * parts
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % multiple:
            rule = f"of a multiple of {multiple} sequences, for the {parts} micro-batches of every data rank"
            fail(HERE, "batch", rule, show_shape(tuple(leaf.shape)))
