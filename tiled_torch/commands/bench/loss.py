"""`bench --op loss` in PyTorch: forward and backward of one linear cross entropy, every variant interleaved."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs.app.bench.bench import chosen_loss_workloads, interleave, require_parity, show, summarise
from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import LossWorkload
from shared_specs.app.options import BenchOptions
from shared_specs.core.rounding import relative_error
from shared_specs.loss import costs as loss_costs
from shared_specs.tolerances import BENCH_GRADIENTS
from tiled_torch import tiled_linear_cross_entropy
from tiled_torch.commands.bench.peers import liger_loss

PACKAGES = ("torch", "liger-kernel", "numpy")
NOTE = (
    "torch-linear-cross-entropy is torch.nn.functional.linear_cross_entropy as it comes, -chunked with its default "
    "LinearCrossEntropyOptions; without a GPU, PyTorch operations stand in for Liger's Triton kernel over a chunk of logits"
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_loss(options: BenchOptions) -> int:
    """Parity first; then one table and one record."""
    parity = require_parity("torch", "loss")
    print(f"parity: {parity}", flush=True)
    results: list[dict[str, Any]] = []
    for workload in chosen_loss_workloads(options.workload):
        results += measure(workload, options.turns)
    facts = {"parity": parity, "peers": NOTE, "threads": torch.get_num_threads()}
    print(f"record: {write_record(options.out, make_record('loss', 'tiled_torch', PACKAGES, results, **facts))}")
    return 0


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


def variants() -> dict[str, Loss]:
    """Name -> loss of hidden states, weight and targets."""
    found: dict[str, Loss] = {
        "plain": plain,
        "checkpoint": lambda x, w, t: checkpoint(plain, x, w, t, use_reentrant=False),  # type: ignore[return-value]
        "tiled": lambda x, w, t: tiled_linear_cross_entropy(x, w, t),  # type: ignore[return-value]
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        chunks = torch.nn.LinearCrossEntropyOptions()
        found["torch-linear-cross-entropy"] = F.linear_cross_entropy
        found["torch-linear-cross-entropy-chunked"] = lambda x, w, t: F.linear_cross_entropy(x, w, t, options=chunks)
    try:
        found["liger"] = liger_loss()
    except ImportError as error:
        print(f"liger: left out: {error}. `make bench-env` installs it.", file=sys.stderr)
    return found


def measure(workload: LossWorkload, repeats: int) -> list[dict[str, Any]]:
    """One result a variant, after checking that every variant computes the same loss and gradients."""
    torch.manual_seed(0)
    dtype = getattr(torch, workload.dtype)
    x = torch.randn(workload.tokens, workload.hidden, dtype=dtype, requires_grad=True)
    weight = (torch.randn(workload.vocab, workload.hidden, dtype=dtype) / workload.hidden**0.5).requires_grad_()
    targets = torch.randint(0, workload.vocab, (workload.tokens,))
    plan = loss_costs.plan_loss(
        "bench", loss_costs.LossShape(tokens=x.shape[0], hidden=x.shape[1], vocab=weight.shape[0])
    )
    runs: dict[str, Callable[[], Tensor]] = {}
    expected: dict[str, Tensor] = {}
    for name, loss in variants().items():
        run = _step(loss, x, weight, targets)
        try:
            found = {"loss": run(), "dx": x.grad, "dweight": weight.grad}
        except (NotImplementedError, RuntimeError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
            continue
        expected = expected or {key: value.detach().clone() for key, value in found.items() if value is not None}
        for key, value in expected.items():
            theirs = found[key]
            wrong = theirs is None or relative_error(theirs.detach().numpy(), value.numpy()) > BENCH_GRADIENTS
            if wrong:
                raise RuntimeError(f"bench: {name} does not compute the plain {key}")
        runs[name] = run
    summary = summarise(interleave(runs, repeats), "plain")
    sizes = f"T, H, V = {workload.tokens}, {workload.hidden}, {workload.vocab}"
    show(f"{workload.name}: {sizes}, {workload.dtype}, {len(plan)} shards", summary, "plain")
    shared = {"workload": workload.name, "shards": len(plan), "repeats": repeats}
    return [{"variant": name, **shared, **row} for name, row in summary.items()]


def _step(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        x.grad = weight.grad = None
        value = loss(x, weight, targets)
        value.backward()
        return value

    return run
