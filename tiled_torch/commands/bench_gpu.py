"""`bench --device gpu` in PyTorch: kernels against the vendor's library, then whole MLPs and losses against peers.

Every variant of a workload runs in this process, interleaved and timed by device events; one record a workload, written
as soon as it is measured. A variant that cannot run is a line with the reason. Sizes are arguments, so that a test can
run all of it on a CPU in the interpreter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs import costs
from shared_specs.app.bench import Deadline, host_seconds, measured, mlp_workloads
from shared_specs.blocks import DETERMINISTIC, Paths
from shared_specs.cli import BenchOptions, InputError
from shared_specs.config import LossOptions, Tiling
from shared_specs.records import make_record, write_record
from shared_specs.shards import ShardPlan
from tiled_torch import tiled_linear_cross_entropy, tiled_mlp
from tiled_torch.commands.peers import PlainMLP, liger_loss, peer_variants, quack_loss, quack_mlp
from tiled_torch.functional.activations import combine_, combine_backward
from tiled_torch.functional.kernel_loss_steps import KernelLossSteps
from tiled_torch.functional.kernel_steps import KernelSteps
from tiled_torch.functional.loss_math import Columns, labels_of
from tiled_torch.functional.loss_steps import LossSteps
from tiled_torch.functional.steps import Steps, Weights
from tiled_torch.kernels import glu_elementwise

PACKAGES = ("torch", "triton", "liger-kernel", "deepspeed", "quack-kernels")
PEER_NOTE = (
    "liger runs its own sharding function with its fused SwiGLU; deepspeed runs its own on the plain PyTorch MLP, as its users "
    "do; quack is not sharded and takes its default block sizes"
)
Runs = dict[str, Callable[[], Any]]

# Llama-3-8B and 70B.
WIDTHS = {"8b": (4096, 14336), "70b": (8192, 28672)}
TOKENS = (8192, 32768, 131072)
VOCAB = 128256


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One workload of products: t tokens of a shard or T of a call, H, I or V."""

    name: str
    tokens: int
    hidden: int
    width: int

    def __str__(self) -> str:
        return f"{self.name}: {self.tokens} x {self.hidden} x {self.width}"


# Cycles that the device waits before a timed run, about a millisecond, so that the host's launches do not count.
_HEAD_START = 2_000_000


class EventClock:
    """Seconds of a run: device events on a GPU, the host's clock elsewhere; and the device's peak bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, run: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            return host_seconds(run)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize(self.device)
        return first.elapsed_time(last) / 1e3

    def peak(self, run: Callable[[], Any]) -> int | None:
        """Most bytes that the run had beyond those that were there before; None where nobody counts them."""
        if self.device.type != "cuda":
            run()
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def after_failure(self) -> None:
        """Gives back what a variant that ran out of memory had taken."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def draw(*shape: int, like: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).mul_(scale).to(like)


