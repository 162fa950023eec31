"""What the ranks run for the vocabulary-parallel loss whose tokens are split over ranks as well. See tests/ranks.py.

Every rank makes the whole problem from a seed, keeps its part of the vocabulary and of the tokens, and compares what it gets
with its part of the result that one process computes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shared_specs import LossOptions, Tiling
from shared_specs.collectives.partitions import vocab_range
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.loss.costs import LossShape
from shared_specs.loss.sequence_costs import sequence_loss_peak_bytes
from tests.core.torch_counting import GemmFlop, LiveBytes
from tests.loss.ranks_torch_loss import HIDDEN, distance, draw, group_of, labels, message_of, named
from tests.mlp.ranks_torch_engines import Collectives
from tests.mlp.ranks_torch_tensor_mlp import LiveGathered, UnderWay
from tiled_torch import tiled_linear_cross_entropy
from tiled_torch.parallel import vocab_parallel_linear_cross_entropy


def combined(results: dict[str, Tensor], rows: slice, tokens: int) -> Tensor:
    """One number from all differentiable results; elements of results per token are weighted by their place among all."""
    parts = []
    for i, r in enumerate(results.values()):
        if r.requires_grad:
            weights = torch.linspace(-1 - i, 2, tokens, dtype=r.dtype)[rows] if r.dim() else r.new_ones(())
            parts.append((r.reshape(weights.shape) * weights).sum())
    return torch.stack(parts).sum() if parts else torch.zeros(())


def head(
    rank: int,
    world: int,
    vocab: int = 103,
    group: str = "default",
    sizes: tuple[int, ...] | None = None,
    tokens: int = 64,
    frozen: tuple[str, ...] = (),
    class_weight: bool = False,
    num_shards: int | None = 4,
    shard_tokens: int | None = None,
    vocab_shards: int | None = None,
    bias: bool = True,
    outputs: tuple[str, ...] = (),
    layout: str = "range",
    twice: bool = False,
    checkpointed: bool = False,
    main_grad: bool = False,
    batched: bool = False,
    no_labels: bool = False,
    token_weight: bool = False,
    ignored: tuple[float, ...] | None = None,
    **options: Any,
) -> dict[str, Any] | None:
    """The fused head against `tiled_linear_cross_entropy` on one process. ignored: the share of every rank's labels that are;
    None: every fifth label.
    """
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    counts = list(sizes) if sizes else [tokens // ranks] * ranks
    total, first = sum(counts), sum(counts[:rank])
    rows = slice(first, first + counts[rank])
    x, weight, b = draw(total, HIDDEN, seed=0), draw(vocab, HIDDEN, seed=1), draw(vocab, seed=2)
    targets = labels(vocab, total)
    if no_labels:
        targets.fill_(-100)
    if ignored is not None:
        targets = ignoring(vocab, counts, ignored)
    weights = draw(vocab, seed=4).abs() if class_weight else None
    loss = LossOptions(class_weight=weights, outputs=tuple(outputs), **options)  # type: ignore[arg-type]
    tiling = Tiling(num_shards=num_shards, shard_tokens=shard_tokens, vocab_shards=vocab_shards)

    whole: dict[str, Any] = {"x": x.clone(), "weight": weight.clone()} | ({"bias": b.clone()} if bias else {})
    for name, leaf in whole.items():
        leaf.requires_grad_(name not in frozen)
    of_tokens: Any = draw(total, seed=5) if token_weight else None
    arguments: Any = {"loss": loss, "tiling": Tiling(num_shards=3), "token_weight": of_tokens}
    expected = named(
        tiled_linear_cross_entropy(whole["x"], whole["weight"], targets, bias=whole.get("bias"), **arguments)
    )
    reference = combined(expected, slice(None), total)
    if reference.requires_grad:
        reference.backward()

    start, stop = vocab_range(vocab, ranks, rank)
    given: dict[str, Any] = {"vocab_size": vocab, "group": over}
    mine: dict[str, Any] = {"x": x[rows].clone(), "weight": weight[start:stop].clone()}
    mine |= {"bias": b[start:stop].clone()} if bias else {}
    if layout == "dtensor":
        mesh, given = init_device_mesh("cpu", (world,)), {}
        size = -(-vocab // ranks)  # as torch.chunk
        start, stop = min(vocab, rank * size), min(vocab, (rank + 1) * size)
        mine |= {
            name: distribute_tensor(a, mesh, [Shard(0)])
            for name, a in (("weight", weight), ("bias", b))
            if name in mine
        }
    if batched:
        mine["x"] = mine["x"].view(2, -1, HIDDEN)
    for name, leaf in mine.items():
        leaf.requires_grad_(name not in frozen)
        if main_grad and name != "x":
            leaf.main_grad = torch.full_like(leaf.detach(), 2.0)
    local = targets[rows].view(mine["x"].shape[:-1])
    meters = Collectives(), LiveGathered(), LiveBytes(), GemmFlop()
    waits = Waits()

    def run(x: Tensor) -> Any:
        return vocab_parallel_linear_cross_entropy(
            x, mine["weight"], local, bias=mine.get("bias"), loss=loss, tiling=tiling, sequence_parallel=True,
            split_sizes=sizes, token_weight=of_tokens if of_tokens is None else of_tokens[rows].view(local.shape), **given,
        )  # fmt: skip

    with meters[0] as collectives, meters[1] as gathered, meters[2] as live, meters[3] as flop, waits:
        found = named(checkpoint(run, mine["x"], use_reentrant=False) if checkpointed else run(mine["x"]))
        value = combined(found, rows, total)
        if value.requires_grad:
            value.backward(retain_graph=twice)
        if twice:
            value.backward()
    errors = {
        name: distance(a.detach().reshape(part(value, rows).shape), part(value, rows))
        for name, value in expected.items()
        for a in [found[name]]
    }
    for name, leaf in mine.items():
        if name in frozen:
            assert leaf.grad is None
            continue
        grad = leaf.main_grad - 2.0 if main_grad and name != "x" else leaf.grad
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        truth = whole[name].grad[rows if name == "x" else slice(start, stop)]
        errors[f"d{name}"] = distance(grad.reshape(truth.shape), (1 + twice) * truth)
    return {
        "errors": errors,
        "collectives": dict(collectives.counts),
        "gathered": [gathered.peak_pieces, gathered.peak_elements, gathered.pieces],
        "largest": live.largest // 8,
        "entries": stop - start,
        "flop": flop.flop,
        "waits": waits.count,
    }


def ignoring(vocab: int, counts: list[int], shares: tuple[float, ...]) -> Tensor:
    """Labels of all ranks, of which this share of each rank's, drawn among them, is ignored."""
    targets, at = labels(vocab, sum(counts)).clamp(min=0), torch.Generator().manual_seed(7)
    for part, share in zip(targets.split(counts), shares, strict=True):
        part[torch.randperm(len(part), generator=at)[: round(share * len(part))]] = -100
    return targets


