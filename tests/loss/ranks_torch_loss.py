"""What the ranks run for the losses: errors against one process, counts of collectives, sizes. See tests/ranks.py.

Every rank makes the whole problem from a seed, keeps its part of the vocabulary, and compares what it gets with its part
of the result that one process computes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shared_specs import LossOptions, LossResult, SpecError, Tiling
from shared_specs.collectives.partitions import vocab_range
from shared_specs.loss.costs import LossShape, loss_peak_bytes
from shared_specs.shards import plan_tokens
from tests.core.torch_counting import LiveBytes
from tests.mlp.ranks_torch_engines import Collectives, spread
from tiled_torch import tiled_linear_cross_entropy
from tiled_torch.parallel import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

HIDDEN, LENGTH = 4, 32
OUTPUTS = ("log_probs", "lse", "entropy")


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(vocab: int, *dims: int, every: int = 5) -> Tensor:
    """Every fifth is ignored; where few are, all rows are run."""
    targets = torch.randint(vocab, dims, generator=torch.Generator().manual_seed(3))
    targets.view(-1)[::every] = -100
    return targets


def my_rows(partition: str, vocab: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """(start, stop) of this rank's entries and how many rows it holds, padding included."""
    if partition == "padded":
        size = -(-vocab // ranks)
        return min(vocab, rank * size), min(vocab, (rank + 1) * size), size
    if partition == "dtensor":
        size = -(-vocab // ranks)  # as torch.chunk
        start, stop = min(vocab, rank * size), min(vocab, (rank + 1) * size)
        return start, stop, stop - start
    start, stop = vocab_range(vocab, ranks, rank)
    return start, stop, stop - start


def padded(whole: Tensor, start: int, stop: int, rows: int) -> Tensor:
    """This rank's rows; NaN in the padding, which nothing may read."""
    part = torch.full((rows, *whole.shape[1:]), torch.nan, dtype=whole.dtype)
    part[: stop - start] = whole[start:stop]
    return part


def distance(found: Tensor | None, expected: Tensor) -> float:
    """Relative L2 distance; 0 where both are empty or zero, infinite where something is missing or not finite."""
    if found is None or found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(found, expected) else float("inf")
    size, gap = float(expected.detach().norm()), float((found - expected).detach().norm())
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def weighted(results: dict[str, Tensor]) -> Tensor:
    """One number from all differentiable results, each element with a weight of its own."""
    parts = [
        (r * torch.linspace(-1 - i, 2, r.numel(), dtype=r.dtype).view(r.shape)).sum()
        for i, r in enumerate(results.values())
        if r.requires_grad
    ]
    return torch.stack(parts).sum()


def named(result: Any) -> dict[str, Tensor]:
    found = result._asdict() if isinstance(result, LossResult) else {"loss": result}
    if found.get("top_logprobs") is not None:
        found["top values"], found["top indices"] = found.pop("top_logprobs")
    return {name: value for name, value in found.items() if value is not None}


def group_of(kind: str, rank: int, world: int) -> tuple[Any, int, int]:
    """(group, rank in it, its size): the default one, a mesh, or a strict subset of the world."""
    match kind:
        case "mesh":
            return init_device_mesh("cpu", (world,)), rank, world
        case "mesh dim":  # two groups of two, side by side
            return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "vocab"))["vocab"], rank % 2, 2
        case "subset":  # ranks 1 and 3; the others stay away
            group = dist.new_group([1, 3])
            return group, [1, 3].index(rank) if rank in (1, 3) else -1, 2
    return None, rank, world


