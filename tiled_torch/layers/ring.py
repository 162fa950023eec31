"""Ring attention: every rank keeps the queries of its own tokens, while keys and values travel round.

Letters: R ranks, B sequences of S tokens, s = S / R tokens of a rank, d features of a head. A rank holds two runs of every
sequence, one early and one late (`context_slice(order="zigzag")`), and in every step all ranks compute as many scores
(`shared_specs.layers.ring`). While a rank computes with the keys of one rank, those of the next are on their way. Partial
results are merged by their log-sum-exp; backward sends keys and values round once more, and their gradients follow them.

torch's own ring (`torch.distributed.tensor.experimental.context_parallel`, 2.13) cannot serve here, though its order of the
runs is the same. It replaces three operators, `_scaled_dot_product_{flash,efficient,cudnn}_attention`, which are CUDA's: a
CPU's is left as it is, which attends to a rank's own tokens, and none of them knows float64 or a cap of scores. It raises
NotImplementedError for an attention bias, which a window and documents would be, and adds up in float32 whatever the dtype.
And it works inside a `with`, which cuts buffers in place: a layer that is computed again in backward, checkpointed or
`scope="block"`, would have to be inside.

Source: Liu et al. 2023, ring attention, arXiv 2310.01889; Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_specs.errors import fail, show_shape
from shared_specs.layers.heads import check_scores
from shared_specs.layers.ring import RingStep, Run, held_runs, ring_steps
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.collectives.transport import shift
from tiled_torch.core.autocast import autocast_dtype, without_autocast
from tiled_torch.core.tensors import refuse_second_order, wide_dtype
from tiled_torch.layers.attention import Scores, causal_attention, fuses, part_backward, part_forward
from tiled_torch.layers.context import check_heads
from tiled_torch.layers.documents import Starts, fragments, rows_of_documents

# Tokens of a side of what is computed at once where no kernel takes it whole: with windows, caps and odd dtypes.
RING_BLOCK_TOKENS = 512


@not_compiled
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """Causal softmax attention of this rank's tokens to those of all ranks, with all heads.

    softmax(scale q k^T) v over the keys up to a query's own place in the sequence, with grouped heads. The only array of all S
    tokens on a rank is the document numbers. Scores are not stored if a fused kernel computes attention (`fuses`).

    Args:
        q: [B, heads, s, d], of the two runs that `context_slice(order="zigzag")` gives a rank, in token order, with rotary
            positions already applied.
        k, v: [B, kv_heads, s, d or another dim], kv_heads a divisor of heads.
        scale: of the scores; None: d^-0.5.
        window: the number of keys that a query sees, its own key last; None: all.
        softcap: replaces scores by softcap * tanh(scores / softcap).
        documents: [B or 1, S] integers of all tokens, in token order; a query sees the keys of its own document.
        group: a process group, a DeviceMesh of one dim, or None for all ranks.
    Returns:
        [B, heads, s, dim of v].
    Numerics: partial results come from torch's kernels, in the dtype of q. They and dq, dk and dv are summed in float32
        (float64 for float64); dk and dv are also sent in it. Without a kernel everything is computed in float32.
    Memory: keys and values of two other ranks, in backward also their gradients; a float32 copy of y, and of dq.
    Communication: `shared_specs.layers.ring.ring_bytes`.
    Raises:
        SpecError: shapes that do not fit each other or those of other ranks, an odd number of tokens, a window below 1, or a
            cap that is not positive. TypeError: an argument is not a tensor. UnsupportedError: a DTensor, or a second
            derivative.
    Example:
        y = ring_attention(q, k, v, window=4096, group=mesh["cp"])
    """
    over = rank_group("ring_attention", group)
    check_heads(over, q, k, v)
    check_scores(over.function, window, softcap)
    if not over.several:
        return causal_attention(q, k, v, scale=scale, window=window, softcap=softcap, documents=documents)
    held = q.shape[2]
    if held % 2:
        rule = "of an even number of tokens, for the two runs that a rank holds"
        fail(over.function, "q", rule, held, shapes=f"q is {show_shape(tuple(q.shape))}")
    tokens = held * over.size
    rows = () if documents is None else rows_of_documents(over.function, documents, q.shape[0], tokens)
    agree(over, q.device, _said(q, k, v, (scale, window, softcap), rows))
    cast = autocast_dtype(q)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    how = Scores(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    alone = not rows or all(len(starts) < 2 for starts in rows)
    call = _RingCall(
        over=over,
        how=how,
        window=None if window is None or window >= tokens else window,
        rows=((0,),) if alone else rows,
        held=held,
        fused=fuses(q, k, v, how),
    )
    with without_autocast(q):
        return _Ring.apply(call, q, k, v)  # type: ignore[no-any-return]


def _said(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], rows: tuple[Starts, ...]) -> dict[str, Any]:
    """Return what has to be alike on all ranks."""
    shapes = [f"{x.dtype} {show_shape(tuple(x.shape))}".removeprefix("torch.") for x in (q, k, v)]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    said = {
        "q, k, v": ", ".join(shapes),
        "scale, window, softcap": options,
        "whether gradients are asked for": gradients,
    }
    return said | ({"the number of documents": [len(starts) for starts in rows]} if rows else {})


@dataclass(frozen=True)
class _Piece:
    """Scores that are computed at once: some queries of some sequences with some keys of one rank; `places` in the sequence.

    seen: places that a query looks back, its own among them, where that leaves out some of these scores.
    """

    rows: slice
    queries: Run
    keys: Run
    causal: bool
    places: Run
    seen: int | None = None


@dataclass(frozen=True)
class _RingCall:
    """The static part of one call. rows: the documents' starts of every sequence, or of all alike."""

    over: RankGroup
    how: Scores
    window: int | None
    rows: tuple[Starts, ...]
    held: int
    fused: bool

    def steps(self) -> tuple[RingStep, ...]:
        return ring_steps(self.held, self.over.size, self.over.rank)

    def pieces(self, step: RingStep) -> Iterator[_Piece]:
        """Return what is computed of a step; no score twice, none that a window or a document hides but in masked blocks."""
        if self.fused and self.window is None and self.rows == ((0,),):
            yield _Piece(slice(None), step.queries, step.keys, step.causal, (0, 0))
            return
        tokens, ring = self.held * self.over.size, self.over.size
        own, others = (held_runs(tokens, ring, rank) for rank in (self.over.rank, step.owner))
        for row, starts in enumerate(self.rows):
            rows = slice(None) if len(self.rows) == 1 else slice(row, row + 1)
            for place, queries in enumerate(own):
                for first, start, stop in fragments(starts, *queries):
                    for other, keys in enumerate(others):
                        found = self._between(first, (start, stop), keys)
                        shifts = (place * self.held // 2 - queries[0], other * self.held // 2 - keys[0])
                        yield from (_local(rows, shifts, *each) for each in found)

    def _between(self, first: int, queries: Run, keys: Run) -> Iterator[tuple[Run, Run, bool, int | None]]:
        """Queries of one document with a run of keys, all by their places in the sequence."""
        start, stop = queries
        if self.fused and self.window is None:
            low, high = max(first, keys[0]), min(start, keys[1])
            if keys[0] <= start and stop <= keys[1]:
                yield queries, queries, True, None
            if low < high:
                yield queries, (low, high), False, None
            return
        window = self.window or stop
        for a in range(start, stop, RING_BLOCK_TOKENS):
            b = min(a + RING_BLOCK_TOKENS, stop)
            low, high = max(first, keys[0], a - window + 1), min(b, keys[1])
            for c in range(low, high, RING_BLOCK_TOKENS):
                e = min(c + RING_BLOCK_TOKENS, high)
                whole = e <= a + 1 and b - window <= c
                yield (a, b), (c, e), False, None if whole else window


def _local(rows: slice, shifts: Run, queries: Run, keys: Run, causal: bool, seen: int | None) -> _Piece:
    local = [(start + by, stop + by) for (start, stop), by in zip((queries, keys), shifts, strict=True)]
    return _Piece(rows, local[0], local[1], causal, (queries[0], keys[0]), seen)


class _RingOperands:
    """q and what goes with it, and the keys and values of one rank, of which pieces are cut."""

    def __init__(self, call: _RingCall, *arrays: Tensor) -> None:
        self.call, self.arrays = call, arrays

    def of(
        self, piece: _Piece, keys: tuple[Tensor, Tensor]
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
        """The queries' arrays, k and v of a piece, and how its scores are made."""
        cut = [x[piece.rows, :, slice(*piece.queries)] for x in self.arrays]
        k, v = (x[piece.rows, :, slice(*piece.keys)] for x in keys)
        seen = None if piece.seen is None else _seen(piece, piece.seen, cut[0].device)
        return cut, (k, v), {"causal": piece.causal, "seen": seen, "fused": self.call.fused and seen is None}


def _seen(piece: _Piece, window: int, device: torch.device) -> Tensor:
    """Return [queries, keys], boolean."""
    counts = [stop - start for start, stop in (piece.queries, piece.keys)]
    queries, keys = (at + torch.arange(n, device=device) for at, n in zip(piece.places, counts, strict=True))
    behind = queries[:, None] - keys
    return (behind >= 0) & (behind < window)


class _Ring(torch.autograd.Function):
    """y of this rank's queries. Saved: q, k, v and y of its tokens, and the log-sum-exp of every query."""

    @staticmethod
    def forward(ctx: Any, call: _RingCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = wide_dtype(q.dtype)
        y = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)
        operands = _RingOperands(call, q)
        for step, keys in _travelling(call, k, v):
            for piece in call.pieces(step):
                (queries,), of_keys, options = operands.of(piece, keys)
                part = part_forward(queries, *of_keys, call.how, **options)
                where = (piece.rows, slice(None), slice(*piece.queries))
                _merge(y[where], lse[where], *part)
        y = y.to(q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_order("ring_attention")
        call: _RingCall = ctx.call
        q, k, v, y, lse = ctx.saved_tensors
        wide = wide_dtype(q.dtype)
        dq, own = torch.zeros_like(q, dtype=wide), _zeros(k, v, wide)
        operands, coming = _RingOperands(call, q, y, lse, dy), None
        for number, (step, keys) in enumerate(_travelling(call, k, v)):
            sums = own if not number else _zeros(k, v, wide)
            dk, dv = _unpacked(sums, k, v)
            for piece in call.pieces(step):
                (queries, y_of, lse_of, dy_of), of_keys, options = operands.of(piece, keys)
                found = part_backward(queries, *of_keys, y_of, lse_of, dy_of, call.how, **options)
                dq[piece.rows, :, slice(*piece.queries)] += found[0]
                dk[piece.rows, :, slice(*piece.keys)] += found[1]
                dv[piece.rows, :, slice(*piece.keys)] += found[2]
            if number:  # what others found of this owner's arrives late, while this rank's was computed
                sums = sums if coming is None else sums.add_(coming.wait())
                coming = shift(call.over, sums)
        assert coming is not None
        own += coming.wait()
        dk, dv = _unpacked(own, k, v)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _travelling(call: _RingCall, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
    """Yield every step with its keys and values; those of the next one are under way meanwhile."""
    steps = call.steps()
    packed, keys = torch.cat((k.flatten(), v.flatten())), (k, v)
    for number, step in enumerate(steps):
        coming = shift(call.over, packed) if number + 1 < len(steps) else None
        yield step, keys
        if coming is not None:
            packed = coming.wait()
            keys = _unpacked(packed, k, v)


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of one buffer in the shapes of k and v."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)


def _zeros(k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(k.numel() + v.numel(), dtype=dtype, device=k.device)


def _merge(y: Tensor, lse: Tensor, part: Tensor, of_part: Tensor) -> None:
    """Take a part's keys in, in place: y and lse are of the queries over all keys met so far."""
    both = torch.logaddexp(lse, of_part)
    # A query that has met no key it sees has no sum yet: 0 of nothing stays.
    safe = both.masked_fill(both.isneginf(), 0)
    y.mul_(torch.exp(lse - safe)[..., None]).add_(part * torch.exp(of_part - safe)[..., None])
    lse.copy_(both)
