"""Causal softmax attention through torch's `scaled_dot_product_attention`, by blocks of queries where that would take masks,
and document by document where several are packed into a sequence. Beside it attention over some of the keys, forward and
backward, for who holds no more of them at a time (`ring`).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.utils.checkpoint import checkpoint

from shared_specs.layers.block_costs import WINDOW_BLOCK_TOKENS
from shared_specs.layers.heads import check_scores
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.layers.documents import Starts, rows_of_documents

# Queries in a block. With a window a block meets BLOCK_TOKENS + window keys, of which a query sees `window`.
BLOCK_TOKENS = WINDOW_BLOCK_TOKENS


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    documents: Tensor | None = None,
    block_tokens: int = BLOCK_TOKENS,
) -> Tensor:
    """Softmax attention of every query over the keys up to its own position.

    softmax(scale q k^T) v, with grouped heads: query head i reads key head i // (heads / kv_heads). Scores of all tokens
    exist nowhere: torch's fused kernels compute the plain form, and a window or a cap goes by blocks of queries.

    Args:
        q: [B, heads, T, d]. k, v: [B, kv_heads, T, d or another dim], kv_heads a divisor of heads.
        scale: None is d^-0.5.
        window: a query sees this many keys, its own the last; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        dropout: probability, of attention weights.
        documents: [B or 1, T] integers; a query sees the keys of its own document, a run of tokens with one number. None:
            every sequence is one. Waits for the device once for each tensor that is given.
        block_tokens: queries in a block, >= 1.
    Returns:
        [B, heads, T, dim of v].
    Numerics: those of torch's kernels; with a softcap softmax is computed in float32 (float64 for float64).
    Memory: with a window a mask of block_tokens x (block_tokens + window) elements, one for all blocks; with a softcap about
        16 B heads block_tokens T bytes, recomputed in backward, masks included. Grouped heads are repeated, k and v as large
        as q, unless a fused kernel reads them as they are. Documents attend one after the other: no mask.
    Raises:
        SpecError: documents are not [B or 1, T], a window below 1, a cap that is not positive. TypeError: they are no integers.
    Source: Dao et al. 2022, FlashAttention, through PyTorch; softcap: Gemma 2, arXiv 2408.00118.
    """
    check_scores("causal_attention", window, softcap)
    if documents is not None:
        rows = rows_of_documents("causal_attention", documents, q.shape[0], q.shape[2])
        if rows and any(len(starts) > 1 for starts in rows):
            options = {"scale": scale, "window": window, "softcap": softcap, "dropout": dropout}
            return _by_documents(rows, q, k, v, block_tokens=block_tokens, **options)
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    window = None if window is None or window >= tokens else window
    plain = window is None and softcap is None
    if group > 1 and not (plain and _reads_grouped_heads(q, k, v, dropout)):
        k, v, group = _repeated(k, group), _repeated(v, group), 1
    if plain:
        return _fused(q, k, v, dropout, scale, grouped=group > 1)
    if softcap is None:
        assert window is not None
        return _windowed(q, k, v, window, dropout, scale, block_tokens)
    y = []
    for start in range(0, tokens, block_tokens):
        stop, first = min(start + block_tokens, tokens), 0 if window is None else max(0, start - window + 1)
        block = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        y.append(checkpoint(_capped, *block, window, scale, softcap, dropout, use_reentrant=False))
    return torch.cat(y, 2)


def _by_documents(rows: tuple[Starts, ...], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Sequences with the same documents together, others one by one."""
    y = []
    for row, starts in enumerate(rows):
        own = slice(None) if len(rows) == 1 else slice(row, row + 1)
        spans = zip(starts, (*starts[1:], q.shape[2]), strict=True)
        cut = ([x[own, :, start:stop] for x in (q, k, v)] for start, stop in spans)
        y.append(torch.cat([causal_attention(*document, **options) for document in cut], 2))
    return y[0] if len(y) == 1 else torch.cat(y)


def _reads_grouped_heads(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether the fused kernel that knows grouped heads takes these; any other way of torch's would write scores out."""
    return q.is_cuda and can_use_flash_attention(SDPAParams(q, k, v, None, dropout, True, True))


def _repeated(x: Tensor, times: int) -> Tensor:
    """Return every head so often, side by side; without a copy where there is one, which autograd would keep."""
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1, 2)


def _fused(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None, *, grouped: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=scale, enable_gqa=grouped)


def _windowed(
    q: Tensor, k: Tensor, v: Tensor, window: int, dropout: float, scale: float | None, block_tokens: int
) -> Tensor:
    """No window ends among the first `window` queries. Every later block but the last is masked alike."""
    tokens = q.shape[2]
    y = [_fused(q[:, :, :window], k[:, :, :window], v[:, :, :window], dropout, scale)]
    bias = None
    for start in range(window, tokens, block_tokens):
        stop, first = min(start + block_tokens, tokens), start - window
        if bias is None or bias.shape[0] != stop - start:
            # As what is added to scores: kernels would make that of a boolean one, and keep it, anew for each block.
            hidden = visible_keys(stop - start, stop - first, window, q.device).logical_not_()
            bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        block = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        y.append(F.scaled_dot_product_attention(*block, attn_mask=bias, dropout_p=dropout, scale=scale))
    return torch.cat(y, 2)


