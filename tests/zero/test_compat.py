"""The drop-in names under DeepSpeed's ZeRO-2 and 3, its own engine on two ranks. Only `make deepspeed` collects this."""

import pytest

from shared_specs.tolerances import MODEL_FLOAT32
from tests.ranks import Ranks


@pytest.mark.parametrize(("stage", "checkpoint"), [(2, ""), (3, ""), (3, "plain"), (3, "reentrant")], ids=str)
def test_drop_in_names(pools: dict[int, Ranks], stage: int, checkpoint: str) -> None:
    """The gradients of the untiled model, gathered once for all shards, and in parts again when the step is over."""
    for answer in pools[2].run("tests.zero.ranks_compat:drop_in", stage=stage, checkpoint=checkpoint):
        assert answer["loss"] <= MODEL_FLOAT32
        assert answer["error"] <= MODEL_FLOAT32
        assert answer["outlived"] == answer["whole"] == 0
        assert answer["hooks"]
        for plain, ours in answer["gathers"]:
            assert set(ours) == set(plain)
            # the replay of a non-reentrant checkpoint gathers before it sees that it can stop
            again = checkpoint == "plain"
            assert {name for name in plain if ours[name] > plain[name] + again} == set()
