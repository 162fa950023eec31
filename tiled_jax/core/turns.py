"""A loop over the first shards of a plan, as many as a number that only the device knows asks for.

JAX has no derivative of reverse mode for such a loop, and removes nothing from it that nobody reads. Here it is a primitive
of our own: a derivative is that of the loop over every shard, which has as many turns as the plan, and a batch takes as many
turns as the element that needs most. So a turn beyond the last one needed must change nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from shared_specs.shards import ShardPlan

Carry = TypeVar("Carry")


def for_each_of_first(
    plan: ShardPlan, tokens: jax.Array, run: Callable[[Any, int, Carry], Carry], carry: Carry
) -> Carry:
    """Return the carry after run(first token, number of tokens, carry) of the shards that the first `tokens` [] are in.

    The last shard comes first where it is shorter, as in `for_each_shard`.
    """
    t = plan.shard_tokens
    whole, rest = divmod(plan.tokens, t)
    if rest:
        reached = (tokens > whole * t).astype(jnp.int32)
        carry = turns(lambda _, carry: run(whole * t, rest, carry), reached, 1, carry)
    needed = jnp.minimum(lax.div(tokens + (t - 1), jnp.int32(t)), whole)
    return turns(lambda i, carry: run(i * t, t, carry), needed, whole, carry)


def turns(body: Callable[[Any, Carry], Carry], count: jax.Array, most: int, carry: Carry) -> Carry:
    """carry = body(i, carry) for i < count <= most."""
    leaves, structure = jax.tree.flatten(carry)

    def flat(i: Any, *leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(body(i, jax.tree.unflatten(structure, leaves)))

    traced = jax.make_jaxpr(flat)(jnp.zeros((), jnp.int32), *leaves)
    callee, consts = core.ClosedJaxpr(_with_consts_as_operands(traced.jaxpr), ()), traced.consts
    found = _primitive.bind(count, *consts, *leaves, callee=callee, most=most, given=len(consts))
    return jax.tree.unflatten(structure, found)


def _with_consts_as_operands(jaxpr: core.Jaxpr) -> core.Jaxpr:
    unnamed = jaxpr.debug_info._replace(arg_names=None)
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=unnamed)


def _run(until: Any, arrays: Any, callee: Any, given: int) -> list[jax.Array]:
    """Return the carry after so many turns; arrays: what all turns share, then the carry. The index is the body's
    operand behind the former."""
    consts, fn = arrays[:given], core.jaxpr_as_fun(callee)
    return lax.fori_loop(0, until, lambda i, carry: fn(*consts, jnp.int32(i), *carry), list(arrays[given:]))


def _evaluate(count: Any, *arrays: Any, callee: Any, most: int, given: int) -> list[jax.Array]:
    return _run(count, arrays, callee, given)


_primitive = core.Primitive("tiled_turns")
_primitive.multiple_results = True


def _jvp(primals: Any, tangents: Any, *, callee: Any, most: int, given: int) -> tuple[Any, Any]:
    changed = [i for i, t in enumerate(tangents) if i and not isinstance(t, ad.Zero)]

    def of_changed(*arrays: jax.Array) -> list[jax.Array]:
        all_of_them = list(primals)
        for i, a in zip(changed, arrays, strict=True):
            all_of_them[i] = a
        return _run(most, all_of_them[1:], callee, given)

    return jax.jvp(of_changed, [primals[i] for i in changed], [tangents[i] for i in changed])


def _batch(arrays: Any, dims: Any, *, callee: Any, most: int, given: int) -> tuple[Any, Any]:
    size = next(a.shape[dim] for a, dim in zip(arrays, dims, strict=True) if isinstance(dim, int))
    has = [isinstance(dim, int) for dim in dims]
    count, *arrays = (
        jnp.moveaxis(a, dim, 0) if isinstance(dim, int) else a for a, dim in zip(arrays, dims, strict=True)
    )
    count = jnp.max(count, initial=0) if has[0] else count
    shared, of_shared = arrays[:given], [0 if each else None for each in has[1 : 1 + given]]
    carry = [
        a if each else jnp.broadcast_to(a[None], (size, *a.shape))
        for a, each in zip(arrays[given:], has[1 + given :], strict=True)
    ]
    fn = jax.vmap(core.jaxpr_as_fun(callee), (*of_shared, None, *[0] * len(carry)), axis_size=size)
    return turns(lambda i, carry: fn(*shared, i, *carry), count, most, carry), [0] * len(carry)


def _dce(used: list[bool], *more: Any) -> tuple[list[bool], Any]:
    """Leave out what nobody reads of the carry, of this turn or of the next."""
    equation = more[-1]  # jax 0.12 says before it which references are read later
    callee, given = equation.params["callee"], equation.params["given"]
    if not any(used) and not equation.effects:
        return [False] * len(equation.invars), None
    while True:
        jaxpr, taken = pe.dce_jaxpr(callee.jaxpr, used, [*[False] * given, True, *used])
        needed = taken[given + 1 :]
        if needed == list(used):
            break
        used = needed
    taken = [True, *taken[:given], *used]
    return taken, equation.replace(
        invars=[v for v, is_taken in zip(equation.invars, taken, strict=True) if is_taken],
        outvars=[v for v, is_used in zip(equation.outvars, used, strict=True) if is_used],
        params=equation.params | {"callee": core.ClosedJaxpr(jaxpr, ()), "given": sum(taken[1 : 1 + given])},
        effects=jaxpr.effects,
    )


_primitive.def_impl(_evaluate)
_primitive.def_effectful_abstract_eval(lambda *_, callee, **__: (callee.out_avals, callee.effects))
ad.primitive_jvps[_primitive] = _jvp
batching.primitive_batchers[_primitive] = _batch
pe.dce_rules[_primitive] = _dce
mlir.register_lowering(_primitive, mlir.lower_fun(_evaluate, multiple_results=True))
_primitive.to_lojax = _evaluate  # see linear_call
