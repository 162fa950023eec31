"""Causal softmax attention through torch's `scaled_dot_product_attention`, by blocks of queries where that would take masks."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Queries in a block. With a window a block meets BLOCK_TOKENS + window keys, of which a query sees `window`.
BLOCK_TOKENS = 1024


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
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
        block_tokens: queries in a block, >= 1.
    Returns:
        [B, heads, T, dim of v].
    Numerics: those of torch's kernels; with a softcap softmax is computed in float32 (float64 for float64).
    Memory: with a window a mask of block_tokens x (block_tokens + window) bytes; with a softcap about
        16 B heads block_tokens T bytes, recomputed in backward.
    Source: Dao et al. 2022, FlashAttention, through PyTorch; softcap: Gemma 2, arXiv 2408.00118.
    """
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    whole = window is None or window >= tokens
    if whole and softcap is None:
        if group > 1 and not q.is_cuda:  # only the CUDA kernels read grouped heads without scores of their own
            k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, scale=scale, enable_gqa=group > 1
        )
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    y = []
    for start in range(0, tokens, block_tokens):
        stop = min(start + block_tokens, tokens)
        first = 0 if window is None else max(0, start - window + 1)
        visible = _visible(start, stop, first, window, q.device)
        block = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        if softcap is None:
            y.append(F.scaled_dot_product_attention(*block, attn_mask=visible, dropout_p=dropout, scale=scale))
        else:
            y.append(checkpoint(_capped, *block, visible, scale, softcap, dropout, use_reentrant=False))
    return torch.cat(y, 2)


def _visible(start: int, stop: int, first: int, window: int | None, device: torch.device) -> Tensor:
    """[queries start .. stop, keys first .. stop]: whether a query sees a key."""
    behind = torch.arange(start, stop, device=device)[:, None] - torch.arange(first, stop, device=device)[None, :]
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None, softcap: float, dropout: float
) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    return F.dropout(weights, dropout) @ v
