"""`tiled_mlp`: the token-wise MLP, exact, one shard of tokens at a time. The only file that knows its autograd structure,
which serves `tensor_parallel_mlp` too.

Two autograd nodes. `Save` keeps x and the weights, computes nothing (but the kept shards' gate and up) and owns the real
backward; its differentiable output is an anchor, a zero-stride scalar of y's shape whose gradient is dy. `Run` computes y
and hands dy to the anchor. Non-reentrant checkpointing replays a region only until its last saved tensor has been packed
again, that is until `Save` returns: the replay stops before the MLP's products (derived in `shared_specs/README.md`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shared_specs.config import TORCH, Activation, Tiling
from shared_specs.core import checks
from shared_specs.errors import fail_type
from shared_specs.mlp import checks as mlp_checks
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan
from tiled_torch import backends
from tiled_torch.core import exporting, partitioned, tangents
from tiled_torch.core.autocast import after_autocast, autocast_dtype, operand
from tiled_torch.core.gradients import local_main_grad, main_grad_of, returned_gradient
from tiled_torch.core.operands import check_tensor
from tiled_torch.core.replay import is_unread, refuse_transforms
from tiled_torch.core.tensors import device_kind, refuse_second_order
from tiled_torch.mlp import compiled as mlp_compiled
from tiled_torch.mlp import with_tangents
from tiled_torch.mlp.loops import MLPCall
from tiled_torch.mlp.steps import Weights

_UNTILED = "; differentiate the untiled MLP, or use tiled_jax."
_TO_LOCAL = "Use tensor_parallel_mlp for weights that are split over ranks, or convert it with to_local()."
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
    """Return the MLP of x, computed shard by shard, with exact gradients.

    y = (act(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T + b_down, or act(x w_up^T + b_up) w_down^T + b_down with
    `w_gate=None`. No `[T, I]` tensor is ever allocated. Backward recomputes gate and up, never down.

    Args:
        x: [T, H] or [B, S, H] (any leading dims), or [H], one token; float32 | bfloat16 | float16 | float64.
        w_gate, w_up: [I, H], as in nn.Linear. w_gate None: a two-matrix MLP.
        w_down: [H_out, I].
        biases: any of "gate" [I], "up" [I], "down" [H_out].
        activation: silu, gelu, gelu_tanh, relu or relu_squared.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        keep: fraction of shards, in [0, 1], whose gate and up are kept for backward instead of recomputed.
        tiling: the long form of num_shards and keep, which it excludes.
        backend: "auto", "eager" or "triton"; a backend named explicitly runs or raises. "auto" takes "triton" on an NVIDIA
            GPU. "triton" supports all dtypes except float64; shards are then multiples of 128 tokens.
    Returns:
        [same leading dims, H_out], dtype of x, or the autocast dtype under autocast.
    Numerics: products in the compute dtype, elementwise work in float32 (float64 for float64), weight gradients summed
        over shards in float32 and cast once to the weight's dtype, or added to `weight.main_grad` where it exists (one of 16
        bits gets the finished sum, and is rounded once in each backward).
    Memory: keeps x, the weights and `costs.saved_bytes`; peak `mlp_costs.peak_bytes`, independent of T. Forward mode (dual
        tensors of torch.autograd.forward_ad) carries tangents one shard at a time. If the same call also needs gradients,
        autograd keeps the same tensors for it as for the untiled MLP.
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
    refuse_transforms("tiled_mlp", "the untiled MLP")
    dual = tangents.carry_tangents((x, *operands))
    if dual:
        tangents.refuse_kernels("tiled_mlp", backend)
        chosen = "eager"
    checks.check_deterministic("tiled_mlp", tiling, None if chosen == "triton" else EAGER_ORDER)
    plan = plan_for(x, operands, dtype, activation, tiling, backend=chosen)
    backends.record_run("tiled_mlp", chosen)
    if dual:
        return with_tangents.mlp(x, operands, dtype, activation, plan)
    steps = "deterministic" if tiling.deterministic else chosen
    kind = mlp_compiled.CompiledCall if torch.compiler.is_compiling() else MLPCall
    call = kind("tiled_mlp", dtype, activation, plan.shard_tokens, steps, kept_start(plan, tiling.keep))
    return run_checked(x, operands, call)


def kept_start(plan: ShardPlan, keep: float) -> int:
    """Return the first token whose gate and up are kept, where keep is known: a compiler may have made a symbol of it."""
    if keep == 0:
        return plan.tokens
    if torch.compiler.is_exporting():
        exporting.refuse_open_tokens("tiled_mlp", plan, keep)
    if torch.compiler.is_compiling():
        (keep,) = {keep: None}  # a key of a dict is one that the compiler has looked at
    return plan.kept_start(keep)


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
    """Return the operands, the compute dtype, the tiling and the backend of one call, once every argument is right.

    matrices: w_gate (or None), w_up and w_down.
    """
    named = zip(("w_gate", "w_up", "w_down"), matrices, strict=True)
    weights = {name: w for name, w in named if name != "w_gate" or w is not None}
    biases = _check_kinds(function, x, weights, biases)
    tiling = checks.resolve_tiling(function, num_shards, keep, tiling, x=tuple(x.shape))
    cast = autocast_dtype(x)
    dtype = after_autocast(x, cast)
    mlp_checks.check_mlp(
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
    """Return the plan of one call; torch.export may leave the number of tokens open."""
    shape, options = shape_of(x, weights, dtype, activation), plan_options(x, tiling, backend)
    if torch.compiler.is_exporting():
        cut: Any = {name: options[name] for name in ("device", "multiple_of")}
        peak = partial(mlp_costs.peak_bytes, shape, device=cut["device"], kernels=options["kernels"])
        return exporting.symbolic_plan(function, shape.tokens, tiling, peak=peak, **cut)
    return mlp_costs.plan_mlp(function, shape, **options)


def shape_of(x: Tensor, weights: Weights, dtype: torch.dtype, activation: str) -> mlp_costs.MLPShape:
    """Return the shape of one call, as the formulas read it."""
    return mlp_costs.MLPShape(
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
    """Return the arguments of `mlp_costs.plan_mlp` that say how to cut."""
    return {
        **tiling.cut(),
        "device": device_kind(x.device),
        "kernels": backend == "triton",
        "multiple_of": KERNEL_MULTIPLE if backend == "triton" else 1,
    }


def _check_kinds(function: str, x: Any, weights: Mapping[str, Any], biases: Any) -> dict[str, Tensor]:
    """Return the biases as a dict, once everything that must be a tensor is one."""
    if biases is not None and not isinstance(biases, Mapping):
        fail_type(function, "biases", "a mapping or None", type(biases).__name__)
    biases = dict(biases or {})
    named = {"x": x, **weights, **{f"biases[{name!r}]": bias for name, bias in biases.items()}}
    for name, tensor in named.items():
        check_tensor(function, name, tensor, _TO_LOCAL)
    return biases


def run_checked(x: Tensor, weights: Weights, call: MLPCall) -> Tensor:
    """Return the checked call, differentiable. Of one that is exported autograd has what its operators bring along."""
    if torch.compiler.is_exporting():
        kept = call.kept(x, weights) if call.kept_start < checks.flat_tokens(x.shape) else None
        return call.forward(x, weights, kept)
    if not (torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (x, *weights))):
        return call.forward(x, weights, None)
    if torch.compiler.is_compiling():
        x, weights = _in_one_role(x, weights)
    anchor, *both = Save.apply(x, *weights, call)
    if is_unread(call.function):
        return anchor
    detached = (None if a is None else a.detach() for a in (x, *weights))
    return Run.apply(anchor, *both, *detached, call)


def _in_one_role(x: Tensor, weights: Weights) -> tuple[Tensor, Weights]:
    """The compiler takes no tensor twice in one node: one that comes again is another view of it."""
    found: list[Tensor | None] = []
    for a in (x, *weights):
        again = a is not None and any(a is b for b in found)
        found.append(a.view_as(a) if again and a is not None else a)
    first, *others = found
    assert first is not None
    return first, Weights(*others)  # type: ignore[arg-type]


class Save(torch.autograd.Function):
    """Packs x, the weights and the kept gate and up; owns the backward. Outputs: anchor, kept gate, kept up."""

    @staticmethod
    def forward(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        weights, call = Weights(*args[:6]), args[6]
        shape = (*x.shape[:-1], weights.w_down.shape[0])
        anchor = torch.zeros((), dtype=call.dtype, device=x.device).expand(shape)
        return anchor, *call.kept(x, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, *weights = inputs[:7]
        _, kept_gate, kept_up = output
        ctx.mark_non_differentiable(kept_gate, kept_up)
        ctx.set_materialize_grads(False)
        # x: gate and up are recomputed from it, and it is an operand of dw_gate, dw_up; weights: dh, dx and the
        # recomputation; kept gate and up: instead of recomputing them.
        ctx.cuts = [None if w is None else partitioned.rows_in_whole(w) for w in weights]
        whole = (w if cut is None else w._base for w, cut in zip(weights, ctx.cuts, strict=True))
        ctx.save_for_backward(x, *whole, kept_gate, kept_up)
        ctx.call = inputs[7]
        # Saved-tensor hooks may hand back other tensor objects; only the parameters themselves carry main_grad.
        ctx.fused = [
            owner if owner is not None else (w if main_grad_of(w) is not None else None)
            for w, owner in zip(weights, ctx.call.owners, strict=True)
        ]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 8
        refuse_second_order(ctx.call.function, _UNTILED)
        x, *whole, kept_gate, kept_up = ctx.saved_tensors
        weights = [w if cut is None else w[cut] for w, cut in zip(whole, ctx.cuts, strict=True)]
        kept = (kept_gate, kept_up) if kept_up.shape[0] else None
        mains = [
            None if w is None else local_main_grad(owner, w.shape) for owner, w in zip(ctx.fused, weights, strict=True)
        ]
        dx, *dws = ctx.call.backward(dy, x, Weights(*weights), kept, ctx.needs_input_grad[:7], mains)
        returned = (
            dw if owner is None else returned_gradient(owner, dw, w.shape, w.dtype)
            for owner, w, dw in zip(ctx.fused, weights, dws, strict=True)
        )
        return dx, *returned, None


class Run(torch.autograd.Function):
    """Computes y from detached operands; saves nothing and hands dy to the anchor."""

    @staticmethod
    def forward(anchor: Tensor, kept_gate: Tensor, kept_up: Tensor, x: Tensor, *args: Any) -> Tensor:
        kept = (kept_gate, kept_up) if kept_up.shape[0] else None
        return args[6].forward(x, Weights(*args[:6]), kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *(None,) * 10)
