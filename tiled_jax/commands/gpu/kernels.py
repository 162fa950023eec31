"""The questions that decide who makes which product: the Pallas kernels of one shard against XLA."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.app.gpu.worker import Variant
from shared_specs.config import LossOptions
from shared_specs.kernels.roofline import gpu_named, passing, shard_work
from shared_specs.mlp.costs import MLPShape
from tiled_jax import backends
from tiled_jax.commands.gpu.device import variant
from tiled_jax.core.activations import activate
from tiled_jax.core.products import product, product_of_rows
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.math import Part, Rules, make_labels
from tiled_jax.loss.steps import XLA, LossSteps
from tiled_jax.loss.steps_kernels import KernelLossSteps
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_elementwise import glu as glu_kernel
from tiled_jax.mlp.kernels.glu_elementwise import glu_backward as glu_backward_kernel
from tiled_jax.mlp.kernels.glu_up import glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.kernels.linear import dx as dx_kernel
from tiled_jax.mlp.kernels.linear import linear as linear_kernel
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient as weight_gradient_kernel

# Of one kernel: about ten milliseconds.
LAUNCHES = 8
Question = Callable[[], dict[str, Variant]]


def draw(seed: int, *shape: int, dtype: Any, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


class Operands:
    """Random operands of one shard, each drawn when it is asked for."""

    def __init__(self, tokens: int, hidden: int, width: int, dtype: Any) -> None:
        self.t, self.h, self.i, self.dtype = tokens, hidden, width, jnp.dtype(dtype)
        self.thi = 2.0 * tokens * hidden * width  # FLOP of one product
        self.pass_bytes = float(tokens * width * self.dtype.itemsize)  # of reading or writing one [t, I] once

    def model(self, question: str, *, fused: bool = False) -> float | None:
        """Return seconds that the model of the time says; None for a device whose rates nobody has put down."""
        gpu = gpu_named(jax.devices()[0].device_kind)
        if gpu is None:
            return None
        shape = MLPShape(tokens=self.t, hidden=self.h, intermediate=self.i, itemsize=self.dtype.itemsize)
        return shard_work(question, shape, fused=fused).seconds(gpu, self.dtype.itemsize).total

    def rows(self, seed: int) -> jax.Array:
        """Return [t, H]"""
        return draw(seed, self.t, self.h, dtype=self.dtype)

    def wide(self, seed: int) -> jax.Array:
        """Return [t, I]"""
        return draw(seed, self.t, self.i, dtype=self.dtype)

    def up(self, seed: int) -> jax.Array:
        """Return [H, I]"""
        return draw(seed, self.h, self.i, dtype=self.dtype, scale=self.h**-0.5)

    def down(self, seed: int) -> jax.Array:
        """Return [I, H]"""
        return draw(seed, self.i, self.h, dtype=self.dtype, scale=self.i**-0.5)


def kernel_questions(tokens: int, hidden: int, width: int, rows: int, vocab: int, dtype: Any) -> dict[str, Question]:
    """Question -> what draws its operands and returns its variants, XLA's first. rows: of logits."""

    def asked(question: Callable[[Operands], dict[str, Variant]]) -> Question:
        return lambda: question(Operands(tokens, hidden, width, dtype))

    questions = (ceilings, up, down, glu, glu_backward, linear, dx, weight_gradient)
    found = {question.__name__: asked(question) for question in questions}
    return found | {"cross_entropy": lambda: cross_entropy(rows, vocab, dtype)}


def _pair(
    o: Operands, question: str, xla: Callable[..., Any], pallas: Callable[..., Any], *operands: jax.Array, **facts: Any
) -> dict[str, Variant]:
    seconds = {fused: o.model(question, fused=fused) for fused in (False, True)}
    like: dict[str, Any] = {"launches": LAUNCHES, **facts}
    return {
        "xla": variant(xla, *operands, library=True, model_seconds=seconds[False], **like),
        "pallas": variant(interpreted(pallas), *operands, model_seconds=seconds[True], **like),
    }


def interpreted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel; in JAX's interpreter where the environment asks for it."""
    if not backends.interpreting():
        return kernel
    from tiled_jax.core.mosaic import interpreter

    return partial(kernel, interpret=interpreter())


def ceilings(o: Operands) -> dict[str, Variant]:
    """Return the variants that show this device's best: a pass that caches do not hold, and the library's product."""
    like: dict[str, Any] = {"names": None, "launches": LAUNCHES}
    return {
        "copy": variant(jnp.negative, o.wide(0), traffic=2 * o.pass_bytes, **like),
        "product": variant(jnp.matmul, o.rows(1), o.up(2), flop=o.thi, **like),
    }


