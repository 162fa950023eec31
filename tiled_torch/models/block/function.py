"""A decoder layer of which everything but attention runs a shard at a time: one autograd Function that saves its input alone.

It is its own checkpoint. Backward computes q, k, v again, attention again, one key-value group at a time, then the second
part (output projection, norm, MLP) by shards, whose down-projection is never computed again, then attention's gradient,
then the first part (norm, q, k, v), whose products are not computed a third time.
Letters: B batch, S sequence, H hidden, D of one head. Shards are runs of the sequence, of every row of the batch.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from shared_specs.shards import ShardPlan
from tiled_torch.core import replay
from tiled_torch.core.gradients import GradientSum
from tiled_torch.core.tensors import refuse_second_order

LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
Group = tuple[Tensor, Tensor, Tensor]  # q [B, heads of a group, S, D], k and v [B, 1, S, D]


class _Product(torch.autograd.Function):
    """x @ w.T + b, whose weight gradients are added to sums. needed False: only its gradient is, the value is an anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, sums: Sequence[Any], needed: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.sums = sums
        if not needed:
            return x.new_zeros(()).expand(*x.shape[:-1], w.shape[0])
        return torch.nn.functional.linear(x, w, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        of_weight, of_bias = ctx.sums
        rows = dy.flatten(0, -2)
        if of_weight is not None:
            of_weight.add_product(rows, x.flatten(0, -2))
        if of_bias is not None:
            of_bias.add_rows(rows)
        return dy @ w, None, None, None, None


@dataclass(frozen=True)
class BlockCall:
    """The static part of one call. layer: the module, for its formulas, never for its parameters.

    plain: linear layers of which only weight and bias are used; the others are called. cast: the dtype of autocast, where it is
    on. random: the generators' states before every part of every shard, where numbers may be drawn.
    """

    layer: Any
    names: tuple[str, ...]
    plain: frozenset[str]
    plan: ShardPlan  # of the sequence
    mask: Any  # one that is no tensor
    options: dict[str, Any]
    cast: torch.dtype | None
    autocast: replay.Autocast
    random: replay.GeneratorStates | None

    def groups(self) -> int:
        """Key-value groups that attend one at a time; one with dropout, whose random numbers have the model's order.

        Where ranks of a context attend with some of the heads each, as many as leave every one of them a key head.
        """
        heads = self.layer.self_attn.config.num_key_value_heads
        ranks = getattr(self.layer.self_attn, "_context_ranks", 1)
        return 1 if self.dropout or heads % ranks else heads // ranks

    @property
    def dropout(self) -> float:
        return self.layer.self_attn.attention_dropout if self.layer.training else 0.0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[B, S, heads, D] by the model's own attention."""
        attn = self.layer.self_attn
        home = sys.modules[type(attn).__module__]
        run = home.ALL_ATTENTION_FUNCTIONS.get_interface(  # type: ignore[attr-defined]
            attn.config._attn_implementation,
            home.eager_attention_forward,  # type: ignore[attr-defined]
        )
        window = {} if type(attn).__name__ == "LlamaAttention" else {"sliding_window": _window(attn)}
        mask = self.mask if mask is None else mask
        out, _ = run(attn, q, k, v, mask, dropout=self.dropout, scaling=attn.scaling, **window, **self.options)
        return out

    def recorded(self) -> None:
        """Keep the state of the generators before the next part."""
        if self.random is not None:
            self.random.record()

    def again(self, part: int) -> AbstractContextManager[None]:
        """Inside, random numbers are those that a part drew: the shards before attention, attention, the shards behind."""
        return nullcontext() if self.random is None else self.random.again(part)


def _window(attn: Any) -> Any:
    return attn.sliding_window if hasattr(attn, "sliding_window") else getattr(attn.config, "sliding_window", None)


class _Parts:
    """The two token-wise parts of one shard, from the parameters given; sums take the gradients of products."""

    def __init__(
        self,
        call: BlockCall,
        tables: tuple[Tensor, Tensor],
        params: Sequence[Tensor],
        sums: dict[str, GradientSum | None],
    ) -> None:
        self.call, self.tables, self.sums = call, tables, sums
        self.params = dict(zip(call.names, params, strict=True))
        if call.cast is not None:  # once for all shards
            for name, value in self.params.items():
                if name.rpartition(".")[0] in call.plain:
                    self.params[name] = value.to(call.cast)

    def product(self, name: str, x: Tensor, needed: bool = True) -> Tensor:
        if name not in self.call.plain:
            return self.called(name, x)
        weight, bias = f"{name}.weight", f"{name}.bias"
        sums = (self.sums.get(weight), self.sums.get(bias))
        x = x if self.call.cast is None else x.to(self.call.cast)
        return _Product.apply(x, self.params[weight], self.params.get(bias), sums, needed)  # type: ignore[no-any-return]

    def called(self, name: str, x: Tensor) -> Tensor:
        """Return what a submodule makes of x with the parameters given."""
        start = f"{name}."
        own = {key.removeprefix(start): value for key, value in self.params.items() if key.startswith(start)}
        return functional_call(self.call.layer.get_submodule(name), own, (x,))  # type: ignore[no-any-return]

    def before(self, x: Tensor, start: int, stop: int, needed: bool = True) -> Group:
        """q, k, v of a shard, [B, heads, t, D] each. Where q and k are normed, the norm's gradient needs them anyway."""
        attn, x = self.call.layer.self_attn, self.called("input_layernorm", x)
        normed = hasattr(attn, "q_norm")
        q, k = (
            self.product(f"self_attn.{n}_proj", x, needed or normed).unflatten(-1, (-1, attn.head_dim)) for n in "qk"
        )
        if normed:
            q, k = self.called("self_attn.q_norm", q), self.called("self_attn.k_norm", k)
        v = self.product("self_attn.v_proj", x, needed).unflatten(-1, (-1, attn.head_dim))
        rotate = sys.modules[type(attn).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        cos, sin = (table[:, start:stop] for table in self.tables)
        q, k = rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        if self.call.cast is not None:  # rotary positions are float32 under autocast; attention casts to this
            q, k = q.to(self.call.cast), k.to(self.call.cast)
        return q, k, v.transpose(1, 2)

    def behind(self, x: Tensor, a: Tensor, needed: bool = True) -> Tensor:
        """y of a shard. a: [B, t, heads * D]. needed False: without the down-projection's value."""
        middle = x + self.product("self_attn.o_proj", a)
        z = self.called("post_attention_layernorm", middle)
        h = self.call.layer.mlp.act_fn(self.product("mlp.gate_proj", z)) * self.product("mlp.up_proj", z)
        return middle + self.product("mlp.down_proj", h, needed)

    def projections(self, x: Tensor, *, again: bool = False) -> list[Group]:
        """q, k, v of all tokens, one key-value group after the other, each tensor of its own so that it can be let go."""
        count = self.call.groups()
        groups: list[Group] = []
        for part, (start, stop) in enumerate(self.call.plan):
            if not again:
                self.call.recorded()
            with self.call.again(part) if again else nullcontext():
                shard = [t.chunk(count, 1) for t in self.before(x[:, start:stop], start, stop)]
            if not groups:
                groups = [tuple(_whole(part[g], x.shape[1]) for part in shard) for g in range(count)]  # type: ignore[misc]
            for g in range(count):
                for whole, part_of_shard in zip(groups[g], shard, strict=True):
                    whole[:, :, start:stop] = part_of_shard[g]
            del shard
        return groups


def _whole(part: Tensor, length: int) -> Tensor:
    return part.new_empty((*part.shape[:2], length, part.shape[3]))


class Block(torch.autograd.Function):
    """y of a decoder layer. Saved: x and the parameters; q, k, v, attention's result are of one call only.

    Operands: the call, x, cos and sin of the positions, the mask, the parameters in the order of the call's names.
    """

    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, *params: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, cos, sin, mask, *params)
        with call.autocast.again():
            parts = _Parts(call, (cos, sin), params, {})
            groups = parts.projections(x)
            call.recorded()
            a, _ = _attended(call, groups, mask)
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            for start, stop in call.plan:
                call.recorded()
                y[:, start:stop] = parts.behind(x[:, start:stop], a[:, start:stop].flatten(2))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_order("tile_model", "; use untile_model for one.")
        call: BlockCall = ctx.call
        x, cos, sin, mask, *params = ctx.saved_tensors
        needs = dict(zip(call.names, ctx.needs_input_grad[5:], strict=True))
        sums = {
            name: GradientSum(p, None, single=len(call.plan) <= 1) if needs[name] else None
            for name, p in zip(call.names, params, strict=True)
        }
        parts = _Parts(call, (cos, sin), params, sums)
        # What sums take from autograd: the parameters of what is called, leaves of their own.
        leaves = {
            name: p.detach().requires_grad_()
            for name, p in parts.params.items()
            if name.rpartition(".")[0] not in call.plain and needs[name]
        }
        shards, random = list(enumerate(call.plan)), call.random
        with nullcontext() if random is None else random.kept(), call.autocast.again():
            groups = parts.projections(x, again=True)
            for tensor in chain.from_iterable(groups):
                tensor.requires_grad_()
            parts.params |= leaves
            with torch.enable_grad(), call.again(len(shards)):
                a, edges = _attended(call, [*groups], mask)
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            for part, (start, stop) in shards:
                with torch.enable_grad(), call.again(len(shards) + 1 + part):
                    x_shard = x[:, start:stop].detach().requires_grad_()
                    a_shard = a[:, start:stop].flatten(2).detach().requires_grad_()
                    y = parts.behind(x_shard, a_shard, needed=False)
                dx[:, start:stop], of_a = _gradients(y, dy[:, start:stop], (x_shard, a_shard), leaves, sums)
                a[:, start:stop] = of_a.view(a[:, start:stop].shape)  # nobody reads these rows any more
                del y, x_shard, a_shard, of_a
            del x  # where inputs are offloaded, attention's backward has its room
            dqkv = _attention_gradients(groups, edges, a)
            del a
            x = ctx.saved_tensors[0]
            for part, (start, stop) in shards:
                with torch.enable_grad(), call.again(part):
                    x_shard = x[:, start:stop].detach().requires_grad_()
                    qkv = parts.before(x_shard, start, stop, needed=False)
                given = [torch.cat([g[place][:, :, start:stop] for g in dqkv], 1) for place in range(3)]
                dx[:, start:stop] += _gradients(qkv, given, (x_shard,), leaves, sums)[0]
                del qkv, x_shard, given
        return None, dx, None, None, None, *(None if total is None else total.result() for total in sums.values())


def _attended(call: BlockCall, groups: list[Group], mask: Tensor | None) -> tuple[Tensor, list[Any]]:
    """Return attention's output, [B, S, heads, D], an array of its own, and where the gradients of every group begin.

    The list is emptied group by group, so that one that nobody else holds is let go.
    """
    whole, edges, heads = None, [], 0
    while groups:
        count, out = groups[0][0].shape[1], call.attend(*groups.pop(0), mask)
        if whole is None:
            batch, length, _, width = out.shape
            whole = out.new_empty((batch, length, count * (len(groups) + 1), width))
        whole[:, :, heads : heads + count] = out.detach()
        edges.append(torch.autograd.graph.get_gradient_edge(out) if out.requires_grad else None)
        heads += count
        del out  # a copy in another layout on some devices, which backward has no use for
    assert whole is not None
    return whole, edges


def _attention_gradients(groups: list[Group], edges: list[Any], da: Tensor) -> list[Group]:
    """Return the gradients of q, k and v of every group; the group itself is let go as soon as it has them."""
    found, heads = [], 0
    while groups:
        group = groups.pop(0)
        count = group[0].shape[1]
        found.append(torch.autograd.grad(edges.pop(0), group, da[:, :, heads : heads + count]))
        heads += count
        del group
    return found  # type: ignore[return-value]


def _gradients(y: Any, dy: Any, inputs: Sequence[Tensor], leaves: dict[str, Tensor], sums: Any) -> Sequence[Tensor]:
    """Gradients of the inputs; those of the norms' weights that took part are added to their sums."""
    found = torch.autograd.grad(y, (*inputs, *leaves.values()), dy, allow_unused=True)
    for name, gradient in zip(leaves, found[len(inputs) :], strict=True):
        if gradient is not None:
            sums[name].add_rows(gradient[None])
    return found[: len(inputs)]
