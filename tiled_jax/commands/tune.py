"""`python -m tiled_jax tune`: measures the Pallas kernels' block sizes for one model's widths and writes them to the table."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.app.tune import best_blocks
from shared_specs.blocks import TUNED, Blocks, write_tuned
from shared_specs.cli import InputError, TuneOptions
from shared_specs.config import LossOptions
from tiled_jax import backends
from tiled_jax.commands.bench_gpu import WallClock, draw
from tiled_jax.kernels.common import ARCHITECTURE
from tiled_jax.kernels.cross_entropy import Columns, RowSlopes, statistics_and_gradient
from tiled_jax.kernels.dgated import dgated
from tiled_jax.kernels.glu_elementwise import glu
from tiled_jax.kernels.glu_up import glu_up
from tiled_jax.kernels.linear import dx, linear
from tiled_jax.kernels.weight_gradient import weight_gradient


def tune(options: TuneOptions) -> int:
    """Measures on the GPU at hand; InputError without one that has kernels."""
    reason = backends.usable_backends()["pallas"]
    if reason is not None or backends.interpreting():
        raise InputError(f"tune: a GPU must be there that the kernels run on. {reason or 'The interpreter is on.'}")
    if options.dtype == "float32":
        raise InputError("tune: --dtype must be bfloat16 or float16, the kernels' dtypes, got float32.")
    return tune_with(options, launches(options), Path(TUNED))


def launches(options: TuneOptions, interpret: Any = None) -> dict[str, tuple[tuple[int, ...], Callable[[Blocks], Any]]]:
    """Op -> (what its blocks are looked up by, one launch on random data of its own)."""
    t, h, i, v, dtype = options.tokens, options.hidden, options.intermediate, options.vocab, jnp.dtype(options.dtype)
    x, w, w_down = draw(0, t, h, dtype=dtype), draw(1, h, i, dtype=dtype), draw(2, i, h, dtype=dtype)
    gate, up = draw(3, t, i, dtype=dtype), draw(4, t, i, dtype=dtype)
    acc = jnp.zeros((h, i), jnp.float32)
    rows = max(1, t // 2)
    logits, ones = draw(5, rows, v, dtype=dtype), jnp.ones(rows)
    of_rows: Any = Columns(jnp.zeros(rows, jnp.int32)), RowSlopes(ones, ones)
    loss: dict[str, Any] = {"options": LossOptions(), "interpret": interpret}
    extra = {"activation": "silu", "interpret": interpret}
    return {
        "glu_up": ((i, h), lambda blocks: _wait(glu_up(x, w, w, blocks=blocks, **extra))),
        "dgated": ((i, h), lambda blocks: _wait(dgated(x, w_down, gate, up, blocks=blocks, **extra))),
        "linear": ((h, i), lambda blocks: _wait(linear(gate, w_down, blocks=blocks, interpret=interpret))),
        "dx": ((h, i), lambda blocks: _wait(dx(gate, up, w, w, blocks=blocks, interpret=interpret))),
        "weight_gradient": (
            (h, i),
            lambda blocks: _wait(weight_gradient(acc, x, gate, blocks=blocks, interpret=interpret)),
        ),
        "glu_elementwise": ((i,), lambda blocks: _wait(glu(gate, up, blocks=blocks, **extra))),
        "cross_entropy": (
            (v,),
            lambda blocks: _wait(statistics_and_gradient(logits, *of_rows, blocks=blocks, **loss)),
        ),
    }


def _wait(results: Any) -> None:
    jax.block_until_ready(results)


def tune_with(
    options: TuneOptions, runs: dict[str, tuple[tuple[int, ...], Callable[[Blocks], Any]]], table: Path
) -> int:
    """Times the candidates of these launches and writes any table."""
    key = {"kernels": "pallas", "architecture": ARCHITECTURE, "dtype": options.dtype}
    entries = []
    for op, (shape, run) in runs.items():
        chosen = best_blocks("pallas", op, run, WallClock(), options.repeats)
        entries.append({**key, "op": op, "shape": list(shape), "blocks": asdict(chosen)})
    write_tuned(entries, table)
    print(f"{len(entries)} entries written to {table}; commit it together with a record of `make gpu PART=kernels`")
    return 0
