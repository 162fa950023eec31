"""What `parallelize` requires in JAX beside the checks that both halves share; all of it is known before compiling."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType

from shared_specs.config import ParallelConfig
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.parallel_checks import check_context_heads, check_divides, check_parallel_config
from tiled_jax.parallel.checkpoint import offload_refused
from tiled_jax.parallel.rules import MeshAxes, ModelRules

HERE = "parallelize"
_NO_HOST_MEMORY = "Parameters in host memory are not written for tiled_jax; donate the state and shard it further."


def checked_axes(config: ParallelConfig, mesh: jax.sharding.Mesh) -> MeshAxes:
    """The axes by what they do, once the configuration can work on them."""
    size = dict(mesh.shape)
    unsupported = {"data.cpu_offload": _NO_HOST_MEMORY, "checkpointing.offload": offload_refused()}
    check_parallel_config(HERE, config, size, "jax", unsupported)
    data, tensor = config.data, config.tensor
    if data is None:
        return MeshAxes(batch=(), shard=(), context=None, tensor=tensor and tensor.axis, size=size)
    replicas = () if data.replicate_axis is None else (data.replicate_axis,)
    shard = () if data.engine == "ddp" else (data.shard_axis,)
    return MeshAxes(
        batch=(*replicas, data.shard_axis),
        shard=shard if data.context_axis is None else (*shard, data.context_axis),
        context=data.context_axis,
        tensor=None if tensor is None else tensor.axis,
        size=size,
    )


def check_model(
    model: nnx.Module, mesh: jax.sharding.Mesh, config: ParallelConfig, axes: MeshAxes, rules: ModelRules | None
) -> None:
    """The model can be split as asked; `rules`: of a model whose loss is written for shard_map, else None."""
    tensor, data = config.tensor, config.data
    if rules is None:
        advice = "Leave it out, or register rules with a loss for the model's class."
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if tensor is not None and kinds[tensor.axis] is not AxisType.Auto:
            rule = "of axis type Auto for a model without a loss of its own"
            _unsupported(
                f"the mesh axis '{tensor.axis}'", rule, kinds[tensor.axis], "XLA splits its products by itself."
            )
        for name in ("sequence_parallel", "loss_parallel"):
            if tensor is not None and getattr(tensor, name):
                _unsupported(f"config.tensor.{name}", "False for a model without a loss of its own", True, advice)
        if data is not None and data.context_axis is not None:
            rule = "None for a model without a loss of its own"
            _unsupported("config.data.context_axis", rule, repr(data.context_axis), advice)
        return
    if rules.sizes is None:
        return
    sizes = rules.sizes(model)
    if axes.tensor is not None:
        check_divides(HERE, sizes, axes.tensor, axes.size[axes.tensor])
    if axes.context is not None:
        both = (axes.context,) if axes.tensor is None else (axes.tensor, axes.context)
        heads = sizes.even.get("num_attention_heads")
        if heads is not None:
            check_context_heads(HERE, heads, {axis: axes.size[axis] for axis in both})


def _unsupported(argument: str, rule: str, got: object, advice: str) -> None:
    raise UnsupportedError(error_text(HERE, argument, rule, got, advice=advice))


def check_batch(batch: Any, axes: MeshAxes) -> None:
    """Every array of a batch has sequences for all data ranks and, under context parallelism, positions for all ranks."""
    ranks = axes.ranks(axes.batch)
    for leaf in jax.tree.leaves(batch):
        if not hasattr(leaf, "shape"):
            fail_type(HERE, "batch", "a pytree of arrays", type(leaf).__name__)
        shape = tuple(leaf.shape)
        if not shape or shape[0] % ranks:
            rule = f"of a multiple of {ranks} sequences, for the devices of the mesh axes {', '.join(axes.batch)}"
            fail(HERE, "batch", rule, show_shape(shape))
        if axes.context is not None and (len(shape) < 2 or (shape[1] - 1) % axes.size[axes.context]):
            rule = f"[sequences, tokens + 1] with a multiple of {axes.size[axes.context]} tokens"
            fail(HERE, "batch", rule, show_shape(shape))
