"""A decoder layer of which everything but attention runs a shard at a time: one autograd Function that saves its input alone.

It is its own checkpoint. Backward computes q, k, v again, attention again, one key-value group at a time, then the second
part (output projection, norm, MLP) by shards, whose down-projection is computed again only where a norm follows it, then
attention's gradient, then the first part (norm, q, k, v), whose products are not computed a third time. A mixture of experts
runs between two such loops, with all tokens at once (`experts.py`).
What a family does otherwise is in `families.py`, the parts' formulas in `parts.py`, shards split over ranks in `shards.py`.
Letters: B batch, S sequence, H hidden, D of one head. Shards are runs of the sequence, of every row of the batch.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiled_torch.core import replay
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.tensors import refuse_second_order
from tiled_torch.models.block.attention import Turns, attended, attention_gradients
from tiled_torch.models.block.experts import experts_backward, experts_forward
from tiled_torch.models.block.families import BlockFamily, said_of
from tiled_torch.models.block.known import attention_of, family_of_block, has_experts
from tiled_torch.models.block.parts import BlockParts, entry, part_gradients
from tiled_torch.models.block.shards import Shards


@dataclass(frozen=True)
class BlockCall:
    """The static part of one call. layer: the module, for its formulas, never for its parameters.

    plain: linear layers of which only weight and bias are used; the others are called. cast: the dtype of autocast, where it is
    on. random: the generators' states before every part of every shard, where numbers may be drawn. offloaded: its input waits
    on the host, and is fetched twice in backward. complex_positions: the model has cos and sin as one table of complex numbers.
    scales: of queries, [B or 1, S], where the model has them.
    """

    layer: Any
    names: tuple[str, ...]
    plain: frozenset[str]
    shards: Shards
    turns: Turns
    mask: Any  # one that is no tensor
    options: dict[str, Any]
    cast: torch.dtype | None
    autocast: replay.Autocast
    random: replay.GeneratorStates | None
    offloaded: bool = False
    complex_positions: bool = False
    scales: Tensor | None = None

    @property
    def family(self) -> BlockFamily:
        return family_of_block(self.layer)

    @property
    def dropout(self) -> float:
        return self.attention.attention_dropout if self.layer.training else 0.0

    @property
    def attention(self) -> Any:
        return attention_of(self.layer)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: dict[str, Tensor]) -> Tensor:
        """Return the result of the model's own attention, [B, S, heads, D]. sinks: parameters of these heads, by attribute."""
        attn = _holding(self.attention, sinks)
        home = sys.modules[type(attn).__module__]
        run = home.ALL_ATTENTION_FUNCTIONS.get_interface(  # type: ignore[attr-defined]
            attn.config._attn_implementation,
            home.eager_attention_forward,  # type: ignore[attr-defined]
        )
        own = {option: said_of(attn, what) for option, what in self.family.options}
        own |= {} if self.turns.over is None else {"exchanged": True}
        mask = self.mask if mask is None else mask
        out, _ = run(attn, q, k, v, mask, dropout=self.dropout, scaling=attn.scaling, **own, **self.options)
        return out

    def recorded(self) -> None:
        """Keep the state of the generators before the next part."""
        if self.random is not None:
            self.random.record()

    def again(self, part: int) -> AbstractContextManager[None]:
        """Draw again the random numbers of a part: the shards before attention, attention, the shards after it."""
        return nullcontext() if self.random is None else self.random.again(part)

    def by_autograd(self, name: str) -> bool:
        """Return whether a parameter takes part as a leaf: of what is called, and a bias that is added to a sum over ranks."""
        owner, _, kind = name.rpartition(".")
        return owner not in self.plain or (
            self.shards.split and kind == "bias" and owner in (self.family.out, self.family.down)
        )

    @property
    def experts(self) -> bool:
        """Return whether the MLP is a mixture of experts, which sees all tokens of the layer at once."""
        return has_experts(self.layer)

    def alone(self, name: str) -> bool:
        """Return whether a parameter's gradient comes of one call, and is no sum over shards: those of a mixture of experts."""
        return self.experts and name.startswith("mlp.")


