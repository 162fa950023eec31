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

from shared_specs.blocks import Blocks
from tiled_jax.kernels.activations import activate
from tiled_jax.kernels.common import (
    PIECE,
    WARPGROUP_AXIS,
    block_spec,
    default_blocks,
    for_each_block,
    launch_persistent,
    pipeline,
    supports_transposed_reads,
    swizzled,
)


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
    """(dgate, dup, h), each [t, I], of one shard: dgate in place of gate, and dup of up.

    With dh = dy w_down^T: dgate = dh * up * act'(gate), dup = dh * act(gate), h = act(gate) * up, which the gradient of
    w_down needs. dh itself is never stored.

    Args:
        dy: [t, H], bfloat16 | float16; any t >= 1 (padded to whole blocks here).
        w_down: [I, H], dtype of dy. H a multiple of blocks.depth, I of blocks.columns.
        gate, up: [t, I], dtype of dy: the pre-activations. Their memory becomes that of dgate and dup where t is whole
            blocks and the caller has no other use for them (not inside `shard_map` with check_vma=True on jax 0.11,
            which lets no kernel write to what varies over devices).
        activation: one of shared_specs.ACTIVATIONS.
        blocks: None takes those of shared_specs.blocks.
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
    own, pieces = rows // warpgroups, columns // PIECE
    block_rows, block_columns = -(-t // rows), I // columns
    dy, gate, up = (jnp.pad(a, ((0, block_rows * rows - t), (0, 0))) for a in (dy, gate, up))
    as_stored = supports_transposed_reads(interpret)
    weight = w_down if as_stored else w_down.T

    def kernel(
        dy_gmem: Any, w_gmem: Any, gate_gmem: Any, up_gmem: Any, dgate_gmem: Any, dup_gmem: Any, h_gmem: Any
    ) -> None:
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        own_rows = pl.ds(warpgroup * own, own)

        def step(_: Any, dy_smem: Any, w_smem: Any, acc: Any) -> Any:
            """One block of H, its operands in shared memory."""
            plgpu.wgmma(acc, dy_smem.at[own_rows], w_smem.transpose((1, 0)) if as_stored else w_smem)
            plgpu.wgmma_wait(0)  # the copying warpgroup may overwrite these blocks after this step
            return acc

        def run_pipeline(compute: Any) -> Any:
            w_block = ((columns, depth), lambda k: (0, k)) if as_stored else ((depth, columns), lambda k: (k, 0))
            specs = [block_spec((rows, depth), lambda k: (0, k), dtype), block_spec(*w_block, dtype)]
            return pipeline(step, specs, steps=H // depth, blocks=blocks, compute=compute)

        def persistent(allocations: Any, gate_smem: Any, up_smem: Any, h_smem: Any, arrived: Any) -> None:
            def one_block(row: Any, column: Any) -> None:
                token_span, column_span = pl.ds(row * rows, rows), pl.ds(column * columns, columns)

                def of_piece(gmem: Any, piece: int) -> Any:
                    return gmem.at[token_span, pl.ds(column * columns + piece * PIECE, PIECE)].at[own_rows]

                def compute(run_steps: Any) -> None:
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

                    pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32))

                def finish(dh: jax.Array, piece: int) -> None:
                    gate = gate_smem[warpgroup, piece].astype(jnp.float32)
                    up = up_smem[warpgroup, piece].astype(jnp.float32)
                    act, dgate = activate(activation, gate, dh * up)
                    gate_smem[warpgroup, piece] = dgate.astype(dtype)
                    up_smem[warpgroup, piece] = (dh * act).astype(dtype)
                    h_smem[warpgroup, piece] = (act * up).astype(dtype)
                    plgpu.commit_smem()
                    for source, target in ((gate_smem, dgate_gmem), (up_smem, dup_gmem), (h_smem, h_gmem)):
                        plgpu.copy_smem_to_gmem(source.at[warpgroup, piece], of_piece(target, piece))

                weight_block = w_gmem.at[column_span, :] if as_stored else w_gmem.at[:, column_span]
                run_pipeline(compute)(dy_gmem.at[token_span, :], weight_block, allocations=allocations)

            for_each_block((block_rows, block_columns), blocks, one_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        block = plgpu.SMEM((warpgroups, pieces, own, PIECE), dtype, transforms=swizzled(PIECE, dtype))
        pl.run_scoped(
            persistent,
            run_pipeline(lambda run_steps: None).get_allocations(dy_gmem, w_gmem),
            *(block, block, block),
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
