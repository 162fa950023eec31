"""`tiled_moe`: a mixture of experts, exact, one shard of tokens at a time: checks, the plan, and one call."""

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shared_specs.config import TORCH, Activation, Scoring, Tiling
from shared_specs.core.checks import flat_tokens
from shared_specs.mlp.checks import check_activation
from shared_specs.moe import checks as moe_checks
from shared_specs.moe import costs as moe_costs
from tiled_torch import backends
from tiled_torch.core import tangents
from tiled_torch.core.activation_functions import FUNCTIONS
from tiled_torch.core.autocast import after_autocast, autocast_dtype, operand
from tiled_torch.core.operands import check_tensor
from tiled_torch.core.replay import refuse_transforms
from tiled_torch.core.tensors import device_kind
from tiled_torch.moe.autodiff import MoECall, mixed
from tiled_torch.moe.loops import ExpertsCall
from tiled_torch.moe.router import Router

_NAME = "tiled_moe"
_TO_LOCAL = "Convert it with to_local(); experts that are split over ranks are not computed here."
# Name of every backend -> None where it computes experts, else the reason.
EXPERT_BACKENDS = {"eager": None, "triton": "The experts' products are PyTorch's own, on every device."}


def tiled_moe(
    x: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int,
    scoring: Scoring = "softmax",
    normalize_top_k: bool = True,
    activation: Activation = "silu",
    return_router_logits: bool = False,
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Any:
    """Return the mixture of experts of every token, computed shard by shard, with exact gradients.

    y = sum over the k likeliest experts e of p_e ((act(x w_gate_e^T) * (x w_up_e^T)) w_down_e^T), p = softmax(x w_router^T). No
    `[T k, I]` tensor is ever allocated, nor are rows of all tokens copied for their experts. Backward recomputes gate, up and
    the router, never down. An expert without tokens is not multiplied.

    Args:
        x: [T, H] or [B, S, H] (any leading dims), or [H], one token; float32 | bfloat16 | float16 | float64.
        w_router: [E, H], as in nn.Linear.
        w_gate, w_up: [E, I, H]. w_down: [E, H, I].
        top_k: k, the experts of each token, in [1, E].
        scoring: "softmax" over all experts, or "sigmoid" of each one's logit.
        normalize_top_k: divide the k scores of a token by their sum (`norm_topk_prob` in transformers).
        activation: silu, gelu, gelu_tanh, relu or relu_squared.
        return_router_logits: return (y, logits). The logits are [..., E] in float32 (float64 for float64) and have a gradient,
            so that you can compute a load-balancing loss or a z-loss from them.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form of num_shards, which it excludes.
        backend: "auto" or "eager"; "triton" is refused, there is no kernel of experts.
    Returns:
        [same leading dims, H], dtype of x, or the autocast dtype under autocast; with return_router_logits a pair.
    Numerics: products in the compute dtype, the router's accumulated in float32 and not rounded; elementwise work and the sum
        over experts in float32 (float64 for float64); weight gradients summed over shards in float32 and cast once to the
        weight's dtype, or added to `weight.main_grad` where it exists.
    Memory: keeps x, the weights and `moe_costs.moe_saved_bytes`: 2k numbers per token. Peak `moe_costs.moe_peak_bytes`: t rows
        of one expert at a time. Apart from a few numbers per token-expert pair, the peak does not grow with T or with the
        tokens of an expert. In 16 bits it does grow until the float32 rows of dx take as much as the weights' sums.
    Products: an expert's rows, at most those of one shard at a time; experts with few rows by one grouped product together
        (`torch.nn.functional.grouped_mm`): in bfloat16 on a GPU of compute capability 9 or 10, in float32 and bfloat16 on a
        CPU, if weights are of the products' dtype and their dims are multiples of 16 bytes. Elsewhere one after the other.
    Limits: all experts are on one device (no expert or tensor parallelism). They are not compiled: torch.compile skips the
        call. The experts have been run only on a CPU.
    Raises:
        SpecError: shapes, dtypes or devices disagree, or a number is out of its range.
        TypeError: an argument of the wrong kind.
        UnsupportedError: backend="triton"; a backward with create_graph=True; forward mode.
    Source: Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088); shards derived in shared_specs/README.md.
    Example:
        >>> import torch
        >>> x, w_router = torch.randn(2, 5, 8), torch.randn(4, 8)
        >>> w_gate, w_up, w_down = torch.randn(4, 12, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 12)
        >>> tiled_moe(x, w_router, w_gate, w_up, w_down, top_k=2, num_shards=4).shape
        torch.Size([2, 5, 8])
    """
    weights = {"w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    for name, tensor in {"x": x, **weights}.items():
        check_tensor(_NAME, name, tensor, _TO_LOCAL)
    tiling = moe_checks.moe_tiling(
        _NAME, num_shards, tiling, backend, names=TORCH, usable=EXPERT_BACKENDS, x=tuple(x.shape)
    )
    cast = autocast_dtype(x)
    seen = {name: operand(w, cast) for name, w in weights.items()}
    moe_checks.check_moe(_NAME, x=operand(x, cast), weights=seen, names=TORCH)
    flags = {"normalize_top_k": normalize_top_k, "return_router_logits": return_router_logits}
    moe_checks.check_choice(_NAME, experts=len(w_up), top_k=top_k, scoring=scoring, **flags)
    check_activation(_NAME, activation)
    refuse_transforms(_NAME, "the untiled experts")
    tangents.refuse_tangents(_NAME, "the untiled experts", (x, *weights.values()))
    backends.record_run(_NAME, "eager")
    dtype = after_autocast(x, cast)
    shape = moe_costs.MoEShape(
        tokens=flat_tokens(x.shape),
        hidden=x.shape[-1],
        intermediate=w_up.shape[1],
        experts=len(w_up),
        top_k=int(top_k),
        activation=activation,
        itemsize=dtype.itemsize,
        weight_itemsize=w_up.dtype.itemsize,
    )
    t = moe_costs.plan_moe(_NAME, shape, **tiling.cut(), device=device_kind(x.device)).shard_tokens
    # The rows of an expert are known while it runs only.
    run: Any = torch.compiler.disable(_computed) if "torch._dynamo" in sys.modules else _computed
    choice = (int(top_k), scoring, normalize_top_k)
    y, logits = run(x, (w_router, w_gate, w_up, w_down), dtype, t, choice, activation, return_router_logits)
    return (y, logits) if return_router_logits else y


def _computed(
    x: Tensor,
    w: tuple[Tensor, ...],
    dtype: torch.dtype,
    shard_tokens: int,
    choice: tuple[int, str, bool],
    activation: str,
    keep_logits: bool,
) -> tuple[Tensor, Tensor | None]:
    experts = ExpertsCall(dtype, shard_tokens, gated_by(activation))
    return mixed(x, w, MoECall(Router(dtype, shard_tokens, *choice), experts, keep_logits))


@cache
def gated_by(activation: str) -> Any:
    """Return [n, 2I], gate and up -> [n, I]."""
    act = FUNCTIONS[activation]

    def gate(both: Tensor) -> Tensor:
        first, up = both.chunk(2, dim=-1)
        return act(first) * up

    return gate
