"""The loops of one distillation loss over the tokens that a device has: forward, tangents, backward.

Letters: T tokens, H and G the hidden sizes of student and teacher, V vocabulary. The logits [t, V] of one shard of both heads
exist at a time. With reduction "mean" or "sum" forward computes the gradients while they are there; with "none" backward
computes them again. Where `DistillationCall.valid_first`, T are the tokens with a label, in whole shards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shared_specs.shards import ShardPlan
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import Body, for_each, vary_over, varying_of
from tiled_jax.core.own_tokens import Split
from tiled_jax.core.products import wide
from tiled_jax.core.row_shards import counted_first, rows_of, with_rows
from tiled_jax.core.turns import for_each_of_first
from tiled_jax.distillation import math as distillation_math
from tiled_jax.distillation.math import DistillationRules
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.loops import tangent_of_logits
from tiled_jax.loss.math import Labels, Part

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class DistillationCall:
    """All that is static about one call; the plan of forward is the plan of backward.

    Args:
        split: how a mesh cuts the tokens where this is not inside a `shard_map`: rows then have their leading dims, and every
            device makes a plan for its own tokens, `replan(tokens)`.
        valid_first: whether rows are taken in the order of `rows.valid_first`, and only as many shards as have a label.
    """

    plan: ShardPlan
    rules: DistillationRules
    split: Split | None = None
    replan: Callable[[int], ShardPlan] | None = None
    valid_first: bool = False

    @property
    def in_forward(self) -> bool:
        """Return whether one upstream number scales every gradient."""
        return self.rules.options.reduction != "none"

    def on_device(self, tokens: int) -> "DistillationCall":
        """Return the call of a device that has so many tokens."""
        if self.split is None or self.replan is None or tokens == self.plan.tokens:
            return self
        return replace(self, plan=self.replan(tokens))


def forward(
    call: DistillationCall, rows: Arrays, w: Arrays, wanted: tuple[str, ...], unit: Any
) -> tuple[jax.Array, Arrays]:
    """Return the loss of each token [T], and the gradients of their sum divided by `unit`: of x in its dtype, of others in the
    wide one.

    rows: x [T, H], teacher [T, G] and, where they are given, targets and token_weight [T]. w: weight [H, V], bias [V], and
    those of the teacher, `w_teacher` and `bias_teacher`.
    """
    upstream = jnp.ones(rows["x"].shape[0], wide(rows["x"].dtype)) / unit if wanted else None
    return _run(call, rows, w, upstream, wanted)


def backward(call: DistillationCall, rows: Arrays, w: Arrays, g: jax.Array, wanted: tuple[str, ...]) -> Arrays:
    """Return gradients for upstream ones [T] of the loss of each token, from logits that are computed again."""
    # Without the barrier XLA merges the logits of a single shard with those of forward and keeps them in between.
    rows, w, g = barrier((rows, w, g))
    weight = rows.get("token_weight")
    size = _power_of_two(call, jnp.abs(g if weight is None else g * weight.astype(g.dtype)))
    gradients = _run(call, rows, w, g / size, wanted)[1]
    return {name: (a.astype(g.dtype) * size).astype(a.dtype) for name, a in gradients.items()}


def tangents(call: DistillationCall, rows: Arrays, w: Arrays, t: Arrays) -> jax.Array:
    """Return the tangent [T] of the loss of each token, from those of x, weight and bias."""
    dtype, heads, mine = wide(rows["x"].dtype), _HeadPair.of(rows, w), _own(w)
    of_w = {name: a.astype(rows["x"].dtype) for name, a in t.items() if name != "x"}
    zeros = {name: jnp.zeros(a.shape, rows["x"].dtype) for name, a in mine.items() if name not in of_w}
    moved = _part(zeros | of_w)
    given = rows | {"of_x": t["x"]} if "x" in t else rows
    axes = varying_of([*given.values(), *w.values(), *t.values()])

    def shard(place: Any, cut: Arrays, carry: jax.Array) -> jax.Array:
        labels, (logits, logits_teacher) = _labels(call, cut), heads.logits(cut)
        ones = jnp.ones(cut["x"].shape[0], dtype)
        weights = _weights(cut, labels, dtype)
        d = distillation_math.losses_and_gradient(call.rules, logits, logits_teacher, labels, ones)[1]
        assert d is not None
        of_logits = tangent_of_logits(cut["x"], cut.get("of_x"), heads.student, moved, of_w)
        values = jnp.where(weights == 0, 0, weights * jnp.sum(d.astype(dtype) * of_logits, axis=1))
        return with_rows(carry, vary_over(values, axes), place)

    return _for_each_shard(call, given, shard, vary_over(jnp.zeros(rows["x"].shape[0], dtype), axes))


def unit_of(call: DistillationCall, rows: Arrays, dtype: Any) -> jax.Array:
    """Return the number by which gradients of the sum of the losses are divided to be stored near 1."""
    weight = rows.get("token_weight")
    sizes = jnp.ones(1, dtype) if weight is None else jnp.abs(weight.astype(dtype)).reshape(-1)
    return _power_of_two(call, sizes)


def _run(
    call: DistillationCall, rows: Arrays, w: Arrays, upstream: jax.Array | None, wanted: tuple[str, ...]
) -> tuple[jax.Array, Arrays]:
    x, dtype, heads = rows["x"], wide(rows["x"].dtype), _HeadPair.of(rows, w)
    given = rows if upstream is None else rows | {"upstream": upstream}
    axes = varying_of([*given.values(), *w.values()])
    primals = {"x": x, **_own(w)}
    zeros = {name: jnp.zeros(primals[name].shape, x.dtype if name == "x" else dtype) for name in wanted}
    carry = jnp.zeros(x.shape[0], dtype), zeros

    def shard(place: Any, cut: Arrays, carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        found, gradients = carry
        labels, (logits, logits_teacher) = _labels(call, cut), heads.logits(cut)
        weights = _weights(cut, labels, dtype)
        of_rows = None if upstream is None else jnp.where(weights == 0, 0, weights * cut["upstream"])
        losses, dlogits = distillation_math.losses_and_gradient(call.rules, logits, logits_teacher, labels, of_rows)
        weight = cut.get("token_weight")
        if weight is not None:
            losses = jnp.where(weights == 0, 0, losses * weight.astype(dtype))
        found = with_rows(found, vary_over(losses, axes), place)
        if dlogits is not None:
            d = loss_math.operand_gradients(cut["x"], dlogits, heads.student, wanted)
            d = {name: vary_over(a, axes) for name, a in d.items()}
            rows_of_dx = {"x": with_rows(gradients["x"], d.pop("x").astype(x.dtype), place)} if "x" in d else {}
            gradients = {name: gradients[name] + a for name, a in d.items()} | rows_of_dx
        return found, gradients

    return _for_each_shard(call, given, shard, jax.tree.map(lambda a: vary_over(a, axes), carry))


def _own(w: Arrays) -> Arrays:
    return {name: a for name, a in w.items() if name in ("weight", "bias")}


def _part(own: Arrays) -> Part:
    """Return a head as the loss's functions take it: all of the vocabulary."""
    return Part(0, own.get("weight"), own.get("bias"), None)


