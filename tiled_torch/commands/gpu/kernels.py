"""The questions that decide who makes which product: the kernels of one shard against PyTorch and the vendor's library."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shared_specs.app.gpu.worker import Variant
from shared_specs.config import LossOptions
from shared_specs.kernels.blocks import DETERMINISTIC, Paths
from shared_specs.kernels.roofline import GPU, passing, shard_work
from shared_specs.mlp.costs import MLPShape
from tiled_torch.loss.math import Part, Rules, make_labels
from tiled_torch.loss.steps import LossSteps
from tiled_torch.loss.steps_kernels import KernelLossSteps
from tiled_torch.mlp.kernels import glu_elementwise
from tiled_torch.mlp.math import combine_, combine_backward
from tiled_torch.mlp.steps import Steps, Weights
from tiled_torch.mlp.steps_kernels import KernelSteps

VENDOR = Paths(up="vendor", down="vendor")
Question = Callable[[], dict[str, Variant]]


def draw(*shape: int, like: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).mul_(scale).to(like)


class KernelInputs:
    """Random operands of one shard, each drawn when it is first read.

    Nothing that a run writes over is ever read by one: products of zeros take less power, and so less time.
    """

    def __init__(
        self,
        tokens: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        gpu: GPU | None = None,
    ) -> None:
        self.t, self.h, self.i, self.dtype, self.device, self.gpu = tokens, hidden, width, dtype, device, gpu

    def model(self, question: str, *, fused: bool = False) -> float | None:
        """Return seconds that the model of the time says; None for a device whose rates nobody has put down."""
        if self.gpu is None:
            return None
        shape = MLPShape(tokens=self.t, hidden=self.h, intermediate=self.i, itemsize=self.dtype.itemsize)
        return shard_work(question, shape, fused=fused).seconds(self.gpu, self.dtype.itemsize).total

    def _draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return draw(*shape, like=self.dtype, device=self.device, scale=scale)

    @cached_property
    def w(self) -> Weights:
        h, i = self.h, self.i
        return Weights(*(self._draw(*shape, scale=shape[1] ** -0.5) for shape in ((i, h), (i, h), (h, i))))

    @cached_property
    def x(self) -> Tensor:
        return self._draw(self.t, self.h)

    @cached_property
    def dy(self) -> Tensor:
        return self._draw(self.t, self.h)

    @cached_property
    def pre(self) -> tuple[Tensor, Tensor, Tensor]:
        """gate, up and dh."""
        gate, up, dh = (self._draw(self.t, self.i) for _ in range(3))
        return gate, up, dh

    @cached_property
    def scratch(self) -> list[Tensor]:
        return [torch.empty(self.t, self.i, dtype=self.dtype, device=self.device) for _ in range(3)]

    @property
    def thi(self) -> float:
        """FLOP of one product."""
        return 2.0 * self.t * self.h * self.i

    @property
    def pass_bytes(self) -> float:
        """Return the bytes of reading or writing one [t, I] once."""
        return float(self.t * self.i * self.dtype.itemsize)


def variant(run: Callable[[], Any], outputs: Callable[[Any], Mapping[str, Tensor]], *over: Tensor, **facts: Any) -> Any:
    """over: what the run writes into, NaN before it is compared. outputs: names what a run returns."""

    def results() -> dict[str, Tensor]:
        for a in over:
            a.fill_(torch.nan)
        return {name: a.clone() for name, a in outputs(run()).items()}

    return Variant(run=run, results=results, **facts)


def kernel_questions(
    tokens: int,
    hidden: int,
    width: int,
    rows: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    gpu: GPU | None = None,
) -> dict[str, Question]:
    """Question -> what draws its operands and returns its variants, the library's first. rows: of logits."""

    def asked(question: Callable[[KernelInputs], dict[str, Variant]]) -> Question:
        return lambda: question(KernelInputs(tokens, hidden, width, dtype, device, gpu))

    questions = (ceilings, up, down, glu, glu_backward, linear, dx, weight_gradient)
    found = {question.__name__: asked(question) for question in questions}
    return found | {"cross_entropy": lambda: cross_entropy(rows, vocab, dtype, device, gpu)}


def ceilings(o: KernelInputs) -> dict[str, Variant]:
    """Return the variants that show this device's best: a copy that caches do not hold, and the library's product."""
    target, product = o.scratch[:2]
    gate, x, w = o.pre[0], o.x, o.w.w_up
    return {
        "copy": Variant(run=lambda: target.copy_(gate), traffic=2 * o.pass_bytes),
        "product": Variant(run=lambda: torch.mm(x, w.T, out=product), flop=o.thi),
    }


def up(o: KernelInputs) -> dict[str, Variant]:
    ways: dict[str, Steps] = {
        "pytorch": Steps(),
        "vendor": KernelSteps(VENDOR),
        "auxiliary": KernelSteps(Paths(up="auxiliary")),
        "dual": KernelSteps(Paths(up="dual")),
    }
    scratch = o.scratch[:2]
    return {
        name: variant(
            lambda s=steps: s.hidden("silu", o.x, o.w, scratch),
            lambda h: {"h": h},
            *scratch,
            library=name == "pytorch",
            flop=2 * o.thi,
            model_seconds=o.model("up", fused=name in ("auxiliary", "dual")),
        )
        for name, steps in ways.items()
    }


