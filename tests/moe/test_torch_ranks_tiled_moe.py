"""`TiledMoE` under DDP and FSDP2 on two ranks, inside non-reentrant checkpointing: gradients are those of one process."""

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.ranks import Ranks


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_engines(pools: dict[int, Ranks], engine: str) -> None:
    for answer in pools[2].run("tests.moe.ranks_torch_tiled_moe:trained", engine=engine):
        assert answer["error"] <= DISTRIBUTED_FLOAT64
