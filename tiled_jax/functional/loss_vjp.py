"""The linear cross entropy as a differentiable function of [T, H] rows: the loops of forward and backward, and what is
kept in between.

`custom_vjp` with two ways to the gradients. Where one upstream number scales all of them, forward computes them while a
shard's logits are there and backward multiplies: 6 THV. Otherwise forward keeps x, the weight and two numbers per token,
and backward computes the logits again: 8 THV. Without differentiation only the logits are computed: 2 THV.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.functional import loss_math
from tiled_jax.functional.gathering import TokenAxis, for_each_gathered
from tiled_jax.functional.loops import Body, Like, for_each, gradient_of, upstream_of, vary_over, varying, varying_of
from tiled_jax.functional.loss_math import Labels, Part, Rules, Slopes, Statistics
from tiled_jax.functional.loss_steps import XLA, LossSteps
from tiled_jax.functional.shard_math import wide
from tiled_jax.functional.wanted import Marks, mark, marked, perturbed

Arrays = dict[str, jax.Array]
NAME = "tiled_linear_cross_entropy"
_KEPT = ("best", "total", "entropy")

_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


@dataclass(frozen=True, kw_only=True)
class Call:
    """All that is static about one call; the plan of forward is the plan of backward.

    Args:
        plan: how the tokens are cut. parts: how the entries of the vocabulary that this weight has are cut.
        steps: what computes from logits, XLA or a kernel.
        axis: the mesh axis that the vocabulary is split over, or None. tokens: the same axis where it splits the tokens too;
            plan is then of a device's own tokens, and a shard is gathered.
    """

    plan: ShardPlan
    parts: ShardPlan
    rules: Rules
    steps: LossSteps = XLA
    axis: str | None = None
    tokens: TokenAxis | None = None

    @property
    def in_forward(self) -> bool:
        """Whether gradients are computed with the loss: a log-sum-exp over several parts is known too late for it."""
        return self.rules.options.gradients_in_forward and len(self.parts) == 1


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["operands", "numbers", "gradients", "mean", "wanted"],
    meta_fields=["names", "like"],
)
@dataclass(frozen=True)
class _Saved:
    """What backward needs. Which operands are wanted changes shapes in here and never the structure (`wanted.py`)."""

    operands: tuple[Any, ...]  # x, w and fixed, to compute the logits again; nothing where gradients are there already
    numbers: Arrays  # [T] best, total and perhaps entropy, for the same
    gradients: Arrays  # of the sum of losses, to be multiplied: x in its dtype, weight and bias in the wide one
    mean: jax.Array | None  # [] what a mean multiplies the sum with
    wanted: Marks  # operands that need a gradient: the others cost nothing
    names: tuple[tuple[str, ...], ...]  # of w and of fixed
    like: tuple[tuple[str, Like], ...]  # dtype and type of every operand's gradient


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(call: Call, x: jax.Array, w: Arrays, fixed: Arrays) -> Arrays:
    return _forward(call, x, w, fixed, (), save=False)[0]


def _forward(
    call: Call, x: jax.Array, w: Arrays, fixed: Arrays, wanted: tuple[str, ...], *, save: bool
) -> tuple[Arrays, _Saved]:
    """The loss and the outputs asked for, and with `save` what backward needs for the gradients of `wanted`."""
    backends.record_run(NAME, call.steps.backend)
    setting = _Setting.of(call, x, w, fixed)
    names = {"loss", *call.rules.options.outputs}
    if save and not call.in_forward:
        names |= {"best", "total"}

    def shard(start: Any, size: int, given: _Given, carry: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        numbers, gradients = carry
        x_shard, labels = given.x, setting.labelled(given.targets)
        found, dlogits = _statistics(call, setting, x_shard, labels, gradient=bool(gradients))
        values = loss_math.values(call.rules, labels, found, setting.class_total)
        numbers = {
            name: _set_rows(rows, vary_over(_own(call, values[name]), setting.token_axes), start, 0)
            for name, rows in numbers.items()
        }
        if gradients:
            gradients = _with_shard(call, setting, gradients, _Shard(start, x_shard, labels, found, dlogits=dlogits))
        return numbers, gradients

    numbers = {name: vary_over(jnp.zeros(x.shape[0], setting.dtype), setting.token_axes) for name in sorted(names)}
    gradients = setting.zeros(x, w, wanted if call.in_forward else ())
    numbers, gradients = _for_each_shard(call, _Given(x, setting.targets), shard, (numbers, gradients))
    results = {name: numbers[name] for name in ("loss", *call.rules.options.outputs)}
    mean = None
    if call.rules.options.reduction != "none":
        results |= {name: _sum(call, results[name]) for name in ("loss", "accuracy") if name in results}
    if call.rules.options.reduction == "mean":
        mean, mean_of_hits = _means(call, setting.labelled(setting.targets), fixed.get("num_valid"))
        results["loss"] *= mean
        results |= {"accuracy": results["accuracy"] * mean_of_hits} if "accuracy" in results else {}
    primals = {"x": x, **w}
    nothing = jnp.zeros(0, setting.dtype)
    return results, _Saved(
        operands=() if call.in_forward else (x, w, fixed),
        numbers={name: rows for name, rows in numbers.items() if name in _KEPT},
        gradients={name: gradients.get(name, nothing) for name in primals} if call.in_forward else {},
        mean=mean,
        wanted=mark(primals, wanted),
        names=(tuple(w), tuple(fixed)),
        like=tuple((name, Like.of(a)) for name, a in primals.items()),
    )


def _forward_saving(call: Call, x: Any, w: dict[str, Any], fixed: dict[str, Any]) -> tuple[Arrays, _Saved]:
    """The forward under differentiation: every operand comes with whether it needs a gradient."""
    wanted = perturbed({"x": x, **w})
    plain_w, plain_fixed = ({name: operand.value for name, operand in group.items()} for group in (w, fixed))
    return _forward(call, x.value, plain_w, plain_fixed, wanted, save=True)


def _backward(call: Call, saved: _Saved, upstream: dict[str, Any]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    g = {name: d for name, d in upstream.items() if name != "accuracy" and not isinstance(d, SymbolicZero)}
    if call.axis is not None:  # what is there once for every token is there on one device where these split the tokens
        g = {name: d if call.tokens and d.ndim else upstream_of(call.axis, d) for name, d in g.items()}
    d: Arrays = {}
    if g and (wanted := marked(saved.wanted)):
        d = _multiplied(saved, wanted, g["loss"]) if call.in_forward else _computed(call, saved, wanted, g)
    weights, fixed = saved.names
    return d.get("x"), {name: d.get(name) for name in weights}, dict.fromkeys(fixed)


def _multiplied(saved: _Saved, wanted: tuple[str, ...], g: jax.Array) -> Arrays:
    """Gradients that forward computed, times the one upstream number, rounded once more."""
    factor, like = g if saved.mean is None else g * saved.mean, dict(saved.like)
    return {name: gradient_of(like[name], saved.gradients[name].astype(g.dtype) * factor) for name in wanted}


def _computed(call: Call, saved: _Saved, wanted: tuple[str, ...], g: Arrays) -> Arrays:
    """Gradients from the logits of every shard and part, computed again."""
    # Without the barrier XLA merges the logits of a single shard with those of forward and keeps them in between.
    (x, w, fixed), numbers, g = lax.optimization_barrier((saved.operands, saved.numbers, g))
    setting = _Setting.of(call, x, w, fixed)
    if saved.mean is not None:
        g = g | {"loss": g["loss"] * saved.mean} if "loss" in g else g
    found = _whole(numbers)
    lse = loss_math.log_sum_exp(call.rules, found)
    g = {name: jnp.broadcast_to(d, lse.shape) for name, d in g.items()}
    slope = loss_math.slopes(call.rules, setting.labelled(setting.targets), lse, setting.class_total, g)
    sigma = loss_math.largest(slope)
    if call.tokens is not None:  # one number for all gathered tokens
        sigma = lax.pmax(call.tokens.differing(sigma), call.tokens.name)
    slope = jax.tree.map(lambda a: a / sigma, slope)

    def shard(start: Any, size: int, given: _Given, gradients: Arrays) -> Arrays:
        at, of_slope = given.numbers
        labels, found = setting.labelled(given.targets), _whole(at)
        of = _Shard(start, given.x, labels, found, slope=of_slope, entropy=at.get("entropy"), sigma=sigma)
        return _with_shard(call, setting, gradients, of)

    given = _Given(x, setting.targets, (numbers, slope))
    gradients = _for_each_shard(call, given, shard, setting.zeros(x, w, wanted))
    like = dict(saved.like)
    return {
        name: gradient_of(like[name], gradients[name] if name == "x" else gradients[name] * sigma) for name in wanted
    }


def _whole(numbers: Arrays) -> Statistics:
    """What backward knows of the statistics over the whole vocabulary."""
    return Statistics(numbers["best"], numbers["total"], target=numbers["best"], weighted=None, spread=None)


class _Shard(NamedTuple):
    """What the gradients of one shard are made of: of `dlogits` where they are there, else of the slopes."""

    start: Any
    x: jax.Array
    labels: Labels
    found: Statistics
    dlogits: jax.Array | None = None
    slope: Slopes | None = None
    entropy: jax.Array | None = None
    sigma: jax.Array | int = 1


def _with_shard(call: Call, setting: "_Setting", gradients: Arrays, of: _Shard) -> Arrays:
    """The gradients with what a shard adds: its rows of dx, written once, and its share of the sums over tokens."""

    def part(first: Any, entries: int, sums: Arrays) -> Arrays:
        own, dlogits = setting.part(first, entries), of.dlogits
        if dlogits is None:
            assert of.slope is not None
            logits = loss_math.logits_of(of.x, own)
            dlogits = call.steps.gradient(call.rules, logits, own, of.labels, of.found, of.slope, of.entropy)
        d = loss_math.operand_gradients(of.x, dlogits, own, tuple(sums))
        return {name: added(name, value, vary_over(d[name], setting.axes), first) for name, value in sums.items()}

    def added(name: str, value: jax.Array, d: jax.Array, first: Any) -> jax.Array:
        if name == "x" or d.shape == value.shape:
            return value + d
        last = value.ndim - 1
        return _set_rows(value, _rows(value, first, d.shape[-1], last) + d, first, last)

    rows = {"x": vary_over(jnp.zeros(of.x.shape, setting.dtype), setting.axes)} if "x" in gradients else {}
    sums = for_each(call.parts, Body(part, _after_all), gradients | rows)
    if not rows:
        return sums
    dx = (sums["x"] * of.sigma).astype(of.x.dtype)
    if call.tokens is not None:
        dx = vary_over(call.tokens.scatter(dx), setting.axes)
    return sums | {"x": _set_rows(gradients["x"], dx, of.start, 0)}


class _Setting(NamedTuple):
    """What every shard of a call shares.

    `axes`: mesh axes along which anything of the call varies. `token_axes`: those of a number per token, which is the
    same on every device of the axis that the vocabulary is split over unless that splits the tokens too.
    """

    targets: jax.Array  # of all tokens, of a device's own ones where devices split them
    labelled: Callable[[jax.Array], Labels]  # of targets
    class_total: jax.Array | int  # Σ ω over the vocabulary
    part: Callable[[Any, int], Part]  # (first entry, entries) of this weight
    dtype: Any
    axes: frozenset[str]
    token_axes: frozenset[str]

    @classmethod
    def of(cls, call: Call, x: jax.Array, w: Arrays, fixed: Arrays) -> "_Setting":
        dtype, rules = wide(x.dtype), call.rules
        own = frozenset() if call.axis is None else varying(lax.axis_index(call.axis))
        known = varying_of(fixed[name] for name in ("targets", "class_weight") if name in fixed)
        logits = varying_of([x, *w.values()])
        token_axes = known | (own | logits if call.tokens else logits - {call.axis})
        targets = vary_over(fixed["targets"], token_axes)
        class_weight = fixed.get("class_weight")
        if class_weight is not None:
            class_weight = vary_over(class_weight.astype(dtype), token_axes)
        return cls(
            targets=targets,
            labelled=lambda targets: loss_math.make_labels(rules, targets, class_weight, dtype),
            class_total=rules.vocab if class_weight is None else jnp.sum(class_weight),
            part=_parts(call, {name: a.astype(x.dtype) for name, a in w.items()}, class_weight),
            dtype=dtype,
            axes=known | logits | own,
            token_axes=token_axes,
        )

    def zeros(self, x: jax.Array, w: Arrays, names: tuple[str, ...]) -> Arrays:
        """What the gradients of these operands begin with."""
        primals = {"x": x, **w}
        return {
            name: vary_over(jnp.zeros(primals[name].shape, x.dtype if name == "x" else self.dtype), self.axes)
            for name in names
        }


def _parts(call: Call, w: Arrays, class_weight: jax.Array | None) -> Callable[[Any, int], Part]:
    local, columns = call.parts.tokens, call.steps.columns
    before: Any = 0 if call.axis is None else lax.axis_index(call.axis) * local
    if call.axis is not None and class_weight is not None:
        padding = lax.axis_size(call.axis) * local - call.rules.vocab
        padded = vary_over(jnp.pad(class_weight, (0, padding)), varying(before))
        class_weight = _rows(padded, before, local)
    if len(call.parts) == 1:  # once, and not for every shard of tokens
        w = {name: loss_math.with_columns(a, columns(local)) for name, a in w.items()}

    def part(first: Any, entries: int) -> Part:
        def own(a: jax.Array | None, columns: int) -> jax.Array | None:
            if a is None:
                return None
            return loss_math.with_columns(a if len(call.parts) == 1 else _rows(a, first, entries, a.ndim - 1), columns)

        width = columns(entries)
        weight, bias = own(w["weight"], width), own(w.get("bias"), width)
        return Part(before + first, weight, bias, own(class_weight, entries), entries)

    return part


def _statistics(
    call: Call, setting: _Setting, x_shard: jax.Array, labels: Labels, *, gradient: bool
) -> tuple[Statistics, jax.Array | None]:
    """One shard's statistics over the whole vocabulary, and with `gradient` the dlogits of the sum of its losses."""
    rules, steps, whole = call.rules, call.steps, call.parts.tokens

    def logits_and_part(first: Any, entries: int) -> tuple[jax.Array, Part]:
        own = setting.part(first, entries)
        return loss_math.logits_of(x_shard, own), own

    def of(first: Any, entries: int) -> Statistics:
        return steps.statistics(rules, *logits_and_part(first, entries), labels)

    def reduced(found: Statistics) -> Statistics:
        return found if call.axis is None else loss_math.reduce_over(rules, call.axis, found)

    if gradient:
        logits, own = logits_and_part(0, whole)
        if call.axis is None:
            return steps.statistics_and_gradient(rules, logits, own, labels, setting.class_total)
        found = reduced(steps.statistics(rules, logits, own, labels))
        # Every reader of the logits but one done, their gradient is written over them.
        logits, after = lax.optimization_barrier((logits, found))
        slope = loss_math.slopes_of_losses(rules, labels, loss_math.log_sum_exp(rules, after), setting.class_total)
        return found, steps.gradient(rules, logits, own, labels, after, slope, None)
    if len(call.parts) == 1:
        return reduced(of(0, whole)), None

    def part(first: Any, entries: int, found: Statistics) -> Statistics:
        return jax.tree.map(vary, loss_math.merge(rules, found, of(first, entries)))

    vary = partial(vary_over, axes=setting.axes)
    none = loss_math.nothing(x_shard.shape[0], setting.dtype, rules.options)
    return reduced(for_each(call.parts, Body(part, _after_all), jax.tree.map(vary, none))), None


