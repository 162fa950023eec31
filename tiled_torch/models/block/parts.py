"""What stands before attention in a decoder layer and what stands behind it, of one shard of tokens.

Letters as in `function.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from tiled_torch.core.gradients import GradientSum
from tiled_torch.models.block.heads import HeadGroup, heads_of


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


class Unhooked(nn.Module):
    """A module's forward, or another function of it, without the hooks that are called around it."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.module, self.run = module, forward or type(module).forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self.module, x)


class BlockParts:
    """The two token-wise parts of one shard, from the parameters given; sums take the gradients of products."""

    def __init__(
        self,
        call: Any,
        tables: tuple[Tensor, Tensor],
        params: Sequence[Tensor],
        sums: dict[str, GradientSum | None],
    ) -> None:
        self.call, self.tables, self.sums = call, tables, sums
        self.family, self.shards = call.family, call.shards
        self.params = dict(zip(call.names, params, strict=True))
        if call.cast is not None:  # once for all shards
            for name, value in self.params.items():
                if name.rpartition(".")[0] in call.plain:
                    self.params[name] = value.to(call.cast)

    def product(self, name: str, x: Tensor, needed: bool = True, biased: bool = True) -> Tensor:
        if name not in self.call.plain:
            return self.called(name, x)
        weight, bias = f"{name}.weight", f"{name}.bias" if biased else ""
        sums = (self.sums.get(weight), self.sums.get(bias))
        return _Product.apply(self.cast(x), self.params[weight], self.params.get(bias), sums, needed)  # type: ignore[no-any-return]

    def cast(self, x: Tensor) -> Tensor:
        return x if self.call.cast is None else x.to(self.call.cast)

    def called(self, name: str | None, x: Tensor) -> Tensor:
        """Return what a submodule makes of x with the parameters given; x itself where there is none."""
        if name is None:
            return x
        start, module = f"{name}.", self.call.layer.get_submodule(name)
        own = {key.removeprefix(start): value for key, value in self.params.items() if key.startswith(start)}
        if not self.shards.split:
            return functional_call(module, own, (x,))  # type: ignore[no-any-return]
        own = {f"module.{key}": value for key, value in own.items()}
        return functional_call(Unhooked(module), own, (x,))  # type: ignore[no-any-return]

    def summed(self, name: str, x: Tensor, shard: int, needed: bool = True) -> Tensor:
        """Return a product that is a sum over the ranks, to which its bias is added once."""
        if not self.shards.split:
            return self.product(name, x, needed)
        y = self.shards.leave(self.product(name, x, needed, biased=False), shard, needed)
        bias = self.params.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _entered(self, x: Tensor, shard: int) -> Tensor:
        return self.shards.enter(self.cast(x), shard) if self.shards.split else x

    def before(self, x: Tensor, shard: int, needed: bool = True) -> HeadGroup:
        """Return q, k, v of a shard, [B, heads, t, D] each. needed False: without values that no gradient wants."""
        x = self._entered(self.called(self.family.before, x), shard)
        q, k, v = heads_of(self, x, [self.shards.rows(table, shard, 1) for table in self.tables], needed)
        if self.call.scales is not None:
            q = q * self.shards.rows(self.call.scales, shard, 1)[:, None, :, None].to(q.dtype)
        # Rotary positions are float32 under autocast; attention casts to this.
        return self.cast(q), self.cast(k), v

    def sinks(self) -> dict[str, Tensor]:
        """Return the parameters of the attention that have a number for each head, by its attributes."""
        return {name: self.params[f"{self.family.attention}.{name}"] for name in self.family.sinks}

    def behind(self, x: Tensor, a: Tensor, shard: int, needed: bool = True) -> Tensor:
        """y of a shard. a: [B, t, heads * D]. needed False: without the down-projection's value, unless a norm wants it."""
        family = self.family
        middle = self.middle(x, a, shard)
        if self._side_by_side:
            z = self.called(family.between or family.before, x)
        else:
            z = self.called(family.between, middle)
        z, act = self._entered(z, shard), self._activation()
        if len(family.up) == 2:
            gate, up = (self.product(name, z) for name in family.up)
            h = act(gate) * up
        elif family.gated:
            gate, up = self.product(family.up[0], z).chunk(2, -1)
            h = act(gate) * up
        else:
            h = act(self.product(family.up[0], z))
        y = self.summed(family.down, h, shard, needed or self.is_read(family.behind_mlp))
        return self.added(middle, self.called(family.behind_mlp, y))

    def _activation(self) -> Callable[[Tensor], Tensor]:
        act = getattr(self.call.layer.mlp, self.family.activation)
        if isinstance(act, nn.Module) and next(act.parameters(), None) is not None:  # xIELU's
            return lambda x: self.called(f"mlp.{self.family.activation}", x)
        return act  # type: ignore[no-any-return]

    @property
    def _side_by_side(self) -> bool:
        parallel = self.family.parallel
        return getattr(self.call.layer, parallel) if isinstance(parallel, str) else parallel

    def middle(self, x: Tensor, a: Tensor, shard: int, needed: bool = True) -> Tensor:
        """Return x and attention's branch of a shard. needed False: without the branch's value, unless a norm wants it."""
        behind = self.family.behind_attention
        return self.added(
            x, self.called(behind, self.summed(self.family.out, a, shard, needed or self.is_read(behind)))
        )

    def is_read(self, behind: str | None) -> bool:
        """Return whether a module behind a branch wants its value for its own gradient."""
        return is_norm(self.call.layer, behind)

    def added(self, x: Tensor, branch: Tensor) -> Tensor:
        """Return x and a branch, times the layer's multiplier."""
        multiplier = self.family.multiplier
        factor = 1.0 if multiplier is None else getattr(self.call.layer, multiplier)
        return x + branch if factor == 1.0 else x + branch * factor

    def projections(self, x: Tensor, *, again: bool = False) -> list[HeadGroup]:
        """q, k, v of all tokens, one key-value group after the other, each tensor of its own so that it can be let go."""
        call = self.call
        groups: list[HeadGroup] = []
        count, sizes = call.turns.groups, (x.shape[0], self.tables[0].shape[1])
        for part, (start, stop) in enumerate(self.shards.spans):
            if not again:
                call.recorded()
            with call.again(part) if again else nullcontext():
                shard = [t.chunk(count, 1) for t in self.before(x[:, start:stop], part)]
            if not groups:
                groups = [tuple(_whole(part[g], *sizes) for part in shard) for g in range(count)]  # type: ignore[misc]
            for g in range(count):
                for whole, part_of_shard in zip(groups[g], shard, strict=True):
                    self.shards.put(whole, part_of_shard[g], part, 2)
            del shard
        return groups


def is_norm(layer: Any, behind: str | None) -> bool:
    """Return whether a branch of a layer goes through more than dropout before it is added: a norm."""
    return behind is not None and type(layer.get_submodule(behind)) not in (nn.Dropout, nn.Identity)


def _whole(part: Tensor, batch: int, length: int) -> Tensor:
    return part.new_empty((batch, part.shape[1], length, part.shape[3]))


def entry(x: Tensor) -> Tensor:
    """Return x as something whose gradient can be asked for, and no leaf: hooks of all modules cannot follow those."""
    return x.detach().requires_grad_().view_as(x)


def part_gradients(y: Any, dy: Any, inputs: Sequence[Tensor], leaves: dict[str, Tensor], sums: Any) -> Sequence[Tensor]:
    """Return the gradients of the inputs; those of the norms' weights that took part are added to their sums."""
    found = torch.autograd.grad(y, (*inputs, *leaves.values()), dy, allow_unused=True)
    for name, gradient in zip(leaves, found[len(inputs) :], strict=True):
        if gradient is not None:
            sums[name].add_rows(gradient[None])
    return found[: len(inputs)]