def down(o: KernelInputs) -> dict[str, Variant]:
    ways = {"pytorch": Steps(), "vendor": KernelSteps(VENDOR), "dgated": KernelSteps(Paths(down="dgated"))}
    gate, up, _ = o.pre
    return {
        name: variant(
            lambda s=steps: s.hidden_gradients("silu", o.dy, o.w, gate, up, o.scratch),
            lambda found: dict(zip(("dgate", "h", "dup"), found, strict=True)),
            *o.scratch,
            library=name == "pytorch",
            flop=o.thi,
            model_seconds=o.model("down", fused=name == "dgated"),
        )
        for name, steps in ways.items()
    }


def glu(o: KernelInputs) -> dict[str, Variant]:
    (gate, up, _), h = o.pre, o.scratch[0]
    ways = {
        "pytorch": lambda: combine_("silu", gate, up, h),
        "kernel": lambda: glu_elementwise.glu_forward(gate, up, h, "silu"),
    }
    return {
        name: variant(
            run,
            lambda _: {"h": h},
            h,
            library=name == "pytorch",
            traffic=3 * o.pass_bytes,
            model_seconds=o.model("glu"),
        )
        for name, run in ways.items()
    }


def glu_backward(o: KernelInputs) -> dict[str, Variant]:
    (gate, up, dh), (dgate, h, dup) = o.pre, o.scratch
    ways = {
        "pytorch": lambda: combine_backward("silu", gate, up, dh, (dgate, h, dup)),
        "kernel": lambda: glu_elementwise.glu_backward(gate, up, dh, dgate, dup, h, "silu"),
    }
    return {
        name: variant(
            run,
            lambda _: {"dgate": dgate, "h": h, "dup": dup},
            *o.scratch,
            library=name == "pytorch",
            traffic=6 * o.pass_bytes,
            model_seconds=o.model("glu_backward"),
        )
        for name, run in ways.items()
    }


def linear(o: KernelInputs) -> dict[str, Variant]:
    h, y = o.pre[0], torch.empty_like(o.dy)
    return {
        name: variant(
            lambda s=steps: s.linear(h, o.w.w_down, None, y),
            lambda _: {"y": y},
            y,
            library=name == "vendor",
            flop=o.thi,
            model_seconds=o.model("linear"),
        )
        for name, steps in _by_vendor_and_kernel().items()
    }


def dx(o: KernelInputs) -> dict[str, Variant]:
    (dgate, dup, _), dx = o.pre, torch.empty_like(o.x)
    return {
        name: variant(
            lambda s=steps: s.dx(dgate, dup, o.w, dx),
            lambda _: {"dx": dx},
            dx,
            library=name == "vendor",
            flop=2 * o.thi,
            model_seconds=o.model("dx"),
        )
        for name, steps in _by_vendor_and_kernel().items()
    }


def weight_gradient(o: KernelInputs) -> dict[str, Variant]:
    """Return the first shard's, in comparisons: later ones add to what is there."""
    dup, x = o.pre[0], o.x
    acc = torch.zeros(o.i, o.h, device=o.device)
    ways = _by_vendor_and_kernel()

    def adding(steps: Steps, **facts: Any) -> Variant:
        def run(first: bool = False) -> None:
            steps.add_product(acc, dup, x, first=first)

        def results() -> dict[str, Tensor]:
            acc.zero_()
            run()
            return {"dw": acc.clone()}

        return Variant(run=run, results=results, flop=o.thi, model_seconds=o.model("weight_gradient"), **facts)

    return {
        "vendor": adding(ways["vendor"], library=True),
        "vendor, nothing added": variant(
            lambda: ways["vendor"].add_product(acc, dup, x, first=True), lambda _: {"dw": acc}, acc, flop=o.thi
        ),
        "vendor, in the operands' dtype": variant(lambda: torch.mm(dup.T, x), lambda dw: {"dw": dw}, flop=o.thi),
        "kernel": adding(ways["kernel"]),
    }


def _by_vendor_and_kernel() -> dict[str, Steps]:
    return {"vendor": KernelSteps(VENDOR), "kernel": KernelSteps(DETERMINISTIC)}


def cross_entropy(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device, gpu: GPU | None = None
) -> dict[str, Variant]:
    """One shard of logits becomes its gradient, in place of a copy that is made outside the clock.

    Traffic: a read and a write of the logits; what is read a second time can come from the cache.
    """
    logits = draw(rows, vocab, like=dtype, device=device, scale=3.0)
    targets = torch.randint(0, vocab, (rows,), device=device)
    rules = Rules(LossOptions(), vocab)
    labels = make_labels(rules, targets, None, torch.float32)
    scratch, part = torch.empty_like(logits), Part(0, vocab)
    traffic = 2.0 * logits.numel() * logits.itemsize
    model = None if gpu is None else passing(int(traffic)).seconds(gpu, logits.itemsize).total

    def way(steps: LossSteps, *, library: bool = False) -> Variant:
        def run() -> Any:
            return steps.statistics_and_gradient_(rules, scratch, part, labels)

        def results() -> dict[str, Tensor]:
            scratch.copy_(logits)
            found = run()
            return {"dlogits": scratch.clone(), "lse": found.top + found.total.log(), "target": found.target.clone()}

        return Variant(
            run=run,
            results=results,
            before=lambda: scratch.copy_(logits),
            library=library,
            traffic=traffic,
            model_seconds=model,
        )

    return {
        "pytorch": way(LossSteps(), library=True),
        "kernel": way(KernelLossSteps()),
        "copy": Variant(run=lambda: scratch.copy_(logits), traffic=traffic),
    }