def visible_keys(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys], the last of each the same token: whether a query sees a key."""
    seen, ahead = torch.ones((queries, keys), dtype=torch.bool, device=device), keys - queries
    seen.tril_(ahead)
    return seen if window is None else seen.triu_(ahead - window + 1)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, softcap: float, dropout: float
) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = visible_keys(q.shape[2], k.shape[2], window, q.device)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    return F.dropout(weights, dropout) @ v


@dataclass(frozen=True)
class Scores:
    """How scores are made of products: scale times q k^T, then softcap * tanh(scores / softcap) where there is a cap."""

    scale: float
    softcap: float | None = None


Softmax = tuple[Tensor, Tensor]  # softmax over some of the keys: its result, and the log of the sum it was divided by


def fuses(q: Tensor, k: Tensor, v: Tensor, how: Scores) -> bool:
    """Return whether one of torch's kernels that return the log-sum-exp takes parts of these."""
    if how.softcap is not None or q.shape[-1] != v.shape[-1] or not q.numel():
        return False
    if q.device.type == "cpu":
        return True
    grouped = q.shape[1] != k.shape[1]
    usable = q.is_cuda and q.shape[-1] % 8 == 0 and q.dtype in (torch.float16, torch.bfloat16)
    return usable and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, grouped))


def part_forward(
    q: Tensor, k: Tensor, v: Tensor, how: Scores, *, causal: bool, seen: Tensor | None, fused: bool
) -> Softmax:
    """Return softmax attention over these keys alone, and the log-sum-exp of their scores, to be merged with others'.

    Args:
        q: [B, heads, n, d]. k, v: [B, kv_heads, m, d]. causal: the same n tokens, each sees those up to itself.
        seen: [n, m], boolean, or None: with `causal` unused.
        fused: by a kernel, as `fuses` says; then without `seen`.
    Returns:
        [B, heads, n, d] in the dtype of q, or wide where no kernel made it, [B, heads, n] wide; 0 and -inf of a query that sees
        none of the keys.
    """
    if not fused:
        return _plain_forward(q, k, v, how, visible_keys(q.shape[2], k.shape[2], None, q.device) if causal else seen)
    heads, n = q.shape[1:3]
    q, k, v = _for_kernel(causal, q, k, v)
    if q.device.type != "cpu":
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=how.scale)[:2]
    else:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=how.scale)
    return y.reshape(y.shape[0], heads, n, -1), lse.reshape(lse.shape[0], heads, n)


def part_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    dy: Tensor,
    how: Scores,
    *,
    causal: bool,
    seen: Tensor | None,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys give to dq, and the gradients of k and v from these queries.

    y, lse: of the queries over all keys, [B, heads, n, d] and [B, heads, n] wide; dy as y. Others as of `part_forward`.
    """
    if not fused:
        visible = visible_keys(q.shape[2], k.shape[2], None, q.device) if causal else seen
        return _plain_backward(q, k, v, y, lse, dy, how, visible)
    shape, kv_heads = q.shape, k.shape[1]
    q, k, v = _for_kernel(causal, q, k, v)
    y, dy = (x.reshape(q.shape) for x in (y, dy))
    lse = lse.reshape(q.shape[:3]).contiguous()
    if q.device.type != "cpu":
        dq, dk, dv = _flash_backward(q, k, v, y, lse, dy, causal, how.scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(dy, q, k, v, y, lse, 0.0, causal, scale=how.scale)
    if dk.shape[1] != kv_heads:  # repeated for the kernel
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq.reshape(shape), dk, dv


def _for_kernel(causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query heads that share a key head become queries of it, where all see the same keys; else the key head is repeated."""
    group = q.shape[1] // k.shape[1]
    if group == 1:
        return q, k, v
    if not causal:
        return q.unflatten(1, (k.shape[1], group)).flatten(2, 3), k, v
    if q.device.type != "cpu":
        return q, k, v  # reads them as they are
    return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)


def _flash_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The CUDA kernel's; it wants what its forward says of random numbers, of which there are none."""
    none, state = None, torch.empty(2, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        dy, q, k, v, y, lse, none, none, q.shape[2], k.shape[2], 0.0, causal, state, state[:0], scale=scale
    )


def _plain_scores(q: Tensor, k: Tensor, how: Scores, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores [B, kv_heads, group, n, m], wide, and the tanh of the cap."""
    group = q.shape[1] // k.shape[1]
    wide = wide_dtype(q.dtype)
    scores = q.unflatten(1, (-1, group)).flatten(2, 3).to(wide) @ k.mT.to(wide) * how.scale
    scores, bent = scores.unflatten(2, (group, -1)), None
    if how.softcap is not None:
        bent = torch.tanh(scores / how.softcap)
        scores = bent * how.softcap
    return scores if seen is None else scores.masked_fill(~seen, float("-inf")), bent


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, how: Scores, seen: Tensor | None) -> Softmax:
    scores, _ = _plain_scores(q, k, how, seen)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0)[..., None])
    y = weights.flatten(2, 3) @ v.to(weights.dtype)
    return y.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])


def _plain_backward(
    q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, how: Scores, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    scores, bent = _plain_scores(q, k, how, seen)
    wide, group = scores.dtype, scores.shape[2]
    p = torch.exp(scores - lse.unflatten(1, (-1, group))[..., None]).flatten(2, 3)
    queries, dy, y = (x.to(wide).unflatten(1, (-1, group)).flatten(2, 3) for x in (q, dy, y))
    ds = p * (dy @ v.mT.to(wide) - (dy * y).sum(-1, keepdim=True)) * how.scale
    if bent is not None:
        ds *= 1 - bent.flatten(2, 3) ** 2
    return (ds @ k.to(wide)).reshape(q.shape), ds.mT @ queries, p.mT @ dy
