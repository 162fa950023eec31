"""What the Mosaic GPU kernels share: shared-memory layouts, launch parameters, the interpreter, and who may call them.

Every kernel is a `plgpu.kernel` under Warpgroup semantics, named because the default differs between JAX versions.
Without a GPU a kernel runs in JAX's GPU interpreter, seconds per call: each launch wrapper takes `interpret`, the
interpreter's parameters (`interpreter()`), or None to compile for the device. `TILED_PALLAS_INTERPRET=1` in the
environment, read at each call by `tiled_jax.backends`, makes the public functions hand it over for backend="pallas";
backend="auto" never chooses the interpreter. It is for tests, and for nothing that has to be fast.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.blocks import Blocks, blocks_for
from tiled_jax.kernels.activations import KERNEL_ACTIVATIONS

ARCHITECTURE = "sm_90"
KERNEL_DTYPES = ("bfloat16", "float16")

WARPGROUP_AXIS = "warpgroup"
GRID_AXIS = "sm"
# The largest swizzle is 128 bytes: 64 columns of 16 bits, which is also what one store to global memory takes at a time.
PIECE = 64

_HOPPER_SMS = 132
# More would only cost time: the interpreter runs the blocks of the grid one after the other.
_INTERPRETED_SMS = 2


def swizzled(columns: int, dtype: Any) -> tuple[Any, Any]:
    """The transforms of a [rows, columns] block in shared memory that TMA writes and tensor cores read."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def block_spec(shape: tuple[int, int], index: Any, dtype: Any) -> Any:
    """One operand's block per step of a pipeline, in shared memory."""
    return plgpu.BlockSpec(shape, index, transforms=swizzled(shape[1], dtype), memory_space=plgpu.SMEM)


def interpreter(**options: Any) -> Any:
    """Parameters of JAX's GPU interpreter, such as detect_races; public from jax 0.11 on."""
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(**options)


def supports_transposed_reads(interpret: Any) -> bool:
    """Whether a kernel may hand a transposed block to the tensor cores: always, but in the interpreter of jax 0.10."""
    return interpret is None or hasattr(plgpu, "InterpretGPUParams")


def persistent_grid(steps: int, interpret: Any) -> dict[str, int]:
    """A grid of one program per multiprocessor, each looping over its share of the steps."""
    if interpret is not None:
        return {GRID_AXIS: min(steps, _INTERPRETED_SMS)}
    return {GRID_AXIS: min(steps, getattr(jax.devices()[0], "core_count", None) or _HOPPER_SMS)}


def launch(
    body: Any, out: Sequence[Any], *, name: str, grid: dict[str, int], interpret: Any, warpgroups: int | None = None
) -> Any:
    """`plgpu.kernel` of `body` over a grid of named axes; `warpgroups` of a program have an axis of their own."""
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=None if warpgroups is None else WARPGROUP_AXIS,
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )


def launch_in_place(body: Any, out: Sequence[Any], *, name: str, grid: dict[str, int], interpret: Any) -> Any:
    """`launch` of one warpgroup a program whose operands may be refs (`jax.new_ref`), which it may write to.

    `plgpu.kernel` of jax 0.10 takes no refs, because of the batching rule it adds; this is the same without that rule.
    """
    return pl.kernel(
        body,
        out_type=tuple(out),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret or False,
        name=name,
    )


def shaped_like(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """A result that, inside `shard_map`, varies along every mesh axis along which an operand does."""
    axes = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in operands))
    kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
    return jax.ShapeDtypeStruct(shape, dtype, **kind)


def default_blocks(op: str, dtype: Any, shape: tuple[int, ...]) -> Blocks:
    """The block sizes of `shared_specs.blocks` for this op on Hopper. shape: the sizes that no shard count changes."""
    return blocks_for("pallas", op, ARCHITECTURE, str(jnp.dtype(dtype)), shape)


def product_reason(op: str, dtype: Any, shape: tuple[int, int, int]) -> str | None:
    """Why the kernel `op` cannot make a product of M x N x K in this dtype; None where it can. Any M will do."""
    if str(jnp.dtype(dtype)) not in KERNEL_DTYPES:
        return f"The Pallas kernels take {' or '.join(KERNEL_DTYPES)}, found {jnp.dtype(dtype)}."
    blocks = default_blocks(op, dtype, shape[1:])
    for size, block in zip(shape[1:], (blocks.columns, blocks.depth), strict=True):
        if size % block or size == 0:
            return f"The Pallas kernel {op} needs sizes that are multiples of {block}, found {size}."
    return None


def mlp_reason(
    dtype: Any, *, tokens: int, hidden: int, intermediate: int, out: int, gated: bool, activation: str
) -> str | None:
    """Why the kernels of the MLP cannot run for a shard of `tokens`; None where they can."""
    if not gated:
        return "The Pallas kernels are those of an MLP with a gate, found w_gate=None."
    if activation not in KERNEL_ACTIVATIONS:
        return f"The Pallas kernels have the activations {', '.join(KERNEL_ACTIVATIONS)}, found {activation}."
    return product_reason("glu_up", dtype, (tokens, intermediate, hidden)) or product_reason(
        "dgated", dtype, (tokens, intermediate, out)
    )
