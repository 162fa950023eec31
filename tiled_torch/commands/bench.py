"""The PyTorch half of `bench`: forward and backward of one MLP, every variant interleaved in this process."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared_specs.app.bench.bench import chosen_workloads, interleave, require_parity, show, summarise
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import MLPWorkload
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.core.rounding import relative_error
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import BENCH_GRADIENTS
from tiled_torch.commands.bench_accuracy import bench_accuracy
from tiled_torch.commands.bench_loss import bench_loss
from tiled_torch.commands.live_bytes import LiveBytes
from tiled_torch.commands.peers import PEER_NOTE, TILED, PlainMLP, own_variants, peer_variants, products_alone

PACKAGES = ("torch", "liger-kernel", "deepspeed", "numpy")


def bench(options: BenchOptions) -> int:
    """Parity first; then one table and one record."""
    if options.device == "gpu":
        from tiled_torch.commands.bench_gpu import bench_gpu  # imports triton

        return bench_gpu(options)
    if options.op == "loss":
        return bench_loss(options)
    if options.op == "accuracy":
        return bench_accuracy(options)
    if options.op == "mesh":
        raise InputError("bench: --op mesh is of tiled_jax alone: in PyTorch every rank has its own tokens anyway.")
    parity = require_parity("torch")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_workloads(options.workload):
        results += measure(workload, options.turns)
    facts = {"parity": parity, "peers": PEER_NOTE, "threads": torch.get_num_threads()}
    path = write_record(options.out, make_record("mlp", "tiled_torch", PACKAGES, results, **facts))
    print(f"record: {path}")
    return 0


def measure(workload: MLPWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant, after checking that every variant computes the same gradients."""
    torch.manual_seed(0)
    dtype = getattr(torch, workload.dtype)
    mlp = PlainMLP(workload.hidden, workload.intermediate, dtype)
    x = torch.randn(1, workload.tokens, workload.hidden, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    shape = mlp_costs.MLPShape(
        tokens=workload.tokens,
        hidden=workload.hidden,
        intermediate=workload.intermediate,
        itemsize=dtype.itemsize,
        weight_itemsize=dtype.itemsize,
    )
    plan = mlp_costs.plan_mlp("bench", shape)
    peers, missing = peer_variants(mlp, len(plan))
    for name, reason in missing.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    runs: dict[str, Callable[[], Any]] = {
        name: _step(forward, mlp, x, dy) for name, forward in (own_variants(mlp) | peers).items()
    }
    check_results(runs, mlp, x)
    measured = {name: peak_bytes(run, mlp, x) for name, run in runs.items()}
    for name, recomputed in (("products-18", 0.0), ("products-20", 0.5), ("products-22", 1.0)):
        runs[name] = products_alone(mlp, x[0], dy[0], plan.shard_tokens, recomputed=recomputed)
    summary = summarise(interleave(runs, repeats), "plain")
    title = (
        f"{workload.name}: T, H, I = {workload.tokens}, {workload.hidden}, {workload.intermediate}, {workload.dtype}"
    )
    show(f"{title}, {len(plan)} shards", summary, "plain")
    shared = {"workload": workload.name, "shards": len(plan), "repeats": repeats}
    predicted = predicted_bytes(shape, plan)
    memory = {
        name: {"peak_bytes": peak} | ({"predicted_bytes": predicted[name]} if name in predicted else {})
        for name, peak in measured.items()
    }
    return [{"variant": name, **shared, **row, **memory.get(name, {})} for name, row in summary.items()]


def peak_bytes(run: Callable[[], Tensor], mlp: PlainMLP, x: Tensor) -> int:
    """The most bytes that one run has beyond x, dy, the weights, y and the gradients."""
    with LiveBytes() as counted:
        y = run()
    gradients = (leaf.grad for leaf in (x, *mlp.parameters()))
    return counted.peak_above([y, *(grad for grad in gradients if grad is not None)])


def predicted_bytes(shape: mlp_costs.MLPShape, plan: ShardPlan) -> dict[str, int]:
    """Return the `peak_bytes` of the tiled variants, in bytes, as the formulas predict them."""
    peak = mlp_costs.peak_bytes(shape, plan)
    return {name: peak + mlp_costs.saved_bytes(shape, plan, keep=keep) for name, keep in TILED.items()}


def _step(forward: Callable[[Tensor], Tensor], mlp: PlainMLP, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        x.grad = None
        mlp.zero_grad(set_to_none=True)
        y = forward(x)
        y.backward(dy)
        return y.detach()

    return run


def check_results(runs: dict[str, Callable[[], Tensor]], mlp: PlainMLP, x: Tensor) -> None:
    """Check that every variant computes the plain y and gradients: a benchmark of something else is worth nothing.

    Raises:
        RuntimeError: one does not.
    """
    expected: dict[str, Tensor] = {}
    for name, run in runs.items():
        y = run()
        found = {"y": y, "gradient of x": x.grad}
        found |= {f"gradient of {n}": p.grad for n, p in mlp.named_parameters()}
        if not expected:
            expected = {n: grad.clone() for n, grad in found.items() if grad is not None}
        for n, grad in expected.items():
            theirs = found[n]
            same = (
                theirs is not None and relative_error(theirs.double().numpy(), grad.double().numpy()) <= BENCH_GRADIENTS
            )
            if not same:
                raise RuntimeError(f"bench: {name} does not compute the plain {n}")
