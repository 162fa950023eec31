"""acc + a^T b, the sum over the tokens of a shard, in place of acc and in float32.

Each block of tokens is multiplied into an accumulator of its own, which is then added to the running sum in registers;
the running sum starts from the stored accumulator. For shards whose length is a multiple of the block's depth the
additions therefore come in the same order at every shard count, and the sum is the same to the last bit. Two warpgroups
of 64 rows compute, a third one issues copies; the kernel is persistent, as `glu_up` is.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import Blocks
from tiled_jax.core.mosaic import (
    PIECE,
    WARPGROUP_AXIS,
    block_spec,
    default_blocks,
    for_each_block,
    launch_persistent,
    narrowed,
    pipeline,
    supports_transposed_reads,
    swizzled,
)


# Jitted so that equal launches, of the straight-line shard and of the loop, in every layer, are traced and lowered once.
@partial(jax.jit, static_argnames=("blocks", "interpret"))
def weight_gradient(
    acc: jax.Array, a: jax.Array, b: jax.Array, *, blocks: Blocks | None = None, interpret: Any = None
) -> jax.Array:
    """acc + a^T b, [M, N] float32.

    Args:
        acc: [M, N] float32: the sum so far. Its memory becomes that of the result where the caller has no other use for it
            (not inside `shard_map` with check_vma=True on jax 0.11, which lets no kernel write to what varies over devices).
        a: [t, M], bfloat16 | float16; any t >= 1 (padded to whole blocks here). M a multiple of blocks.rows.
        b: [t, N], dtype of a. N a multiple of 64.
        blocks: None takes those of shared_specs.kernels.blocks; narrower ones where N asks for them.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: float32 throughout: blocks.depth tokens at a time in token order, each block's sum added to the one before it.
    Raises:
        ValueError: sizes that the blocks do not divide; `common.mlp_reason` says it beforehand.
    """
    (t, M), N, dtype = a.shape, b.shape[1], a.dtype
    blocks = narrowed(blocks or default_blocks("weight_gradient", dtype, (M, N)), N)
    rows, columns, depth, warpgroups = blocks.rows, blocks.columns, blocks.depth, blocks.warps // 4
    if M % rows or N % columns or rows % warpgroups or columns % PIECE:
        raise ValueError(f"weight_gradient: M, N = {M}, {N} must be multiples of {rows}, {columns}")
    own, steps = rows // warpgroups, -(-t // depth)
    block_rows, block_columns = M // rows, N // columns
    a, b = (jnp.pad(value, ((0, steps * depth - t), (0, 0))) for value in (a, b))
    as_stored = supports_transposed_reads(interpret)
    a = a if as_stored else a.T

    def kernel(acc_gmem: Any, a_gmem: Any, b_gmem: Any, sum_gmem: Any) -> None:
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        own_rows = pl.ds(warpgroup * own, own)

        def step(_: Any, a_smem: Any, b_smem: Any, total: jax.Array) -> jax.Array:
            """Return one block of tokens, its operands in shared memory."""

            def product(block_acc: Any) -> jax.Array:
                mine = a_smem.at[:, own_rows].transpose((1, 0)) if as_stored else a_smem.at[own_rows]
                plgpu.wgmma(block_acc, mine, b_smem)
                return block_acc[...]  # waits: the copying warpgroup may overwrite these blocks after this step

            return total + pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32))

        def run_pipeline(compute: Any) -> Any:
            a_block = ((depth, rows), lambda k: (k, 0)) if as_stored else ((rows, depth), lambda k: (0, k))
            specs = [block_spec(*a_block, dtype), block_spec((depth, columns), lambda k: (k, 0), dtype)]
            return pipeline(step, specs, steps=steps, blocks=blocks, compute=compute)

        def persistent(allocations: Any, total_smem: Any, arrived: Any) -> None:
            def one_block(row: Any, column: Any) -> None:
                row_span, column_span = pl.ds(row * rows, rows), pl.ds(column * columns, columns)
                own_acc, own_sum = (ref.at[row_span, column_span].at[own_rows] for ref in (acc_gmem, sum_gmem))
                own_total = total_smem.at[warpgroup]

                def compute(run_steps: Any) -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last block's sum has been read
                    plgpu.copy_gmem_to_smem(own_acc, own_total, arrived.at[warpgroup])
                    plgpu.barrier_wait(arrived.at[warpgroup])
                    total_smem[warpgroup] = run_steps(total_smem[warpgroup])
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(own_total, own_sum)

                a_block = a_gmem.at[:, row_span] if as_stored else a_gmem.at[row_span, :]
                run_pipeline(compute)(a_block, b_gmem.at[:, column_span], allocations=allocations)

            for_each_block((block_rows, block_columns), blocks, one_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.run_scoped(
            persistent,
            run_pipeline(lambda run_steps: None).get_allocations(a_gmem, b_gmem),
            plgpu.SMEM((warpgroups, own, columns), jnp.float32, transforms=swizzled(columns, jnp.float32)),
            plgpu.Barrier(num_barriers=warpgroups),
            collective_axes=WARPGROUP_AXIS,
        )

    return launch_persistent(
        kernel,
        (acc, a, b),
        [(M, N)],
        jnp.float32,
        name="weight_gradient",
        count=block_rows * block_columns,
        blocks=blocks,
        interpret=interpret,
        over=(0,),
    )[0]
