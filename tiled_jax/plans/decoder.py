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

from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.mlp import costs as mlp_costs
from shared_specs.mlp.sequence_costs import compiled_sequence_peak_bytes, plan_sequence_mlp
from shared_specs.plans.checks import TensorSizes
from tiled_jax import backends
from tiled_jax.core.params import as_operands, compute_dtype
from tiled_jax.core.products import wide
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.mlp.projections import reason_of_products
from tiled_jax.mlp.ranks import on_device
from tiled_jax.models import Llama
from tiled_jax.models.block.function import block_layer
from tiled_jax.models.block.plain import reason_not_block
from tiled_jax.models.layer import Attention, DecoderLayer, with_branch
from tiled_jax.models.mlp import PlainMLP
from tiled_jax.models.watched import watched
from tiled_jax.plans.data import Mapped
from tiled_jax.plans.decoder_context import attended, own_tokens
from tiled_jax.plans.decoder_ends import embedded, head_loss
from tiled_jax.plans.decoder_layers import layer_apart
from tiled_jax.plans.decoder_tokens import entered, over_shards, reduced
from tiled_jax.plans.registry import ModelRules, register_rules
from tiled_jax.plans.variables import is_state

HERE = "parallelize"


def decoder_loss(model: Llama, batch: Any, mapped: Mapped) -> tuple[jax.Array, Any]:
    """Return (sum of the next tokens' cross entropy, number of tokens) of this device's share; `next_token_loss` of the whole.

    Args:
        model: with this device's parts of the parameters.
        batch: of this device's sequences, as `next_token_loss` takes it, whole along the axes of context parallelism.
    """
    if mapped.config.checkpointing is None:
        mapped = replace(mapped, config=replace(mapped.config, checkpointing=model.recomputed()))
    tokens, axes = own_tokens(batch, mapped), mapped.axes
    _check_rows(tokens.inputs.size, mapped)
    shard = _shard_tokens(model, tokens.inputs.size, mapped)
    x = embedded(model, tokens.inputs.reshape(-1), shard, mapped).astype(wide(model.dtype))
    x = x if model.config.embedding_scale == 1 else x * jnp.asarray(model.config.embedding_scale, x.dtype)
    kinds = tokens.kinds(model.config, model.dtype, mapped)
    positions, firsts = (
        jnp.broadcast_to(tokens.positions, tokens.inputs.shape).reshape(-1),
        tokens.first_keys(kinds, mapped),
    )
    graph, opened = layer_apart(model)

    def layer(parameters: nnx.State, x: jax.Array, kind: jax.Array | None = None) -> jax.Array:
        one, first = nnx.merge(graph, parameters), kinds.of(firsts, kind)
        if model.scope == "block":
            y = block_layer(
                one,
                x,
                positions,
                tokens.inputs.shape[0],
                first,
                turns=kinds.of(kinds.turns, kind),
                heads_axis=axes.heads,
                ring_axis=axes.ring,
                tensor=axes.tensor,
                sequence_parallel=mapped.sequence_parallel,
            )
        else:
            attend = partial(attended, angles=kinds.angles(kind), tokens=tokens, first=first, kind=kind, mapped=mapped)
            y = _layer(one, x, attend, shard, mapped)
        return watched(y, model.heard)

    x = mapped.scan(layer, nnx.state(model.layers), x, ("layers",), kinds.of_layer, opened)
    norm = nnx.merge(nnx.graphdef(model.norm), mapped.gather(nnx.state(model.norm), ("norm",)))
    # As in Llama.hidden, backward keeps x alone.
    norm = jax.checkpoint(norm) if model.scope == "block" else norm
    return head_loss(model, norm(x).astype(model.dtype), tokens.targets.reshape(-1), mapped)


