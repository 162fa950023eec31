"""What stands behind attention in a decoder layer whose MLP is a mixture of experts.

Its router and experts see all tokens of the layer at once, as in the model, and go through them a shard at a time by themselves
where `tile_model` has tiled them; the output projection, the norm and the sums run by the shards of the layer.
Letters as in `function.py`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tiled_torch.core.replay import results_unread
from tiled_torch.models.block.attention import AttendedRows
from tiled_torch.models.block.parts import BlockParts, entry, part_gradients
from tiled_torch.models.experts.blocks import shared_that_is_added
from tiled_torch.models.experts.function import FORMULA
from tiled_torch.models.experts.marker import OfExperts
from tiled_torch.models.mlps.tiled import Tiled


def experts_forward(parts: BlockParts, x: Tensor, a: AttendedRows, y: Tensor) -> Tensor:
    """Return y of the layer, written over `y` [B, S, H]. a: attention's result."""
    call, family = parts.call, parts.family
    z = torch.empty_like(y)
    for part, (start, stop) in enumerate(call.shards.spans):
        call.recorded()
        y[:, start:stop] = parts.middle(x[:, start:stop], a.rows(part), part)
        z[:, start:stop] = parts.called(family.between, y[:, start:stop])
    call.recorded()
    branch = _mixed(parts, z)
    del z
    for start, stop in call.shards.spans:
        rows = y[:, start:stop]
        rows.copy_(parts.added(rows, parts.called(family.behind_mlp, branch[:, start:stop])))
    return y


def experts_backward(
    parts: BlockParts, x: Tensor, a: AttendedRows, dx: Tensor, dy: Tensor, leaves: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """Return the gradients of the experts' parameters; those of x so far go to dx, of a to a, of others to their sums.

    Until its own rows are written dx holds what the experts are given.
    """
    call, family, sums = parts.call, parts.family, parts.sums
    shards = list(enumerate(call.shards.spans))
    last = 2 * len(shards) + 1
    own = {name: leaf for name, leaf in leaves.items() if call.alone(name)}
    others = {name: leaf for name, leaf in leaves.items() if name not in own}
    for part, (start, stop) in shards:
        with torch.no_grad(), call.again(len(shards) + 1 + part):
            rows = parts.middle(x[:, start:stop].detach(), a.rows(part), part)
            dx[:, start:stop] = parts.called(family.between, rows)
        del rows
    unread = () if parts.is_read(family.behind_mlp) else _unread(call.layer.mlp)
    with torch.enable_grad(), call.again(last), results_unread(unread):
        z_whole = entry(dx)
        branch = _mixed(parts, z_whole)
    of_branch, edge = _of_branch(parts, branch.detach(), dy, others), get_gradient_edge(branch)
    del branch
    dz, *found = torch.autograd.grad((edge,), (z_whole, *own.values()), (of_branch,), allow_unused=True)
    del edge, z_whole, of_branch
    for part, (start, stop) in shards:
        with torch.enable_grad(), call.again(len(shards) + 1 + part):
            x_shard, a_shard = entry(x[:, start:stop]), entry(a.rows(part))
            middle = parts.middle(x_shard, a_shard, part)
            results = [middle, parts.called(family.between, middle)]
        given = dy[:, start:stop], dz[:, start:stop]
        dx[:, start:stop], of_a = part_gradients(results, given, (x_shard, a_shard), others, sums)
        a.put(of_a, part)  # nobody reads these rows any more
        del x_shard, a_shard, middle, results, of_a
    return dict(zip(own, found, strict=True))


def _unread(mixture: Any) -> tuple[str, ...]:
    """Return the functions in a mixture whose results no gradient wants.

    The families' mixtures reshape what experts make and add to it, most of them the result of an MLP for all tokens. What
    somebody has put around the experts may multiply it.
    """
    if not isinstance(mixture.experts, OfExperts):
        return ()
    shared = isinstance(shared_that_is_added(mixture), Tiled)
    return (FORMULA, "tiled_mlp") if shared else (FORMULA,)


def _mixed(parts: BlockParts, z: Tensor) -> Tensor:
    """Return what the MLP makes of all tokens; some hand on the router's scores beside it, which no layer reads."""
    found: Any = parts.called("mlp", z)
    return found[0] if isinstance(found, tuple) else found


def _of_branch(parts: BlockParts, branch: Tensor, dy: Tensor, others: dict[str, Tensor]) -> Tensor:
    """Return the gradient of the MLP's result: what y's becomes behind a norm and a multiplier."""
    family = parts.family
    if family.behind_mlp is None and family.multiplier is None:
        return dy
    out: Any = torch.empty_like(branch)
    for start, stop in parts.call.shards.spans:
        with torch.enable_grad():
            rows = entry(branch[:, start:stop])
            y = parts.added(torch.zeros_like(rows), parts.called(family.behind_mlp, rows))
        out[:, start:stop] = part_gradients(y, dy[:, start:stop], (rows,), others, parts.sums)[0]
    return out
