"""`tiled_mlp`: the token-wise MLP, exact, one shard of tokens at a time. The only file that knows its autograd structure.

Two autograd nodes. `Save` keeps x and the weights, computes nothing (but the kept shards' gate and up) and owns the real
backward; its differentiable output is an anchor, a zero-stride scalar of y's shape whose gradient is dy. `Run` computes y
and hands dy to the anchor. Non-reentrant checkpointing replays a region only until its last saved tensor has been packed
again, that is until `Save` returns: the replay stops before the MLP's products (derived in `shared_specs/README.md`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shared_specs import checks, costs
from shared_specs.config import TORCH, Activation, Tiling
from shared_specs.errors import UnsupportedError, fail_type
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan
from tiled_torch import backends
from tiled_torch.functional import ops
from tiled_torch.functional.accumulate import main_grad_of, refuse_compiled_main_grad, returned_gradient
from tiled_torch.functional.casting import after_autocast, autocast_dtype, operand, without_autocast
from tiled_torch.functional.mlp_shards import kept_up_projections, mlp_backward, mlp_forward, steps_named
from tiled_torch.functional.replay import refuse_transforms
from tiled_torch.functional.steps import Weights

EAGER_ORDER = (
    "The eager backend's products are a vendor's, who adds in an order of its own; the backend \"triton\" has kernels for "
    "all of them, and usable_backends() says whether it can run here."
)


def tiled_mlp(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    biases: Mapping[str, Tensor] | None = None,
    activation: Activation = "silu",
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Tensor:
    """The MLP of x, computed shard by shard, with exact gradients.

    y = (act(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T + b_down, or act(x w_up^T + b_up) w_down^T + b_down with
    `w_gate=None`. No `[T, I]` tensor is ever allocated. Backward recomputes gate and up, never down.

    Args:
        x: [T, H] or [B, S, H] (any leading dims), float32 | bfloat16 | float16 | float64.
        w_gate, w_up: [I, H], as in nn.Linear. w_gate None: a two-matrix MLP.
        w_down: [H_out, I].
        biases: any of "gate" [I], "up" [I], "down" [H_out].
        activation: silu, gelu, gelu_tanh, relu or relu_squared.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        keep: fraction of shards, in [0, 1], whose gate and up are kept for backward instead of recomputed.
        tiling: the long form of num_shards and keep, which it excludes.
        backend: "auto", "eager" or "triton"; a backend named explicitly runs or raises. "triton", which "auto" takes on an
            NVIDIA GPU, is for all dtypes but float64; shards are then multiples of 128 tokens.
    Returns:
        [same leading dims, H_out], dtype of x, or the autocast dtype under autocast.
    Numerics: products in the compute dtype, elementwise work in float32 (float64 for float64), weight gradients summed
        over shards in float32 and cast once to the weight's dtype, or added to `weight.main_grad` where it exists.
    Memory: keeps x, the weights and `costs.saved_bytes`; peak `costs.peak_bytes`, independent of T.
    Raises:
        SpecError: shapes, dtypes or devices disagree, or a number is out of its range.
        TypeError: an argument of the wrong kind.
        UnsupportedError: a backend named explicitly that cannot run here; a backward with create_graph=True;
            tiling.deterministic where the Triton kernels do not run.
    Source: derived in shared_specs/README.md; the sharding idea is DeepSpeed's ALST (arXiv 2506.13996).
    Example:
        >>> import torch
        >>> x, w_up, w_down = torch.randn(2, 5, 8), torch.randn(12, 8), torch.randn(8, 12)
        >>> tiled_mlp(x, torch.randn(12, 8), w_up, w_down, num_shards=4).shape
        torch.Size([2, 5, 8])
    """
    found = checked("tiled_mlp", x, (w_gate, w_up, w_down), biases, activation, num_shards, keep, tiling, backend)
    operands, dtype, tiling, chosen = found
    checks.check_deterministic("tiled_mlp", tiling, None if chosen == "triton" else EAGER_ORDER)
    plan = plan_for(x, operands, dtype, activation, tiling, backend=chosen)
    backends.record_run("tiled_mlp", chosen)
    steps = "deterministic" if tiling.deterministic else chosen
    return _run(x, operands, dtype, activation, plan, plan.kept_start(tiling.keep), steps)


def checked(
    function: str,
    x: Tensor,
    matrices: tuple[Tensor | None, Tensor, Tensor],
    biases: Mapping[str, Tensor] | None,
    activation: str,
    num_shards: int | None,
    keep: float,
    tiling: Tiling | None,
    backend: str,
) -> tuple[Weights, torch.dtype, Tiling, str]:
    """The operands, the compute dtype, the tiling and the backend of one call, once every argument is right.

    matrices: w_gate (or None), w_up and w_down.
    """
    named = zip(("w_gate", "w_up", "w_down"), matrices, strict=True)
    weights = {name: w for name, w in named if name != "w_gate" or w is not None}
    biases = _check_kinds(function, x, weights, biases)
    tiling = checks.resolve_tiling(function, num_shards, keep, tiling, x=tuple(x.shape))
    cast = autocast_dtype(x)
    dtype = after_autocast(x, cast)
    checks.check_mlp(
        function,
        x=operand(x, cast),
        weights={name: operand(w, cast) for name, w in weights.items()},  # type: ignore[arg-type]
        biases={name: operand(bias, cast) for name, bias in biases.items()},
        activation=activation,
        names=TORCH,
    )
    chosen = backends.choose(function, backend, x.device, dtype)
    return Weights(*matrices, biases.get("gate"), biases.get("up"), biases.get("down")), dtype, tiling, chosen


def plan_for(
    x: Tensor,
    weights: Weights,
    dtype: torch.dtype,
    activation: str,
    tiling: Tiling,
    *,
    backend: str = "eager",
    function: str = "tiled_mlp",
) -> ShardPlan:
    """The plan of one call; under compilation T, H and I are static integers of the traced shapes."""
    return costs.plan_mlp(
        function,
        shape_of(x, weights, dtype, activation),
        **plan_options(x, tiling, backend),  # type: ignore[arg-type]
    )


def shape_of(x: Tensor, weights: Weights, dtype: torch.dtype, activation: str) -> costs.MLPShape:
    """What the formulas need of one call."""
    return costs.MLPShape(
        tokens=checks.flat_tokens(x.shape),
        hidden=x.shape[-1],
        intermediate=weights.w_up.shape[0],
        out=weights.w_down.shape[0],
        gated=weights.w_gate is not None,
        activation=activation,
        itemsize=dtype.itemsize,
        weight_itemsize=weights.w_up.dtype.itemsize,
    )


def plan_options(x: Tensor, tiling: Tiling, backend: str) -> dict[str, Any]:
    """The arguments of `costs.plan_mlp` that say how to cut."""
    return {
        "num_shards": tiling.num_shards,
        "shard_tokens": tiling.shard_tokens,
        "memory_budget": tiling.memory_budget,
        "device": "cpu" if x.device.type == "cpu" else "gpu",
        "kernels": backend == "triton",
        "multiple_of": KERNEL_MULTIPLE if backend == "triton" else 1,
    }


def _check_kinds(function: str, x: Any, weights: Mapping[str, Any], biases: Any) -> dict[str, Tensor]:
    """The biases as a dict, once everything that must be a tensor is one."""
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(function, "biases", "a mapping or None", type(biases).__name__)
    biases = dict(biases or {})
    named = {"x": x, **weights, **{f"biases[{name!r}]": bias for name, bias in biases.items()}}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            fail_type(function, name, "an array", type(tensor).__name__)
    return biases


def _run(
    x: Tensor, weights: Weights, dtype: torch.dtype, activation: str, plan: ShardPlan, kept_start: int, steps: str
) -> Tensor:
    refuse_transforms("tiled_mlp", "the untiled MLP")
    grads = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (x, *weights))
    if not grads:
        return _forward(x, weights, None, dtype, activation, plan, steps)
    anchor, *kept = Save.apply(x, *weights, dtype, activation, plan.shard_tokens, steps, kept_start)
    detached = (None if w is None else w.detach() for w in (x, *weights))
    return Run.apply(anchor, *kept, *detached, activation, plan.shard_tokens, steps)


def _forward(
    x: Tensor,
    weights: Weights,
    kept: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
    activation: str,
    plan: ShardPlan,
    steps: str,
) -> Tensor:
    if torch.compiler.is_compiling():
        return ops.forward(x, *weights, *(kept or (None, None)), dtype, activation, plan.shard_tokens, steps)
    y = torch.empty((*x.shape[:-1], weights.w_down.shape[0]), dtype=dtype, device=x.device)
    with torch.no_grad(), without_autocast(x):
        mlp_forward(_rows(x), weights, kept, activation, plan, _rows(y), steps_named(steps, x, weights, dtype))
    return y


def _rows(a: Tensor) -> Tensor:
    """[T, last dim]; a copy only where the leading dims cannot be merged."""
    return a.reshape(checks.flat_tokens(a.shape), a.shape[-1])


class Save(torch.autograd.Function):
    """Packs x, the weights and the kept gate and up; owns the backward. Outputs: anchor, kept gate, kept up."""

    @staticmethod
    def forward(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        weights, (dtype, _, shard_tokens, steps, kept_start) = Weights(*args[:6]), args[6:]
        shape = (*x.shape[:-1], weights.w_down.shape[0])
        anchor = torch.zeros((), dtype=dtype, device=x.device).expand(shape)
        plan = ShardPlan(checks.flat_tokens(x.shape), shard_tokens)
        if torch.compiler.is_compiling():
            if any(main_grad_of(w) is not None for w in weights):
                refuse_compiled_main_grad()
            return anchor, *ops.kept(x, *weights, dtype, shard_tokens, steps, kept_start)
        with without_autocast(x):
            taken = steps_named(steps, x, weights, dtype)
            return anchor, *kept_up_projections(_rows(x), weights, plan, kept_start, dtype, taken)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *weights = inputs[:7]
        _, kept_gate, kept_up = output
        ctx.mark_non_differentiable(kept_gate, kept_up)
        ctx.set_materialize_grads(False)
        # x: gate and up are recomputed from it, and it is an operand of dw_gate, dw_up; weights: dh, dx and the
        # recomputation; kept gate and up: instead of recomputing them.
        ctx.save_for_backward(x, *weights, kept_gate, kept_up)
        ctx.activation, ctx.shard_tokens, ctx.steps = inputs[8:11]
        # Saved-tensor hooks may hand back other tensor objects; only the parameters themselves carry main_grad.
        ctx.fused = [w if main_grad_of(w) is not None else None for w in weights]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 12
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UnsupportedError(
                "tiled_mlp: create_graph must be False in backward, got True. The hand-written backward has no second "
                "derivative; differentiate the untiled MLP, or use tiled_jax."
            )
        x, *weights, kept_gate, kept_up = ctx.saved_tensors
        needs = ctx.needs_input_grad[:7]
        kept = (kept_gate, kept_up) if kept_up.shape[0] else None
        grads = _backward(dy, x, Weights(*weights), kept, ctx, needs)
        return *grads, None, None, None, None, None


def _backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    kept: tuple[Tensor, Tensor] | None,
    ctx: Any,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    if torch.compiler.is_compiling():
        found = iter(
            ops.backward(
                dy, x, *weights, *(kept or (None, None)), ctx.activation, ctx.shard_tokens, ctx.steps, list(needs)
            )
        )
        return [next(found) if need else None for need in needs]
    plan = ShardPlan(checks.flat_tokens(x.shape), ctx.shard_tokens)
    mains = [main_grad_of(w) for w in ctx.fused]
    with without_autocast(x):
        steps = steps_named(ctx.steps, x, weights, dy.dtype)
        dx, *dws = mlp_backward(_rows(dy), _rows(x), weights, kept, ctx.activation, plan, needs, mains, steps)
    dx = None if dx is None else dx.view(x.shape)
    returned = (dw if w is None else returned_gradient(w, dw) for w, dw in zip(ctx.fused, dws, strict=True))
    return [dx, *returned]


class Run(torch.autograd.Function):
    """Computes y from detached operands; saves nothing and hands dy to the anchor."""

    @staticmethod
    def forward(anchor: Tensor, kept_gate: Tensor, kept_up: Tensor, x: Tensor, *args: Any) -> Tensor:
        weights, (activation, shard_tokens, steps) = Weights(*args[:6]), args[6:]
        kept = (kept_gate, kept_up) if kept_up.shape[0] else None
        plan = ShardPlan(checks.flat_tokens(x.shape), shard_tokens)
        return _forward(x, weights, kept, anchor.dtype, activation, plan, steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *(None,) * 12)
