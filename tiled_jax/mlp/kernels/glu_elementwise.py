"""The activation of an MLP, gated or plain, forward and backward, in place of pre-activations that a product has stored.

One pass over memory: a program of 128 threads takes one run of elements, keeps it in registers, and reads and writes it
16 bytes a thread at a time. For shapes whose products are faster in the vendor's library than in `glu_up` and `dgated`.
"""

from collections.abc import Callable
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.kernels.blocks import Blocks
from tiled_jax.core.activations import activate_in_kernel
from tiled_jax.core.mosaic import default_blocks, in_wide_words, launch_over, shaped_like

_GRID_AXIS = "run"


def glu(
    gate: jax.Array | None, up: jax.Array, *, activation: str, blocks: Blocks | None = None, interpret: Any = None
) -> jax.Array:
    """h = act(gate) * up, or act(up) without a gate.

    Args:
        gate, up: [t, I], bfloat16 | float16 | float32; any t >= 1 (padded here where t x I is no whole number of runs).
            gate None: a plain MLP.
        activation: one of shared_specs.ACTIVATIONS.
        blocks: `columns` elements a program, a multiple of 128; None takes those of shared_specs.kernels.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: float32, rounded once.
    """

    def gated(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        return (activate_in_kernel(activation, gate)[0] * up,)

    def plain(up: jax.Array) -> tuple[jax.Array, ...]:
        return (activate_in_kernel(activation, up)[0],)

    if gate is None:
        return _launch(plain, (up,), 1, "glu", blocks, interpret)[0]
    return _launch(gated, (gate, up), 1, "glu", blocks, interpret)[0]


def glu_backward(
    dh: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    *,
    activation: str,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Return (dgate, dup, h) from dh, gate and up, all [t, I]; the arguments and numerics of `glu`.

    dgate = dh * up * act'(gate), dup = dh * act(gate), and h again, which the gradient of w_down needs. Without a gate
    dup = dh * act'(up), and dgate is None.
    """

    def gated(dh: jax.Array, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        act, dgate = activate_in_kernel(activation, gate, dh * up)
        return dgate, dh * act, act * up

    def plain(dh: jax.Array, up: jax.Array) -> tuple[jax.Array, ...]:
        act, dup = activate_in_kernel(activation, up, dh)
        return dup, act

    if gate is None:
        return None, *_launch(plain, (dh, up), 2, "glu_backward", blocks, interpret)
    return _launch(gated, (dh, gate, up), 3, "glu_backward", blocks, interpret)


def _launch(
    formula: Callable[..., tuple[jax.Array, ...]],
    operands: tuple[jax.Array, ...],
    results: int,
    name: str,
    blocks: Blocks | None,
    interpret: Any,
) -> Any:
    """`formula` of float32 values, element by element; its results take the place of as many operands."""
    (t, I), dtype = operands[0].shape, operands[0].dtype  # noqa: E741
    run = (blocks or default_blocks("glu_elementwise", dtype, (I,))).columns
    whole = run // gcd(run, I)  # tokens that fill runs exactly
    rows = -(-t // whole) * whole
    # A run is a row: its index times the length of a run is made in 64 bits, which from 2^31 elements on it needs.
    count = rows * I // run
    runs = [jnp.pad(a, ((0, rows - t), (0, 0))).reshape(count, run) for a in operands]

    def kernel(*refs: Any) -> None:
        own = lax.axis_index(_GRID_AXIS)
        values = formula(*(in_wide_words(ref[own], interpret).astype(jnp.float32) for ref in refs[: len(runs)]))
        for ref, value in zip(refs[len(runs) :], values, strict=True):
            ref[own] = value.astype(dtype)

    out = [shaped_like((count, run), dtype, *operands) for _ in range(results)]
    grid = {_GRID_AXIS: count}
    found = launch_over(kernel, runs, out, over=range(results), name=name, grid=grid, interpret=interpret)
    return tuple(result.reshape(rows, I)[:t] for result in found)
