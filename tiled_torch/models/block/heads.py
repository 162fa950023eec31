"""q, k and v of a shard of tokens, from what the layer's first norm made of them; with their norms and positions.

Letters as in `function.py`; t tokens of the shard.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tiled_torch.models.block.families import said_of

HeadGroup = tuple[Tensor, Tensor, Tensor]  # q [B, heads of a group, S, D], k and v [B, 1, S, D]


def heads_of(parts: Any, x: Tensor, tables: Sequence[Tensor], needed: bool) -> HeadGroup:
    """Return q, k and v, [B, heads, t, D] each. x: [B, t, H]. tables: cos and sin of the shard.

    needed False: without values of products that no gradient wants. That of a norm behind q and k does.
    """
    if parts.family.latent:
        return _from_latents(parts, x, tables, needed)
    attn, family = parts.call.attention, parts.family
    norms = [f"{family.attention}.{name}" for name in family.head_norms if hasattr(attn, name)]
    heads = _projected(parts, x, needed or bool(norms), of_values=needed, norms=norms if family.of_columns else [])
    q, k, v = (a.unflatten(-1, (-1, getattr(attn, family.head_dim))) if a.dim() == 3 else a for a in heads)
    norms = [] if family.of_columns else norms
    if not family.normed_last:
        q, k = _normed(parts, norms, q, k)
    q, k, v = (a.transpose(1, 2) for a in (q, k, v))
    if family.turned is None or said_of(attn, family.turned):
        q, k = _turned(parts.call, q, k, tables)
    if family.normed_last:
        q, k = _normed(parts, norms, q, k)
    return q, k, v


def _projected(parts: Any, x: Tensor, needed: bool, *, of_values: bool, norms: Sequence[str]) -> Sequence[Tensor]:
    """Return q, k and v, [B, t, heads * D] or [B, t, heads, D]. norms: those of all heads together."""
    attn, family = parts.call.attention, parts.family
    if len(family.qkv) == 1:
        size, whole = getattr(attn, family.head_dim), parts.product(family.qkv[0], x, needed)
        if family.of_heads:
            return whole.unflatten(-1, (-1, 3 * size)).chunk(3, -1)  # type: ignore[no-any-return]
        keys = attn.config.num_key_value_heads * size
        q, k, v = whole.split((whole.shape[-1] - 2 * keys, keys, keys), -1)
    else:
        q, k = (parts.product(name, x, needed) for name in family.qkv[:2])
        v = parts.product(family.qkv[2], x, of_values)
    return (*_normed(parts, norms, q, k), v)


def _normed(parts: Any, norms: Sequence[str], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    if not norms:
        return q, k
    of_q, of_k = norms
    return parts.called(of_q, q), parts.called(of_k, k)


def _turned(call: Any, q: Tensor, k: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return q and k with positions, by the model's own function."""
    attn, family = call.attention, call.family
    name = family.rotary if isinstance(family.rotary, str) else family.rotary(attn)
    rotate = getattr(sys.modules[type(attn).__module__], name)
    if call.complex_positions:  # of pairs of elements side by side, which a product without values has not
        tables = [torch.complex(*tables)]
        q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    if family.turned_dims is None:
        return rotate(q, k, *tables)  # type: ignore[no-any-return]
    count = getattr(attn, family.turned_dims)
    turned = rotate(q[..., :count], k[..., :count], *tables)
    return tuple(torch.cat((a, b[..., count:]), -1) for a, b in zip(turned, (q, k), strict=True))  # type: ignore[return-value]


def scales_of(attention: Any, function: str | None, positions: Any) -> Tensor | None:
    """Return what queries are multiplied by, [B or 1, S], by the model's own function; None where it has none."""
    if function is None:
        return None
    rope = attention.config.rope_parameters
    given = (rope.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    return getattr(sys.modules[type(attention).__module__], function)(positions, *given)[:, 0, :, 0]  # type: ignore[no-any-return]


def _from_latents(parts: Any, x: Tensor, tables: Sequence[Tensor], needed: bool) -> HeadGroup:
    """As DeepSeek's: q, k and v come of short rows with norms of their own, and a part of every head has positions.

    That part of the keys is one for all heads.
    """
    attn, at = parts.call.attention, parts.family.attention
    if attn.q_lora_rank is None:
        q = parts.product(f"{at}.q_proj", x, needed)
    else:
        short = parts.called(f"{at}.q_a_layernorm", parts.product(f"{at}.q_a_proj", x))
        q = parts.product(f"{at}.q_b_proj", short, needed)
    q = q.unflatten(-1, (-1, attn.qk_head_dim)).transpose(1, 2)
    q, q_turned = q.split((attn.qk_nope_head_dim, attn.qk_rope_head_dim), -1)
    both = parts.product(f"{at}.kv_a_proj_with_mqa", x)
    short, k_turned = both.split((attn.kv_lora_rank, attn.qk_rope_head_dim), -1)
    q_turned, k_turned = _turned(parts.call, q_turned, k_turned.unsqueeze(1), tables)
    kv = parts.product(f"{at}.kv_b_proj", parts.called(f"{at}.kv_a_layernorm", short), needed)
    kv = kv.unflatten(-1, (-1, attn.qk_nope_head_dim + attn.v_head_dim)).transpose(1, 2)
    k, v = kv.split((attn.qk_nope_head_dim, attn.v_head_dim), -1)
    k_turned = k_turned.expand(-1, k.shape[1], -1, -1)
    return torch.cat((q, q_turned), -1), torch.cat((k, k_turned), -1), v
