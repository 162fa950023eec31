"""The pass over a shard of logits [t, v]: statistics of every row, and dlogits over the logits themselves.

One program a row, two sweeps over it. The first reads it from memory; the second, which runs from the end to the start,
finds it in the L2 cache and writes the gradient. The same kernel makes the first sweep alone (a loss without gradients,
vocabulary shards) or the second alone (backward, from the log-sum-exp of the whole vocabulary). Formulas:
`shared_specs/README.md`; elementwise work is float32.
"""
# pyright: reportArgumentType=false
# Triton takes True for a constexpr, which its types do not say.

import triton
import triton.language as tl
from torch import Tensor

from tiled_torch.core import launch


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
def _read(logits, j, low, high, MASKED: tl.constexpr):
    """Logits at the columns j, 0 outside the row, and which are inside; all of them where nothing is masked."""
    inside = (j >= low) & (j < high)
    if MASKED:
        return tl.load(logits + j, mask=inside, other=0.0), inside
    else:
        return tl.load(logits + j), j == j


@triton.jit
def _add_block(
    top, total, moment, weighted, logits, class_weight, j, low, high, scale, cap, CAP: tl.constexpr,
    CLASSES: tl.constexpr, SMOOTH: tl.constexpr, MOMENT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The statistics of a row with one more block of it."""
    a, inside = _read(logits, j, low, high, MASKED)
    z, _ = _transformed(a, scale, cap, CAP)
    if SMOOTH:
        if CLASSES:
            omega = tl.load(class_weight + j, mask=inside, other=0.0).to(tl.float32)
            weighted += tl.sum(tl.where(inside, z * omega, 0.0))  # pyright: ignore[reportOperatorIssue]
        else:
            weighted += tl.sum(tl.where(inside, z, 0.0))  # pyright: ignore[reportOperatorIssue]
    if MASKED:
        z = tl.where(inside, z, -float("inf"))
    higher = tl.maximum(top, tl.max(z))
    shift = tl.where(higher == -float("inf"), 0.0, higher)  # nothing but -inf so far
    factor = tl.exp(top - shift)
    e = tl.exp(z - shift)
    if MOMENT:
        distance = tl.where(total == 0.0, 0.0, top - shift)
        below = tl.where(z == -float("inf"), 0.0, z - shift)  # e is 0 there
        moment = factor * (moment + distance * total) + tl.sum(e * below)
    return higher, total * factor + tl.sum(e), moment, weighted


@triton.jit
def _write_block(
    logits, class_weight, j, column, low, high, scale, cap, base, factor, b, c, d, entropy, CAP: tl.constexpr,
    CLASSES: tl.constexpr, C: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dlogits over one block of a row of logits."""
    a, inside = _read(logits, j, low, high, MASKED)
    z, bent = _transformed(a, scale, cap, CAP)
    p = tl.exp(z - base)
    if D:  # p log p is 0 where p is
        p *= factor - tl.where(p == 0.0, 0.0, d * (z - base + entropy))
    else:
        p *= factor
    p = tl.where(j == column, p - b, p)
    if C:
        if CLASSES:
            p -= c * tl.load(class_weight + j, mask=inside, other=0.0).to(tl.float32)
        else:
            p -= c
    p *= scale
    if CAP:
        p *= 1 - bent * bent
    if MASKED:
        tl.store(logits + j, p.to(logits.dtype.element_ty), mask=inside)
    else:
        tl.store(logits + j, p.to(logits.dtype.element_ty))


@triton.jit
def cross_entropy_kernel(
    logits, index, counted, weight, class_weight, total_weight, lse, entropy, coefficients, found, t, V, width, start,
    stride, scale, cap, smoothing, z_loss, CAP: tl.constexpr, CLASSES: tl.constexpr, SMOOTH: tl.constexpr,
    STATISTICS: tl.constexpr, MOMENT: tl.constexpr, GRADIENT: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = row.to(tl.int64) * stride
    column = tl.load(index + row) - start
    here = (column >= 0) & (column < width)
    if CLASSES:
        class_weight += start
    low, high = 0, width
    if UNIT > 1:  # rows begin anywhere: their columns count from the 16 bytes that hold their first element
        low = (first % UNIT).to(tl.int32)
        high = width + low
        column += low
        first = tl.multiple_of(first - low, UNIT)
        if CLASSES:
            class_weight -= low
    logits += first
    columns = tl.arange(0, BLOCK)
    steps = tl.cdiv(high, BLOCK)
    if STATISTICS:
        top, total, moment, weighted = -float("inf"), 0.0, 0.0, 0.0
        if UNIT == 1:
            for i in range(0, steps):
                top, total, moment, weighted = _add_block(
                    top, total, moment, weighted, logits, class_weight, i * BLOCK + columns, low, high, scale, cap, CAP,
                    CLASSES, SMOOTH, MOMENT, True,
                )  # fmt: skip
        else:  # a mask of single elements would make loads of single elements, so only the ends have one
            top, total, moment, weighted = _add_block(
                top, total, moment, weighted, logits, class_weight, columns, low, high, scale, cap, CAP, CLASSES, SMOOTH,
                MOMENT, True,
            )  # fmt: skip
            for i in range(1, steps - 1):
                top, total, moment, weighted = _add_block(
                    top, total, moment, weighted, logits, class_weight, i * BLOCK + columns, low, high, scale, cap, CAP,
                    CLASSES, SMOOTH, MOMENT, False,
                )  # fmt: skip
            if steps > 1:
                top, total, moment, weighted = _add_block(
                    top, total, moment, weighted, logits, class_weight, (steps - 1) * BLOCK + columns, low, high, scale,
                    cap, CAP, CLASSES, SMOOTH, MOMENT, True,
                )  # fmt: skip
        target, _ = _transformed(tl.load(logits + column, mask=here, other=0.0), scale, cap, CAP)
        target = tl.where(here, target, 0.0)
        tl.store(found + row, top)
        tl.store(found + t + row, total)
        tl.store(found + 2 * t + row, target)
        tl.store(found + 3 * t + row, weighted)
        tl.store(found + 4 * t + row, moment)
    if GRADIENT:
        c, d, h = 0.0, 0.0, 0.0
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
            if C:
                c = tl.load(coefficients + 2 * t + row)
            base, factor = tl.load(lse + row), a
            if D:
                d, h = tl.load(coefficients + 3 * t + row), tl.load(entropy + row)
        tl.debug_barrier()  # the target's logit has been read before it is overwritten
        if UNIT == 1:
            for i in range(0, steps):
                _write_block(
                    logits, class_weight, (steps - 1 - i) * BLOCK + columns, column, low, high, scale, cap, base, factor, b,
                    c, d, h, CAP, CLASSES, C, D, True,
                )  # fmt: skip
        else:
            if steps > 1:
                _write_block(
                    logits, class_weight, (steps - 1) * BLOCK + columns, column, low, high, scale, cap, base, factor, b, c,
                    d, h, CAP, CLASSES, C, D, True,
                )  # fmt: skip
            for i in range(1, steps - 1):
                _write_block(
                    logits, class_weight, (steps - 1 - i) * BLOCK + columns, column, low, high, scale, cap, base, factor, b,
                    c, d, h, CAP, CLASSES, C, D, False,
                )  # fmt: skip
            _write_block(
                logits, class_weight, columns, column, low, high, scale, cap, base, factor, b, c, d, h, CAP, CLASSES, C, D,
                True,
            )  # fmt: skip


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
    # Multiples of 16 are what Triton knows of a number; rows of another width need their ends masked apart.
    unit = 1 if width % 16 == 0 and logits.stride(0) % 16 == 0 else 16 // logits.itemsize
    launch.start(
        cross_entropy_kernel, t if width else 0, logits, index, counted, weight, class_weight, total_weight, lse, entropy,
        coefficients, found, t, vocab, width, start, launch.row_stride(logits), scale, softcap or 1.0, smoothing, z_loss,
        blocks=sizes, CAP=softcap is not None, CLASSES=class_weight is not None, SMOOTH=smoothing != 0.0,
        STATISTICS=found is not None, MOMENT=moment, GRADIENT=gradient,
        C=smoothing != 0.0 if found is not None else has_c, D=has_d, BLOCK=sizes.columns, UNIT=unit,
    )  # fmt: skip
