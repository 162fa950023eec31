"""dh = dy w_down with the activation's backward in the epilogue: dgate, dup and h, and dh is never stored."""

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch
from tiled_torch.core.triton_blocks import (
    activate,
    activation_gradient,
    load_block,
    prefetch_block,
    raster,
    store_block,
)


@triton.jit
def dgated_kernel(
    dy, w_down, gate, up, dgate, dup, h, gate_rows, up_rows, M, N, K, dy_stride, w_down_stride, pre_stride, d_stride,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr, PREFETCH: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    tl.assume(K > 0)  # see launch.summed
    if PERSISTENT:  # the next block's operands are loaded under this one's epilogue
        for block in tl.range(  # pyright: ignore[reportGeneralTypeIssues]
            tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), tl.num_programs(0), flatten=True
        ):
            _block(
                block, dy, w_down, gate, up, dgate, dup, h, gate_rows, up_rows, M, N, K, dy_stride, w_down_stride,
                pre_stride, d_stride, ACTIVATION, BM, BN, BK, GROUP, TMA, PRECISION, HALVES, PREFETCH,
            )  # fmt: skip
    else:
        _block(
            tl.program_id(0), dy, w_down, gate, up, dgate, dup, h, gate_rows, up_rows, M, N, K, dy_stride, w_down_stride,
            pre_stride, d_stride, ACTIVATION, BM, BN, BK, GROUP, TMA, PRECISION, HALVES, PREFETCH,
        )  # fmt: skip


@triton.jit
def _block(
    block, dy, w_down, gate, up, dgate, dup, h, gate_rows, up_rows, M, N, K, dy_stride, w_down_stride, pre_stride, d_stride,
    ACTIVATION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    m, n = raster(block, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    if PREFETCH:
        prefetch_block(gate_rows, m, n, M, N, pre_stride, BM, BN)
        prefetch_block(up_rows, m, n, M, N, pre_stride, BM, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rows = load_block(dy, m, k, M, K, dy_stride, BM, BK, TMA)
        acc = tl.dot(rows, load_block(w_down, k, n, K, N, w_down_stride, BK, BN, TMA), acc, input_precision=PRECISION)
    _pieces(acc, gate, up, dgate, dup, h, m, n, M, N, pre_stride, d_stride, ACTIVATION, BM, BN, TMA, HALVES)


@triton.jit
def _pieces(
    dh, gate, up, dgate, dup, h, m, n, M, N, pre_stride, d_stride, ACTIVATION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """The epilogue in as many pieces as `HALVES` says, each of which needs its share of the registers."""
    if HALVES == 1:
        _epilogue(dh, gate, up, dgate, dup, h, m, n, M, N, pre_stride, d_stride, ACTIVATION, BM, BN, TMA)
    else:
        half: tl.constexpr = BN // 2
        rest: tl.constexpr = HALVES // 2
        first, second = tl.reshape(dh, (BM, 2, half)).permute(0, 2, 1).split()
        _pieces(first, gate, up, dgate, dup, h, m, n, M, N, pre_stride, d_stride, ACTIVATION, BM, half, TMA, rest)
        _pieces(
            second, gate, up, dgate, dup, h, m, n + half, M, N, pre_stride, d_stride, ACTIVATION, BM, half, TMA, rest
        )


@triton.jit
def _epilogue(
    dh, gate, up, dgate, dup, h, m, n, M, N, pre_stride, d_stride, ACTIVATION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    g = load_block(gate, m, n, M, N, pre_stride, BM, BN, TMA).to(tl.float32)
    u = load_block(up, m, n, M, N, pre_stride, BM, BN, TMA).to(tl.float32)
    act = activate(g, ACTIVATION)
    store_block(h, act * u, m, n, M, N, d_stride, BM, BN, TMA)
    store_block(dup, dh * act, m, n, M, N, d_stride, BM, BN, TMA)
    store_block(dgate, activation_gradient(g, dh * u, ACTIVATION), m, n, M, N, d_stride, BM, BN, TMA)


@launch.register("dgated", mutates=("dgate", "dup", "h"))
def dgated(
    dy: Tensor, w_down: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, h: Tensor, activation: str
) -> None:
    """dgate, dup and h of one shard; dh stays in registers, float32.

    Args:
        dy: [t, H_out]. w_down: [H_out, I]. gate, up: [t, I], contiguous. Of one dtype: float32 | bfloat16 | float16.
        dgate, dup: [t, I], contiguous; may be gate and up themselves. h: [t, I]: act(gate) * up, for w_down's gradient.
    """
    dy, w_down = launch.summed(launch.dense(dy), 1), launch.summed(launch.dense(w_down), 0)
    (t, depth), width = dy.shape, w_down.shape[1]
    sizes = launch.blocks("dgated", dy, (width, depth))
    tma = launch.with_descriptors(dy, w_down, gate, up, dgate, dup, h)
    args = [
        launch.matrix(dy, sizes.rows, sizes.depth, descriptors=tma),
        launch.matrix(w_down, sizes.depth, sizes.columns, descriptors=tma),
        *(
            launch.matrix(a, sizes.rows, sizes.columns // sizes.halves, descriptors=tma)
            for a in (gate, up, dgate, dup, h)
        ),
    ]
    strides = [launch.row_stride(a) for a in (dy, w_down, gate, dgate)]
    prefetch = sizes.persistent and launch.can_prefetch(dy.device)
    rows = (gate, up) if prefetch else (None, None)
    launch.start(
        dgated_kernel, launch.programs(t, width, sizes, dy.device), *args, *rows, t, width, depth, *strides, blocks=sizes,
        ACTIVATION=activation, HALVES=sizes.halves, PREFETCH=prefetch, PERSISTENT=sizes.persistent,
        **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip
