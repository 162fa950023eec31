"""Plain products of a shard: y = x w + b, and dx = dup w_up^T + dgate w_gate^T in one accumulator with one rounding.

XLA's library makes these faster; a deterministic call needs the same order of additions at every shard count. Two
warpgroups of 64 rows compute, a third one issues copies; the kernel is persistent, as `glu_up` is.
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

_SLOTS = 2  # pieces of a warpgroup's results on their way to global memory at once


def linear(
    x: jax.Array, w: jax.Array, *, bias: jax.Array | None = None, blocks: Blocks | None = None, interpret: Any = None
) -> jax.Array:
    """x w + bias, [t, N].

    Args:
        x: [t, K], bfloat16 | float16; any t >= 1 (padded to whole blocks here). K a multiple of blocks.depth.
        w: [K, N], dtype of x. N a multiple of 64.
        bias: [N], dtype of x, or None.
        blocks: None takes those of shared_specs.kernels.blocks; narrower ones where N asks for them.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: float32, a block of K at a time, rounded once after the bias.
    Raises:
        ValueError: sizes that the blocks do not divide; `common.mlp_reason` says it beforehand.
    """
    return _launch((x,), (w,), bias, "linear", blocks, interpret)


def dx(
    dgate: jax.Array | None,
    dup: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> jax.Array:
    """dup w_up^T + dgate w_gate^T, [t, H]; the arguments and numerics of `linear`.

    Both products share one accumulator, a block of I of each in turn. dgate and w_gate are None together.

    Args:
        dgate, dup: [t, I]. w_gate, w_up: [H, I]. I a multiple of blocks.depth, H of 64.
    """
    if dgate is None or w_gate is None:
        return _launch((dup,), (w_up,), None, "dx", blocks, interpret)
    return _launch((dup, dgate), (w_up, w_gate), None, "dx", blocks, interpret)


# Jitted so that equal launches, of the straight-line shard and of the loop, in every layer, are traced and lowered once.
@partial(jax.jit, static_argnames=("op", "blocks", "interpret"))
def _launch(
    rows_of: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None,
    op: str,
    blocks: Blocks | None,
    interpret: Any,
) -> jax.Array:
    """Return the sum of the products of each pair, and the bias; "dx" takes the weights transposed."""
    transposed = op == "dx"
    (t, K), dtype = rows_of[0].shape, rows_of[0].dtype
    N = weights[0].shape[0 if transposed else 1]
    blocks = narrowed(blocks or default_blocks(op, dtype, (N, K)), N)
    rows, columns, depth, warpgroups = blocks.rows, blocks.columns, blocks.depth, blocks.warps // 4
    if N % columns or K % depth or rows % warpgroups or columns % PIECE:
        raise ValueError(f"{op}: K, N = {K}, {N} must be multiples of {depth}, {columns}")
    own, pieces, pairs = rows // warpgroups, columns // PIECE, len(weights)
    block_rows, block_columns = -(-t // rows), N // columns
    # Slots are taken in turn across blocks, so that the one taken is always the one stored from longest ago.
    slots = _SLOTS if pieces % _SLOTS == 0 else 1
    as_stored = transposed and supports_transposed_reads(interpret)
    weights = tuple(w.T for w in weights) if transposed and not as_stored else weights
    padded = tuple(jnp.pad(a, ((0, block_rows * rows - t), (0, 0))) for a in rows_of)
    biases = () if bias is None else (bias,)

    def kernel(*refs: Any) -> None:
        a_gmem, w_gmem = refs[:pairs], refs[pairs : 2 * pairs]
        *bias_gmem, out_gmem = refs[2 * pairs :]
        warpgroup = lax.axis_index(WARPGROUP_AXIS)
        own_rows = pl.ds(warpgroup * own, own)

        def step(_: Any, *operands: Any) -> Any:
            """Return one block of K of every pair, in shared memory."""
            *blocks_smem, acc = operands
            for a_smem, w_smem in zip(blocks_smem[:pairs], blocks_smem[pairs:], strict=True):
                plgpu.wgmma(acc, a_smem.at[own_rows], w_smem.transpose((1, 0)) if as_stored else w_smem)
            plgpu.wgmma_wait(0)  # the copying warpgroup may overwrite these blocks after this step
            return acc

        def run_pipeline(compute: Any) -> Any:
            w_block = ((columns, depth), lambda k: (0, k)) if as_stored else ((depth, columns), lambda k: (k, 0))
            a_specs = [block_spec((rows, depth), lambda k: (0, k), dtype) for _ in range(pairs)]
            w_specs = [block_spec(*w_block, dtype) for _ in range(pairs)]
            return pipeline(step, [*a_specs, *w_specs], steps=K // depth, blocks=blocks, compute=compute)

        def persistent(allocations: Any, out_smem: Any, **bias_refs: Any) -> None:
            def one_block(row: Any, column: Any) -> None:
                token_span, column_span = pl.ds(row * rows, rows), pl.ds(column * columns, columns)

                def compute(run_steps: Any) -> None:
                    def scope(acc: Any) -> None:
                        for ref in bias_gmem:
                            target, barrier = bias_refs["bias_smem"], bias_refs["bias_barrier"]
                            plgpu.copy_gmem_to_smem(ref.at[column_span], target.at[warpgroup], barrier.at[warpgroup])
                        run_steps(acc)
                        if bias_gmem:
                            plgpu.barrier_wait(bias_refs["bias_barrier"].at[warpgroup])
                        store(acc[...])

                    pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef((own, columns), jnp.float32))

                def store(accumulated: jax.Array) -> None:
                    for piece in range(pieces):
                        span = slice(piece * PIECE, (piece + 1) * PIECE)
                        value = accumulated[:, span]
                        if bias_gmem:
                            added = bias_refs["bias_smem"][warpgroup, span].astype(jnp.float32)
                            value += lax.broadcast_in_dim(added, value.shape, (1,))
                        slot = out_smem.at[warpgroup, piece % slots]
                        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # this slot's last copy has read
                        slot[...] = value.astype(dtype)
                        plgpu.commit_smem()
                        target = pl.ds(column * columns + piece * PIECE, PIECE)
                        plgpu.copy_smem_to_gmem(slot, out_gmem.at[token_span, target].at[own_rows])

                a_blocks = (ref.at[token_span, :] for ref in a_gmem)
                w_blocks = (ref.at[column_span, :] if as_stored else ref.at[:, column_span] for ref in w_gmem)
                run_pipeline(compute)(*a_blocks, *w_blocks, allocations=allocations)

            for_each_block((block_rows, block_columns), blocks, one_block)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        scratch: dict[str, Any] = {}
        if bias_gmem:
            scratch["bias_smem"] = plgpu.SMEM((warpgroups, columns), dtype)
            scratch["bias_barrier"] = plgpu.Barrier(num_barriers=warpgroups)
        pl.run_scoped(
            persistent,
            run_pipeline(lambda run_steps: None).get_allocations(*a_gmem, *w_gmem),
            plgpu.SMEM((warpgroups, slots, own, PIECE), dtype, transforms=swizzled(PIECE, dtype)),
            collective_axes=WARPGROUP_AXIS,
            **scratch,
        )

    (result,) = launch_persistent(
        kernel,
        (*padded, *weights, *biases),
        [(block_rows * rows, N)],
        dtype,
        name=op,
        count=block_rows * block_columns,
        blocks=blocks,
        interpret=interpret,
    )
    return result[:t]
