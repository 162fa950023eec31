"""Which ranks drop the same activations: on one grid the same pairs in both halves, those that RANDOM_STREAMS says."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.layers.random import RANDOM_STREAMS
from tests.ranks import Ranks
from tiled_jax.parallel import mesh_coordinates, seed_parallel

pytestmark = pytest.mark.ranks

NUMBERS = 64  # that two masks of as many agree by chance has a probability of 2^-64
GRIDS = [("data", "tensor"), ("data", "expert"), ("tensor", "expert")]
RANKS = [(first, second) for first in range(2) for second in range(2)]
Masks = dict[str, np.ndarray[Any, Any]]  # stream -> [rank, draw, NUMBERS]


@pytest.fixture(scope="module")
def of_torch(pools: dict[int, Ranks]) -> dict[tuple[str, str], Masks]:
    found = pools[4].run("tests.layers.ranks_torch_parity_random:masks", grids=GRIDS, numbers=NUMBERS)
    return {
        grid: {name: np.asarray([answers[at][name] for answers in found], bool) for name in RANDOM_STREAMS}
        for at, grid in enumerate(GRIDS)
    }


def of_jax(grid: tuple[str, str]) -> Masks:
    """Two dropouts of every stream, and of the second its masks as recomputation sees them."""
    mesh = jax.make_mesh((2, 2), grid, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        return nnx.Dropout(0.5)(x, rngs=nnx.Rngs(key))

    def on_device(ones: jax.Array) -> dict[str, jax.Array]:
        states, found = seed_parallel(7, **mesh_coordinates(**{axis: axis for axis in grid})), {}
        for stream in RANDOM_STREAMS:
            first, second = states.key(stream), states.key(stream)
            y, pull = jax.vjp(jax.checkpoint(lambda x, key=second: jnp.square(dropped(x, key))), ones)
            again = pull(jnp.ones_like(y))[0]  # 2 x / (1 - rate)^2 where recomputation keeps it
            found[stream] = jnp.stack([a[0, 0] != 0 for a in (dropped(ones, first), y, again)])[None, None]
        return found

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=P(*grid), out_specs=P(*grid))
    ones = jnp.ones((2, 2, NUMBERS))  # of each device its own, as are their gradients
    return {name: np.asarray(a).reshape(4, 3, NUMBERS) for name, a in jax.jit(mapped)(ones).items()}


def agreeing(masks: Masks, draw: int) -> dict[str, set[tuple[int, int]]]:
    """The pairs of ranks with the same masks."""
    pairs = list(itertools.combinations(range(4), 2))
    return {name: {(a, b) for a, b in pairs if (of[a, draw] == of[b, draw]).all()} for name, of in masks.items()}


def expected_pairs(grid: tuple[str, str]) -> dict[str, set[tuple[int, int]]]:
    """The pairs of ranks that differ along no axis that the stream differs across."""
    found = {}
    for name, axes in RANDOM_STREAMS.items():
        across = [place for place, axis in enumerate(grid) if axis in axes]
        pairs = itertools.combinations(range(4), 2)
        found[name] = {(a, b) for a, b in pairs if all(RANKS[a][at] == RANKS[b][at] for at in across)}
    return found


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("grid", GRIDS, ids=" x ".join)
def test_the_same_ranks_agree(grid: tuple[str, str], of_torch: dict[tuple[str, str], Masks]) -> None:
    theirs, ours = of_torch[grid], of_jax(grid)
    for draw in range(3):
        assert agreeing(theirs, draw) == agreeing(ours, draw) == expected_pairs(grid)
    for masks in (theirs, ours):
        for name, of in masks.items():
            assert (of[:, 1] == of[:, 2]).all(), f"{name}: recomputation drops something else"
            assert (of[:, 0] != of[:, 1]).any(axis=-1).all(), f"{name}: two draws are one"
            assert of.shape == (4, 3, NUMBERS)
        streams = [of[0, 0].tolist() for of in masks.values()]
        assert all(a != b for a, b in itertools.combinations(streams, 2))


def test_the_grid_of_data_and_tensor() -> None:
    """The expectation itself, written out: whole activations agree over tensor ranks, split ones nowhere."""
    assert expected_pairs(("data", "tensor")) == {
        "data-parallel": {(0, 1), (2, 3)},
        "tensor-parallel": set(),
        "expert-parallel": set(),
    }
