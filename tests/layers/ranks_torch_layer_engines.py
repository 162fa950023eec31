"""What the ranks run for state of the layers that changes ranks, and for layers that fully_shard shards over another axis."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shared_specs.config import ParallelLinearOptions
from tests.layers.ranks_torch_layers import stretch
from tests.loss.ranks_torch_loss import distance, draw, group_of
from tiled_torch import parallel

SEED, TOKENS = 11, 6
VOCAB = 9  # padded to 10 entries on two ranks, to 12 on four, of which the last holds none


class Model(nn.Module):
    """An embedding of a vocabulary that no number of ranks divides, a norm, a fused up-projection and a row-parallel layer.

    group "none": plain layers on one process, with the same initial values.
    """

    def __init__(self, group: Any = None, sequence_parallel: bool = False, device: str = "cpu") -> None:
        super().__init__()
        like: dict[str, Any] = {"dtype": torch.float64, "device": device}
        sequence, fused = {"sequence_parallel": sequence_parallel}, ParallelLinearOptions(stride=2)
        if group == "none":
            self.embedding: nn.Module = nn.Embedding(VOCAB, 8, **like)
            self.norm = nn.LayerNorm(8, **like)
            self.up: nn.Module = nn.Linear(8, 16, **like)
            self.down: nn.Module = nn.Linear(8, 8, **like)
            return
        parts = like | {"group": group}
        scattered = {"reduce_scatter_embeddings": sequence_parallel}
        self.embedding = parallel.VocabParallelEmbedding(VOCAB, 8, **scattered, **parts)
        self.norm = nn.LayerNorm(8, **like)
        self.up = parallel.ColumnParallelLinear(8, 16, options=fused, **sequence, **parts)
        self.down = parallel.RowParallelLinear(8, 8, input_is_parallel=True, **sequence, **parts)

    def forward(self, ids: Tensor) -> Tensor:
        gate, up = self.up(self.norm(self.embedding(ids))).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def output_of(model: nn.Module) -> Tensor:
    return model(torch.arange(VOCAB))


def whole_model(seed: int) -> Model:
    """On one process, at the initial values that every split model draws from the same seed."""
    torch.manual_seed(seed)
    return Model("none")


def save(rank: int, world: int, folder: str, group: str = "default") -> list[Any]:
    """Writes a model at its initial values; names and shapes of its state."""
    over, _, _ = group_of(group, rank, world)
    torch.manual_seed(11)
    state = parallel.sharded_state_dict(Model(over))
    dcp.save(state, checkpoint_id=folder)
    return [[name, list(one.shape)] for name, one in state.items()]


def wrapped(rank: int, world: int) -> list[Any]:
    """Names and shapes of the state where a wrapper keeps its own prefix out of them."""
    model = Model()
    model.up = checkpoint_wrapper(model.up)
    return [[name, list(one.shape)] for name, one in parallel.sharded_state_dict(model).items()]


def load(rank: int, world: int, folder: str, group: str = "default") -> dict[str, Any]:
    """Reads it at this number of ranks: the error of the output; whether the parameters are what they start with here."""
    over, _, _ = group_of(group, rank, world)
    torch.manual_seed(12)  # others than were saved
    model = Model(over)
    before = output_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.embedding.weight.zero_()  # padding is nobody's
    dcp.load(parallel.sharded_state_dict(model), checkpoint_id=folder)
    torch.manual_seed(11)
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), Model(over).parameters(), strict=True))
    after = output_of(model)
    error = distance(after, output_of(whole_model(11)))
    return {"output": error, "equal": equal, "changed": not torch.equal(before, after)}


def load_plain(rank: int, world: int, folder: str) -> bool:
    """Plain layers read it by the names and shapes of their own state."""
    model = whole_model(12)
    dcp.load(model.state_dict(), checkpoint_id=folder)
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), whole_model(11).parameters(), strict=True))


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))


def sharded(mesh: DeviceMesh, **options: Any) -> Model:
    """Each layer a unit of its own, and the model."""
    torch.manual_seed(SEED)
    model = Model(mesh["tp"], **options)
    for layer in (model.embedding, model.up, model.down):
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def part(whole: Tensor, name: str, mesh: DeviceMesh) -> Tensor:
    """What this rank of the tensor-parallel axis has of a parameter or its gradient; padding is zero."""
    rank, ranks = mesh["tp"].get_local_rank(), mesh["tp"].size()
    if name == "embedding.weight":
        rows = -(-VOCAB // ranks)
        padded = torch.zeros(rows * ranks, *whole.shape[1:], dtype=whole.dtype)
        padded[:VOCAB] = whole
        return padded.chunk(ranks)[rank]
    if name.startswith("up."):
        return stretch(whole, 0, rank, ranks, 2)
    return stretch(whole, 1, rank, ranks) if name == "down.weight" else whole


def batch(step: int, data: int) -> tuple[Tensor, Tensor]:
    """ids and dy of one data-parallel rank."""
    generator = torch.Generator().manual_seed(10 * step + data)
    return torch.randint(VOCAB, (TOKENS,), generator=generator), draw(TOKENS, 8, seed=20 + 10 * step + data)


def train(rank: int, world: int, sequence_parallel: bool, folder: str) -> dict[str, Any]:
    """Two steps of Adam against one process: errors of outputs, gradients and parameters. Writes parameters and moments."""
    mesh = mesh_of(world)
    model, whole = sharded(mesh, sequence_parallel=sequence_parallel), whole_model(SEED)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=0.1, foreach=False) for one in (model, whole))
    data, tensor = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    errors = {}
    for step in range(2):
        for number in range(2):
            ids, dy = batch(step, number)
            expected = whole(ids)
            (expected * dy / 2).sum().backward()
            if number == data:
                mine = (lambda a: a.chunk(world // 2)[tensor]) if sequence_parallel else (lambda a: a)
                y = model(ids)
                errors[f"y {step}"] = distance(y, mine(expected.detach()))
                (y * mine(dy)).sum().backward()
        if sequence_parallel:  # each rank's norm has seen its own tokens
            for parameter in model.norm.parameters():
                dist.all_reduce(parameter.grad.to_local(), group=mesh["tp"].get_group())  # type: ignore[union-attr]
        for (name, parameter), exact in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            errors[f"gradient of {name} {step}"] = distance(parameter.grad.full_tensor(), part(exact.grad, name, mesh))  # type: ignore[arg-type]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for (name, parameter), exact in zip(model.named_parameters(), whole.parameters(), strict=True):
        errors[name] = distance(parameter.full_tensor().detach(), part(exact.detach(), name, mesh))  # type: ignore[attr-defined]
    dcp.save(state_of(model, ours), checkpoint_id=folder)
    return errors


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters and first moments, in which nothing depends on how they are split."""
    found = parallel.sharded_state_dict(model, moments(model, optimizer))
    return {"model": parallel.sharded_state_dict(model), "exp_avg": found}


