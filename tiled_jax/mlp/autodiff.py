"""The MLP as a differentiable function of its tokens: what is kept between the passes, and each pass on every device."""

from fractions import Fraction
from functools import partial
from typing import Any

import jax

from shared_specs.core import checks
from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.loops import gradient_of
from tiled_jax.core.own_tokens import TokenOp, as_typed, on_own_tokens
from tiled_jax.mlp import loops
from tiled_jax.mlp.loops import OF, PRE
from tiled_jax.mlp.loops import MLPCall as MLPCall

# The dim of a weight or bias that tensor parallelism splits.
COLUMNS = {"w_gate": 1, "w_up": 1, "w_down": 0, "b_gate": 0, "b_up": 0}


class _MLPRules:
    """x is [T, H], or with `call.split` [*leading dims, H], or with `call.tokens` a device's own [T / R, H]; the other
    operands are weights and biases."""

    @staticmethod
    def forward(call: MLPCall, operands: Arrays) -> Arrays:
        x, w = _x_and_weights(operands)
        return on_own_tokens(call.split, _op(call, partial(loops.forward, call, 0)))({"x": x}, w)[0]

    @staticmethod
    def save(call: MLPCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        if call.token_order and set(wanted) - {"x"}:
            checks.check_deterministic_shards("tiled_mlp", call.plan)
        x, w = _x_and_weights(operands)
        found = on_own_tokens(call.split, _op(call, partial(loops.forward, call, _kept(call, x))))({"x": x}, w)[0]
        # The operands as given: masters are cast again, so that no cast copy stays alive between the passes.
        return {"y": found.pop("y")}, Saved(operands | found)

    @staticmethod
    def tangents(call: MLPCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        x, w = _x_and_weights(saved.arrays)
        of_x = {OF + "x": t["x"]} if "x" in t else {}
        of_w = {OF + name: a for name, a in t.items() if name != "x"}
        return on_own_tokens(call.split, _op(call, partial(loops.tangents, call)))({"x": x, **of_x}, w | of_w)[0]

    @staticmethod
    def gradients(call: MLPCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        x, w = _x_and_weights(saved.arrays)
        rows = {"x": x, "dy": g["y"]} | {name: saved.arrays[name] for name in PRE if name in saved.arrays}
        of_rows, sums = on_own_tokens(call.split, _op(call, partial(loops.backward, call, wanted)))(rows, w)
        # The types of the operands themselves: the barrier may have joined those of its own.
        found = {name: gradient_of(saved.arrays[name], d) for name, d in (of_rows | sums).items()}
        return {name: as_typed(saved.arrays[name], d) for name, d in found.items()}


def _kept(call: MLPCall, x: jax.Array) -> Fraction | int:
    """Return the share of the last leading dim of x for which there is room to keep gate and up.

    Where a mesh may cut that dim the room is cut with it: a multiple of every number of parts.
    """
    length, tokens = x.shape[-2], call.kept_tokens
    if not tokens:
        return 0
    if call.split is None:
        return Fraction(tokens, length)
    unit = call.split.unit(length)
    return Fraction(min(length, -(-tokens * length // (call.plan.tokens * unit)) * unit), length)


def _op(call: MLPCall, run: Any) -> TokenOp:
    return TokenOp(
        run,
        column_dim=lambda name: COLUMNS.get(name.removeprefix(OF)),
        partial=("y", "x"),
        of_columns=PRE,
        multiple=call.steps.multiple,
    )


def _x_and_weights(arrays: Arrays) -> tuple[jax.Array, Arrays]:
    return arrays["x"], {name: a for name, a in arrays.items() if name[:2] in ("w_", "b_")}


_mlp = differentiable(_MLPRules.forward, _MLPRules)


def _run(call: MLPCall, x: jax.Array, w: Arrays) -> jax.Array:
    return _mlp(call, {"x": x, **w})["y"]


# Called outside of any jit too, forward and backward are one compiled program each.
run = jax.jit(_run, static_argnums=0)
