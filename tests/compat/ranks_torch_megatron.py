"""What the ranks run for Megatron-core's names: each makes the whole problem and compares its part. See tests/ranks.py."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from shared_specs import SpecError
from tests.loss.ranks_torch_loss import distance, draw
from tiled_torch.compat import megatron
from tiled_torch.compat.megatron import mappings, parallel_state, random, utils

TOKENS, BATCH, INPUTS, OUTPUTS = 8, 3, 6, 12


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (SpecError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def init(weight: Tensor) -> None:
    nn.init.normal_(weight, 0.0, 0.5)


def config(**given: Any) -> Any:
    return SimpleNamespace(params_dtype=torch.float64, use_cpu_initialization=True, **given)


def master(outputs: int, inputs: int) -> Tensor:
    """The whole weight that a layer draws under this seed: in float32, as there."""
    torch.manual_seed(5)
    whole = torch.empty(outputs, inputs)
    init(whole)
    torch.manual_seed(5)
    return whole.double()


def part(whole: Tensor, dim: int, rank: int, world: int, stride: int = 1) -> Tensor:
    return torch.cat([one.chunk(world, dim)[rank] for one in whole.chunk(stride, dim)], dim)


def worst(pairs: list[tuple[Tensor | None, Tensor]]) -> float:
    return max(distance(found, expected) for found, expected in pairs)


def whole_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    """The output and the gradients of x, the weight and the bias in one process."""
    leaves = [a.detach().requires_grad_() for a in (x, weight, *(() if bias is None else (bias,)))]
    y = F.linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def column(rank: int, world: int, sequence: bool, flags: dict[str, Any]) -> dict[str, Any]:
    """A column layer against one process; with stride 2 its outputs are two fused weights'."""
    parallel_state.initialize_model_parallel(world)
    stride, gather, skip = flags.get("stride", 1), flags.get("gather_output", False), flags.get("skip_bias_add", False)
    weight, has_bias = master(OUTPUTS, INPUTS), flags.get("bias", True)
    settings = config(sequence_parallel=sequence)
    layer = megatron.ColumnParallelLinear(INPUTS, OUTPUTS, config=settings, init_method=init, **flags)
    drawn = worst([(layer.weight, part(weight, 0, rank, world, stride))])
    bias = draw(OUTPUTS, seed=3) if has_bias else None
    if bias is not None:
        zero = not layer.bias.any()  # type: ignore[union-attr]
        layer.bias.data.copy_(part(bias, 0, rank, world, stride))  # type: ignore[union-attr]
    x, dy = draw(TOKENS, BATCH, INPUTS, seed=1), draw(TOKENS, BATCH, OUTPUTS, seed=2)
    y, dx, dweight, *dbias = whole_linear(x, weight, bias, dy)
    mine = (x.chunk(world)[rank] if sequence else x).clone().requires_grad_()
    found, found_bias = layer(mine)
    added = found if found_bias is None else found + found_bias
    upstream = dy if gather else part(dy, -1, rank, world, stride)
    added.backward(upstream)
    pairs = [
        (added, y if gather else part(y, -1, rank, world, stride)),
        (mine.grad, dx.chunk(world)[rank] if sequence else dx),
        (layer.weight.grad, part(dweight, 0, rank, world, stride)),  # type: ignore[union-attr]
    ]
    pairs += [(layer.bias.grad, part(d, 0, rank, world, stride)) for d in dbias]  # type: ignore[union-attr]
    returned = (found_bias is layer.bias) if skip and has_bias else found_bias is None
    return {"drawn": drawn, "error": worst(pairs), "returned": returned, "zero": bias is None or zero}


def row(rank: int, world: int, sequence: bool, flags: dict[str, Any]) -> dict[str, Any]:
    """A row layer against one process; under sequence parallelism its bias has the gradient of this rank's tokens."""
    parallel_state.initialize_model_parallel(world)
    weight, bias = master(OUTPUTS, INPUTS), draw(OUTPUTS, seed=3)
    given: dict[str, Any] = {"bias": True, "input_is_parallel": True, "skip_bias_add": False} | flags
    settings = config(sequence_parallel=sequence)
    layer = megatron.RowParallelLinear(INPUTS, OUTPUTS, config=settings, init_method=init, **given)
    drawn = worst([(layer.weight, part(weight, 1, rank, world, given.get("stride", 1)))])
    layer.bias.data.copy_(bias)  # type: ignore[union-attr]
    x, dy = draw(TOKENS, BATCH, INPUTS, seed=1), draw(TOKENS, BATCH, OUTPUTS, seed=2)
    y, dx, dweight, dbias = whole_linear(x, weight, bias, dy)
    parallel = given["input_is_parallel"]
    mine = (part(x, -1, rank, world, given.get("stride", 1)) if parallel else x).clone().requires_grad_()
    found, found_bias = layer(mine)
    own = (lambda a: a.chunk(world)[rank]) if sequence else (lambda a: a)
    added = found if found_bias is None else found + found_bias
    added.backward(own(dy))
    pairs = [
        (added, own(y)),
        (mine.grad, part(dx, -1, rank, world, given.get("stride", 1)) if parallel else dx),
        (layer.weight.grad, part(dweight, 1, rank, world, given.get("stride", 1))),  # type: ignore[union-attr]
        (layer.bias.grad, own(dy).sum((0, 1))),  # type: ignore[union-attr]
    ]
    del dbias
    returned = found_bias is layer.bias if given["skip_bias_add"] else found_bias is None
    marked = getattr(layer.bias, "sequence_parallel", None) is sequence
    return {"drawn": drawn, "error": worst(pairs), "returned": returned, "zero": marked}


def embedding(rank: int, world: int) -> dict[str, Any]:
    """Rows whole, and scattered as [tokens / R, batch, hidden]."""
    parallel_state.initialize_model_parallel(world)
    errors, ids = [], torch.arange(TOKENS * BATCH).view(BATCH, TOKENS) % OUTPUTS
    for scatter in (False, True):
        weight = master(OUTPUTS, INPUTS)
        layer = megatron.VocabParallelEmbedding(
            OUTPUTS, INPUTS, init_method=init, config=config(), reduce_scatter_embeddings=scatter
        )
        found = layer(ids)
        whole = F.embedding(ids, weight)
        errors.append(worst([(found, whole.transpose(0, 1).chunk(world)[rank] if scatter else whole)]))
    span = layer.vocab_start_index, layer.vocab_end_index
    odd = message_of(lambda: megatron.VocabParallelEmbedding(OUTPUTS + 1, INPUTS, init_method=init, config=config()))
    return {"errors": errors, "span": span, "odd": odd, "marks": marks(layer.weight)}


def marks(parameter: Any) -> list[Any]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
    return [getattr(parameter, name) for name in names]


def loss(rank: int, world: int, smoothing: float) -> float:
    """Megatron's formula of the whole vocabulary: 1 - ε at the target, ε / (V - 1) elsewhere."""
    parallel_state.initialize_model_parallel(world)
    logits, target = draw(5, 2, OUTPUTS, seed=1), torch.arange(10).view(5, 2)
    whole = logits.clone().requires_grad_()
    wanted = torch.full_like(whole, smoothing / (OUTPUTS - 1)).scatter(-1, target[..., None], 1 - smoothing)
    expected = -(wanted * whole.log_softmax(-1)).sum(-1)
    upstream = torch.linspace(1, 2, 10, dtype=torch.float64).view(5, 2)
    expected.backward(upstream)
    mine = logits.chunk(world, -1)[rank].clone().requires_grad_()
    found = megatron.vocab_parallel_cross_entropy(mine, target, smoothing)
    found.backward(upstream)
    assert whole.grad is not None
    return worst([(found, expected.detach()), (mine.grad, whole.grad.chunk(world, -1)[rank])])


def groups_of_two(rank: int, world: int) -> dict[str, Any]:
    """Four ranks in two groups: who talks to whom without a tp_group, and with one of a mesh."""
    parallel_state.initialize_model_parallel(2, expert_tensor_parallel_size=1)
    x = torch.tensor([float(rank)])
    found: dict[str, Any] = {"sum": mappings.reduce_from_tensor_model_parallel_region(x).item()}
    found["rank"] = parallel_state.get_tensor_model_parallel_rank()
    found["expert"] = dist.get_world_size(parallel_state.get_expert_tensor_parallel_group())
    found["keys"] = {
        str(key): value.tolist()
        for key, value in megatron.broadcast_data([7, "a"], {7: x, "a": x + 10}, torch.float32).items()
    }
    flat = torch.arange(6.0)
    chunk = megatron.split_tensor_into_1d_equal_chunks(flat)
    found["chunk"], found["joined"] = chunk.tolist(), utils.gather_split_1d_tensor(chunk).tolist()
    sizes = config(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    expert = megatron.ColumnParallelLinear(4, 4, config=sizes, init_method=init, is_expert=True)
    found["marks"] = marks(expert.weight)
    parallel_state.destroy_model_parallel()
    found["all"] = mappings.reduce_from_tensor_model_parallel_region(x).item()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel_state.set_tensor_model_parallel_group(mesh["tp"])
    found["mesh"] = mappings.reduce_from_tensor_model_parallel_region(x).item()
    parallel_state.destroy_model_parallel()
    return found


def total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


REGIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Callable[..., Any], Callable[..., Any]]] = {
    # name: (function, the shape of this rank's x, what comes of all x, the gradient that comes of all dy)
    "copy": (mappings.copy_to_tensor_model_parallel_region, (4, 4), lambda x, r: x[r], lambda d, r: total(d)),
    "reduce": (mappings.reduce_from_tensor_model_parallel_region, (4, 4), lambda x, r: total(x), lambda d, r: d[r]),
    "scatter": (
        mappings.scatter_to_tensor_model_parallel_region,
        (4, 4),
        lambda x, r: x[r].chunk(2, -1)[r],
        lambda d, r: torch.cat(d, -1),
    ),
    "gather": (
        mappings.gather_from_tensor_model_parallel_region,
        (4, 4),
        lambda x, r: torch.cat(x, -1),
        lambda d, r: d[r].chunk(2, -1)[r],
    ),
    "scatter tokens": (
        mappings.scatter_to_sequence_parallel_region,
        (4, 4),
        lambda x, r: x[r].chunk(2)[r],
        lambda d, r: torch.cat(d),
    ),
    "gather tokens": (
        mappings.gather_from_sequence_parallel_region,
        (4, 4),
        lambda x, r: torch.cat(x),
        lambda d, r: total(d).chunk(2)[r],
    ),
    "gather tokens, alike": (
        lambda x: mappings.gather_from_sequence_parallel_region(x, False),
        (4, 4),
        lambda x, r: torch.cat(x),
        lambda d, r: d[r].chunk(2)[r],
    ),
    "reduce and scatter tokens": (
        mappings.reduce_scatter_to_sequence_parallel_region,
        (4, 4),
        lambda x, r: total(x).chunk(2)[r],
        lambda d, r: torch.cat(d),
    ),
    "gather features": (
        mappings.all_gather_last_dim_from_tensor_parallel_region,
        (4, 4),
        lambda x, r: torch.cat(x, -1),
        lambda d, r: total(d).chunk(2, -1)[r],
    ),
    "reduce and scatter features": (
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
        (4, 4),
        lambda x, r: total(x).chunk(2, -1)[r],
        lambda d, r: torch.cat(d, -1),
    ),
    "to hidden": (
        mappings.all_to_all_sp2hp,
        (2, 2, 4),
        lambda x, r: torch.cat([a.flatten(0, 1).chunk(2, -1)[r] for a in x]),
        lambda d, r: torch.cat([a.chunk(2)[r] for a in d], -1).view(2, 2, 4),
    ),
    "to tokens": (
        mappings.all_to_all_hp2sp,
        (2, 2, 4),
        lambda x, r: torch.cat([a.flatten(0, 1).chunk(2)[r] for a in x], -1),
        lambda d, r: torch.cat([a.chunk(2, -1)[r] for a in d]).view(2, 2, 4),
    ),
}


def regions(rank: int, world: int) -> dict[str, bool]:
    """Every mapping forward and backward, exactly."""
    parallel_state.destroy_model_parallel()
    assert world == 2
    found = {}
    for name, (function, shape, forward, backward) in REGIONS.items():
        xs = [draw(*shape, seed=r).round(decimals=1) for r in range(world)]
        mine = xs[rank].clone().requires_grad_()
        y = function(mine)
        dys = [draw(*y.shape, seed=10 + r) for r in range(world)]
        y.backward(dys[rank])
        found[name] = torch.equal(y, forward(xs, rank)) and torch.equal(mine.grad, backward(dys, rank))  # type: ignore[arg-type]
    return found


