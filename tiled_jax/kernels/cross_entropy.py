"""Loss and gradient of the cross entropy of rows of logits, the gradient in place of the logits.

One program of 128 threads a row. The first sweep over the vocabulary keeps the largest logit and the sum of exponentials
relative to it (online, so that the logits are read once); the second turns each logit into its gradient. The statistics
are numbers per row: nothing of the logits' size exists besides the logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.blocks import Blocks
from shared_specs.config import LossOptions
from tiled_jax.kernels.common import default_blocks, launch_in_place, shaped_like

_GRID_AXIS = "row"
# Below every logit, and finite so that differences of it are.
_LEAST = -1e30
_THREADS = 128


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    upstream: jax.Array,
    *,
    options: LossOptions = LossOptions(),
    blocks: Blocks | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss [rows], lse [rows], dlogits [rows, V]): what each row costs, and upstream times the gradient of that.

    With z = cap tanh(scale logits / cap), or scale logits without a cap, and smoothing e:
    loss = lse - (1 - e) z[target] - e mean(z) + z_loss lse^2, and 0 where the target is ignored.

    Args:
        logits: [rows, V], bfloat16 | float16 | float32. V a multiple of 128. Their memory becomes that of dlogits where
            the caller has no other use for them.
        targets: [rows] int32, in [0, V) or options.ignore_index.
        upstream: [rows] float32: the factor of each row's gradient, such as one over the number of valid tokens.
        options: ignore_index, label_smoothing, z_loss, logit_softcap and logit_scale are used; the rest belongs to the
            caller, and class_weight must be None.
        blocks: `columns` logits at a time, a power of two; None takes those of shared_specs.blocks.
        interpret: parameters of the interpreter (`common.interpreter`), or None to compile for the device.
    Returns:
        loss and lse float32, dlogits in the dtype of the logits.
    Numerics: float32 throughout; dlogits are rounded once.
    Raises:
        ValueError: V is no multiple of 128, or there are class weights.
    """
    rows, vocab = logits.shape
    if vocab % _THREADS or vocab == 0:
        raise ValueError(f"cross_entropy: V must be a multiple of {_THREADS}, got {vocab}")
    if options.class_weight is not None:
        raise ValueError("cross_entropy: no kernel has class weights")
    block = (blocks or default_blocks("cross_entropy", logits.dtype, (vocab,))).columns
    count, tail = vocab // block, _tail(vocab, block)
    smooth, cap = options.label_smoothing, options.logit_softcap

    def score(logit: jax.Array) -> tuple[jax.Array, jax.Array | float]:
        """z and dz/dlogit of logits or of one logit."""
        z = logit.astype(jnp.float32) * options.logit_scale
        if cap is None:
            return z, options.logit_scale
        bent = jnp.tanh(z / cap)
        return cap * bent, options.logit_scale * (1 - bent * bent)

    def sweep(step: Callable[[Any, int, Any], Any], carry: Any) -> Any:
        """carry = step(first logit, number of logits, carry) over the row; the number is never traced."""
        carry = lax.fori_loop(0, count, lambda i, carry: step(i * block, block, carry), carry) if count else carry
        for first, size in tail:
            carry = step(first, size, carry)
        return carry

    def kernel(logits_gmem: Any, targets_gmem: Any, upstream_gmem: Any, loss_gmem: Any, lse_gmem: Any) -> None:
        row = lax.axis_index(_GRID_AXIS)
        target = targets_gmem[row]
        valid = target != options.ignore_index
        label = jnp.where(valid, target, 0)
        # Read before the first sweep, whose reductions keep every thread from the second one until all have read it.
        of_target = score(logits_gmem[row, label])[0]

        def statistics(first: Any, size: int, carry: Any) -> Any:
            top, total, plain = carry
            z = score(logits_gmem[row, pl.ds(first, size)])[0]
            higher = jnp.maximum(top, jnp.max(z))
            total = total * jnp.exp(top - higher) + jnp.sum(jnp.exp(z - higher))
            return higher, total, plain + jnp.sum(z) if smooth else plain

        zero = jnp.float32(0)
        top, total, plain = sweep(statistics, (jnp.float32(_LEAST), zero, zero))
        lse = top + jnp.log(total)
        loss = lse - (1 - smooth) * of_target + options.z_loss * lse * lse - (smooth / vocab) * plain
        loss_gmem[row] = jnp.where(valid, loss, 0.0)
        lse_gmem[row] = lse
        factor = jnp.where(valid, upstream_gmem[row], 0.0)
        pull, hit = factor * (1 + 2 * options.z_loss * lse), factor * (1 - smooth)

        def gradient(first: Any, size: int, carry: Any) -> Any:
            z, slope = score(logits_gmem[row, pl.ds(first, size)])
            at_target = lax.broadcasted_iota(jnp.int32, (size,), 0) == label - first
            dz = jnp.exp(z - lse) * pull - factor * (smooth / vocab) - jnp.where(at_target, hit, 0.0)
            logits_gmem[row, pl.ds(first, size)] = (dz * slope).astype(logits.dtype)
            return carry

        sweep(gradient, zero)

    numbers = shaped_like((rows,), jnp.float32, logits, targets, upstream)
    call = launch_in_place(
        kernel, (numbers, numbers), name="cross_entropy", grid={_GRID_AXIS: rows}, interpret=interpret
    )

    @jax.jit  # a ref has a memory space, which jax 0.10 asks for, only inside of one
    def run(logits: jax.Array, targets: jax.Array, upstream: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        in_place = jax.new_ref(logits, memory_space=plgpu.GMEM)
        loss, lse = call(in_place, targets, upstream)
        return loss, lse, jax.freeze(in_place)

    return run(logits, targets, upstream)


def _tail(vocab: int, block: int) -> list[tuple[int, int]]:
    """(first, size) of what whole blocks leave, in powers of two."""
    first, found = vocab // block * block, []
    while first < vocab:
        size = 1 << ((vocab - first).bit_length() - 1)
        found.append((first, size))
        first += size
    return found
