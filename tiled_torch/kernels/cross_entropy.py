"""The pass over a shard of logits [t, v]: statistics of every row, and dlogits over the logits themselves.

One program a row, two sweeps over it. The first reads it from memory; the second, which runs from the end to the start,
finds it in the L2 cache and writes the gradient. The same kernel makes the first sweep alone (a loss without gradients,
vocabulary shards) or the second alone (backward, from the log-sum-exp of the whole vocabulary). Formulas:
`shared_specs/README.md`; elementwise work is float32.
"""

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.kernels import launch


@triton.jit
def _tanh(x):
    """tanh in float32 to about one unit in the last place, by the two ranges of the Cephes library; no libdevice."""
    small = tl.minimum(tl.maximum(x, -1.0), 1.0)
    s = small * small
    p = (
        ((-5.70498872745e-3 * s + 2.06390887954e-2) * s - 5.37397155531e-2) * s + 1.33314422036e-1
    ) * s - 3.33332819422e-1
    near = small + small * s * p
    far = 1 - 2 / (tl.exp(2 * tl.abs(x)) + 1)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def _transformed(a, scale, cap, CAP: tl.constexpr):
    """(z, tanh): logits after scale and softcap."""
    z = a.to(tl.float32) * scale
    bent = z
    if CAP:
        bent = _tanh(z / cap)
        z = cap * bent
    return z, bent


@triton.jit
def cross_entropy_kernel(
    logits, index, counted, weight, class_weight, total_weight, lse, entropy, coefficients, found, t, V, width, start,
    stride, scale, cap, smoothing, z_loss, CAP: tl.constexpr, CLASSES: tl.constexpr, SMOOTH: tl.constexpr,
    STATISTICS: tl.constexpr, MOMENT: tl.constexpr, GRADIENT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    column = tl.load(index + row) - start
    here = (column >= 0) & (column < width)
    columns = tl.arange(0, BLOCK)
    steps = tl.cdiv(width, BLOCK)
    if STATISTICS:
        top, total, moment, weighted = -float("inf"), 0.0, 0.0, 0.0
        for i in range(0, steps):
            j = i * BLOCK + columns
            z, _ = _transformed(tl.load(logits + j, mask=j < width, other=0.0), scale, cap, CAP)
            if SMOOTH:
                if CLASSES:
                    omega = tl.load(class_weight + start + j, mask=j < width, other=0.0).to(tl.float32)
                    weighted += tl.sum(tl.where(j < width, z * omega, 0.0))  # pyright: ignore[reportOperatorIssue]
                else:
                    weighted += tl.sum(tl.where(j < width, z, 0.0))  # pyright: ignore[reportOperatorIssue]
            z = tl.where(j < width, z, -float("inf"))
            higher = tl.maximum(top, tl.max(z))
            shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far
            factor = tl.exp(top - shift)
            e = tl.exp(z - shift)
            if MOMENT:
                distance = tl.where(total == 0.0, 0.0, top - shift)
                below = tl.where(z == -float("inf"), 0.0, z - shift)  # e is 0 there
                moment = factor * (moment + distance * total) + tl.sum(e * below)
            total = total * factor + tl.sum(e)
            top = higher
        target, _ = _transformed(tl.load(logits + column, mask=here, other=0.0), scale, cap, CAP)
        target = tl.where(here, target, 0.0)
        tl.store(found + row, top)
        tl.store(found + t + row, total)
        tl.store(found + 2 * t + row, target)
        tl.store(found + 3 * t + row, weighted)
        tl.store(found + 4 * t + row, moment)
    if GRADIENT:
        if STATISTICS:  # an upstream gradient of 1 for every token
            count = tl.load(counted + row)
            b = (1 - smoothing) * tl.load(weight + row)
            c = count * smoothing / V
            a = b + 2 * z_loss * count * (top + tl.log(total))
            if SMOOTH:
                a += c * tl.load(total_weight)
            base, factor = top, a / total
        else:
            a, b = tl.load(coefficients + row), tl.load(coefficients + t + row)
            c = 0.0
            if C:
                c = tl.load(coefficients + 2 * t + row)
            base, factor = tl.load(lse + row), a
        tl.debug_barrier()  # the target's logit has been read before it is overwritten
        for i in range(0, steps):
            j = (steps - 1 - i) * BLOCK + columns
            z, bent = _transformed(tl.load(logits + j, mask=j < width, other=0.0), scale, cap, CAP)
            p = tl.exp(z - base)
            if D:  # p log p is 0 where p is
                p *= factor - tl.load(coefficients + 3 * t + row) * (z - base + tl.load(entropy + row))
            else:
                p *= factor
            p = tl.where(j == column, p - b, p)
            if C:
                if CLASSES:
                    p -= c * tl.load(class_weight + start + j, mask=j < width, other=0.0).to(tl.float32)
                else:
                    p -= c
            p *= scale
            if CAP:
                p *= 1 - bent * bent
            tl.store(logits + j, p.to(logits.dtype.element_ty), mask=j < width)


@launch.register("cross_entropy", mutates=("logits", "found"))
def cross_entropy(
    logits: Tensor,
    index: Tensor,
    counted: Tensor,
    weight: Tensor,
    class_weight: Tensor | None,
    total_weight: Tensor,
    lse: Tensor | None,
    entropy: Tensor | None,
    coefficients: Tensor | None,
    found: Tensor | None,
    vocab: int,
    start: int,
    scale: float,
    softcap: float | None,
    smoothing: float,
    z_loss: float,
    moment: bool,
    gradient: bool,
    has_c: bool,
    has_d: bool,
) -> None:
    """Statistics into `found`, dlogits over the logits, or both.

    Args:
        logits: [t, v], float32 | bfloat16 | float16; rows contiguous.
        index, counted, weight: [t], of the targets: entry, 0 where ignored (NaN where there is no such entry), weight.
        class_weight: [V] or None. total_weight: [], its sum or V.
        lse, entropy: [t], float32; the gradient without statistics needs the first, with `has_d` both.
        coefficients: [4, t], float32: a, b, c, d of the gradient without statistics.
        found: [5, t], float32: maximum, Σ exp(z - maximum), z of the target, Σ ω z (with smoothing), Σ exp(z - m) (z - m)
            (with `moment`); None: no statistics. The gradient beside statistics is that of the sum of the losses.
    """
    t, width = logits.shape
    sizes = launch.blocks("cross_entropy", logits, (width,))
    launch.start(
        cross_entropy_kernel, t if width else 0, logits, index, counted, weight, class_weight, total_weight, lse, entropy,
        coefficients, found, t, vocab, width, start, launch.row_stride(logits), scale, softcap or 1.0, smoothing, z_loss,
        blocks=sizes, CAP=softcap is not None, CLASSES=class_weight is not None, SMOOTH=smoothing != 0.0,
        STATISTICS=found is not None, MOMENT=moment, GRADIENT=gradient,
        C=smoothing != 0.0 if found is not None else has_c, D=has_d, BLOCK=sizes.columns,
    )  # fmt: skip
