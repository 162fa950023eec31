"""The pass over rows of logits: statistics of every row, their gradient in place of them, or both from one launch.

A row is the work of one program of 128 threads. The first sweep over it keeps the largest logit and sums of exponentials
relative to it (online, so that the logits are read once); the second, which runs from the end to the start for what is
still in the cache, turns each logit into its gradient. What a row needs besides its logits are numbers: nothing of the
logits' size exists but the logits. Formulas: `shared_specs/README.md`.

The cache holds what was read last: 50 MB on a Hopper, where six programs a multiprocessor have rows of 257 KB under way,
203 MB. `Blocks.resident` bounds them: with one a multiprocessor 34 MB are under way, and the second sweep finds them there.
More warpgroups on one row would hide more latency, but Mosaic gives the sums of all warpgroups of a program the same four
words of shared memory (`vector.ReductionOp`, jax 0.10 and 0.11): they would overwrite each other's.

Rows begin at multiples of 256 bytes whatever the vocabulary, because columns are padded to a multiple of 128. Whole blocks
are read and written 16 bytes a thread at a time; what they leave, in powers of two, as wide as that many columns are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.config import LossOptions
from shared_specs.kernels.blocks import Blocks
from tiled_jax.core.mosaic import (
    GRID_AXIS,
    default_blocks,
    in_wide_words,
    launch_in_place,
    persistent_grid,
    shaped_like,
    takes_ref,
    zeros,
)

LOGIT_DTYPES = ("bfloat16", "float16", "float32")
# Columns come in multiples of the threads of a program.
COLUMN_MULTIPLE = 128

# Below every logit, and finite so that differences of it are.
_LEAST = -1e30


class Columns(NamedTuple):
    """The columns of the logits: the entries of one part of the vocabulary, and perhaps padding behind them."""

    target: jax.Array  # [rows] int32: the column of each row's target, -1 where another part has it
    real: jax.Array | None = None  # [rows] int32: the columns behind the first `real` ones are padding; None: none is
    weight: jax.Array | None = None  # [v] float32: class weights ω, 0 in padding; None: all are 1


class RowStatistics(NamedTuple):
    """Float32 numbers [rows] of the real columns. Logits are compared before scale and softcap, negated where the scale is
    negative, so that `top` is exactly the logit of a target that is the largest."""

    top: jax.Array  # the largest of them; m is the z of it
    total: jax.Array  # Σ exp(z - m)
    target: jax.Array  # the target's, 0 where another part has it
    weighted: jax.Array | None  # Σ ω z, with label smoothing
    moment: jax.Array | None  # Σ exp(z - m) (z - m), with the output "entropy"


class RowCoefficients(NamedTuple):
    """Float32 numbers [rows] of dz = A p - B [target] - C ω - D p (log p + entropy)."""

    a: jax.Array
    b: jax.Array
    c: jax.Array | None = None  # None: 0
    d: jax.Array | None = None  # None: 0
    entropy: jax.Array | None = None
    of_lse: jax.Array | None = None  # what times the log-sum-exp belongs to A as well


def logits_reason(dtype: Any) -> str | None:
    """Return why the kernels cannot take logits of this dtype; None where they can. Any number of columns can be padded."""
    if str(jnp.dtype(dtype)) in LOGIT_DTYPES:
        return None
    return f"The Pallas kernel cross_entropy takes {', '.join(LOGIT_DTYPES)}, found {jnp.dtype(dtype)}."


def statistics(
    logits: jax.Array, columns: Columns, *, options: LossOptions, blocks: Blocks | None = None, interpret: Any = None
) -> RowStatistics:
    """Return the statistics of every row; the arguments of `statistics_and_gradient`."""
    return _compile_and_launch(logits, columns, None, None, options, blocks, interpret)[0]


def gradient(
    logits: jax.Array,
    columns: Columns,
    k: RowCoefficients,
    top: jax.Array,
    total: jax.Array,
    *,
    options: LossOptions,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Return dlogits [rows, v] for statistics of the whole vocabulary; the other arguments of `statistics_and_gradient`."""
    return _compile_and_launch(logits, columns, k, (top, total), options, blocks, interpret)[1]


def statistics_and_gradient(
    logits: jax.Array,
    columns: Columns,
    k: RowCoefficients,
    *,
    options: LossOptions,
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[RowStatistics, jax.Array]:
    """Return the statistics of rows whose columns are the whole vocabulary, and dlogits for them.

    Args:
        logits: [rows, v], bfloat16 | float16 | float32; v a multiple of 128. Their memory becomes that of dlogits where
            the caller has no other use for them (but not inside a `shard_map` with check_vma=True of jax 0.11).
        columns, k: what each row needs besides.
        options: logit_scale, logit_softcap, whether there is label_smoothing and whether "entropy" is among the outputs;
            the rest belongs to the caller.
        blocks: `columns` logits at a time, a power of two, and `resident`; None takes those of shared_specs.kernels.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Numerics: float32 throughout; dlogits are rounded to the dtype of the logits once.
    Raises:
        ValueError: v is no multiple of 128.
    """
    return _compile_and_launch(logits, columns, k, None, options, blocks, interpret)


def _compile_and_launch(
    logits: jax.Array,
    columns: Columns,
    k: RowCoefficients | None,
    known: tuple[jax.Array, jax.Array] | None,
    options: LossOptions,
    blocks: Blocks | None,
    interpret: Any,
) -> tuple[Any, Any]:
    """Return statistics unless they are known, dlogits where there are coefficients."""
    vocab = logits.shape[1]
    if vocab % COLUMN_MULTIPLE or vocab == 0:
        raise ValueError(f"cross_entropy: V must be a multiple of {COLUMN_MULTIPLE}, got {vocab}")
    chosen = blocks or default_blocks("cross_entropy", logits.dtype, (vocab,))

    @jax.jit  # without it jax 0.10 has no memory space for the operands
    def launch(logits: jax.Array, columns: Columns, k: RowCoefficients | None, known: Any) -> tuple[Any, Any]:
        return _launch(logits, columns, k, known, options, chosen, interpret)

    return _mapped_over_rows(launch)(logits, columns, k, known)


def _mapped_over_rows(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch` under vmap: the rows of all examples are rows of one launch."""
    run = jax.custom_batching.custom_vmap(launch)

    @run.def_vmap
    def rule(size: int, batched: Any, *operands: Any) -> tuple[Any, Any]:
        stacked = jax.tree.map(
            lambda a, is_batched: a if is_batched else jnp.broadcast_to(a, (size, *a.shape)), operands, tuple(batched)
        )
        if batched[1].weight:  # class weights are of columns
            found = lax.map(lambda example: run(*example), stacked)
        else:
            logits, columns, k, known = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), stacked)
            found = run(logits, columns._replace(weight=operands[1].weight), k, known)
            found = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return run


def _launch(
    logits: jax.Array,
    columns: Columns,
    k: RowCoefficients | None,
    known: tuple[jax.Array, jax.Array] | None,
    options: LossOptions,
    blocks: Blocks,
    interpret: Any,
) -> tuple[RowStatistics | None, jax.Array | None]:
    (rows, vocab), dtype = logits.shape, logits.dtype
    sweep, score = _sweeps(vocab, blocks.columns), _scores(options)
    smooth, entropy = bool(options.label_smoothing), "entropy" in options.outputs
    sign = -1 if options.logit_scale < 0 else 1
    given = jax.tree.leaves((columns, k, known))
    structure = jax.tree.structure((columns, k, known))
    count = 0 if known is not None else 3 + smooth + entropy
    number = shaped_like((rows,), jnp.float32, logits, *given)
    in_place = takes_ref(interpret, logits, *given)

    def kernel(logits_gmem: Any, *rest: Any) -> None:
        columns_gmem, k_gmem, known_gmem = jax.tree.unflatten(structure, rest[: len(given)])
        numbers_gmem, dlogits_gmem = rest[len(given) :][:count], logits_gmem if in_place else rest[-1]
        refs = logits_gmem, columns_gmem, k_gmem, known_gmem, numbers_gmem, dlogits_gmem
        if blocks.resident:
            plgpu.nd_loop((rows,), collective_axes=GRID_AXIS)(lambda loop: one_row(loop.index[0], *refs))
        else:
            one_row(lax.axis_index(GRID_AXIS), *refs)

    def one_row(
        row: Any,
        logits_gmem: Any,
        columns_gmem: Columns,
        k_gmem: RowCoefficients | None,
        known_gmem: Any,
        numbers_gmem: Any,
        dlogits_gmem: Any,
    ) -> None:
        target = columns_gmem.target[row]
        real = None if columns_gmem.real is None else columns_gmem.real[row]

        def load(first: Any, size: int) -> tuple[jax.Array, jax.Array, Callable[..., jax.Array]]:
            """Logits in float32, their columns, and what puts a number into padding."""
            column = first + lax.broadcasted_iota(jnp.int32, (size,), 0)
            a = in_wide_words(logits_gmem[row, pl.ds(first, size)], interpret).astype(jnp.float32)
            return a, column, lambda a, padding: a if real is None else jnp.where(column < real, a, padding)

        def times_weight(a: jax.Array, first: Any, size: int) -> jax.Array:
            return a if columns_gmem.weight is None else a * columns_gmem.weight[pl.ds(first, size)]

        def add(first: Any, size: int, carry: Any) -> Any:
            top, total, weighted, moment = carry
            a, _, or_padding = load(first, size)
            z, _ = score(a)
            higher = jnp.maximum(top, jnp.max(or_padding(sign * a, _LEAST)))
            m = score(sign * higher)[0]
            shift = score(sign * top)[0] - m
            e = or_padding(jnp.exp(z - m), 0.0)
            factor = jnp.exp(shift)
            if smooth:
                weighted += jnp.sum(or_padding(times_weight(z, first, size), 0.0))
            if entropy:
                moment = factor * (moment + shift * total) + jnp.sum(jnp.where(e > 0, e * (z - m), 0.0))
            return higher, factor * total + jnp.sum(e), weighted, moment

        if known_gmem is None:
            # Read before the first sweep, whose reductions keep every thread from the second one until all have read it.
            of_target = sign * logits_gmem[row, jnp.maximum(target, 0)].astype(jnp.float32)
            zero = jnp.float32(0)
            top, total, weighted, moment = sweep(add, (jnp.float32(_LEAST), zero, zero, zero))
            found = {"top": top, "total": total, "target": jnp.where(target >= 0, of_target, 0.0)}
            found |= ({"weighted": weighted} if smooth else {}) | ({"moment": moment} if entropy else {})
            for ref, name in zip(numbers_gmem, found, strict=True):
                ref[row] = found[name]
        else:
            top, total = (ref[row] for ref in known_gmem)
        if k_gmem is None:
            return

        k = RowCoefficients._make(None if ref is None else ref[row] for ref in k_gmem)
        m, log_total = score(sign * top)[0], jnp.log(total)
        a_of_row = k.a if k.of_lse is None else k.a + k.of_lse * (m + log_total)

        def write(first: Any, size: int, carry: Any) -> Any:
            a, column, or_padding = load(first, size)
            z, slope = score(a)
            log_p = z - m - log_total
            p = jnp.exp(log_p)
            dz = p * a_of_row
            if k.d is not None:
                assert k.entropy is not None
                dz -= k.d * jnp.where(p > 0, p * (log_p + k.entropy), 0.0)
            if k.c is not None:
                dz -= k.c if columns_gmem.weight is None else times_weight(k.c, first, size)
            dz -= jnp.where(column == target, k.b, 0.0)
            dlogits_gmem[row, pl.ds(first, size)] = or_padding(dz * slope, 0.0).astype(dtype)
            return carry

        sweep(write, jnp.int32(0), backwards=True)

    call = launch_in_place(
        kernel,
        (number,) * count + (() if in_place or k is None else (shaped_like(logits.shape, dtype, logits, *given),)),
        name="cross_entropy",
        grid=persistent_grid(rows, interpret, blocks.resident) if blocks.resident else {GRID_AXIS: rows},
        interpret=interpret,
    )

    def write_over(state: Any) -> None:
        for ref, value in zip(state[1], call(state[0], *given), strict=True):
            ref[...] = value

    if k is None:
        numbers, dlogits = call(logits, *given), None
    elif in_place:  # not by `jax.new_ref`, whose effects jax 0.10 does not let out of a custom_vmap
        dlogits, numbers = pl.run_state(write_over)((logits, tuple(zeros(number) for _ in range(count))))
    else:
        *numbers, dlogits = call(logits, *given)
    if not count:
        return None, dlogits
    top, total, target, *rest = numbers
    weighted = rest.pop(0) if smooth else None
    return RowStatistics(top, total, target, weighted, rest.pop(0) if entropy else None), dlogits


def _scores(options: LossOptions) -> Callable[[jax.Array], tuple[jax.Array, jax.Array | float]]:
    """z and dz/dlogits of logits or of one logit, in float32."""
    scale, cap = options.logit_scale, options.logit_softcap

    def score(a: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        z = a if scale == 1 else a * scale
        if cap is None:
            return z, scale
        bent = jnp.tanh(z / cap)
        return cap * bent, scale * (1 - bent * bent)

    return score


def _sweeps(vocab: int, block: int) -> Callable[..., Any]:
    """carry = step(first column, number of columns, carry) over a row; the number is never traced."""
    count, tail = vocab // block, _tail(vocab, block)

    def sweep(step: Callable[[Any, int, Any], Any], carry: Any, *, backwards: bool = False) -> Any:
        def blocks(carry: Any) -> Any:
            def at(i: Any, carry: Any) -> Any:
                return step((count - 1 - i if backwards else i) * block, block, carry)

            return lax.fori_loop(0, count, at, carry) if count else carry

        if not backwards:
            carry = blocks(carry)
        for first, size in reversed(tail) if backwards else tail:
            carry = step(first, size, carry)
        return blocks(carry) if backwards else carry

    return sweep


def _tail(vocab: int, block: int) -> list[tuple[int, int]]:
    """Return (first, size) of what whole blocks leave, in powers of two."""
    first, found = vocab // block * block, []
    while first < vocab:
        size = 1 << ((vocab - first).bit_length() - 1)
        found.append((first, size))
        first += size
    return found
