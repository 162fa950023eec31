"""`tiled_loss`: any loss of hidden states, computed shard by shard, with sums that are right for uneven shards.

A scalar that fn returns for a shard becomes a column with one row per token: the scalar in the first row, zeros below.
So `tile` does all the work, and the sum of the column is the scalar of all tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shared_specs.config import Tiling
from shared_specs.core import checks
from shared_specs.errors import fail_type
from shared_specs.tile import means
from tiled_torch.core import replay
from tiled_torch.core.replay import is_capturing
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.tile import token_layout
from tiled_torch.tile.api import Tiled, plan_shards
from tiled_torch.tile.captures import modules_of
from tiled_torch.tile.fsdp_units import Units
from tiled_torch.tile.probe import watched
from tiled_torch.tile.state import is_fake

_NAME = "tiled_loss"
_LOOKS = means.Looks()
_UNUSED = ("keep", "vocab_shards", "memory_budget", "deterministic")


def tiled_loss(
    fn: Callable[..., Any], x: Tensor, *args: Any, num_shards: int | None = None, tiling: Tiling | None = None
) -> Any:
    """Return fn(x, *args) with its scalars summed over shards of tokens, with exact gradients.

    Only one shard of fn's intermediate results (such as logits) exists at a time. Backward runs fn again, shard by shard.

    fn must return sums over its tokens, not means. It may return loss.sum() and (targets != ignore_index).sum(), for example,
    and the caller divides them afterwards. A mean over each shard would give a larger weight to tokens of short shards, and of
    shards with many ignored labels. `tiled_loss` raises an error if it detects a mean. The first call with a function and kinds
    of arguments tests this at tokens spread over the whole input, and has to wait for their values.

    Args:
        fn: an nn.Module or a function of a shard of x and of `args`. The shard is [1, t, H] if x has three or more dims and
            [t, H] if it has two. Tensors among `args` that have x's leading dims are split too. Parameters are found as in
            `tile`. fn returns a scalar, one value or row per token, or a nested structure of them.
        x: [T, H] or [B, S, H] (any leading dims). Hidden states.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. keep, vocab_shards and memory_budget do not apply.
    Returns:
        fn's structure: scalars summed over shards in float32 (float64 for float64; integers stay integers), values per
        token as [*leading dims, ...] or [T, ...].
    Numerics, Memory: as `tile`. Cost: fn runs twice on every token. `tiled_loss` does not know which tokens fn ignores, so
        remove those tokens first. (Models of `tile_model` whose head is no plain linear layer do this, because their loss is
        known.) For a cross entropy, `tiled_linear_cross_entropy` is faster.
    Raises:
        SpecError: fn returns a mean; and as `tile`. TypeError, UnsupportedError: as `tile`.
    Source: derived in shared_specs/README.md; ALST's TiledFusedLogitsLoss (arXiv 2506.13996) is the idea.
    Example:
        >>> import torch
        >>> w, x, targets = torch.zeros(4, 8), torch.zeros(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
        >>> def fn(x, targets):
        ...     return torch.nn.functional.cross_entropy((x @ w.T).flatten(0, 1), targets.flatten(), reduction="sum")
        >>> tiled_loss(fn, x, targets, num_shards=4) / targets.numel()
        tensor(1.3863)
    """
    if not callable(fn):
        fail_type(_NAME, "fn", "a module or a function", type(fn).__name__)
    options = checks.resolve_tiling(_NAME, num_shards, 0.0, tiling, unused=_UNUSED)
    _refuse_mean(fn, x, args, options)
    return _summed(fn, x, args, options, lambda: None)


def tiled_loss_of(
    fn: Callable[..., Any], x: Tensor, *args: Any, tiling: Tiling, chosen: Callable[[], Tensor | None]
) -> Any:
    """`tiled_loss` of a fn that is known to return sums to which only some tokens add anything, and which alone are run.

    Args:
        chosen: called once; returns the numbers [n] of those tokens in rising order, or None for all. A shard of them is a
            copy, [t, H]. What fn is given of the first tokens to see the form of its results may be of any.
    """
    return _summed(fn, x, args, checks.resolve_tiling(_NAME, None, 0.0, tiling, unused=_UNUSED), chosen)


def _summed(
    fn: Callable[..., Any], x: Tensor, args: tuple[Any, ...], options: Tiling, chosen: Callable[[], Tensor | None]
) -> Any:
    scalar: list[bool] = []

    def columns(x: Tensor, *args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(fn(x, *args))
        scalar[:] = [isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in leaves]
        t = x.shape[:-1].numel()
        return pytree.tree_unflatten([_column(a, t) if s else a for a, s in zip(leaves, scalar, strict=True)], spec)

    results, spec = pytree.tree_flatten(Tiled(_same_module(fn, columns), options, _NAME, chosen=chosen)(x, *args))
    summed = [column.sum() if s else column for column, s in zip(results, scalar, strict=True)]
    return pytree.tree_unflatten(summed, spec)


def _column(a: Tensor, t: int) -> Tensor:
    """Return [t]: a in the first row, zeros below; wide, so that the sum over shards is. Without tokens the scalar is lost."""
    wide = a if not a.is_floating_point() else a.to(wide_dtype(a.dtype))
    return torch.cat([wide.view(1), wide.new_zeros(t - 1)]) if t else wide.new_zeros(0) + 0 * wide


class _Columns(torch.nn.Module):
    """A module's columns as a module, so that `tile` knows its parameters and buffers."""

    def __init__(self, module: torch.nn.Module, columns: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.columns = module, columns

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.columns(x, *args)


def _same_module(fn: Callable[..., Any], columns: Callable[..., Any]) -> Callable[..., Any]:
    return _Columns(fn, columns) if isinstance(fn, torch.nn.Module) else columns


@torch.no_grad()
def _refuse_mean(fn: Callable[..., Any], x: Tensor, args: tuple[Any, ...], options: Tiling) -> None:
    """Raise SpecError where fn's scalars are seen to be means. Looks once for a function and its kinds of arguments."""
    layout, tensors = token_layout.split(fn, (x, *args), {}, function=_NAME)
    if not layout.tokens or torch._C._are_functorch_transforms_active() or any(map(is_fake, tensors)):
        return
    rowed = zip(tensors, layout.rowed, strict=True)
    shapes = [(str(t.dtype), t.shape[len(layout.lead) :] if cut else t.shape, cut) for t, cut in rowed]
    arguments = len(layout.lead), tuple(shapes), means.signature(layout.others)
    if not _LOOKS.wanted(fn, arguments) or is_capturing():
        return
    modules = modules_of(fn)
    units = Units(fn, modules)
    if units.states or units.refused:  # they would communicate, and a rank with fewer tokens would not
        return
    flat = layout.flat(tensors)

    def scalars(tokens: list[int]) -> list[float]:
        index = torch.tensor(tokens, device=x.device)
        pieces = [t[index] if cut else t for t, cut in zip(flat, layout.rowed, strict=True)]
        cut, _ = layout.arguments(pieces)
        found = pytree.tree_leaves(fn(*cut))
        return [float(a) for a in found if isinstance(a, Tensor) and a.dim() == 0 and a.is_floating_point()]

    plan = plan_shards(layout, options, x.device)
    with replay.random_state_kept(x.device), watched(modules, units.check):
        told = means.look(_NAME, means.samples(layout.tokens, plan.shard_tokens), scalars)
    _LOOKS.done(fn, arguments, told=told)
