"""JAX's transformations of what is tiled, on meshes: each gives what the untiled function gives without a mesh.

`jax.vmap` on a mesh with Auto axes failed of everything tiled; results that are integers had no derivative beside them there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.core.jax_transformed import MESHES, Function, in_shard_maps, on_mesh, transformations
from tiled_jax import LossOptions, tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp

E, T, H, I = 2, 8, 8, 12  # noqa: E741
RNG = np.random.default_rng(0)
X = RNG.standard_normal((E, T, H)).astype(np.float32)
W = tuple(RNG.standard_normal(dims).astype(np.float32) / 2 for dims in ((H, I), (H, I), (I, H)))
# How tokens are cut. In a shard_map results are cut likewise.
CUT = PartitionSpec(None, "d")


def plain_mlp(x: jax.Array, w: Any) -> jax.Array:
    return (jax.nn.silu(x @ w[0]) * (x @ w[1])) @ w[2]


def routed(x: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
    """Integers, booleans and floats among the results."""
    scores = x @ w
    chosen = jnp.argmax(scores, -1)
    return {"y": scores * chosen[..., None].astype(scores.dtype), "chosen": chosen, "mask": scores > 0}


def used(found: dict[str, jax.Array]) -> jax.Array:
    masked = jnp.where(found["mask"], found["y"], 0.0)
    return masked + found["chosen"][..., None].astype(masked.dtype)


def nll(x: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[..., None], axis=-1)[..., 0]


def labels_of(x: jax.Array) -> jax.Array:
    return (jnp.abs(x[..., 0]) * 7).astype(jnp.int32) % I


def summed(x: jax.Array, w: Any) -> jax.Array:
    def fn(x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        of_tokens = nll(x, labels, w[0])
        return jnp.sum(of_tokens), of_tokens, labels.size  # a sum, values and a count

    total, of_tokens, count = tiled_loss(fn, x, labels_of(x), num_shards=2)
    return of_tokens + total / count.astype(total.dtype)


def plain_summed(x: jax.Array, w: Any) -> jax.Array:
    of_tokens = nll(x, labels_of(x), w[0])
    return of_tokens + jnp.mean(of_tokens)


def head(x: jax.Array, w: Any) -> jax.Array:
    options = LossOptions(reduction="none")
    found: jax.Array = tiled_linear_cross_entropy(x, w[0], labels_of(x), loss=options, num_shards=2)
    return found


def mean_head(x: jax.Array, w: Any) -> jax.Array:
    """The mean, beside values of every token, so that results are cut like tokens."""
    mean: jax.Array = tiled_linear_cross_entropy(x, w[0], labels_of(x), num_shards=2)
    return mean + x[..., 0]


# Name -> what is tiled, and the same without.
FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "mlp": (lambda x, w: tiled_mlp(x, *w, num_shards=2), plain_mlp),
    "router": (lambda x, w: used(tile(routed, num_shards=2)(x, w[0])), lambda x, w: used(routed(x, w[0]))),
    "head": (head, lambda x, w: nll(x, labels_of(x), w[0])),
    "mean": (mean_head, lambda x, w: jnp.mean(nll(x, labels_of(x), w[0])) + x[..., 0]),
    "user loss": (summed, plain_summed),
    "floats": (lambda x, w: tile(lambda x: jnp.tanh(x @ w[0]), num_shards=2)(x), lambda x, w: jnp.tanh(x @ w[0])),
    "integers": (
        lambda x, w: tile(lambda x: jnp.argmax(x @ w[0], -1), num_shards=2)(x).astype(x.dtype),
        lambda x, w: jnp.argmax(x @ w[0], -1).astype(x.dtype),
    ),
}
KINDS = [kind for kind in MESHES if kind != "two"]
# Every transformation of every function on one mesh, each of these with each transformation and with each function.
CASES = [
    (name, how, KINDS[(i + j + 1) % len(KINDS)])
    for i, how in enumerate(transformations(plain_mlp))
    for j, name in enumerate(FUNCTIONS)
]
CASES.append(("router", "vmap", "both"))  # eager, and mapped over some axes of the mesh alone


def check(found: Any, expected: Any, how: str) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within(np.asarray(a), np.asarray(b), between("float32"), how)


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("name", "how", "kind"), CASES)
def test_a_mesh_changes_nothing(name: str, how: str, kind: str) -> None:
    """Each transformation, on each mesh, of each function: eager but for those with jit in their name."""
    tiled, plain = FUNCTIONS[name]
    expected = transformations(plain)[how](jnp.asarray(X), tuple(map(jnp.asarray, W)))
    here, x, w = on_mesh(kind, X, W, CUT)
    with here:
        found = transformations(tiled)[how](x, w)
    check(found, expected, how)


MAPPED = ("shard_map", "shard_map, checked", "over some", "over some, checked")


@pytest.mark.deep_but(4)
@pytest.mark.parametrize(("name", "how"), [(name, how) for name in FUNCTIONS for how in MAPPED])
def test_a_shard_map_changes_nothing(name: str, how: str) -> None:
    """Gradients through a `shard_map` over both axes of a mesh, and over one, where the tokens are cut by the other one too."""
    tiled, plain = FUNCTIONS[name]
    mesh = jax.make_mesh((2, 2), ("d", "a"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(jnp.asarray(X), NamedSharding(mesh, PartitionSpec("a" if "some" in how else None, "d")))
    expected, found = (in_shard_maps(fn, mesh, CUT)[how](x, tuple(map(jnp.asarray, W))) for fn in (plain, tiled))
    check(found, expected, how)
