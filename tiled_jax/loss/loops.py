"""The loops of one linear cross entropy over the tokens [T, H] that a device has: forward, tangents, backward.

Two ways to the gradients. Where one upstream number scales all of them, forward computes them while a shard's logits are
there and backward multiplies: 6 THV. Otherwise two numbers per token are kept, and backward computes the logits again:
8 THV. Without differentiation only the logits are computed: 2 THV. Where `LossCall.valid_first`, T are the tokens with a
label, in whole shards.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.collectives.gathered_tokens import (
    TokenAxis,
    for_each_gathered,
    for_each_of_first_gathered,
    most_of_all,
)
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import Body, for_each, vary_over, varying, varying_of
from tiled_jax.core.own_tokens import Split
from tiled_jax.core.products import product, wide
from tiled_jax.core.row_shards import counted_first, rows_of, with_rows
from tiled_jax.core.turns import for_each_of_first
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.math import Coefficients, Labels, Part, Rules, Statistics
from tiled_jax.loss.ranking import Ranking, empty_ranking, ranking_of
from tiled_jax.loss.rows import before_first
from tiled_jax.loss.steps import XLA, LossSteps

Arrays = dict[str, jax.Array]
NAME = "tiled_linear_cross_entropy"

_columns, _set_columns = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class LossCall:
    """All that is static about one call; the plan of forward is the plan of backward.

    Args:
        plan: how the tokens are cut. parts: how the entries of the vocabulary that this weight has are cut.
        steps: what computes from logits, XLA or a kernel.
        axis: the mesh axis, or axes, that the vocabulary is split over, or None. tokens: the same axis where it splits the
            tokens too; plan is then of a device's own tokens, and a shard is gathered.
        split: how a mesh cuts the tokens where this is not inside a `shard_map`: x and targets then have their leading dims,
            and every device makes a plan for its own tokens, `replan(tokens, entries)`.
        valid_first: whether rows are taken in the order of `row_shards.counted_first`, and only as many shards as have a label.
    """

    plan: ShardPlan
    parts: ShardPlan
    rules: Rules
    steps: LossSteps = XLA
    axis: Any = None
    tokens: TokenAxis | None = None
    split: Split | None = None
    replan: Callable[[int, int], ShardPlan] | None = None
    valid_first: bool = False

    @property
    def in_forward(self) -> bool:
        """Return whether gradients are computed with the loss: a log-sum-exp over several parts is known too late for it."""
        return self.rules.gradients_with_loss and len(self.parts) == 1

    def on_device(self, tokens: int, entries: int, axes: tuple[str, ...]) -> "LossCall":
        """Return the call of a device that has so many tokens, and so many entries of a vocabulary that `axes` split."""
        if self.split is None or self.replan is None:
            return self
        plan = self.plan if tokens == self.plan.tokens else self.replan(tokens, entries)
        parts = ShardPlan(entries, -(-entries // len(self.parts)))
        # Devices that have parts of one vocabulary meet in every shard, and as often: no axis cuts the tokens too (`_cut`).
        return replace(self, plan=plan, parts=parts, axis=axes or None)


def forward(
    call: LossCall,
    x: jax.Array,
    w: Arrays,
    fixed: Arrays,
    names: Collection[str],
    wanted: tuple[str, ...],
    unit: Any = None,
) -> tuple[Arrays, Arrays]:
    """Return the numbers [T] asked for, and the gradients of the sum of the losses divided by `unit`: of x in its dtype, of
    others in the wide one."""
    backends.record_run(NAME, call.steps.backend)
    setting = _Setting.of(call, x, w, fixed)

    def shard(place: Any, size: int, given: _ShardTokens, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        numbers, gradients = carry
        x_shard, labels = given.x, setting.labelled(given.targets, given.weights)
        found, best, dlogits = _statistics(call, setting, x_shard, labels, gradient=bool(gradients), unit=unit)
        values = loss_math.values(call.rules, labels, found, setting.class_total) | {
            "weight": jnp.nan_to_num(labels.weight)
        }
        values |= {} if best is None else best.outputs(call.rules, found)
        numbers = setting.with_rows(call, numbers, values, place)
        if gradients:
            gradients = _with_shard(
                call, setting, gradients, _LossShard(place, x_shard, labels, found, dlogits=dlogits)
            )
        return numbers, gradients

    carry = setting.numbers(call, x, names), setting.zeros(x, w, wanted)
    return _for_each_shard(call, _ShardTokens(x, setting.targets, weights=setting.weights), shard, carry)


def tangents(
    call: LossCall, x: jax.Array, w: Arrays, fixed: Arrays, numbers: Arrays, t: Arrays, names: Collection[str]
) -> Arrays:
    """Return the tangents [T] of numbers of every token, from those of x, weight and bias.

    That of a number is the sum over the vocabulary of its gradient times the tangent of the logits.
    """
    setting = _Setting.of(call, x, w, fixed)
    of_w = {name: a for name, a in t.items() if name != "x"}
    zeros = {name: jnp.zeros_like(a) for name, a in w.items() if name not in of_w}
    moved_part = _parts(call, {name: a.astype(x.dtype) for name, a in (zeros | of_w).items()}, None)
    axes = setting.axes | varying_of(t.values())

    def shard(place: Any, size: int, given: _ShardTokens, carry: Arrays) -> Arrays:
        at, of_x = given.numbers, given.more
        labels, found = setting.labelled(given.targets, given.weights), _whole(at)
        lse = loss_math.log_sum_exp(call.rules, found)

        def part(first: Any, entries: int, sums: Arrays) -> Arrays:
            own, moved = setting.part(first, entries), moved_part(first, entries)
            logits, of_logits = loss_math.logits_of(given.x, own), tangent_of_logits(given.x, of_x, own, moved, of_w)
            out = {}
            for name, total in sums.items():
                k = loss_math.coefficients(call.rules, labels, lse, setting.class_total, {name: jnp.ones_like(lse)})
                size = loss_math.size_of_gradients(call.rules, k, setting.class_weight)
                k = jax.tree.map(lambda a, size=size: a / size, k)
                d = call.steps.gradient(call.rules, logits, own, labels, found, k, at.get("entropy"))
                out[name] = total + vary_over(jnp.sum(d.astype(of_logits.dtype) * of_logits, axis=1) * size, axes)
            return out

        sums = {name: vary_over(jnp.zeros(lse.shape, setting.dtype), axes) for name in names}
        sums = for_each(call.parts, Body(part, _after_all), sums)
        if call.axis is not None:
            sums = lax.psum(sums, call.axis)
        return setting.with_rows(call, carry, sums, place)

    given = _ShardTokens(x, setting.targets, numbers, t.get("x"), setting.weights)
    return _for_each_shard(call, given, shard, setting.numbers(call, x, names))


def tangent_of_logits(x: jax.Array, of_x: jax.Array | None, part: Part, moved: Part, of_w: Arrays) -> jax.Array:
    """Return the tangent [t, v] of the logits, in the wide dtype."""
    acc = wide(x.dtype)
    assert part.weight is not None
    assert moved.weight is not None
    terms = [] if of_x is None else [product(of_x, part.weight, (1, 0), acc)]
    terms += [product(x, moved.weight, (1, 0), acc)] if "weight" in of_w else []
    terms += [moved.bias.astype(acc)[None, :]] if "bias" in of_w and moved.bias is not None else []
    return reduce(jnp.add, terms)


def backward(
    call: LossCall, x: jax.Array, w: Arrays, fixed: Arrays, numbers: Arrays, g: Arrays, wanted: tuple[str, ...]
) -> Arrays:
    """Return gradients for upstream ones [T] of numbers per token, from the logits of every shard and part, computed again."""
    # Without the barrier XLA merges the logits of a single shard with those of forward and keeps them in between.
    x, w, fixed, numbers, g = barrier((x, w, fixed, numbers, g))
    setting = _Setting.of(call, x, w, fixed)
    found = _whole(numbers)
    lse = loss_math.log_sum_exp(call.rules, found)
    g = {name: jnp.broadcast_to(d, lse.shape) for name, d in g.items()}
    labels = setting.labelled(setting.targets, setting.weights)
    k = loss_math.coefficients(call.rules, labels, lse, setting.class_total, g)
    sigma = of_all(call, loss_math.size_of_gradients(call.rules, k, setting.class_weight))
    k = jax.tree.map(lambda a: a / sigma, k)

    def shard(place: Any, size: int, given: _ShardTokens, gradients: Arrays) -> Arrays:
        at, of_rows = given.numbers
        labels, found = setting.labelled(given.targets, given.weights), _whole(at)
        of = _LossShard(place, given.x, labels, found, k=of_rows, entropy=at.get("entropy"), sigma=sigma)
        return _with_shard(call, setting, gradients, of)

    given = _ShardTokens(x, setting.targets, (numbers, k), weights=setting.weights)
    gradients = _for_each_shard(call, given, shard, setting.zeros(x, w, wanted))
    return {name: a if name == "x" else a * sigma for name, a in gradients.items()}


def _whole(numbers: Arrays) -> Statistics:
    """Return the statistics over the whole vocabulary, as far as backward knows them."""
    return Statistics(numbers["top"], numbers["total"], target=numbers["top"], weighted=None, moment=None)


class _LossShard(NamedTuple):
    """The parts that the gradients of one shard are made of: `dlogits` where they are there, else of the coefficients."""

    place: Any  # as in row_shards.py
    x: jax.Array
    labels: Labels
    found: Statistics
    dlogits: jax.Array | None = None
    k: Coefficients | None = None
    entropy: jax.Array | None = None
    sigma: jax.Array | int = 1


def _with_shard(call: LossCall, setting: "_Setting", gradients: Arrays, of: _LossShard) -> Arrays:
    """Return the gradients with what a shard adds: its rows of dx, written once, and its share of the sums over tokens."""

    def part(first: Any, entries: int, sums: Arrays) -> Arrays:
        own, dlogits = setting.part(first, entries), of.dlogits
        if dlogits is None:
            assert of.k is not None
            logits = loss_math.logits_of(of.x, own)
            dlogits = call.steps.gradient(call.rules, logits, own, of.labels, of.found, of.k, of.entropy)
        d = loss_math.operand_gradients(of.x, dlogits, own, tuple(sums))
        return {name: added(name, value, vary_over(d[name], setting.axes), first) for name, value in sums.items()}

    def added(name: str, value: jax.Array, d: jax.Array, first: Any) -> jax.Array:
        if name == "x" or d.shape == value.shape:
            return value + d
        last = value.ndim - 1
        return _set_columns(value, _columns(value, first, d.shape[-1], last) + d, first, last)

    rows = {"x": vary_over(jnp.zeros(of.x.shape, setting.dtype), setting.axes)} if "x" in gradients else {}
    sums = for_each(call.parts, Body(part, _after_all), gradients | rows)
    if not rows:
        return sums
    dx = (sums["x"] * of.sigma).astype(of.x.dtype)
    if call.tokens is not None:
        dx = vary_over(call.tokens.scatter(dx), setting.axes)
    return sums | {"x": with_rows(gradients["x"], dx, of.place)}


class _Setting(NamedTuple):
    """Everything that the shards of a call share.

    `axes`: mesh axes along which anything of the call varies. `token_axes`: those of a number per token, which is the
    same on every device of the axis that the vocabulary is split over unless that splits the tokens too.
    """

    targets: jax.Array  # of all tokens, of a device's own ones where devices split them
    weights: jax.Array | None  # of the same tokens
    labelled: Callable[[jax.Array, jax.Array | None], Labels]  # of targets and their weights
    class_total: jax.Array | int  # Σ ω over the vocabulary
    class_weight: jax.Array | None  # of the whole vocabulary
    part: Callable[[Any, int], Part]  # (first entry, entries) of this weight
    dtype: Any
    axes: frozenset[str]
    token_axes: frozenset[str]

    @classmethod
    def of(cls, call: LossCall, x: jax.Array, w: Arrays, fixed: Arrays) -> "_Setting":
        dtype, rules = wide(x.dtype), call.rules
        own = frozenset() if call.axis is None else varying(lax.axis_index(call.axis))
        known = varying_of(fixed[name] for name in ("targets", "token_weight", "class_weight") if name in fixed)
        logits = varying_of([x, *w.values()])
        token_axes = known | (own | logits if call.tokens else logits - {call.axis})
        targets = vary_over(fixed["targets"], token_axes)
        class_weight = fixed.get("class_weight")
        if class_weight is not None:
            class_weight = vary_over(class_weight.astype(dtype), token_axes)
        weights = fixed.get("token_weight")
        return cls(
            targets=targets,
            weights=None if weights is None else vary_over(weights.astype(dtype), token_axes),
            labelled=lambda targets, weights: loss_math.make_labels(rules, targets, class_weight, dtype, weights),
            class_total=rules.vocab if class_weight is None else jnp.sum(class_weight),
            class_weight=class_weight,
            part=_parts(call, {name: a.astype(x.dtype) for name, a in w.items()}, class_weight),
            dtype=dtype,
            axes=known | logits | own,
            token_axes=token_axes,
        )

    def numbers(self, call: LossCall, x: jax.Array, names: Collection[str]) -> Arrays:
        """Return the numbers of every token before the first shard."""
        options, tokens = call.rules.options, x.shape[0]
        return {
            name: vary_over(before_first(name, tokens, self.dtype, options), self.token_axes) for name in sorted(names)
        }

    def with_rows(self, call: LossCall, numbers: Arrays, values: Arrays, place: Any) -> Arrays:
        """Return the numbers with those of one shard."""
        return {
            name: with_rows(rows, vary_over(_own(call, values[name]), self.token_axes), place)
            for name, rows in numbers.items()
        }

    def zeros(self, x: jax.Array, w: Arrays, names: tuple[str, ...]) -> Arrays:
        """Return the gradients of these operands before the first shard."""
        primals = {"x": x, **w}
        return {
            name: vary_over(jnp.zeros(primals[name].shape, x.dtype if name == "x" else self.dtype), self.axes)
            for name in names
        }


def _parts(call: LossCall, w: Arrays, class_weight: jax.Array | None) -> Callable[[Any, int], Part]:
    local, columns = call.parts.tokens, call.steps.columns
    before: Any = 0 if call.axis is None else lax.axis_index(call.axis) * local
    if call.axis is not None and class_weight is not None:
        padding = lax.axis_size(call.axis) * local - call.rules.vocab
        padded = vary_over(jnp.pad(class_weight, (0, padding)), varying(before))
        class_weight = _columns(padded, before, local)
    if len(call.parts) == 1:  # once, and not for every shard of tokens
        w = {name: loss_math.with_columns(a, columns(local)) for name, a in w.items()}

    def part(first: Any, entries: int) -> Part:
        def own(a: jax.Array | None, columns: int) -> jax.Array | None:
            if a is None:
                return None
            return loss_math.with_columns(
                a if len(call.parts) == 1 else _columns(a, first, entries, a.ndim - 1), columns
            )

        width = columns(entries)
        weight, bias = own(w["weight"], width), own(w.get("bias"), width)
        return Part(before + first, weight, bias, own(class_weight, entries), entries)

    return part


def _statistics(
    call: LossCall, setting: _Setting, x_shard: jax.Array, labels: Labels, *, gradient: bool, unit: Any = None
) -> tuple[Statistics, Ranking | None, jax.Array | None]:
    """Return one shard's statistics and best entries over the whole vocabulary, and with `gradient` the dlogits of the sum of
    its losses by `unit`.
    """
    rules, steps, whole, unit = call.rules, call.steps, call.parts.tokens, 1 if unit is None else unit

    def logits_and_part(first: Any, entries: int) -> tuple[jax.Array, Part]:
        own = setting.part(first, entries)
        return loss_math.logits_of(x_shard, own), own

    def of(first: Any, entries: int) -> tuple[Statistics, Ranking | None]:
        logits, own = logits_and_part(first, entries)
        return steps.statistics(rules, logits, own, labels), ranking_of(rules, logits, own)

    def reduced(found: Statistics, best: Ranking | None) -> tuple[Statistics, Ranking | None]:
        if call.axis is None:
            return found, best
        return loss_math.reduce_over(rules, call.axis, found), None if best is None else best.over_devices(call.axis)

    if gradient:
        logits, own = logits_and_part(0, whole)
        best = ranking_of(rules, logits, own)
        if best is not None:  # before their gradient is written over the logits
            logits, best = barrier((logits, best))
        if call.axis is None:
            found, dlogits = steps.statistics_and_gradient(rules, logits, own, labels, setting.class_total, unit)
            return found, best, dlogits
        found, best = reduced(steps.statistics(rules, logits, own, labels), best)
        # Every reader of the logits but one done, their gradient is written over them.
        logits, after = barrier((logits, found))
        lse = loss_math.log_sum_exp(rules, after)
        k = loss_math.loss_coefficients(rules, labels, lse, setting.class_total, unit)
        return found, best, steps.gradient(rules, logits, own, labels, after, k, None)
    if len(call.parts) == 1:
        return *reduced(*of(0, whole)), None

    def part(first: Any, entries: int, before: Any) -> Any:
        (found, best), (of_part, best_of_part) = before, of(first, entries)
        best = best_of_part if best is None else best.merge(best_of_part)
        return jax.tree.map(vary, (loss_math.merge(rules, found, of_part), best))

    vary, tokens = partial(vary_over, axes=setting.axes), x_shard.shape[0]
    none = loss_math.nothing(tokens, setting.dtype, rules.options), empty_ranking(rules, tokens, setting.dtype)
    return *reduced(*for_each(call.parts, Body(part, _after_all), jax.tree.map(vary, none))), None


class _ShardTokens(NamedTuple):
    """The tokens of one shard."""

    x: jax.Array
    targets: jax.Array
    numbers: Any = ()  # a pytree of [t] in the wide dtype
    more: Any = None  # further rows [t, H]
    weights: jax.Array | None = None  # of the tokens' losses


def _for_each_shard(
    call: LossCall, given: _ShardTokens, run: Callable[[Any, int, _ShardTokens, Any], Any], carry: Any
) -> Any:
    """carry = run(place, size, what the shard is given, carry) for every shard, gathered where devices split the tokens."""

    tokens = call.tokens
    if tokens is None and not call.valid_first:
        body = Body(lambda start, size, carry: run(start, size, _cut(given, start, size), carry), _after_all)
        return for_each(call.plan, body, carry)
    order, valid = None, jnp.int32(0)
    if call.valid_first:
        order, valid = counted_first(given.targets == call.rules.options.ignore_index)
        if call.axis is not None and call.split is None:
            valid = most_of_all(valid)  # devices meet in every turn

    def place(start: Any, size: int) -> Any:
        return start if order is None else rows_of(order, start, size)

    if tokens is None:

        def of_order(start: Any, size: int, carry: Any) -> Any:
            at = place(start, size)
            return run(at, size, _cut(given, at, size), carry)

        return for_each_of_first(call.plan, valid, of_order, carry)

    def fetch(start: Any, size: int) -> _ShardTokens:
        own = _cut(given, place(start, size), size)
        numbers, structure = jax.tree.flatten(own.numbers)
        if not numbers:
            return tokens.gather(own)
        more = tokens.gather(own.more)
        wide_too = numbers if own.weights is None else [*numbers, own.weights]
        together = jnp.stack([tokens.differing(a) for a in wide_too], axis=1)  # one collective instead of one each
        x, targets, together = tokens.gather((own.x, own.targets, together))
        found = list(together.T)
        weights = None if own.weights is None else found.pop()
        return _ShardTokens(x, targets, jax.tree.unflatten(structure, found), more, weights)

    def of_gathered(start: Any, size: int, gathered: _ShardTokens, carry: Any) -> Any:
        return run(place(start, size), size, gathered, carry)

    if call.valid_first:
        return for_each_of_first_gathered(call.plan, valid, fetch, of_gathered, carry)
    body = Body(lambda start, size, state: of_gathered(start, size, *state), _after_all)
    return for_each_gathered(call.plan, call.plan.tokens, fetch, body, body, carry)


def _own(call: LossCall, a: jax.Array) -> jax.Array:
    """Return a device's own tokens of a shard's."""
    return a if call.tokens is None else call.tokens.own(a)


def of_all(call: LossCall, size: jax.Array) -> jax.Array:
    """Return the largest of all tokens of the axis."""
    return size if call.tokens is None else lax.pmax(call.tokens.differing(size), call.tokens.name)


def unit_of(call: LossCall, operands: Arrays, dtype: Any) -> jax.Array | None:
    """Return the number by which gradients of the sum of the losses are divided to be stored near 1; None where they are.

    Where a mesh cuts the tokens it is that of the heaviest class and the heaviest token, the same on all devices.
    """
    targets, tokens = operands["targets"], operands.get("token_weight")
    class_weight = operands.get("class_weight")
    if class_weight is None and tokens is None and abs(call.rules.options.logit_scale) == 1:
        return None
    weight = None if class_weight is None else class_weight.astype(dtype)
    tokens = None if tokens is None else tokens.astype(dtype)
    if call.split is not None:
        tokens = None if tokens is None else jnp.max(jnp.abs(tokens), initial=0)[None]
        targets = (
            jnp.zeros(1, targets.dtype) if weight is None else jnp.argmax(jnp.abs(weight))[None].astype(targets.dtype)
        )
    axes = varying_of(a for a in (targets, weight, tokens) if a is not None)
    targets, weight, tokens = jax.tree.map(partial(vary_over, axes=axes), (targets, weight, tokens))
    labels = loss_math.make_labels(call.rules, targets, weight, dtype, tokens)
    total = call.rules.vocab if weight is None else jnp.sum(weight)
    return of_all(call, loss_math.size_of_losses(call.rules, labels, total, weight))


def _after_all(start: Any, carry: Any) -> Any:
    return barrier((start, carry))


def _cut(rows: Any, place: Any, size: int) -> Any:
    return jax.tree.map(lambda a: rows_of(a, place, size), rows)
