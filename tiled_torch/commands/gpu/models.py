"""Whole MLPs and losses by every way there is, forward and backward, for `bench --device gpu`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shared_specs.app.gpu.worker import Variant
from shared_specs.config import Tiling
from shared_specs.kernels.blocks import DETERMINISTIC, Paths, paths_for
from shared_specs.kernels.roofline import GPU, MLPVariant, loss_seconds, mlp_seconds
from shared_specs.loss import costs as loss_costs
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan
from tiled_torch import tiled_linear_cross_entropy, tiled_mlp
from tiled_torch.commands.bench.loss import chosen_rows
from tiled_torch.commands.bench.peers import PlainMLP, liger_loss, peer_variants, products_alone, quack_loss, quack_mlp
from tiled_torch.commands.gpu.kernels import draw
from tiled_torch.core import launch
from tiled_torch.core.tensors import device_kind, dtype_name

MLP_GROUPS = ("main", "peers", "rest", "sweep")
LOSS_GROUPS = ("main", "peers", "ignored")
# Of the labels of the group "ignored": as in a chat, of which the answers alone are learned.
IGNORED = 0.9
WEIGHTS = ("dw_gate", "dw_up", "dw_down")

Forward = Callable[[Tensor], Any]
Groups = dict[str, Callable[[], dict[str, Variant]]]


class MLPs:
    """The variants of one workload: t tokens of a shard, T = `tokens`; data are drawn when a group begins."""

    def __init__(
        self,
        *,
        tokens: int,
        hidden: int,
        width: int,
        shard: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: str = "triton",
        gpu: GPU | None = None,
    ) -> None:
        self.shard, self.backend, self.device, self.gpu = shard, backend, device, gpu
        with torch.device(device):
            self.mlp = PlainMLP(hidden, width, dtype)
        self.x = draw(1, tokens, hidden, like=dtype, device=device).requires_grad_()
        self.dy = draw(1, tokens, hidden, like=dtype, device=device)
        self.shape = mlp_costs.MLPShape(
            tokens=tokens, hidden=hidden, intermediate=width, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize
        )
        self.plan = mlp_costs.plan_mlp("bench", self.shape, shard_tokens=shard, device="gpu", kernels=True)
        name = dtype_name(dtype)
        self.paths = paths_for("triton", launch.architecture(device), name, (width, hidden))

    def model(self, variant: MLPVariant, keep: float = 0.0, paths: Paths | None = None) -> float | None:
        """Return seconds that the model of the time says; None for a device whose rates nobody has put down."""
        if self.gpu is None:
            return None
        return mlp_seconds(self.shape, self.plan, self.gpu, variant=variant, keep=keep, paths=paths).total

    def tiled(self, x: Tensor, *, keep: float = 0.0, backend: str | None = None, deterministic: bool = False) -> Any:
        tiling = Tiling(shard_tokens=self.shard, keep=keep, deterministic=deterministic)
        return tiled_mlp(x, *self.mlp.weights, tiling=tiling, backend=backend or self.backend)

    def step(self, forward: Forward, flop: float, *, grads: Sequence[str] = WEIGHTS, **facts: Any) -> Variant:
        """Forward and backward. grads: the weights whose gradients are there to be compared."""
        x, dy, mlp = self.x, self.dy, self.mlp

        def clear() -> None:
            x.grad = None  # so that what a run needs beyond x, dy and the weights is what it is seen to take
            mlp.zero_grad(set_to_none=True)

        def run() -> None:
            forward(x).backward(dy)
            clear()

        def results() -> dict[str, Tensor]:
            clear()
            y = forward(x)
            y.backward(dy)
            found = {"y": y.detach(), "dx": x.grad}
            found |= {name: w.grad for name, w in zip(WEIGHTS, mlp.weights, strict=True) if name in grads}
            clear()
            missing = [name for name, a in found.items() if a is None]
            if missing:
                raise RuntimeError(f"no {', '.join(missing)}")
            return {name: a for name, a in found.items() if a is not None}

        return Variant(run=run, results=results, flop=flop, **facts)

    def forward_only(self, forward: Forward, **facts: Any) -> Variant:
        run = torch.no_grad()(lambda: forward(self.x))
        return Variant(run=run, results=lambda: {"y": run()}, flop=3 * mlp_costs.thi(self.shape), **facts)

    def products(self, recomputed: float) -> Variant:
        """Nothing but products: what no implementation of as many can be faster than."""
        run = products_alone(self.mlp, self.x[0], self.dy[0], self.shard, recomputed=recomputed)
        shards = [stop - start for start, stop in self.plan]
        again = sum(shards[: int(recomputed * len(shards))]) / self.shape.tokens
        flop = (9 + 2 * again) * mlp_costs.thi(self.shape)
        return Variant(run=run, flop=flop, model_seconds=self.model("products", 1.0 - recomputed))

    def plain(self) -> Variant:
        return self.step(self.mlp, mlp_costs.plain_flop(self.shape), library=True, model_seconds=self.model("plain"))

    def own(self, keep: float = 0.0, *, in_checkpoint: bool = False, **options: Any) -> Variant:
        """Return one of ours. Bytes are predicted where nothing else is saved or recomputed."""
        forward: Forward = partial(self.tiled, keep=keep, **options)
        flop = mlp_costs.mlp_flop(
            self.shape, self.plan, keep=keep, checkpointing="non-reentrant" if in_checkpoint else "none"
        )
        if options.get("backend") == "eager":
            paths = None
        else:
            paths = DETERMINISTIC if options.get("deterministic") else self.paths
        seconds = self.model("tiled", keep, paths)
        if in_checkpoint:
            return self.step(lambda x: checkpoint(forward, x, use_reentrant=False), flop, model_seconds=seconds)
        predicted = None if options else predicted_bytes(self.shape, self.plan, keep, self.device)
        return self.step(forward, flop, predicted_bytes=predicted, model_seconds=seconds)

    def main(self) -> dict[str, Variant]:
        mlp = self.mlp
        once = mlp_costs.plain_flop(self.shape, checkpointing="non-reentrant")
        return {
            "plain": self.plain(),
            "tiled": self.own(),
            "tiled-keep-1": self.own(1.0),
            "tiled-in-checkpoint": self.own(in_checkpoint=True),
            "checkpoint": self.step(
                lambda x: checkpoint(mlp, x, use_reentrant=False), once, model_seconds=self.model("checkpoint")
            ),
            "products-22": self.products(1.0),
            "products-18": self.products(0.0),
        }

    def peers(self) -> dict[str, Variant]:
        thi = mlp_costs.thi(self.shape)
        found = {"plain": self.plain(), "tiled": self.own(), "tiled-in-checkpoint": self.own(in_checkpoint=True)}
        variants, missing = peer_variants(self.mlp, len(self.plan))
        for name in ("liger", "deepspeed"):
            forward = variants.get(name) or _absent(missing.get(name, "not installed"))
            found[name] = self.step(forward, 12 * thi, peer=True, model_seconds=self.model("whole"))
            inside: Forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False)  # noqa: E731
            seconds = self.model("whole-in-checkpoint")
            found[f"{name}-in-checkpoint"] = self.step(inside, 15 * thi, peer=True, model_seconds=seconds)
        return found

    def rest(self) -> dict[str, Variant]:
        mlp, shape = self.mlp, self.shape
        compiled: Any = torch.compile(mlp)
        once, twice = (mlp_costs.plain_flop(shape, checkpointing=kind) for kind in ("non-reentrant", "reentrant"))
        found = {
            "plain": self.plain(),
            "products-20": self.products(0.5),
            "tiled-deterministic": self.own(deterministic=True),
            "tiled-eager": self.own(backend="eager"),
            "checkpoint-reentrant": self.step(
                lambda x: checkpoint(mlp, x, use_reentrant=True),
                twice,
                model_seconds=self.model("checkpoint-reentrant"),
            ),
            "plain-forward": self.forward_only(mlp),
            "tiled-forward": self.forward_only(self.tiled),
            "compiled": self.step(compiled, mlp_costs.plain_flop(shape), peer=True),
            "compiled-checkpoint": self.step(lambda x: checkpoint(compiled, x, use_reentrant=False), once, peer=True),
        }
        for name, recompute, flop in (("quack", False, mlp_costs.plain_flop(shape)), ("quack-recompute", True, once)):
            forward = or_absent(partial(quack_mlp, mlp, recompute=recompute))
            found[name] = self.step(forward, flop, grads=("dw_down",), peer=True)  # its gate and up are one copy
        return found

    def sweep(self) -> dict[str, Variant]:
        found = {"plain": self.plain(), "tiled": self.own(), "tiled-in-checkpoint": self.own(in_checkpoint=True)}
        return found | {"products-22": self.products(1.0)}


def mlp_groups(**sizes: Any) -> Groups:
    """Group -> what draws its data and returns its variants, plain first."""
    return {name: lambda name=name: getattr(MLPs(**sizes), name)() for name in MLP_GROUPS}


def predicted_bytes(shape: mlp_costs.MLPShape, plan: ShardPlan, keep: float, device: torch.device) -> int:
    """Return a tiled MLP's `peak_bytes` as the formulas predict it: the bytes of a run beyond x, dy and the weights."""
    results = (2 * shape.tokens * shape.hidden + shape.weight_elements) * shape.itemsize  # y, dx, weights' gradients
    working = mlp_costs.peak_bytes(shape, plan, device=device_kind(device), kernels=True)
    return results + working + mlp_costs.saved_bytes(shape, plan, keep=keep)