def _check_model(model: Llama) -> None:
    """Check that these layers have all parts of a model.

    Raises:
        UnsupportedError: they have a head, or with scope="block" a part, that is to be called, random keys or statistics.
    """
    reason = model.reason_not_plain_head()
    if reason is not None:
        advice = "Pass tiled_jax.models.loss.summed_next_token_loss as loss_fn, with axes of data parallelism alone."
        raise UnsupportedError(
            error_text(HERE, "the model's head", "one product with its weight", reason, advice=advice)
        )
    reason = reason_not_block(model.layers) if model.scope == "block" else None
    if reason is not None:
        rule, advice = "plain with scope='block'", "Take scope='mlp', whose parts are called."
        raise UnsupportedError(error_text(HERE, "a layer's parts", rule, reason, advice=advice))
    for path, variable in nnx.to_flat_state(nnx.state(model, is_state)):
        name, advice = ".".join(map(str, path)), "Its layers are one loop, which carries the hidden states alone."
        raise UnsupportedError(error_text(HERE, name, "a parameter", type(variable).__name__, advice=advice))


def _check_rows(rows: int, mapped: Mapped) -> None:
    """Sequence parallelism, and a head that is not split, deal the rows out to the devices of the tensor axis."""
    tensor = mapped.config.tensor
    if tensor is None or not (tensor.sequence_parallel or not tensor.loss_parallel):
        return
    ranks = mapped.axes.size[tensor.axis]
    if rows % ranks:
        rule = f"a multiple of the {ranks} devices of the mesh axis '{tensor.axis}'"
        fail(HERE, "the tokens of a data rank", rule, rows, advice="Change the length or the number of sequences.")


def _layer(
    block: DecoderLayer, x: jax.Array, attend: Callable[..., jax.Array], shard: int | None, mapped: Mapped
) -> jax.Array:
    """Return one layer of whole parameters, but for the tensor axis; x: this device's rows."""
    y = _attention(block.attention, jax.checkpoint(block.attention_norm)(x), attend, shard, mapped)
    x = with_branch(x, y, block.attention_out_norm)
    return with_branch(x, _mlp(block.mlp, jax.checkpoint(block.mlp_norm)(x), mapped), block.mlp_out_norm)


def _attention(
    attention: Attention, x: jax.Array, attend: Callable[..., jax.Array], shard: int | None, mapped: Mapped
) -> jax.Array:
    graph, weights = _in_wide(attention)

    def columns(x: jax.Array) -> tuple[jax.Array, ...]:
        module, rows = _narrowed(graph, weights, attention), entered(x[0], mapped)
        products = (getattr(module, name)(rows) for name in "qkv")
        return tuple(a.reshape(-1, x.shape[1], a.shape[-1]) for a in products)

    def summed(y: jax.Array) -> jax.Array:
        module = _narrowed(graph, weights, attention)
        module.o.bias, module.o.use_bias = None, False  # added once, to the sum
        return reduced(module.o(y.reshape(-1, y.shape[-1])), mapped)[None]

    q, k, v = (a.reshape(-1, a.shape[-1]) for a in over_shards(columns, x[None], shard))
    y = attend(attention, q, k, v)
    ranks = 1 if shard is None else mapped.axes.size[str(mapped.axes.tensor)]
    y = over_shards(summed, y.reshape(ranks, -1, y.shape[-1]), shard)[0]
    return y if attention.o.bias is None else y + attention.o.bias[...].astype(y.dtype)


def _mlp(mlp: nnx.Module, x: jax.Array, mapped: Mapped) -> jax.Array:
    axis = mapped.axes.tensor
    if axis is None:
        return mlp(x)  # type: ignore[operator]
    if isinstance(mlp, PlainMLP):
        plain: Any = mlp  # which sets its parameters by name
        bias, plain.b_down = plain.b_down, None
        y = reduced(plain(entered(x, mapped)), mapped)
        return y if bias is None else y + bias[...].astype(y.dtype)
    assert isinstance(mlp, TiledMLP)
    if (reason := reason_of_products(mlp)) is not None:
        advice = "Take axes of data parallelism alone, whose devices call the module."
        rule = "without products of its own under tensor parallelism"
        raise UnsupportedError(error_text(HERE, "an MLP", rule, reason, advice=advice))
    params = mlp.config.held("parallelize", mlp)
    dtype = compute_dtype(x, params, mlp.dtype)
    return on_device(mlp.config, mapped.sequence_parallel, axis, x.astype(dtype), as_operands(params, dtype))


