"""Causal softmax attention through torch's `scaled_dot_product_attention`, by blocks of queries where that would take masks."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
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
    Memory: with a window a mask of block_tokens x (block_tokens + window) elements, one for all blocks; with a softcap about
        16 B heads block_tokens T bytes, recomputed in backward, masks included. Grouped heads are repeated, k and v as large
        as q, unless a fused kernel reads them as they are.
    Source: Dao et al. 2022, FlashAttention, through PyTorch; softcap: Gemma 2, arXiv 2408.00118.
    """
    tokens, group = q.shape[2], q.shape[1] // k.shape[1]
    window = None if window is None or window >= tokens else window
    plain = window is None and softcap is None
    if group > 1 and not (plain and _reads_grouped_heads(q, k, v, dropout)):
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
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


def _reads_grouped_heads(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> bool:
    """Return whether the fused kernel that knows grouped heads takes these; any other way of torch's would write scores out."""
    return q.is_cuda and can_use_flash_attention(SDPAParams(q, k, v, None, dropout, True, True))


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
            seen = _visible(stop - start, stop - first, window, q.device)
            bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
        block = q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop]
        y.append(F.scaled_dot_product_attention(*block, attn_mask=bias, dropout_p=dropout, scale=scale))
    return torch.cat(y, 2)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys], the last of each the same token: whether a query sees a key."""
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float | None, softcap: float, dropout: float
) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = _visible(q.shape[2], k.shape[2], window, q.device)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~visible, float("-inf"))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores, -1, dtype=wide).to(q.dtype)
    return F.dropout(weights, dropout) @ v
