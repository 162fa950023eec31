"""The head of a traced model: the product that makes its logits, and what is done to them behind it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tiled_jax.models.others.equations import Atom, Equations

# Steps that leave every entry what it is. Names of `jax.ad_checkpoint` and constraints on shardings are of logits that are not
# there any more.
_SAME = (
    "convert_element_type",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "copy",
    "copy_p",
    "name",
    "sharding_constraint",
)
_SPREAD = ("broadcast_in_dim", "reshape", "convert_element_type", "pvary", "pcast")


class Head(NamedTuple):
    """logits = softcap tanh(scale (x w + b) / softcap), or scale (x w + b).

    x: [*tokens, H]. weight: [H, V]. bias: [V] or None.
    """

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    scale: float
    softcap: float | None


class NoHeadError(Exception):
    """Why no head was found."""


@dataclass
class _Behind:
    """What is done to the product, read from the last step to the first: numbers that multiply, and one tanh."""

    outer: float = 1.0
    inner: float = 1.0
    capped: bool = False
    bias: tuple[Equations, Atom] | None = None

    def times(self, factor: float) -> None:
        if self.bias is not None:
            raise NoHeadError("logits with a bias in the midst of other steps")
        if self.capped:
            self.inner *= factor
        else:
            self.outer *= factor


def head_of(program: Equations, logits: Atom, tokens: tuple[int, ...]) -> Head:
    """Return the head whose logits [*tokens, V] a program makes; nothing of [*tokens, V] is computed.

    Raises:
        NoHeadError: they are made in another way.
    """
    vocab, behind, atom = logits.aval.shape[-1], _Behind(), logits
    while True:
        program, atom, equation = program.origin(atom)
        if equation is None:
            raise NoHeadError("logits that no product makes")
        name = equation.primitive.name
        if name == "dot_general":
            break
        if atom.aval.shape[-1:] != (vocab,):
            raise NoHeadError(f"logits whose entries {name} moves")
        atom = _before(program, equation, name, behind, vocab)
    x, weight = _factors(program, equation, tokens, vocab)
    found = None if behind.bias is None else behind.bias[0].values([behind.bias[1]])[0].reshape(-1)
    bias = None if found is None else jnp.broadcast_to(found, (vocab,)).astype(weight.dtype)
    if not behind.capped:
        return Head(x, weight, bias, behind.outer, None)
    if behind.outer <= 0:
        raise NoHeadError(f"logits capped by {behind.outer}")
    return Head(x, weight, bias, behind.inner * behind.outer, behind.outer)


def _before(program: Equations, equation: Any, name: str, behind: _Behind, vocab: int) -> Atom:
    """Return the input of one step behind the product, and note what the step does."""
    first, *others = equation.invars
    if name in _SAME:
        if first.aval.shape[-1:] != (vocab,) or first.aval.size != equation.outvars[0].aval.size:
            raise NoHeadError(f"logits whose entries {name} moves")
        return first
    if name == "tanh":
        if behind.capped or behind.bias is not None:
            raise NoHeadError("logits that go through tanh twice, or before a bias")
        behind.capped = True
        return first
    if name in ("mul", "div") and len(others) == 1:
        large, small = (first, others[0]) if first.aval.size >= others[0].aval.size else (others[0], first)
        if name == "mul" or large is first:
            factor = _number(program, small)
            behind.times(factor if name == "mul" else 1.0 / factor)
            return large
    if name in ("add", "add_any") and len(others) == 1 and behind.bias is None:
        row = _row(program, others[0], vocab)
        large, row = (first, row) if row is not None else (others[0], _row(program, first, vocab))
        if row is not None:
            behind.bias = row
            return large
    raise NoHeadError(f"logits to which {name} is applied")


def _number(program: Equations, atom: Atom) -> float:
    """Return the one number that an operand is, however it is spread."""
    program, atom, _ = _spread(program, atom)
    with jax.ensure_compile_time_eval():  # of sqrt(8), under `jit` too
        value = program.values([atom])[0] if atom.aval.size == 1 else None
    if value is None or isinstance(value, Tracer):
        raise NoHeadError("logits that are multiplied by what is no known number")
    return np.asarray(value).item()


def _row(program: Equations, atom: Atom, vocab: int) -> tuple[Equations, Atom] | None:
    """Return the one row of the vocabulary that an operand is, spread over all tokens; None where it is none.

    Raises:
        NoHeadError: it is one number, for all entries.
    """
    while True:
        program, atom, equation = program.origin(atom)
        if atom.aval.size == 1:
            raise NoHeadError("logits with a number added")
        if atom.aval.shape[-1:] != (vocab,):  # of the tokens, which may be as many as there are entries
            return None
        if equation is None or equation.primitive.name not in _SPREAD or atom.aval.size == vocab:
            return (program, atom) if atom.aval.size == vocab else None
        dims = equation.params.get("broadcast_dimensions")
        if dims is not None and dims[-1:] != (atom.aval.ndim - 1,):
            return None
        atom = equation.invars[0]


def _spread(program: Equations, atom: Atom) -> tuple[Equations, Atom, Any]:
    """Return what an operand is before it is spread, reshaped or cast."""
    while True:
        program, atom, equation = program.origin(atom)
        if equation is None or equation.primitive.name not in _SPREAD:
            return program, atom, equation
        atom = equation.invars[0]


def _factors(program: Equations, product: Any, tokens: tuple[int, ...], vocab: int) -> tuple[jax.Array, jax.Array]:
    """Return x [*tokens, H] and the weight [H, V] of a product, in the dtype of the product."""
    (left, right), batched = product.params["dimension_numbers"]
    x, weight = product.invars
    if batched != ((), ()) or len(left) != 1 or weight.aval.ndim != 2 or product.outvars[0].aval.shape[-1] != vocab:
        raise NoHeadError("a last product that is not of hidden states and one weight [H, V]")
    if x.aval.size != np.prod(tokens, dtype=int) * x.aval.shape[left[0]]:
        raise NoHeadError("a last product of other tokens than the targets")
    hidden, kernel = program.values([x, weight])
    hidden = jnp.moveaxis(hidden, left[0], -1)
    kernel = kernel if right[0] == 0 else kernel.T
    dtype = product.outvars[0].aval.dtype
    return hidden.reshape(*tokens, hidden.shape[-1]).astype(dtype), kernel.astype(dtype)