def weights_of(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Weights:
    h, i = sizes.hidden, sizes.width
    shapes = ((i, h), (i, h), (h, i))
    return Weights(*(draw(*shape, like=dtype, device=device, scale=shape[1] ** -0.5) for shape in shapes))


def kernel_runs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Runs, float]]:
    """Question -> (its variants, FLOP): one shard, PyTorch or the vendor's library first: what decides the paths."""
    t, h, i = sizes.tokens, sizes.hidden, sizes.width
    w = weights_of(sizes, dtype, device)
    x, dy = (draw(t, h, like=dtype, device=device) for _ in range(2))
    # What is written over is never what another question reads: products of zeros take less power, and so less time.
    gate, up, dh = (draw(t, i, like=dtype, device=device) for _ in range(3))
    scratch = [torch.empty_like(gate) for _ in range(3)]
    acc, dx = torch.zeros(i, h, device=device), torch.empty_like(x)
    thi = 2.0 * t * h * i
    vendor = KernelSteps(Paths(up="vendor", down="vendor"))
    ways: dict[str, Steps] = {
        "pytorch": Steps(),
        "vendor": vendor,
        "auxiliary": KernelSteps(Paths(up="auxiliary")),
        "dual": KernelSteps(Paths(up="dual")),
    }
    kernels = KernelSteps(DETERMINISTIC)
    return {
        "up": ({n: lambda s=s: s.hidden("silu", x, w, scratch[:2]) for n, s in ways.items()}, 2 * thi),
        "glu": (
            {
                "pytorch": lambda: combine_("silu", gate, up, scratch[0]),
                "kernel": lambda: glu_elementwise.glu_forward(gate, up, scratch[0], "silu"),
            },
            0.0,
        ),
        "glu_backward": (
            {
                "pytorch": lambda: combine_backward("silu", gate, up, dh, (scratch[0], scratch[1], scratch[2])),
                "kernel": lambda: glu_elementwise.glu_backward(
                    gate, up, dh, scratch[0], scratch[2], scratch[1], "silu"
                ),
            },
            0.0,
        ),
        "down": (
            {
                name: lambda s=s: s.hidden_gradients("silu", dy, w, gate, up, scratch)
                for name, s in {"pytorch": Steps(), "vendor": vendor, "dgated": KernelSteps(Paths())}.items()
            },
            thi,
        ),
        "linear": (
            {
                "vendor": lambda: vendor.linear(gate, w.w_down, None, dx),
                "kernel": lambda: kernels.linear(gate, w.w_down, None, dx),
            },
            thi,
        ),
        "dx": ({"vendor": lambda: vendor.dx(gate, up, w, dx), "kernel": lambda: kernels.dx(gate, up, w, dx)}, 2 * thi),
        "weight_gradient": (
            {
                "vendor": lambda: vendor.add_product(acc, gate, x, first=False),
                "vendor, nothing added": lambda: vendor.add_product(acc, gate, x, first=True),
                "vendor, in the operands' dtype": lambda: torch.mm(gate.T, x),
                "kernel": lambda: kernels.add_product(acc, gate, x, first=False),
            },
            thi,
        ),
    }


def logits_runs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Runs:
    """One shard of logits through the loss: PyTorch operations and the kernel, over a copy that is made in both."""
    logits = draw(sizes.tokens, sizes.width, like=dtype, device=device, scale=3.0)
    targets = torch.randint(0, sizes.width, (sizes.tokens,), device=device)
    labels = labels_of(targets, sizes.width, None, -100, torch.float32)
    scratch, columns = torch.empty_like(logits), Columns(0, sizes.width)

    def run(steps: LossSteps) -> None:
        scratch.copy_(logits)
        steps.fused_gradient_(scratch, labels, columns, LossOptions(), sizes.width)

    return {
        "copy": lambda: scratch.copy_(logits),
        "pytorch": lambda: run(LossSteps()),
        "kernel": lambda: run(KernelLossSteps()),
    }


