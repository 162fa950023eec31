"""Plain products of a shard: x w^T + b, and dx = dgate w_gate + dup w_up in one accumulator with one rounding.

A vendor library makes these faster; a deterministic call needs the same order of additions at every shard count.
"""

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch
from tiled_torch.core.triton_blocks import load_bias, load_block, raster, store_block


@triton.jit
def linear_kernel(
    x, w, bias, y, M, N, K, x_stride, w_stride, y_stride, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = raster(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    tl.assume(K > 0)  # see launch.summed
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rows = load_block(x, m, k, M, K, x_stride, BM, BK, TMA)
        acc = tl.dot(rows, load_block(w, n, k, N, K, w_stride, BN, BK, TMA).T, acc, input_precision=PRECISION)
    if BIAS:
        acc += load_bias(bias, n, N, BN)
    store_block(y, acc, m, n, M, N, y_stride, BM, BN, TMA)


@triton.jit
def dx_kernel(
    dgate, dup, w_gate, w_up, dx, M, N, K, d_stride, w_gate_stride, w_up_stride, dx_stride, GATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = raster(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    tl.assume(K > 0)  # see launch.summed
    acc = tl.zeros((BM, BN), tl.float32)
    # Two loops: two products into one accumulator in one step are miscompiled for Blackwell (Liger-Kernel PR 1435).
    for k in range(0, K, BK):
        rows = load_block(dup, m, k, M, K, d_stride, BM, BK, TMA)
        acc = tl.dot(rows, load_block(w_up, k, n, K, N, w_up_stride, BK, BN, TMA), acc, input_precision=PRECISION)
    if GATED:
        for k in range(0, K, BK):
            rows = load_block(dgate, m, k, M, K, d_stride, BM, BK, TMA)
            acc = tl.dot(
                rows, load_block(w_gate, k, n, K, N, w_gate_stride, BK, BN, TMA), acc, input_precision=PRECISION
            )
    store_block(dx, acc, m, n, M, N, dx_stride, BM, BN, TMA)


@launch.register("linear", mutates=("y",))
def linear(x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x w^T + bias. x: [t, K]; w: [N, K]; bias: [N] or None; y: [t, N], of any dtype; rounded once."""
    x, w = (launch.summed(launch.dense(a), 1) for a in (x, w))
    (t, depth), width = x.shape, w.shape[0]
    sizes = launch.blocks("linear", x, (width, depth))
    tma = launch.with_descriptors(x, w, y)
    args = [
        launch.matrix(x, sizes.rows, sizes.depth, descriptors=tma),
        launch.matrix(w, sizes.columns, sizes.depth, descriptors=tma),
        bias,
        launch.matrix(y, sizes.rows, sizes.columns, descriptors=tma),
    ]
    strides = [launch.row_stride(a) for a in (x, w, y)]
    launch.start(
        linear_kernel, launch.programs(t, width, sizes), *args, t, width, depth, *strides, blocks=sizes,
        BIAS=bias is not None, **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip


@launch.register("dx", mutates=("dx_",))
def dx(dgate: Tensor | None, dup: Tensor, w_gate: Tensor | None, w_up: Tensor, dx_: Tensor) -> None:
    """dx_ = dup w_up + dgate w_gate. dgate, dup: [t, I]; w_gate, w_up: [I, H]; dx_: [t, H], of any dtype."""
    dup, w_up = launch.summed(launch.dense(dup), 1), launch.summed(launch.dense(w_up), 0)
    if dgate is not None and w_gate is not None:
        dgate, w_gate = (
            launch.summed(launch.dense(dgate), 1),
            launch.summed(launch.dense(w_gate), 0),
        )
    (t, depth), width = dup.shape, w_up.shape[1]
    sizes = launch.blocks("dx", dup, (width, depth))
    tma = launch.with_descriptors(dgate, dup, w_gate, w_up, dx_)
    args = [
        *(launch.matrix(a, sizes.rows, sizes.depth, descriptors=tma) for a in (dgate, dup)),
        *(launch.matrix(a, sizes.depth, sizes.columns, descriptors=tma) for a in (w_gate, w_up)),
        launch.matrix(dx_, sizes.rows, sizes.columns, descriptors=tma),
    ]
    strides = [launch.row_stride(a) for a in (dup, w_gate, w_up, dx_)]
    launch.start(
        dx_kernel, launch.programs(t, width, sizes), *args, t, width, depth, *strides, blocks=sizes,
        GATED=dgate is not None, **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip
