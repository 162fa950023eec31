"""What the ranks run for the tensor- and sequence-parallel MLP: errors against one process, counts, sizes. See tests/ranks.py.

Every rank makes the whole problem from a seed, keeps its part of the features and of the tokens, and compares what it gets
with its part of what the untiled MLP gives on one process.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, Self
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shared_specs import Tiling
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.mlp.costs import MLPShape
from shared_specs.mlp.sequence_costs import sequence_peak_bytes
from tests.core.torch_counting import FACTORS, GemmFlop, LiveBytes
from tests.loss.ranks_torch_loss import distance, draw, group_of
from tests.mlp.ranks_torch_engines import Collectives, full
from tiled_torch import tiled_mlp
from tiled_torch.collectives.failures import run_collective
from tiled_torch.collectives.gathered_tokens import GatheredRows
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.transport import Pending
from tiled_torch.mlp import steps_onednn
from tiled_torch.parallel import tensor_parallel_mlp

HIDDEN, FEATURES, OUT = 6, 16, 5
PLACEMENTS = {"w_gate": 0, "w_up": 0, "w_down": 1, "b_gate": 0, "b_up": 0, "b_down": None}


class LiveGathered(TorchDispatchMode):
    """How many elements of gathered shards are alive at once, and in how many pieces: outputs of all-gathers of floats.

    While it is on, every wait goes on until gloo's thread has let go of the buffers, which on a busy machine is later
    than the end of the collective.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.peak_elements = self.pieces = self.peak_pieces = 0

    def __enter__(self) -> Self:
        self.wait = Pending.wait
        Pending.wait = _wait_until_released  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Pending.wait = self.wait  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func.__name__ and args[0].is_floating_point():
            storage = args[0].untyped_storage()
            size = storage.nbytes() // args[0].element_size()
            self.elements, self.pieces = self.elements + size, self.pieces + 1
            self.peak_elements = max(self.peak_elements, self.elements)
            self.peak_pieces = max(self.peak_pieces, self.pieces)
            weakref.finalize(storage, self._gone, size)
        return func(*args, **(kwargs or {}))

    def _gone(self, size: int) -> None:
        self.elements, self.pieces = self.elements - size, self.pieces - 1


def _wait_until_released(pending: Pending) -> Tensor:
    sent, name = pending.keep, pending.name
    if pending.work is not None:
        run_collective(pending.over, name, pending.work.wait)
    users = 0 if sent is None else sent._use_count()
    pending.work = pending.keep = None
    found = pending.finish()
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        let_go = sent is None or sent._use_count() < max(users, 2)
        if let_go and (name != "all-gather" or found._use_count() == 1):
            break
        time.sleep(0.0005)
    return found


