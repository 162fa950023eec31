"""`python -m tiled_jax tune`: measures the Pallas kernels' block sizes for one model's widths and writes them to the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.app.tune import best_blocks, fastest
from shared_specs.blocks import TUNED, Blocks, Paths, write_tuned
from shared_specs.cli import InputError, TuneOptions
from shared_specs.config import LossOptions
from tiled_jax import backends
from tiled_jax.commands.bench_gpu import LAUNCHES, Program, WallClock, draw
from tiled_jax.functional import shard_math
from tiled_jax.functional.kernel_steps import Weights
from tiled_jax.kernels.common import ARCHITECTURE
from tiled_jax.kernels.cross_entropy import Columns, RowSlopes, statistics_and_gradient
from tiled_jax.kernels.dgated import dgated
from tiled_jax.kernels.glu_elementwise import glu_backward
from tiled_jax.kernels.glu_up import glu_up
from tiled_jax.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.kernels.linear import dx, linear
from tiled_jax.kernels.weight_gradient import weight_gradient


def tune(options: TuneOptions) -> int:
    """Measures on the GPU at hand; InputError without one that has kernels."""
    reason = backends.usable_backends()["pallas"]
    if reason is not None or backends.interpreting():
        raise InputError(f"tune: a GPU must be there that the kernels run on. {reason or 'The interpreter is on.'}")
    if options.dtype == "float32":
        raise InputError("tune: --dtype must be bfloat16 or float16, the kernels' dtypes, got float32.")
    return tune_with(options, launches(options), partial(ways, options), Path(TUNED))


Launches = dict[str, tuple[tuple[int, ...], Callable[[Blocks], Callable[[], Any]]]]


def launches(options: TuneOptions, interpret: Any = None) -> Launches:
    """Op -> (what its blocks are looked up by, what makes its launch on random data from blocks)."""
    t, h, i, v, dtype = options.tokens, options.hidden, options.intermediate, options.vocab, jnp.dtype(options.dtype)
    x, w, w_down = draw(0, t, h, dtype=dtype), draw(1, h, i, dtype=dtype), draw(2, i, h, dtype=dtype)
    gate, up = draw(3, t, i, dtype=dtype), draw(4, t, i, dtype=dtype)
    acc = jnp.zeros((h, i), jnp.float32)
    rows = max(1, t // 2)
    logits, ones = draw(5, rows, v, dtype=dtype), jnp.ones(rows)
    of_rows: Any = Columns(jnp.zeros(rows, jnp.int32)), RowSlopes(ones, ones)

    def launch(
        kernel: Callable[..., Any], *operands: Any, over: Sequence[int] = (), **static: Any
    ) -> Callable[[Blocks], Program]:
        def program(blocks: Blocks) -> Program:
            fn = partial(kernel, blocks=blocks, interpret=interpret, **static)
            return Program(fn, *operands, over=over, launches=LAUNCHES)

        return program

    def loss(logits: jax.Array, *of_rows: Any, **static: Any) -> Any:
        found, dlogits = statistics_and_gradient(logits, *of_rows, options=LossOptions(), **static)
        return dlogits, found

    return {
        "glu_up": ((i, h), launch(glu_up, x, w, w, activation="silu")),
        "glu_up_aux": ((i, h), launch(glu_up_auxiliary, x, w, gate, over=(2,), activation="silu")),
        "dgated": ((i, h), launch(dgated, x, w_down, gate, up, over=(2, 3), activation="silu")),
        "linear": ((h, i), launch(linear, gate, w_down)),
        "dx": ((h, i), launch(dx, gate, up, w, w)),
        "weight_gradient": ((h, i), launch(weight_gradient, acc, x, gate, over=(0,))),
        "glu_elementwise": ((i,), launch(glu_backward, up, gate, up, over=(0, 1, 2), activation="silu")),
        "cross_entropy": ((v,), launch(loss, logits, *of_rows, over=(0,))),
    }


def ways(options: TuneOptions, chosen: Mapping[str, Blocks]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Question -> every way to make that part of an MLP, the kernels with these blocks; XLA's products first."""
    t, h, i, dtype = options.tokens, options.hidden, options.intermediate, jnp.dtype(options.dtype)
    x, dy = draw(0, t, h, dtype=dtype), draw(1, t, h, dtype=dtype)
    w = {"w_gate": draw(2, h, i, dtype=dtype), "w_up": draw(3, h, i, dtype=dtype)}
    w_down, pre = draw(4, i, h, dtype=dtype), {"gate": draw(5, t, i, dtype=dtype), "up": draw(6, t, i, dtype=dtype)}

    def auxiliary(x: jax.Array, w: Weights) -> jax.Array:
        gate = shard_math.linear(x, w["w_gate"], None)
        return glu_up_auxiliary(x, w["w_up"], gate, activation="silu", blocks=chosen["glu_up_aux"])

    def dual(x: jax.Array, w: Weights) -> jax.Array:
        return glu_up(x, w["w_gate"], w["w_up"], activation="silu", blocks=chosen["glu_up"])

    def vendor_down(dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
        pre = {"gate": gate, "up": up}
        return shard_math.pre_activation_gradients(dy, pre, {"w_down": w_down}, "silu", ("w_gate", "w_up"))

    def kernel_down(dy: jax.Array, w_down: jax.Array, gate: jax.Array, up: jax.Array) -> Any:
        return dgated(dy, w_down, gate, up, activation="silu", blocks=chosen["dgated"])

    program = partial(Program, launches=LAUNCHES)

    return {
        "up": {
            "vendor": program(lambda x, w: shard_math.hidden(x, w, "silu"), x, w),
            "auxiliary": program(auxiliary, x, w),
            "dual": program(dual, x, w),
        },
        "down": {
            name: program(fn, dy, w_down, pre["gate"], pre["up"], over=(2, 3))
            for name, fn in {"vendor": vendor_down, "dgated": kernel_down}.items()
        },
    }


def tune_with(
    options: TuneOptions,
    runs: Mapping[str, tuple[tuple[int, ...], Callable[[Blocks], Callable[[], Any]]]],
    ways: Callable[[Mapping[str, Blocks]], Mapping[str, Mapping[str, Callable[[], Any]]]],
    table: Path,
) -> int:
    """Times the candidates of these launches, then the ways to make an MLP with the chosen ones, and writes any table."""
    key = {"kernels": "pallas", "architecture": ARCHITECTURE, "dtype": options.dtype}
    chosen = {op: best_blocks("pallas", op, run, WallClock(), options.repeats) for op, (_, run) in runs.items()}
    entries: list[dict[str, Any]] = [
        {**key, "op": op, "shape": list(shape), "blocks": asdict(chosen[op])} for op, (shape, _) in runs.items()
    ]
    parts: dict[str, Any] = {part: fastest(found, WallClock(), options.repeats) for part, found in ways(chosen).items()}
    print(", ".join(f"{part}: {way}" for part, way in parts.items()))
    shape = [options.intermediate, options.hidden]
    entries.append({**key, "op": "paths", "shape": shape, "paths": asdict(Paths(**parts))})
    write_tuned(entries, table)
    print(f"{len(entries)} entries written to {table}; commit it together with a record of `make gpu PART=kernels`")
    return 0
