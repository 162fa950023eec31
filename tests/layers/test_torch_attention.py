"""`causal_attention` against scores written out: windows, caps, grouped heads, blocks, and what backward keeps."""

import pytest
import torch
from torch import Tensor

from shared_specs.errors import SpecError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.core.torch_counting import LiveBytes, saved_bytes
from tiled_torch.layers.attention import causal_attention


def written_out(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float | None, documents: Tensor | None = None
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(q.shape[2])
    behind = places[:, None] - places
    hidden = (behind < 0) | (behind >= window)
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


def drawn(kv_heads: int = 2, dim: int = 5, tokens: int = 23, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    sizes = ((4, 5), (kv_heads, 5), (kv_heads, dim), (4, dim))
    return [torch.randn(2, h, tokens, d, generator=generator, dtype=torch.float64).to(dtype) for h, d in sizes]


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 4, 22, 23, 100])
@pytest.mark.parametrize(("kv_heads", "dim"), [(4, 5), (2, 5), (1, 3)])
def test_equals_scores_written_out(kv_heads: int, dim: int, window: int | None, softcap: float | None) -> None:
    """In blocks of ten queries, the last of three; dy is spread out in memory."""
    *arrays, dy = drawn(kv_heads, dim)
    for x in arrays:
        x.requires_grad_()
    y = causal_attention(*arrays, scale=0.3, window=window, softcap=softcap, block_tokens=10)
    expected = written_out(*arrays, 0.3, window or 23, softcap)
    strided = torch.stack((dy, dy), -1)[..., 0]
    found = [y, *torch.autograd.grad(y, arrays, strided)]
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, arrays, dy)], strict=True):
        assert (ours - theirs).norm() <= DISTRIBUTED_FLOAT64 * max(theirs.norm(), 1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (4, 0.7)])
def test_documents(window: int | None, softcap: float | None, rows: int) -> None:
    """Of one token and of more than a block, the same in both sequences or others; q and its gradient in one piece."""
    *arrays, dy = drawn()
    sizes = [[6, 1, 13, 3], [20, 3]][:rows]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in sizes])
    for x in arrays:
        x.requires_grad_()
    y = causal_attention(*arrays, scale=0.3, window=window, softcap=softcap, documents=documents, block_tokens=10)
    expected = written_out(*arrays, 0.3, window or 23, softcap, documents)
    found = [y, *torch.autograd.grad(y, arrays, dy)]
    for ours, theirs in zip(found, [expected, *torch.autograd.grad(expected, arrays, dy)], strict=True):
        assert (ours - theirs).norm() <= DISTRIBUTED_FLOAT64 * theirs.norm()


def test_numbers_of_documents_that_changed_are_read_again() -> None:
    *arrays, _ = drawn()
    documents = torch.zeros(1, 23, dtype=torch.int32)
    first = causal_attention(*arrays, documents=documents)
    documents[:, 9:] = 1
    second = causal_attention(*arrays, documents=documents)
    apart = (second - first).abs().amax((0, 1, 3)) > DISTRIBUTED_FLOAT64 * first.norm()
    assert apart.tolist() == [False] * 9 + [True] * 14


def test_a_window_without_keys_is_refused() -> None:
    *arrays, _ = drawn()
    for given, message in (
        ({"window": 0}, "window must be >= 1 or None, got 0"),
        ({"softcap": 0.0}, "softcap must be > 0"),
    ):
        with pytest.raises(SpecError, match="^causal_attention: " + message):
            causal_attention(*arrays, **given)


def test_documents_that_cannot_be() -> None:
    *arrays, _ = drawn()
    with pytest.raises(
        SpecError, match=r"^causal_attention: documents must be of shape \[2, 23\] or \[1, 23\], got \[2, 5\]"
    ):
        causal_attention(*arrays, documents=torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"^causal_attention: documents must be of integers, got float32"):
        causal_attention(*arrays, documents=torch.zeros(2, 23))


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_scale_and_bfloat16(softcap: float | None) -> None:
    """By default d^-0.5; in bfloat16 within what scores written out in it err by."""
    *exact, _ = drawn()
    *rounded, _ = drawn(dtype=torch.bfloat16)
    expected = written_out(*exact, 5**-0.5, 4, softcap)
    error = lambda y: ((y.double() - expected).norm() / expected.norm()).item()  # noqa: E731
    y = causal_attention(*rounded, window=4, softcap=softcap)
    assert y.dtype == torch.bfloat16
    assert error(y) <= limit(error(written_out(*rounded, 5**-0.5, 4, softcap)), "bfloat16")


HALVES = torch.arange(512)[None] // 300


@pytest.mark.parametrize(
    "options", [{}, {"window": 8}, {"softcap": 3.0}, {"window": 8, "softcap": 3.0}, {"documents": HALVES}], ids=str
)
def test_scores_of_all_tokens_exist_nowhere(options: dict[str, float]) -> None:
    """512 tokens: their scores, or a mask of them, would be 512 x 512 elements at least."""
    q, k, v = (torch.randn(1, 1, 512, 4, requires_grad=True) for _ in range(3))
    with LiveBytes() as live:
        causal_attention(q, k, v, block_tokens=16, **options).sum().backward()  # type: ignore[arg-type]
    assert live.largest < 512 * 512


@pytest.mark.parametrize("options", [{"window": 64}, {"softcap": 3.0}, {"window": 64, "softcap": 3.0}], ids=str)
def test_backward_keeps_no_mask_of_every_block(options: dict[str, float]) -> None:
    """Of 2048 tokens in 32 blocks. Boolean ones of what is visible would be 128 KiB with the window, 2 MiB without."""
    q, k, v = (torch.randn(1, 1, 2048, 4, requires_grad=True) for _ in range(3))
    y, kept = saved_bytes(lambda: causal_attention(q, k, v, block_tokens=64, **options), [q, k, v])  # type: ignore[arg-type]
    mask = 4 * 64 * (64 + 64) if options == {"window": 64} else 0
    log_sums = 4 * 2048
    assert kept <= mask + y.nbytes + log_sums


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 3.0}], ids=str)
def test_dropout(options: dict[str, float]) -> None:
    """Some weights are zero, the rest is scaled up: the mean over many draws comes near what it is without."""
    *arrays, _ = drawn(tokens=6)
    torch.manual_seed(0)
    draws = torch.stack([causal_attention(*arrays, dropout=0.5, **options) for _ in range(2000)])  # type: ignore[arg-type]
    whole = causal_attention(*arrays, **options)  # type: ignore[arg-type]
    assert not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - whole).norm() < 0.1 * whole.norm()
