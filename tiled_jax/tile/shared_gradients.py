"""Gradients of arrays that every shard sees whole, summed over the shards in float32 and rounded once.

JAX adds up what the steps of a loop give in the dtype of the array. So a loop is handed a float32 twin beside the array:
the value is the array's, the gradient is the twin's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core

from tiled_jax.core.products import wide

Twins = tuple[jax.Array, jax.Array]  # an array, and itself in float32


class SharedSums:
    """The arrays that the shards of one call share, found by tracing them."""

    def __init__(self) -> None:
        self._twins: dict[int, Twins] = {}  # by id of the array, which is kept alive

    def over(self, run: Callable[..., Any], *example: Any) -> Callable[..., Any]:
        """`run` of arguments like `example`; of all that it closes over, gradients are added up in float32."""
        # A function of its own: for `run` JAX might give back an older trace, with what that closed over.
        traced, form = jax.make_jaxpr(lambda *arguments: run(*arguments), return_shape=True)(*example)
        tree, twins = jax.tree.structure(form), [self._twins_of(a) for a in traced.consts]

        def summed(*arguments: Any) -> Any:
            pairs = zip(traced.consts, twins, strict=True)
            consts = [a if pair is None else with_gradient_of(*pair) for a, pair in pairs]
            results = core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, consts))(*jax.tree.leaves(arguments))
            return jax.tree.unflatten(tree, results)

        return summed

    def _twins_of(self, a: Any) -> Twins | None:
        """Return one pair for each array, whatever closes over it; None where JAX's own sum is as good."""
        if not isinstance(a, Tracer) or not jnp.issubdtype(a.dtype, jnp.floating) or a.dtype == wide(a.dtype):
            return None
        if id(a) not in self._twins:
            self._twins[id(a)] = a, a.astype(wide(a.dtype))
        return self._twins[id(a)]


@jax.custom_jvp
def with_gradient_of(a: jax.Array, summed: jax.Array) -> jax.Array:
    """a, differentiated as `summed` cast to its dtype. Nobody reads `summed`, so no program makes it."""
    return a


@with_gradient_of.defjvp
def _with_gradient_of_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Twins:
    # Not `with_gradient_of` again: what it is called with is kept for backward, read or not.
    return primals[0], tangents[1].astype(primals[0].dtype)
