"""`bench --device gpu` in JAX: the kernels against XLA, then whole MLPs and losses against their plain forms and tokamax.

As in tiled_torch: every variant of a workload is compiled once and interleaved in this process, one record a workload,
and a variant that cannot run is a line with the reason.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.app.bench import host_seconds, measured
from shared_specs.cli import BenchOptions, InputError
from shared_specs.config import Tiling
from shared_specs.records import make_record, write_record
from tiled_jax import tiled_linear_cross_entropy, tiled_mlp
from tiled_jax.commands.bench_loss import losses as plain_losses
from tiled_jax.functional.shard_math import activate, product, product_of_rows
from tiled_jax.kernels.dgated import dgated
from tiled_jax.kernels.glu_up import glu_up
from tiled_jax.kernels.linear import dx, linear
from tiled_jax.kernels.weight_gradient import weight_gradient

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "tokamax")
Runs = dict[str, Callable[[], Any]]

# Llama-3-8B and 70B, as in tiled_torch/commands/bench_gpu.py.
WIDTHS = {"8b": (4096, 14336), "70b": (8192, 28672)}
TOKENS = (8192, 32768, 131072)
VOCAB = 128256


class WallClock:
    """Seconds of a run that waits for its results; no peak: what a compiled program uses is in its own line."""

    def seconds(self, run: Callable[[], object]) -> float:
        return host_seconds(run)

    def peak(self, run: Callable[[], object]) -> int | None:
        run()
        return None

    def after_failure(self) -> None:
        jax.clear_caches()


def draw(seed: int, *shape: int, dtype: Any, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)


def _compiled(fn: Callable[..., Any], *arguments: jax.Array) -> Callable[[], Any]:
    """A run of the program, which is compiled when it runs first, so that a refusal is that variant's own."""
    program = jax.jit(fn)
    return lambda: jax.block_until_ready(program(*arguments))


def _in_place(fn: Callable[..., jax.Array], acc: jax.Array, *arguments: jax.Array) -> Callable[[], Any]:
    """As `_compiled`, of a sum whose accumulator is handed from run to run, as the loop over shards does."""
    program, held = jax.jit(fn, donate_argnums=0), [acc + 0]

    def run() -> jax.Array:
        held[0] = jax.block_until_ready(program(held[0], *arguments))
        return held[0]

    return run


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
    gate, up = (draw(seed, t, i, dtype=dtype) for seed in (5, 6))

    def xla_up(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ w_gate) * (x @ w_up)

    def xla_down(dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        dh, g, u = (a.astype(jnp.float32) for a in (dy @ w_down.T, gate, up))
        act, slope = activate("silu", g)
        return tuple(a.astype(dtype) for a in (dh * u * slope, dh * act, act * u))

    def xla_dx(dgate: jax.Array, dup: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        parts = (product(d, w, (1, 1), jnp.dtype(jnp.float32)) for d, w in ((dup, w_up), (dgate, w_gate)))
        return sum(parts).astype(dtype)

    def xla_sum(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + product_of_rows(a, b, acc.dtype)

    acc = jnp.zeros((h, i), jnp.float32)
    thi = 2.0 * t * h * i
    return {
        "up": (
            {
                "xla": _compiled(xla_up, x, w_gate, w_up),
                "pallas": _compiled(partial(glu_up, activation="silu"), x, w_gate, w_up),
            },
            2 * thi,
        ),
        "down": (
            {
                "xla": _compiled(xla_down, dy, w_down, gate, up),
                "pallas": _compiled(partial(dgated, activation="silu"), dy, w_down, gate, up),
            },
            thi,
        ),
        "linear": (
            {"xla": _compiled(jnp.matmul, gate, w_down), "pallas": _compiled(linear, gate, w_down)},
            thi,
        ),
        "dx": (
            {"xla": _compiled(xla_dx, gate, up, w_gate, w_up), "pallas": _compiled(dx, gate, up, w_gate, w_up)},
            2 * thi,
        ),
        "weight_gradient": (
            {"xla": _in_place(xla_sum, acc, x, gate), "pallas": _in_place(weight_gradient, acc, x, gate)},
            thi,
        ),
    }


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
    runs: Runs = {name: _compiled(_with_gradients(fn), *arguments) for name, (fn, _) in forwards.items()}
    flop = {name: units * thi for name, (_, units) in forwards.items()}
    for name in ("plain", "tiled-xla", "tiled-pallas"):
        runs[f"{name}-forward"] = _compiled(forwards[name][0], *arguments[:-1])
        flop[f"{name}-forward"] = 6 * thi
    return runs, flop


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
        name: _compiled(jax.value_and_grad(loss, argnums=(0, 1)), x, weight, targets) for name, loss in losses.items()
    }
    return runs, dict.fromkeys(runs, 6.0 * tokens * h * v)


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

    clock = WallClock()
    for name, (h, i) in widths.items():
        if options.op == "kernels":
            lines = []
            for question, (runs, flop) in kernel_runs(shards[-2], h, i, dtype).items():
                rows = measured(runs, options.repeats, clock, dict.fromkeys(runs, flop))
                lines += [{"question": question, **row} for row in rows]
            record(name, (shards[-2], h, i), lines)
        elif options.op == "mlp":
            for total in tokens:
                for shard in shards if total == tokens[0] else shards[-2:-1]:
                    runs, work = mlp_runs(total, h, i, shard, dtype)
                    rows = measured(runs, options.repeats, clock, work)
                    record(f"{name}-{total}-{shard}", (total, h, i), rows, shard_tokens=shard)
        else:
            runs, work = loss_runs(tokens[1], h, vocab, shards, dtype)
            record(name, (tokens[1], h, vocab), measured(runs, options.repeats, clock, work))
    return 0
