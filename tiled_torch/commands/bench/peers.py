"""The variants that `bench` times against each other: plain, checkpointed, ours, and the peers' own functions.

Peers run on the same weights in the same process. Where there is no GPU for their fused elementwise kernels, PyTorch
operations stand in for these; what is compared is how they shard, recompute and accumulate.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shared_specs.app.bench.bench import TILED, Array
from tiled_torch import tiled_mlp

PEER_NOTE = (
    "liger and deepspeed run their own sharding functions on the plain PyTorch MLP, with the same weights and shard "
    "count; their fused elementwise kernels need a GPU and are not used"
)


class PlainMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with the attribute names the peers expect."""

    def __init__(self, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight


def own_variants(mlp: PlainMLP) -> dict[str, Callable[[Tensor], Any]]:
    """Name -> forward of one variant."""
    return {
        "plain": mlp,
        "checkpoint": lambda x: checkpoint(mlp, x, use_reentrant=False),
        "checkpoint-reentrant": lambda x: checkpoint(mlp, x, use_reentrant=True),
        **{name: lambda x, keep=keep: tiled_mlp(x, *mlp.weights, keep=keep) for name, keep in TILED.items()},
    }


def results_of(forward: Callable[[Tensor], Any], mlp: PlainMLP, x: Tensor, dy: Tensor) -> dict[str, Array]:
    """Return y and every gradient in the layout of the specification: weights [in, out]."""
    x.grad = None
    mlp.zero_grad(set_to_none=True)
    y = forward(x)
    y.backward(dy)
    found = {"y": y[0], "dx": None if x.grad is None else x.grad[0]}
    for name, weight in zip(("dw_gate", "dw_up", "dw_down"), mlp.weights, strict=True):
        found[name] = None if weight.grad is None else weight.grad.T
    return {name: value.detach().double().numpy() for name, value in found.items() if value is not None}


def products_alone(mlp: PlainMLP, x: Tensor, dy: Tensor, shard_tokens: int, *, recomputed: float) -> Callable[[], None]:
    """Return every product of forward and backward, shard by shard into buffers that are there, and nothing else.

    What no implementation of as many products can be faster than. x, dy: [T, H]. recomputed: the fraction of the shards
    whose gate and up are computed twice, rounded down: 18 THI with none, 22 THI with all.
    """
    w_gate, w_up, w_down = (weight.detach() for weight in mlp.weights)
    x, y = x.detach(), torch.empty_like(dy)
    h, dh = (x.new_empty(min(shard_tokens, len(x)), len(w_up)) for _ in range(2))
    dx, (dgate, dup, ddown) = torch.empty_like(x), (torch.empty_like(w) for w in (w_gate, w_up, w_down))

    def run() -> None:
        parts = list(zip(*(a.split(shard_tokens) for a in (x, y, dy, dx)), strict=True))
        for rows, out, _, _ in parts:
            hidden = h[: len(rows)]
            torch.mm(rows, w_gate.T, out=dh[: len(rows)])
            torch.mm(rows, w_up.T, out=hidden)
            torch.mm(hidden, w_down.T, out=out)
        for number, (rows, _, given, found) in enumerate(parts):
            hidden, gradient = h[: len(rows)], dh[: len(rows)]
            if number < int(recomputed * len(parts)):
                torch.mm(rows, w_gate.T, out=gradient)
                torch.mm(rows, w_up.T, out=hidden)
            torch.mm(given, w_down, out=gradient)
            torch.mm(gradient, w_up, out=found)
            found.addmm_(gradient, w_gate)
            for total, a, b in ((ddown, given, hidden), (dup, gradient, rows), (dgate, gradient, rows)):
                total.addmm_(a.T, b, beta=0.0 if number == 0 else 1.0)

    return run


def peer_variants(mlp: PlainMLP, num_shards: int) -> tuple[dict[str, Callable[[Tensor], Any]], dict[str, str]]:
    """Return (name -> forward of each installed peer, at the same number of shards; name -> why a peer is left out)."""
    variants: dict[str, Callable[[Tensor], Any]] = {}
    missing: dict[str, str] = {}
    for name, make in (("liger", _liger), ("deepspeed", _deepspeed)):
        try:
            variants[name] = make(mlp, num_shards)
        except ImportError as error:
            missing[name] = f"{error}. `make bench-env` installs it."
        except Exception as error:  # what its import runs into on this machine
            missing[name] = f"{type(error).__name__}: {error}"
    return variants, missing


def _liger(mlp: PlainMLP, num_shards: int) -> Callable[[Tensor], Any]:
    apply = importlib.import_module("liger_kernel.ops.tiled_mlp").apply_tiled_mlp
    parameters, of_shard = list(mlp.parameters()), PlainMLP.forward
    if torch.cuda.is_available():
        fused = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

        def of_shard(self: PlainMLP, x: Tensor) -> Any:
            return self.down_proj(fused.apply(self.gate_proj(x), self.up_proj(x)))

    def forward(x: Tensor) -> Any:
        return apply(of_shard, mlp, x, num_shards=num_shards, compute_params=parameters)

    return forward


def _deepspeed(mlp: PlainMLP, num_shards: int) -> Callable[[Tensor], Any]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not torch.cuda.is_available() else "cuda")
    function = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp").TiledMLP
    parameters = list(mlp.parameters())

    def forward(x: Tensor) -> Any:
        # Its shape is [batch, sequence, hidden].
        return function.apply(PlainMLP.forward, mlp, x, num_shards, parameters)

    return forward


