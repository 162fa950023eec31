"""What the ranks run for random streams and for checkpointing with partitioned inputs. See tests/ranks.py."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.layers.test_torch_checkpoint import HeldBytes
from tests.loss.ranks_torch_loss import distance, draw, group_of
from tests.mlp.ranks_torch_engines import Collectives, full
from tiled_torch.parallel import CheckpointWithoutOutput, RandomStates, checkpoint, seed_parallel

STREAMS = ("default", "data-parallel", "tensor-parallel", "expert-parallel")
WIDTH = 24


class Dropouts(nn.Module):
    """Dropout from the default generator and from every stream; remembers what it kept."""

    def __init__(self, states: RandomStates) -> None:
        super().__init__()
        self.states, self.kept = states, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x)
        for stream in STREAMS[1:]:
            with self.states.fork(stream):
                x = self.drop(x)
        return x.tanh()

    def drop(self, x: Tensor) -> Tensor:
        self.kept.append(nn.functional.dropout(torch.ones_like(x), 0.5))
        return x * self.kept[-1]


def dropout(axes: list[str], rank: int, world: int) -> dict[str, Any]:
    """The masks of two checkpointed calls on a mesh of the axes named (all ranks, or 2 x 2), forward and recomputed."""
    mesh = init_device_mesh("cpu", (world,) if len(axes) == 1 else (2, world // 2), mesh_dim_names=tuple(axes))
    place = dict(zip(axes, mesh.get_coordinate(), strict=True))  # type: ignore[arg-type]
    module = Dropouts(seed_parallel(11, **place))
    x = torch.ones(64, requires_grad=True)
    y = checkpoint(module, checkpoint(module, x))
    forward, module.kept = module.kept, []
    y.sum().backward()
    again = module.kept[4:] + module.kept[:4]
    return {
        "place": place,
        "masks": {name: [(m != 0).int().tolist() for m in forward[i::4]] for i, name in enumerate(STREAMS)},
        "recomputed": len(again) == 8 and all(torch.equal(a, b) for a, b in zip(forward, again, strict=True)),
    }


class Layer(nn.Module):
    """A layer whose inner activations are larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.down(self.up(x).sin()) * scale


def settled(meter: HeldBytes) -> int:
    """What is held once gloo's threads have let go of what they sent."""
    held = meter.held()
    for _ in range(20):
        time.sleep(0.01)
        held = min(held, meter.held())
    return held


def partitioned(rank: int, world: int, tokens: int = 7, group: str | None = None, dtype: str = "float64") -> Any:
    """Gradients, bytes held between forward and backward, and collectives, with and without partitioned inputs."""
    chosen, inside, size = group_of(group, rank, world) if group else (None, rank, world)
    if inside < 0:
        return None
    found: dict[str, Any] = {}
    for name in ("whole", "parted"):
        torch.manual_seed(3)
        layers = nn.ModuleList(Layer() for _ in range(3)).to(getattr(torch, dtype))
        x = torch.randn(tokens, WIDTH, dtype=getattr(torch, dtype), requires_grad=True)
        scale = torch.ones((), dtype=x.dtype)
        options = {"partition_inputs": True, "group": chosen} if name == "parted" else {}
        with HeldBytes() as meter, Collectives() as forward:
            y = x * 1.0
            for layer in layers:
                y = checkpoint(layer, y, scale, **options)
            held = settled(meter) - y.numel() * y.element_size()
        with Collectives() as backward:
            y.sin().sum().backward()
        grads = [x.grad, *(p.grad for p in layers.parameters())]
        found[name] = {
            "grads": grads,
            "held": held,
            "collectives": [sum(forward.counts.values()), sum(backward.counts.values())],
        }
    whole, parted = found["whole"], found["parted"]
    return {
        "errors": [distance(a, b) for a, b in zip(parted.pop("grads"), whole.pop("grads"), strict=True)],
        "input": tokens * WIDTH * x.element_size(),
        "size": size,
        **found,
    }


def peaks(rank: int, world: int, layers: int, tokens: int = 16) -> dict[str, Any]:
    """Peak bytes of a backward through layers without parameters, with and without partitioned inputs.

    The least of some runs: a thread of gloo that is not run for a while holds an input that was gathered before.
    """
    found: dict[str, Any] = {"input": tokens * WIDTH * 8}
    for name, options in (("whole", {}), ("parted", {"partition_inputs": True})):
        runs = []
        for _ in range(6):
            x = draw(tokens, WIDTH, seed=0).requires_grad_()
            with HeldBytes() as meter:
                y = x * 1.0
                for _ in range(layers):
                    y = checkpoint(lambda x: x.sin().cos(), y, **options)
                held = settled(meter)
                y.backward(torch.ones_like(y))
            runs.append((held, meter.peak))
        found[name] = list(map(min, zip(*runs, strict=True)))
    return found


class Sharded(nn.Module):
    """norm, without its output, then down; each a unit of its own, one parameter twice as large as the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.down = nn.Linear(WIDTH, 2 * WIDTH).double(), nn.Linear(2 * WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        call = CheckpointWithoutOutput()
        h = call.checkpoint(lambda x: self.norm(x).sin(), x)
        y = self.down(h)
        call.discard_output_and_register_recompute(y)
        return y


def fsdp(rank: int, world: int) -> list[float]:
    """Errors of gradients with fully_shard on what is computed again and on what reads it, against one process."""
    inputs = [torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(r)).double() for r in range(world)]
    expected, model = Sharded(), Sharded()
    for x in inputs:
        (expected.down(expected.norm(x).sin()).square().sum() / world).backward()
    mesh = init_device_mesh("cpu", (world,))
    for unit in (model.norm, model.down, model):
        fully_shard(unit, mesh=mesh)
    model(inputs[rank].requires_grad_()).square().sum().backward()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return [distance(full(found.grad), truth.grad) for found, truth in pairs]  # type: ignore[arg-type]


def refused(what: str, rank: int, world: int) -> str:
    """What every rank says to a group it cannot use."""
    x = torch.ones(8, requires_grad=True)
    group: Any = 3
    if what == "mesh":
        group = init_device_mesh("cpu", (world, 1))
    try:
        checkpoint(torch.sin, x, partition_inputs=True, group=group)
    except (TypeError, ValueError) as error:
        return str(error)
    return "accepted"
