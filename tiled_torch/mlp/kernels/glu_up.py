"""h = act(x w_gate^T + b_gate) * (x w_up^T + b_up): up-projections with the activation in the epilogue.

Two kernels. The dual one makes both products in one pass over x and can also store gate and up; the auxiliary one makes
the up product and reads gate, which a vendor library has made. Both round gate and up to the operands' dtype first, so
that h is the one that gate and up as stored give.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch
from tiled_torch.core.triton_blocks import activate, load_bias, load_block, raster, store_block


@triton.jit
def dual_kernel(
    x, w_gate, w_up, b_gate, b_up, h, gate, up, M, N, K, x_stride, w_gate_stride, w_up_stride, h_stride, pre_stride,
    ACTIVATION: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, STORE_H: tl.constexpr, STORE_PRE: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = raster(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    tl.assume(K > 0)  # see launch.summed
    gate_acc, up_acc = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rows = load_block(x, m, k, M, K, x_stride, BM, BK, TMA)
        gate_acc = tl.dot(
            rows, load_block(w_gate, n, k, N, K, w_gate_stride, BN, BK, TMA).T, gate_acc, input_precision=PRECISION
        )
        up_acc = tl.dot(
            rows, load_block(w_up, n, k, N, K, w_up_stride, BN, BK, TMA).T, up_acc, input_precision=PRECISION
        )
    if GATE_BIAS:
        gate_acc += load_bias(b_gate, n, N, BN)
    if UP_BIAS:
        up_acc += load_bias(b_up, n, N, BN)
    rounded_gate, rounded_up = gate_acc.to(DTYPE), up_acc.to(DTYPE)
    if STORE_PRE:
        store_block(gate, rounded_gate, m, n, M, N, pre_stride, BM, BN, TMA)
        store_block(up, rounded_up, m, n, M, N, pre_stride, BM, BN, TMA)
    if STORE_H:
        value = activate(rounded_gate.to(tl.float32), ACTIVATION) * rounded_up.to(tl.float32)
        store_block(h, value, m, n, M, N, h_stride, BM, BN, TMA)


@triton.jit
def auxiliary_kernel(
    x, w_up, b_up, gate, h, M, N, K, x_stride, w_up_stride, gate_stride, h_stride,
    ACTIVATION: tl.constexpr, UP_BIAS: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    m, n = raster(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    tl.assume(K > 0)  # see launch.summed
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        rows = load_block(x, m, k, M, K, x_stride, BM, BK, TMA)
        acc = tl.dot(rows, load_block(w_up, n, k, N, K, w_up_stride, BN, BK, TMA).T, acc, input_precision=PRECISION)
    if UP_BIAS:
        acc += load_bias(b_up, n, N, BN)
    if HALVES == 1:
        _epilogue(acc, gate, h, m, n, M, N, gate_stride, h_stride, ACTIVATION, DTYPE, BM, BN, TMA)
    else:
        first, second = tl.reshape(acc, (BM, 2, BN // 2)).permute(0, 2, 1).split()
        half: tl.constexpr = BN // 2
        _epilogue(first, gate, h, m, n, M, N, gate_stride, h_stride, ACTIVATION, DTYPE, BM, half, TMA)
        _epilogue(second, gate, h, m, n + half, M, N, gate_stride, h_stride, ACTIVATION, DTYPE, BM, half, TMA)


@triton.jit
def _epilogue(
    acc, gate, h, m, n, M, N, gate_stride, h_stride, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    g = load_block(gate, m, n, M, N, gate_stride, BM, BN, TMA).to(tl.float32)
    store_block(h, activate(g, ACTIVATION) * acc.to(DTYPE).to(tl.float32), m, n, M, N, h_stride, BM, BN, TMA)


TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@launch.register("glu_up", mutates=("h", "gate", "up"))
def glu_up(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    b_gate: Tensor | None,
    b_up: Tensor | None,
    h: Tensor | None,
    gate: Tensor | None,
    up: Tensor | None,
    activation: str,
) -> None:
    """Both up-projections in one pass over x, written into what is given: h, or gate and up, or all three.

    Args:
        x: [t, H]. w_gate, w_up: [I, H]. b_gate, b_up: [I] or None. Of one dtype: float32 (IEEE) | bfloat16 | float16.
        h: [t, I] or None. gate, up: [t, I], both or neither.
        activation: any of shared_specs.ACTIVATIONS.
    """
    x, w_gate, w_up = (launch.summed(launch.dense(a), 1) for a in (x, w_gate, w_up))
    (t, depth), width = x.shape, w_up.shape[0]
    sizes = launch.blocks("glu_up", x, (width, depth))
    tma = launch.with_descriptors(x, w_gate, w_up, h, gate, up)
    operands = [launch.matrix(a, sizes.rows, sizes.depth, descriptors=tma) for a in (x,)]
    operands += [launch.matrix(a, sizes.columns, sizes.depth, descriptors=tma) for a in (w_gate, w_up)]
    results = [launch.matrix(a, sizes.rows, sizes.columns, descriptors=tma) for a in (h, gate, up)]
    strides = [launch.row_stride(a) for a in (x, w_gate, w_up, h, gate)]
    launch.start(
        dual_kernel, launch.programs(t, width, sizes), *operands, b_gate, b_up, *results, t, width, depth, *strides,
        blocks=sizes, ACTIVATION=activation, GATE_BIAS=b_gate is not None, UP_BIAS=b_up is not None,
        STORE_H=h is not None, STORE_PRE=up is not None, DTYPE=TRITON_DTYPES[x.dtype],
        **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip


@launch.register("glu_up_auxiliary", mutates=("h",))
def glu_up_auxiliary(x: Tensor, w_up: Tensor, b_up: Tensor | None, gate: Tensor, h: Tensor, activation: str) -> None:
    """The up-projection, with gate [t, I] as it is read in the epilogue. h: [t, I], which may be gate itself."""
    x, w_up = (launch.summed(launch.dense(a), 1) for a in (x, w_up))
    (t, depth), width = x.shape, w_up.shape[0]
    sizes = launch.blocks("glu_up_aux", x, (width, depth))
    tma = launch.with_descriptors(x, w_up, gate, h)
    args = [
        launch.matrix(x, sizes.rows, sizes.depth, descriptors=tma),
        launch.matrix(w_up, sizes.columns, sizes.depth, descriptors=tma),
        b_up,
        *(launch.matrix(a, sizes.rows, sizes.columns // sizes.halves, descriptors=tma) for a in (gate, h)),
    ]
    strides = [launch.row_stride(a) for a in (x, w_up, gate, h)]
    launch.start(
        auxiliary_kernel, launch.programs(t, width, sizes), *args, t, width, depth, *strides, blocks=sizes,
        ACTIVATION=activation, UP_BIAS=b_up is not None, DTYPE=TRITON_DTYPES[x.dtype], HALVES=sizes.halves,
        **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip
