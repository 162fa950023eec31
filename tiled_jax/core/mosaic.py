"""What the Mosaic GPU kernels share: shared-memory layouts, launch parameters, the interpreter, and who may call them.

Every kernel is a `plgpu.kernel` under Warpgroup semantics, named because the default differs between JAX versions.
Without a GPU a kernel runs in JAX's GPU interpreter, seconds per call: each launch wrapper takes `interpret`, the
interpreter's parameters (`interpreter()`), or None to compile for the device. `TILED_PALLAS_INTERPRET=1` in the
environment, read at each call by `tiled_jax.backends`, makes the public functions hand it over for backend="pallas";
backend="auto" never chooses the interpreter. It is for tests, and for nothing that has to be fast.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import DETERMINISTIC, Blocks, blocks_for, paths_for

ARCHITECTURE = "sm_90"
KERNEL_DTYPES = ("bfloat16", "float16")

WARPGROUP_AXIS = "warpgroup"
GRID_AXIS = "sm"
CLUSTER_AXIS = "cluster"
# The largest swizzle is 128 bytes: 64 columns of 16 bits, which is also what one store to global memory takes at a time.
PIECE = 64

# Of a thread that only issues copies. Few, so that those that compute have 232 each, and their numbers stay in them.
COPYING_REGISTERS = 40
_HOPPER_SMS = 132
_THREADS = 128  # of a warpgroup
_REGISTERS = 65536  # of a multiprocessor
# More would only cost time: the interpreter runs the blocks of the grid one after the other.
_INTERPRETED_SMS = 2


def swizzled(columns: int, dtype: Any) -> tuple[Any, Any]:
    """Return the transforms of a [rows, columns] block in shared memory that TMA writes and tensor cores read."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(columns * bits)
    return plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)


def block_spec(shape: tuple[int, int], index: Any, dtype: Any, *, cluster: int = 1) -> Any:
    """Return one operand's block per step of a pipeline, in shared memory. cluster: of so many programs that have the same
    one.
    """
    shared: dict[str, Any] = {"collective_axes": (CLUSTER_AXIS,)} if cluster > 1 else {}
    return plgpu.BlockSpec(shape, index, transforms=swizzled(shape[1], dtype), memory_space=plgpu.SMEM, **shared)


def interpreter(**options: Any) -> Any:
    """Return the parameters of JAX's GPU interpreter, such as detect_races; public from jax 0.11 on."""
    params = getattr(plgpu, "InterpretGPUParams", None)
    if params is None:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as params
    return params(**options)


def differentiated_as(formula: Callable[..., Any], kernel: Callable[..., Any]) -> Any:
    """Return `kernel`, whose derivative is that of `formula` of the same operands."""
    step = jax.custom_jvp(kernel)
    step.defjvp(partial(jax.jvp, formula))
    return step


def supports_transposed_reads(interpret: Any) -> bool:
    """Return whether a kernel may hand a transposed block to the tensor cores: always, but in the interpreter of jax 0.10."""
    return interpret is None or hasattr(plgpu, "InterpretGPUParams")


def takes_ref(interpret: Any, *operands: jax.Array) -> bool:
    """Return whether a kernel may work in place of an operand, on a ref that `pl.run_state` makes of it.

    Not in the interpreter of jax 0.10, and from jax 0.11 on not where what it is given varies along mesh axes.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        return not _varying(operands)
    return interpret is None


def _varying(operands: Sequence[jax.Array]) -> frozenset[str]:
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in operands))


def in_wide_words(values: jax.Array, interpret: Any) -> jax.Array:
    """Return values [n] just loaded from device memory, of which every thread of a warpgroup loads 16 bytes at once if n
    allows it.

    Mosaic's own choice is 8 bytes. The interpreter, where it makes no difference, does not know the request in jax 0.10.
    """
    if interpret is not None:
        return values
    width = gcd(values.size // _THREADS, 16 // values.dtype.itemsize)
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED(values.shape, vec_size=width))


def computing_registers(computing: int) -> int:
    """Return the registers that a thread of so many computing warpgroups may ask for, beside one that copies.

    Together they have what the program was launched with: of every thread as many, a multiple of 8. A warpgroup that asks for
    more waits for ever.
    """
    launched = _REGISTERS // (_THREADS * (computing + 1)) // 8 * 8
    return min(256, (launched * (computing + 1) - COPYING_REGISTERS) // computing // 8 * 8)


def persistent_grid(count: int, interpret: Any, resident: int = 1, cluster: int = 1) -> dict[str, int]:
    """Return a grid of so many programs per multiprocessor, each looping over its share of so many blocks (`for_each_block`).

    A grid of clusters where there are any.
    """
    multiprocessors = _INTERPRETED_SMS
    if interpret is None:
        multiprocessors = getattr(jax.devices()[0], "core_count", None) or _HOPPER_SMS
    return {GRID_AXIS: max(1, min(count, multiprocessors * resident) // cluster)}


def for_each_block(counts: tuple[int, int], blocks: Blocks, work: Callable[[Any, Any], None]) -> None:
    """work(block row, block column) for a program's share of a result of so many blocks, in the order of `blocks.group`."""
    cluster = blocks.cluster
    rows, own = counts[0] // cluster, lax.axis_index(CLUSTER_AXIS) if cluster > 1 else 0

    @plgpu.nd_loop((rows * counts[1],), collective_axes=GRID_AXIS)
    def _each(loop: Any) -> None:
        row, column = plgpu.planar_snake(loop.index[0], (rows, counts[1]), 0, blocks.group)
        work(row * cluster + own, column)


def pipeline(step: Any, in_specs: Sequence[Any], *, steps: int, blocks: Blocks, compute: Any) -> Any:
    """`step` on every block of the summed dim: one warpgroup copies operands, and the others `compute(run_steps)`."""
    return plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=list(in_specs),
        wg_axis=WARPGROUP_AXIS,
        num_compute_wgs=blocks.warps // 4,
        memory_registers=COPYING_REGISTERS,
        max_concurrent_steps=blocks.stages,
        compute_context=compute,
    )


def launch(
    body: Any,
    out: Sequence[Any],
    *,
    name: str,
    grid: dict[str, int],
    interpret: Any,
    warpgroups: int | None = None,
    cluster: int = 1,
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
        **_clusters(cluster),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({} if interpret is None else {"interpret": interpret}),
    )


def _clusters(size: int) -> dict[str, Any]:
    return {} if size == 1 else {"cluster": (size,), "cluster_names": (CLUSTER_AXIS,)}


def launch_persistent(
    body: Any,
    operands: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    dtype: Any,
    *,
    name: str,
    count: int,
    blocks: Blocks,
    interpret: Any,
    over: Sequence[int] = (),
) -> Any:
    """`launch_over` of results of these shapes, of a kernel that goes through `count` blocks by `for_each_block`."""
    return launch_over(
        body,
        operands,
        [shaped_like(shape, dtype, *operands) for shape in shapes],
        over=over,
        name=name,
        grid=persistent_grid(count, interpret, cluster=blocks.cluster),
        warpgroups=blocks.warps // 4 + 1,
        cluster=blocks.cluster,
        interpret=interpret,
    )


def launch_over(
    body: Any, operands: Sequence[jax.Array], out: Sequence[Any], *, over: Sequence[int], interpret: Any, **options: Any
) -> tuple[jax.Array, ...]:
    """Return the results that `body(*operands, *results)` writes, the first ones in place of the operands that `over`
    counts off.

    Where no ref can be taken of the operands (`takes_ref`) all results are new. An operand that somebody else still
    needs is copied by XLA. Under `vmap` an in-place kernel runs once after the other.
    """
    if not over or not takes_ref(interpret, *operands):
        return launch(body, out, interpret=interpret, **options)(*operands)
    fresh = out[len(over) :]

    def written_over(*refs: Any) -> None:
        body(*refs[: len(operands)], *(refs[i] for i in over), *refs[len(operands) :])

    call = launch_in_place(written_over, fresh, interpret=interpret, **options)

    @jax.custom_batching.sequential_vmap
    def in_place(*operands: jax.Array) -> tuple[jax.Array, ...]:
        def run(state: Any) -> None:
            refs = dict(enumerate(operands)) | dict(zip(over, state[0], strict=True))
            for ref, value in zip(state[1], call(*(refs[i] for i in range(len(operands)))), strict=True):
                ref[...] = value

        # The zeros are never written: the whole of them is replaced.
        owned = _own_arrays(tuple(operands[i] for i in over)), tuple(zeros(result) for result in fresh)
        written, made = pl.run_state(run)(owned)
        return *written, *made

    return in_place(*operands)


def _own_arrays(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return the operands as arrays that XLA makes before the kernel runs.

    XLA for GPUs fuses a slice of a larger array into the kernel that reads it. It does so with kernels too that write over the
    slice, and then nobody writes to the results: found on an H200, where gate and up that were kept came out as they were.
    """
    return lax.optimization_barrier(operands)


def launch_in_place(
    body: Any,
    out: Sequence[Any],
    *,
    name: str,
    grid: dict[str, int],
    interpret: Any,
    warpgroups: int | None = None,
    cluster: int = 1,
) -> Any:
    """`launch` whose operands may be refs (`jax.new_ref`), which the program may write to.

    `plgpu.kernel` of jax 0.10 takes no refs, because of the batching rule it adds; this is the same without that rule.
    """
    threads: dict[str, Any] = {} if warpgroups is None else {"num_threads": warpgroups, "thread_name": WARPGROUP_AXIS}
    threads |= _clusters(cluster)
    return pl.kernel(
        body,
        out_type=tuple(out),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid), **threads),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret or False,
        name=name,
    )


def shaped_like(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """Return a result that, inside `shard_map`, varies along every mesh axis along which an operand does."""
    axes = _varying(operands)
    kind: dict[str, Any] = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)} if axes else {}
    return jax.ShapeDtypeStruct(shape, dtype, **kind)


def zeros(result: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of the shape, dtype and type of a result (`shaped_like`)."""
    axes = tuple(sorted(result.manual_axis_type.varying)) if result.manual_axis_type else ()
    empty = jnp.zeros(result.shape, result.dtype)
    return jax.lax.pcast(empty, axes, to="varying") if axes else empty


def default_blocks(op: str, dtype: Any, shape: tuple[int, ...]) -> Blocks:
    """Return the block sizes of `shared_specs.kernels.blocks` for this op on Hopper. shape: the sizes that no shard count
    changes.
    """
    return blocks_for("pallas", op, ARCHITECTURE, str(jnp.dtype(dtype)), shape)


def narrowed(blocks: Blocks, columns: int) -> Blocks:
    """Return the blocks, or narrower ones down to one piece that divide a result of this many columns.

    Which additions make an element does not depend on the width of its block.
    """
    width = blocks.columns
    while width > PIECE and columns % width:
        width //= 2
    return replace(blocks, columns=width)


def mlp_reason(
    dtype: Any, *, hidden: int, intermediate: int, out: int, gated: bool, deterministic: bool = False
) -> str | None:
    """Return why the kernels cannot run the MLP's shards, of any length; None where they can. deterministic: every product."""
    if not (gated or deterministic):
        return "The Pallas kernels are those of an MLP with a gate, found w_gate=None."
    if str(jnp.dtype(dtype)) not in KERNEL_DTYPES:
        return f"The Pallas kernels take {' or '.join(KERNEL_DTYPES)}, found {jnp.dtype(dtype)}."
    H, I = hidden, intermediate  # noqa: E741
    paths = DETERMINISTIC if deterministic else paths_for("pallas", ARCHITECTURE, str(jnp.dtype(dtype)), (I, H))
    products = [] if gated else [("linear", I, H), ("dx", I, out)]
    if gated and paths.up != "vendor":
        products.append(("glu_up" if paths.up == "dual" else "glu_up_aux", I, H))
    if gated and paths.down == "dgated":
        products.append(("dgated", I, out))
    if deterministic:
        products += [("linear", out, I), ("dx", H, I), ("weight_gradient", H, I), ("weight_gradient", I, out)]
    for op, n, k in products:
        for size, block in _size_rules(op, default_blocks(op, dtype, (n, k)), n, k):
            if size % block or size == 0:
                return f"The Pallas kernel {op} needs sizes that are multiples of {block}, found {size}."
    return None


def _size_rules(op: str, blocks: Blocks, n: int, k: int) -> tuple[tuple[int, int], ...]:
    """Return each size with what it has to be a multiple of: N and K of a product, both dims of a weight's gradient."""
    match op:
        case "weight_gradient":
            return (n, blocks.rows), (k, PIECE)
        case "linear" | "dx":
            return (n, PIECE), (k, blocks.depth)
    return (n, blocks.columns), (k, blocks.depth)
