"""The cases of the mixture of experts that both halves run, and their arrays, drawn from the case's seed, in its dtype."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shared_specs.core.rounding import DTYPES, Array, compute_dtype, round_to
from shared_specs.moe.oracle import moe

Routing = Literal["spread", "hot", "empty"]


@dataclass(frozen=True, kw_only=True)
class MoECase:
    """One call of the mixture of experts and what it must get right.

    Args:
        dims: leading dims of x, (T,) or (B, S).
        routing: "hot": the first expert is every token's. "empty": the last one is nobody's.
        logits: the router's logits are returned too, with an upstream gradient of their own.
        frozen: operands that need no gradient, among x and the names of weights.
    """

    dims: tuple[int, ...]
    hidden: int = 16
    intermediate: int = 12
    experts: int = 5
    top_k: int = 2
    scoring: str = "softmax"
    normalize_top_k: bool = True
    activation: str = "silu"
    routing: Routing = "spread"
    logits: bool = False
    dtype: str = "float32"
    num_shards: int | None = 4
    frozen: tuple[str, ...] = ()
    seed: int = 0
    reason: str = field(compare=False)

    @property
    def id(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[self.dtype]
        parts = [self.activation, short, "x".join(map(str, self.dims)), f"E{self.experts}", f"k{self.top_k}"]
        parts += [f"N{self.num_shards}" if self.num_shards else "auto"]
        parts += [self.scoring] if self.scoring != "softmax" else []
        parts += [] if self.normalize_top_k else ["unnormalized"]
        parts += [self.routing] if self.routing != "spread" else []
        parts += ["logits"] if self.logits else []
        parts += ["frozen_" + "_".join(self.frozen)] if self.frozen else []
        return "-".join(parts)


def _moe_cases() -> tuple[MoECase, ...]:
    base = MoECase(dims=(3, 7), reason="the ordinary case: 21 tokens, 4 shards, the last one shorter")
    exact = replace(base, dtype="float64")
    return (
        *(replace(base, dtype=dtype, logits=True) for dtype in ("float64", "float32", "bfloat16", "float16")),
        replace(
            base,
            dtype="bfloat16",
            dims=(96,),
            experts=2,
            top_k=1,
            normalize_top_k=False,
            num_shards=96,
            reason="float32 sums",
        ),
        replace(
            exact,
            scoring="sigmoid",
            normalize_top_k=False,
            routing="hot",
            logits=True,
            reason="an expert that all tokens choose, and scores as they are that do not compete",
        ),
        replace(exact, scoring="sigmoid", num_shards=1, activation="gelu", reason="one shard: no sums over shards"),
        replace(
            exact, normalize_top_k=False, routing="empty", activation="gelu_tanh", reason="an expert without tokens"
        ),
        replace(
            exact, top_k=1, num_shards=None, activation="relu", reason="one expert counts 1: no gradient of routers"
        ),
        replace(
            exact, top_k=1, normalize_top_k=False, dims=(24,), activation="relu_squared", reason="T divisible by N"
        ),
        replace(exact, top_k=5, num_shards=21, reason="all experts, one token a shard"),
        replace(exact, dims=(2,), experts=9, reason="more experts than tokens, fewer tokens than shards"),
        replace(exact, dims=(0,), logits=True, reason="no tokens"),
        replace(exact, frozen=("x", "w_up"), reason="the first layer: x needs no gradient, nor does one weight"),
        replace(exact, frozen=("w_router", "w_gate"), reason="a frozen router and one frozen weight"),
        replace(exact, frozen=("w_gate", "w_up", "w_down"), logits=True, reason="only x and the router need gradients"),
    )


MOE_CASES = _moe_cases()
WEIGHTS = ("w_router", "w_gate", "w_up", "w_down")


def make_moe_inputs(case: MoECase) -> dict[str, Array]:
    """Return x and dy [*dims, H], dlogits [*dims, E] in the wide dtype, and the weights, [in, out]."""
    rng = np.random.default_rng(case.seed)
    h, i, e = case.hidden, case.intermediate, case.experts
    arrays = {
        "x": rng.standard_normal((*case.dims, h)),
        "dy": rng.standard_normal((*case.dims, h)) + 0.25,
        "w_router": rng.standard_normal((h, e)) / np.sqrt(h),
        "w_gate": rng.standard_normal((e, h, i)) / np.sqrt(h),
        "w_up": rng.standard_normal((e, h, i)) / np.sqrt(h),
        "w_down": rng.standard_normal((e, i, h)) / np.sqrt(i),
    }
    dlogits = rng.standard_normal((*case.dims, e)) / e
    arrays["x"][..., 0] = 1  # by which the router prefers an expert whatever the token is
    if case.routing == "hot":
        arrays["w_router"][0, 0] = 6
    elif case.routing == "empty":
        arrays["w_router"][0, -1] = -9
    found = {name: np.ascontiguousarray(array).astype(DTYPES[case.dtype]) for name, array in arrays.items()}
    return found | {"dlogits": dlogits.astype(compute_dtype(case.dtype))}


def evaluate_moe(case: MoECase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    """Return the results and gradients of a case, computed in `dtype`; rounded: as the case's own dtype stores them."""
    arrays = {name: array.astype(dtype) for name, array in make_moe_inputs(case).items()}
    x, dy, dlogits = (arrays[name].reshape(-1, arrays[name].shape[-1]) for name in ("x", "dy", "dlogits"))
    results = moe(
        x,
        arrays["w_router"],
        arrays["w_gate"],
        arrays["w_up"],
        arrays["w_down"],
        dy,
        dlogits if case.logits else None,
        top_k=case.top_k,
        scoring=case.scoring,
        normalize_top_k=case.normalize_top_k,
        activation=case.activation,
        rounding=round_to(case.dtype) if rounded else None,
    )
    for name, like in (("y", "x"), ("dx", "x"), ("logits", "dlogits")):
        results[name] = results[name].reshape(arrays[like].shape)
    return results if case.logits else {name: a for name, a in results.items() if name != "logits"}
