"""The token-wise MLP, a shard of tokens at a time, with a hand-written backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shared_specs import checks, config, costs
from shared_specs.config import Tiling
from shared_specs.errors import fail_type
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.functional.loops import Body, for_each_shard, gradient_of, vary_like
from tiled_jax.functional.shard_math import Weights, down, gate_and_up, gradients, wide

_NAME = "tiled_mlp"
_rows, _set_rows = lax.dynamic_slice_in_dim, lax.dynamic_update_slice_in_dim


def tiled_mlp(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    biases: Mapping[str, jax.Array] | None = None,
    activation: str = "silu",
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> jax.Array:
    """The MLP of every token, one shard of tokens at a time, exactly.

    y = (act(x w_gate) * (x w_up)) w_down, or act(x w_up) w_down without a gate. Nothing of shape [T, I] exists, in
    forward or backward; backward computes gate and up of a shard again, never the down-projection.

    Args:
        x: [T, H], [B, S, H] or any leading dims, float32 | bfloat16 | float16 | float64. The tokens.
        w_gate: [H, I], or None for a plain two-matrix MLP.
        w_up: [H, I], dtype of x; beside a 16-bit x also float32 (master weights: cast once per call).
        w_down: [I, H_out], likewise.
        biases: any of gate [I], up [I], down [H_out]; the weights' dtypes.
        activation: one of shared_specs.ACTIVATIONS.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        keep: fraction of the shards, the last ones, whose gate and up are kept instead of recomputed, in [0, 1].
        tiling: the long form of num_shards and keep, which it excludes.
        backend: "auto" | "xla" | "pallas"; one named explicitly runs or raises.
    Returns:
        [same leading dims, H_out], dtype of x.
    Numerics: products accumulate in float32 and float32 products are IEEE float32; gate, up, h, y and their gradients
        are rounded to the dtype of x; elementwise work is float32. Weight gradients are summed over shards in float32
        and rounded to the weight's dtype once. float64 is float64 throughout.
    Memory: x and the weights are kept for backward, and gate and up of the kept shards
        (shared_specs.costs.saved_bytes). Compiled temporary bytes do not grow with T (costs.compiled_peak_bytes).
    Raises:
        SpecError: shapes, dtypes or numbers out of range. TypeError: a wrong kind of value.
        UnsupportedError: a backend named explicitly that cannot run here.
    Source: derived in shared_specs/README.md. Sharded tokens belong inside `jax.shard_map`: without it XLA gathers them.
    Example:
        >>> x, w = jnp.ones((2, 5, 8)), jnp.ones((8, 16)) / 8
        >>> tiled_mlp(x, w, w, w.T, num_shards=3).shape
        (2, 5, 8)
    """
    x = _array("x", x)
    gate = {} if w_gate is None else {"w_gate": _array("w_gate", w_gate)}
    w = {**gate, "w_up": _array("w_up", w_up), "w_down": _array("w_down", w_down)}
    b = {name: _array(f"biases[{name!r}]", bias) for name, bias in _biases(biases).items()}
    options = checks.resolve_tiling(_NAME, num_shards, keep, tiling, x=x.shape)
    chosen = backends.choose(_NAME, backend)
    checks.check_mlp(
        _NAME,
        x=_operand(x),
        weights={name: _operand(value) for name, value in w.items()},
        biases={name: _operand(value) for name, value in b.items()},
        activation=activation,
        names=config.JAX,
        master_weights=True,
    )
    plan = _plan(x, w, activation, options)
    call = _Call(plan=plan, kept_start=plan.kept_start(options.keep), activation=activation, backend=chosen)
    y = _run(call, x.reshape(plan.tokens, x.shape[-1]), w | {f"b_{name}": bias for name, bias in b.items()})
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _array(name: str, value: Any) -> jax.Array:
    if not isinstance(value, jax.Array | np.ndarray):
        fail_type(_NAME, name, "an array", type(value).__name__)
    # Not for a jax.Array: under differentiation jnp.asarray copies it.
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _biases(biases: Any) -> Mapping[str, Any]:
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(_NAME, "biases", "a mapping or None", type(biases).__name__)
    return {} if biases is None else biases


def _operand(value: jax.Array) -> checks.Operand:
    """An array as the checks see it; JAX itself compares devices."""
    return checks.Operand(tuple(value.shape), str(value.dtype))


def _plan(x: jax.Array, w: Weights, activation: str, options: Tiling) -> ShardPlan:
    shape = costs.MLPShape(
        tokens=checks.flat_tokens(x.shape),
        hidden=x.shape[-1],
        intermediate=w["w_up"].shape[1],
        out=w["w_down"].shape[1],
        gated="w_gate" in w,
        activation=activation,
        itemsize=x.dtype.itemsize,
        weight_itemsize=w["w_up"].dtype.itemsize,
    )
    return costs.plan_mlp(
        _NAME,
        shape,
        num_shards=options.num_shards,
        shard_tokens=options.shard_tokens,
        memory_budget=options.memory_budget,
        device=backends.device_kind(),
        compiled=True,
    )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """All that is static about one call; the plan of forward is the plan of backward."""

    plan: ShardPlan
    kept_start: int
    activation: str
    backend: str


@partial(jax.tree_util.register_dataclass, data_fields=["x", "w", "kept"], meta_fields=["wanted"])
@dataclass(frozen=True)
class _Saved:
    """What backward needs."""

    x: jax.Array  # to compute gate and up again, and for dw_gate and dw_up
    w: dict[str, jax.Array]  # as given: masters are cast again, so that no cast copy stays alive between the passes
    kept: dict[str, jax.Array]  # gate and up [kept tokens, I] of the kept shards
    wanted: tuple[str, ...]  # operands that need a gradient: the others cost nothing


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(call: _Call, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return _forward(call, x, w, keep=False)[0]


def _forward(call: _Call, x: jax.Array, w: dict[str, jax.Array], *, keep: bool) -> tuple[jax.Array, dict[str, Any]]:
    """y [T, H_out], and with `keep` the pre-activations of the kept shards."""
    backends.record_run(_NAME, call.backend)
    plan, kept_start = call.plan, call.kept_start
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    kept_tokens = plan.tokens - kept_start if keep else 0

    def zeros(tokens: int, size: int) -> jax.Array:
        return vary_like(jnp.zeros((tokens, size), x.dtype), x, *w.values())

    def recomputed(start: Any, tokens: int, carry: Any) -> Any:
        y, buffers = carry
        y_shard = down(gate_and_up(_rows(x, start, tokens), cast), cast, call.activation)
        return _set_rows(y, y_shard, start, 0), buffers

    def kept(start: Any, tokens: int, carry: Any) -> Any:
        y, buffers = carry
        pre = gate_and_up(_rows(x, start, tokens), cast)
        buffers = {name: _set_rows(buffers[name], pre[name], start - kept_start, 0) for name in pre}
        return _set_rows(y, down(pre, cast, call.activation), start, 0), buffers

    def after_y(start: jax.Array, carry: Any) -> Any:
        start, y = lax.optimization_barrier((start, carry[0]))
        return start, (y, carry[1])

    def after_buffers(start: jax.Array, carry: Any) -> Any:
        start, buffers = lax.optimization_barrier((start, carry[1]))
        return start, (carry[0], buffers)

    intermediate = w["w_up"].shape[1]
    names = [name for name in ("gate", "up") if f"w_{name}" in w] if kept_tokens else []
    carry = zeros(plan.tokens, w["w_down"].shape[1]), {name: zeros(kept_tokens, intermediate) for name in names}
    bodies = Body(recomputed, after_y), Body(kept, after_buffers)
    return for_each_shard(plan, kept_start if keep else plan.tokens, *bodies, carry)


def _forward_saving(call: _Call, x: Any, w: dict[str, Any]) -> tuple[jax.Array, _Saved]:
    """The forward under differentiation: every operand comes with whether it needs a gradient."""
    wanted = tuple(name for name, operand in {"x": x, **w}.items() if operand.perturbed)
    values = {name: operand.value for name, operand in w.items()}
    y, kept = _forward(call, x.value, values, keep=True)
    return y, _Saved(x.value, values, kept, wanted)


def _backward(call: _Call, saved: _Saved, dy: jax.Array | SymbolicZero) -> tuple[Any, dict[str, Any]]:
    d = {} if isinstance(dy, SymbolicZero) else _gradients(call, saved, dy)
    return d.get("x"), {name: d.get(name) for name in saved.w}


def _gradients(call: _Call, saved: _Saved, dy: jax.Array) -> dict[str, jax.Array]:
    """The gradient of every operand that needs one."""
    primals = {"x": saved.x, **saved.w}
    # Without the barrier XLA merges the recomputation outside the loop, and the casts, with those of forward, and
    # keeps their results alive in between.
    x, dy, w = lax.optimization_barrier((saved.x, dy, saved.w))
    cast = {name: value.astype(x.dtype) for name, value in w.items()}
    acc = wide(x.dtype)

    def shard(start: Any, tokens: int, carry: dict[str, jax.Array], kept: bool) -> dict[str, jax.Array]:
        x_shard, dy_shard = _rows(x, start, tokens), _rows(dy, start, tokens)
        if kept:
            pre = {name: _rows(value, start - call.kept_start, tokens) for name, value in saved.kept.items()}
        else:
            pre = gate_and_up(x_shard, cast)
        d = gradients(x_shard, dy_shard, pre, cast, call.activation, saved.wanted)
        return {
            name: _set_rows(carry["x"], d["x"], start, 0) if name == "x" else carry[name] + d[name] for name in carry
        }

    carry = {
        name: vary_like(jnp.zeros(primals[name].shape, x.dtype if name == "x" else acc), x, dy, *w.values())
        for name in saved.wanted
    }
    recomputed, kept = (Body(partial(shard, kept=kept), _after_all) for kept in (False, True))
    carry = for_each_shard(call.plan, call.kept_start, recomputed, kept, carry)
    # The types of the saved operands: the barrier may have joined those of its own.
    return {name: gradient_of(primals[name], value) for name, value in carry.items()}


def _after_all(start: jax.Array, carry: Any) -> Any:
    return lax.optimization_barrier((start, carry))


_mlp.defvjp(_forward_saving, _backward, symbolic_zeros=True)
# Called outside of any jit too, forward and backward are one compiled program each.
_run = jax.jit(_mlp, static_argnums=0)
