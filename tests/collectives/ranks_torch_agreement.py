"""What the ranks run for calls that are not alike on all ranks, each with an argument of its own. See tests/ranks.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shared_specs import LossOptions, SpecError
from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel
from tests.loss.ranks_torch_loss import HIDDEN, draw, group_of, labels
from tests.mlp.ranks_torch_engines import Collectives
from tests.mlp.ranks_torch_tensor_mlp import call, operands, part_of
from tiled_torch import TiledLinearCrossEntropy, TiledMLP, parallel
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.groups import rank_group
from tiled_torch.parallel import (
    checkpoint,
    parallelize,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)


def message_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except (SpecError, TypeError) as error:
        return str(error)
    return "accepted"


def mlp(rank: int, world: int, what: str) -> list[str]:
    """The message for a call in which the last rank does something else, and for one that is alike again."""
    odd = rank == world - 1
    given = {n: part_of(n, a, rank, world) if n != "x" else a for n, a in operands(8, gated=True, bias=False).items()}
    options: dict[str, Any] = {"sequence_parallel": True, "num_shards": 4}
    good = dict(options)
    match what:
        case "shards":
            options["num_shards"] = 2 if odd else 4
        case "tokens":
            given["x"] = given["x"][: 5 if odd else 8]
        case "keep":
            options["keep"] = 0.5 * odd
        case "sequence_parallel":
            options["sequence_parallel"] = not odd
        case "dtype":
            given = {n: a.float() if odd else a for n, a in given.items()}
        case "gradient of x":
            given["w_up"].requires_grad_()
            given["x"].requires_grad_(odd)
        case "any gradient":
            given["w_up"].requires_grad_(odd)
    first = message_of(lambda: call(given, **options))
    whole = {n: part_of(n, a, rank, world) if n != "x" else a for n, a in operands(8, gated=True, bias=False).items()}
    return [first, message_of(lambda: call(whole, **good))]


def loss(rank: int, world: int, what: str) -> str:
    """The message for a call in which the last rank does something else."""
    odd = rank == world - 1
    x, weight, targets = draw(8, HIDDEN, seed=0), draw(6, HIDDEN, seed=1), labels(6 * world, 8)
    options: dict[str, Any] = {"num_shards": 4, "sequence_parallel": what.startswith("sequence")}
    match what:
        case "shards" | "sequence shards":
            options["num_shards"] = 2 if odd else 4
        case "tokens" | "sequence tokens":
            x, targets = (x[:5], targets[:5]) if odd else (x, targets)
        case "reduction":
            options["loss"] = LossOptions(reduction="none" if odd else "mean")
        case "vocab_size":
            options["vocab_size"] = 6 * world - odd
        case "logits":
            rows = 5 if odd else 8
            return message_of(lambda: vocab_parallel_cross_entropy((x @ weight.T)[:rows], targets[:rows]))
    return message_of(lambda: vocab_parallel_linear_cross_entropy(x, weight, targets, **options))


def other_sizes(what: str, odd: bool, group: Any, ranks: int) -> Any:
    """One call of a public function; where `odd`, with sizes or a dtype that fit this rank's own arguments alone."""
    over, rows, split = {"group": group}, 3 - odd, torch.float64 if odd else torch.float32
    weight = torch.ones(2, 4)
    match what:
        case "gather":
            return parallel.gather_from_sequence_parallel_region(torch.ones(rows, 2), **over)
        case "gather of features":
            return parallel.gather_from_tensor_parallel_region(torch.ones(2, rows), **over)
        case "parts":
            sizes = [3 + odd] * (ranks - 1) + [rows]
            x = torch.ones(sizes[dist.get_rank(group)], 2)
            return parallel.gather_from_sequence_parallel_region(x, split_sizes=sizes, **over)
        case "dtype":
            return parallel.gather_from_sequence_parallel_region(torch.ones(3, 2, dtype=split), **over)
        case "sum":
            return parallel.reduce_from_tensor_parallel_region(torch.ones(rows), **over)
        case "scatter":
            return parallel.reduce_scatter_to_sequence_parallel_region(torch.ones(rows * ranks), **over)
        case "exchange":
            gives = [rows] + [3] * (ranks - 1)
            x = torch.ones(sum(gives), 2)
            return parallel.all_to_all(x, output_split_sizes=[3] * ranks, input_split_sizes=gives, **over)
        case "to hidden":
            return parallel.all_to_all_sequence_to_hidden(torch.ones(rows, ranks), **over)
        case "column":
            return parallel.column_parallel_linear(torch.ones(rows, 4), weight, sequence_parallel=True, **over)
        case "row":
            return parallel.row_parallel_linear(torch.ones(rows, 4), weight, input_is_parallel=True, **over)
        case "embedding":
            return parallel.vocab_parallel_embedding(torch.zeros(rows, dtype=torch.long), weight, **over)
        case "norm":
            with torch.no_grad():
                x = torch.ones(rows, 4)
                return parallel.norm_column_parallel_linear(x, torch.ones(4), weight, sequence_parallel=True, **over)
        case "residual norm":
            with torch.no_grad():
                x, residual = torch.ones(rows * ranks, 4), torch.ones(rows, 2)
                return parallel.row_parallel_linear_residual_norm(x, weight, residual, torch.ones(2), **over)
    raise ValueError(what)