def quack_mlp(mlp: PlainMLP, *, recompute: bool) -> Callable[[Tensor], Any]:
    """QuACK's MLP, whose products have the activation in their epilogues; GPUs only. It is not sharded.

    Its weight is gate and up in one, so it runs on a copy. Block sizes are its defaults: to tune them takes longer than
    one part of `make gpu` has.
    """
    function = importlib.import_module("quack.mlp").mlp_func
    gate, up, down = mlp.weights
    fused = torch.cat((gate.detach(), up.detach())).requires_grad_()

    def forward(x: Tensor) -> Any:
        fused.grad = None
        return function(x, fused, down, "swiglu", tuned=False, recompute=recompute, concat_layout=True)

    return forward


def quack_loss() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """QuACK's chunked linear cross entropy, at its default chunk and with its default block sizes; GPUs only."""
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda x, weight, targets: function(x, weight, targets, tuned=False)


def liger_loss() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Liger's fused linear cross entropy; its Triton kernel replaced by `_CrossEntropyPass` without a GPU."""
    module: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    if not torch.cuda.is_available():
        module.liger_cross_entropy_kernel = _CrossEntropyPass()
    return lambda x, weight, targets: module.LigerFusedLinearCrossEntropyFunction.apply(x, weight, targets)[0]


def trl_loss(*, chosen: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The loss of trl's trainers: its chunked log-probabilities, of the rows that have a label or of all rows.

    Its models hand over the former where Triton runs and the latter elsewhere; what is made of them here is what they make.
    """
    function: Any = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    entries = importlib.import_module(
        "trl.trainer.utils"
    )._CHUNKED_LOGPROB_CHUNK_SIZE  # a module that backward imports too

    def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        valid = targets != -100
        rows, labels = (x[valid], targets[valid]) if chosen else (x, targets.clamp(min=0))
        found = function.apply(rows, weight, None, labels, 1.0, entries, None, 1.0, ("log_probs",))[0]
        return -(found if chosen else found.masked_fill(~valid, 0)).sum() / valid.sum().clamp(min=1)

    return loss


class _CrossEntropyPass:
    """Launched as the kernel is, for a mean over the valid targets: losses, and logits become their gradient."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run

    @staticmethod
    def run(*, X_ptr: Tensor, Y_ptr: Tensor, loss_ptr: Tensor, n_non_ignore: int, **_: Any) -> None:
        valid = (Y_ptr != -100)[:, None].to(X_ptr.dtype)
        logits, targets = X_ptr, Y_ptr[:, None].clamp(min=0)
        logits -= logits.amax(1, keepdim=True)
        right = logits.gather(1, targets)
        total = logits.exp_().sum(1, keepdim=True)
        loss_ptr.copy_((valid * (total.log() - right) / n_non_ignore)[:, 0])
        logits *= valid / (total * n_non_ignore)
        logits.scatter_add_(1, targets, valid * (-1 / n_non_ignore))
