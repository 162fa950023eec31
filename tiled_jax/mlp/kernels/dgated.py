"""dgate, dup and h of a shard: the product dh = dy w_down^T, and the activation's backward in its epilogue.

dh stays in registers. gate and up are copied to shared memory while the product runs; dgate and dup then take their
place there on the way out. Two warpgroups of 64 rows compute, a third one issues the copies of the product's operands;
the kernel is persistent, as `glu_up` is.
"""

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
    supports_transposed_reads,
    swizzled,
)
from tiled_jax.mlp.kernels.main_loop import MainLoop, block_rows_of, rows_in_block, rows_of_warpgroup

_SLOTS = 2  # pieces of a warpgroup's h on their way to global memory at once


# Jitted so that equal launches, of the straight-line shard and of the loop, in every layer, are traced and lowered once.
@partial(jax.jit, static_argnames=("activation", "blocks", "interpret"))
def dgated(
    dy: jax.Array,
    w_down: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (dgate, dup, h), each [t, I], of one shard: dgate in place of gate, and dup of up.

    With dh = dy w_down^T: dgate = dh * up * act'(gate), dup = dh * act(gate), h = act(gate) * up, which the gradient of
    w_down needs. dh itself is never stored.

    Args:
        dy: [t, H], bfloat16 | float16; any t >= 1 (padded to whole blocks here).
        w_down: [I, H], dtype of dy. H a multiple of blocks.depth, I of blocks.columns.
        gate, up: [t, I], dtype of dy: the pre-activations. Their memory becomes that of dgate and dup where t is whole
            blocks and the caller has no other use for them (not inside `shard_map` with check_vma=True on jax 0.11,
            which lets no kernel write to what varies over devices).
        activation: one of shared_specs.ACTIVATIONS.
        blocks: None takes those of shared_specs.kernels.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: dh accumulates in float32 and is not rounded, where the XLA path rounds it to the dtype of dy; elementwise
        work is float32; each result is rounded once.
    Raises:
        ValueError: sizes that the blocks do not divide; `common.mlp_reason` says it beforehand.
    """
    (t, H), I, dtype = dy.shape, w_down.shape[0], dy.dtype  # noqa: E741
    blocks = blocks or default_blocks("dgated", dtype, (I, H))
    rows, columns, depth, warpgroups = blocks.rows, blocks.columns, blocks.depth, blocks.warps // 4
    if I % columns or H % depth or rows % warpgroups or columns % PIECE:
        raise ValueError(f"dgated: H, I = {H}, {I} must be multiples of {depth}, {columns}")
    own, pieces = rows_of_warpgroup(blocks), columns // PIECE
    # In turns nobody waits for the stores of a warpgroup but itself, and room counts more.
    slots = 1 if blocks.turns else min(_SLOTS, pieces)
    block_rows, block_columns = block_rows_of(t, blocks), I // columns
    dy, gate, up = (jnp.pad(a, ((0, block_rows * rows - t), (0, 0))) for a in (dy, gate, up))
    as_stored = supports_transposed_reads(interpret)
    weight = w_down if as_stored else w_down.T

    def kernel(
        dy_gmem: Any, w_gmem: Any, gate_gmem: Any, up_gmem: Any, dgate_gmem: Any, dup_gmem: Any, h_gmem: Any
    ) -> None:
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        mine = rows_in_block(blocks)

        def step(dy_smem: Any, w_smem: Any, acc: Any) -> Any:
            """Return one block of H."""
            plgpu.wgmma(acc, dy_smem.at[mine], w_smem.transpose((1, 0)) if as_stored else w_smem)
            return acc

        w_block = ((columns, depth), lambda k: (0, k)) if as_stored else ((depth, columns), lambda k: (k, 0))
        specs = [
            block_spec((rows, depth), lambda k: (0, k), dtype),
            block_spec(*w_block, dtype, cluster=blocks.cluster),
        ]
        main_loop = MainLoop(step, specs, steps=H // depth, products=1, blocks=blocks)

        def spans(row: Any, column: Any) -> tuple[Any, Any]:
            return pl.ds(row * rows, rows), pl.ds(column * columns, columns)

        def sources(row: Any, column: Any) -> tuple[Any, Any]:
            token_span, column_span = spans(row, column)
            weight_block = w_gmem.at[column_span, :] if as_stored else w_gmem.at[:, column_span]
            return dy_gmem.at[token_span, :], weight_block

        def persistent(allocations: Any, gate_smem: Any, up_smem: Any, h_smem: Any, arrived: Any) -> None:
            def compute(row: Any, column: Any, run_steps: Any) -> None:
                token_span, _ = spans(row, column)

                def of_piece(gmem: Any, piece: int) -> Any:
                    return gmem.at[token_span, pl.ds(column * columns + piece * PIECE, PIECE)].at[mine]

                def scope(acc: Any) -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last block's results have been read
                    for piece in range(pieces):
                        for source, target in ((gate_gmem, gate_smem), (up_gmem, up_smem)):
                            target, barrier = target.at[warpgroup, piece], arrived.at[warpgroup]
                            plgpu.copy_gmem_to_smem(of_piece(source, piece), target, barrier)
                    run_steps(acc)
                    dh = acc[...]
                    plgpu.barrier_wait(arrived.at[warpgroup])
                    for piece in range(pieces):
                        finish(dh[:, piece * PIECE : (piece + 1) * PIECE], piece)

                def finish(dh: jax.Array, piece: int) -> None:
                    gate = gate_smem[warpgroup, piece].astype(jnp.float32)
                    up = up_smem[warpgroup, piece].astype(jnp.float32)
                    act, dgate = activate_in_kernel(activation, gate, dh * up)
                    if piece >= slots:  # of the copies since, three a piece, that of this slot is the first
                        plgpu.wait_smem_to_gmem(3 * slots - 1, wait_read_only=True)
                    h_slot = h_smem.at[warpgroup, piece % slots]
                    h_slot[...] = (act * up).astype(dtype)
                    gate_smem[warpgroup, piece] = dgate.astype(dtype)
                    up_smem[warpgroup, piece] = (dh * act).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(h_slot, of_piece(h_gmem, piece))
                    for source, target in ((gate_smem, dgate_gmem), (up_smem, dup_gmem)):
                        plgpu.copy_smem_to_gmem(source.at[warpgroup, piece], of_piece(target, piece))

                pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32))

            main_loop.run((block_rows, block_columns), sources, compute, allocations)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        block = plgpu.SMEM((warpgroups, pieces, own, PIECE), dtype, transforms=swizzled(PIECE, dtype))
        pl.run_scoped(
            persistent,
            main_loop.allocations(dy_gmem, w_gmem),
            *(block, block),
            plgpu.SMEM((warpgroups, slots, own, PIECE), dtype, transforms=swizzled(PIECE, dtype)),
            plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=warpgroups),
            collective_axes=WARPGROUP_AXIS,
        )

    dgate, dup, h = launch_persistent(
        kernel,
        (dy, weight, gate, up),
        [(block_rows * rows, I)] * 3,
        dtype,
        over=(2, 3),
        name="dgated",
        count=block_rows * block_columns,
        blocks=blocks,
        interpret=interpret,
    )
    return dgate[:t], dup[:t], h[:t]