def sizes(rank: int, world: int, what: str, group: str) -> list[Any] | None:
    """What a call comes to whose last rank is odd, and whether one that all make alike then does as before it."""
    over, inside, ranks = group_of(group, rank, world)
    if inside < 0:
        return None
    before = other_sizes(what, False, over, ranks)
    message = message_of(lambda: other_sizes(what, inside == ranks - 1, over, ranks))
    after = other_sizes(what, False, over, ranks)
    alike = [torch.equal(a, b) for a, b in zip(flat(before), flat(after), strict=True)]
    return [message, all(alike)]


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def functions(rank: int, world: int) -> str:
    """Ranks that are in different functions."""
    over = rank_group("one" if rank else "another")
    return message_of(lambda: agree(over, torch.device("cpu"), {"a": 1}))


def counts(rank: int, world: int, group: str) -> list[int] | None:
    """Collectives of: a first call, the same again, another one, the first once more; of the same in another group."""
    over, inside, _ = group_of(group, rank, world)
    if inside < 0:
        return None
    found = []
    for place, what in ((over, 1), (over, 1), (over, 2), (over, 1), (dist.group.WORLD if group == "mesh" else over, 1)):
        with Collectives(comparisons=True) as collectives:
            agree(rank_group("counts", place), torch.device("cpu"), {"a": what})
        found.append(sum(collectives.counts.values()))
    return found


def partitioned(rank: int, world: int, what: str) -> str:
    """checkpoint(partition_inputs=True) of inputs that ranks do not share, or share but for roundings."""
    x: Tensor = draw(6, 4, seed=0)
    scale = torch.full((), 1.0 + rank)  # smaller than the group: kept as it is
    places = torch.arange(6)[:, None] + 10_000  # numbers much larger than those that differ
    match what:
        case "values":
            x = draw(6, 4, seed=rank)
        case "shapes":
            x = x[: 4 + rank]
        case "roundings":
            x = x * (1 + rank * torch.finfo(torch.float32).eps)
        case "complex":
            x = torch.complex(x, x)
        case "complex values":
            x = torch.complex(x, x + rank)
    x.requires_grad_()
    return message_of(lambda: checkpoint(lambda x, *others: x * others[0], x, scale, places, partition_inputs=True))


def parallelized(rank: int, world: int, what: str) -> list[Any]:
    """The message that this rank gets where the last one is wrong, and whether its model is as it was; then a right call."""
    wrong = rank == world - 1
    shape, axes = ((world,), ("tp",)) if world == 2 else ((2, 2), ("dp_shard", "tp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    config = ParallelConfig(tensor=TensorParallel(), data=DataParallel(reduce_dtype=None) if world > 2 else None)
    model, asked = TiledMLP(4, 8), config
    match what:
        case "configuration" if wrong:
            asked = replace(config, checkpointing=Checkpointing())
        case "kind of model" if wrong:
            model = TiledLinearCrossEntropy(4, 8)
        case "sizes" if wrong:
            model = TiledMLP(4, 12)
        case "frozen" if wrong:
            model.w_up.requires_grad_(False)
        case "refused" if wrong:
            model = TiledMLP(4, 9)
        case "model" if wrong:
            model = None
    message = message_of(lambda: parallelize(model, mesh, asked))
    untouched = model is None or not any(isinstance(p, DTensor) for p in model.parameters())
    parallelize(TiledMLP(4, 8), mesh, config)
    return [message, untouched]


def outside(rank: int, world: int) -> str:
    """A mesh without the last rank: what that one is told, and whether the others go on."""
    mesh = DeviceMesh("cpu", list(range(world - 1)), mesh_dim_names=("dp_shard",))
    config = ParallelConfig(data=DataParallel(reduce_dtype=None))
    return message_of(lambda: parallelize(TiledMLP(4, 8), mesh, config))
