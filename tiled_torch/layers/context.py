"""Context parallelism: every rank holds a run of the tokens of each sequence, and attends with some of the heads.

Letters: R ranks, B sequences of S tokens, d features of a head. Everything but attention and the loss's mean is token-wise
and needs nothing from other ranks. For attention one exchange turns [S / R tokens, all heads] into [S tokens, heads / R],
and another one turns the result back. The runs are in token order, and every rank has as much to compute.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509. The alternative, keys and values of all tokens on every
rank, leaves causal ranks with unequal work unless tokens are dealt out of order, needs a kernel that takes an offset, and
keeps all keys for backward; it knows no limit from the number of heads. torch's own experimental `context_parallel` (2.13)
is of that kind, and for its CUDA kernels only.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.collectives.partitions import even_range
from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.layers.heads import ContextHeads, context_heads
from shared_specs.plans.checks import check_context_tokens
from tiled_torch.collectives.conjugates import ToHidden, ToSequence, move
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.tensors import refuse_dtensor
from tiled_torch.layers.attention import causal_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@not_compiled
def context_slice(batch: Mapping[str, Any], *, ignore_index: int = -100, group: Any = None) -> dict[str, Any]:
    """Return this rank's run of the tokens of a batch, with the positions and the labels that belong to it.

    For losses and models of one's own. A model that `parallelize` gave a context axis cuts its batch by itself; of its
    logits, which are those of this rank's tokens, the labels are `shift_labels`.

    Args:
        batch: name -> [B or 1, S, ...], the same on every rank, S a multiple of R; None stays None.
        ignore_index: what the last token of a sequence is to predict.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        name -> [B or 1, S / R, ...]. Beside what was given "position_ids" [1, S / R], the places in the whole
        sequence, and, where there are "labels", "shift_labels" [B, S / R], what every token is to predict: shifted before
        the cut, so that the last token of a run predicts the first of the next one.
    Raises:
        SpecError: tensors of different numbers of tokens, or of a number that R does not divide.
        TypeError: no mapping of tensors. As `rank_group` for the group.
    Example:
        mine = context_slice({"labels": labels}, group=mesh["cp"])["shift_labels"]
        total = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), mine.flatten(), reduction="sum")
        (total * R / (labels[:, 1:] != -100).sum()).backward()  # sharded data parallelism divides by R
    """
    over = rank_group("context_slice", group)
    tokens = _tokens_of(over.function, batch)
    if tokens is None:
        fail(over.function, "batch", "of one tensor or more", "none")
    name, shape = tokens
    check_context_tokens(over.function, f"batch[{name!r}]", shape[1], over.size, shape)
    start, stop = even_range(over.function, "tokens", shape[1], over.size, over.rank)
    given = dict(batch)
    if given.get("labels") is not None and given.get("shift_labels") is None:
        given["shift_labels"] = F.pad(given["labels"][:, 1:], (0, 1), value=ignore_index)
    found = {key: None if value is None else value[:, start:stop].contiguous() for key, value in given.items()}
    if found.get("position_ids") is None:
        found["position_ids"] = torch.arange(start, stop, device=given[name].device)[None]
    return found


def _tokens_of(function: str, batch: Any) -> tuple[str, tuple[int, ...]] | None:
    """Name and shape of the first tensor; every other has as many tokens."""
    if not isinstance(batch, Mapping):
        fail_type(function, "batch", "a mapping of tensors", type(batch).__name__)
    first = None
    for name, value in batch.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            fail_type(function, f"batch[{name!r}]", "a tensor or None", type(value).__name__)
        refuse_dtensor(function, f"batch[{name!r}]", value, "Convert it with to_local().")
        shape = tuple(value.shape)
        first = first or (name, shape)
        if len(shape) < 2 or shape[1] != first[1][1]:
            rule = f"of [sequences, {first[1][1] if len(first[1]) > 1 else 'tokens'}, ...]"
            fail(function, f"batch[{name!r}]", rule, show_shape(shape))
    return first


@not_compiled
def context_attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend | None = None, *, group: Any = None) -> Tensor:
    """Attention of this rank's tokens to those of all ranks.

    `attend` sees all tokens, in order, of some heads: anything that computes each group of heads by itself, such as a
    kernel with a window, needs no change.

    Args:
        q: [B, heads, S / R, d], with its rotary positions in the whole sequence already applied; R divides heads.
        k, v: [B, kv_heads, S / R, d or another dim], kv_heads a divisor of heads. Where R does not divide kv_heads, they
            are repeated first, to the least common multiple of both.
        attend: (q, k, v) of all tokens -> [B, heads / R, S, dim of v]; None is causal softmax attention.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [B, heads, S / R, dim of v].
    Numerics: exchanges round nothing; a repeated key head's gradient is the sum of its copies', in its own dtype.
    Memory: q, k, v and y of S tokens and heads / R: as much as this rank's own of S / R tokens and all heads (k and v, as
        often as they are repeated), twice while they travel.
    Raises:
        SpecError: shapes that do not fit each other, or heads that R does not divide. UnsupportedError: a DTensor.
    Example:
        y = context_attention(q, k, v, partial(causal_attention, window=4096), group=mesh["cp"])
    """
    over = rank_group("context_attention", group)
    _check_heads(over, q, k, v)
    attend = attend or causal_attention
    if not over.several:
        return attend(q, k, v)
    dealt = context_heads(over.function, q.shape[1], k.shape[1], over.size)
    y = attend(*_to_heads(over, dealt, q, k, v))
    expected = (q.shape[0], dealt.query, over.size * q.shape[2])
    if tuple(y.shape[:3]) != expected:
        fail(
            over.function,
            "the result of attend",
            f"of shape {show_shape(expected)[:-1]}, ...]",
            show_shape(tuple(y.shape)),
        )
    return _to_tokens(over, y, q.shape[1])


def _check_heads(over: RankGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            fail_type(over.function, name, "an array", type(x).__name__)
        refuse_dtensor(over.function, name, x, "Convert it with to_local().")
        if x.dim() != 4:
            fail(over.function, name, "of shape [B, heads, tokens, d]", show_shape(tuple(x.shape)))
    shapes = ", ".join(f"{name} is {show_shape(tuple(x.shape))}" for name, x in (("q", q), ("k", k), ("v", v)))
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        rule = "heads whose number divides the query heads, as many for both"
        fail(over.function, "k, v", rule, f"{k.shape[1]} and {v.shape[1]}", shapes=shapes)
    if (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]) or k.shape[::2] != v.shape[::2] or q.shape[3] != k.shape[3]:
        fail(
            over.function, "q, k, v", "of the same sequences and tokens, q and k of the same d", "others", shapes=shapes
        )


def _to_heads(over: RankGroup, dealt: ContextHeads, *arrays: Tensor) -> tuple[Tensor, ...]:
    """q, k and v of this rank's tokens -> of its heads, in one exchange."""
    q, *keys = arrays
    if dealt.copies > 1:
        keys = [x.repeat_interleave(dealt.copies, 1) for x in keys]
    # [B, R x heads, s, d] -> [s, B, R, heads d]: rank r's stretch of the last two dims is what its heads need.
    cut = [x.unflatten(1, (over.size, -1)).permute(3, 0, 1, 2, 4).flatten(3) for x in (q, *keys)]
    sizes = [x.shape[3] for x in cut]
    together = move(torch.cat(cut, 3).flatten(2), over, ToHidden(), ToSequence())
    heads = (dealt.query, dealt.key, dealt.key)
    return tuple(
        x.unflatten(2, (count, -1)).permute(1, 2, 0, 3)
        for x, count in zip(together.split(sizes, 2), heads, strict=True)
    )


def _to_tokens(over: RankGroup, y: Tensor, heads: int) -> Tensor:
    """[B, heads / R, S, d] -> [B, heads, S / R, d]."""
    whole = move(y.permute(2, 0, 1, 3).flatten(2), over, ToSequence(), ToHidden())
    return whole.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