def functional(rank: int, world: int) -> dict[str, Any]:
    """The functional forms: gradients reduced or not, frozen, into a main_grad of 16 bits."""
    parallel_state.destroy_model_parallel()
    weight, x, dy = draw(OUTPUTS, INPUTS, seed=0), draw(4, INPUTS, seed=1), draw(4, OUTPUTS, seed=2)
    _, dx, dweight = whole_linear(x, weight, None, dy)
    own_dy, found = part(dy, -1, rank, world), {}
    for reduce in (True, False):
        a, w = x.clone().requires_grad_(), part(weight, 0, rank, world).clone().requires_grad_()
        megatron.linear_with_grad_accumulation_and_async_allreduce(a, w, None, False, reduce, False).backward(own_dy)
        whole = dx if reduce else own_dy @ w.detach()
        found[f"reduced {reduce}"] = worst([(a.grad, whole), (w.grad, part(dweight, 0, rank, world))])
    a, w = x.clone().requires_grad_(), part(weight, 0, rank, world).clone().requires_grad_()
    megatron.linear_with_frozen_weight(a, w, None, False, True, False, None).backward(own_dy)
    found["frozen"] = worst([(a.grad, dx)])
    found["untouched"] = w.grad is None
    narrow: Any = part(weight, 0, rank, world).bfloat16().requires_grad_()
    narrow.main_grad = torch.ones_like(narrow)
    y = megatron.linear_with_grad_accumulation_and_async_allreduce(x.bfloat16(), narrow, None, True, True, False)
    y.backward(own_dy.bfloat16())
    expected = (own_dy.bfloat16().float().T @ x.bfloat16().float() + 1).bfloat16()
    found["main_grad"] = bool((narrow.main_grad.float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max())
    found["grad"] = narrow.grad is None
    return found


def state(rank: int, world: int) -> dict[str, Any]:
    """Checkpoints with and without `_extra_state`, a kept master, a weight of the call's, attributes, refusals."""
    parallel_state.destroy_model_parallel()
    settings = config()
    layer = megatron.ColumnParallelLinear(
        INPUTS, OUTPUTS, config=settings, init_method=init, keep_master_weight_for_test=True
    )
    saved = layer.state_dict()
    without = {name: value for name, value in saved.items() if name != "_extra_state"}
    loads = [str(layer.load_state_dict(one, strict=True)) for one in (saved, without)]
    bare = megatron.ColumnParallelLinear(
        INPUTS, OUTPUTS, config=settings, init_method=init, skip_weight_param_allocation=True, bias=False
    )
    x = draw(2, INPUTS, seed=1)
    empty = config(perform_initialization=False)
    left = megatron.RowParallelLinear(
        INPUTS, OUTPUTS, config=empty, init_method=refuse, bias=True, input_is_parallel=True, skip_bias_add=False
    )
    row_expert: dict[str, Any] = {"bias": True, "input_is_parallel": True, "is_expert": True}

    def expert(skip: bool) -> Any:
        group = dist.group.WORLD
        return megatron.RowParallelLinear(
            INPUTS, OUTPUTS, config=settings, init_method=init, skip_bias_add=skip, tp_group=group, **row_expert
        )

    experts = expert(True)
    mine = part(x, -1, rank, world)
    partial, bias = experts(mine)
    return {
        "keys": list(saved),
        "loads": loads,
        "master": layer.master_weight is not None and list(layer.master_weight.shape),
        "lent": worst([(bare(x, layer.weight)[0], F.linear(x, layer.weight))]),  # type: ignore[arg-type]
        "bare": [message_of(lambda: bare(x)), message_of(lambda: bare(x, torch.zeros(1, 1)))],
        "marks": [marks(p) for p in (*layer.parameters(), left.weight)],
        "partial": worst([(partial, F.linear(mine, experts.weight))]),  # type: ignore[arg-type]
        "beside": bias is experts.bias,
        "refused": [
            message_of(lambda: expert(False)),
            *(message_of(lambda given=given: column_of(**given)) for given in REFUSED),
        ],
    }


REFUSED: list[dict[str, Any]] = [
    {"grad_output_buffer": []},
    {"output_dtype": torch.float32},
    {"config": config(defer_embedding_wgrad_compute=True)},
    {"config": config(cpu_offloading=True)},
]


def column_of(**given: Any) -> Any:
    return megatron.ColumnParallelLinear(INPUTS, OUTPUTS, **{"config": config(), "init_method": init} | given)


def refuse(_: Tensor) -> None:
    raise AssertionError("a weight was initialised")


def streams(rank: int, world: int) -> dict[str, Any]:
    """Seeds, the stream that weights come from, recomputation in a fork, partitioned inputs, outputs given up together."""
    parallel_state.destroy_model_parallel()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    random.model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    tracker = random.get_cuda_rng_tracker()
    kept = torch.equal(torch.get_rng_state(), before)
    seeds = {"data-parallel-rng": 11, "model-parallel-rng": 11 + 2718 + rank, "expert-parallel-rng": 11 + 1024 + rank}
    seeded = {
        name: torch.equal(state, torch.Generator().manual_seed(seeds[name]).get_state())
        for name, state in tracker.get_states().items()
    }
    drawn = megatron.ColumnParallelLinear(
        2, 4, config=SimpleNamespace(params_dtype=torch.float32), init_method=nn.init.normal_
    )
    own = torch.randn(4 // world, 2, generator=torch.Generator().manual_seed(seeds["model-parallel-rng"]))

    def dropped(x: Tensor) -> Tensor:
        with tracker.fork():
            return F.dropout(x, 0.5).sin()

    x = torch.ones(4, 8, requires_grad=True)
    held = tracker.get_states()
    expected = dropped(x)
    (expected_dx,) = torch.autograd.grad(expected.sum(), x)
    again = []
    for distribute in (False, True):
        tracker.set_states(held)
        found = random.checkpoint(dropped, distribute, x)
        (dx,) = torch.autograd.grad(found.sum(), x)
        again.append(torch.equal(found, expected) and torch.equal(dx, expected_dx))
    return {"kept": kept, "seeded": seeded, "drawn": torch.equal(drawn.weight, own), "again": again}  # type: ignore[arg-type]
