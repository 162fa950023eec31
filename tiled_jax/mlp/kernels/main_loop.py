"""The products of a persistent kernel, block after block: by all computing warpgroups at once, or each in its turn.

At once, every warpgroup has its rows of the same block; all of them come to the epilogue together, and the tensor cores
wait for it. In turns (`Blocks.turns`) each has a block of its own and its operands are copied in the order of the blocks:
while one works on its epilogue the operands that arrive are the other's. Nobody has to wait for a turn: there is one queue
of blocks of operands, and each of them belongs to one warpgroup.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import Blocks
from tiled_jax.core.mosaic import (
    COPYING_REGISTERS,
    GRID_AXIS,
    WARPGROUP_AXIS,
    computing_registers,
    for_each_block,
    pipeline,
)


def rows_of_warpgroup(blocks: Blocks) -> int:
    """Return how many rows of a block one computing warpgroup makes."""
    return blocks.rows if blocks.turns else blocks.rows // (blocks.warps // 4)


def block_rows_of(tokens: int, blocks: Blocks) -> int:
    """Return how many block rows so many tokens are: whole clusters of them."""
    return -(-tokens // (blocks.rows * blocks.cluster)) * blocks.cluster


def rows_in_block(blocks: Blocks) -> Any:
    """Return the rows of a block that the calling warpgroup makes."""
    own = rows_of_warpgroup(blocks)
    return pl.ds(0 if blocks.turns else lax.axis_index(WARPGROUP_AXIS) * own, own)


class MainLoop:
    """One kernel's: `step` on every block of the summed dim, whose operands are in shared memory.

    Args:
        step: carry = step(*operands, carry) issues products and waits for none.
        in_specs: of the operands' blocks; each index is a function of the number of the step.
        steps: blocks of the summed dim. products: how many `wgmma` a step issues.
        blocks: the kernel's.
    """

    def __init__(self, step: Any, in_specs: Sequence[Any], *, steps: int, products: int, blocks: Blocks) -> None:
        self.step, self.in_specs, self.steps, self.products, self.blocks = step, in_specs, steps, products, blocks
        self.warpgroups = blocks.warps // 4
        self.stages = min(blocks.stages, steps)

    def allocations(self, *sources: Any) -> Any:
        """Return the shared memory and barriers, for `pl.run_scoped`. sources: the operands whole, in device memory."""
        if not self.blocks.turns:
            return self._pipeline(lambda run_steps: None).get_allocations(*sources)
        slots = [
            plgpu.SMEM((self.stages, *spec.block_shape), source.dtype, transforms=spec.transforms)
            for spec, source in zip(self.in_specs, sources, strict=True)
        ]
        count = self.warpgroups * self.stages
        arrived = plgpu.Barrier(num_arrivals=len(sources), num_barriers=count)
        return {"slots": slots, "arrived": arrived, "free": plgpu.Barrier(num_barriers=count)}

    def run(
        self,
        counts: tuple[int, int],
        sources: Callable[[Any, Any], Sequence[Any]],
        compute: Callable[[Any, Any, Any], None],
        allocations: Any,
    ) -> None:
        """Run a program's share of a result of so many blocks, in the order of `blocks.group`; every warpgroup calls it.

        Args:
            sources: the operands of a block row and block column, in device memory, all of the summed dim.
            compute: compute(block row, block column, run_steps) is the work of a computing warpgroup on a block; it calls
                carry = run_steps(carry) once, after which no product is under way.
        """
        if self.blocks.turns:
            self._run_in_turns(counts, sources, compute, **allocations)
            return

        def one_block(row: Any, column: Any) -> None:
            run = self._pipeline(lambda run_steps: compute(row, column, run_steps))
            run(*sources(row, column), allocations=allocations)

        for_each_block(counts, self.blocks, one_block)

    def _pipeline(self, compute: Any) -> Any:
        def step(_: Any, *operands: Any) -> Any:
            carry = self.step(*operands)
            plgpu.wgmma_wait(0)  # the copying warpgroup may overwrite these blocks after this step
            return carry

        return pipeline(step, self.in_specs, steps=self.steps, blocks=self.blocks, compute=compute)

    def _run_in_turns(
        self, counts: tuple[int, int], sources: Any, compute: Any, *, slots: Any, arrived: Any, free: Any
    ) -> None:
        warpgroup, count = lax.axis_index(WARPGROUP_AXIS), counts[0] * counts[1]

        def for_each(work: Callable[[Any, Any, Any], None]) -> None:
            @plgpu.nd_loop((count,), collective_axes=GRID_AXIS)
            def _each(loop: Any) -> None:
                work(loop.local_index, *plgpu.planar_snake(loop.index[0], counts, 0, self.blocks.group))

        def barrier_of(number: Any) -> Any:
            """Return which barrier is that of a step, counted through all blocks of the program."""
            return lax.rem(number // self.steps, self.warpgroups) * self.stages + lax.rem(number, self.stages)

        def copy_all() -> None:
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            def copy_block(block: Any, row: Any, column: Any) -> None:
                refs = sources(row, column)

                def copy_step(k: Any, carry: Any) -> Any:
                    number = block * self.steps + k

                    @pl.when(number >= self.stages)
                    def _slot_has_been_read() -> None:
                        plgpu.barrier_wait(free.at[barrier_of(number - self.stages)])

                    for spec, ref, slot in zip(self.in_specs, refs, slots, strict=True):
                        spans = (
                            pl.ds(index * size, size)
                            for index, size in zip(spec.index_map(k), spec.block_shape, strict=True)
                        )
                        target = slot.at[lax.rem(number, self.stages)]
                        plgpu.copy_gmem_to_smem(ref.at[tuple(spans)], target, arrived.at[barrier_of(number)])
                    return carry

                lax.fori_loop(0, self.steps, copy_step, jnp.int32(0))

            for_each(copy_block)
            programs, program = lax.axis_size(GRID_AXIS), lax.axis_index(GRID_AXIS)
            total = (count - program + programs - 1) // programs * self.steps

            def wait_for(number: Any, carry: Any) -> Any:  # or barriers would be left in the middle of a phase
                plgpu.barrier_wait(free.at[barrier_of(number)])
                return carry

            lax.fori_loop(jnp.maximum(total - self.stages, 0), total, wait_for, jnp.int32(0))

        def compute_all() -> None:
            plgpu.set_max_registers(computing_registers(self.warpgroups), action="increase")

            def compute_block(block: Any, row: Any, column: Any) -> None:
                def run_steps(carry: Any) -> Any:
                    first = block * self.steps

                    def one_step(k: Any, carry: Any) -> Any:
                        number = first + k
                        plgpu.barrier_wait(arrived.at[barrier_of(number)])
                        carry = self.step(*(slot.at[lax.rem(number, self.stages)] for slot in slots), carry)
                        # Alone with the tensor cores: the products of one step start before those of the last one end.
                        plgpu.wgmma_wait(self.products)

                        @pl.when(k > 0)
                        def _release() -> None:
                            plgpu.barrier_arrive(free.at[barrier_of(number - 1)])

                        return carry

                    carry = lax.fori_loop(0, self.steps, one_step, carry)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[barrier_of(first + self.steps - 1)])
                    return carry

                @pl.when(lax.rem(block, self.warpgroups) == warpgroup)
                def _own_turn() -> None:
                    compute(row, column, run_steps)

            for_each(compute_block)

        lax.cond(warpgroup < self.warpgroups, compute_all, copy_all)
