"""A mixture of experts as a differentiable function of its tokens: what is kept, and each pass on every device."""

from functools import partial
from typing import Any

import jax

from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.loops import gradient_of
from tiled_jax.core.own_tokens import TokenOp, as_typed, on_own_tokens
from tiled_jax.moe import loops
from tiled_jax.moe.loops import CHOICE, MOE_WEIGHTS
from tiled_jax.moe.loops import MoECall as MoECall


class _MoERules:
    """x is [T, H], or with `call.split` [*leading dims, H]; the other operands are the weights."""

    @staticmethod
    def forward(call: MoECall, operands: Arrays) -> Arrays:
        return {name: a for name, a in _forward(call, operands).items() if name not in CHOICE}

    @staticmethod
    def save(call: MoECall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        found = _forward(call, operands)
        choice = {name: found.pop(name) for name in CHOICE}
        # The operands as given: masters are cast again, so that no cast copy stays alive between the passes.
        return found, Saved(operands | choice)

    @staticmethod
    def tangents(call: MoECall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        """JAX's own of the loop."""
        operands = {name: a for name, a in saved.arrays.items() if name not in CHOICE}

        def moved(of: Arrays) -> Arrays:
            found = _forward(call, operands | of, one_by_one=False)
            return {name: found[name] for name in results}

        return jax.jvp(moved, ({name: operands[name] for name in t},), (t,))[1]

    @staticmethod
    def gradients(call: MoECall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        rows = {name: saved.arrays[name] for name in ("x", *CHOICE)} | {f"d{name}": a for name, a in g.items()}
        w = {name: saved.arrays[name] for name in MOE_WEIGHTS}
        of_rows, sums = on_own_tokens(call.split, _op(partial(loops.backward, call, wanted)))(rows, w)
        # The types of the operands themselves: the barrier may have joined those of its own.
        found = {name: gradient_of(saved.arrays[name], d) for name, d in (of_rows | sums).items()}
        return {name: as_typed(saved.arrays[name], d) for name, d in found.items()}


def _forward(call: MoECall, operands: Arrays, *, one_by_one: bool = True) -> Arrays:
    w = {name: operands[name] for name in MOE_WEIGHTS}
    return on_own_tokens(call.split, _op(partial(loops.forward, call, one_by_one)))({"x": operands["x"]}, w)[0]


def _op(run: Any) -> TokenOp:
    return TokenOp(run, column_dim=lambda name: None)


_moe = differentiable(_MoERules.forward, _MoERules)


def _run(call: MoECall, x: jax.Array, w: Arrays) -> Arrays:
    return _moe(call, {"x": x, **w})


# Called outside of any jit too, forward and backward are one compiled program each.
run = jax.jit(_run, static_argnums=0)
