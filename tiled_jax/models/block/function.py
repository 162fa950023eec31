"""A decoder layer of which everything but attention runs a shard of tokens at a time, and which keeps its input alone.

Forward: norm, projections and rotary positions of every shard; attention; output projection, residual, norm, MLP and residual
of every shard. Backward: the first part and attention again; the second part, without the down product, whose gradient of x
is written over that of the result and that of attention's output over it; attention's backward; the first part's.
No product is made a third time, but for those of q and k where heads are normed, and that of down is made again only where a
norm follows it. This holds where `jax.checkpoint` replays the layer as well, as nobody uses what that would compute.
Attention is that of cuDNN's kernels where they can compute it, as in `causal_attention`, else in blocks of our own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.errors import UnsupportedError, error_text
from shared_specs.layers.heads import context_heads
from shared_specs.layers.scope import check_block_tiling
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.collectives.conjugates import Axis, exchange_parts, mesh_axis
from tiled_jax.core.linear_call import Arrays, Saved, barrier, differentiable
from tiled_jax.core.loops import Body, for_each, gradient_of, vary_over, varying_of, zeros_after
from tiled_jax.core.own_tokens import Axes, TokenOp, as_typed, on_own_tokens
from tiled_jax.core.products import refuse_exchanged_products, wide
from tiled_jax.layers import attention_blocks, ring_steps
from tiled_jax.layers.attention import cudnn_attention
from tiled_jax.mlp.api import check_operands, make_call
from tiled_jax.mlp.loops import MLPCall
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.mlp.steps import XLA
from tiled_jax.models.block import attention as block_attention
from tiled_jax.models.block import cudnn
from tiled_jax.models.block.adapters import dtype_of_products, steps_with_adapters, without_kernels
from tiled_jax.models.block.experts import experts_call
from tiled_jax.models.block.params import QKV, apart, names_apart, parameters_of, together
from tiled_jax.models.block.ranks import Here, OverTokens, block_ranks
from tiled_jax.models.block.steps import BEFORE_ATTENTION, MLP, TURNS, LayerSteps
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.models.rope import turning
from tiled_jax.moe.loops import MoECall

Results = tuple[Arrays, Arrays]  # of rows, and sums over tokens
# From the gradient of attention's output, and the sum of both over a head's features, to the gradients of q, k and v.
AttentionPull = Callable[[jax.Array, jax.Array], attention_blocks.Gradients]
_NAME = "Llama"
FIRST = "first"  # of the operands: the first key that each query sees
MASK = "mask"  # the keys that others than the query in their place see
_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True)
class _Block:
    """All that is static about one layer: what a shard goes through, the MLP's plan and split, and the sequences of a batch."""

    steps: LayerSteps
    call: MLPCall | MoECall
    sequences: int
    heads_axis: str | None
    ring_axis: str | None
    attention: str  # the backend of `causal_attention`

    @property
    def block(self) -> int:
        """Return the number of tokens of a block of attention."""
        ranks = 1 if self.heads_axis is None else self.axis.size
        tokens = self.call.plan.tokens * self.ranks.gathered // self.sequences * ranks
        tokens, heads = tokens if self.ring_axis is None else tokens // 2, self.query_heads // ranks
        return attention_blocks.block_tokens(self.sequences, tokens, heads, backends.device_kind())

    @property
    def scores(self) -> attention_blocks.Scoring:
        config = self.steps.config
        return attention_blocks.Scoring(config.attention_scale, config.attention_softcap)

    @property
    def axis(self) -> Axis:
        return mesh_axis(_NAME, self.heads_axis)

    def attend(self, operands: Arrays, qkv: list[jax.Array]) -> tuple[jax.Array, AttentionPull]:
        """Return attention of the tokens that q has, and what makes gradients of q, k and v of that of its output."""
        (q, k, v), first, mask, how = qkv, operands.get(FIRST), operands.get(MASK), self.scores
        if self.ring_axis is not None:
            ring, block = mesh_axis(_NAME, self.ring_axis), self.block
            y, lse = ring_steps.forward(q, k, v, ring, block, first, how)
            return y, lambda dy, delta: ring_steps.backward(q, k, v, lse, delta, dy, ring, block, first, how)
        known = first is None and mask is None and how.softcap is None
        by_cudnn = cudnn_attention(q, k, v, scale=how.scale, known=known, backend=self.attention)
        if by_cudnn is not None:
            y, pull = cudnn.forward(by_cudnn, q, k, v)
            return y, lambda dy, delta: pull(dy)
        y, lse = block_attention.forward(q, k, v, self.block, first, mask, how)
        return y, lambda dy, delta: block_attention.backward(q, k, v, lse, delta, dy, self.block, first, mask, how)

    @property
    def copies(self) -> int:
        """Return how often a key head is repeated, so that every device of the context has as many."""
        kv_heads = self.steps.config.num_key_value_heads // self.ranks.ranks
        return context_heads(_NAME, self.query_heads, kv_heads, self.axis.size).copies

    @property
    def ranks(self) -> Here:
        return self.steps.ranks

    @property
    def query_heads(self) -> int:
        """Return this device's number of query heads, before the devices of a context share them."""
        return self.steps.config.num_attention_heads // self.ranks.ranks

    @property
    def head_dim(self) -> int:
        return self.steps.config.head_dim

    def heads(self, a: jax.Array, d: int | None = None) -> jax.Array:
        """[T, heads d] -> [sequences, tokens, heads, d]."""
        d = d or self.head_dim
        return a.reshape(self.sequences, -1, a.shape[-1] // d, d)

    def qkv(self, rows: Arrays) -> list[jax.Array]:
        """Return q, k and v of all tokens, of the heads with which this device attends."""
        q, k, v = (self.heads(rows[name]) for name in QKV)
        if self.heads_axis is None:
            return [q, k, v]
        k, v = (jnp.repeat(a, self.copies, axis=2) for a in (k, v))
        return [self.of_heads(a) for a in (q, k, v)]

    def of_heads(self, a: jax.Array) -> jax.Array:
        """[sequences, this device's tokens, heads, d] -> [sequences, all tokens, heads / R, d]."""
        return a if self.heads_axis is None else exchange_parts(a, self.axis, 2, 1)

    def of_tokens(self, a: jax.Array) -> jax.Array:
        """The other way."""
        return a if self.heads_axis is None else exchange_parts(a, self.axis, 1, 2)

    def gradients_of_tokens(self, d: attention_blocks.Gradients) -> Arrays:
        """Return the gradients of q, k and v of this device's tokens, [T, columns], those of a repeated head added up.

        Those that need no sum are exchanged in the dtype of the products, to which they are rounded in any case.
        """
        found = d._asdict()
        if self.heads_axis is not None and self.copies == 1:
            found = {name: a.astype(self.steps.dtype) for name, a in found.items()}
        found = {name: self.of_tokens(a) for name, a in found.items()}
        if self.heads_axis is not None and self.copies > 1:
            for name in ("k", "v"):
                a = found[name]
                found[name] = jnp.sum(a.reshape(*a.shape[:2], -1, self.copies, a.shape[-1]), axis=3)
        return {name: a.reshape(-1, a.shape[2] * a.shape[3]) for name, a in found.items()}

    def plan(self, tokens: int, columns: int) -> ShardPlan:
        """Return the shards of a device that has so many tokens, and so many columns of the MLP."""
        call = self.call
        return (call.on_device(tokens) if isinstance(call, MoECall) else call.on_device(tokens, 0, columns)).plan

    def each(self, body: Callable[[Any, int, Any], Any], carry: Any, rows: Arrays, columns: int) -> Any:
        """Return the carry after every shard of the tokens that this device has."""
        plan = self.plan(rows["x"].shape[0], columns)
        types = varying_of([*rows.values(), *jax.tree.leaves(carry)])

        def typed(carry: Any) -> Any:
            return jax.tree.map(lambda a: vary_over(a, types), carry)

        def run(start: Any, tokens: int, carry: Any) -> Any:
            return typed(body(start, tokens, carry))

        return for_each(plan, Body(run, lambda ahead, carry: barrier((ahead, carry))), typed(carry))

    def cast(self, w: Arrays) -> Arrays:
        """Return the matrices and biases in the dtype of the products, once for all shards."""
        alone = ("s_", TURNS)
        return {name: a if name.startswith(alone) else a.astype(self.steps.dtype) for name, a in w.items()}

    def sum_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.steps.mlp.sum_shape(name, shape) if name in MLP else shape


def block_layer(
    layer: Any,
    x: jax.Array,
    positions: jax.Array,
    sequences: int,
    first: jax.Array | None = None,
    *,
    mask: jax.Array | None = None,
    turns: jax.Array | None = None,
    heads_axis: str | None = None,
    ring_axis: str | None = None,
    tensor: str | None = None,
    sequence_parallel: bool = False,
) -> jax.Array:
    """Return what a `DecoderLayer` makes of x.

    Args:
        layer: a DecoderLayer with a TiledMLP, or without `tensor` with an ExpertsMLP; with `tensor` this device's parts of its
            parameters.
        x: [T, H], the residual stream, T = sequences * tokens. positions: [T] int32.
        first: [sequences or 1, tokens] int32, for each of the tokens that attend here the place in the sequence of the first
            key that it sees; None: that of the sequence.
        mask: [sequences or 1, tokens] of booleans, the keys that others than the query in their place see; None: all. Of
            devices that have all tokens of a sequence.
        turns: how positions turn q and k, as `models.rope.turning` returns it; None: as the configuration's `rope` says.
        heads_axis: an axis of the surrounding `jax.shard_map` whose devices hold a part of the tokens of every sequence each,
            and attend with some of the heads; see `layers.context`.
        ring_axis: one round which keys and values are sent; see `layers.ring`. With both the tokens of the devices of
            `heads_axis` together are those of one device of the ring.
        tensor: an axis whose devices have columns of q, k, v, gate and up, and rows of what follows them, each.
        sequence_parallel: x is this device's run of the rows, [T / R, H], and a shard of them is gathered at a time; shards
            are then of a device's own rows.
    Returns:
        [T, H], dtype of x; [T / R, H] with sequence_parallel.
    Numerics: as DecoderLayer and `tiled_mlp`; gradients of all parameters are summed over shards in float32 and cast once.
        Parts of sums over devices are rounded to the dtype of the products and added in float32.
    Memory: keeps x and the parameters. shared_specs.layers.block_costs.block_row_bytes.
    Derivatives: of forward and reverse mode, and of each other, but for those of reverse mode where cuDNN attends.
    """
    if turns is None:
        # An operand, because what a partitioner runs may have no constants.
        turns = turning(layer.attention.config.rope, layer.attention.head_dim, positions)
    parameters = parameters_of(layer)
    refuse_exchanged_products("Llama", parameters)
    operands = {"x": x, "positions": positions, TURNS: turns} | parameters
    operands |= {name: a for name, a in ((FIRST, first), (MASK, mask)) if a is not None}
    ranks = block_ranks(tensor, sequence_parallel)
    of_parts = apart(layer.attention.config, operands)
    return _layer(_static(layer, x, of_parts, sequences, heads_axis, ring_axis, ranks), operands)["y"]


def _static(
    layer: Any,
    x: jax.Array,
    operands: Arrays,
    sequences: int,
    heads_axis: str | None,
    ring_axis: str | None,
    ranks: Here,
) -> _Block:
    attention, mlp = layer.attention, layer.mlp
    dtype = jnp.dtype(dtype_of_products(mlp) or x.dtype)
    _refuse_explicit_axes(x)
    if isinstance(mlp, ExpertsMLP):
        call = experts_call(_NAME, mlp, x.astype(dtype), operands)
        steps = LayerSteps(attention.config, dtype, XLA, ranks, call)
    else:
        call = _mlp_call(mlp, x.astype(dtype), operands, ranks)
        steps = LayerSteps(attention.config, dtype, steps_with_adapters(call.steps, operands), ranks)
    return _Block(steps, call, sequences, heads_axis, ring_axis, attention.backend)


def _mlp_call(mlp: TiledMLP, x: jax.Array, operands: Arrays, ranks: Here) -> MLPCall:
    """Return the call of the MLP on x, in the dtype of the products."""
    check_block_tiling(_NAME, mlp.config.tiling, mlp.config.backend)
    biases = {name: operands[f"b_{name}"] for name in ("gate", "up", "down") if f"b_{name}" in operands}
    given = check_operands(
        _NAME,
        x,
        operands["w_gate"],
        operands["w_up"],
        operands["w_down"],
        biases,
        mlp.config.activation,
        None,
        0.0,
        mlp.config.tiling,
        mlp.config.backend,
        several=False,
    )
    return make_call(given, mlp.config.backend, ranks.axis if isinstance(ranks, OverTokens) else None)


def _refuse_explicit_axes(x: jax.Array) -> None:
    """Attention is left to XLA, which does not cut what the types cut."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.explicit_axes:
        advice = "Call it under parallelize, or inside jax.shard_map."
        rule = "of axis type Auto with scope='block'"
        raise UnsupportedError(error_text(_NAME, "the axes of the mesh", rule, "Explicit", advice=advice))


class _LayerRules:
    """x is [T, H], positions [T]; the other operands are parameters, named as `block_layer` names them."""

    @staticmethod
    def forward(block: _Block, operands: Arrays) -> Arrays:
        operands = block.ranks.varied(apart(block.steps.config, operands))
        rows, w = _rows_and_weights(operands)
        qkv = block.qkv(_own(block, _before, rows, _of_attention(w))[0])
        a = block.of_tokens(block.attend(operands, qkv)[0])
        rows = {"x": rows["x"], "a": a.reshape(rows["positions"].shape[0], -1)}
        return {"y": block.ranks.finished(_own(block, _behind, rows, _of_mlp(w))[0]["y"])}

    @staticmethod
    def save(block: _Block, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        return _LayerRules.forward(block, operands), Saved(operands)

    @staticmethod
    def tangents(block: _Block, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        steps = replace(block.steps, mlp=without_kernels(block.steps.mlp))
        block = replace(block, steps=steps, attention="blocks")

        def moved(of: Arrays) -> Arrays:
            return _LayerRules.forward(block, saved.arrays | of)

        return jax.jvp(moved, ({name: saved.arrays[name] for name in t},), (t,))[1]

    @staticmethod
    def gradients(block: _Block, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        # Without the barrier XLA takes what forward computed, and keeps it.
        operands, dy = barrier((saved.arrays, g["y"]))
        operands = block.ranks.varied(apart(block.steps.config, operands))
        parts = names_apart(wanted)
        rows, w = _rows_and_weights(operands)
        dy = block.ranks.varied({"y": dy})["y"]
        x, tokens = rows["x"], rows["positions"].shape[0]
        qkv = block.qkv(_own(block, _before, rows | {"after": dy}, _of_attention(w))[0])
        a, pull = block.attend(operands, qkv)
        # Attention is done before dy is written over.
        a, dy = barrier((a, dy))
        given = {"x": x, "a": block.of_tokens(a).reshape(tokens, -1), "dy": dy}
        found, sums = _own(block, partial(_behind_backward, wanted=parts), given, _of_mlp(w))
        da, delta = block.of_heads(block.heads(found["a"])), block.of_heads(block.heads(found["delta"], 1))[..., 0]
        d = block.gradients_of_tokens(pull(da, delta))
        given = rows | {"dx": found["x"]} | {f"d_{name}": value for name, value in d.items()}
        found, more = _own(block, partial(_before_backward, wanted=parts), given, _of_attention(w))
        found = together(found | sums | more, wanted)
        # The types of the operands themselves: the barrier may have joined those of its own.
        found = {name: gradient_of(saved.arrays[name], value) for name, value in found.items()}
        return {name: as_typed(saved.arrays[name], value) for name, value in found.items()}


def _rows_and_weights(operands: Arrays) -> tuple[Arrays, Arrays]:
    rows = {name: operands[name] for name in ("x", "positions")}
    return rows, {name: a for name, a in operands.items() if name not in (*rows, FIRST, MASK)}


def _of_attention(w: Arrays) -> Arrays:
    return {name: w[name] for name in (*BEFORE_ATTENTION, TURNS) if name in w}


def _of_mlp(w: Arrays) -> Arrays:
    return {name: a for name, a in w.items() if name not in (*BEFORE_ATTENTION, TURNS)}


def _own(block: _Block, run: Callable[..., Results], rows: Arrays, w: Arrays) -> Results:
    """`run` of the tokens that every device has; parameters are whole."""
    columns = block.steps.config.intermediate_size
    op = TokenOp(partial(run, block, columns), column_dim=lambda name: None)
    return on_own_tokens(block.call.split, op)(rows, w)


def _empty(block: _Block, after: jax.Array, tokens: int, columns: int, dtype: Any) -> jax.Array:
    return zeros_after(after, (tokens * block.ranks.gathered, columns), dtype)


def _before(block: _Block, columns: int, rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """Return q, k and v. rows: with `after` what is there before they are."""
    cast = block.cast(w)

    def shard(start: Any, tokens: int, carry: Arrays) -> Arrays:
        x, positions = _rows(rows["x"], start, tokens), block.ranks.rows(rows["positions"], start, tokens)
        found = block.steps.before(x, positions, cast)
        return {name: block.ranks.set_rows(carry[name], found[name], start) for name in carry}

    empty = partial(_empty, block, rows.get("after", rows["x"]), rows["x"].shape[0])
    carry = {name: empty(w[f"w_{name}"].shape[1], block.steps.dtype) for name in QKV}
    return block.each(shard, carry, rows | w, columns), {}


def _behind(block: _Block, columns: int, rows: Arrays, w: Arrays, axes: Axes) -> Results:
    """Return the layer's result."""
    backends.record_run("tiled_mlp" if block.steps.experts is None else "tiled_moe", block.steps.mlp.backend)
    cast = block.cast(w)

    def shard(start: Any, tokens: int, y: jax.Array) -> jax.Array:
        x, a = _rows(rows["x"], start, tokens), block.ranks.rows(rows["a"], start, tokens)
        return _set_rows(y, block.steps.behind(x, a, cast), start, 0)

    y = zeros_after(rows["a"], rows["x"].shape, rows["x"].dtype)
    return {"y": block.each(shard, y, rows | w, columns)}, {}


def _behind_backward(
    block: _Block, columns: int, rows: Arrays, w: Arrays, axes: Axes, *, wanted: tuple[str, ...]
) -> Results:
    """Return the gradients of x, written over dy, and of attention's output, over it; of each head the sum of both of these."""
    cast, x = block.cast(w), rows["x"]

    def shard(start: Any, tokens: int, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        of_rows, sums = carry
        # The barrier makes them rows of their own: XLA would read them from what is written over, and copy all of that first.
        a, dy = barrier((block.ranks.rows(of_rows["a"], start, tokens), _rows(of_rows["x"], start, tokens)))
        dx, da, delta, sums = block.steps.behind_gradients(_rows(x, start, tokens), a, dy, cast, sums)
        found = {name: block.ranks.set_rows(of_rows[name], d, start) for name, d in (("a", da), ("delta", delta))}
        return found | {"x": _set_rows(of_rows["x"], dx, start, 0)}, sums

    delta = _empty(block, rows["a"], x.shape[0], block.query_heads, wide(block.steps.dtype))
    carry = {"x": rows["dy"], "a": rows["a"], "delta": delta}
    found, sums = block.each(shard, (carry, _sums(block, rows["a"], w, wanted)), rows | w, columns)
    if len(block.plan(x.shape[0], columns)) == 1:
        # Before attention's gradients are made: XLA would leave the products of a single shard for later.
        found, sums = barrier((found, sums))
    return found, {name: total if total.shape == w[name].shape else total[0] for name, total in sums.items()}


def _before_backward(
    block: _Block, columns: int, rows: Arrays, w: Arrays, axes: Axes, *, wanted: tuple[str, ...]
) -> Results:
    """Return the gradient of x, added to what there is of it."""
    cast = block.cast(w)

    def shard(start: Any, tokens: int, carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        total, sums = carry
        cut = {name: block.ranks.rows(a, start, tokens) for name, a in rows.items() if name not in ("x", "dx")}
        d = {name: cut[f"d_{name}"] for name in QKV}
        x = _rows(rows["x"], start, tokens)
        dx, sums = block.steps.before_gradients(x, cut["positions"], d, cast, sums)
        return _set_rows(total, _rows(total, start, tokens) + dx, start, 0), sums

    dx, sums = block.each(shard, (rows["dx"], _sums(block, rows["d_q"], w, wanted)), rows | w, columns)
    return {"x": dx}, sums


def _sums(block: _Block, after: jax.Array, w: Arrays, wanted: tuple[str, ...]) -> Arrays:
    acc = {name: wide(w[name].dtype if name.startswith("s_") else block.steps.dtype) for name in w if name in wanted}
    return {name: zeros_after(after, block.sum_shape(name, w[name].shape), acc[name]) for name in acc}


_layer = differentiable(_LayerRules.forward, _LayerRules)
