"""JAX's transformations of the Flax decoder in its three scopes, on meshes: each gives what the plain one gives without a mesh.

Logits and the loss at once. Where Explicit axes cut the tokens the model says that it does not take them.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shared_specs import UnsupportedError
from shared_specs.config import Tiling
from shared_specs.tolerances import MODEL_FLOAT32, limit
from tests.asserting import assert_within
from tests.core.jax_transformed import MESHES, Function, in_shard_maps, on_mesh, transformations
from tests.tiny_model import tiny_config, tiny_weights
from tiled_jax.models import Llama, LlamaConfig, from_hf

IDS = np.random.default_rng(0).integers(0, 250, (4, 6)).astype(np.int32)
CUT = PartitionSpec("d")  # by examples
SCOPES: dict[str, dict[str, Any]] = {
    "plain": {"plain": True},
    "mlp": {"tiling": Tiling(num_shards=2)},
    "block": {"scope": "block", "tiling": Tiling(num_shards=2)},
}


@cache
def decoder(scope: str) -> tuple[Function, Any]:
    """The logits and the loss of a decoder with one layer, added up, and its parameters."""
    config = tiny_config(num_hidden_layers=1)
    model = Llama(LlamaConfig.from_hf(config), **SCOPES[scope], rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(model)
    parameters = from_hf(parameters, tiny_weights(config))

    def fn(ids: Any, parameters: Any) -> jax.Array:
        model = nnx.merge(graph, parameters)
        logits: jax.Array = model(ids)
        return logits + model(ids, labels=ids)

    return fn, jax.tree.map(np.asarray, parameters)


HOWS = tuple(transformations(lambda x, w: x))
# Every transformation of every scope on one mesh of the three, and every two of these three together somewhere.
TURNS = [
    (how, scope, ("none", "Auto", "around")[(i + j) % 3])
    for i, how in enumerate(HOWS)
    for j, scope in enumerate(SCOPES)
]


def check(found: Any, expected: Any, how: str) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_within(np.asarray(a), np.asarray(b), limit(MODEL_FLOAT32, "float32"), how)


@cache
def expected_of(how: str) -> Any:
    fn, parameters = decoder("plain")
    return jax.jit(transformations(fn)[how])(jnp.asarray(IDS), jax.tree.map(jnp.asarray, parameters))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("how", "scope", "kind"), TURNS)
def test_a_mesh_changes_nothing(how: str, scope: str, kind: str) -> None:
    fn, parameters = decoder(scope)
    here, ids, w = on_mesh(kind, IDS, parameters, CUT)
    with here:
        found = jax.jit(transformations(fn)[how])(ids, w)
    check(found, expected_of(how), how)


@pytest.mark.parametrize("kind", [kind for kind, axes in MESHES.items() if AxisType.Explicit in axes.values()])
@pytest.mark.parametrize("scope", SCOPES)
def test_explicit_axes_are_refused(scope: str, kind: str) -> None:
    fn, parameters = decoder(scope)
    here, ids, w = on_mesh(kind, IDS, parameters, CUT)
    message = r"^Llama: the axes of the mesh must be of axis type Auto .*, got Explicit"
    with here, pytest.raises(UnsupportedError, match=message):
        jax.jit(jax.grad(lambda w: jnp.sum(fn(ids, w) ** 2)))(w)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("scope", ["block", "mlp"])
@pytest.mark.parametrize("how", ["over some, checked", "shard_map", "over some", "shard_map, checked"])
def test_a_shard_map_changes_nothing(scope: str, how: str) -> None:
    """Gradients through a `shard_map` over both axes of a mesh, and over one, where the other one cuts the batch too."""
    mesh = jax.make_mesh((2, 2), ("d", "a"), axis_types=(AxisType.Auto,) * 2)
    place = PartitionSpec(("d", "a")) if "some" in how else CUT
    ids = jax.device_put(jnp.asarray(IDS), NamedSharding(mesh, place))
    results = []
    for name in ("plain", scope):
        fn, parameters = decoder(name)
        results.append(in_shard_maps(fn, mesh, CUT)[how](ids, jax.tree.map(jnp.asarray, parameters)))
    check(results[1], results[0], how)
