"""Forward and backward of a mixture of gated experts: y = sum over a token's k experts e of p_e mlp_e(x).

One function serves twice, as in `shared_specs/mlp/oracle.py`. Weights are [in, out]. Letters: T tokens, H hidden, I
intermediate, E experts, k of them for each token. The formulas are derived in `shared_specs/README.md`.
"""

import numpy as np

from shared_specs.mlp.oracle import Array, Round, activate


def scores(scoring: str, logits: Array) -> Array:
    """Return what an expert is worth to a token [T, E]: the softmax of the logits, or the sigmoid of each."""
    if scoring == "sigmoid":
        return (1 + np.tanh(logits / 2)) / 2
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def choose(logits: Array, top_k: int) -> Array:
    """Return the numbers of the chosen experts [T, k], the likeliest first."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :top_k]


def moe(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    dy: Array,
    dlogits: Array | None = None,
    *,
    top_k: int,
    scoring: str = "softmax",
    normalize_top_k: bool = True,
    activation: str = "silu",
    rounding: Round | None = None,
) -> dict[str, Array]:
    """y, logits and every gradient of sum(y * dy) + sum(logits * dlogits), as a dict: also dx, dw_router, dw_gate, ...

    Args:
        x, dy: [T, H]. dlogits: [T, E]; None for 0.
        w_router: [H, E]. w_gate, w_up: [E, H, I]. w_down: [E, I, H].
        rounding: applied to every value a plain implementation would store; None keeps full precision. Logits, scores and
            sums over experts are not rounded.
    """
    r: Round = rounding or (lambda value: value)
    tokens = np.arange(len(x))[:, None]
    logits = x @ w_router
    p, index = scores(scoring, logits), choose(logits, top_k)
    total = p[tokens, index].sum(-1, keepdims=True) if normalize_top_k else np.ones((len(x), 1), x.dtype)
    share = p[tokens, index] / total
    y, dx, dshare = np.zeros_like(x), np.zeros_like(x), np.zeros_like(share)
    out = {f"d{name}": np.zeros_like(w) for name, w in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down))}
    for expert in range(w_router.shape[1]):
        rows, place = np.nonzero(index == expert)
        taken, upstream, weight = x[rows], dy[rows], share[rows, place][:, None]
        gate, up = r(taken @ w_gate[expert]), r(taken @ w_up[expert])
        act, slope = activate(activation, gate)
        h, dh = r(act * up), r(upstream @ w_down[expert].T)
        np.add.at(y, rows, r(h @ w_down[expert]) * weight)
        dshare[rows, place] = (h * dh).sum(-1)
        dgate, dup = r(dh * weight * up * slope), r(dh * weight * act)
        np.add.at(dx, rows, r(dgate @ w_gate[expert].T + dup @ w_up[expert].T))
        out["dw_gate"][expert], out["dw_up"][expert] = r(taken.T @ dgate), r(taken.T @ dup)
        out["dw_down"][expert] = r(r(h * weight).T @ upstream)
    of_scores = np.zeros_like(p)
    shared = (dshare * share).sum(-1, keepdims=True) if normalize_top_k else 0
    of_scores[tokens, index] = (dshare - shared) / total
    if scoring == "sigmoid":
        of_logits = of_scores * p * (1 - p)
    else:
        of_logits = p * (of_scores - (of_scores * p).sum(-1, keepdims=True))
    of_logits = r(of_logits if dlogits is None else of_logits + dlogits)
    out["dw_router"] = r(x.T @ of_logits)
    return {"y": r(y), "logits": logits, "dx": r(r(dx) + r(of_logits @ w_router.T)), **out}
