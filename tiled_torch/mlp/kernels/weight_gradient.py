"""acc = a^T b, or acc += a^T b, with the sum in float32.

Adding starts from the stored accumulator: for shards whose length is a multiple of the block's depth the additions then
come in the same order at every shard count, and the sum is the same to the last bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch
from tiled_torch.core.triton_blocks import load_block, raster, store_block


@triton.jit
def weight_gradient_kernel(
    a, b, acc, M, N, T, a_stride, b_stride, acc_stride, ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, n = raster(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m, n = m * BM, n * BN
    tl.assume(T > 0)  # see launch.summed
    if ADD:
        total = load_block(acc, m, n, M, N, acc_stride, BM, BN, TMA).to(tl.float32)
    else:
        total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, T, BK):
        columns = load_block(a, k, m, T, M, a_stride, BK, BM, TMA).T
        total = tl.dot(columns, load_block(b, k, n, T, N, b_stride, BK, BN, TMA), total, input_precision=PRECISION)
    store_block(acc, total, m, n, M, N, acc_stride, BM, BN, TMA)


@launch.register("weight_gradient", mutates=("acc",))
def weight_gradient(acc: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """acc (+)= a^T b. a: [t, M]; b: [t, N]; acc: [M, N], float32, or of any dtype where nothing is added to it."""
    a, b = launch.summed(launch.dense(a), 0), launch.summed(launch.dense(b), 0)
    (t, width), columns = a.shape, b.shape[1]
    sizes = launch.blocks("weight_gradient", a, (width, columns))
    tma = launch.with_descriptors(a, b, acc)
    args = [
        launch.matrix(a, sizes.depth, sizes.rows, descriptors=tma),
        launch.matrix(b, sizes.depth, sizes.columns, descriptors=tma),
        launch.matrix(acc, sizes.rows, sizes.columns, descriptors=tma),
    ]
    strides = [launch.row_stride(m) for m in (a, b, acc)]
    launch.start(
        weight_gradient_kernel, launch.programs(width, columns, sizes), *args, width, columns, t, *strides, blocks=sizes,
        ADD=add, **launch.block_constants(sizes, descriptors=tma),
    )  # fmt: skip
