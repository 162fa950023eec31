"""`bench --op accuracy` in PyTorch: errors of y and every gradient of one MLP in many shards, and of the peers' ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared_specs.app.bench.accuracy import Array, chosen_accuracy_workloads, inputs_of, measure_errors
from shared_specs.app.bench.bench import require_parity
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import AccuracyWorkload
from shared_specs.app.options import BenchOptions
from tiled_torch import tiled_mlp
from tiled_torch.commands.bench.peers import PEER_NOTE, PlainMLP, peer_variants

PACKAGES = ("torch", "liger-kernel", "deepspeed", "numpy")


def bench_accuracy(options: BenchOptions) -> int:
    """Parity first; then one table and one record."""
    parity = require_parity("torch")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_accuracy_workloads(options.workload):
        results += measure(workload)
    record = make_record("accuracy", "tiled_torch", PACKAGES, results, parity=parity, peers=PEER_NOTE)
    print(f"record: {write_record(options.out, record)}")
    return 0


def measure(workload: AccuracyWorkload) -> list[dict[str, Any]]:
    """One result a variant: its errors, or why a peer did not run."""
    dtype = getattr(torch, workload.dtype)
    given = {name: torch.from_numpy(a.astype(np.float32)).to(dtype) for name, a in inputs_of(workload).items()}
    mlp = PlainMLP(workload.hidden, workload.intermediate, dtype)
    with torch.no_grad():
        for weight, name in zip(mlp.weights, ("w_gate", "w_up", "w_down"), strict=True):
            weight.copy_(given[name].T)
    x, dy = given["x"][None].requires_grad_(), given["dy"][None]  # the peers want a batch
    peers, missing = peer_variants(mlp, workload.shards)
    own = own_variants(mlp, workload.shards)
    runs, others = (
        {name: partial(results_of, forward, mlp, x, dy) for name, forward in forwards.items()}
        for forwards in (own, peers)
    )
    return measure_errors(workload, runs, others, missing)


def own_variants(mlp: PlainMLP, shards: int) -> dict[str, Callable[[Tensor], Any]]:
    """Name -> forward of one variant."""
    return {"plain": mlp, "tiled": lambda x: tiled_mlp(x, *mlp.weights, num_shards=shards)}


def results_of(forward: Callable[[Tensor], Any], mlp: PlainMLP, x: Tensor, dy: Tensor) -> dict[str, Array]:
    """y and every gradient in the layout of the specification: weights [in, out]."""
    x.grad = None
    mlp.zero_grad(set_to_none=True)
    y = forward(x)
    y.backward(dy)
    found = {"y": y[0], "dx": None if x.grad is None else x.grad[0]}
    for name, weight in zip(("dw_gate", "dw_up", "dw_down"), mlp.weights, strict=True):
        found[name] = None if weight.grad is None else weight.grad.T
    return {name: value.detach().double().numpy() for name, value in found.items() if value is not None}