class _HeadPair(NamedTuple):
    """Student and teacher, in the dtypes of their hidden states: cast once a call."""

    student: Part
    teacher: Part

    @classmethod
    def of(cls, rows: Arrays, w: Arrays) -> "_HeadPair":
        teacher = {kind: w[name] for kind, name in (("weight", "w_teacher"), ("bias", "bias_teacher")) if name in w}
        pairs = (_own(w), rows["x"]), (teacher, rows["teacher"])
        return cls(*(_part({name: a.astype(x.dtype) for name, a in head.items()}) for head, x in pairs))

    def logits(self, cut: Arrays) -> tuple[jax.Array, jax.Array]:
        return loss_math.logits_of(cut["x"], self.student), loss_math.logits_of(cut["teacher"], self.teacher)


def _labels(call: DistillationCall, cut: Arrays) -> Labels:
    dtype, targets = wide(cut["x"].dtype), cut.get("targets")
    if targets is not None:
        return loss_math.make_labels(call.rules.student, targets, None, dtype)
    ones = jnp.ones(cut["x"].shape[0], dtype)
    return Labels(jnp.zeros(ones.shape, jnp.int32), ones, ones)


def _weights(cut: Arrays, labels: Labels, dtype: Any) -> jax.Array:
    """Return what multiplies the loss of each token, [t]: 0 where it does not count."""
    weight = cut.get("token_weight")
    return (
        labels.counted if weight is None else jnp.where(labels.counted == 0, 0, labels.counted * weight.astype(dtype))
    )


def _for_each_shard(call: DistillationCall, given: Arrays, run: Callable[[Any, Arrays, Any], Any], carry: Any) -> Any:
    """carry = run(place, rows, carry) for every shard. place: as in core/row_shards.py."""

    def cut(place: Any, size: int) -> Arrays:
        return {name: rows_of(a, place, size) for name, a in given.items()}

    if not call.valid_first:
        body = Body(
            lambda start, size, carry: run(start, cut(start, size), carry), lambda start, c: barrier((start, c))
        )
        return for_each(call.plan, body, carry)
    order, valid = counted_first(given["targets"] == call.rules.options.ignore_index)

    def of_order(start: Any, size: int, carry: Any) -> Any:
        place = rows_of(order, start, size)
        return run(place, cut(place, size), carry)

    return for_each_of_first(call.plan, valid, of_order, carry)


def _power_of_two(call: DistillationCall, sizes: jax.Array) -> jax.Array:
    """Return []: a power of two near the largest gradient in the logits, for upstream ones of these sizes."""
    largest = jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0), initial=0) * call.rules.objective.largest_slope
    scale = abs(call.rules.options.logit_scale) or 1
    return loss_math.power_of_two(jax.lax.stop_gradient(jnp.where(largest == 0, 1, largest * scale)))