def _means(call: Call, labels: Labels, num_valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """What the sums of losses and of hits are multiplied with; a mean of nothing is zero."""
    hits = labels.valid.astype(labels.weight.dtype)
    counts = [_sum(call, a) if num_valid is None else num_valid.astype(a.dtype) for a in (labels.weight, hits)]
    loss, accuracy = (jnp.where(n == 0, 0, 1 / jnp.where(n == 0, 1, n)) for n in counts)
    return loss, accuracy


class _Given(NamedTuple):
    """What a shard is given of its tokens."""

    x: jax.Array
    targets: jax.Array
    numbers: Any = ()  # a pytree of [t] in the wide dtype


def _for_each_shard(call: Call, given: _Given, run: Callable[[Any, int, _Given, Any], Any], carry: Any) -> Any:
    """carry = run(start, size, what the shard is given, carry) for every shard, gathered where devices split the tokens."""

    tokens = call.tokens
    if tokens is None:
        body = Body(lambda start, size, carry: run(start, size, _cut(given, start, size), carry), _after_all)
        return for_each(call.plan, body, carry)

    def fetch(start: Any, size: int) -> _Given:
        own = _cut(given, start, size)
        numbers, structure = jax.tree.flatten(own.numbers)
        if not numbers:
            return tokens.gather(own)
        together = jnp.stack([tokens.differing(a) for a in numbers], axis=1)  # one collective instead of one each
        x, targets, together = tokens.gather((own.x, own.targets, together))
        return _Given(x, targets, jax.tree.unflatten(structure, list(together.T)))

    gathered = Body(lambda start, size, state: run(start, size, *state), _after_all)
    return for_each_gathered(call.plan, call.plan.tokens, fetch, gathered, gathered, carry)


def _own(call: Call, a: jax.Array) -> jax.Array:
    """A device's own tokens of a shard's."""
    return a if call.tokens is None else call.tokens.own(a)


def _sum(call: Call, a: jax.Array) -> jax.Array:
    """The sum over all tokens of the axis."""
    own = jnp.sum(a)
    return own if call.tokens is None else lax.psum(call.tokens.differing(own), call.tokens.name)


def _after_all(start: Any, carry: Any) -> Any:
    return lax.optimization_barrier((start, carry))


def _cut(rows: Any, start: Any, size: int) -> Any:
    return jax.tree.map(lambda a: _rows(a, start, size), rows)


_loss.defvjp(_forward_saving, _backward, symbolic_zeros=True)
# Called outside of any jit too, forward and backward are one compiled program each.
run = jax.jit(_loss, static_argnums=0)
