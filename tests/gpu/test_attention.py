"""`causal_attention` through the CUDA kernels of PyTorch, where grouped heads are read as they are."""

import pytest
import torch

from shared_specs.tolerances import between, limit
from tests.layers.test_torch_attention import drawn, written_out
from tiled_torch.layers.attention import Scores, causal_attention, fuses, part_backward, part_forward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 0.7}, {"window": 4, "softcap": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_scores_written_out(dtype: torch.dtype, options: dict[str, float]) -> None:
    window, softcap = int(options.get("window", 23)), options.get("softcap")
    *exact, dy = drawn(dim=5)

    def results(attend: object, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
        arrays = [x.requires_grad_() for x in arrays]
        y = attend(arrays)  # type: ignore[operator]
        return [y.detach(), *torch.autograd.grad(y, arrays, dy.to(y))]

    def plain(arrays: list[torch.Tensor]) -> torch.Tensor:
        return written_out(*arrays, 5**-0.5, window, softcap)

    expected = results(plain, exact)
    baseline = results(plain, [x.detach().to(dtype) for x in exact])
    found = results(lambda arrays: causal_attention(*arrays, **options), [x.detach().to("cuda", dtype) for x in exact])  # type: ignore[arg-type]
    for ours, rounded, truth in zip(found, baseline, expected, strict=True):
        distances = [((x.double().cpu() - truth).norm() / truth.norm()).item() for x in (ours, rounded)]
        assert distances[0] <= limit(distances[1], str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 512}], ids=str)
def test_grouped_heads_write_no_scores_out(dtype: torch.dtype, options: dict[str, int]) -> None:
    """4096 tokens of 8 query heads: scores would be 8 x 4096^2 elements."""
    q, k, v = (torch.randn(1, h, 4096, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    causal_attention(q, k, v, **options).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 4096**2 * dtype.itemsize * 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_parts_of_keys_through_flash_attention(kv_heads: int, causal: bool) -> None:
    """What a ring merges: the kernel's results and gradients against the formula's, where a query saw more keys than these."""
    q, k, v, dy = (torch.randn(2, h, 64, 16, device="cuda", dtype=torch.bfloat16) for h in (4, kv_heads, kv_heads, 4))
    how = Scores(0.3)
    assert fuses(q, k, v, how)
    parts = [part_forward(q, k, v, how, causal=causal, seen=None, fused=fused) for fused in (True, False)]
    y, lse = (x.clone() for x in parts[1])
    y, lse = (y * 0.5).to(q.dtype), lse + 0.7
    gradients = [
        part_backward(q, k, v, y, lse, dy, how, causal=causal, seen=None, fused=fused) for fused in (True, False)
    ]
    for ours, plain in zip((*parts[0], *gradients[0]), (*parts[1], *gradients[1]), strict=True):
        assert ours.shape == plain.shape
        assert (ours.double() - plain.double()).norm() <= between("bfloat16") * plain.double().norm()
