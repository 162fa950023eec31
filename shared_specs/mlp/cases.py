"""The cases of the MLP that both halves run, and their arrays: drawn from the case's seed, rounded to its dtype."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shared_specs.core.rounding import DTYPES, Array, round_to
from shared_specs.mlp.oracle import mlp

Layout = Literal["contiguous", "sliced", "transposed", "expanded"]


@dataclass(frozen=True, kw_only=True)
class MLPCase:
    """One call of the MLP and what it must get right.

    Args:
        dims: leading dims of x, (T,) or (B, S).
        biases: which of gate, up, down have one.
        x_layout, dy_layout: how the array handed over lies in memory (its values are the same).
        frozen: operands that need no gradient, among x and the names of weights.
        scale: factor on x, for extreme values.
        fused: gate and up come from one [gate; up] weight, through the module.
    """

    dims: tuple[int, ...]
    hidden: int = 16
    intermediate: int = 24
    out: int | None = None
    activation: str = "silu"
    gated: bool = True
    biases: tuple[str, ...] = ()
    fused: bool = False
    dtype: str = "float32"
    num_shards: int | None = 4
    keep: float = 0.0
    x_layout: Layout = "contiguous"
    dy_layout: Layout = "contiguous"
    frozen: tuple[str, ...] = ()
    scale: float = 1.0
    seed: int = 0
    reason: str = field(compare=False)

    @property
    def id(self) -> str:
        name = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
        kind = name.get(self.activation, self.activation + "-gated") if self.gated else self.activation
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[self.dtype]
        parts = [kind, short, "x".join(map(str, self.dims)), f"H{self.hidden}", f"I{self.intermediate}"]
        parts += [f"O{self.out}"] if self.out else []
        parts += [f"N{self.num_shards}" if self.num_shards else "auto"]
        parts += [f"keep{self.keep:g}"] if self.keep else []
        parts += ["bias_" + "_".join(self.biases)] if self.biases else []
        parts += ["fused"] if self.fused else []
        parts += [f"x_{self.x_layout}"] if self.x_layout != "contiguous" else []
        parts += [f"dy_{self.dy_layout}"] if self.dy_layout != "contiguous" else []
        parts += ["frozen_" + "_".join(self.frozen)] if self.frozen else []
        parts += [f"scale{self.scale:g}"] if self.scale != 1.0 else []
        return "-".join(parts)


def _mlp_cases() -> tuple[MLPCase, ...]:
    base = MLPCase(dims=(3, 11), num_shards=4, reason="the ordinary case: 33 tokens, 4 shards, the last one shorter")
    every_bias = ("gate", "up", "down")
    cases = [replace(base, dtype=dtype) for dtype in ("float64", "float32", "bfloat16", "float16")]
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        for activation in ("gelu", "gelu_tanh", "relu", "relu_squared"):
            cases.append(replace(base, activation=activation, dtype=dtype, reason="every gated activation"))
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu_squared"):
            cases.append(replace(base, activation=activation, gated=False, dtype=dtype, reason="the two-matrix MLP"))
        cases += [
            replace(base, biases=every_bias, dtype=dtype, reason="every bias, each with its own gradient"),
            replace(base, keep=0.5, dtype=dtype, reason="kept and recomputed shards in one backward"),
            replace(base, fused=True, dtype=dtype, reason="one [gate; up] weight"),
        ]
    shapes = {
        1: "one shard: no accumulation",
        33: "one token per shard",
        64: "fewer tokens than shards: the plan's length is the truth",
        None: "the automatic plan",
    }
    cases += [replace(base, num_shards=n, reason=why) for n, why in shapes.items()]
    cases += [
        replace(base, dims=(5,), num_shards=4, reason="5 tokens in 4 shards are 3 shards"),
        replace(base, dims=(1,), num_shards=4, reason="one token"),
        replace(base, dims=(0,), num_shards=4, reason="zero tokens: an empty expert"),
        replace(base, dims=(2, 0), num_shards=1, reason="zero tokens in a batch"),
        replace(base, dims=(2, 3, 7), num_shards=4, reason="three leading dims"),
        replace(base, dims=(127,), hidden=64, intermediate=96, num_shards=5, dtype="bfloat16", reason="larger sums"),
        replace(base, hidden=24, intermediate=7, reason="I < H, odd"),
        replace(base, hidden=1, intermediate=1, reason="the smallest matrices"),
        replace(base, out=9, reason="output size differs from input size"),
        replace(base, biases=("down",), gated=False, keep=1.0, reason="everything kept, no gate, one bias"),
        replace(base, keep=1.0, num_shards=1, reason="one shard, kept"),
        replace(base, keep=0.25, biases=every_bias, activation="gelu", reason="keep with biases"),
        replace(base, biases=every_bias, fused=True, reason="fused weight with biases"),
        replace(base, x_layout="sliced", reason="x is a slice: its gradient must reach the whole"),
        replace(base, x_layout="transposed", reason="x has its batch and sequence strides swapped"),
        replace(base, x_layout="expanded", reason="x has a stride of zero"),
        replace(base, dy_layout="expanded", reason="the gradient of a sum has stride zero"),
        replace(base, dy_layout="transposed", reason="upstream gradient from a transpose"),
        replace(base, dy_layout="sliced", reason="upstream gradient with gaps"),
        replace(base, frozen=("x",), reason="the first layer: x needs no gradient"),
        replace(base, frozen=("w_gate",), reason="one frozen weight"),
        replace(base, frozen=("w_gate", "w_up", "w_down"), reason="only x needs a gradient"),
        replace(base, frozen=("x", "w_up", "w_down"), keep=0.5, reason="only gate trains, with kept shards"),
        replace(base, scale=100.0, reason="saturated activations"),
        replace(base, scale=1e3, activation="gelu_tanh", reason="the cube inside gelu_tanh grows large"),
        replace(base, scale=1e-4, reason="tiny activations"),
        replace(base, dtype="bfloat16", dims=(256,), num_shards=256, reason="float32 sums: 256 shards, no drift"),
        replace(base, dtype="float16", scale=30.0, reason="float16 storage with large values"),
        replace(base, seed=1, dims=(64,), num_shards=8, keep=0.5, reason="T divisible by N"),
    ]
    return tuple(cases)


MLP_CASES = _mlp_cases()


def make_inputs(case: MLPCase) -> dict[str, Array]:
    """Return x [*dims, H], dy [*dims, H_out], w_gate and w_up [H, I], w_down [I, H_out], b_* ; weights are [in, out].

    An expanded layout repeats one row along the last leading dim, so that a zero stride can hold the same values.
    """
    rng = np.random.default_rng(case.seed)
    out = case.hidden if case.out is None else case.out
    arrays = {
        "x": case.scale * rng.standard_normal((*case.dims, case.hidden)),
        "dy": rng.standard_normal((*case.dims, out)) + 0.25,
        "w_gate": rng.standard_normal((case.hidden, case.intermediate)) / np.sqrt(case.hidden),
        "w_up": rng.standard_normal((case.hidden, case.intermediate)) / np.sqrt(case.hidden),
        "w_down": rng.standard_normal((case.intermediate, out)) / np.sqrt(case.intermediate),
    }
    widths = {"gate": case.intermediate, "up": case.intermediate, "down": out}
    arrays |= {f"b_{name}": 0.5 * rng.standard_normal(widths[name]) for name in case.biases}
    if not case.gated:
        del arrays["w_gate"]
    for name, layout in (("x", case.x_layout), ("dy", case.dy_layout)):
        if layout == "expanded":
            arrays[name] = np.broadcast_to(arrays[name][..., :1, :], arrays[name].shape)
    return {name: np.ascontiguousarray(array).astype(DTYPES[case.dtype]) for name, array in arrays.items()}


def evaluate_mlp(case: MLPCase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    arrays = {name: array.astype(dtype) for name, array in make_inputs(case).items()}
    x, dy = arrays["x"].reshape(-1, case.hidden), arrays["dy"].reshape(-1, arrays["dy"].shape[-1])
    with np.errstate(over="ignore", invalid="ignore"):
        results = mlp(
            x,
            arrays.get("w_gate"),
            arrays["w_up"],
            arrays["w_down"],
            dy,
            biases={name: arrays[f"b_{name}"] for name in case.biases},
            activation=case.activation,
            rounding=round_to(case.dtype) if rounded else None,
        )
    results["y"] = results["y"].reshape(arrays["dy"].shape)
    results["dx"] = results["dx"].reshape(arrays["x"].shape)
    return results