def trained(model: nn.Module, *, steps: int) -> torch.optim.Optimizer:
    """An optimizer with moments; those of one process after the steps of `train`, or anything."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        for data in range(2):
            ids, dy = batch(step, data)
            (model(ids) * dy / 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def resumed(rank: int, world: int, folder: str, engine: str) -> float:
    """The largest error of parameters and moments that are read back by a model split in another way."""
    whole = whole_model(SEED)
    expected = moments(whole, trained(whole, steps=2))
    mesh = mesh_of(world) if engine == "fsdp" else init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    if engine == "fsdp":
        model = sharded(mesh)
    else:
        torch.manual_seed(12)
        model = Model(mesh["tp"])
    optimizer = trained(model, steps=1)
    dcp.load(state_of(model, optimizer), checkpoint_id=folder)
    found = moments(model, optimizer)
    errors = []
    for (name, parameter), exact in zip(model.named_parameters(), whole.parameters(), strict=True):
        for mine, value in ((parameter.detach(), exact.detach()), (found[name], expected[name])):
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            errors.append(distance(mine, part(value, name, mesh)))
    return max(errors)


def rewritten(rank: int, world: int, folder: str) -> None:
    """What any model wrote, written by fully sharded layers: from here it is read again."""
    mesh = mesh_of(world)
    model = sharded(mesh)
    optimizer = trained(model, steps=1)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    dcp.save(state, checkpoint_id=f"{folder}/again")


def new_parameters(rank: int, world: int) -> dict[str, Any]:
    """Layers made on the meta device and sharded: their initial values, their attributes, and what is refused."""
    mesh = mesh_of(world)
    model = sharded(mesh, device="meta")
    model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    for layer in (model.embedding, model.norm, model.up, model.down):
        layer.reset_parameters()
    exact = dict(whole_model(SEED).named_parameters())
    equal = [
        torch.equal(parameter.full_tensor(), part(exact[name], name, mesh))  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
    ]
    fresh = sharded(mesh)
    dropped = not hasattr(fresh.up.weight, "partition_dim")
    fresh.up.mark_parameters()
    deferring = parallel.ColumnParallelLinear(
        8, 16, options=ParallelLinearOptions(defer_weight_grad=True), group=mesh["tp"]
    )
    fully_shard(deferring, mesh=mesh["dp"])
    deferring(torch.ones(2, 8, requires_grad=True)).sum().backward()
    try:
        deferring.deferred_weight_grad()
        message = "accepted"
    except NotImplementedError as error:
        message = str(error)
    weight = fresh.up.weight
    return {
        "equal": all(equal),
        "marks": [dropped, weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride],
        "deferred": message,
    }