def up(o: Operands) -> dict[str, Variant]:
    operands = o.rows(0), o.up(1), o.up(2)

    def xla(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ w_gate) * (x @ w_up)

    def auxiliary(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return interpreted(glu_up_auxiliary)(x, w_up, x @ w_gate, activation="silu")

    facts: dict[str, Any] = {"names": ("h",), "flop": 2 * o.thi}
    found = _pair(o, "up", xla, partial(glu_up, activation="silu"), *operands, **facts)
    facts |= {"launches": LAUNCHES, "model_seconds": o.model("up", fused=True)}
    return found | {"pallas-auxiliary": variant(auxiliary, *operands, **facts)}


def _glu_gradients(dh: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
    d, g, u = (a.astype(jnp.float32) for a in (dh, gate, up))
    act, slope = activate("silu", g)
    return tuple(a.astype(dh.dtype) for a in (d * u * slope, d * act, act * u))


def down(o: Operands) -> dict[str, Variant]:
    def xla(dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        return _glu_gradients(dy @ w_down.T, gate, up)

    operands = o.rows(0), o.down(1), o.wide(2), o.wide(3)
    kernel = partial(dgated, activation="silu")
    return _pair(o, "down", xla, kernel, *operands, names=("dgate", "dup", "h"), over=(2, 3), flop=o.thi)


def glu(o: Operands) -> dict[str, Variant]:
    def xla(gate: jax.Array, up: jax.Array) -> jax.Array:
        return (activate("silu", gate.astype(jnp.float32))[0] * up.astype(jnp.float32)).astype(gate.dtype)

    kernel = partial(glu_kernel, activation="silu")
    return _pair(o, "glu", xla, kernel, o.wide(0), o.wide(1), names=("h",), over=(0,), traffic=3 * o.pass_bytes)


def glu_backward(o: Operands) -> dict[str, Variant]:
    operands = o.wide(0), o.wide(1), o.wide(2)
    facts: dict[str, Any] = {"names": ("dgate", "dup", "h"), "over": (0, 1, 2), "traffic": 6 * o.pass_bytes}
    return _pair(o, "glu_backward", _glu_gradients, partial(glu_backward_kernel, activation="silu"), *operands, **facts)


def linear(o: Operands) -> dict[str, Variant]:
    return _pair(o, "linear", jnp.matmul, linear_kernel, o.wide(0), o.down(1), names=("y",), flop=o.thi)


def dx(o: Operands) -> dict[str, Variant]:
    def xla(dgate: jax.Array, dup: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        of_up, of_gate = (product(d, w, (1, 1), jnp.dtype(jnp.float32)) for d, w in ((dup, w_up), (dgate, w_gate)))
        return (of_up + of_gate).astype(o.dtype)

    return _pair(o, "dx", xla, dx_kernel, o.wide(0), o.wide(1), o.up(2), o.up(3), names=("dx",), flop=2 * o.thi)


def weight_gradient(o: Operands) -> dict[str, Variant]:
    def xla(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + product_of_rows(a, b, acc.dtype)

    acc = jnp.zeros((o.h, o.i), jnp.float32)
    return _pair(
        o,
        "weight_gradient",
        xla,
        weight_gradient_kernel,
        acc,
        o.rows(0),
        o.wide(1),
        names=("dw",),
        over=(0,),
        flop=o.thi,
    )


def cross_entropy(rows: int, vocab: int, dtype: Any) -> dict[str, Variant]:
    """One shard of logits becomes its gradient, which takes its place. Traffic: one read and one write of the logits."""
    logits = draw(0, rows, vocab, dtype=dtype, scale=3.0)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, vocab, rows), jnp.int32)
    rules, part = Rules(options=LossOptions(), vocab=vocab), Part(0, None, None, None)

    def run(steps: LossSteps, logits: jax.Array, targets: jax.Array) -> Any:
        labels = make_labels(rules, targets, None, jnp.dtype(jnp.float32))
        found, dlogits = steps.statistics_and_gradient(rules, logits, part, labels, vocab)
        return dlogits, loss_math.log_sum_exp(rules, found), found.target

    ways: Mapping[str, LossSteps] = {"xla": XLA, "pallas": KernelLossSteps(interpret=backends.interpreting())}
    facts: dict[str, Any] = {"names": ("dlogits", "lse", "target"), "over": (0,), "launches": LAUNCHES}
    gpu, traffic = gpu_named(jax.devices()[0].device_kind), 2 * logits.nbytes
    facts["model_seconds"] = None if gpu is None else passing(traffic).seconds(gpu, logits.dtype.itemsize).total
    return {
        name: variant(partial(run, steps), logits, targets, library=name == "xla", traffic=float(traffic), **facts)
        for name, steps in ways.items()
    }
