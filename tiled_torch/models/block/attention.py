"""Attention of a layer, some heads at a time, forward and backward; in each turn ranks of a context exchange tokens for heads.

q, k, v, attention's output and their gradients are never there whole both as this rank's tokens of all heads and as all tokens
of this rank's heads: what a turn has exchanged is let go in the one form when it has the other.
Letters as in `function.py`; s tokens of this rank, S of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_specs.layers.heads import AttentionTurns, attention_turns
from tiled_torch.collectives.groups import RankGroup, rank_group
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.layers.context import exchange_heads, exchange_tokens
from tiled_torch.models.block.parts import HeadGroup
from tiled_torch.models.block.shards import Shards


@dataclass(frozen=True)
class Turns:
    """In which heads attend. over: the ranks that exchange tokens for heads, where there are several."""

    order: AttentionTurns
    over: RankGroup | None = None

    @property
    def groups(self) -> int:
        return self.order.groups

    def part(self, x: Tensor, dim: int, number: int) -> Tensor:
        """Return the query heads of a part of a group, of all of the group's along a dim."""
        order = self.order
        if order.parts == 1:
            return x
        return x.unflatten(dim, (order.keys, order.parts, -1)).select(dim + 1, number).flatten(dim, dim + 1)

    def apart(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the query heads of every turn, of all along a dim."""
        groups, parts = x.chunk(self.groups, dim), range(self.order.parts)
        return [self.part(group, dim, number) for group in groups for number in parts]

    def together(self, pieces: Sequence[Tensor], dim: int) -> Tensor:
        """Return the heads of all turns, in the model's order."""
        keys, parts = self.order.keys, self.order.parts
        if parts > 1:
            groups = (pieces[at : at + parts] for at in range(0, len(pieces), parts))
            cut = ([x.unflatten(dim, (keys, -1)) for x in group] for group in groups)
            pieces = [torch.stack(group, dim + 1).flatten(dim, dim + 2) for group in cut]
        return torch.cat([*pieces], dim)


def turns_of(attention: Any, heads: int, kv_heads: int, *, dropout: bool) -> Turns:
    """Return the turns of a layer's attention with so many heads: one, where random numbers have the model's order."""
    mesh = getattr(attention, "_exchanging", None)
    over = None if mesh is None else rank_group("tile_model", mesh)
    if over is None or not over.several:
        return Turns(attention_turns(heads, kv_heads, 1, one_group=dropout))
    parts = not attention._in_ring
    return Turns(attention_turns(heads, kv_heads, over.size, one_group=dropout, parts=parts), over)


class AttendedRows:
    """Attention's result of all of a layer's tokens, and its gradient in its place: of every turn [B, s, heads, D]."""

    def __init__(self, turns: Turns, shards: Shards) -> None:
        self.turns, self.shards = turns, shards
        self.pieces: list[Tensor] = []

    def rows(self, shard: int) -> Tensor:
        """Return the rows of a shard, [B, t, all heads * D]."""
        return self.turns.together([self.shards.rows(x, shard, 1) for x in self.pieces], 2).flatten(2)

    def put(self, rows: Tensor, shard: int) -> None:
        """Write them."""
        width = self.pieces[0].shape[-1]
        for piece, own in zip(self.pieces, self.turns.apart(rows.unflatten(-1, (-1, width)), 2), strict=True):
            self.shards.put(piece, own, shard, 1)


@dataclass(frozen=True)
class Turn:
    """Heads that attended at once. operands: their q, k and v of all tokens. edge: of the result, where gradients begin.

    sinks: what the attention has of these heads beside, where a gradient is asked for.
    """

    operands: HeadGroup
    edge: Any
    sinks: dict[str, Tensor]


def attended(
    call: Any, groups: list[HeadGroup], mask: Tensor | None, sinks: dict[str, Tensor]
) -> tuple[AttendedRows, list[Turn]]:
    """Return attention's result, in memory of its own, and every turn, for its backward, where gradients are asked for.

    The list is emptied group by group, so that one that nobody else holds is let go. sinks: parameters of the attention, of one
    number a head.
    """
    turns: Turns = call.turns
    a, done = AttendedRows(turns, call.shards), []
    of_turns = {name: iter(turns.apart(whole.detach(), 0)) for name, whole in sinks.items()}
    while groups:
        group, operands = [*groups.pop(0)], None
        for number in range(turns.order.parts):
            operands = _operands(turns, group, number, operands)
            if torch.is_grad_enabled():
                for operand in operands:
                    operand.requires_grad_()
            own = {name: next(parts) for name, parts in of_turns.items()}
            asked = {name: x.requires_grad_() for name, x in own.items() if _asked(sinks[name])}
            out = call.attend(*operands, mask, own)
            if out.requires_grad:
                done.append(Turn(operands, torch.autograd.graph.get_gradient_edge(out), asked))
            a.pieces.append(_own_tokens(turns, out.detach()))
            del out  # a copy in another layout on some devices, which backward has no use for
    return a, done


def _asked(parameter: Tensor) -> bool:
    return torch.is_grad_enabled() and parameter.requires_grad


@torch.no_grad()
def _operands(turns: Turns, group: list[Tensor], number: int, before: HeadGroup | None) -> HeadGroup:
    """Return q, k and v of a turn; the group is emptied of what no later one needs. before: of the turn before in the group."""
    if turns.over is None:
        q, k, v = group
        group.clear()
        return q, k, v
    own = [turns.part(group[0], 1, number)]
    if before is None:
        copies = turns.order.copies
        own += [x if copies == 1 else x.repeat_interleave(copies, 1) for x in group[1:]]
        del group[1:]
    if number + 1 == turns.order.parts:
        group.clear()
    q, *keys = exchange_tokens(turns.over, own)
    k, v = keys if before is None else before[1:]
    return q, k, v


@torch.no_grad()
def _own_tokens(turns: Turns, out: Tensor) -> Tensor:
    """Return attention's result in a turn, [B, S, heads, D], in new memory: backward wants what it is given as it is."""
    if turns.over is None:
        return out.clone(memory_format=torch.contiguous_format)
    (found,) = exchange_heads(turns.over, [out.transpose(1, 2)])
    return found.transpose(1, 2)


def attention_gradients(
    turns: Turns, done: list[Turn], a: AttendedRows
) -> tuple[tuple[list[Tensor], list[Tensor], list[Tensor]], dict[str, Tensor]]:
    """Return the gradients of q, of every turn, and of k and v, of every group, from that of the result, which is let go; and
    those of the attention's parameters of heads.

    So are the operands of a turn as soon as it has its gradients. The last turn comes first: k and v came with a group's first.
    """
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    of_sinks: dict[str, list[Tensor]] = {}
    sums = _KeySums(turns.order.parts)
    while done:
        turn, da = done.pop(), [a.pieces.pop().transpose(1, 2)]
        if turns.over is not None:
            da = exchange_tokens(turns.over, da)
        # Not every attention function reads sinks.
        options: dict[str, Any] = {"materialize_grads": True} if turn.sinks else {}
        operands = (*turn.operands, *turn.sinks.values())
        dq, *of_keys = torch.autograd.grad(turn.edge, operands, da.pop().transpose(1, 2), **options)
        for name, gradient in zip(turn.sinks, of_keys[2:], strict=True):
            of_sinks.setdefault(name, []).append(gradient)
        del of_keys[2:], operands
        del turn
        given = [dq, *sums.added(of_keys)]
        del dq, of_keys
        if turns.over is not None:
            given = _sent_back(turns.over, turns.order.copies, given)
        for gradients, x in zip(found[: len(given)], given, strict=True):
            gradients.append(x)
        del given
    for gradients in found:
        gradients.reverse()
    return found, {name: turns.together(pieces[::-1], 0) for name, pieces in of_sinks.items()}


def _sent_back(over: RankGroup, copies: int, gradients: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a turn's operands, of this rank's tokens; of what was repeated that of all copies together."""
    dq, *of_keys = exchange_heads(over, gradients)
    return [dq, *(x if copies == 1 else x.unflatten(1, (-1, copies)).sum(2) for x in of_keys)]


class _KeySums:
    """Sums of the gradients of k and v over the parts of a group, in float32 where there are more than two, rounded once."""

    def __init__(self, parts: int) -> None:
        self.parts, self.count = parts, 0
        self.sums: list[Tensor] = []

    def added(self, found: list[Tensor]) -> list[Tensor]:
        """Return the sums if these are the last ones of a group, and nothing before."""
        self.count += 1
        if self.count == 1:
            self.sums = found
        elif self.count == 2:
            wide = wide_dtype(found[0].dtype) if self.parts > 2 else found[0].dtype
            self.sums = [total.to(wide) + x for total, x in zip(self.sums, found, strict=True)]
        else:
            self.sums = [total.add_(x) for total, x in zip(self.sums, found, strict=True)]
        if self.count < self.parts:
            return []
        sums, self.sums, self.count = self.sums, [], 0
        return [total.to(x.dtype) for total, x in zip(sums, found, strict=True)]
