"""A mixture of experts: a router picks a few MLPs of every token, and each computes its tokens a shard at a time.

Letters: T tokens, H hidden, I intermediate, E experts, k of them chosen by every token, A = T k assignments, b rows of a shard.
A shard has rows of one expert alone. Its tokens are gathered, and what it returns is added to theirs: beside x and y nothing is
as long as the tokens but the assignments, and of an expert that nobody chose nothing is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, error_text
from shared_specs.shards import plan_tiling
from tiled_jax import backends
from tiled_jax.core.linear_call import Arrays, Saved, barrier, differentiable
from tiled_jax.core.loops import gradient_of, vary_over, varying_of
from tiled_jax.core.params import init_weight
from tiled_jax.core.products import product, wide
from tiled_jax.layers.attention import precision_of
from tiled_jax.mlp import math as shard_math
from tiled_jax.mlp.steps import XLA
from tiled_jax.models.config import Experts

WEIGHTS = ("w_gate", "w_up", "w_down")
_NAME = "Llama"


class ExpertsMLP(nnx.Module):
    """Return sum over the chosen experts e of p_e mlp_e(x), p the softmax of x w_router over all; made to add up to
    one, where the configuration has it so.

    Args:
        hidden_size, intermediate_size: H and I. experts: E and k.
        tiling: num_shards of the tokens, or shard_tokens: the rows of an expert that are computed at once, at most.
        plain: every expert computes all tokens, for comparison.
    Parameters are those of `router`, `w_gate` and `w_up` [E, H, I] and `w_down` [E, I, H].
    Numerics: the router's softmax, p, and the sum over experts are float32; gradients of experts are summed over their
        shards in float32 and rounded once.
    Memory: keeps x, the parameters and 2 A numbers; of experts a call makes the intermediate arrays of one shard.
    Derivatives: of forward and reverse mode, and the former of the latter.
    Raises:
        UnsupportedError: a tiling by more than num_shards and shard_tokens.
    Source: Jiang et al. 2024, Mixtral of Experts; the shards of one expert are derived from `tiled_mlp`'s.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        experts: Experts,
        tiling: Tiling | None = None,
        plain: bool = False,
        activation: str = "silu",
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.tiling = _checked(tiling or Tiling())
        self.experts, self.plain, self.activation, self.dtype = experts, plain, activation, dtype
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        options |= {"precision": None if dtype is None else precision_of(dtype)}
        self.router = nnx.Linear(hidden_size, experts.count, use_bias=False, **options, rngs=rngs)
        shapes = (hidden_size, intermediate_size), (hidden_size, intermediate_size), (intermediate_size, hidden_size)
        for name, shape in zip(WEIGHTS, shapes, strict=True):
            # Drawn one by one: an initialiser would take the experts for inputs.
            each = [init_weight(rngs.params(), shape, param_dtype) for _ in range(experts.count)]
            setattr(self, name, nnx.Param(jnp.stack(each)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., H] -> [..., H], in `dtype`."""
        x = x.astype(self.dtype or x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.routed(rows)
        params: Arrays = {name: getattr(self, name)[...] for name in WEIGHTS}
        if self.plain:
            return _dense(rows, weights, chosen, params, self.activation).reshape(x.shape)
        operands: Arrays = {"x": rows, "weights": weights, "chosen": chosen} | params
        return _mixed(self._call(rows.shape[0]), operands)["y"].reshape(x.shape)

    def routed(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return p [T, k] in the wide dtype and the numbers of the chosen experts [T, k], the likeliest first."""
        probabilities = jax.nn.softmax(self.router(x).astype(wide(x.dtype)), axis=-1)
        found, chosen = lax.top_k(probabilities, self.experts.chosen)
        return found / jnp.sum(found, axis=-1, keepdims=True) if self.experts.normalised else found, chosen

    def _path(self) -> str:
        """Return how a call runs, for `tiling_paths`."""
        return "tiled_experts"

    def _call(self, tokens: int) -> "_ExpertsCall":
        """Shards have at most a quarter of what an expert has on average, so that those half filled cost an eighth."""
        plan = plan_tiling(tokens, self.tiling, device=backends.device_kind())
        average = tokens * self.experts.chosen / self.experts.count
        return _ExpertsCall(
            self.activation, self.experts, max(1, min(plan.shard_tokens, max(_FEWEST, int(average / 4))))
        )


_FEWEST = 128  # rows of a shard, where there are as many: below, reading and writing weights costs more than products


def _checked(tiling: Tiling) -> Tiling:
    options = {"keep": 0.0, "memory_budget": None, "deterministic": False, "token_axes": None}
    for name, default in options.items():
        value = getattr(tiling, name)
        if value != default:
            advice = "Pass num_shards or shard_tokens alone."
            raise UnsupportedError(error_text(_NAME, name, f"{default} with experts", value, advice=advice))
    return tiling


def _dense(x: jax.Array, weights: jax.Array, chosen: jax.Array, w: Arrays, activation: str) -> jax.Array:
    """All experts on all tokens: arrays [E, T, I]."""
    options: dict[str, Any] = {"precision": precision_of(x.dtype), "preferred_element_type": wide(x.dtype)}
    gate, up = (jnp.einsum("th,ehi->eti", x, w[name].astype(x.dtype), **options) for name in ("w_gate", "w_up"))
    h = shard_math.activated({"gate": gate, "up": up}, activation).astype(x.dtype)
    y = jnp.einsum("eti,eih->teh", h, w["w_down"].astype(x.dtype), **options)
    taken = jnp.take_along_axis(y, chosen[..., None], axis=1)
    return jnp.sum(taken * weights[..., None], axis=1).astype(x.dtype)


@dataclass(frozen=True)
class _ExpertsCall:
    """All that is static about one call; rows: of a shard."""

    activation: str
    experts: Experts
    rows: int


class _ExpertShard(NamedTuple):
    """One shard: its expert, its assignments and their tokens [b], A and T where there are fewer."""

    expert: jax.Array
    assignments: jax.Array
    tokens: jax.Array


class _ExpertShards:
    """The shards of a call in the order of the experts, those of one expert in the order of the tokens."""

    def __init__(self, call: _ExpertsCall, chosen: jax.Array):
        self.rows, self.chosen, self.total = call.rows, chosen.shape[1], chosen.size
        flat = chosen.reshape(-1)
        self._order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        of_expert = jnp.zeros(call.experts.count, jnp.int32).at[flat].add(1)
        self._stops = jnp.cumsum(of_expert, dtype=jnp.int32)
        self._starts = self._stops - of_expert
        self._last = jnp.cumsum(-(-of_expert // call.rows), dtype=jnp.int32)

    def each(self, body: Callable[[_ExpertShard, Any], Any], carry: Any) -> Any:
        """Return the carry after every shard, in one loop of as many steps as there are shards."""
        return lax.fori_loop(0, self._last[-1], lambda j, carry: body(self._shard(j), carry), carry)

    def _shard(self, j: jax.Array) -> _ExpertShard:
        expert = jnp.sum(self._last <= j, dtype=jnp.int32)
        before = jnp.where(expert == 0, 0, self._last[jnp.maximum(expert - 1, 0)])
        places = self._starts[expert] + (j - before) * self.rows + jnp.arange(self.rows, dtype=jnp.int32)
        there = places < self._stops[expert]
        found = self._order[jnp.minimum(places, self.total - 1)]
        assignments = jnp.where(there, found, self.total)
        return _ExpertShard(expert, assignments, jnp.where(there, found // self.chosen, self.total // self.chosen))


def _taken(a: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a, zeros for the number behind the last one."""
    return a.at[rows].get(mode="fill", fill_value=0)


class _ExpertRules:
    """x [T, H], weights and chosen [T, k], and the experts' parameters by name."""

    @staticmethod
    def forward(call: _ExpertsCall, operands: Arrays) -> Arrays:
        x, shares = operands["x"], operands["weights"].reshape(-1)
        w = {name: operands[name].astype(x.dtype) for name in WEIGHTS}
        shards = _ExpertShards(call, operands["chosen"])

        def add(shard: _ExpertShard, y: jax.Array) -> jax.Array:
            own = {name: w[name][shard.expert] for name in WEIGHTS}
            h, _ = XLA.hidden(_taken(x, shard.tokens), own, call.activation)
            part = product(h, own["w_down"], (1, 0), y.dtype) * _taken(shares, shard.assignments)[:, None]
            return y.at[shard.tokens].add(part, mode="drop")

        y = vary_over(jnp.zeros(x.shape, wide(x.dtype)), varying_of(operands.values()))
        y = shards.each(add, y) if x.shape[0] else y
        return {"y": y.astype(x.dtype)}

    @staticmethod
    def save(call: _ExpertsCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        return _ExpertRules.forward(call, operands), Saved(operands)

    @staticmethod
    def tangents(call: _ExpertsCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        def moved(of: Arrays) -> Arrays:
            return _ExpertRules.forward(call, saved.arrays | of)

        return jax.jvp(moved, ({name: saved.arrays[name] for name in t},), (t,))[1]

    @staticmethod
    def gradients(call: _ExpertsCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        operands, dy = barrier((saved.arrays, g["y"]))
        x, shares = operands["x"], operands["weights"].reshape(-1)
        acc, shards = wide(x.dtype), _ExpertShards(call, operands["chosen"])
        w = {name: operands[name].astype(x.dtype) for name in WEIGHTS}

        def add(shard: _ExpertShard, sums: Arrays) -> Arrays:
            own = {name: w[name][shard.expert] for name in WEIGHTS}
            rows, upstream = _taken(x, shard.tokens), _taken(dy, shard.tokens)
            share = _taken(shares, shard.assignments)[:, None]
            pre = XLA.gate_and_up(rows, own)
            of_h = product(upstream, own["w_down"], (1, 1), acc)  # of the expert's own result, before its share
            h, d = shard_math.activation_gradients((of_h * share).astype(x.dtype), pre, call.activation)
            weighted = (h.astype(acc) * share).astype(x.dtype)
            parts = {"w_down": (weighted, upstream), "w_gate": (rows, d["gate"]), "w_up": (rows, d["up"])}
            found = {
                name: sums[name].at[shard.expert].set(shard_math.added(sums[name][shard.expert], *parts[name]))
                for name in WEIGHTS
                if name in sums
            }
            if "x" in sums:
                part = shard_math.dx(d, {name: own[f"w_{name}"] for name in d}).astype(acc)
                found["x"] = sums["x"].at[shard.tokens].add(part, mode="drop")
            if "weights" in sums:
                of_share = jnp.sum(of_h * h.astype(acc), axis=-1)
                found["weights"] = sums["weights"].at[shard.assignments].set(of_share, mode="drop")
            return found

        types = varying_of([*operands.values(), dy])
        shapes = {name: shares.shape if name == "weights" else operands[name].shape for name in wanted}
        sums = {name: vary_over(jnp.zeros(shape, acc), types) for name, shape in shapes.items()}
        sums = shards.each(add, sums) if x.shape[0] else sums
        return {name: gradient_of(operands[name], a.reshape(operands[name].shape)) for name, a in sums.items()}


_mixed = differentiable(_ExpertRules.forward, _ExpertRules)
