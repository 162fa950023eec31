"""`bench --op loss` in PyTorch: forward and backward of one linear cross entropy, every variant interleaved."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs.app.bench.bench import Array, Rows, check_results, measure_times
from shared_specs.app.bench.workloads import LossWorkload
from shared_specs.loss.costs import plan_loss
from tiled_torch import tiled_linear_cross_entropy
from tiled_torch.commands.bench.peers import liger_loss, trl_loss

PACKAGES = ("torch", "liger-kernel", "trl", "numpy")
NOTE = (
    "torch-linear-cross-entropy is torch.nn.functional.linear_cross_entropy as it comes, -chunked with its default "
    "LinearCrossEntropyOptions; chosen-rows-checkpoint gathers the rows that have a label first; trl is the chunked loss of "
    "its trainers as they call it without a GPU, of all rows, and trl-chosen-rows as they call it on one; "
    "without a GPU, PyTorch operations stand in for Liger's Triton kernel over a chunk of logits"
)

CHUNK = 256  # rows of the logits of `chosen_rows`
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def facts() -> dict[str, Any]:
    return {"peers": NOTE, "threads": torch.get_num_threads()}


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


def chosen_rows(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as libraries make it that gather the rows with a label first: in chunks, whose logits are made again."""
    valid = targets != -100
    x, targets = x[valid], targets[valid]

    def chunk(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(rows, weight), labels, reduction="sum")

    pairs = zip(x.split(CHUNK), targets.split(CHUNK), strict=True)
    total: Any = sum(checkpoint(chunk, *pair, use_reentrant=False) for pair in pairs)
    return total / targets.numel()


def variants() -> dict[str, Loss]:
    """Name -> loss of hidden states, weight and targets."""
    found: dict[str, Loss] = {
        "plain": plain,
        "checkpoint": lambda x, w, t: checkpoint(plain, x, w, t, use_reentrant=False),  # type: ignore[return-value]
        "chosen-rows-checkpoint": chosen_rows,
        "tiled": lambda x, w, t: tiled_linear_cross_entropy(x, w, t),  # type: ignore[return-value]
    }
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        chunks = torch.nn.LinearCrossEntropyOptions()
        found["torch-linear-cross-entropy"] = F.linear_cross_entropy
        found["torch-linear-cross-entropy-chunked"] = lambda x, w, t: F.linear_cross_entropy(x, w, t, options=chunks)
    trainers = "`make trainers` installs it in .venv-trainers, for PYTHONPATH"
    peers: dict[str, tuple[Callable[[], Loss], str]] = {
        "liger": (liger_loss, "`make bench-env` installs it"),
        "trl": (partial(trl_loss, chosen=False), trainers),
        "trl-chosen-rows": (partial(trl_loss, chosen=True), trainers),
    }
    for name, (make, advice) in peers.items():
        try:
            found[name] = make()
        except ImportError as error:
            print(f"{name}: left out: {error}. {advice}.", file=sys.stderr)
    return found


def measure(workload: LossWorkload, repeats: int) -> Rows:
    """Return one result a variant, after checking that every variant computes the same loss and gradients."""
    torch.manual_seed(0)
    dtype = getattr(torch, workload.dtype)
    x = torch.randn(workload.tokens, workload.hidden, dtype=dtype, requires_grad=True)
    weight = (torch.randn(workload.vocab, workload.hidden, dtype=dtype) / workload.hidden**0.5).requires_grad_()
    targets = torch.from_numpy(workload.targets())
    runs: dict[str, Callable[[], Tensor]] = {}

    def results() -> Iterator[tuple[str, dict[str, Array | None]]]:
        for name, loss in variants().items():
            run = _step(loss, x, weight, targets)
            try:
                found = {"loss": run(), "dx": x.grad, "dweight": weight.grad}
            except (NotImplementedError, RuntimeError) as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
            yield name, {key: None if value is None else value.detach().numpy() for key, value in found.items()}
            runs[name] = run

    check_results(results())
    return measure_times(workload, len(plan_loss("bench", workload.shape)), runs, repeats, {})


def _step(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        x.grad = weight.grad = None
        value = loss(x, weight, targets)
        value.backward()
        return value

    return run
