"""Collectives, layers, embedding and batches over NCCL, one process for each GPU; on one GPU with a group of one."""

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu


def answers_of(world: int, kind: str) -> list[dict[str, object]]:
    from tests.gpu.ranks_layers import answers
    from tests.gpu.spawning import answers_of

    return answers_of(answers, world, kind)


def test_as_on_one_process():
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")
    world = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count())
    for answer in answers_of(world, "cuda"):
        for name in ("collectives", "layers"):
            assert isinstance(answer.get(name), float), answer
            assert answer[name] <= DISTRIBUTED_FLOAT64, answer
        assert answer.get("lookups") == {"deterministic": True, "nan": True}, answer
        assert answer.get("batches") == {"same": True, "device": True}, answer
