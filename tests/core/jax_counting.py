"""Meters for exact tests: FLOP of matrix products, compiled temporary bytes, bytes kept between forward and backward."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core


def flop(fn: Callable[..., Any], *arguments: Any, turns: int | None = None) -> int:
    """FLOP of the products of fn's jaxpr, a loop's body as often as it runs. Nothing is compiled or executed.

    turns: of every loop whose number of turns only the device knows; None counts the most that each may have.
    """
    return _flop(jax.jit(fn).trace(*arguments).jaxpr.jaxpr, turns)


def _flop(jaxpr: Any, turns: int | None) -> int:
    return sum(_flop_of(equation, turns) for equation in jaxpr.eqns)


def _flop_of(equation: Any, turns: int | None) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        shape, summed = equation.invars[0].aval.shape, params["dimension_numbers"][0][0]
        return 2 * math.prod(shape[dim] for dim in summed) * equation.outvars[0].aval.size
    if name in ("while", "cond"):
        raise ValueError(f"{name}: how often it runs cannot be read from the program")
    inner = sum(_flop(jaxpr, turns) for value in params.values() for jaxpr in jaxprs_in(value))
    most = params.get("most") if turns is None else turns
    return inner * {"scan": params.get("length"), "tiled_turns": most}.get(name, 1)


def collectives(fn: Callable[..., Any], *arguments: Any) -> dict[bool, int]:
    """How many sums over a mesh axis the program holds outside (False) and inside (True) of its loops."""
    found = {False: 0, True: 0}

    def walk(jaxpr: Any, in_loop: bool) -> None:
        for equation in jaxpr.eqns:
            found[in_loop] += equation.primitive.name.startswith("psum")
            for value in equation.params.values():
                for inner in jaxprs_in(value):
                    walk(inner, in_loop or equation.primitive.name in ("scan", "while", "tiled_turns"))

    walk(jax.jit(fn).trace(*arguments).jaxpr.jaxpr, False)
    return found


def jaxprs_in(value: Any) -> Iterator[Any]:
    if isinstance(value, core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from jaxprs_in(item)


def temp_bytes(fn: Callable[..., Any], *arguments: Any) -> int:
    """Bytes the compiled program uses above its arguments and results."""
    analysis: Any = jax.jit(fn).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def kept_bytes(fn: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that backward is handed, the arguments themselves left out."""
    _, pull = jax.vjp(fn, *arguments)
    given = {id(leaf) for leaf in jax.tree.leaves(arguments)}
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if id(leaf) not in given)


def sent_bytes(fn: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that one device sends to another by `ppermute`, a loop's body as often as it runs. Nothing is compiled."""

    def of(jaxpr: Any) -> int:
        return sum(of_equation(equation) for equation in jaxpr.eqns)

    def of_equation(equation: Any) -> int:
        name, params = equation.primitive.name, equation.params
        if name == "ppermute":
            return sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        inner = sum(of(jaxpr) for value in params.values() for jaxpr in jaxprs_in(value))
        if name in ("while", "cond") and inner:
            raise ValueError(f"{name}: how often it runs cannot be read from the program")
        return inner * (params["length"] if name == "scan" else 1)

    return of(jax.jit(fn).trace(*arguments).jaxpr.jaxpr)
