"""`bench --op mlp` in PyTorch: forward and backward of one MLP, every variant interleaved in this process."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shared_specs.app.bench.bench import Rows, check_results, measure_times, predicted_bytes
from shared_specs.app.bench.workloads import MLPWorkload
from shared_specs.mlp import costs as mlp_costs
from tiled_torch.check.live_bytes import LiveBytes
from tiled_torch.commands.bench.peers import (
    PEER_NOTE,
    PlainMLP,
    own_variants,
    peer_variants,
    products_alone,
    results_of,
)

PACKAGES = ("torch", "liger-kernel", "deepspeed", "numpy")


def facts() -> dict[str, Any]:
    return {"peers": PEER_NOTE, "threads": torch.get_num_threads()}


def measure(workload: MLPWorkload, repeats: int) -> Rows:
    """Return one result a variant, after checking that every variant computes the same gradients."""
    torch.manual_seed(0)
    dtype = getattr(torch, workload.dtype)
    mlp = PlainMLP(workload.hidden, workload.intermediate, dtype)
    x = torch.randn(1, workload.tokens, workload.hidden, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    plan = mlp_costs.plan_mlp("bench", workload.shape)
    peers, missing = peer_variants(mlp, len(plan))
    for name, reason in missing.items():
        print(f"{name}: left out: {reason}", file=sys.stderr)
    forwards = own_variants(mlp) | peers
    check_results((name, results_of(forward, mlp, x, dy)) for name, forward in forwards.items())
    runs: dict[str, Callable[[], Any]] = {name: _step(forward, mlp, x, dy) for name, forward in forwards.items()}
    memory = {name: {"peak_bytes": peak_bytes(run, mlp, x)} for name, run in runs.items()}
    for name, predicted in predicted_bytes(workload.shape, plan, mlp_costs.peak_bytes).items():
        memory.setdefault(name, {})["predicted_bytes"] = predicted
    for name, recomputed in (("products-18", 0.0), ("products-20", 0.5), ("products-22", 1.0)):
        runs[name] = products_alone(mlp, x[0], dy[0], plan.shard_tokens, recomputed=recomputed)
    return measure_times(workload, len(plan), runs, repeats, memory)


def peak_bytes(run: Callable[[], Tensor], mlp: PlainMLP, x: Tensor) -> int:
    """Return the most bytes that one run has beyond x, dy, the weights, y and the gradients."""
    with LiveBytes() as counted:
        y = run()
    gradients = (leaf.grad for leaf in (x, *mlp.parameters()))
    return counted.peak_above([y, *(grad for grad in gradients if grad is not None)])


def _step(forward: Callable[[Tensor], Tensor], mlp: PlainMLP, x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        x.grad = None
        mlp.zero_grad(set_to_none=True)
        y = forward(x)
        y.backward(dy)
        return y.detach()

    return run
