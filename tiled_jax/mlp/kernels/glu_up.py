"""gate, up and h = act(gate) * up of a shard in one pass over x: two accumulators, the activation in the epilogue.

Two warpgroups of 64 rows each multiply the same block of x with a block of w_gate and one of w_up; a third one only
issues copies. The kernel is persistent: one program per multiprocessor goes through the blocks of the result, and the
stores of one block overlap the loads of the next.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import Blocks
from tiled_jax.core.activations import activate_in_kernel
from tiled_jax.core.mosaic import (
    PIECE,
    WARPGROUP_AXIS,
    block_spec,
    default_blocks,
    launch_persistent,
    swizzled,
)
from tiled_jax.mlp.kernels.main_loop import MainLoop, block_rows_of, rows_in_block, rows_of_warpgroup

_SLOTS = 2  # pieces of a warpgroup's results on their way to global memory at once


def glu_up(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    activation: str,
    keep: bool = False,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> Any:
    """h [t, I] of one shard, and with `keep` (h, gate, up).

    h = act(x w_gate + b_gate) * (x w_up + b_up). Without `keep` gate and up never leave the registers.

    Args:
        x: [t, H], bfloat16 | float16; any t >= 1 (padded to whole blocks here).
        w_gate, w_up: [H, I], dtype of x. H a multiple of blocks.depth, I of blocks.columns.
        b_gate, b_up: [I], dtype of x, or None.
        activation: one of shared_specs.ACTIVATIONS.
        blocks: None takes those of shared_specs.kernels.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: products accumulate in float32; gate and up are rounded to the dtype of x once, after the bias, and the
        activation works on the rounded values in float32: the numbers of the unfused XLA path.
    Raises:
        ValueError: sizes that the blocks do not divide; `common.mlp_reason` says it beforehand.
    """
    names = ("h", "gate", "up") if keep else ("h",)
    found = _launch(x, w_gate, w_up, {"gate": b_gate, "up": b_up}, activation, names, blocks, interpret)
    return found if keep else found[0]


def gate_and_up(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Return (gate, up), each [t, I]: what backward computes again. The arguments and numerics of `glu_up`; no h is made."""
    return _launch(x, w_gate, w_up, {"gate": b_gate, "up": b_up}, None, ("gate", "up"), blocks, interpret)