class Losses:
    """The variants of one head and its loss; tiled at several shard lengths. ignored: the share of labels that are -100."""

    def __init__(
        self,
        *,
        tokens: int,
        hidden: int,
        vocab: int,
        shards: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        backends: Sequence[str] = ("triton", "eager"),
        gpu: GPU | None = None,
        ignored: float = 0.0,
    ) -> None:
        self.shards, self.backends, self.device, self.gpu = tuple(shards), tuple(backends), device, gpu
        self.x = draw(tokens, hidden, like=dtype, device=device).requires_grad_()
        self.weight = draw(vocab, hidden, like=dtype, device=device, scale=hidden**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocab, (tokens,), device=device)
        self.targets[torch.randperm(tokens, device=device)[: round(ignored * tokens)]] = -100
        self.valid = float((self.targets >= 0).double().mean())
        self.shape = loss_costs.LossShape(
            tokens=tokens, hidden=hidden, vocab=vocab, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize
        )

    def step(
        self, loss: Callable[[Tensor, Tensor, Tensor], Any], *, valid: float = 1.0, again: bool = False, **facts: Any
    ) -> Variant:
        """Forward and backward. valid: the share of rows that are multiplied. again: logits are made a second time."""
        x, weight, targets = self.x, self.weight, self.targets

        def run() -> None:
            loss(x, weight, targets).backward()
            x.grad = weight.grad = None

        def results() -> dict[str, Tensor]:
            x.grad = weight.grad = None
            value = loss(x, weight, targets)
            value.backward()
            dx, dweight = x.grad, weight.grad
            x.grad = weight.grad = None
            if dx is None or dweight is None:
                raise RuntimeError("no gradient")
            return {"loss": value.detach(), "dx": dx, "dweight": dweight}

        flop = loss_costs.loss_flop(self.shape, gradients_in_forward=not again, valid=valid)
        return Variant(run=run, results=results, flop=flop, **facts)

    def own(self, shard: int, backend: str) -> Variant:
        def loss(x: Tensor, weight: Tensor, targets: Tensor) -> Any:
            return tiled_linear_cross_entropy(x, weight, targets, tiling=Tiling(shard_tokens=shard), backend=backend)

        predicted = predicted_loss_bytes(self.shape, shard, self.device, kernels=backend == "triton")
        seconds = self.model("tiled", shard) if self.valid == 1 else None
        return self.step(loss, valid=self.valid, predicted_bytes=predicted, model_seconds=seconds)

    def plain(self) -> Variant:
        return self.step(plain_loss, library=True, model_seconds=self.model("plain", self.shape.tokens))

    def model(self, variant: Literal["plain", "tiled"], shard: int) -> float | None:
        """As `MLPs.model`; the tiled loss with a shard of logits that is found in the cache the second time."""
        if self.gpu is None:
            return None
        plan = ShardPlan(self.shape.tokens, shard)
        return loss_seconds(self.shape, plan, self.gpu, variant=variant, sweeps=2).total

    def main(self) -> dict[str, Variant]:
        names = [(backend, shard) for backend in self.backends for shard in self.shards]
        return {"plain": self.plain()} | {f"tiled-{shard}-{name}": self.own(shard, name) for name, shard in names}

    def peers(self) -> dict[str, Variant]:
        shard = self.shards[len(self.shards) // 2 - 1]
        found = {"plain": self.plain(), f"tiled-{shard}-{self.backends[0]}": self.own(shard, self.backends[0])}
        for name, make in (("liger", liger_loss), ("quack", quack_loss)):
            found[name] = self.step(or_absent(make), peer=True)
        compiled: Any = torch.compile(plain_loss)
        return found | {"compiled": self.step(compiled, peer=True)}

    def ignored(self) -> dict[str, Variant]:
        """Rows without a label: of one shard length, so that what counts is not one shard alone."""
        shard = self.shards[0]
        found = {"plain": self.plain()} | {f"tiled-{shard}-{name}": self.own(shard, name) for name in self.backends}
        found["chosen-rows-checkpoint"] = self.step(chosen_rows, valid=self.valid, again=True, peer=True)
        return found | {"liger": self.step(or_absent(liger_loss), peer=True)}


def plain_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


def loss_groups(**sizes: Any) -> Groups:
    """As `mlp_groups`."""
    ignored = {"ignored": IGNORED}
    return {
        name: lambda name=name: getattr(Losses(**sizes, ignored=ignored.get(name, 0.0)), name)() for name in LOSS_GROUPS
    }


def predicted_loss_bytes(shape: loss_costs.LossShape, shard: int, device: torch.device, *, kernels: bool) -> int:
    """Return a tiled loss's `peak_bytes` as the formula predicts it: bytes beyond x, the weight and targets."""
    gradients = (shape.tokens + shape.vocab) * shape.hidden * shape.itemsize
    kind = device_kind(device)
    return gradients + loss_costs.loss_peak_bytes(shape, ShardPlan(shape.tokens, shard), device=kind, kernels=kernels)


def or_absent(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the result of `make`, or a variant that says, when it is run, why a peer is not there."""
    try:
        return make()
    except Exception as error:  # a peer's import may fail for any reason of its own
        return _absent(f"{type(error).__name__}: {error}")


def _absent(reason: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise ImportError(reason)

    return refuse
