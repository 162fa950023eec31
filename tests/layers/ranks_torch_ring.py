"""What the ranks run for rings: attention of many kinds against one process, in both orders of tokens. See tests/ranks.py."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shared_specs.layers.ring import held_runs, ring_bytes
from tiled_torch.layers import ring
from tiled_torch.layers.attention import causal_attention
from tiled_torch.parallel import context_attention, ring_attention

TOKENS = 48  # of a sequence: runs of three at eight ranks
DOCUMENTS = [[5, 11, 1, 18, 13], [17, 31]]  # tokens of each, of two sequences
# name -> heads, key heads, d, dim of v, options
CASES: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "plain": ((2, 2, 8, 8), {}),
    "grouped": ((4, 2, 8, 8), {"scale": 0.3}),
    "one key head, other dim": ((3, 1, 5, 4), {}),
    "window": ((2, 1, 8, 8), {"window": 7}),
    "long window": ((2, 1, 8, 8), {"window": 29}),
    "softcap": ((2, 1, 8, 8), {"softcap": 0.7, "window": 20}),
    "documents": ((4, 2, 8, 8), {"documents": True}),
    "same documents": ((2, 2, 8, 8), {"documents": False}),
    "documents, window": ((4, 2, 8, 8), {"documents": True, "window": 6}),
    "documents, softcap": ((2, 1, 8, 8), {"documents": True, "softcap": 0.7}),
}


def documents_of(each: bool) -> Tensor:
    """Numbers of two sequences' documents, or of the first for both."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS]
    return torch.stack(rows) if each else rows[0][None]


def drawn(sizes: tuple[int, int, int, int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of y of whole sequences."""
    heads, kv_heads, d, dim = sizes
    generator = torch.Generator().manual_seed(heads)
    shapes = ((heads, d), (kv_heads, d), (kv_heads, dim), (heads, dim))
    made = [torch.randn(2, h, TOKENS, n, generator=generator, dtype=torch.float64) for h, n in shapes]
    return [x.to(dtype) for x in made]


def of_name(name: str) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    sizes, options = CASES[name]
    options = dict(options)
    if "documents" in options:
        options["documents"] = documents_of(options["documents"])
    return sizes, options


def held(x: Tensor, ranks: int, rank: int, inside: int = 1, place: int = 0) -> Tensor:
    """The tokens of one rank, dim 2."""
    runs = held_runs(x.shape[2], ranks, rank, inside=inside, place=place)
    return torch.cat([x[:, :, start:stop] for start, stop in runs], 2).contiguous()


def gradients(call: Any, arrays: list[Tensor], dy: Tensor) -> list[Tensor]:
    """y, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in arrays]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True))


def equal(rank: int, world: int, names: list[str]) -> dict[str, float]:
    """The largest relative error of y and its gradients, in float64."""
    ring.RING_BLOCK_TOKENS, found = 4, {}
    for name in names:
        sizes, options = of_name(name)
        *arrays, dy = drawn(sizes)
        expected = gradients(partial(causal_attention, **options), arrays, dy)
        mine = [held(x, world, rank) for x in arrays]
        got = gradients(partial(ring_attention, **options), mine, held(dy, world, rank))
        found[name] = error(got, [held(x, world, rank) for x in expected])
    return found


def two_axes(rank: int, world: int) -> dict[str, float]:
    """Rings between pairs of ranks that exchange tokens for heads."""
    mesh, found = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("ring", "cp")), {}
    mine = partial(
        held, ranks=world // 2, rank=mesh["ring"].get_local_rank(), inside=2, place=mesh["cp"].get_local_rank()
    )
    for name in ("grouped", "documents", "window"):
        sizes, options = of_name(name)
        *arrays, dy = drawn(sizes)
        expected = gradients(partial(causal_attention, **options), arrays, dy)
        attend = partial(ring_attention, group=mesh["ring"], **options)
        call = partial(context_attention, attend=attend, group=mesh["cp"])
        got = gradients(call, [mine(x) for x in arrays], mine(dy))
        found[name] = error(got, [mine(x) for x in expected])
    return found


def rounded(rank: int, world: int) -> dict[str, list[float]]:
    """In bfloat16: error of the ring, and of one process."""
    found = {}
    for name in ("grouped", "documents", "softcap"):
        sizes, options = of_name(name)
        *exact, dy = drawn(sizes)
        *arrays, dy_rounded = drawn(sizes, torch.bfloat16)
        expected = gradients(partial(causal_attention, **options), exact, dy)
        baseline = gradients(partial(causal_attention, **options), arrays, dy_rounded)
        mine = [held(x, world, rank) for x in arrays]
        got = gradients(partial(ring_attention, **options), mine, held(dy_rounded, world, rank))
        own = [held(x, world, rank) for x in expected]
        errors = [error([a], [b]) for a, b in zip(got, own, strict=True)]
        found[name] = [errors, [error([held(a, world, rank)], [b]) for a, b in zip(baseline, own, strict=True)]]
    return found


class Sent:
    """Bytes that this rank gives to others, one by one."""

    def __enter__(self) -> "Sent":
        self.whole, self.bytes, self.calls = dist.batch_isend_irecv, 0, 0
        dist.batch_isend_irecv = self.counted  # type: ignore[assignment]
        return self

    def counted(self, calls: list[Any]) -> Any:
        self.calls += 1
        self.bytes += sum(call.tensor.nbytes for call in calls if call.op is dist.isend)
        return self.whole(calls)

    def __exit__(self, *_: object) -> None:
        dist.batch_isend_irecv = self.whole


def sent(rank: int, world: int) -> dict[str, list[int]]:
    """Bytes sent in forward and backward, and by formula."""
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        *arrays, dy = drawn((4, 2, 8, 8), dtype)
        mine = [held(x, world, rank) for x in arrays]
        with Sent() as meter:
            gradients(ring_attention, mine, held(dy, world, rank))
        sizes = {"ring": world, "batch": 2, "held": TOKENS // world, "kv_heads": 2, "features": 16}
        found[str(dtype)] = [meter.bytes, ring_bytes(**sizes, itemsize=dtype.itemsize, wide=max(4, dtype.itemsize))]
    return found
