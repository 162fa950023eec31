"""Rolled loops over a shard plan, and the types that `shard_map` asks of their carries."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.shards import ShardPlan

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Body(Generic[Carry]):
    """The work of one shard: run(first token, number of tokens, carry) -> carry.

    The first token may be traced, the number never is. `after(start, carry)` returns both; the start is ready only when the
    part of the carry that this body writes is complete. It must not wait for more: when a checkpoint replays the forward for
    its kept shards, nobody reads y, and XLA drops y only if nothing waits for it.
    """

    run: Callable[[Any, int, Carry], Carry]
    after: Callable[[jax.Array, Carry], tuple[jax.Array, Carry]]


def for_each_shard(
    plan: ShardPlan,
    kept_start: int,
    recomputed: Body[Carry],
    kept: Body[Carry],
    carry: Carry,
    *,
    token_order: bool = False,
) -> Carry:
    """Return the carry after the body of every shard has run: `kept` from token `kept_start` on, `recomputed` before it.

    The last shard, the only one that may be shorter, runs first and straight-line; its result is the initial carry of
    the rolled loops over the others. After a loop it would need a second copy of the carry, and a Python loop would
    keep the buffers of every shard alive. XLA unrolls a loop of one step and may run that step beside the shard before,
    with the buffers of both alive at once; waiting for the carry keeps them apart.

    token_order: the first shard is the straight-line one and the others follow in order; all are of one length.
    """
    if len(plan) == 0:
        return carry
    t, count = plan.shard_tokens, len(plan)
    if token_order and plan.tokens % t and count > 1:
        raise ValueError(f"for_each_shard: shards in token order must be of one length, got {plan}")
    first_kept = min(-(-kept_start // t), count)
    alone = 0 if token_order else count - 1
    carry = (recomputed if alone < first_kept else kept).run(alone * t, min(t, plan.tokens - alone * t), carry)
    if token_order:
        loops = (recomputed, 1, first_kept), (kept, max(1, first_kept), count)
    else:
        loops = (kept, first_kept, alone), (recomputed, 0, min(first_kept, alone))
    for body, start, stop in loops:
        if stop - start == 1:
            first, carry = body.after(jnp.int32(start * t), carry)
            carry = body.run(first, t, carry)
        elif start < stop:
            carry = lax.fori_loop(start, stop, lambda i, carry, body=body: body.run(i * t, t, carry), carry)
    return carry


def for_each(plan: ShardPlan, body: Body[Carry], carry: Carry) -> Carry:
    """`for_each_shard` where every shard does the same: shards of one length are all in one loop, compiled once."""
    count, rest = divmod(plan.tokens, plan.shard_tokens)
    if rest == 0 and count > 1:
        t = plan.shard_tokens
        return lax.fori_loop(0, count, lambda i, carry: body.run(i * t, t, carry), carry)
    return for_each_shard(plan, plan.tokens, body, body, carry)


def varying(a: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which a differs from device to device; empty outside `shard_map` and with check_vma=False."""
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def varying_of(arrays: Iterable[jax.Array]) -> frozenset[str]:
    """Return the mesh axes along which any of the arrays varies."""
    return frozenset().union(*map(varying, arrays))


def vary_over(a: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return a, with the type of an array that also varies along these axes."""
    missing = tuple(sorted(set(axes) - varying(a)))
    return lax.pcast(a, missing, to="varying") if missing else a


def vary_like(a: jax.Array, *others: jax.Array) -> jax.Array:
    """Return the initial value of a carry with the type it leaves the loop with: varying wherever one of the others varies."""
    return vary_over(a, varying_of(others))


def zeros_after(before: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros for the carry of a loop, which a compiled program makes when `before` is there.

    XLA makes zeros that need nothing as early as it likes, and keeps them until their loop runs. These need one number of
    `before`, which is never unequal and equal to itself at once.
    """
    if before.size == 0 or not jnp.issubdtype(before.dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    one = lax.slice(before, (0,) * before.ndim, (1,) * before.ndim).reshape(())
    return jnp.broadcast_to(((one != one) & (one == one)).astype(dtype), shape)


@dataclass(frozen=True)
class Like:
    """The type of a primal, which its gradient is to have."""

    dtype: Any
    axes: frozenset[str]

    @classmethod
    def of(cls, primal: jax.Array) -> "Like":
        return cls(primal.dtype, varying(primal))


def gradient_of(primal: jax.Array | Like, d: jax.Array) -> jax.Array:
    """Return d with the dtype and type of its primal: summed over the axes along which d varies and the primal does not.

    One sum per call, never one per shard.
    """
    like = primal if isinstance(primal, Like) else Like.of(primal)
    axes = tuple(sorted(varying(d) - like.axes))
    return (lax.psum(d, axes) if axes else d).astype(like.dtype)


def upstream_of(axis: str, d: jax.Array) -> jax.Array:
    """Return the whole upstream gradient of a result that is the same on every device of `axis`, from this device's share.

    It is whole already where the type says that the result is the same on all devices. With check_vma=False there are
    no such types, and `shard_map` hands each device a share: what JAX's own transpose of a sum does, adding them up.
    """
    typed = axis in varying(lax.axis_index(axis))
    return d if typed and axis not in varying(d) else lax.psum(d, axis)
