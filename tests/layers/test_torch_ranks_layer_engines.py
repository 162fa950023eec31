"""Checkpoints of layers that are split over gloo ranks, and layers that fully_shard shards over two more: steps as on one.

What runs on the ranks is in ranks_layer_engines.py.
"""

from typing import Any

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.ranks import Ranks

pytestmark = pytest.mark.ranks


def run(pools: dict[int, Ranks], world: int, function: str, **arguments: Any) -> list[Any]:
    return pools[world].run(f"tests.layers.ranks_torch_layer_engines:{function}", **arguments)


SHAPES = {"embedding.weight": [9, 8], "norm.weight": [8], "norm.bias": [8]}
SHAPES |= {"up.weight": [16, 8], "up.bias": [16], "down.weight": [8, 8], "down.bias": [8]}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("saved", "group"), [(1, "default"), (2, "mesh"), (4, "default"), (4, "mesh dim")])
def test_state_loads_at_every_number_of_ranks(pools, saved, group, tmp_path):
    """Into plain layers as well: fused weights, and a vocabulary with no, one or three entries of padding; exactly."""
    assert all(dict(state) == SHAPES for state in run(pools, saved, "save", folder=str(tmp_path), group=group))
    for world in (1, 2, 4):
        for answer in run(pools, world, "load", folder=str(tmp_path)):
            assert answer["changed"]
            assert answer["equal"]
            assert answer["output"] <= DISTRIBUTED_FLOAT64
    assert run(pools, 1, "load_plain", folder=str(tmp_path)) == [True]


def test_state_of_a_wrapped_layer(pools):
    assert [dict(state) for state in run(pools, 2, "wrapped")] == [SHAPES] * 2


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fully_shard(pools, sequence_parallel, tmp_path):
    """Steps as on one process; then parameters and moments go to other meshes, from sharded parts and back into them."""
    for answer in run(pools, 4, "train", sequence_parallel=sequence_parallel, folder=str(tmp_path)):
        assert len(answer) == 2 * (1 + 7) + 7
        assert max(answer.values()) <= DISTRIBUTED_FLOAT64, answer
    run(pools, 4, "rewritten", folder=str(tmp_path))
    for folder in (tmp_path, tmp_path / "again"):
        for world, engine in ((4, "fsdp"), (4, "none"), (2, "none")):
            found = run(pools, world, "resumed", folder=str(folder), engine=engine)
            assert max(found) <= DISTRIBUTED_FLOAT64, (world, engine)


def test_new_parameters_of_sharded_layers(pools):
    """Initial values from the meta device are those of one process; marks are set again; a deferred gradient is refused."""
    for answer in run(pools, 4, "new_parameters"):
        assert answer["equal"]
        assert answer["marks"] == [True, True, 0, 2]
        assert answer["deferred"].startswith(
            "deferred_weight_grad: weight must be a plain tensor, got a DTensor. Leave "
        )