class UnderWay(TorchDispatchMode):
    """What is under way while matrix products are computed: how many gathers of floats had arrived, how many had started
    and had not been waited for, and how many reduce-scatters; once for all products of which that is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = 0
        self.started = {"all-gather": 0, "reduce-scatter": 0}
        self.products: list[list[int]] = []

    def __enter__(self) -> Self:
        self.wait = wait = Pending.wait

        def noted(pending: Pending) -> Tensor:
            if pending.name in self.started and pending.keep is not None and pending.keep.is_floating_point():
                self.started[pending.name] -= 1
                self.arrived += pending.name == "all-gather"
            return wait(pending)

        Pending.wait = noted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Pending.wait = self.wait  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, now = func.__name__.split(".")[0], [self.arrived, *self.started.values()]
        if name in ("_allgather_base_", "_reduce_scatter_base_") and args[0].is_floating_point():
            self.started["all-gather" if "gather" in name else "reduce-scatter"] += 1
        if name in FACTORS and now not in self.products[-1:]:
            self.products.append(now)
        return func(*args, **(kwargs or {}))


def operands(tokens: int, *, gated: bool, bias: bool, features: int = FEATURES) -> dict[str, Tensor]:
    """x, every weight and every bias of the whole problem."""
    found = {"x": draw(tokens, HIDDEN, seed=0)}
    ups = ("gate", "up") if gated else ("up",)
    found |= {f"w_{name}": draw(features, HIDDEN, seed=seed) for seed, name in enumerate(ups, 1)}
    found["w_down"] = draw(OUT, features, seed=3) / 4
    if bias:
        found |= {f"b_{name}": draw(features, seed=seed) for seed, name in enumerate(ups, 4)}
        found["b_down"] = draw(OUT, seed=6)
    return found


def untiled(given: dict[str, Tensor], activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    up = F.linear(given["x"], given["w_up"], given.get("b_up"))
    h = activation(up)
    if "w_gate" in given:
        h = activation(F.linear(given["x"], given["w_gate"], given.get("b_gate"))) * up
    return F.linear(h, given["w_down"], given.get("b_down"))


def part_of(name: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    dim = PLACEMENTS[name]
    return tensor if dim is None else tensor.chunk(ranks, dim)[rank]


def call(given: dict[str, Any], **options: Any) -> Tensor:
    biases = {name[2:]: tensor for name, tensor in given.items() if name.startswith("b_")}
    return tensor_parallel_mlp(
        given["x"], given.get("w_gate"), given["w_up"], given["w_down"], biases=biases or None, **options
    )


def mlp(
    rank: int,
    world: int,
    group: str = "default",
    sequence_parallel: bool = True,
    sizes: tuple[int, ...] | None = None,
    tokens: int = 32,
    gated: bool = True,
    bias: bool = True,
    num_shards: int | None = 4,
    shard_tokens: int | None = None,
    keep: float = 0.0,
    frozen: tuple[str, ...] = (),
    checkpointed: bool = False,
    main_grad: bool = False,
    layout: str = "plain",
    batched: bool = False,
    compute: str = "float64",
) -> dict[str, Any] | None:
    """y, dx and every weight's gradient against the untiled MLP; collectives, FLOP and live gathered shards."""
    world_rank, (over, rank, ranks) = rank, group_of(group, rank, world)
    if rank < 0:
        return None
    counts = list(sizes) if sizes else [tokens // ranks] * ranks
    start = sum(counts[:rank])
    rows = slice(start, start + counts[rank]) if sequence_parallel else slice(None)
    dtype = getattr(torch, compute)
    stored = {name: a.to(dtype) for name, a in operands(sum(counts), gated=gated, bias=bias).items()}
    upstream = draw(sum(counts), OUT, seed=7).to(dtype)

    wide = {name: a.double().clone().requires_grad_(name not in frozen) for name, a in stored.items()}
    expected = untiled(wide)
    expected.backward(upstream.double())

    mine: dict[str, Any] = {"x": stored["x"][rows].clone()}
    mesh = None
    if layout == "dtensor":
        mesh, over = init_device_mesh("cpu", (world,)), None
    for name, whole in stored.items():
        if name == "x":
            continue
        if mesh is not None:
            dim = PLACEMENTS[name]
            mine[name] = distribute_tensor(whole, mesh, [Replicate() if dim is None else Shard(dim)])
        else:
            mine[name] = part_of(name, whole, rank, ranks).clone()
    if batched:
        mine["x"] = mine["x"].view(2, -1, HIDDEN)
    for name, a in mine.items():
        a.requires_grad_(name not in frozen)
        if main_grad and name != "x" and name not in frozen:
            a.main_grad = torch.full_like(a.detach(), 2.0, dtype=torch.float64)
            a.grad_added_to_main_grad = False
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": over, "split_sizes": sizes}
    tiling = Tiling(num_shards=num_shards, shard_tokens=shard_tokens, keep=keep)
    meters = GemmFlop(), Collectives(), LiveGathered()
    with meters[0] as flop, meters[1] as collectives, meters[2] as live:
        if checkpointed:
            y = checkpoint(lambda x: call({**mine, "x": x}, tiling=tiling, **options), mine["x"], use_reentrant=False)
        else:
            y = call(mine, tiling=tiling, **options)
        forward = {name: collectives.counts[name] for name in collectives.counts}
        y.backward(upstream[rows].view(y.shape))
    errors = {"y": distance(y.detach().double().reshape(-1, OUT), expected[rows])}
    for name, a in mine.items():
        if name in frozen:
            assert a.grad is None
            continue
        grad = full(a.main_grad) - 2.0 if main_grad and name != "x" else full(a.grad)
        truth = wide[name].grad
        if name == "x":
            grad, truth = grad.reshape(-1, HIDDEN), truth[rows]
        elif mesh is None:
            truth = part_of(name, truth, rank, ranks)
        errors[f"d{name}"] = distance(grad.double(), truth)
    return {
        "errors": errors,
        "baseline": baseline(stored, upstream, wide, expected, rows, rank, ranks) if compute != "float64" else None,
        "forward": forward,
        "collectives": dict(collectives.counts),
        "flop": flop.flop,
        "live": [live.peak_pieces, live.peak_elements, live.pieces],
        "flags": all(getattr(a, "grad_added_to_main_grad", True) for a in mine.values()),
        "dtensors": all(type(a.grad) is type(a) or a.grad is None for a in mine.values() if mesh is not None),
        "rank": world_rank,
    }


def baseline(
    stored: dict[str, Tensor],
    upstream: Tensor,
    wide: dict[str, Tensor],
    expected: Tensor,
    rows: slice,
    rank: int,
    ranks: int,
) -> dict[str, float]:
    """Errors of the untiled MLP in the stored dtype, of this rank's parts."""
    plain = {name: a.clone().requires_grad_() for name, a in stored.items()}
    y = untiled(plain)
    y.backward(upstream)
    errors = {"y": distance(y.detach().double()[rows], expected[rows])}
    for name, a in plain.items():
        parts = [t[rows] if name == "x" else part_of(name, t, rank, ranks) for t in (a.grad, wide[name].grad)]
        errors[f"d{name}"] = distance(parts[0].double(), parts[1])
    return errors


def peaks(
    rank: int,
    world: int,
    dtype: str = "float32",
    gated: bool = True,
    shard_tokens: int = 64,
    tokens: int = 512,
    hidden: int = 64,
    features: int = 256,
    onednn: bool = False,
) -> dict[str, Any]:
    """Peak bytes of forward and backward above results, beside the formula; the largest storage of either.

    onednn: by its products, on any processor and at these sizes.
    """
    if onednn:
        made, product = [], steps_onednn.product  # a Mock would keep what it was called with

        def counted(*given: Any, **options: Any) -> Tensor:
            made.append(1)
            return product(*given, **options)

        with mock.patch.multiple(steps_onednn, SMALLEST=0, pays_here=lambda: True, product=counted):
            found = peaks(rank, world, dtype, gated, shard_tokens, tokens, hidden, features)
        return found | {"products": len(made)}
    kind = getattr(torch, dtype)
    local = features // world
    x = torch.randn(tokens, hidden, dtype=kind, requires_grad=True)
    shapes = [(local, hidden)] * (2 if gated else 1) + [(hidden, local)]
    weights = [torch.randn(shape, dtype=kind, requires_grad=True) for shape in shapes]
    matrices = weights if gated else [None, *weights]
    tiling = Tiling(shard_tokens=shard_tokens)
    with LiveBytes() as forward:
        y = tensor_parallel_mlp(x, *matrices, sequence_parallel=True, tiling=tiling)  # type: ignore[arg-type]
    upstream = torch.ones_like(y)
    with LiveBytes() as backward, LiveGathered() as live:
        found = torch.autograd.grad(y, [x, *weights], upstream)
    shape = MLPShape(
        tokens=tokens * world, hidden=hidden, intermediate=local, gated=gated, itemsize=kind.itemsize,
        weight_itemsize=kind.itemsize,
    )  # fmt: skip
    itemsize = kind.itemsize
    return {
        "forward": forward.peak - y.numel() * itemsize,
        # Sums of 16-bit gradients are float32, which the formula counts; the gradients themselves come after the peak.
        "backward": backward.peak - sum(a.numel() * itemsize for a in (found if itemsize >= 4 else found[:1])),
        "formula": sequence_peak_bytes(shape, SequencePlan((tokens,) * world, shard_tokens)),
        "largest": max(forward.largest, backward.largest) // itemsize,
        "live": [live.peak_pieces, live.peak_elements],
    }


def forward_only(rank: int, world: int, keep: float = 0.0, no_grad: bool = True, group: str = "default") -> Any:
    """A forward: collectives, and gathered shards alive at once."""
    over, rank, ranks = group_of(group, rank, world)
    given = operands(32, gated=True, bias=True)
    rows = slice(rank * 32 // ranks, (rank + 1) * 32 // ranks)
    mine = {name: a[rows] if name == "x" else part_of(name, a, rank, ranks) for name, a in given.items()}
    with torch.set_grad_enabled(not no_grad), Collectives() as collectives, LiveGathered() as live, LiveBytes() as size:
        y = call(mine, sequence_parallel=True, tiling=Tiling(num_shards=4, keep=keep), group=over)
    return {
        "error": distance(y, untiled(given)[rows]),
        "collectives": dict(collectives.counts),
        "live": [live.peak_pieces, live.peak_elements],
        "largest": size.largest // 8,
    }


def held(rank: int, world: int) -> list[int]:
    """What the meter sees of a caller that drops each gathered shard, and of one that holds on to the last."""
    plan, found = plan_sequence("held", (8,) * world, num_shards=4), []
    for hold in (False, True):
        with LiveGathered() as live:
            rows = GatheredRows(rank_group("held"), plan, draw(8, HIDDEN, seed=0))
            for _, _, arrived in rows.shards(torch.float64):
                last = arrived if hold else None
                del arrived
            del last
        found.append(live.peak_pieces)
    return found


def under_way(rank: int, world: int, keep: float = 0.0) -> dict[str, list[list[int]]]:
    """What is under way during the products of three shards, forward and backward."""
    given = operands(32, gated=True, bias=False)
    rows = slice(rank * 32 // world, (rank + 1) * 32 // world)
    mine = {name: a[rows] if name == "x" else part_of(name, a, rank, world) for name, a in given.items()}
    mine = {name: a.clone().requires_grad_() for name, a in mine.items()}
    with UnderWay() as forward:
        y = call(mine, sequence_parallel=True, num_shards=3, keep=keep)
    with UnderWay() as backward:
        y.backward(torch.ones_like(y))
    return {"forward": forward.products, "backward": backward.products}


def one_rank(rank: int, world: int) -> dict[str, Any]:
    """Every rank in a group of its own: no communication, and exactly `tiled_mlp`."""
    groups = [dist.new_group([one]) for one in range(world)]
    given = operands(12, gated=True, bias=True)
    biases = {name[2:]: given[name] for name in given if name.startswith("b_")}
    expected = tiled_mlp(given["x"], given["w_gate"], given["w_up"], given["w_down"], biases=biases, num_shards=3)
    with Collectives() as collectives:
        found = [
            call(given, group=groups[rank], num_shards=3, sequence_parallel=split, split_sizes=[12] if split else None)
            for split in (False, True)
        ]
    return {"same": all(torch.equal(y, expected) for y in found), "collectives": sum(collectives.counts.values())}


def other_dtypes(rank: int, world: int, sequence_parallel: bool) -> dict[str, Any]:
    """float32 weights under bfloat16 autocast."""
    given = {name: a.float() for name, a in operands(32, gated=True, bias=True).items()}
    wide = {name: a.double().requires_grad_() for name, a in given.items()}
    upstream = draw(32, OUT, seed=7).bfloat16()
    expected = untiled(wide)
    expected.backward(upstream.double())
    plain = {name: a.clone().requires_grad_() for name, a in given.items()}
    rows = slice(rank * 32 // world, (rank + 1) * 32 // world) if sequence_parallel else slice(None)
    mine = {n: (a[rows] if n == "x" else part_of(n, a, rank, world)).clone().requires_grad_() for n, a in given.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        untiled(plain).backward(upstream)
        y = call(mine, sequence_parallel=sequence_parallel, num_shards=4)
    y.backward(upstream[rows])
    errors = {}
    for name, a in mine.items():
        truth = wide[name].grad[rows] if name == "x" else part_of(name, wide[name].grad, rank, world)
        theirs = plain[name].grad[rows] if name == "x" else part_of(name, plain[name].grad, rank, world)
        errors[name] = [distance(a.grad.double(), truth), distance(theirs.double(), truth)]
    return {"dtypes": [str(y.dtype), *sorted({str(a.grad.dtype) for a in mine.values()})], "errors": errors}