def _holding(attention: Any, parameters: dict[str, Tensor]) -> Any:
    """Return the attention with other tensors for some of its own parameters; it itself stays as it is."""
    if not parameters:
        return attention
    held = copy(attention)
    held._parameters = {**attention._parameters, **parameters}
    return held


class Block(torch.autograd.Function):
    """y of a decoder layer. Saved: x and the parameters; q, k, v, attention's result are of one call only.

    Operands: the call, x, cos and sin of the positions, the mask, the parameters in the order of the call's names.
    """

    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, *params: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, cos, sin, mask, *params)
        # Its slices would ask for gradients that nobody makes here, and hooks of all modules look for what makes them.
        x = x.detach()
        with call.autocast.again(), replay.parametrized_anew():
            parts = BlockParts(call, (cos, sin), params, {})
            groups = parts.projections(x)
            call.recorded()
            a, _ = attended(call, groups, mask, parts.sinks())
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            if call.experts:
                return experts_forward(parts, x, a, y)
            for part, (start, stop) in enumerate(call.shards.spans):
                call.recorded()
                y[:, start:stop] = parts.behind(x[:, start:stop], a.rows(part), part)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_order("tile_model", "; use untile_model for one.")
        call: BlockCall = ctx.call
        x, cos, sin, mask, *params = ctx.saved_tensors
        needs = dict(zip(call.names, ctx.needs_input_grad[5:], strict=True))
        cut, family = call.shards, call.family
        sums = {
            name: GradientSum(p, None, single=len(cut) <= 1 and not (cut.split and call.by_autograd(name)))
            if needs[name] and not call.alone(name)
            else None
            for name, p in zip(call.names, params, strict=True)
        }
        alone: dict[str, Tensor | None] = {}
        parts = BlockParts(call, (cos, sin), params, sums)
        # What sums take from autograd: leaves of their own.
        leaves = {
            name: p.detach().requires_grad_()
            for name, p in parts.params.items()
            if call.by_autograd(name) and needs[name]
        }
        shards, random = list(enumerate(cut.spans)), call.random
        numbers = nullcontext() if random is None else random.kept()
        with numbers, call.autocast.again(), replay.parametrized_anew():
            groups = parts.projections(x.detach(), again=True)
            parts.params |= leaves
            with torch.enable_grad(), call.again(len(shards)):
                a, turns = attended(call, groups, mask, parts.sinks())
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            if call.experts:
                alone = experts_backward(parts, x, a, dx, dy, leaves)
            for part, (start, stop) in () if call.experts else shards:
                with torch.enable_grad(), call.again(len(shards) + 1 + part):
                    x_shard, a_shard = entry(x[:, start:stop]), entry(a.rows(part))
                    y = parts.behind(x_shard, a_shard, part, needed=False)
                dx[:, start:stop], of_a = part_gradients(y, dy[:, start:stop], (x_shard, a_shard), leaves, sums)
                a.put(of_a, part)  # nobody reads these rows any more
                del y, x_shard, a_shard, of_a
            if call.offloaded:
                del x  # attention's backward has its room
            (dq, dk, dv), of_sinks = attention_gradients(call.turns, turns, a)
            for name, gradient in of_sinks.items():
                total: Any = sums[f"{family.attention}.{name}"]
                total.add_rows(gradient[None])
            if call.offloaded:  # a checkpoint around gives what it makes again once
                x = ctx.saved_tensors[0]
            for part, (start, stop) in shards:
                with torch.enable_grad(), call.again(part):
                    x_shard = entry(x[:, start:stop])
                    qkv = parts.before(x_shard, part, needed=False)
                of_shard = [[cut.rows(x, part, 2) for x in heads] for heads in (dq, dk, dv)]
                given = [call.turns.together(of_shard[0], 1), *(torch.cat(heads, 1) for heads in of_shard[1:])]
                dx[:, start:stop] += part_gradients(qkv, given, (x_shard,), leaves, sums)[0]
                del qkv, x_shard, of_shard, given
            cut.complete((name, total) for name, total in sums.items() if total is not None and call.by_autograd(name))
        found = {name: alone.get(name) if total is None else total.result() for name, total in sums.items()}
        return None, dx, None, None, None, *found.values()
