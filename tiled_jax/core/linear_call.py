"""Functions with a tangent and a backward of our own: forward mode, reverse mode, and both again on top of each other.

`custom_vjp` has no forward mode. Here the rule is a `custom_jvp` whose tangents come from one linear operation, a primitive
that is told its transpose: reverse mode runs the hand-written backward and nothing else, forward mode the tangents of a
shard at a time, and a derivative of either is JAX's own of the loop that it runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from tiled_jax.core.loops import vary_over, varying

Arrays = dict[str, jax.Array]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["known"])
@dataclass(frozen=True)
class Saved:
    """Arrays by name that the derivatives need, and what is static about them (hashable)."""

    arrays: Arrays
    known: Any = None


class DerivativeRules(Protocol):
    """The three loops of an operation. `call` is static; results and operands go by their names.

    save(call, operands, wanted) -> results and what the derivatives for the operands `wanted` need.
    tangents(call, saved, t, results) -> tangents of the named results, from those of operands.
    gradients(call, saved, g, wanted) -> gradients of the operands `wanted`, from those of some results.
    """

    def save(self, call: Any, operands: Arrays, /, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]: ...
    def tangents(self, call: Any, saved: Saved, t: Arrays, results: tuple[str, ...], /) -> Arrays: ...
    def gradients(self, call: Any, saved: Saved, g: Arrays, wanted: tuple[str, ...], /) -> Arrays: ...


def differentiable(
    forward: Callable[[Any, Arrays], Arrays], rules: DerivativeRules, without: Sequence[str] = ()
) -> Callable[[Any, Arrays], Arrays]:
    """forward(call, operands) -> results with the derivatives of `rules`; integers and those named in `without` have none."""

    run = jax.custom_jvp(forward, nondiff_argnums=(0,))

    def rule(call: Any, primals: Any, tangents: Any) -> tuple[Arrays, Arrays]:
        (operands,), (given,) = primals, tangents
        moved = {name: t for name, t in given.items() if not isinstance(t, SymbolicZero)}
        results, saved = opaque_call(partial(rules.save, call, wanted=tuple(moved)), operands)
        names = tuple(name for name, a in results.items() if name not in without and _has_tangent(a))
        fn = _TangentMap(rules, call, tuple(saved.arrays), saved.known, tuple(moved), names)
        found = dict(zip(names, linear_call(fn, list(saved.arrays.values()), list(moved.values())), strict=True))
        return results, {name: found[name] if name in found else _no_tangent(a) for name, a in results.items()}

    run.defjvp(rule, symbolic_zeros=True)
    return run


def _has_tangent(a: jax.Array) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)


def _no_tangent(a: jax.Array) -> Any:
    return jnp.zeros_like(a) if _has_tangent(a) else zero_from_primal(a, symbolic_zeros=True)


def opaque_call(fn: Callable[[Any], Any], operands: Any) -> Any:
    """fn(operands) as one operation, of which what nobody uses is left out. Results that are operands are these themselves.

    When a `custom_jvp` is linearized, JAX runs what is known of it through its partial evaluation, which moves all that is
    the same for every shard out of the loop, to be kept beside it. It does not look into an operation of ours.
    """
    callee, form = jax.make_jaxpr(fn, return_shape=True)(operands)
    known = dict(zip(callee.jaxpr.invars, jax.tree.leaves(operands), strict=True))
    made = [isinstance(out, core.Literal) or out not in known for out in callee.jaxpr.outvars]
    smaller, _ = pe.dce_jaxpr(callee.jaxpr, made, instantiate=True)
    found = iter(_opaque.bind(*known.values(), callee=core.ClosedJaxpr(smaller, callee.consts)))
    leaves = [next(found) if is_made else known[out] for out, is_made in zip(callee.jaxpr.outvars, made, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(form), leaves)


class Linear(Protocol):
    """A function of constants, and of inputs in which it is linear. Hashable."""

    def __call__(self, constants: list[jax.Array], inputs: list[jax.Array], /) -> list[jax.Array]: ...

    def transpose(self, given: tuple[int, ...], /) -> "Linear":
        """Return the function of cotangents of the results `given` -> those of all inputs."""
        ...


@dataclass(frozen=True)
class _OfCall:
    """A call, what it saved, the operands `wanted` and the results concerned."""

    rules: DerivativeRules
    call: Any
    saved: tuple[str, ...]
    known: Any
    wanted: tuple[str, ...]
    results: tuple[str, ...]

    def saved_as(self, constants: list[jax.Array]) -> Saved:
        return Saved(dict(zip(self.saved, constants, strict=True)), self.known)


class _TangentMap(_OfCall):
    """Tangents of the operands `wanted` -> of `results`."""

    def __call__(self, constants: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        given = dict(zip(self.wanted, inputs, strict=True))
        found = self.rules.tangents(self.call, self.saved_as(constants), given, self.results)
        return [found[name] for name in self.results]

    def transpose(self, given: tuple[int, ...]) -> "_GradientMap":
        results = tuple(self.results[i] for i in given)
        return _GradientMap(self.rules, self.call, self.saved, self.known, self.wanted, results)


class _GradientMap(_OfCall):
    """Gradients of `results` -> of the operands `wanted`."""

    def __call__(self, constants: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        given = dict(zip(self.results, inputs, strict=True))
        found = self.rules.gradients(self.call, self.saved_as(constants), given, self.wanted)
        return [found[name] for name in self.wanted]

    def transpose(self, given: tuple[int, ...]) -> _TangentMap:
        wanted = tuple(self.wanted[i] for i in given)
        return _TangentMap(self.rules, self.call, self.saved, self.known, wanted, self.results)


@dataclass(frozen=True)
class _Batched:
    """A linear function over a batch: `fn` of every element, summed over the batch where a result has none.

    constants, inputs, results: which of them have the batch, as their first dim.
    """

    fn: Linear
    size: int
    constants: tuple[bool, ...]
    inputs: tuple[bool, ...]
    results: tuple[bool, ...] | None = None  # None: all of them

    def __call__(self, constants: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        dims = [[0 if has else None for has in which] for which in (self.constants, self.inputs)]
        found = jax.vmap(self.fn, dims, axis_size=self.size)(constants, inputs)
        kept = self.results or (True,) * len(found)
        return [a if has else jnp.sum(a, axis=0) for a, has in zip(found, kept, strict=True)]

    def transpose(self, given: tuple[int, ...]) -> "_Batched":
        has = tuple(self.results is None or self.results[i] for i in given)
        return _Batched(self.fn.transpose(given), self.size, self.constants, has, self.inputs)


def linear_call(fn: Linear, constants: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    """fn(constants, inputs), as an operation whose transpose is `fn.transpose`."""
    count = len(constants)
    # In the parameters, since JAX looks there for what needs to know the devices when it is lowered.
    callee = jax.make_jaxpr(fn)(constants, inputs)
    return _linear.bind(*constants, *inputs, callee=callee, fn=fn, count=count)


_linear = core.Primitive("tiled_linear")
_linear.multiple_results = True


def _evaluate(*arrays: Any, callee: Any, fn: Linear, count: int) -> list[jax.Array]:
    return core.jaxpr_as_fun(callee)(*arrays)


def _jvp(primals: Any, tangents: Any, *, callee: Any, fn: Linear, count: int) -> tuple[Any, Any]:
    """Linear in the inputs; in the constants JAX's own derivative of the loop."""
    results = _linear.bind(*primals, callee=callee, fn=fn, count=count)
    constants, inputs = list(primals[:count]), list(primals[count:])
    parts = []
    moved = tuple(i for i, t in enumerate(tangents[count:]) if not isinstance(t, ad.Zero))
    if moved:
        # Of the inputs that move alone: what is left of the transpose of the transpose.
        of_moved = fn.transpose(tuple(range(len(results)))).transpose(moved)
        parts.append(linear_call(of_moved, constants, [tangents[count + i] for i in moved]))
    changed = [i for i, t in enumerate(tangents[:count]) if not isinstance(t, ad.Zero)]
    if changed:

        def of_changed(*arrays: jax.Array) -> list[jax.Array]:
            with_changed = list(constants)
            for i, a in zip(changed, arrays, strict=True):
                with_changed[i] = a
            return fn(with_changed, inputs)

        parts.append(jax.jvp(of_changed, [constants[i] for i in changed], [tangents[i] for i in changed])[1])
    return results, [jax.tree.reduce(jnp.add, each) for each in zip(*map(list, parts), strict=True)]