def head(
    rank: int,
    world: int,
    vocab: int = 203,
    partition: str = "range",
    group: str = "default",
    tokens: int = 64,
    frozen: tuple[str, ...] = (),
    class_weight: bool = False,
    num_shards: int | None = 8,
    memory_budget: int | None = None,
    vocab_shards: int | None = None,
    bias: bool = True,
    outputs: tuple[str, ...] = (),
    twice: bool = False,
    main_grad: bool = False,
    every: int = 5,
    token_weight: bool = False,
    **options: Any,
) -> dict[str, Any] | None:
    """The fused head against `tiled_linear_cross_entropy` on one process."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    x, weight, b = draw(2, tokens // 2, HIDDEN, seed=0), draw(vocab, HIDDEN, seed=1), draw(vocab, seed=2)
    targets = labels(vocab, 2, tokens // 2, every=every)
    weights = draw(vocab, seed=4).abs() if class_weight else None
    of_tokens: Any = {"token_weight": draw(2, tokens // 2, seed=5)} if token_weight else {}
    loss = LossOptions(class_weight=weights, outputs=tuple(outputs), **options)  # type: ignore[arg-type]
    tiling = Tiling(num_shards=num_shards, memory_budget=memory_budget, vocab_shards=vocab_shards)

    whole = {"x": x.clone(), "weight": weight.clone(), "bias": b.clone() if bias else None}
    for name, leaf in whole.items():
        if leaf is not None:
            leaf.requires_grad_(name not in frozen)
    arguments: Any = {"loss": loss, "tiling": tiling} | of_tokens
    expected = named(tiled_linear_cross_entropy(whole["x"], whole["weight"], targets, bias=whole["bias"], **arguments))  # type: ignore[arg-type]
    weighted(expected).backward()

    start, stop, rows = my_rows(partition, vocab, ranks, rank)
    given: dict[str, Any] = {"vocab_size": None if partition in ("equal", "dtensor") else vocab, "group": over}
    mine: dict[str, Any] = {"x": x.clone()}
    if partition == "dtensor":
        mesh = init_device_mesh("cpu", (world,))
        given["group"] = None
        mine |= {"weight": distribute_tensor(weight, mesh, [Shard(0)]), "bias": distribute_tensor(b, mesh, [Shard(0)])}
    else:
        mine |= {"weight": padded(weight, start, stop, rows), "bias": padded(b, start, stop, rows)}
    if not bias:
        mine["bias"] = None
    for name, leaf in mine.items():
        if leaf is not None:
            leaf.requires_grad_(name not in frozen)
            if main_grad and name != "x":
                leaf.main_grad = torch.full_like(leaf.detach(), 2.0)
                leaf.grad_added_to_main_grad = False
    with LiveBytes() as live, Collectives() as collectives:
        result = vocab_parallel_linear_cross_entropy(
            mine["x"], mine["weight"], targets, bias=mine["bias"], **arguments, **given
        )
        found = named(result)
        weighted(found).backward(retain_graph=twice)
        if twice:
            weighted(found).backward()
    errors = {name: distance(found.get(name), value) for name, value in expected.items()}
    padding = 0.0
    for name, leaf in mine.items():
        if leaf is None or name in frozen:
            continue
        grad, truth = leaf.grad, whole[name].grad  # type: ignore[union-attr]
        if main_grad and name != "x":
            grad = leaf.main_grad - 2.0
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        if name != "x":
            padding = max(padding, float(grad[stop - start :].abs().sum()))
            grad, truth = grad[: stop - start], truth[start:stop]  # type: ignore[index]
        errors[f"d{name}"] = distance(grad, (1 + twice) * truth)  # type: ignore[operator]
    return {
        "errors": errors,
        "padding": padding,
        "untouched": all(leaf is None or leaf.grad is None for name, leaf in mine.items() if name in frozen),
        "collectives": sum(collectives.counts.values()),
        "largest": live.largest // 8,
        "entries": rows,
        "flags": all(getattr(leaf, "grad_added_to_main_grad", True) for leaf in mine.values()),
    }


def peaks(rank: int, world: int, dtype: str, autocast: bool, vocab_shards: int, reduction: Any) -> dict[str, int]:
    """Peak bytes of the loss and of its backward above gradients, beside the formula."""
    kind, tokens, hidden, entries, t = getattr(torch, dtype), 512, 64, 4096, 128
    x = torch.randn(tokens, hidden, dtype=kind, requires_grad=True)
    weight = torch.randn(entries, hidden, dtype=kind, requires_grad=True)
    tiling, loss = Tiling(shard_tokens=t, vocab_shards=vocab_shards), LossOptions(reduction=reduction)
    targets = labels(entries * world, tokens, every=40)
    with LiveBytes() as forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value: Any = vocab_parallel_linear_cross_entropy(x, weight, targets, loss=loss, tiling=tiling)
    total = value.sum()
    with LiveBytes() as backward:
        torch.autograd.grad(total, [x, weight])
    itemsize = 2 if autocast else kind.itemsize
    shape = LossShape(
        tokens=tokens, hidden=hidden, vocab=entries, vocab_shards=vocab_shards, itemsize=itemsize,
        weight_itemsize=kind.itemsize, copied=reduction != "none",
    )  # fmt: skip
    alive = x.numel() * kind.itemsize + (weight.numel() * 4 if kind.itemsize == 4 else 0)
    passes = [forward.peak, backward.peak]
    work, rest = passes if reduction != "none" else passes[::-1]
    return {
        "peak": work - alive,
        "other pass": rest,
        "formula": loss_peak_bytes(shape, plan_tokens(tokens, shard_tokens=t)),
    }


def logits(
    rank: int,
    world: int,
    vocab: int = 23,
    partition: str = "range",
    group: str = "default",
    label_smoothing: float = 0.0,
    dtype: str = "float64",
) -> dict[str, Any] | None:
    """Given logits against torch.nn.functional.cross_entropy on one process."""
    over, rank, ranks = group_of(group, rank, world)
    if rank < 0:
        return None
    kind = getattr(torch, dtype)
    whole = (3 * draw(3, 7, vocab, seed=0)).to(kind)
    targets, upstream = labels(vocab, 3, 7), draw(3, 7, seed=5)
    start, stop, rows = my_rows(partition, vocab, ranks, rank)
    wide = whole.double().requires_grad_()
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing}
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), **options).view(3, 7)
    (truth,) = torch.autograd.grad(expected, [wide], upstream)
    plain = whole.clone().requires_grad_()
    rounded = F.cross_entropy(plain.flatten(0, 1), targets.flatten(), **options).view(3, 7)
    (baseline,) = torch.autograd.grad(rounded, [plain], upstream.to(rounded.dtype))

    mine = padded(whole.movedim(-1, 0), start, stop, rows).movedim(0, -1).requires_grad_()
    before = mine.detach().clone()
    arguments: dict[str, Any] = {"vocab_size": None if partition == "equal" else vocab, "group": over}
    given: Any = mine
    if partition == "dtensor":
        given = DTensor.from_local(
            mine, init_device_mesh("cpu", (ranks,)), [Shard(-1)], shape=whole.shape, stride=whole.stride()
        )
        arguments = {}
    with Collectives() as forward:
        found = vocab_parallel_cross_entropy(given, targets, label_smoothing, **arguments)
    with Collectives() as backward:
        (grad,) = torch.autograd.grad(found, [mine], upstream.to(found.dtype))
    return {
        "dtypes": [str(found.dtype), str(grad.dtype)],
        "errors": {
            "loss": distance(found.double(), expected),
            "dlogits": distance(grad[..., : stop - start].double(), truth[..., start:stop]),
        },
        "baseline": {
            "loss": distance(rounded.double(), expected),
            "dlogits": distance(baseline[..., start:stop].double(), truth[..., start:stop]),
        },
        "padding": float(grad[..., stop - start :].abs().sum()),
        "unchanged": bool(torch.equal(before.nan_to_num(), mine.detach().nan_to_num())),
        "collectives": [sum(forward.counts.values()), sum(backward.counts.values())],
    }


def smoothed_as_megatron(rank: int, world: int) -> list[float]:
    """Errors of losses and gradients where each wrong entry of V gets 0.1 / (V - 1), from the label_smoothing that says so."""
    vocab, targets = 10, labels(10, 6)
    whole = draw(6, vocab, seed=0).requires_grad_()
    log_probs = whole.log_softmax(-1)
    right = log_probs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    expected = -(0.9 * right + 0.1 / (vocab - 1) * (log_probs.sum(-1) - right)) * (targets != -100)
    dy = draw(6, seed=1)
    expected.backward(dy)
    start, stop = vocab * rank // world, vocab * (rank + 1) // world
    mine = whole.detach()[:, start:stop].clone().requires_grad_()
    found = vocab_parallel_cross_entropy(mine, targets, 0.1 * vocab / (vocab - 1))
    found.backward(dy)
    return [distance(found, expected.detach()), distance(mine.grad, whole.grad[:, start:stop])]  # type: ignore[index]


def bfloat16_head(rank: int, world: int, reduction: Any) -> dict[str, dict[str, float]]:
    """Errors of the fused head and of the untiled one, both in bfloat16 against float64."""
    vocab = 203
    arrays = [draw(64, 16, seed=0), draw(vocab, 16, seed=1) / 4, draw(vocab, seed=2)]
    stored = [a.bfloat16().requires_grad_() for a in arrays]
    wide = [a.detach().double().requires_grad_() for a in stored]
    targets = labels(vocab, 64)
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*wide), targets, reduction=reduction).sum(), wide)
    plain = torch.autograd.grad(F.cross_entropy(F.linear(*stored), targets, reduction=reduction).sum(), stored)
    start, stop = vocab_range(vocab, world, rank)
    parts = [slice(None), slice(start, stop), slice(start, stop)]
    x, weight, bias = (a.detach()[part].requires_grad_() for a, part in zip(stored, parts, strict=True))
    value = vocab_parallel_linear_cross_entropy(
        x, weight, targets, bias=bias, loss=LossOptions(reduction=reduction), num_shards=8, vocab_size=vocab
    )
    found = torch.autograd.grad(value.sum(), [x, weight, bias])  # type: ignore[union-attr]
    errors = {}
    for name, ours, theirs, exact, part in zip(("dx", "dweight", "dbias"), found, plain, truth, parts, strict=True):
        errors[name] = {
            "ours": distance(ours.double(), exact[part]),
            "untiled": distance(theirs[part].double(), exact[part]),
        }
    return errors


def same_everywhere(rank: int, world: int) -> float:
    """How far this rank's results and dx are from rank 0's."""
    vocab = 41
    start, stop = vocab_range(vocab, world, rank)
    x = draw(12, HIDDEN, seed=0).requires_grad_()
    loss = LossOptions(reduction="none", outputs=OUTPUTS)
    weight = draw(vocab, HIDDEN, seed=1)[start:stop]
    found = named(
        vocab_parallel_linear_cross_entropy(x, weight, labels(vocab, 12), loss=loss, num_shards=3, vocab_size=vocab)
    )
    weighted(found).backward()
    return spread([*(value.detach() for value in found.values()), x.grad])  # type: ignore[list-item]


def refused(rank: int, world: int, what: str) -> str:
    """The message that this rank gets for a wrong call."""
    x, targets = draw(6, HIDDEN, seed=0), labels(10, 6)
    weight, bias = draw(10, HIDDEN, seed=1)[:4], draw(10, seed=2)[:4]
    given: dict[str, Any] = {}
    match what:
        case "partition":
            given = {"vocab_size": 4 * world + 3}
        case "vocab_size":
            given = {"vocab_size": 0}
        case "target":
            targets, given = targets.clone(), {"vocab_size": 4 * world}
            targets[2] = 4 * world
        case "class_weight":  # whole, not this rank's
            given = {"loss": LossOptions(class_weight=torch.ones(4)), "vocab_size": 4 * world}
        case "group":
            given = {"group": 3}
        case "mesh":
            given = {"group": init_device_mesh("cpu", (1, world))}
        case "weight":
            weight = weight[0]
        case "placement":
            weight, bias = (
                distribute_tensor(draw(10, HIDDEN, seed=1), init_device_mesh("cpu", (world,)), [Shard(1)]),
                None,
            )
        case "vocab_size and DTensor":
            weight = distribute_tensor(draw(10, HIDDEN, seed=1), init_device_mesh("cpu", (world,)), [Shard(0)])
            given = {"vocab_size": 10}
        case "bias":
            weight = distribute_tensor(draw(10, HIDDEN, seed=1), init_device_mesh("cpu", (world,)), [Shard(0)])
        case "logits":
            return message_of(
                lambda: vocab_parallel_cross_entropy(draw(6, 4, seed=0), targets, vocab_size=4 * world + 3)
            )
        case "logits split by tokens":
            split = distribute_tensor(draw(6, 10, seed=0), init_device_mesh("cpu", (world,)), [Shard(0)])
            return message_of(lambda: vocab_parallel_cross_entropy(split, targets))
    return message_of(lambda: vocab_parallel_linear_cross_entropy(x, weight, targets, bias=bias, **given))


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (SpecError, TypeError) as error:
        return str(error)
    return "accepted"


def unequal(rank: int, world: int) -> dict[str, Any]:
    """What each function raises when ranks hold different numbers of entries and nobody says how many there are."""
    local = 5 if rank else 7
    x, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(local, 4, dtype=torch.float64)
    targets = torch.zeros(6, dtype=torch.long)
    errors = []
    for call in (
        lambda: vocab_parallel_linear_cross_entropy(x, weight, targets, num_shards=2),
        lambda: vocab_parallel_cross_entropy(x @ weight.T, targets),
    ):
        try:
            call()
        except SpecError as error:
            errors.append(str(error))
    return {"errors": errors}
