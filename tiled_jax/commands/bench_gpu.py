"""`bench --device gpu` in JAX: the kernels against XLA, then whole MLPs and losses against their plain forms and tokamax.

As in tiled_torch: every variant of a workload is compiled once and interleaved in this process, one record a workload,
and a variant that cannot run is a line with the reason.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs import costs
from shared_specs.app.bench import Deadline, host_seconds, measured, mlp_workloads
from shared_specs.cli import BenchOptions, InputError
from shared_specs.config import LossOptions, Tiling
from shared_specs.records import make_record, write_record
from shared_specs.shards import ShardPlan
from tiled_jax import backends, tiled_linear_cross_entropy, tiled_mlp
from tiled_jax.commands.bench_loss import losses as plain_losses
from tiled_jax.functional.kernel_loss_steps import KernelLossSteps
from tiled_jax.functional.loss_math import Part, Rules, make_labels
from tiled_jax.functional.loss_steps import XLA, LossSteps
from tiled_jax.functional.shard_math import activate, product, product_of_rows
from tiled_jax.kernels.dgated import dgated
from tiled_jax.kernels.glu_elementwise import glu, glu_backward
from tiled_jax.kernels.glu_up import glu_up
from tiled_jax.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.kernels.linear import dx, linear
from tiled_jax.kernels.weight_gradient import weight_gradient

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "tokamax")

# Llama-3-8B and 70B, as in tiled_torch/commands/bench_gpu.py.
WIDTHS = {"8b": (4096, 14336), "70b": (8192, 28672)}
TOKENS = (8192, 32768, 131072)
VOCAB = 128256
# Of one kernel: about ten milliseconds.
LAUNCHES = 8


class Program:
    """A run of a jitted function that waits for the results; compiled when it runs first, so that a refusal is its own.

    It keeps what is compiled, which JAX's caches may then forget.

    over: the arguments whose memory results take, as in the loop over shards. Every launch gets copies of its own.
    launches: how many are timed one behind the other, so that the device does not wait for the host in between.
    """

    def __init__(self, fn: Callable[..., Any], *arguments: Any, over: Sequence[int] = (), launches: int = 1) -> None:
        self._jitted = jax.jit(fn, donate_argnums=tuple(over))
        self._compiled: Any = None
        self._arguments, self._over, self._launches = arguments, over, launches

    def __call__(self) -> Any:
        if self._compiled is None:
            self._compiled = self._jitted.lower(*self._arguments).compile()
        return jax.block_until_ready(self._compiled(*self._own()))

    def seconds(self) -> float:
        """Of one launch; the copies are made before the clock starts."""
        if self._compiled is None:
            self()
        own = jax.block_until_ready([self._own() for _ in range(self._launches)])
        return host_seconds(lambda: jax.block_until_ready([self._compiled(*arguments) for arguments in own][-1])) / len(
            own
        )

    def _own(self) -> list[Any]:
        return [jnp.copy(a) if i in self._over else a for i, a in enumerate(self._arguments)]

    @property
    def temp_bytes(self) -> int | None:
        """What the compiled program uses above its arguments and results; None where it was never compiled."""
        analysis: Any = None if self._compiled is None else self._compiled.memory_analysis()
        return None if analysis is None else analysis.temp_size_in_bytes


Runs = dict[str, Program]


class WallClock:
    """Seconds of a launch by the host's clock; no peak: what a compiled program uses is `temp_bytes` of its line."""

    def seconds(self, run: Callable[[], object]) -> float:
        return run.seconds() if isinstance(run, Program) else host_seconds(run)

    def peak(self, run: Callable[[], object]) -> int | None:
        run()
        return None

    def after_failure(self) -> None:
        """Forgets what was traced for the variant; the other ones keep their compiled programs."""
        jax.clear_caches()


