"""What the kernels share on the device: the raster, blocks in and out of memory, activations. Every function is inlined.

A matrix is a tensor descriptor where the device has a tensor memory accelerator (TMA), which fills what lies outside with
zeros and leaves out what is written there, else a pointer with the stride of its rows. `ROWS` and `COLUMNS` are the
block's sizes, `rows` and `columns` the matrix's own.
"""

import triton
import triton.language as tl


@triton.jit
def raster(program, m_blocks, n_blocks, GROUP: tl.constexpr):
    """(block row, block column) of a program: GROUP block rows at a time, so that their operands stay in the L2 cache."""
    width = GROUP * n_blocks
    first = program // width * GROUP
    rows = min(m_blocks - first, GROUP)
    return first + program % width % rows, program % width // rows


@triton.jit
def load_block(a, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """a[row : row + ROWS, column : column + COLUMNS]; zero outside."""
    if TMA:
        block = a.load([row, column])
    else:
        i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (i[:, None] < rows) & (j[None, :] < columns)
        block = tl.load(a + i[:, None].to(tl.int64) * stride + j[None, :], mask=inside, other=0.0)
    return block


@triton.jit
def store_block(
    a, value, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """a[row : row + ROWS, column : column + COLUMNS] = value, rounded to a's dtype."""
    if TMA:
        a.store([row, column], value.to(a.dtype))
    else:
        i, j = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        inside = (i[:, None] < rows) & (j[None, :] < columns)
        tl.store(a + i[:, None].to(tl.int64) * stride + j[None, :], value.to(a.dtype.element_ty), mask=inside)


@triton.jit
def load_bias(bias, column, columns, COLUMNS: tl.constexpr):
    """bias[column : column + COLUMNS] as one float32 row."""
    j = column + tl.arange(0, COLUMNS)
    return tl.load(bias + j, mask=j < columns, other=0.0).to(tl.float32)[None, :]


@triton.jit
def activate(a, ACTIVATION: tl.constexpr):
    """act(a), float32. A maximum passes NaN on, as PyTorch's does."""
    if ACTIVATION == "silu":
        return a * tl.sigmoid(a)
    elif ACTIVATION == "gelu":
        return a * (0.5 + 0.5 * tl.math.erf(a * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u): libdevice's tanh is not in the interpreter
        return a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
    elif ACTIVATION == "relu":
        return tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        positive = tl.maximum(a, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return positive * positive


@triton.jit
def activation_gradient(a, dact, ACTIVATION: tl.constexpr):
    """dact * act'(a), float32; where act is flat the result is 0 whatever dact is: it may be infinite."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(a)
        return dact * (s * (1 + a * (1 - s)))
    elif ACTIVATION == "gelu":
        cdf = 0.5 + 0.5 * tl.math.erf(a * 0.7071067811865476)
        return dact * (cdf + a * tl.exp(-0.5 * a * a) * 0.3989422804014327)
    elif ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
        return dact * (s * (1 + 1.5957691216057308 * a * (1 - s) * (1 + 0.134145 * a * a)))
    elif ACTIVATION == "relu":
        return tl.where(a <= 0, 0.0, dact)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        return tl.where(a <= 0, 0.0, dact * (2 * a))


@triton.jit
def prefetch_block(a, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Asks for a block of a matrix, by its pointer, to be in the L2 cache when it is loaded; not in the interpreter.

    One address every 128 bytes, of 16-bit elements 64; those outside stand for the last one inside.
    """
    i = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    j = tl.minimum(column + 64 * tl.arange(0, COLUMNS // 64), columns - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [a + i[:, None].to(tl.int64) * stride + j[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
