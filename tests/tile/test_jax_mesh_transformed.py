"""JAX's transformations of what is tiled, on meshes: each is the same as without a mesh, of floats and of integers.

`jax.vmap` on a mesh with Auto axes failed of everything tiled; results that are integers had no derivative beside them there.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shared_specs.tolerances import between
from tests.asserting import assert_within
from tiled_jax import tile, tiled_linear_cross_entropy, tiled_mlp

E, T, H, I = 2, 8, 8, 12  # noqa: E741
RNG = np.random.default_rng(0)
X = RNG.standard_normal((E, T, H)).astype(np.float32)
W = tuple(RNG.standard_normal(dims).astype(np.float32) for dims in ((H, I), (H, I), (I, H)))

Function = Callable[[jax.Array, Any], jax.Array]


def mlp(x: jax.Array, w: Any) -> jax.Array:
    return tiled_mlp(x, *w, num_shards=2)


def router(x: jax.Array, w: Any) -> jax.Array:
    """A function with integers, booleans and floats among its results, of which the floats are wanted."""

    def of_shard(x: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
        scores = x @ w
        chosen = jnp.argmax(scores, -1)
        return {"y": scores * chosen[..., None].astype(scores.dtype), "chosen": chosen, "mask": scores > 0}

    found = tile(of_shard, num_shards=2)(x, w[0])
    masked = jnp.where(found["mask"], found["y"], 0.0)
    return masked + found["chosen"][..., None].astype(masked.dtype)


def head(x: jax.Array, w: Any) -> jax.Array:
    return tiled_linear_cross_entropy(x, w[0], jnp.zeros(x.shape[:-1], jnp.int32), num_shards=2)[None]


FUNCTIONS: dict[str, Function] = {"mlp": mlp, "router": router, "head": head}


def transformations(fn: Function) -> dict[str, Callable[[jax.Array, Any], Any]]:
    """Name -> what is asked of fn. x: [E, T, H], whose first dim is that of examples."""

    def loss(x: jax.Array, w: Any) -> jax.Array:
        return jnp.sum(fn(x, w) ** 2)

    def scaled(s: jax.Array, x: jax.Array, w: Any) -> jax.Array:
        return fn(x * s, w).ravel()[:3] if fn is head else fn(x * s, w).sum((0, 1))[:3]

    one = jnp.ones(())
    return {
        "vmap": lambda x, w: jax.vmap(lambda x: fn(x, w))(x),
        "grad": lambda x, w: jax.grad(loss, (0, 1))(x, w),
        "per-example gradients": lambda x, w: jax.vmap(jax.grad(loss, 1), (0, None))(x, w),
        "jacrev": lambda x, w: jax.jacrev(scaled)(one, x, w),
        "jacfwd": lambda x, w: jax.jacfwd(scaled)(one, x, w),
        "hessian": lambda x, w: jax.grad(jax.grad(lambda s: jnp.sum(scaled(s, x, w) ** 2)))(one),
        "vmap of jit": lambda x, w: jax.vmap(jax.jit(lambda x: fn(x, w)))(x),
        "checkpoint": lambda x, w: jax.grad(jax.checkpoint(loss))(x, w),
        "hvp": lambda x, w: jax.jvp(jax.grad(loss), (x, w), jax.tree.map(jnp.ones_like, (x, w)))[1],
        "linearize": lambda x, w: jax.linearize(lambda x: fn(x, w), x)[1](jnp.ones_like(x)),
        "scan": lambda x, w: jax.lax.scan(lambda _, x: (None, fn(x[None], w)), None, x)[1],
        "jit of grad": lambda x, w: jax.jit(jax.grad(loss, (0, 1)))(x, w),
    }


Axes = dict[str, AxisType]
# Axes of two devices each; the first cuts the tokens, but for "around", where a mesh is set and they are whole.
MESHES: dict[str, Axes] = {
    "Auto": {"d": AxisType.Auto},
    "around": {"d": AxisType.Auto},
    "Explicit": {"d": AxisType.Explicit},
    "both": {"d": AxisType.Explicit, "a": AxisType.Auto},
}
CASES = [(name, how, kind) for kind in MESHES for how in transformations(mlp) for name in FUNCTIONS]


@pytest.mark.deep_but(6)
@pytest.mark.parametrize(("name", "how", "kind"), CASES)
def test_a_mesh_changes_nothing(name: str, how: str, kind: str) -> None:
    """Each transformation, on each mesh, of each function: eager but for those with jit in their name."""
    run = transformations(FUNCTIONS[name])[how]
    expected = run(jnp.asarray(X), tuple(map(jnp.asarray, W)))
    axes = MESHES[kind]
    mesh = jax.make_mesh((2,) * len(axes), tuple(axes), axis_types=tuple(axes.values()))
    spec = PartitionSpec() if kind == "around" else PartitionSpec(None, "d")
    x, w = jax.device_put(jnp.asarray(X), NamedSharding(mesh, spec)), tuple(map(jnp.asarray, W))
    if kind in ("Explicit", "both"):
        w = jax.device_put(w, NamedSharding(mesh, PartitionSpec()))
    with nullcontext() if kind == "Auto" else jax.set_mesh(mesh):
        found = run(x, w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within(np.asarray(a), np.asarray(b), between("float32"), how)
