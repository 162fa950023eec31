"""Which operands need a gradient, handed from the forward rule of a `custom_vjp` to its backward rule.

It is known when the forward rule is traced, and must not go into the structure of what that rule saves. JAX keeps one
structure for a rule inside a `jit`, that of the last trace: a program that was traced for the gradient of one operand,
and then found in the cache for those of another, would be given the wrong one (jax 0.10 and 0.11; seen as gradients of
zero under `jax.checkpoint`). So the answer is in the shapes of saved arrays without elements, which belong to the trace.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

Marks = dict[str, jax.Array]


def perturbed(operands: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the operands, as `custom_vjp` with symbolic zeros gives them, that need a gradient."""
    return tuple(name for name, operand in operands.items() if operand.perturbed)


def mark(names: Iterable[str], wanted: Iterable[str]) -> Marks:
    """For every name an array of no bytes."""
    chosen = set(wanted)
    return {name: jnp.zeros((0, int(name in chosen)), jnp.bool_) for name in names}


def marked(marks: Marks) -> tuple[str, ...]:
    """The names that were wanted."""
    return tuple(name for name, array in marks.items() if array.shape[-1])
