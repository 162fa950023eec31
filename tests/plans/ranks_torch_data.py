"""What the ranks run for `parallelize` with data parallelism: what its engines were asked for, and reduce in."""

import warnings
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs.config import Compile, DataParallel, ParallelConfig
from tests.models.torch_decoders import batch, decoder, loss_of, truth
from tests.plans.ranks_torch_plans import EXACT, SHARDED, error_between, full, mesh_of, rows_of
from tiled_torch.parallel import Plan, backward_context, parallelize, register_plan


def reshard(rank: int, world: int) -> dict[str, list[bool]]:
    """Which blocks hold their own part only once forward is through."""
    found = {}
    for name, data in {
        "default": SHARDED,
        "always": DataParallel(reshard="always"),
        "never": DataParallel(reshard="never"),
        "pipeline": DataParallel(pipeline=True),
    }.items():
        model = parallelize(decoder(), mesh_of(("dp_shard",), world), ParallelConfig(data=data))
        model(input_ids=batch()[0])
        first = [next(module.parameters()) for module in (model.model.embed_tokens, *model.model.layers, model.lm_head)]
        found[name] = [isinstance(parameter, DTensor) for parameter in first]
    return found


def offloaded(rank: int, world: int) -> dict[str, list[str]]:
    """The policies that the units of a model were sharded with: embedding, layers, and norm with head."""
    found = {}
    for name, data in {"offload": DataParallel(cpu_offload=True), "default": DataParallel()}.items():
        model: Any = parallelize(decoder(), mesh_of(("dp_shard",), world), ParallelConfig(data=data))
        states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
        groups = dict.fromkeys(group for state in states for group in groups_of(state))
        found[name] = [type(group.offload_policy).__name__ for group in groups]
    return found


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of one unit of fully_shard, of which PyTorch 2.11 knows one or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class Reduced(TorchDispatchMode):
    """dtypes of what reduce-scatters are given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.startswith("_reduce_scatter_base_"):
            self.dtypes.append(str(args[1].dtype))
        return func(*args, **(kwargs or {}))


def mixed_precision(rank: int, world: int) -> dict[str, Any]:
    """bfloat16 computation of float32 weights, with gradients reduced in float32; and one process in bfloat16."""
    _, expected = truth("llama")
    baseline = decoder().bfloat16()
    loss_of(baseline, *batch(), inside=False).backward()
    config = ParallelConfig(data=DataParallel(param_dtype="bfloat16"))
    mesh = mesh_of(("dp_shard",), world)
    model = parallelize(decoder().float(), mesh, config)
    seen: list[str] = []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda module, _, y: seen.append(f"{module.weight.dtype} {y.dtype}"))
    rows = rows_of(mesh, config)
    ids, labels = batch()
    with Reduced() as reduced:
        loss_of(model, ids[rows], labels[rows], inside=False).backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return {
        "seen": seen,
        "reduced": reduced.dtypes,
        "kept": sorted({f"{p.dtype} {p.grad.dtype}" for p in model.parameters()}),
        "error": error_between({name: g.double() for name, g in grads.items()}, expected),
        "baseline": error_between({name: p.grad.double() for name, p in baseline.named_parameters()}, expected),
    }


def ddp_reduce_dtype(rank: int, world: int, reducer: str = "ddp_optimizer") -> dict[str, float]:
    """bfloat16 gradients of replicas, reduced in float32: the mean rounded once, which a bfloat16 sum is not.

    reducer: of DDP; "python_reducer" is what a model of this process with compiled autograd leaves behind.
    """
    with torch._dynamo.config.patch(optimize_ddp=reducer):
        return _ddp_errors(rank, world)


def _ddp_errors(rank: int, world: int) -> dict[str, float]:
    found = {}
    for dtype in ("float32", None):
        model = torch.nn.Linear(64, 64, bias=False).bfloat16()
        register_plan(torch.nn.Linear, Plan(blocks=""), replace=True)
        config = ParallelConfig(data=DataParallel(engine="ddp", reduce_dtype=dtype))
        model = parallelize(model, mesh_of(("dp_shard",), world), config)
        draws = [torch.randn(64, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
        model(draws[rank][None]).backward(torch.ones(1, 64, dtype=torch.bfloat16))
        exact = torch.stack(draws).double().mean(0).expand(64, 64)
        found[str(dtype)] = float((model.module.weight.grad.double() - exact).norm() / exact.norm())
    return found


def compiled_autograd(rank: int, world: int, backend: str) -> dict[str, Any]:
    """DDP whose reductions are part of a compiled backward."""
    warnings.simplefilter("ignore")
    options, whole = torch._dynamo.config.optimize_ddp, torch.compile
    torch.compile = lambda *a, **options: whole(*a, **options | {"backend": backend})  # type: ignore[assignment]
    try:
        torch.compiler.reset()
        _, expected = truth("llama", num_hidden_layers=1)
        config = ParallelConfig(data=DataParallel(engine="ddp", **EXACT), compile=Compile(compiled_autograd=True))
        mesh = mesh_of(("dp_shard",), world)
        model = parallelize(decoder(num_hidden_layers=1), mesh, config)
        rows = rows_of(mesh, config)
        ids, labels = batch()
        with backward_context(config):
            loss = loss_of(model, ids[rows], labels[rows], False, cache=False)
            loss.backward()
        found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
        return {"gradients": error_between(found, expected)}
    finally:
        torch._dynamo.config.optimize_ddp, torch.compile = options, whole
        warnings.simplefilter("error")