def _transpose(cotangents: Any, *arrays: Any, callee: Any, fn: Linear, count: int) -> list[Any]:
    given = tuple(i for i, g in enumerate(cotangents) if not isinstance(g, ad.Zero))
    if not given:
        return [None] * len(arrays)
    found = linear_call(fn.transpose(given), list(arrays[:count]), [cotangents[i] for i in given])
    of_inputs = zip(arrays[count:], found, strict=True)
    return [None] * count + [d if ad.is_undefined_primal(a) else None for a, d in of_inputs]


def _batch(arrays: Any, dims: Any, *, callee: Any, fn: Linear, count: int) -> tuple[Any, Any]:
    size = next(a.shape[dim] for a, dim in zip(arrays, dims, strict=True) if isinstance(dim, int))
    arrays = [jnp.moveaxis(a, dim, 0) if isinstance(dim, int) else a for a, dim in zip(arrays, dims, strict=True)]
    has = tuple(isinstance(dim, int) for dim in dims)
    results = linear_call(_Batched(fn, size, has[:count], has[count:]), arrays[:count], arrays[count:])
    return results, [0] * len(results)


_linear.def_impl(_evaluate)
_linear.def_effectful_abstract_eval(lambda *_, callee, **__: (callee.out_avals, callee.effects))
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_evaluate, multiple_results=True))
_linear.to_lojax = _evaluate  # jax 0.12 asks for it where a callee has operations of more than arrays, as frexp is


