"""That backward's recomputation is no part of forward to a compiler: what is equal in a program is merged, and then kept."""

from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shared_specs.config import Tiling
from shared_specs.mlp import costs as mlp_costs
from tests.core.jax_counting import jaxprs_in
from tiled_jax import tiled_mlp

TOKENS, HIDDEN, INTERMEDIATE = 16, 8, 12


class Merged:
    """FLOP of the products of a program in which equal operations on equal operands are one, as XLA makes it.

    What comes out of an `optimization_barrier` is equal to nothing.
    """

    def __init__(self) -> None:
        self.fresh, self.known, self.flop = count(), dict[Any, list[int]](), 0

    def read(self, jaxpr: Any, operands: list[Any]) -> list[Any]:
        found = dict(zip(jaxpr.invars, operands, strict=True)) | {v: next(self.fresh) for v in jaxpr.constvars}

        def value(atom: Any) -> Any:
            return found[atom] if isinstance(atom, jax.extend.core.Var) else ("literal", str(atom))

        for equation in jaxpr.eqns:
            given, inner = (
                [value(a) for a in equation.invars],
                [j for p in equation.params.values() for j in jaxprs_in(p)],
            )
            name = equation.primitive.name
            assert name not in ("scan", "while"), "a loop's body is not equal to what is outside"
            if len(inner) == 1 and len(inner[0].invars) == len(given):
                made = self.read(inner[0], given)
            elif name == "optimization_barrier":
                made = [next(self.fresh) for _ in equation.outvars]
            else:
                made = self.once(equation, (name, str(equation.params), *given))
            found |= zip(equation.outvars, made, strict=True)
        return [value(a) for a in jaxpr.outvars]

    def once(self, equation: Any, key: Any) -> list[int]:
        if key not in self.known:
            self.known[key] = [next(self.fresh) for _ in equation.outvars]
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                summed = equation.invars[0].aval.shape[contracted[0]]
                self.flop += 2 * equation.outvars[0].aval.size * summed
        return self.known[key]


def merged_flop() -> int:
    """Of y and all gradients, in one shard: a straight line."""
    tiled = partial(tiled_mlp, tiling=Tiling(num_shards=1), backend="xla")

    def step(dy: jax.Array, *arguments: jax.Array) -> Any:
        y, pull = jax.vjp(tiled, *arguments)
        return y, pull(dy)

    x, w = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.float32), (HIDDEN, INTERMEDIATE)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (w, w, w[::-1])]
    jaxpr, merged = jax.make_jaxpr(step)(x, x, *weights).jaxpr, Merged()
    merged.read(jaxpr, [next(merged.fresh) for _ in jaxpr.invars])
    return merged.flop


SHAPE = mlp_costs.MLPShape(tokens=TOKENS, hidden=HIDDEN, intermediate=INTERMEDIATE)


def test_no_product_of_the_recomputation_is_one_of_forward() -> None:
    assert merged_flop() == 11 * mlp_costs.thi(SHAPE)


@pytest.mark.deep
def test_without_the_barrier_two_of_them_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that gate and up would be kept from forward to backward: the test above sees it."""
    jax.clear_caches()
    monkeypatch.setattr(lax, "optimization_barrier", lambda operands: operands)
    try:
        assert merged_flop() == 9 * mlp_costs.thi(SHAPE)
    finally:
        jax.clear_caches()
