"""accelerate's FSDP2 with a tiled model: the curve of the loss and the weights are the untiled model's."""

import pytest

from shared_specs.tolerances import MODEL_FLOAT32
from tests.ranks import Ranks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fsdp2_of_accelerate(pools: dict[int, Ranks], checkpointing: bool) -> None:
    """Parameters are in parts over the ranks, so that it is FSDP2 that ran, and the curve is that of one process."""
    for answer in pools[2].run("tests.trainers.ranks_torch_accelerate:both", checkpointing=checkpointing):
        assert set(answer["kinds"]) == {"DTensor"}
        assert set(answer["paths"].values()) == {"tiled_mlp", "tiled_linear_cross_entropy"}
        assert answer["found"] == pytest.approx(answer["expected"], rel=MODEL_FLOAT32)
        assert answer["error"] <= MODEL_FLOAT32
