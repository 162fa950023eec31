"""`bench --op accuracy` in PyTorch: errors of y and every gradient of one MLP in many shards, and of the peers' ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared_specs.app.bench.accuracy import inputs_of, measure_errors
from shared_specs.app.bench.workloads import AccuracyWorkload
from tiled_torch import tiled_mlp
from tiled_torch.commands.bench.peers import PEER_NOTE, PlainMLP, peer_variants, results_of

PACKAGES = ("torch", "liger-kernel", "deepspeed", "numpy")


def facts() -> dict[str, Any]:
    return {"peers": PEER_NOTE}


def measure(workload: AccuracyWorkload, repeats: int = 1) -> list[dict[str, Any]]:
    """Return one result a variant: its errors, the same in every repetition, or why a peer did not run."""
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
