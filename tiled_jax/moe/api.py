"""`tiled_moe`: a mixture of experts, exact, one shard of tokens at a time: checks, the plan, and one call."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from shared_specs.config import JAX, Tiling
from shared_specs.core.checks import flat_tokens
from shared_specs.mlp.checks import check_activation
from shared_specs.moe import checks as moe_checks
from shared_specs.moe import costs as moe_costs
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.own_tokens import split_of
from tiled_jax.core.products import refuse_exchanged_products
from tiled_jax.moe.autodiff import MoECall, run
from tiled_jax.moe.steps import steps_here

_NAME = "tiled_moe"
# Name of every backend -> None where it computes experts, else the reason.
EXPERT_BACKENDS = {"xla": None, "pallas": "There is no Pallas kernel of experts; the XLA path runs on every device."}


def tiled_moe(
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize_top_k: bool = True,
    activation: str = "silu",
    return_router_logits: bool = False,
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Any:
    """Return the mixture of experts of every token, one shard of tokens at a time, exactly.

    y = sum over the k likeliest experts e of p_e ((act(x w_gate_e) * (x w_up_e)) w_down_e), p = softmax(x w_router). Nothing of
    shape [T k, I] exists, nor do rows of all tokens for their experts. Backward computes gate, up and the router again, never
    the down-projection. An expert without tokens is not multiplied.

    Args:
        x: [T, H], [B, S, H] or any leading dims, or [H], one token; float32 | bfloat16 | float16 | float64. The tokens.
        w_router: [H, E], dtype of x; beside a 16-bit x also float32 (master weights: cast once per call).
        w_gate, w_up: [E, H, I], likewise. w_down: [E, I, H], likewise.
        top_k: k, the experts of each token, in [1, E].
        scoring: "softmax" over all experts, or "sigmoid" of each one's logit.
        normalize_top_k: divide the k scores of a token by their sum (`norm_topk_prob` in transformers).
        activation: one of shared_specs.ACTIVATIONS.
        return_router_logits: return (y, logits). The logits are [..., E] in float32 (float64 for float64) and have a gradient,
            so that you can compute a load-balancing loss or a z-loss from them.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form of num_shards, which it excludes.
        backend: "auto" or "xla"; "pallas" is refused, there is no kernel of experts.
    Returns:
        [same leading dims, H], dtype of x; with return_router_logits a pair.
    Numerics: products accumulate in float32 and float32 products are IEEE float32; logits are not rounded; elementwise work and
        the sum over experts are float32. Weight gradients are summed over shards in float32 and rounded to the weight's dtype
        once. float64 is float64 throughout.
    Memory: x, the weights and 2k numbers a token are kept for backward (moe_costs.moe_saved_bytes). Compiled temporary bytes
        (moe_costs.compiled_moe_peak_bytes) do not grow with T, nor with how many tokens an expert has.
    Products: one block of one expert's rows at a time, so its last block may be partly empty. On a TPU, and on a GPU under
        jax_ragged_dot_use_gpu_pallas_triton_lowering, `lax.ragged_dot` of a shard's k t rows. Elsewhere XLA makes a ragged
        product E times as large. Both methods have been run only on a CPU.
    Sharding: as in `tiled_mlp` if a mesh splits the tokens. Every device computes all experts: weights that a mesh splits are
        gathered for the call (no expert or tensor parallelism).
    Raises:
        SpecError: shapes, dtypes or devices disagree (of arrays committed to one each, outside `jit`), or a number is out
        of its range. TypeError: a wrong kind of value. UnsupportedError: backend="pallas".
    Derivatives: of forward and reverse mode, and the former of the latter.
    Source: Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088); shards derived in shared_specs/README.md.
    Example:
        >>> import jax.numpy as jnp
        >>> x, w_router, w = jnp.ones((2, 5, 8)), jnp.ones((8, 4)), jnp.ones((4, 8, 12)) / 8
        >>> tiled_moe(x, w_router, w, w, w.swapaxes(1, 2), top_k=2, num_shards=3).shape
        (2, 5, 8)
    """
    weights: dict[str, Any] = {"w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    x, w = array(_NAME, "x", x), {name: array(_NAME, name, a) for name, a in weights.items()}
    options = moe_checks.moe_tiling(_NAME, num_shards, tiling, backend, names=JAX, usable=EXPERT_BACKENDS, x=x.shape)
    seen = operands({"x": x, **w})
    moe_checks.check_moe(_NAME, x=seen["x"], weights={name: seen[name] for name in w}, names=JAX, master_weights=True)
    flags = {"normalize_top_k": normalize_top_k, "return_router_logits": return_router_logits}
    moe_checks.check_choice(_NAME, experts=len(w["w_up"]), top_k=top_k, scoring=scoring, **flags)
    check_activation(_NAME, activation)
    refuse_exchanged_products(_NAME, {"w_router": w["w_router"]})
    split = split_of(_NAME, x, w.values(), (), options.token_axes)
    shape = moe_costs.MoEShape(
        tokens=flat_tokens(x.shape),
        hidden=x.shape[-1],
        intermediate=w["w_up"].shape[2],
        experts=len(w["w_up"]),
        top_k=int(top_k),
        activation=activation,
        itemsize=x.dtype.itemsize,
        weight_itemsize=w["w_up"].dtype.itemsize,
    )
    steps = steps_here()
    replan = _MakeMoEPlan(shape, options, backends.device_kind(), steps.name == "ragged")
    call = MoECall(
        plan=replan(shape.tokens),
        top_k=int(top_k),
        scoring=scoring,
        normalize=normalize_top_k,
        activation=activation,
        logits=return_router_logits,
        steps=steps,
        split=split,
        replan=None if split is None else replan,
    )
    found = run(call, x if split is not None else x.reshape(shape.tokens, shape.hidden), w)
    y = found["y"].reshape(x.shape)
    return (y, found["logits"].reshape(*x.shape[:-1], shape.experts)) if return_router_logits else y


@dataclass(frozen=True)
class _MakeMoEPlan:
    """The plan of so many tokens of one call. Static."""

    shape: moe_costs.MoEShape
    options: Tiling
    device: str
    ragged: bool

    def __call__(self, tokens: int) -> ShardPlan:
        peak = partial(moe_costs.compiled_moe_peak_bytes, device=self.device, ragged=self.ragged)
        shape = replace(self.shape, tokens=tokens)
        return moe_costs.plan_moe(_NAME, shape, **self.options.cut(), device=self.device, peak=peak)
