"""What the launch wrappers share on the host: which block sizes, descriptors or pointers, and the launch itself."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from shared_specs.errors import UnsupportedError
from shared_specs.kernels import blocks as table
from shared_specs.kernels.blocks import Blocks

# What the interpreter and ahead-of-time compilation stand for; a GPU says for itself what it is.
ASSUMED = (9, 0)
# Triton's interpreter multiplies bfloat16 operands as if their bits were integers, in silence. Whoever mends that for a
# test says so here; without it a kernel refuses bfloat16 in the interpreter.
bfloat16_in_interpreter = False


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; what `ASSUMED` says for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else ASSUMED


def architecture(device: torch.device) -> str:
    """Return the row of the block table that suits a device: the newest one that is not newer than it."""
    major, minor = capability(device)
    known = sorted(int(name.removeprefix("sm_")) for name in table.ARCHITECTURES["triton"])
    return f"sm_{max((a for a in known if a <= 10 * major + minor), default=known[0])}"


# Block sizes that stand in for the table's, by op: what `tune` is trying.
trying: dict[str, Blocks] = {}


def blocks(op: str, a: Tensor, shape: tuple[int, ...]) -> Blocks:
    """Return the block sizes of one launch, whose operands are like `a`. shape: see `blocks_for`."""
    if op in trying:
        return trying[op]
    dtype = str(a.dtype).removeprefix("torch.")
    return table.blocks_for("triton", op, architecture(a.device), dtype, shape)


def with_descriptors(*matrices: Tensor | None) -> bool:
    """Return whether the tensor memory accelerator can address them all: sm_90 or newer, 16-byte rows and addresses."""
    given = [a for a in matrices if a is not None]
    aligned = all(a.stride(0) * a.itemsize % 16 == 0 and a.data_ptr() % 16 == 0 for a in given)
    return aligned and all(a.numel() for a in given) and capability(given[0].device) >= (9, 0)


def matrix(a: Tensor | None, rows: int, columns: int, *, descriptors: bool) -> Any:
    """Return a kernel's argument: a descriptor with this block, or the tensor itself."""
    return TensorDescriptor.from_tensor(a, [rows, columns]) if descriptors and a is not None else a


def dense(a: Tensor) -> Tensor:
    """a, or a copy of it where its rows are not contiguous or overlap, as those of an expanded gradient do.

    A clone, because `contiguous()` leaves a single column as it is, whatever its strides.
    """
    good = a.stride(1) == 1 and a.stride(0) >= a.shape[1]
    return a if good else a.clone(memory_format=torch.contiguous_format)


def summed(a: Tensor, dim: int) -> Tensor:
    """a, or one zero for each of its rows or columns where the dim that a product sums over is empty.

    The kernels say `tl.assume(K > 0)`: without it Triton 3.6 compiles a loop that may not run at all, and ptxas then waits
    for every single product of a warpgroup (C7515).
    """
    return a if a.shape[dim] else a.new_zeros([1 if i == dim else size for i, size in enumerate(a.shape)])


def row_stride(a: Tensor | None) -> int:
    """Return elements from one row to the next; columns are contiguous."""
    if a is None:
        return 0
    if a.stride(-1) != 1 and a.numel():
        raise ValueError(f"rows must be contiguous, got strides {a.stride()}")
    return a.stride(0)


def start(kernel: Any, programs: int, *args: Any, blocks: Blocks, **constants: Any) -> None:
    """Launches a kernel on a grid of one dim, none for no programs."""
    if not programs:
        return
    tensors = [a.base if isinstance(a, TensorDescriptor) else a for a in args]
    found = next(a for a in tensors if isinstance(a, Tensor))
    wrong = isinstance(kernel, InterpretedFunction) and not bfloat16_in_interpreter
    if wrong and any(isinstance(a, Tensor) and a.dtype == torch.bfloat16 for a in tensors):
        raise UnsupportedError(
            "triton: operands must be float32 or float16 in Triton's interpreter, got bfloat16, whose bits it multiplies "
            "as if they were integers."
        )
    with torch.cuda.device_of(found):
        kernel[(programs,)](*args, **constants, num_warps=blocks.warps, num_stages=blocks.stages)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; those of an H100 or H200 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def can_prefetch(device: torch.device) -> bool:
    """Return whether kernels may hold inline assembly, which the interpreter, alone to take a CPU's tensors, does not know."""
    return device.type != "cpu"


def programs(m: int, n: int, sizes: Blocks, device: torch.device | None = None) -> int:
    """Blocks of an [M, N] result; for a kernel that can make several a program, as many as its device runs at once."""
    blocks = triton.cdiv(m, sizes.rows) * triton.cdiv(n, sizes.columns)
    if not sizes.persistent:
        return blocks
    if device is None:
        raise ValueError(f"triton: blocks must not be persistent for this kernel, got {sizes}")
    return min(blocks, processors(device))


def block_constants(sizes: Blocks, *, descriptors: bool) -> Mapping[str, Any]:
    """Return the constants of a kernel that makes products. float32 means IEEE float32, never TF32."""
    names = {"BM": sizes.rows, "BN": sizes.columns, "BK": sizes.depth, "GROUP": sizes.group}
    return {**names, "TMA": descriptors, "PRECISION": "ieee"}


def register(name: str, *, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Any]:
    """Registers a launch wrapper that returns nothing as the operator `tiled_torch::<name>`, with its fake."""

    def decorate(function: Callable[..., None]) -> Any:
        op: Any = torch.library.custom_op(f"tiled_torch::{name}", function, mutates_args=mutates)
        op.register_fake(lambda *args, **kwargs: None)
        op.wrapper = function  # what it does without the dispatcher: ahead-of-time compilation runs it on meta tensors
        return op

    return decorate
