"""The linear cross entropy as a differentiable function of its tokens: what is kept between the passes, each pass on every
device, and what is made of numbers per token: sums, means, and their derivatives."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from shared_specs.loss import checks as loss_checks
from tiled_jax.core.linear_call import Arrays, Saved, differentiable, made_together
from tiled_jax.core.loops import Like, gradient_of, upstream_of
from tiled_jax.core.own_tokens import TokenOp, as_typed, on_own_tokens
from tiled_jax.core.products import wide
from tiled_jax.loss import loops
from tiled_jax.loss.loops import NAME as NAME
from tiled_jax.loss.loops import LossCall as LossCall

# The dim of the weight and of its bias that a split vocabulary splits.
COLUMNS = {"weight": 1, "bias": 0}
_NUMBERS = ("top", "total", "entropy")  # of every token, to compute its logits' gradient again
_D, _OF, _G = "gradient of ", "tangent of ", "upstream of "  # begin names


class _LossRules:
    """x is [T, H] and targets and token_weight [T], or with `call.split` [*leading dims, ...]; further operands are the
    weight, its bias, class_weight [V] and num_valid []."""

    @staticmethod
    def forward(call: LossCall, operands: Arrays) -> Arrays:
        return _results(call, operands, (), save=False)[0]

    @staticmethod
    def save(call: LossCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        results, numbers, gradients, mean = _results(call, operands, wanted, save=True)
        kept, gradients = {} if mean is None else {"mean": mean}, made_together(gradients)
        if call.in_forward:  # gradients of the sum of losses, to be multiplied
            kept |= {_D + name: as_typed(operands[name], a) for name, a in gradients.items()}
            return results, Saved(kept, tuple((name, Like.of(operands[name])) for name in wanted))
        kept |= {name: a for name, a in numbers.items() if name in _NUMBERS}
        return results, Saved(kept | {name: a for name, a in operands.items() if name != "num_valid"})

    @staticmethod
    def tangents(call: LossCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        if call.in_forward:
            terms = [
                jnp.sum(a.astype(wide(a.dtype)) * saved.arrays[_D + name].astype(wide(a.dtype)))
                for name, a in t.items()
            ]
            total = reduce(jnp.add, terms)
            total = total if call.axis is None else lax.psum(total, call.axis)
            return {"loss": total * saved.arrays["mean"] if "mean" in saved.arrays else total}
        found = _tangents_of_numbers(call, saved.arrays, t, results)
        return found | {name: _reduced(call, found[name], saved.arrays) for name in ("loss",) if name in found}

    @staticmethod
    def gradients(call: LossCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        if (
            call.axis is not None
        ):  # what is there once for every token is there on one device where these split the tokens
            g = {name: d if call.tokens and d.ndim else upstream_of(call.axis, d) for name, d in g.items()}
        arrays = saved.arrays
        if "mean" in arrays and "loss" in g:
            g = g | {"loss": g["loss"] * arrays["mean"]}
        if not call.in_forward:
            found = _gradients(call, arrays, g, wanted)
            found = made_together(found)
            return {name: as_typed(arrays[name], gradient_of(arrays[name], found[name])) for name in wanted}
        like = dict(saved.known)
        found = {name: arrays[_D + name].astype(g["loss"].dtype) * g["loss"] for name in wanted}
        return {name: gradient_of(like[name], d) for name, d in found.items()}


def _results(
    call: LossCall, operands: Arrays, wanted: tuple[str, ...], *, save: bool
) -> tuple[Arrays, Arrays, Arrays, jax.Array | None]:
    """Return the loss and the outputs asked for, the numbers of every token that they are made of, the gradients of the sum
    of the losses where forward makes them, and what a mean multiplies the sum with, times what those gradients were divided
    by."""
    options, rows, whole = call.rules.options, *_rows_and_whole(operands)
    asked = ("loss", *options.outputs, *(("top_indices",) if options.top_k else ()))
    names = {*asked} | ({"top", "total"} if save and not call.in_forward else set())
    names |= {"weight"} if options.reduction == "mean" and "class_weight" in whole else set()

    def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
        here, w, fixed = _on_device(call, rows, whole, axes)
        numbers, d = loops.forward(
            here, rows["x"], w, fixed, names, wanted if call.in_forward else (), whole.get("unit")
        )
        d = {_D + name: a for name, a in d.items()}
        return numbers | {name: d.pop(name) for name in (_D + "x",) if name in d}, d

    unit = None
    if wanted and call.in_forward:
        unit = loops.unit_of(call, rows | whole, wide(rows["x"].dtype))
    whole |= {} if unit is None else {"unit": unit}
    numbers, sums = on_own_tokens(call.split, _op(run))(rows, whole)
    gradients = {name: (numbers if name == "x" else sums).pop(_D + name) for name in wanted if call.in_forward}
    results = {name: numbers[name] for name in asked}
    if options.reduction != "none":
        results |= {name: _sum(call, results[name]) for name in ("loss", "accuracy") if name in results}
    mean = None
    if options.reduction == "mean":
        mean, mean_of_hits = _means(call, operands, numbers)
        results["loss"] *= mean
        results |= {"accuracy": results["accuracy"] * mean_of_hits} if "accuracy" in results else {}
    return results, numbers, gradients, mean if unit is None else unit if mean is None else mean * unit


def _tangents_of_numbers(call: LossCall, arrays: Arrays, t: Arrays, names: tuple[str, ...]) -> Arrays:
    """Return the tangents [tokens] of what there is of every token, from those of operands."""
    rows, whole = _rows_and_whole(arrays)

    def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
        here, w, fixed = _on_device(call, rows, whole, axes)
        moved = {name.removeprefix(_OF): a for name, a in (rows | whole).items() if name.startswith(_OF)}
        numbers = {name: rows[name] for name in _NUMBERS if name in rows}
        return loops.tangents(here, rows["x"], w, fixed, numbers, moved, names), {}

    rows |= {name: arrays[name] for name in _NUMBERS if name in arrays}
    rows |= {_OF + name: a for name, a in t.items() if name == "x"}
    whole |= {_OF + name: a for name, a in t.items() if name != "x"}
    return on_own_tokens(call.split, _op(run))(rows, whole)[0]


def _gradients(call: LossCall, arrays: Arrays, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
    """Return gradients of operands, from those of results: one for all tokens, or one of every token."""
    rows, whole = _rows_and_whole(arrays)

    def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
        here, w, fixed = _on_device(call, rows, whole, axes)
        numbers = {name: rows[name] for name in _NUMBERS if name in rows}
        upstream = {name.removeprefix(_G): a for name, a in (rows | whole).items() if name.startswith(_G)}
        d = loops.backward(here, rows["x"], w, fixed, numbers, upstream, wanted)
        return {name: d.pop(name) for name in ("x",) if name in d}, d

    rows |= {name: arrays[name] for name in _NUMBERS if name in arrays}
    rows |= {_G + name: a for name, a in g.items() if a.ndim}
    whole |= {_G + name: a for name, a in g.items() if not a.ndim}
    of_rows, sums = on_own_tokens(call.split, _op(run))(rows, whole)
    return of_rows | sums


def _rows_and_whole(operands: Arrays) -> tuple[Arrays, Arrays]:
    """Return the operands with a row for every token, and those that all tokens share."""
    rows = {name: operands[name] for name in ("x", "targets", "token_weight") if name in operands}
    return rows, {name: operands[name] for name in ("weight", "bias", "class_weight") if name in operands}


def _on_device(call: LossCall, rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[LossCall, Arrays, Arrays]:
    """Return a device's own call, its weight and bias, and what has no gradient."""
    w = {name: whole[name] for name in COLUMNS if name in whole}
    fixed = {name: a for name, a in (rows | whole).items() if name in ("targets", "token_weight", "class_weight")}
    return call.on_device(rows["x"].shape[0], w["weight"].shape[1], axes), w, fixed