def mlp_runs(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, shard: int, *, peers: bool
) -> tuple[Runs, dict[str, float]]:
    """Forward and backward of a whole MLP by every variant, and the FLOP of each; the last lines are forward only."""
    with torch.device(device):
        mlp = PlainMLP(sizes.hidden, sizes.width, dtype)
    x = draw(1, sizes.tokens, sizes.hidden, like=dtype, device=device).requires_grad_()
    dy = draw(1, sizes.tokens, sizes.hidden, like=dtype, device=device)
    backend = "triton"
    thi = 2.0 * sizes.tokens * sizes.hidden * sizes.width

    def tiled(x: Tensor, keep: float = 0.0, backend: str = backend) -> Tensor:
        return tiled_mlp(x, *mlp.weights, tiling=Tiling(shard_tokens=shard, keep=keep), backend=backend)

    forwards: dict[str, tuple[Callable[[Tensor], Any], float]] = {
        "plain": (mlp, 18),
        "checkpoint": (lambda x: checkpoint(mlp, x, use_reentrant=False), 22),
        "checkpoint-reentrant": (lambda x: checkpoint(mlp, x, use_reentrant=True), 24),
        "tiled": (tiled, 22),
        "tiled-keep-1": (lambda x: tiled(x, keep=1.0), 18),
        "tiled-eager": (lambda x: tiled(x, backend="eager"), 22),
        "tiled-in-checkpoint": (lambda x: checkpoint(tiled, x, use_reentrant=False), 22),
    }
    if peers:
        compiled = torch.compile(mlp)
        forwards["compiled"] = compiled, 18
        forwards["compiled-checkpoint"] = (lambda x: checkpoint(compiled, x, use_reentrant=False)), 22
        others, missing = peer_variants(mlp, -(-sizes.tokens // shard))
        for name, forward in others.items():
            forwards[name] = forward, 24
            forwards[f"{name}-in-checkpoint"] = (lambda x, f=forward: checkpoint(f, x, use_reentrant=False)), 30
        for name, reason in missing.items():
            forwards[name] = _absent(reason), 24
        for name, recompute, units in (("quack", False, 18), ("quack-recompute", True, 22)):
            forwards[name] = or_absent(partial(quack_mlp, mlp, recompute=recompute)), units

    def step(forward: Callable[[Tensor], Any]) -> Callable[[], None]:
        def run() -> None:
            forward(x).backward(dy)
            x.grad = None  # so that what a run needs beyond x, dy and the weights is what it is seen to take
            mlp.zero_grad(set_to_none=True)

        return run

    runs: Runs = {name: step(forward) for name, (forward, _) in forwards.items()}
    flop = {name: units * thi for name, (_, units) in forwards.items()}
    for name in ("plain", "tiled"):
        runs[f"{name}-forward"] = torch.no_grad()(lambda f=forwards[name][0]: f(x))
        flop[f"{name}-forward"] = 6 * thi
    return runs, flop


def loss_runs(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, shards: tuple[int, ...], *, peers: bool
) -> tuple[Runs, dict[str, float]]:
    """Forward and backward of a head and its loss; tiled at several shard lengths."""
    x = draw(sizes.tokens, sizes.hidden, like=dtype, device=device).requires_grad_()
    weight = draw(sizes.width, sizes.hidden, like=dtype, device=device, scale=sizes.hidden**-0.5).requires_grad_()
    targets = torch.randint(0, sizes.width, (sizes.tokens,), device=device)
    thv = 2.0 * sizes.tokens * sizes.hidden * sizes.width
    losses: dict[str, Callable[[], Any]] = {"plain": lambda: F.cross_entropy(F.linear(x, weight), targets)}
    for shard in shards:
        for backend in ("triton", "eager"):
            tiling = Tiling(shard_tokens=shard)
            losses[f"tiled-{shard}-{backend}"] = lambda tiling=tiling, backend=backend: tiled_linear_cross_entropy(
                x, weight, targets, tiling=tiling, backend=backend
            )
    if peers:
        for name, make in (("liger", liger_loss), ("quack", quack_loss)):
            losses[name] = partial(or_absent(make), x, weight, targets)
        losses["compiled"] = torch.compile(losses["plain"])

    def step(loss: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            loss().backward()
            x.grad = weight.grad = None

        return run

    return {name: step(loss) for name, loss in losses.items()}, dict.fromkeys(losses, 3 * thv)


def or_absent(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `make` returns, or what says why a peer is not there when it is run."""
    try:
        return make()
    except Exception as error:  # a peer's import may fail for any reason of its own
        return _absent(f"{type(error).__name__}: {error}")


def _absent(reason: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise ImportError(reason)

    return refuse


def bench_gpu(options: BenchOptions) -> int:
    """One part of `make gpu`: kernels, mlp or loss; the peers are in the last two."""
    if not torch.cuda.is_available():
        raise InputError("bench: --device gpu needs a GPU that PyTorch sees, and there is none.")
    return run_part(options, torch.device("cuda"), torch.bfloat16)


def run_part(
    options: BenchOptions,
    device: torch.device,
    dtype: torch.dtype,
    *,
    widths: Mapping[str, tuple[int, int]] = WIDTHS,
    tokens: tuple[int, ...] = TOKENS,
    shards: tuple[int, ...] = (2048, 4096, 8192, 16384),
    vocab: int = VOCAB,
) -> int:
    """What `bench_gpu` runs, at any sizes and on any device."""
    clock, deadline = EventClock(device), Deadline(options.minutes)

    def record(sizes: Sizes, lines: list[dict[str, Any]], **facts: Any) -> None:
        print(f"{sizes}, {dtype}", flush=True)
        made = make_record(f"gpu-{options.op}-{sizes.name}", "tiled_torch", PACKAGES, lines, gpu=_gpu(device), **facts)
        shape = {"tokens": sizes.tokens, "hidden": sizes.hidden, "width": sizes.width, "dtype": str(dtype)}
        print(f"record: {write_record(options.out, {**made, 'shape': shape})}", flush=True)

    for name, (hidden, width) in widths.items():
        if options.op == "kernels":
            sizes = Sizes(name=name, tokens=shards[-2], hidden=hidden, width=width)
            if deadline.leaves_out(sizes):
                continue
            lines = []
            for question, (runs, flop) in kernel_runs(sizes, dtype, device).items():
                rows = measured(runs, options.repeats, clock, dict.fromkeys(runs, flop) if flop else {})
                lines += [{"question": question, **row} for row in rows]
            logits = Sizes(name=name, tokens=shards[1], hidden=hidden, width=vocab)
            rows = measured(logits_runs(logits, dtype, device), options.repeats, clock, {})
            record(sizes, [*lines, *({"question": "cross_entropy", **row} for row in rows)])
        elif options.op == "mlp":
            for total, shard in mlp_workloads(tokens, shards):
                sizes = Sizes(name=f"{name}-{total}-{shard}", tokens=total, hidden=hidden, width=width)
                if deadline.leaves_out(sizes):
                    continue
                runs, flop = mlp_runs(sizes, dtype, device, shard, peers=total == max(tokens))
                predicted = predicted_bytes(sizes, dtype, device, shard)
                lines = measured(runs, options.repeats, clock, flop)
                record(sizes, lines, shard_tokens=shard, predicted_bytes=predicted, peers=PEER_NOTE)
        else:
            sizes = Sizes(name=name, tokens=tokens[1], hidden=hidden, width=vocab)
            if deadline.leaves_out(sizes):
                continue
            runs, flop = loss_runs(sizes, dtype, device, shards, peers=True)
            predicted = predicted_loss_bytes(sizes, dtype, device, shards)
            record(sizes, measured(runs, options.repeats, clock, flop), predicted_bytes=predicted)
    return 0


def predicted_bytes(sizes: Sizes, dtype: torch.dtype, device: torch.device, shard: int) -> dict[str, int]:
    """What the formulas say of the tiled variants' `peak_bytes`: what a run takes beyond x, dy and the weights."""
    t, h, i = sizes.tokens, sizes.hidden, sizes.width
    shape = costs.MLPShape(tokens=t, hidden=h, intermediate=i, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize)
    plan = costs.plan_mlp("bench", shape, shard_tokens=shard, device="gpu", kernels=True)
    results = (2 * t * h + 3 * h * i) * dtype.itemsize  # y, dx and the gradients of the weights
    working = costs.peak_bytes(shape, plan, device="cpu" if device.type == "cpu" else "gpu", kernels=True)
    kept = {"tiled": 0.0, "tiled-keep-1": 1.0}
    return {name: results + working + costs.saved_bytes(shape, plan, keep=keep) for name, keep in kept.items()}


def predicted_loss_bytes(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, shards: tuple[int, ...]
) -> dict[str, int]:
    """What the formula says of the `peak_bytes` of the tiled losses: beyond x, the weight and targets."""
    t, h, v = sizes.tokens, sizes.hidden, sizes.width
    shape = costs.LossShape(tokens=t, hidden=h, vocab=v, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize)
    kind, gradients = "cpu" if device.type == "cpu" else "gpu", (t * h + v * h) * dtype.itemsize
    return {
        f"tiled-{shard}-{backend}": gradients
        + costs.loss_peak_bytes(shape, ShardPlan(t, shard), device=kind, kernels=backend == "triton")
        for shard in shards
        for backend in ("triton", "eager")
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": str(device)}
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "memory_bytes": found.total_memory, "processors": found.multi_processor_count}
