"""Causal attention by cuDNN, some key heads with their query heads at a time, for a caller that has a backward of its own.

cuDNN's backward has about ten arrays of the size of its queries. So that these are of some heads alone, forward and backward
are loops over groups of heads where a group is enough for the device. Beside its operands the whole then makes the output and
the log-sum-exp of each query; the gradients are written over q, k and v.
Letters: B sequences of S tokens, N query heads, n key heads, d features of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shared_specs.layers.block_costs import attention_groups
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import vary_over, varying_of, zeros_after
from tiled_jax.layers.attention import even
from tiled_jax.layers.attention_blocks import Gradients

HeadsAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def forward(
    attend: HeadsAttention, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, Callable[[jax.Array], Gradients]]:
    """Return attend(q, k, v), [B, S, N, d], and the function from its gradient to those of q, k and v, in their dtypes.

    q: [B, S, N, d]. k, v: [B, S, n, d], n divides N.
    """
    if q.shape[1] % 2:
        tokens = q.shape[1]
        y, pull = forward(attend, *map(even, (q, k, v)))
        return y[:, :tokens], lambda dy: Gradients(*(d[:, :tokens] for d in pull(even(dy))))
    groups = attention_groups(q.shape[0] * q.shape[1], q.shape[2], k.shape[2])
    if groups == 1:
        y, pull = jax.vjp(attend, q, k, v)
        return y, lambda dy: Gradients(*pull(dy))
    made, types = _of_group(attend, [_part(a, 0, groups) for a in (q, k, v)]), varying_of((q, k, v))

    def attended(y: jax.Array, i: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        part, kept = made.run([_part(a, i, groups) for a in (q, k, v)])
        return vary_over(_set_part(y, part, i), types), kept

    y, kept = lax.scan(attended, vary_over(zeros_after(q, q.shape, q.dtype), types), jnp.arange(groups))

    def backward(dy: jax.Array) -> Gradients:
        types = varying_of((q, k, v, dy))

        def of_group(carry: Any, step: Any) -> Any:
            i, kept = step
            # The barrier makes them arrays of their own: XLA would read them from what is written over, and copy that first.
            operands = barrier([_part(a, i, groups) for a in carry])
            found = made.pull(operands, _part(y, i, groups), kept)(_part(dy, i, groups))
            return [vary_over(_set_part(a, d, i), types) for a, d in zip(carry, found, strict=True)], None

        carry = [vary_over(a, types) for a in (q, k, v)]
        return Gradients(*lax.scan(of_group, carry, (jnp.arange(groups), kept))[0])

    return y, backward


def _part(a: jax.Array, i: Any, groups: int) -> jax.Array:
    """Return the heads of group i."""
    return lax.dynamic_slice_in_dim(a, i * (a.shape[2] // groups), a.shape[2] // groups, 2)


def _set_part(a: jax.Array, part: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(a, part.astype(a.dtype), i * part.shape[2], 2)


@dataclass(frozen=True)
class _Made:
    """Attention of a group as a program: its output, then what its backward needs that is neither this nor an operand.

    places: of each array that backward needs, which of the operands, the output and what is kept it is, in this order.
    """

    program: Any
    places: tuple[int, ...]
    form: Any

    def run(self, operands: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        y, *kept = core.jaxpr_as_fun(self.program)(*operands)
        return y, kept

    def pull(self, operands: list[jax.Array], y: jax.Array, kept: list[jax.Array]) -> Callable[[jax.Array], Any]:
        there = [*operands, y, *kept]
        return jax.tree.unflatten(self.form, [there[place] for place in self.places])


def _of_group(attend: HeadsAttention, operands: list[jax.Array]) -> _Made:
    """Trace forward and see which of the arrays that `jax.vjp` keeps are the operands and the output themselves."""
    forms = []

    def with_kept(*operands: jax.Array) -> list[jax.Array]:
        y, pull = jax.vjp(attend, *operands)
        leaves, form = jax.tree.flatten(pull)
        forms.append(form)
        return [y, *leaves]

    traced = jax.make_jaxpr(with_kept)(*operands)
    output, *leaves = traced.jaxpr.outvars
    there: list[Any] = [*traced.jaxpr.invars, output]
    places = []
    for leaf in leaves:
        if not any(leaf is one for one in there):
            there.append(leaf)
        places.append(next(number for number, one in enumerate(there) if one is leaf))
    kept = there[len(operands) :]
    program = core.ClosedJaxpr(traced.jaxpr.replace(outvars=kept), traced.consts)
    return _Made(program, tuple(places), forms[0])