# Jitted so that equal launches, of the straight-line shard and of the loop, in every layer, are traced and lowered once.
@partial(jax.jit, static_argnames=("activation", "names", "blocks", "interpret"))
def _launch(
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    maybe_biases: Mapping[str, jax.Array | None],
    activation: str | None,
    names: tuple[str, ...],
    blocks: Blocks | None,
    interpret: Any,
) -> Any:
    """Return the results called `names`, in their order."""
    (t, H), I, dtype = x.shape, w_gate.shape[1], x.dtype  # noqa: E741
    blocks = blocks or default_blocks("glu_up", dtype, (I, H))
    rows, columns, depth, warpgroups = blocks.rows, blocks.columns, blocks.depth, blocks.warps // 4
    if I % columns or H % depth or rows % warpgroups or columns % PIECE:
        raise ValueError(f"glu_up: H, I = {H}, {I} must be multiples of {depth}, {columns}")
    own, pieces = rows_of_warpgroup(blocks), columns // PIECE
    block_rows, block_columns = block_rows_of(t, blocks), I // columns
    # Slots are taken in turn across blocks, so that the one taken is always the one stored from longest ago.
    slots = _SLOTS if pieces * len(names) % _SLOTS == 0 else 1
    x = jnp.pad(x, ((0, block_rows * rows - t), (0, 0)))
    biases = {name: bias for name, bias in maybe_biases.items() if bias is not None}

    def kernel(x_gmem: Any, w_gate_gmem: Any, w_up_gmem: Any, *refs: Any) -> None:
        bias_gmem = dict(zip(biases, refs, strict=False))
        out_gmem = dict(zip(names, refs[len(biases) :], strict=True))
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        mine = rows_in_block(blocks)

        def step(x_smem: Any, w_gate_smem: Any, w_up_smem: Any, accs: Any) -> Any:
            """Return one block of H."""
            gate_acc, up_acc = accs
            plgpu.wgmma(gate_acc, x_smem.at[mine], w_gate_smem)
            plgpu.wgmma(up_acc, x_smem.at[mine], w_up_smem)
            return accs

        w_specs = [block_spec((depth, columns), lambda k: (k, 0), dtype, cluster=blocks.cluster) for _ in range(2)]
        specs = [block_spec((rows, depth), lambda k: (0, k), dtype), *w_specs]
        main_loop = MainLoop(step, specs, steps=H // depth, products=2, blocks=blocks)

        def spans(row: Any, column: Any) -> tuple[Any, Any]:
            return pl.ds(row * rows, rows), pl.ds(column * columns, columns)

        def sources(row: Any, column: Any) -> tuple[Any, ...]:
            token_span, column_span = spans(row, column)
            return x_gmem.at[token_span, :], w_gate_gmem.at[:, column_span], w_up_gmem.at[:, column_span]

        def persistent(allocations: Any, out_smem: Any, **bias_refs: Any) -> None:
            def compute(row: Any, column: Any, run_steps: Any) -> None:
                token_span, column_span = spans(row, column)

                def load_biases() -> None:
                    for i, ref in enumerate(bias_gmem.values()):
                        source, target = ref.at[column_span], bias_refs["bias_smem"].at[warpgroup, i]
                        plgpu.copy_gmem_to_smem(source, target, bias_refs["bias_barrier"].at[warpgroup])

                def scope(gate_acc: Any, up_acc: Any) -> None:
                    load_biases()
                    run_steps((gate_acc, up_acc))
                    if bias_gmem:
                        plgpu.barrier_wait(bias_refs["bias_barrier"].at[warpgroup])
                    store({"gate": gate_acc[...], "up": up_acc[...]})

                def rounded(accumulated: jax.Array, name: str, span: slice) -> jax.Array:
                    """gate or up of one piece in the dtype of x."""
                    value = accumulated[:, span]
                    if name in bias_gmem:
                        bias = bias_refs["bias_smem"][warpgroup, list(bias_gmem).index(name), span]
                        value += lax.broadcast_in_dim(bias.astype(jnp.float32), value.shape, (1,))
                    return value.astype(dtype)

                def store(accumulated: dict[str, jax.Array]) -> None:
                    count = 0
                    for piece in range(pieces):
                        span = slice(piece * PIECE, (piece + 1) * PIECE)
                        part = {name: rounded(value, name, span) for name, value in accumulated.items()}
                        # Rounded before h is made of them: with their sums alive beside them registers would not do.
                        part = lax.optimization_barrier(part)
                        if activation is not None:
                            gate, up = part["gate"].astype(jnp.float32), part["up"].astype(jnp.float32)
                            part["h"] = (activate_in_kernel(activation, gate)[0] * up).astype(dtype)
                        target = pl.ds(column * columns + piece * PIECE, PIECE)
                        for name in names:
                            slot = out_smem.at[warpgroup, count % slots]
                            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # this slot's last copy has read
                            slot[...] = part[name]
                            plgpu.commit_smem()
                            plgpu.copy_smem_to_gmem(slot, out_gmem[name].at[token_span, target].at[mine])
                            count += 1

                acc = plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32)
                pl.run_scoped(scope, acc, acc)

            main_loop.run((block_rows, block_columns), sources, compute, allocations)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        scratch: dict[str, Any] = {}
        if biases:
            scratch["bias_smem"] = plgpu.SMEM((warpgroups, len(biases), columns), dtype)
            scratch["bias_barrier"] = plgpu.Barrier(num_arrivals=len(biases), num_barriers=warpgroups)
        pl.run_scoped(
            persistent,
            main_loop.allocations(x_gmem, w_gate_gmem, w_up_gmem),
            plgpu.SMEM((warpgroups, slots, own, PIECE), dtype, transforms=swizzled(PIECE, dtype)),
            collective_axes=WARPGROUP_AXIS,
            **scratch,
        )

    results = launch_persistent(
        kernel,
        (x, w_gate, w_up, *biases.values()),
        [(block_rows * rows, I)] * len(names),
        dtype,
        name="glu_up",
        count=block_rows * block_columns,
        blocks=blocks,
        interpret=interpret,
    )
    return tuple(result[:t] for result in results)