def _in_wide(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the module's parameters in the dtype in which a loop over shards adds up their gradients."""
    graph, state = nnx.split(module)
    return graph, jax.tree.map(lambda w: w.astype(wide(w.dtype)), state)


def _narrowed(graph: nnx.GraphDef, state: nnx.State, like: nnx.Module) -> Any:
    """Return a copy of the module, with the parameters in the dtypes they had."""
    return nnx.merge(graph, jax.tree.map(lambda w, of: w.astype(of.dtype), state, nnx.state(like)))


def _shard_tokens(model: Llama, rows: int, mapped: Mapped) -> int | None:
    """Return a device's own tokens in one gathered shard; None where nothing is gathered, or everything at once.

    rows: of all devices of the tensor axis together.
    """
    if not mapped.sequence_parallel or model.plain:
        return None
    mlp: Any = model.layers.mlp  # a TiledMLP, as the model is not plain
    ranks, tiling = mapped.axes.size[str(mapped.axes.tensor)], mlp.config.tiling
    shape = mlp_costs.MLPShape(
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
        **tiling.cut(),
        device=backends.device_kind(),
        peak=partial(compiled_sequence_peak_bytes, device=backends.device_kind()),
    )
    return plan.shard_tokens


def _sizes(model: Llama) -> TensorSizes:
    config = model.config
    heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads}
    return TensorSizes(even={**heads, "intermediate_size": config.intermediate_size}, vocab=config.vocab_size)


register_rules(
    Llama,
    ModelRules(
        axes={
            "embed.embedding": ("vocab", "hidden"),
            "head.kernel": ("hidden", "vocab"),
            "norm.scale": ("norm",),
            "layers.*_norm.scale": ("layers", "norm"),
            "layers.attention.q.*kernel": ("layers", "hidden", "heads"),  # `*`: in an adapter around it too
            "layers.attention.[kv].*kernel": ("layers", "hidden", "kv_heads"),
            "layers.attention.qkv.kernel": ("layers", "hidden", None),
            "layers.attention.o.*kernel": ("layers", "heads", "hidden"),
            "layers.attention.[qkv].*lora_a": ("layers", "hidden", None),
            "layers.attention.q.*lora_b": ("layers", None, "heads"),
            "layers.attention.[kv].*lora_b": ("layers", None, "kv_heads"),
            "layers.attention.o.*lora_a": ("layers", "heads", None),
            "layers.attention.o.*lora_b": ("layers", None, "hidden"),
            "layers.attention.q.*bias": ("layers", "heads"),
            "layers.attention.[kv].*bias": ("layers", "kv_heads"),
            "layers.attention.qkv.bias": ("layers", "norm"),
            "layers.attention.o.*bias": ("layers", "norm"),
            "layers.mlp.router.kernel": ("layers", "hidden", None),
            "layers.mlp.w_gate_up": ("layers", "hidden", None),
            "layers.mlp.w_gate": ("layers", "hidden", "intermediate"),
            "layers.mlp.w_up": ("layers", "hidden", "intermediate"),
            "layers.mlp.w_down": ("layers", "intermediate", "hidden"),
            "layers.*.w_gate": ("layers", None, "hidden", "intermediate"),  # of experts
            "layers.*.w_up": ("layers", None, "hidden", "intermediate"),
            "layers.*.w_down": ("layers", None, "intermediate", "hidden"),
            "layers.mlp.b_gate_up": ("layers", "norm"),
            "layers.mlp.b_gate": ("layers", "intermediate"),
            "layers.mlp.b_up": ("layers", "intermediate"),
            "layers.mlp.b_down": ("layers", "norm"),
        },
        loss=decoder_loss,
        sizes=_sizes,
        check=_check_model,
    ),
)
