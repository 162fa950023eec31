"""Context parallelism: every rank holds some of the tokens of each sequence, and attends with some of the heads.

Letters: R ranks, B sequences of S tokens, d features of a head. Everything but attention and the loss's mean is token-wise
and needs nothing from other ranks. For attention one exchange turns [S / R tokens, all heads] into [S tokens, heads / R],
and another one turns the result back. The runs are in token order, and every rank has as much to compute.

Source: Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509. The alternative, where keys and values travel, knows no limit
from the number of heads: `ring`. Both together: this one with `ring_attention` over other ranks as `attend`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from shared_specs.collectives.partitions import even_range
from shared_specs.errors import fail, fail_type, show_shape
from shared_specs.layers.heads import ContextHeads, check_attention_shapes, context_heads
from shared_specs.layers.ring import Order, check_order, held_runs
from shared_specs.plans.checks import check_context_tokens
from tiled_torch.collectives import transport
from tiled_torch.collectives.conjugates import ToHidden, ToSequence, move
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.tensors import refuse_dtensor
from tiled_torch.layers.attention import causal_attention
from tiled_torch.layers.documents import documents_of_restarts, positions_in, shifted_labels

Attend = Callable[..., Tensor]


@not_compiled
def context_slice(
    batch: Mapping[str, Any], *, ignore_index: int = -100, order: Order = "tokens", group: Any = None
) -> dict[str, Any]:
    """Return this rank's tokens of a batch, with the positions and the labels that belong to them.

    It is for custom losses and models. A model to which `parallelize` gave a context axis splits its batch itself. Its logits
    are those of this rank's tokens, so their labels are `shift_labels`.

    Args:
        batch: name -> [B or 1, S, ...], the same on every rank, S a multiple of R (and as `ring_multiple`); None stays None.
            Integers under "documents", or else "position_ids" that restart, mark which tokens belong together.
        ignore_index: the label of the last token of a document or of a sequence.
        order: "tokens", one run for each rank in token order, or "zigzag", two runs, one early and one late, for
            `ring_attention`.
        group: a process group, a DeviceMesh of one dim, or None for all ranks. With "zigzag" it may also be a pair of groups,
            (ring, inside): the ranks of the inside group share, in token order, the tokens of one place of the ring.
    Returns:
        name -> [B or 1, S / R, ...]. It adds "position_ids" [B or 1, S / R], the positions in the document or in the whole
        sequence. If there are "labels", it also adds "shift_labels" [B, S / R], the label of every token. Labels are shifted
        before the split, so the last token of a run predicts the first of the next run.
    Raises:
        SpecError: tensors with different numbers of tokens, or with a number that cannot be split this way; an unknown order.
        TypeError: not a mapping of tensors. For the group, as `rank_group`.
    Example:
        mine = context_slice({"labels": labels}, group=mesh["cp"])["shift_labels"]
        total = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), mine.flatten(), reduction="sum")
        (total * R / (labels[:, 1:] != -100).sum()).backward()  # sharded data parallelism divides by R
    """
    over, inside = _places("context_slice", order, group)
    tokens = _tokens_of(over.function, batch)
    if tokens is None:
        fail(over.function, "batch", "of one tensor or more", "none")
    name, shape = tokens
    count = 1 if inside is None else inside.size
    check_context_tokens(
        over.function, f"batch[{name!r}]", shape[1], over.size * count, shape, order=order, inside=count
    )
    given = whole_batch(batch, ignore_index)
    if given.get("position_ids") is None:
        given["position_ids"] = torch.arange(shape[1], device=given[name].device)[None]
    if order == "tokens":
        runs: Any = (even_range(over.function, "tokens", shape[1], over.size, over.rank),)
    else:
        place = 0 if inside is None else inside.rank
        runs = held_runs(shape[1], over.size, over.rank, inside=count, place=place)
    return {key: None if value is None else _cut(value, runs) for key, value in given.items()}


def whole_batch(batch: Mapping[str, Any], ignore_index: int) -> dict[str, Any]:
    """Return the batch, with positions in documents that are given, and with what every token is to predict."""
    given = dict(batch)
    documents, positions = given.get("documents"), given.get("position_ids")
    if documents is not None and positions is None:
        given["position_ids"] = positions_in(documents)
    if documents is None and positions is not None:
        documents = documents_of_restarts(positions)
    if given.get("labels") is not None and given.get("shift_labels") is None:
        given["shift_labels"] = shifted_labels(given["labels"], documents, ignore_index)
    return given


def _places(function: str, order: Any, group: Any) -> tuple[RankGroup, RankGroup | None]:
    """Return the ranks among which runs are dealt out, and those that share what one of them gets."""
    pair = isinstance(group, tuple) and len(group) == 2
    check_order(function, order, pair=pair)
    ring, inside = group if pair else (group, None)
    return rank_group(function, ring), rank_group(function, inside) if pair else None


def _cut(x: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    parts = [x[:, start:stop] for start, stop in runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, 1)


def _tokens_of(function: str, batch: Any) -> tuple[str, tuple[int, ...]] | None:
    """Return the name and shape of the first tensor; every other has as many tokens."""
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
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend | None = None,
    *,
    documents: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Attention of this rank's tokens to those of all ranks.

    `attend` gets all tokens, in order, for some of the heads. A function that computes each group of heads independently, such
    as a kernel with a window, needs no change.

    Args:
        q: [B, heads, S / R, d], with its rotary positions in the whole sequence already applied; R divides heads.
        k, v: [B, kv_heads, S / R, d or another dim], kv_heads a divisor of heads. If R does not divide kv_heads, the heads are
            repeated first, to the least common multiple of both.
        attend: (q, k, v) of all tokens -> [B, heads / R, S, dim of v]; None is causal softmax attention.
        documents: [B or 1, S] integers of all tokens; `attend` then also gets `documents`.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [B, heads, S / R, dim of v].
    Numerics: exchanges round nothing. The gradient of a repeated key head is the sum of its copies' gradients, in its own
        dtype.
    Memory: q, k, v and y of S tokens and heads / R. They are as large as this rank's own, of S / R tokens and all heads (k and
        v times their repetitions), and twice as large during the exchange.
    Raises:
        SpecError: shapes do not fit each other, or R does not divide the heads. UnsupportedError: a DTensor.
    Example:
        y = context_attention(q, k, v, partial(causal_attention, window=4096), group=mesh["cp"])
    """
    over = rank_group("context_attention", group)
    check_heads(over, q, k, v)
    attend = attend or causal_attention
    attend = attend if documents is None else partial(attend, documents=documents)
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


