"""`parallelize` over NCCL, one process for each GPU; on one GPU the same paths with a group of one."""

import importlib.util

import pytest

from shared_specs.tolerances import DISTRIBUTED_FLOAT64

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda():
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")


def answers_of(world: int, kind: str) -> list[dict[str, object]]:
    from tests.gpu.ranks_parallelize import answers
    from tests.gpu.spawning import answers_of

    return answers_of(answers, world, kind)


def check(answers: list[dict[str, object]], cases: set[str]) -> None:
    for answer in answers:
        assert set(answer) == cases, answer
        for name, found in answer.items():
            assert isinstance(found, tuple), f"{name}: {found}"
            assert max(found) <= DISTRIBUTED_FLOAT64, f"{name}: {found}"


def test_losses_and_gradients():
    from tests.gpu.ranks_parallelize import CASES

    world = min(torch.cuda.device_count(), 4)  # heads, and sequences of the batch
    world = world if world != 3 else 2
    check(answers_of(world, "cuda"), set(CASES) - ({"asynchronous"} if world == 1 else set()))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8():
    from shared_specs.config import ParallelConfig
    from tests.models.torch_decoders import batch, decoder
    from tiled_torch.parallel import parallelize

    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("float8 products need compute capability 8.9")
    model = decoder(hidden_size=64, intermediate_size=96, head_dim=16).to("cuda", torch.bfloat16)
    parallelize(model, None, ParallelConfig(float8=True))
    names = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
    assert len(names) == 3 * 7
    ids, labels = (a.cuda() for a in batch(16))
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
