"""The Triton kernels under the capture of a CUDA graph: what a replay computes from new inputs is what a call does."""

from typing import Any

import pytest

from shared_specs.config import Tiling
from shared_specs.tolerances import between

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
TOKENS, HIDDEN, INTERMEDIATE, VOCAB = 640, 256, 512, 1024


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.fail("this test needs a GPU that PyTorch sees")


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16()


def mlp_step(**options: Any) -> tuple[Any, list[Any]]:
    """(a step that returns y and every gradient, its inputs)."""
    from tiled_torch import tiled_mlp

    h, i = HIDDEN, INTERMEDIATE
    inputs = [drawn(TOKENS, h, seed=0).requires_grad_(), drawn(TOKENS, h, seed=1)]
    sizes = ((i, h), (i, h), (h, i))
    weights = [drawn(*size, seed=2 + n, scale=size[1] ** -0.5).requires_grad_() for n, size in enumerate(sizes)]

    def step() -> list[Any]:
        x, dy = inputs
        y = tiled_mlp(x, *weights, tiling=Tiling(shard_tokens=256, **options), backend="triton")
        return [y, *torch.autograd.grad(y, [x, *weights], dy)]

    return step, inputs


def loss_step() -> tuple[Any, list[Any]]:
    from tiled_torch import tiled_linear_cross_entropy

    inputs = [drawn(TOKENS, HIDDEN, seed=0).requires_grad_()]
    weight = drawn(VOCAB, HIDDEN, seed=1, scale=HIDDEN**-0.5).requires_grad_()
    targets = torch.arange(TOKENS, device="cuda") % VOCAB

    def step() -> list[Any]:
        tiling = Tiling(shard_tokens=256)
        loss = tiled_linear_cross_entropy(inputs[0], weight, targets, tiling=tiling, backend="triton")
        return [loss, *torch.autograd.grad(loss, [inputs[0], weight])]

    return step, inputs


STEPS = {
    "mlp": mlp_step,
    "mlp, kept": lambda: mlp_step(keep=1.0),
    "mlp, deterministic": lambda: mlp_step(deterministic=True),
    "loss": loss_step,
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of streams and of autograd nodes made outside of the capture
def test_a_replay_computes_what_a_call_does(name: str) -> None:
    from tiled_torch.commands.gpu.device import distance

    # What conftest asks for fills new memory with NaN; a graph is captured as users do.
    torch.use_deterministic_algorithms(False)
    step, inputs = STEPS[name]()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # compiles, and fills the pools of the libraries
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (10, 20):
        with torch.no_grad():
            for n, a in enumerate(inputs):
                a.copy_(drawn(*a.shape, seed=seed + n))
            for a in captured:
                a.detach().fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        found = [a.detach().clone() for a in captured]
        for ours, theirs in zip(found, step(), strict=True):
            assert distance(ours, theirs.detach())[0] <= between("bfloat16")