class Waits(TorchDispatchMode):
    """How often numbers of a tensor are read that a device would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default)
        return func(*args, **(kwargs or {}))


def part(value: Tensor, rows: slice) -> Tensor:
    """What a rank has of a result of one process, [tokens, ...] or of all of them."""
    return value.detach()[rows] if value.dim() else value.detach().reshape(-1)


def peaks(
    rank: int, world: int, hidden: int = 64, tokens: int = 128, shard_tokens: int = 32, share: float = 0.0
) -> dict[str, Any]:
    """Peak bytes of the loss with its gradients above these, beside the formula; the largest storage. share: of the labels that
    are ignored.
    """
    entries = 1024
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(entries, hidden, requires_grad=True)
    targets = ignoring(entries * world, [tokens], (share,))
    with LiveBytes() as live, LiveGathered() as gathered:
        value: Any = vocab_parallel_linear_cross_entropy(
            x, weight, targets, tiling=Tiling(shard_tokens=shard_tokens), sequence_parallel=True
        )
    shape = LossShape(tokens=tokens * world, hidden=hidden, vocab=entries, copied=True)
    peak = live.peak - 4 * (x.numel() + weight.numel())
    value.backward()
    return {
        "peak": peak,
        "formula": sequence_loss_peak_bytes(shape, SequencePlan((tokens,) * world, shard_tokens)),
        "gathered": [gathered.peak_pieces, gathered.peak_elements],
    }


def under_way(rank: int, world: int) -> dict[str, list[list[int]]]:
    """What is under way during the products of three shards: of the mean with its gradients, and of losses per token."""
    x, weight = draw(12, HIDDEN, seed=rank).requires_grad_(), draw(20, HIDDEN, seed=world + rank).requires_grad_()
    found = {}
    for reduction in ("mean", "none"):
        with UnderWay() as forward:
            value: Any = vocab_parallel_linear_cross_entropy(
                x,
                weight,
                labels(20 * world, 12).clamp(min=0),
                loss=LossOptions(reduction=reduction),  # type: ignore[arg-type]
                num_shards=3,
                sequence_parallel=True,
            )
        with UnderWay() as backward:
            value.sum().backward()
        found |= {reduction: forward.products, f"{reduction} backward": backward.products}
    return found


def same_everywhere(rank: int, world: int) -> list[float]:
    """The scalars of this rank."""
    vocab = 41
    start, stop = vocab_range(vocab, world, rank)
    x, targets = draw(12 * world, HIDDEN, seed=0), labels(vocab, 12 * world)
    rows = slice(12 * rank, 12 * (rank + 1))
    result: Any = vocab_parallel_linear_cross_entropy(
        x[rows],
        draw(vocab, HIDDEN, seed=1)[start:stop],
        targets[rows],
        loss=LossOptions(outputs=("accuracy",)),
        num_shards=3,
        vocab_size=vocab,
        sequence_parallel=True,
    )
    return [float(result.loss), float(result.accuracy)]


def bfloat16_head(
    rank: int, world: int, reduction: Any = "mean", group: str = "default", sizes: tuple[int, ...] | None = None
) -> dict[str, list[float]] | None:
    """Errors of the fused head and of the untiled one, both in bfloat16 against float64."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    vocab, counts = 203, sizes or (64 // ranks,) * ranks
    total, start = sum(counts), sum(counts[:rank])
    arrays = [draw(total, 16, seed=0), draw(vocab, 16, seed=1) / 4, draw(vocab, seed=2)]
    stored = [a.bfloat16().requires_grad_() for a in arrays]
    wide = [a.detach().double().requires_grad_() for a in stored]
    targets = labels(vocab, total)
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), targets, reduction=reduction).sum(), wide)
    plain = torch.autograd.grad(F.cross_entropy(F.linear(*stored), targets, reduction=reduction).sum(), stored)
    entries = slice(*vocab_range(vocab, ranks, rank))
    rows = slice(start, start + counts[rank])
    parts = [rows, entries, entries]
    x, weight, bias = (a.detach()[at].requires_grad_() for a, at in zip(stored, parts, strict=True))
    value: Any = vocab_parallel_linear_cross_entropy(
        x,
        weight,
        targets[rows],
        bias=bias,
        loss=LossOptions(reduction=reduction),
        num_shards=4,
        vocab_size=vocab,
        sequence_parallel=True,
        group=over,
        split_sizes=sizes,
    )
    found = torch.autograd.grad(value.sum(), [x, weight, bias])
    every = zip(("dx", "dweight", "dbias"), found, plain, truth, parts, strict=True)
    return {
        name: [distance(ours.double(), exact[at]), distance(theirs[at].double(), exact[at])]
        for name, ours, theirs, exact, at in every
    }


def refused(rank: int, world: int, what: str) -> str:
    """The message that this rank gets for a wrong call, of which only one may be wrong."""
    x, targets, weight = draw(6, HIDDEN, seed=0), labels(10, 6), draw(10, HIDDEN, seed=1)[:5]
    options: dict[str, Any] = {"sequence_parallel": True}
    match what:
        case "sequence_parallel":
            options = {"sequence_parallel": "yes"}
        case "split_sizes alone":
            options = {"split_sizes": (6, 6)}
        case "split_sizes length":
            options["split_sizes"] = (6,)
        case "split_sizes of another":
            options["split_sizes"] = (5, 5)
        case "target of one rank":
            targets = targets.clone()
            targets[1] = 10 if rank else 3
        case "targets of all":
            targets = labels(10, 12)
    return message_of(lambda: vocab_parallel_linear_cross_entropy(x, weight, targets, **options))
