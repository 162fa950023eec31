"""Every case of the parity suite, once, with the reason it exists. Frozen data; the tests loop over it."""

from dataclasses import dataclass, field, replace
from typing import Literal

from shared_specs.config import LOSS_REDUCTIONS, LossOutput, LossReduction

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


@dataclass(frozen=True, kw_only=True)
class LossCase:
    """One call of the linear cross entropy and what it must get right.

    Args:
        dims: leading dims of x and the dims of targets. vocab: V.
        ignored: which targets are ignored: none, some (every third), all, first, last (half of them each).
        class_weight, bias: whether there is one. num_valid: what the mean divides by.
        class_scale: factor on the class weights.
        upstream: factor on the upstream gradient of the loss, as a loss scaler's.
        scale: factor on x, for extreme logits. frozen: operands without gradients, among x, weight and bias.
        the rest: fields of LossOptions.
    """

    dims: tuple[int, ...]
    hidden: int = 16
    vocab: int = 41
    dtype: str = "float32"
    num_shards: int | None = 4
    vocab_shards: int | None = None
    ignored: Literal["none", "some", "all", "first", "last"] = "some"
    ignore_index: int = -100
    bias: bool = False
    class_weight: bool = False
    class_scale: float = 1.0
    num_valid: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    reduction: LossReduction = "mean"
    outputs: tuple[LossOutput, ...] = ()
    upstream: float = 1.0
    scale: float = 1.0
    frozen: tuple[str, ...] = ()
    seed: int = 0
    reason: str = field(compare=False)

    @property
    def id(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}[self.dtype]
        parts = ["xent", short, "x".join(map(str, self.dims)), f"H{self.hidden}", f"V{self.vocab}"]
        parts += [f"N{self.num_shards}" if self.num_shards else "auto", self.reduction, f"ignored_{self.ignored}"]
        named = ("vocab_shards", "num_valid", "label_smoothing", "z_loss", "logit_softcap")
        parts += [f"{name}{getattr(self, name):g}" for name in named if getattr(self, name)]
        parts += [name for name in ("bias", "class_weight") if getattr(self, name)]
        parts += [
            f"{name}{getattr(self, name):g}"
            for name in ("logit_scale", "class_scale", "upstream", "scale")
            if getattr(self, name) != 1
        ]
        parts += [f"index{self.ignore_index}"] if self.ignore_index != -100 else []
        parts += [*self.outputs, *(f"frozen_{name}" for name in self.frozen)]
        return "-".join(parts)


