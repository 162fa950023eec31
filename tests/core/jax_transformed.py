"""What JAX's transformations ask of a function of tokens and weights, on meshes of several kinds."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Function = Callable[[Any, Any], jax.Array]
Axes = dict[str, AxisType]
# Axes of two devices each; the first cuts the tokens, but for "around", where a mesh is set and they are whole.
MESHES: dict[str, Axes] = {
    "none": {},
    "Auto": {"d": AxisType.Auto},
    "around": {"d": AxisType.Auto},
    "Explicit": {"d": AxisType.Explicit},
    "both": {"d": AxisType.Explicit, "a": AxisType.Auto},
    "two": {"d": AxisType.Auto, "a": AxisType.Auto},
}


def transformations(fn: Function) -> dict[str, Callable[[Any, Any], Any]]:
    """Name -> what is asked of fn. x: [E, ...], E examples, floats or integers; w: a pytree of floats."""

    def loss(x: Any, w: Any) -> jax.Array:
        return jnp.sum(fn(x, w) ** 2)

    def grad(of: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
        return lambda x, w: jax.grad(of, (0, 1) if jnp.issubdtype(x.dtype, jnp.floating) else 1)(x, w)

    def of_scale(x: Any, w: Any) -> Callable[[jax.Array], jax.Array]:
        """Three numbers of fn, as a function of a factor of every weight."""

        def few(s: jax.Array) -> jax.Array:
            found = fn(x, jax.tree.map(lambda a: a * s, w))
            return jnp.stack([jnp.sum(found), jnp.sum(found**2), jnp.sum(jnp.cos(found))])

        return few

    def tangents(x: Any, w: Any) -> Any:
        return jax.jvp(lambda w: jax.grad(loss, 1)(x, w), (w,), (jax.tree.map(jnp.cos, w),))[1]

    one = jnp.ones(())
    return {
        "vmap": lambda x, w: jax.vmap(lambda x: fn(x[None], w))(x),
        "grad": grad(loss),
        "per-example gradients": lambda x, w: jax.vmap(lambda x: jax.grad(loss, 1)(x[None], w))(x),
        "jacrev": lambda x, w: jax.jacrev(of_scale(x, w))(one),
        "jacfwd": lambda x, w: jax.jacfwd(of_scale(x, w))(one),
        "hessian": lambda x, w: jax.grad(jax.grad(lambda s: jnp.sum(of_scale(x, w)(s) ** 2)))(one),
        "vmap of jit": lambda x, w: jax.vmap(jax.jit(lambda x: fn(x[None], w)))(x),
        "checkpoint": grad(jax.checkpoint(loss)),
        "hvp": tangents,
        "linearize": lambda x, w: jax.linearize(lambda w: fn(x, w), w)[1](jax.tree.map(jnp.cos, w)),
        "scan": lambda x, w: jax.lax.scan(lambda _, x: (None, fn(x[None], w)), None, x)[1],
        "jit of grad": lambda x, w: jax.jit(grad(loss))(x, w),
    }


def in_shard_maps(fn: Function, mesh: Any, spec: PartitionSpec) -> dict[str, Callable[[Any, Any], Any]]:
    """Name -> what is asked of fn in a `shard_map`. spec: how it cuts x, and results in the same way."""

    def mapped(x: Any, w: Any, *, checked: bool, some: bool) -> jax.Array:
        axes = {"d"} if some else {*mesh.axis_names}
        run = partial(jax.shard_map, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, axis_names=axes)
        found: jax.Array = run(fn, check_vma=checked)(x, w)
        return found

    def gradients(x: Any, w: Any, **how: bool) -> Any:
        return jax.jit(jax.grad(lambda w: jnp.sum(mapped(x, w, **how) ** 2)))(w)

    found = {f"shard_map{', checked' * checked}": partial(gradients, checked=checked, some=False) for checked in (0, 1)}
    if len(mesh.axis_names) > 1:
        found |= {f"over some{', checked' * c}": partial(gradients, checked=bool(c), some=True) for c in (0, 1)}
    return found


def on_mesh(kind: str, x: np.ndarray, w: Any, spec: PartitionSpec) -> tuple[AbstractContextManager[Any], Any, Any]:
    """Return the context of a call on a mesh of this kind, x and w there."""
    axes = MESHES[kind]
    if not axes:
        return nullcontext(), jnp.asarray(x), jax.tree.map(jnp.asarray, w)
    mesh = jax.make_mesh((2,) * len(axes), tuple(axes), axis_types=tuple(axes.values()))
    place = PartitionSpec() if kind == "around" else spec
    there, w = jax.device_put(jnp.asarray(x), NamedSharding(mesh, place)), jax.tree.map(jnp.asarray, w)
    if kind in ("Explicit", "both", "two"):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    return nullcontext() if kind == "Auto" else jax.set_mesh(mesh), there, w
