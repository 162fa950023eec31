"""The Llama decoder and its loss as one device of a mesh computes them, inside `jax.shard_map` over every axis.

Between the layers a device has the rows of its own sequences, under sequence parallelism 1 / R of them. Where a layer needs
the others' rows it gathers a shard of tokens at a time, so that [tokens, hidden] never exists; attention has all tokens, of
a device's own heads.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs import costs
from shared_specs.config import Checkpointing, LossOptions
from shared_specs.errors import fail
from shared_specs.parallel_checks import TensorSizes
from shared_specs.sequence_costs import compiled_sequence_peak_bytes, plan_sequence_mlp
from tiled_jax import backends
from tiled_jax.functional import tiled_linear_cross_entropy
from tiled_jax.models import Llama, causal_attention
from tiled_jax.models.llama import Angles, Attention, DecoderLayer
from tiled_jax.models.mlp import PlainMLP
from tiled_jax.models.rope import rotary_angles, rotate
from tiled_jax.modules import TiledMLP
from tiled_jax.modules.params import as_operands, compute_dtype
from tiled_jax.parallel.collectives import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from tiled_jax.parallel.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.parallel.mapped import Mapped
from tiled_jax.parallel.mlp import tensor_parallel_mlp
from tiled_jax.parallel.rules import ModelRules, register_rules

HERE = "parallelize"


def decoder_loss(model: Llama, tokens: jax.Array, mapped: Mapped) -> tuple[jax.Array, Any]:
    """(sum of the next tokens' cross entropy, number of tokens) of this device's share; `next_token_loss` of the whole.

    Args:
        model: with this device's parts of the parameters.
        tokens: [this device's sequences, tokens + 1], whole along the axis of context parallelism.
    """
    if model.checkpointing and mapped.config.checkpointing is None:
        mapped = replace(mapped, config=replace(mapped.config, checkpointing=Checkpointing()))
    inputs, targets = _own_positions(tokens, mapped)
    _check_rows(inputs.size, mapped)
    table = mapped.gather(nnx.state(model.embed), ("embed",))["embedding"].get_value()
    shard = _shard_tokens(model, inputs.size, mapped)
    x = _embedded(table, inputs.reshape(-1), shard, mapped).astype(model.embed.embedding[...].dtype)
    angles = rotary_angles(model.config.rope, model.config.head_dim, tokens.shape[1] - 1)
    graph, parameters = nnx.split(model.layers)
    sequences = tokens.shape[0]

    def layer(parameters: nnx.State, x: jax.Array) -> jax.Array:
        return _layer(nnx.merge(graph, parameters), x, angles, sequences, shard, mapped)

    x = mapped.scan(layer, parameters, x, ("layers",))
    norm = nnx.merge(nnx.graphdef(model.norm), mapped.gather(nnx.state(model.norm), ("norm",)))
    return _loss(model, norm(x).astype(model.dtype), targets.reshape(-1), mapped)


def _own_positions(tokens: jax.Array, mapped: Mapped) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets at this device's positions, [sequences, tokens / context devices] each."""
    context, positions = mapped.axes.context, tokens.shape[1] - 1
    if context is None:
        return tokens[:, :-1], tokens[:, 1:]
    own = positions // mapped.axes.size[context]
    start = lax.axis_index(context) * own
    cut = lax.dynamic_slice_in_dim(tokens, start, own + 1, axis=1)
    return cut[:, :-1], cut[:, 1:]


def _check_rows(rows: int, mapped: Mapped) -> None:
    """Sequence parallelism, and a head that is not split, deal the rows out to the devices of the tensor axis."""
    tensor = mapped.config.tensor
    if tensor is None or not (tensor.sequence_parallel or not tensor.loss_parallel):
        return
    ranks = mapped.axes.size[tensor.axis]
    if rows % ranks:
        rule = f"a multiple of the {ranks} devices of the mesh axis '{tensor.axis}'"
        fail(HERE, "the tokens of a data rank", rule, rows, advice="Change the length or the number of sequences.")


def _embedded(table: jax.Array, ids: jax.Array, shard: int | None, mapped: Mapped) -> jax.Array:
    """Rows of a table whose entries the tensor axis splits: [tokens, H], or this device's [tokens / R, H]."""
    axis = mapped.axes.tensor
    if axis is None:
        return jnp.take(table, ids, axis=0)
    wide = table.astype(_wide(table.dtype))  # adds up the shards' gradients
    start = lax.axis_index(axis).astype(ids.dtype) * table.shape[0]

    def rows(ids: jax.Array) -> jax.Array:
        local = ids.reshape(-1) - start
        found = (local >= 0) & (local < table.shape[0])
        own = jnp.take(wide.astype(table.dtype), jnp.where(found, local, 0), axis=0)
        return _reduced(jnp.where(found[:, None], own, jnp.zeros_like(own)), mapped)[None]

    ranks = 1 if shard is None else mapped.axes.size[axis]
    return _over_shards(rows, ids.reshape(ranks, -1), shard)[0]


def _entered(x: jax.Array, mapped: Mapped) -> jax.Array:
    """All rows, as the operand of products with this device's columns."""
    axis = mapped.axes.tensor
    if axis is None:
        return x
    if mapped.sequence_parallel:
        return gather_from_sequence_parallel_region(x, axis_name=axis)
    return copy_to_tensor_parallel_region(x, axis_name=axis)


def _reduced(y: jax.Array, mapped: Mapped) -> jax.Array:
    """The sum over the tensor axis of what each device computed from its own rows of a weight; its own tokens of it."""
    axis = mapped.axes.tensor
    if axis is None:
        return y
    if mapped.sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(y, axis_name=axis)
    return reduce_from_tensor_parallel_region(y, axis_name=axis)


def _layer(
    block: DecoderLayer, x: jax.Array, angles: Angles, sequences: int, shard: int | None, mapped: Mapped
) -> jax.Array:
    """One layer of whole parameters, but for the tensor axis; x: this device's rows."""
    normed = jax.checkpoint(block.attention_norm)(x)
    x = x + _attention(block.attention, normed, angles, sequences, shard, mapped).astype(x.dtype)
    return x + _mlp(block.mlp, jax.checkpoint(block.mlp_norm)(x), mapped).astype(x.dtype)


def _attention(
    attention: Attention, x: jax.Array, angles: Angles, sequences: int, shard: int | None, mapped: Mapped
) -> jax.Array:
    graph, wide = _in_wide(attention)

    def columns(x: jax.Array) -> tuple[jax.Array, ...]:
        module, rows = _narrowed(graph, wide, attention), _entered(x[0], mapped)
        products = (getattr(module, name)(rows) for name in "qkv")
        return tuple(a.reshape(-1, x.shape[1], a.shape[-1]) for a in products)

    def summed(y: jax.Array) -> jax.Array:
        module = _narrowed(graph, wide, attention)
        module.o.bias, module.o.use_bias = None, False  # added once, to the sum
        return _reduced(module.o(y.reshape(-1, y.shape[-1])), mapped)[None]

    q, k, v = (a.reshape(-1, a.shape[-1]) for a in _over_shards(columns, x[None], shard))
    y = _attended(q, k, v, attention.head_dim, angles, sequences, mapped)
    ranks = 1 if shard is None else mapped.axes.size[str(mapped.axes.tensor)]
    y = _over_shards(summed, y.reshape(ranks, -1, y.shape[-1]), shard)[0]
    return y if attention.o.bias is None else y + attention.o.bias[...].astype(y.dtype)


def _attended(
    q: jax.Array, k: jax.Array, v: jax.Array, d: int, angles: Angles, sequences: int, mapped: Mapped
) -> jax.Array:
    """Attention of this device's heads; under context parallelism of 1 / R of them, over the tokens of all devices."""
    context = mapped.axes.context
    q, k, v = (a.reshape(sequences, -1, a.shape[-1] // d, d) for a in (q, k, v))
    if context is not None:
        q, k, v = (lax.all_to_all(a, context, 2, 1, tiled=True) for a in (q, k, v))

    @jax.checkpoint
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(rotate(q, *angles), rotate(k, *angles), v)

    y = attend(q, k, v)
    if context is not None:
        y = lax.all_to_all(y, context, 1, 2, tiled=True)
    return y.reshape(-1, y.shape[2] * d)


def _mlp(mlp: nnx.Module, x: jax.Array, mapped: Mapped) -> jax.Array:
    axis = mapped.axes.tensor
    if axis is None:
        return mlp(x)  # type: ignore[operator]
    if isinstance(mlp, PlainMLP):
        bias, mlp.b_down = mlp.b_down, None
        y = _reduced(mlp(_entered(x, mapped)), mapped)
        return y if bias is None else y + bias[...].astype(y.dtype)
    assert isinstance(mlp, TiledMLP)
    params = {name: value[...] for name, value in vars(mlp).items() if isinstance(value, nnx.Param)}
    dtype = compute_dtype(x, params, mlp.dtype)
    params = as_operands(params, dtype)
    return tensor_parallel_mlp(
        x.astype(dtype),
        params.get("w_gate"),
        params["w_up"],
        params["w_down"],
        biases={name[2:]: value for name, value in params.items() if name.startswith("b_")},
        activation=mlp.config.activation,
        sequence_parallel=mapped.sequence_parallel,
        tiling=mlp.config.tiling,
        backend=mlp.config.backend,
        axis_name=axis,
    )


def _loss(model: Llama, x: jax.Array, targets: jax.Array, mapped: Mapped) -> tuple[jax.Array, Any]:
    """Sum and count over the rows; x: this device's."""
    # Not before the layers are through: a tied table is gathered once for the tokens and once for the head.
    _, weight = lax.optimization_barrier((x, _head_part(model)))
    tensor = mapped.config.tensor
    whole = mapped.gather(weight, ("embed",) if model.head is None else ("head",))
    head = whole["embedding"].get_value().T if model.head is None else whole["kernel"].get_value()
    if tensor is None or not tensor.loss_parallel:
        return _own_rows_loss(model, x, head, targets, mapped)
    axis, count = tensor.axis, targets.size
    if model.plain:
        logits = jnp.dot(_entered(x, mapped), head.astype(x.dtype), precision=_precision(x))
        return jnp.sum(vocab_parallel_cross_entropy(logits, targets, axis_name=axis)), count
    if mapped.sequence_parallel:
        targets = _own_rows(targets, axis)
    loss = vocab_parallel_linear_cross_entropy(
        x,
        head,
        targets,
        loss=LossOptions(reduction="sum"),
        tiling=model.loss_tiling,
        sequence_parallel=mapped.sequence_parallel,
        axis_name=axis,
    )
    return loss, count


def _own_rows(a: jax.Array, axis: str) -> jax.Array:
    """This device's run of the rows that all devices of the axis have."""
    rows = a.shape[0] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(a, lax.axis_index(axis) * rows, rows)


def _own_rows_loss(
    model: Llama, x: jax.Array, head: jax.Array, targets: jax.Array, mapped: Mapped
) -> tuple[jax.Array, Any]:
    """The loss of a device's own rows with the whole head, gathered over the tensor axis where it is split."""
    axis = mapped.axes.tensor
    if axis is not None:
        head = lax.all_gather(head, axis, axis=1, tiled=True)
        x = x if mapped.sequence_parallel else _own_rows(x, axis)
        targets = _own_rows(targets, axis)
    if model.plain:
        logits = jnp.dot(x, head.astype(x.dtype), precision=_precision(x)).astype(_wide(x.dtype))
        of_target = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - of_target), targets.size
    options = LossOptions(reduction="sum")
    return tiled_linear_cross_entropy(x, head, targets, loss=options, tiling=model.loss_tiling), targets.size


def _head_part(model: Llama) -> nnx.State:
    """This device's part of the weight of the head."""
    return nnx.state(model.embed if model.head is None else model.head)


def _wide(dtype: Any) -> Any:
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def _precision(x: jax.Array) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def _in_wide(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The module's parameters in the dtype in which a loop over shards adds up their gradients."""
    graph, state = nnx.split(module)
    return graph, jax.tree.map(lambda w: w.astype(_wide(w.dtype)), state)


def _narrowed(graph: nnx.GraphDef, state: nnx.State, like: nnx.Module) -> Any:
    """A copy of the module, with the parameters in the dtypes they had."""
    return nnx.merge(graph, jax.tree.map(lambda w, of: w.astype(of.dtype), state, nnx.state(like)))


def _shard_tokens(model: Llama, rows: int, mapped: Mapped) -> int | None:
    """A device's own tokens in one gathered shard; None where nothing is gathered, or everything at once.

    rows: of all devices of the tensor axis together.
    """
    if not mapped.sequence_parallel or model.plain:
        return None
    axis, mlp = str(mapped.axes.tensor), model.layers.mlp
    ranks, tiling = mapped.axes.size[axis], mlp.config.tiling
    shape = costs.MLPShape(
        tokens=rows,
        hidden=model.config.hidden_size,
        intermediate=model.config.intermediate_size // ranks,
        itemsize=model.dtype.itemsize,
        weight_itemsize=mlp.w_up[...].dtype.itemsize,
    )
    plan = plan_sequence_mlp(
        HERE,
        shape,
        (rows // ranks,) * ranks,
        num_shards=tiling.num_shards,
        shard_tokens=tiling.shard_tokens,
        memory_budget=tiling.memory_budget,
        device=backends.device_kind(),
        peak=partial(compiled_sequence_peak_bytes, device=backends.device_kind()),
    )
    return plan.shard_tokens


def _over_shards(fn: Callable[..., Any], x: jax.Array, t: int | None, *more: jax.Array) -> Any:
    """fn of runs of t entries along dim 1 of x, one after another and again in backward, its results side by side.

    t None: of everything at once. Results have the entries along dim 1 too.
    """
    arrays = (x, *more)
    if t is None or t >= x.shape[1]:
        return fn(*arrays)
    count, rest = divmod(x.shape[1], t)

    def cut(a: jax.Array) -> jax.Array:
        return jnp.moveaxis(a[:, : count * t].reshape(a.shape[0], count, t, *a.shape[2:]), 1, 0)

    def side_by_side(a: jax.Array) -> jax.Array:
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], -1, *a.shape[3:])

    again = jax.checkpoint(fn)
    y = jax.tree.map(side_by_side, lax.map(lambda each: again(*each), tuple(map(cut, arrays))))
    if not rest:
        return y
    tail = again(*(a[:, count * t :] for a in arrays))
    return jax.tree.map(lambda a, b: jnp.concatenate((a, b), axis=1), y, tail)


def _sizes(model: Llama) -> TensorSizes:
    config = model.config
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    even = {**heads, "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size}
    return TensorSizes(even=even)


register_rules(
    Llama,
    ModelRules(
        axes={
            "embed.embedding": ("vocab", "hidden"),
            "head.kernel": ("hidden", "vocab"),
            "norm.scale": ("norm",),
            "layers.*_norm.scale": ("layers", "norm"),
            "layers.attention.q.kernel": ("layers", "hidden", "heads"),
            "layers.attention.[kv].kernel": ("layers", "hidden", "kv_heads"),
            "layers.attention.o.kernel": ("layers", "heads", "hidden"),
            "layers.attention.q.bias": ("layers", "heads"),
            "layers.attention.[kv].bias": ("layers", "kv_heads"),
            "layers.attention.o.bias": ("layers", "norm"),
            "layers.mlp.w_gate": ("layers", "hidden", "intermediate"),
            "layers.mlp.w_up": ("layers", "hidden", "intermediate"),
            "layers.mlp.w_down": ("layers", "intermediate", "hidden"),
            "layers.mlp.b_gate": ("layers", "intermediate"),
            "layers.mlp.b_up": ("layers", "intermediate"),
            "layers.mlp.b_down": ("layers", "norm"),
        },
        loss=decoder_loss,
        sizes=_sizes,
    ),
)
