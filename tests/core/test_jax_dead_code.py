"""What nobody reads of our own operations is left out, however a version of JAX calls their rules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.interpreters import partial_eval as pe

from tiled_jax.core.linear_call import opaque_call
from tiled_jax.core.turns import turns
from tiled_jax.loss.math import power_of_two


def opaque(a: jax.Array, b: jax.Array) -> Any:
    return opaque_call(lambda arrays: [2 * arrays[0], 3 * arrays[1]], [a, b])


def in_turns(a: jax.Array, b: jax.Array) -> Any:
    return turns(lambda i, carry: [2 * carry[0], 3 * carry[1]], jnp.int32(2), 3, [a, b])


@pytest.mark.parametrize("more", [(), ([True] * 8,)], ids=["two arguments", "three, as in jax 0.12"])
@pytest.mark.parametrize(("fn", "name"), [(opaque, "tiled_forward"), (in_turns, "tiled_turns")])
def test_operands_of_results_that_nobody_reads_are_left_out(fn: Any, name: str, more: tuple[Any, ...]) -> None:
    jaxpr = jax.make_jaxpr(fn)(jnp.ones(3), jnp.ones(5)).jaxpr
    equation = next(each for each in jaxpr.eqns if each.primitive.name == name)
    used, smaller = pe.dce_rules[equation.primitive]([True, False], *more, equation)
    assert used[-2:] == [True, False]
    assert [v.aval.shape for v in smaller.outvars] == [(3,)]
    assert isinstance(smaller, core.JaxprEqn)


@pytest.mark.parametrize("fn", [opaque, in_turns])
def test_they_lower_by_evaluating_what_they_call(fn: Any) -> None:
    """jax 0.12 asks an operation for this where what it calls has operations of more than arrays."""
    jaxpr = jax.make_jaxpr(fn)(a := jnp.arange(3.0), b := jnp.arange(5.0))
    equation = jaxpr.jaxpr.eqns[-1]
    given = ([jnp.int32(2)] if fn is in_turns else []) + [a, b]
    found = equation.primitive.to_lojax(*given, **equation.params)
    for ours, expected in zip(found, fn(a, b), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_are_those_of_frexp(dtype: str, x64: None) -> None:
    limits = np.finfo(dtype)
    sizes = np.exp(np.random.default_rng(0).uniform(-80, 80, 200)).astype(dtype)
    for size in (*sizes, *np.asarray([0, limits.tiny, limits.max, np.inf, 0.5, 1, 2, 3], dtype)):
        _, exponent = np.frexp(np.clip(size, limits.tiny, limits.max))
        found = power_of_two(jnp.asarray(size))
        assert found == np.ldexp(limits.dtype.type(1), exponent - 1)
        assert found.dtype == dtype
