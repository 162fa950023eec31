"""`check` on two ranks: DDP and FSDP2 train what one process does, and what is wrong with one is named."""

import pytest

from tests.ranks import Ranks

CASES = {
    ("ddp", ""): None,
    ("fsdp2", ""): None,
    ("ddp", "one part for all"): ["loss", "loss"],
    ("ddp", "divided twice"): ["gradient", "head.weight"],
    ("fsdp2", "divided twice"): ["gradient", "head.weight"],
}


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize(("engine", "fault"), CASES)
def test_an_engine_is_proven(pools: dict[int, Ranks], engine: str, fault: str) -> None:
    for answer in pools[2].run("tests.check.ranks_torch_check:checked", engine=engine, fault=fault):
        assert answer["first"] == CASES[engine, fault]
        assert answer["paths"] == ["tiled_mlp"]
        assert answer["gradients"] == 2 * 25