def _loss_cases() -> tuple[LossCase, ...]:
    base = LossCase(dims=(3, 11), reason="the ordinary case: 33 tokens, 4 shards, the last one shorter, ignored labels")
    dtypes = ("float64", "float32", "bfloat16", "float16")
    cases = [replace(base, dtype=dtype) for dtype in dtypes]
    for dtype in dtypes[:3]:
        cases += [
            replace(base, dtype=dtype, reduction="sum", upstream=0.37, reason="a sum, scaled upstream"),
            replace(base, dtype=dtype, reduction="none", reason="one loss and one upstream gradient per token"),
            replace(base, dtype=dtype, bias=True, label_smoothing=0.1, reason="bias and smoothing"),
            replace(
                base, dtype=dtype, z_loss=1e-2, logit_softcap=5.0, logit_scale=0.5, reason="what Gemma and PaLM add"
            ),
            replace(base, dtype=dtype, outputs=("log_probs", "lse"), reason="reinforcement learning"),
            replace(base, dtype=dtype, vocab_shards=3, reason="online log-sum-exp: V is not divisible by 3"),
        ]
    every = {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 7.0, "logit_scale": 0.7, "bias": True}
    outputs: tuple[LossOutput, ...] = ("log_probs", "lse", "entropy", "accuracy")
    for dtype in dtypes[:2]:
        for reduction in LOSS_REDUCTIONS:
            full = replace(base, dtype=dtype, reduction=reduction, class_weight=True, **every)  # type: ignore[arg-type]
            cases += [
                replace(full, reason="everything at once, gradients in forward where they can be"),
                replace(full, vocab_shards=4, reason="everything at once over vocabulary shards"),
                replace(full, outputs=outputs, reason="everything at once with every output"),
                replace(full, outputs=outputs, vocab_shards=2, reason="every output over vocabulary shards"),
            ]
    shapes = {
        1: "one shard: no accumulation",
        33: "one token per shard",
        64: "fewer tokens than shards",
        None: "the automatic plan",
    }
    cases += [replace(base, num_shards=n, reason=why) for n, why in shapes.items()]
    for ignored in ("none", "all", "first", "last"):
        cases.append(replace(base, ignored=ignored, reason="whole shards without a label; none at all: zero, not NaN"))
        cases.append(
            replace(base, ignored=ignored, reduction="none", outputs=("log_probs",), reason="the same per token")
        )
    cases += [
        replace(
            base, ignored="all", class_weight=True, outputs=("accuracy",), reason="a weighted mean of nothing is zero"
        ),
        replace(base, dims=(0,), ignored="none", reason="zero tokens"),
        replace(base, dims=(0,), ignored="none", reduction="none", outputs=("lse",), reason="zero tokens, per token"),
        replace(base, dims=(1,), ignored="none", reason="one token"),
        replace(base, dims=(5,), reason="5 tokens in 4 shards are 3 shards"),
        replace(base, dims=(2, 3, 5), bias=True, reason="three leading dims"),
        replace(base, vocab=1, ignored="some", bias=True, reason="one class: loss and gradients are zero"),
        replace(base, vocab=1, vocab_shards=4, reason="fewer entries than vocabulary shards"),
        replace(base, vocab=127, vocab_shards=5, hidden=24, num_shards=3, reason="a prime vocabulary"),
        replace(base, hidden=1, vocab=2, reason="the smallest matrices"),
        replace(base, ignore_index=0, reason="an ignore_index that is an entry of the vocabulary"),
        replace(
            base, ignore_index=0, reduction="sum", outputs=("accuracy", "log_probs"), reason="the same with outputs"
        ),
        replace(base, num_valid=1000.0, class_weight=True, reason="a count over all micro-batches and ranks"),
        replace(base, num_valid=7.0, outputs=("accuracy",), reason="accuracy divides by the same count"),
        replace(base, outputs=("accuracy",), reason="an output without a gradient keeps the gradients in forward"),
        replace(base, class_weight=True, label_smoothing=0.3, reason="class weights inside smoothing"),
        replace(base, label_smoothing=1.0, reason="nothing but smoothing"),
        replace(base, upstream=0.0, reason="an upstream gradient of zero"),
        replace(base, upstream=-3.0, reduction="sum", reason="a negative upstream gradient"),
        replace(base, frozen=("x",), bias=True, reason="a trained head on a frozen model"),
        replace(base, frozen=("weight",), reason="a frozen head"),
        replace(base, frozen=("weight", "bias"), bias=True, reduction="none", reason="a frozen head, per token"),
        replace(base, frozen=("x", "weight"), bias=True, reason="only the bias trains"),
        replace(base, frozen=("x",), reduction="none", vocab_shards=2, reason="a frozen model, vocabulary shards"),
        replace(base, scale=1e4, ignored="none", reason="logits of 1e4: one entry takes all"),
        replace(base, scale=1e4, vocab_shards=3, reduction="none", reason="logits of 1e4, online log-sum-exp"),
        replace(base, scale=1e-4, reason="a flat distribution"),
        replace(base, dtype="float16", scale=300.0, reason="float16 logits near the top of their range"),
        replace(base, dtype="float16", upstream=65536.0, reason="a loss scaler: gradients must not be lost"),
        replace(base, dtype="float16", reduction="none", upstream=512.0, reason="a loss scaler, per token"),
        replace(
            base,
            dtype="float16",
            num_valid=1e6,
            upstream=65536.0,
            dims=(96,),
            reason="1/num_valid underflows float16",
        ),
        replace(
            base,
            dtype="float16",
            z_loss=1e6,
            num_valid=1e3,
            reason="a z_loss far above 1: infinite where its part is stored as it is",
        ),
        replace(
            base, dtype="float16", logit_scale=1e-6, upstream=1e6, reason="logits that are scaled to nearly nothing"
        ),
        replace(base, dtype="bfloat16", dims=(256,), num_shards=256, reason="float32 sums: 256 shards, no drift"),
        replace(base, dtype="bfloat16", dims=(4, 32), vocab=512, hidden=64, bias=True, reason="larger sums"),
        replace(base, seed=1, dims=(64,), num_shards=8, vocab_shards=2, reason="T divisible by N"),
    ]
    weighted = replace(base, dtype="float16", class_weight=True)
    cases += [
        replace(
            weighted, class_scale=scale, label_smoothing=smoothing, reason="a mean, whatever the scale of the weights"
        )
        for scale, smoothing in ((1e-9, 0.0), (1e5, 0.1))
    ]
    return tuple(cases)


LOSS_CASES = _loss_cases()