def _op(run: Any) -> TokenOp:
    def column_dim(name: str) -> int | None:
        return COLUMNS.get(name.removeprefix(_D).removeprefix(_OF))

    return TokenOp(run, column_dim, partial=("x", _D + "x"))


def _reduced(call: LossCall, a: jax.Array, arrays: Arrays) -> jax.Array:
    """Return the tangent of the loss from those of every token."""
    if call.rules.options.reduction == "none":
        return a
    return _sum(call, a) * arrays["mean"] if "mean" in arrays else _sum(call, a)


def _means(call: LossCall, operands: Arrays, numbers: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return the factors of the sums of losses and of hits; a mean of nothing is zero."""
    dtype = numbers["loss"].dtype
    hits = (operands["targets"] != call.rules.options.ignore_index).astype(dtype)
    given = operands.get("num_valid")
    weight, count = _sum(call, numbers.get("weight", hits)), _sum(call, hits)
    pairs = ((weight, weight), (count, count))
    if given is not None:  # 0 beside tokens that count is a division by zero, as it would be outside
        pairs = ((count, given.astype(dtype)),) * 2
    loss, accuracy = (jnp.where(nothing == 0, 0, 1 / jnp.where(nothing == 0, 1, n)) for nothing, n in pairs)
    return loss, accuracy


def _sum(call: LossCall, a: jax.Array) -> jax.Array:
    """Return the sum over all tokens of the axis."""
    own = jnp.sum(a)
    return own if call.tokens is None else lax.psum(call.tokens.differing(own), call.tokens.name)


_loss = differentiable(_LossRules.forward, _LossRules, without=("accuracy", "top_logprobs"))


def _run(call: LossCall, x: jax.Array, w: Arrays, fixed: Arrays) -> Arrays:
    return _loss(call, {"x": x, **w, **jax.tree.map(lax.stop_gradient, fixed)})


# Called outside of any jit too, forward and backward are one compiled program each.
run_compiled = jax.jit(_run, static_argnums=0)


def run(call: LossCall, x: jax.Array, w: Arrays, fixed: Arrays) -> Arrays:
    """Return the results of a checked call.

    Raises:
        SpecError: num_valid, where it can be read, is negative.
    """
    count = fixed.get("num_valid")
    if count is not None and not isinstance(count, Tracer) and count.is_fully_addressable:
        loss_checks.check_count(NAME, float(count))
    return run_compiled(call, x, w, fixed)
