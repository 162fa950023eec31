"""h = act(gate) * up of a shard from a gate that is there: the product for up, and the activation in its epilogue.

up stays in registers. gate is copied to shared memory while the product runs, and h takes its place there on the way out.
Two warpgroups of 64 rows compute, a third one issues the copies of the product's operands; the kernel is persistent, as
`glu_up` is.
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
    for_each_block,
    launch_persistent,
    pipeline,
    swizzled,
)


# Jitted so that equal launches, of the straight-line shard and of the loop, in every layer, are traced and lowered once.
@partial(jax.jit, static_argnames=("activation", "blocks", "interpret"))
def glu_up_auxiliary(
    x: jax.Array,
    w_up: jax.Array,
    gate: jax.Array,
    *,
    b_up: jax.Array | None = None,
    activation: str,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> jax.Array:
    """h = act(gate) * (x w_up + b_up), [t, I], of one shard, in place of gate.

    Args:
        x: [t, H], bfloat16 | float16; any t >= 1 (padded to whole blocks here).
        w_up: [H, I], dtype of x. H a multiple of blocks.depth, I of blocks.columns.
        gate: [t, I], dtype of x: the pre-activation, bias and all. Its memory becomes that of h as in `dgated`.
        b_up: [I], dtype of x, or None.
        activation: one of shared_specs.ACTIVATIONS.
        blocks: None takes those of shared_specs.kernels.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: up accumulates in float32 and is rounded to the dtype of x once, after the bias, and the activation works on
        rounded values in float32: the numbers of the unfused XLA path.
    Raises:
        ValueError: sizes that the blocks do not divide; `common.mlp_reason` says it beforehand.
    """
    (t, H), I, dtype = x.shape, w_up.shape[1], x.dtype  # noqa: E741
    blocks = blocks or default_blocks("glu_up_aux", dtype, (I, H))
    rows, columns, depth, warpgroups = blocks.rows, blocks.columns, blocks.depth, blocks.warps // 4
    if I % columns or H % depth or rows % warpgroups or columns % PIECE:
        raise ValueError(f"glu_up_aux: H, I = {H}, {I} must be multiples of {depth}, {columns}")
    own, pieces = rows // warpgroups, columns // PIECE
    block_rows, block_columns = -(-t // rows), I // columns
    x, gate = (jnp.pad(a, ((0, block_rows * rows - t), (0, 0))) for a in (x, gate))
    biases = () if b_up is None else (b_up,)

    def kernel(x_gmem: Any, w_gmem: Any, gate_gmem: Any, *refs: Any) -> None:
        *bias_gmem, h_gmem = refs
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        own_rows = pl.ds(warpgroup * own, own)

        def step(_: Any, x_smem: Any, w_smem: Any, acc: Any) -> Any:
            """Return one block of H, its operands in shared memory."""
            plgpu.wgmma(acc, x_smem.at[own_rows], w_smem)
            plgpu.wgmma_wait(0)  # the copying warpgroup may overwrite these blocks after this step
            return acc

        def run_pipeline(compute: Any) -> Any:
            specs = [
                block_spec((rows, depth), lambda k: (0, k), dtype),
                block_spec((depth, columns), lambda k: (k, 0), dtype),
            ]
            return pipeline(step, specs, steps=H // depth, blocks=blocks, compute=compute)

        def persistent(allocations: Any, gate_smem: Any, arrived: Any, **bias_refs: Any) -> None:
            def one_block(row: Any, column: Any) -> None:
                token_span, column_span = pl.ds(row * rows, rows), pl.ds(column * columns, columns)

                def of_piece(gmem: Any, piece: int) -> Any:
                    return gmem.at[token_span, pl.ds(column * columns + piece * PIECE, PIECE)].at[own_rows]

                def compute(run_steps: Any) -> None:
                    def scope(acc: Any) -> None:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last block's results have been read
                        for piece in range(pieces):
                            target = gate_smem.at[warpgroup, piece]
                            plgpu.copy_gmem_to_smem(of_piece(gate_gmem, piece), target, arrived.at[warpgroup])
                        for ref in bias_gmem:
                            target = bias_refs["bias_smem"].at[warpgroup]
                            plgpu.copy_gmem_to_smem(ref.at[column_span], target, arrived.at[warpgroup])
                        run_steps(acc)
                        up = acc[...]
                        plgpu.barrier_wait(arrived.at[warpgroup])
                        for piece in range(pieces):
                            finish(up, piece)

                    pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32))

                def finish(accumulated: jax.Array, piece: int) -> None:
                    span = slice(piece * PIECE, (piece + 1) * PIECE)
                    up = accumulated[:, span]
                    if bias_gmem:
                        bias = bias_refs["bias_smem"][warpgroup, span].astype(jnp.float32)
                        up += lax.broadcast_in_dim(bias, up.shape, (1,))
                    act = activate_in_kernel(activation, gate_smem[warpgroup, piece].astype(jnp.float32))[0]
                    gate_smem[warpgroup, piece] = (act * up.astype(dtype).astype(jnp.float32)).astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(gate_smem.at[warpgroup, piece], of_piece(h_gmem, piece))

                run_pipeline(compute)(x_gmem.at[token_span, :], w_gmem.at[:, column_span], allocations=allocations)

            for_each_block((block_rows, block_columns), blocks, one_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        scratch: dict[str, Any] = {"bias_smem": plgpu.SMEM((warpgroups, columns), dtype)} if biases else {}
        pl.run_scoped(
            persistent,
            run_pipeline(lambda run_steps: None).get_allocations(x_gmem, w_gmem),
            plgpu.SMEM((warpgroups, pieces, own, PIECE), dtype, transforms=swizzled(PIECE, dtype)),
            plgpu.Barrier(num_arrivals=pieces + len(biases), num_barriers=warpgroups),
            collective_axes=WARPGROUP_AXIS,
            **scratch,
        )

    (h,) = launch_persistent(
        kernel,
        (x, w_up, gate, *biases),
        [(block_rows * rows, I)],
        dtype,
        over=(2,),
        name="glu_up_aux",
        count=block_rows * block_columns,
        blocks=blocks,
        interpret=interpret,
    )
    return h[:t]
