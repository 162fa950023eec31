"""The distillation loss as a differentiable function of the student: what is kept between the passes, and each pass on every
device."""

from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from shared_specs.core.checks import flat_tokens
from shared_specs.loss import checks as loss_checks
from tiled_jax.core.linear_call import Arrays, Saved, differentiable, made_together
from tiled_jax.core.loops import Like, gradient_of
from tiled_jax.core.own_tokens import TokenOp, as_typed, on_own_tokens
from tiled_jax.core.products import wide
from tiled_jax.distillation import loops
from tiled_jax.distillation.loops import DistillationCall

FUNCTION = "tiled_distillation_loss"
_ROWS = ("x", "teacher", "targets", "token_weight")
_D, _OF = "gradient of ", "tangent of "  # begin names


class _DistillationDerivatives:
    """The rows are [T, ...], or with `call.split` [*leading dims, ...]; the student is "x" with "weight" and "bias"."""

    @staticmethod
    def forward(call: DistillationCall, operands: Arrays) -> Arrays:
        return {"loss": _losses(call, operands, ())[0]}

    @staticmethod
    def save(call: DistillationCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        value, gradients, mean = _losses(call, operands, wanted if call.in_forward else ())
        if not call.in_forward:
            return {"loss": value}, Saved({name: a for name, a in operands.items() if name != "num_valid"})
        kept = {_D + name: as_typed(operands[name], a) for name, a in made_together(gradients).items()}
        known = tuple((name, Like.of(operands[name])) for name in wanted)
        return {"loss": value}, Saved(kept | {"mean": mean}, known)

    @staticmethod
    def tangents(call: DistillationCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        if call.in_forward:
            terms = [
                jnp.sum(a.astype(wide(a.dtype)) * saved.arrays[_D + name].astype(wide(a.dtype)))
                for name, a in t.items()
            ]
            return {"loss": reduce(jnp.add, terms) * saved.arrays["mean"]}
        rows, whole = _rows_and_whole(saved.arrays)

        def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
            here = call.on_device(rows["x"].shape[0])
            moved = {name.removeprefix(_OF): a for name, a in (rows | whole).items() if name.startswith(_OF)}
            return {"loss": loops.tangents(here, *_without(rows, whole), moved)}, {}

        rows |= {_OF + name: a for name, a in t.items() if name == "x"}
        whole |= {_OF + name: a for name, a in t.items() if name != "x"}
        return on_own_tokens(call.split, _op(run))(rows, whole)[0]

    @staticmethod
    def gradients(call: DistillationCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        arrays = saved.arrays
        if call.in_forward:
            like, factor = dict(saved.known), g["loss"] * arrays["mean"]
            found = {name: arrays[_D + name].astype(factor.dtype) * factor for name in wanted}
            return {name: gradient_of(like[name], d) for name, d in found.items()}
        rows, whole = _rows_and_whole(arrays)

        def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
            upstream = rows.pop("upstream")
            d = loops.backward(call.on_device(rows["x"].shape[0]), rows, whole, upstream, wanted)
            return {name: d.pop(name) for name in ("x",) if name in d}, d

        of_rows, sums = on_own_tokens(call.split, _op(run))(rows | {"upstream": g["loss"]}, whole)
        found = made_together(of_rows | sums)
        return {name: as_typed(arrays[name], gradient_of(arrays[name], found[name])) for name in wanted}


def _losses(call: DistillationCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[jax.Array, Arrays, jax.Array]:
    """Return the loss, the gradients of the sum of the losses of all tokens, and what still multiplies these."""
    rows, whole = _rows_and_whole(operands)
    dtype = wide(rows["x"].dtype)
    unit = loops.unit_of(call, rows, dtype) if wanted else jnp.ones((), dtype)

    def run(rows: Arrays, whole: Arrays, axes: tuple[str, ...]) -> tuple[Arrays, Arrays]:
        unit = whole.pop("unit")
        losses, d = loops.forward(call.on_device(rows["x"].shape[0]), rows, whole, wanted, unit)
        d = {_D + name: a for name, a in d.items()}
        return {"loss": losses} | {name: d.pop(name) for name in (_D + "x",) if name in d}, d

    numbers, sums = on_own_tokens(call.split, _op(run))(rows, whole | {"unit": unit})
    gradients = {name: (numbers if name == "x" else sums)[_D + name] for name in wanted}
    if call.rules.options.reduction == "none":
        return numbers["loss"], gradients, unit
    mean = _mean(call, operands, dtype)
    return jnp.sum(numbers["loss"]) * mean, gradients, mean * unit


def _mean(call: DistillationCall, operands: Arrays, dtype: Any) -> jax.Array:
    """Return what a reduction multiplies the sum of the losses with; a mean of nothing is zero."""
    one, targets = jnp.ones((), dtype), operands.get("targets")
    if call.rules.options.reduction != "mean":
        return one
    if targets is None:
        count = one * flat_tokens(operands["x"].shape)
    else:
        count = jnp.sum((targets != call.rules.options.ignore_index).astype(dtype))
    by = operands["num_valid"].astype(dtype) if "num_valid" in operands else jnp.where(count == 0, 1, count)
    return jnp.where(count == 0, 0, 1 / by)


def _rows_and_whole(operands: Arrays) -> tuple[Arrays, Arrays]:
    """Return the operands with a row for every token, and those that all tokens share."""
    rows = {name: operands[name] for name in _ROWS if name in operands}
    return rows, {name: a for name, a in operands.items() if name not in (*_ROWS, "num_valid")}


def _without(rows: Arrays, whole: Arrays) -> tuple[Arrays, Arrays]:
    """Return both without the tangents among them."""
    kept = ({name: a for name, a in each.items() if not name.startswith(_OF)} for each in (rows, whole))
    return next(kept), next(kept)


def _op(run: Any) -> TokenOp:
    return TokenOp(run, lambda name: None)


_loss = differentiable(_DistillationDerivatives.forward, _DistillationDerivatives)


def _run(call: DistillationCall, student: Arrays, fixed: Arrays) -> jax.Array:
    return _loss(call, student | jax.tree.map(lax.stop_gradient, fixed))["loss"]


# Called outside of any jit too, forward and backward are one compiled program each.
run_compiled = jax.jit(_run, static_argnums=0)


def run(call: DistillationCall, student: Arrays, fixed: Arrays) -> jax.Array:
    """Return the result of a checked call. student: x, weight and bias. fixed: what has no gradient.

    Raises:
        SpecError: num_valid, where it can be read, is negative.
    """
    count = fixed.get("num_valid")
    if count is not None and not isinstance(count, Tracer) and count.is_fully_addressable:
        loss_checks.check_count(FUNCTION, float(count))
    return run_compiled(call, student, fixed)