_opaque = core.Primitive("tiled_forward")
_opaque.multiple_results = True


def _flat(callee: Any) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return lambda arrays: core.jaxpr_as_fun(callee)(*arrays)


def _evaluate_opaque(*arrays: Any, callee: Any) -> list[jax.Array]:
    return core.jaxpr_as_fun(callee)(*arrays)  # type: ignore[no-any-return]


def _opaque_batch(arrays: Any, dims: Any, *, callee: Any) -> tuple[Any, Any]:
    dims = [dim if isinstance(dim, int) else None for dim in dims]
    results = opaque_call(jax.vmap(_flat(callee), (dims,)), list(arrays))
    return results, [0] * len(results)


def _opaque_dce(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    equation = more[-1]  # jax 0.12 says before it which references are read later
    if not any(used) and not equation.effects:
        return [False] * len(equation.invars), None
    callee = equation.params["callee"]
    jaxpr, taken = pe.dce_jaxpr(callee.jaxpr, used)
    smaller = core.ClosedJaxpr(jaxpr, callee.consts)
    return taken, equation.replace(
        invars=[v for v, is_taken in zip(equation.invars, taken, strict=True) if is_taken],
        outvars=[v for v, is_used in zip(equation.outvars, used, strict=True) if is_used],
        params={"callee": smaller},
        effects=smaller.effects,
    )


def _opaque_jvp(primals: Any, tangents: Any, *, callee: Any) -> tuple[Any, Any]:
    changed = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_changed(*arrays: jax.Array) -> list[jax.Array]:
        given = list(primals)
        for i, a in zip(changed, arrays, strict=True):
            given[i] = a
        return _flat(callee)(given)

    return jax.jvp(of_changed, [primals[i] for i in changed], [tangents[i] for i in changed])


_opaque.def_impl(_evaluate_opaque)
_opaque.def_effectful_abstract_eval(lambda *_, callee: (callee.out_avals, callee.effects))
ad.primitive_jvps[_opaque] = _opaque_jvp
batching.primitive_batchers[_opaque] = _opaque_batch
pe.dce_rules[_opaque] = _opaque_dce
mlir.register_lowering(_opaque, mlir.lower_fun(_evaluate_opaque, multiple_results=True))
_opaque.to_lojax = _evaluate_opaque


@jax.custom_jvp
def barrier(values: Any) -> Any:
    """`lax.optimization_barrier` of a pytree; a derivative goes past it (jax 0.11 cannot transpose one)."""
    return lax.optimization_barrier(values)


def _barrier_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    """In a `shard_map` all results are typed as varying along the axes of any of them, and so their tangents have to be."""

    def typed(a: jax.Array, t: Any) -> Any:
        return zero_from_primal(a, symbolic_zeros=True) if isinstance(t, SymbolicZero) else vary_over(t, varying(a))

    results = barrier(*primals)
    return results, jax.tree.map(typed, results, tangents[0])


barrier.defjvp(_barrier_jvp, symbolic_zeros=True)


def made_together(gradients: Arrays) -> Arrays:
    """Return them behind a barrier, so that none is there before all are made.

    Where all tokens are one shard, XLA would leave the products that make the weights' for later, and keep what they are made
    of through the backward of what comes before. Not where it would change along which axes they are typed as differing.
    """
    return barrier(gradients) if len({varying(a) for a in gradients.values()}) == 1 else gradients