def draw(seed: int, *shape: int, dtype: Any, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def _plain(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def _with_gradients(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(*arguments: jax.Array) -> Any:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, *pull(arguments[-1])

    return run


def kernel_runs(t: int, h: int, i: int, dtype: Any) -> dict[str, tuple[Runs, float]]:
    """Question -> (its variants, FLOP): one shard, XLA first."""
    x, dy = (draw(seed, t, h, dtype=dtype) for seed in (0, 1))
    w_gate, w_up = (draw(seed, h, i, dtype=dtype, scale=h**-0.5) for seed in (2, 3))
    w_down = draw(4, i, h, dtype=dtype, scale=i**-0.5)
    gate, up, dh = (draw(seed, t, i, dtype=dtype) for seed in (5, 6, 7))

    def xla_up(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ w_gate) * (x @ w_up)

    def xla_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
        return (activate("silu", gate.astype(jnp.float32))[0] * up.astype(jnp.float32)).astype(dtype)

    def xla_glu_backward(dh: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        d, g, u = (a.astype(jnp.float32) for a in (dh, gate, up))
        act, slope = activate("silu", g)
        return tuple(a.astype(dtype) for a in (d * u * slope, d * act, act * u))

    def xla_down(dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        return xla_glu_backward(dy @ w_down.T, gate, up)

    def xla_dx(dgate: jax.Array, dup: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        of_up, of_gate = (product(d, w, (1, 1), jnp.dtype(jnp.float32)) for d, w in ((dup, w_up), (dgate, w_gate)))
        return (of_up + of_gate).astype(dtype)

    def xla_sum(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + product_of_rows(a, b, acc.dtype)

    acc = jnp.zeros((h, i), jnp.float32)
    thi = 2.0 * t * h * i
    silu: dict[str, Any] = {"activation": "silu"}

    def auxiliary(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return glu_up_auxiliary(x, w_up, x @ w_gate, **silu)

    ups = _pair(xla_up, partial(glu_up, **silu), x, w_gate, w_up)
    return {
        "up": ({**ups, "pallas-auxiliary": Program(auxiliary, x, w_gate, w_up, launches=LAUNCHES)}, 2 * thi),
        "glu": (_pair(xla_glu, partial(glu, **silu), gate, up, over=(0,)), 0.0),
        "glu_backward": (_pair(xla_glu_backward, partial(glu_backward, **silu), dh, gate, up, over=(0, 1, 2)), 0.0),
        "down": (_pair(xla_down, partial(dgated, **silu), dy, w_down, gate, up, over=(2, 3)), thi),
        "linear": (_pair(jnp.matmul, linear, gate, w_down), thi),
        "dx": (_pair(xla_dx, dx, gate, up, w_gate, w_up), 2 * thi),
        "weight_gradient": (_pair(xla_sum, weight_gradient, acc, x, gate, over=(0,)), thi),
    }


def _pair(xla: Callable[..., Any], pallas: Callable[..., Any], *operands: jax.Array, over: Sequence[int] = ()) -> Runs:
    ways = {"xla": xla, "pallas": pallas}
    return {name: Program(fn, *operands, over=over, launches=LAUNCHES) for name, fn in ways.items()}


def logits_runs(rows: int, vocab: int, dtype: Any) -> Runs:
    """One shard of logits through the loss, whose gradient takes their place: XLA and the kernel."""
    logits = draw(0, rows, vocab, dtype=dtype, scale=3.0)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, vocab, rows), jnp.int32)
    rules, part = Rules(options=LossOptions(), vocab=vocab), Part(0, None, None, None)

    def run(steps: LossSteps, logits: jax.Array, targets: jax.Array) -> Any:
        labels = make_labels(rules, targets, None, jnp.dtype(jnp.float32))
        found, dlogits = steps.statistics_and_gradient(rules, logits, part, labels, vocab)
        return dlogits, found

    return _pair(partial(run, XLA), partial(run, KernelLossSteps(interpret=False)), logits, targets, over=(0,))


def mlp_runs(tokens: int, h: int, i: int, shard: int, dtype: Any) -> tuple[Runs, dict[str, float]]:
    """Forward and backward of a whole MLP by every variant, and the FLOP of each."""
    arguments = (
        draw(0, tokens, h, dtype=dtype),
        *(draw(seed, h, i, dtype=dtype, scale=h**-0.5) for seed in (1, 2)),
        draw(3, i, h, dtype=dtype, scale=i**-0.5),
        draw(4, tokens, h, dtype=dtype),
    )
    tiling = Tiling(shard_tokens=shard)
    forwards: dict[str, tuple[Callable[..., jax.Array], int]] = {
        "plain": (_plain, 18),
        "checkpoint": (jax.checkpoint(_plain), 22),
        "tiled-xla": (partial(tiled_mlp, tiling=tiling, backend="xla"), 22),
        "tiled-pallas": (partial(tiled_mlp, tiling=tiling, backend="pallas"), 22),
        "tiled-deterministic": (
            partial(tiled_mlp, tiling=Tiling(shard_tokens=shard, deterministic=True), backend="pallas"),
            22,
        ),
        "tiled-in-checkpoint": (jax.checkpoint(partial(tiled_mlp, tiling=tiling)), 22),
        "tokamax": (_tokamax, 18),
    }
    thi = 2.0 * tokens * h * i
    runs: Runs = {name: Program(_with_gradients(fn), *arguments) for name, (fn, _) in forwards.items()}
    flop = {name: units * thi for name, (_, units) in forwards.items()}
    for name in ("plain", "tiled-xla", "tiled-pallas"):
        runs[f"{name}-forward"] = Program(forwards[name][0], *arguments[:-1])
        flop[f"{name}-forward"] = 6 * thi
    return runs, flop


def predicted_bytes(tokens: int, h: int, i: int, shard: int, dtype: Any) -> dict[str, int]:
    """What the formula says of the `temp_bytes` of the tiled variants with their gradients: an upper bound."""
    size = jnp.dtype(dtype).itemsize
    shape = costs.MLPShape(tokens=tokens, hidden=h, intermediate=i, itemsize=size, weight_itemsize=size)
    plan = costs.plan_mlp("bench", shape, shard_tokens=shard, device=backends.device_kind(), compiled=True)
    names = ("tiled-xla", "tiled-pallas", "tiled-deterministic", "tiled-in-checkpoint")
    return dict.fromkeys(names, costs.compiled_peak_bytes(shape, plan, device=backends.device_kind()))


def _tokamax(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    gated = importlib.import_module("tokamax").gated_linear_unit
    return gated(x, (w_gate, w_up), activation=jax.nn.silu) @ w_down


def loss_runs(tokens: int, h: int, v: int, shards: tuple[int, ...], dtype: Any) -> tuple[Runs, dict[str, float]]:
    """Forward and backward of a head and its loss; tiled at several shard lengths, by XLA and with the kernel."""
    x, weight = draw(0, tokens, h, dtype=dtype), draw(1, h, v, dtype=dtype, scale=h**-0.5)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, v, tokens), jnp.int32)
    losses: dict[str, Callable[..., Any]] = {"plain": lambda *arguments: jnp.mean(plain_losses(*arguments))}
    losses |= {
        f"tiled-{backend}-{shard}": partial(
            tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=shard), backend=backend
        )
        for shard in shards
        for backend in ("xla", "pallas")
    }
    runs = {
        name: Program(jax.value_and_grad(loss, argnums=(0, 1)), x, weight, targets) for name, loss in losses.items()
    }
    return runs, dict.fromkeys(runs, 6.0 * tokens * h * v)


def predicted_loss_bytes(tokens: int, h: int, v: int, shards: tuple[int, ...], dtype: Any) -> dict[str, int]:
    """What the formula says of the `temp_bytes` of the tiled losses: an upper bound."""
    size, device = jnp.dtype(dtype).itemsize, backends.device_kind()
    shape = costs.LossShape(tokens=tokens, hidden=h, vocab=v, itemsize=size, weight_itemsize=size)
    return {
        f"tiled-{backend}-{shard}": costs.compiled_loss_peak_bytes(shape, ShardPlan(tokens, shard), device=device)
        for shard in shards
        for backend in ("xla", "pallas")
    }


def bench_gpu(options: BenchOptions) -> int:
    """One part of `make gpu`: kernels, mlp or loss."""
    if jax.default_backend() != "gpu":
        raise InputError("bench: --device gpu needs a GPU that JAX sees, and there is none.")
    return run_part(options, jnp.bfloat16)


def run_part(
    options: BenchOptions,
    dtype: Any,
    *,
    widths: Mapping[str, tuple[int, int]] = WIDTHS,
    tokens: tuple[int, ...] = TOKENS,
    shards: tuple[int, ...] = (2048, 4096, 8192, 16384),
    vocab: int = VOCAB,
) -> int:
    """What `bench_gpu` runs, at any sizes and on any device."""

    def record(name: str, sizes: tuple[int, int, int], lines: list[dict[str, Any]], **facts: Any) -> None:
        shape = dict(zip(("tokens", "hidden", "width"), sizes, strict=True)) | {"dtype": str(jnp.dtype(dtype))}
        print(f"{name}: {shape}", flush=True)
        device = {"name": jax.devices()[0].device_kind}
        made = make_record(f"gpu-{options.op}-{name}", "tiled_jax", PACKAGES, lines, gpu=device, shape=shape, **facts)
        print(f"record: {write_record(options.out, made)}", flush=True)

    clock, deadline = WallClock(), Deadline(options.minutes)

    def lines_of(runs: Runs, flop: Mapping[str, float], predicted: Mapping[str, int]) -> list[dict[str, Any]]:
        rows = measured(runs, options.repeats, clock, flop)
        bytes_of = {
            name: {"temp_bytes": run.temp_bytes, "predicted_bytes": predicted.get(name)} for name, run in runs.items()
        }
        return [{**row, **bytes_of[row["variant"]]} for row in rows]

    for name, (h, i) in widths.items():
        if options.op == "kernels":
            if deadline.leaves_out(name):
                continue
            questions = kernel_runs(shards[-2], h, i, dtype)
            questions["cross_entropy"] = logits_runs(shards[1], vocab, dtype), 0.0
            lines = []
            for question, (runs, flop) in questions.items():
                rows = lines_of(runs, dict.fromkeys(runs, flop) if flop else {}, {})
                lines += [{"question": question, **row} for row in rows]
            record(name, (shards[-2], h, i), lines)
        elif options.op == "mlp":
            for total, shard in mlp_workloads(tokens, shards):
                if deadline.leaves_out(f"{name}-{total}-{shard}"):
                    continue
                runs, flop = mlp_runs(total, h, i, shard, dtype)
                lines = lines_of(runs, flop, predicted_bytes(total, h, i, shard, dtype))
                record(f"{name}-{total}-{shard}", (total, h, i), lines, shard_tokens=shard)
        elif not deadline.leaves_out(name):
            runs, flop = loss_runs(tokens[1], h, vocab, shards, dtype)
            predicted = predicted_loss_bytes(tokens[1], h, vocab, shards, dtype)
            record(name, (tokens[1], h, vocab), lines_of(runs, flop, predicted))
    return 0