def check_heads(over: RankGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v are [B, heads, tokens, d], of the same tokens, the key heads a divisor of the query heads.

    Raises:
        SpecError: they do not fit each other. TypeError: what is no tensor. UnsupportedError: a DTensor.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            fail_type(over.function, name, "an array", type(x).__name__)
        refuse_dtensor(over.function, name, x, "Convert it with to_local().")
    layout = ("B", "heads", "tokens", "d")
    check_attention_shapes(over.function, layout, tuple(q.shape), tuple(k.shape), tuple(v.shape))


def _to_heads(over: RankGroup, dealt: ContextHeads, *arrays: Tensor) -> tuple[Tensor, ...]:
    """Exchange q, k and v of this rank's tokens for those of its heads, in one exchange."""
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


def exchange_tokens(over: RankGroup, arrays: list[Tensor]) -> list[Tensor]:
    """Exchange this rank's tokens for those of its heads, [B, R x heads, s, d] -> [B, heads, S, d], all arrays at once.

    The list is emptied, so that what nobody else holds is gone before the others' arrives. Nothing is differentiated here: the
    gradients come back by `exchange_heads`.
    """
    arrays[:] = [x.unflatten(1, (over.size, -1)).permute(1, 3, 0, 2, 4) for x in arrays]
    shapes = [x.shape[-2:] for x in arrays]
    found = transport.all_to_all(over, _packed(arrays).flatten(0, 1)).wait()
    return [x.permute(1, 2, 0, 3) for x in _unpacked(found, shapes)]


def exchange_heads(over: RankGroup, arrays: list[Tensor]) -> list[Tensor]:
    """Exchange them back, [B, heads, S, d] -> [B, R x heads, s, d], all arrays at once. The list is emptied."""
    arrays[:] = [x.permute(2, 0, 1, 3) for x in arrays]
    shapes = [x.shape[-2:] for x in arrays]
    found = transport.all_to_all(over, _packed(arrays)).wait().unflatten(0, (over.size, -1))
    return [x.permute(2, 0, 3, 1, 4).flatten(1, 2) for x in _unpacked(found, shapes)]


def _packed(arrays: list[Tensor]) -> Tensor:
    """[..., heads, d] each -> [..., columns of all], in new memory unless it is one array that lies so. The list is emptied."""
    given = [*arrays]
    arrays.clear()
    if len(given) == 1:
        return given[0].flatten(-2).contiguous()
    sizes = [x.shape[-2:].numel() for x in given]
    dtype = reduce(torch.promote_types, (x.dtype for x in given))
    together = given[0].new_empty((*given[0].shape[:-2], sum(sizes)), dtype=dtype)
    for own, x in zip(together.split(sizes, -1), given, strict=True):
        own.unflatten(-1, x.shape[-2:]).copy_(x)
    return together


def _unpacked(together: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views [..., heads, d] of the columns of arrays with such last dims."""
    parts = together.split([shape.numel() for shape in shapes], -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _to_tokens(over: RankGroup, y: Tensor, heads: int) -> Tensor:
    """[B, heads / R, S, d] -> [B, heads, S / R, d]."""
    whole = move(y.permute(2, 0, 1, 3).flatten(2), over, ToSequence(), ToHidden())
    return whole.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
