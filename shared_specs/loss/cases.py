"""The cases of the losses that both halves run, and their arrays: drawn from the case's seed, rounded to its dtype."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from shared_specs.config import DIFFERENTIABLE_OUTPUTS, LossOptions, LossOutput, LossReduction
from shared_specs.core.rounding import DTYPES, Array, compute_dtype, round_to
from shared_specs.loss.oracle import linear_cross_entropy


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
    every: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 7.0, "logit_scale": 0.7}
    every |= {"bias": True, "class_weight": True, "reason": "everything at once"}
    outputs: tuple[LossOutput, ...] = ("log_probs", "lse", "entropy", "accuracy")
    # Every pair of a reduction, vocabulary shards or none, and outputs or none.
    combined: list[dict[str, Any]] = [
        {"reduction": "mean"},
        {"reduction": "mean", "vocab_shards": 2, "outputs": outputs},
        {"reduction": "sum", "vocab_shards": 4},
        {"reduction": "sum", "outputs": outputs},
        {"reduction": "none"},
        {"reduction": "none", "vocab_shards": 2, "outputs": outputs},
    ]
    cases += [replace(base, dtype=dtype, **every, **changes) for dtype in dtypes[:2] for changes in combined]
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


def make_loss_inputs(case: LossCase) -> dict[str, Array]:
    """Return x [*dims, H], weight [H, V], bias [V], targets [*dims] (int64), class_weight [V] and upstream gradients.

    `d<name>` is the upstream gradient of a result, in the dtype results have: float32, float64 for float64.
    """
    rng = np.random.default_rng(case.seed)
    stored, wide = DTYPES[case.dtype], compute_dtype(case.dtype)
    arrays = {
        "x": (case.scale * rng.standard_normal((*case.dims, case.hidden))).astype(stored),
        "weight": (rng.standard_normal((case.hidden, case.vocab)) / np.sqrt(case.hidden)).astype(stored),
    }
    if case.bias:
        arrays["bias"] = (0.5 * rng.standard_normal(case.vocab)).astype(stored)
    if case.class_weight:
        arrays["class_weight"] = (case.class_scale * rng.uniform(0.25, 2.0, case.vocab)).astype(wide)
    flat = rng.integers(0, case.vocab, int(np.prod(case.dims)))
    tokens = np.arange(flat.size)
    ignored = {
        "none": tokens < 0,
        "some": tokens % 3 == 1,
        "all": tokens >= 0,
        "first": tokens < flat.size // 2,
        "last": tokens >= flat.size // 2,
    }[case.ignored]
    arrays["targets"] = np.where(ignored, case.ignore_index, flat).reshape(case.dims)
    per_token = case.dims if case.reduction == "none" else ()
    arrays["dloss"] = np.asarray(case.upstream * (rng.standard_normal(per_token) if per_token else 1.0), wide)
    for name in case.outputs:
        if name in DIFFERENTIABLE_OUTPUTS:
            arrays[f"d{name}"] = (case.upstream * rng.standard_normal(case.dims)).astype(wide)
    return arrays


def loss_options(case: LossCase, class_weight: Any = None, num_valid: Any = None) -> LossOptions:
    """Return the case's options, with the arrays given in the form of whoever calls."""
    return LossOptions(
        ignore_index=case.ignore_index,
        label_smoothing=case.label_smoothing,
        z_loss=case.z_loss,
        logit_softcap=case.logit_softcap,
        logit_scale=case.logit_scale,
        reduction=case.reduction,
        outputs=case.outputs,
        class_weight=class_weight,
        num_valid=case.num_valid if num_valid is None else num_valid,
    )


def evaluate_loss(case: LossCase, dtype: np.dtype[Any], rounded: bool) -> dict[str, Array]:
    arrays = {k: v if k == "targets" else v.astype(dtype) for k, v in make_loss_inputs(case).items()}
    upstream = {
        name[1:]: array.reshape(-1) if array.ndim else array for name, array in arrays.items() if name[0] == "d"
    }
    results = linear_cross_entropy(
        arrays["x"].reshape(-1, case.hidden),
        arrays["weight"],
        arrays["targets"].reshape(-1),
        upstream,
        bias=arrays.get("bias"),
        options=loss_options(case, arrays.get("class_weight")),
        rounding=round_to(case.dtype) if rounded else None,
    )
    for name in ("loss", *case.outputs):
        if results[name].ndim:
            results[name] = results[name].reshape(case.dims)
    results["dx"] = results["dx"].reshape(arrays["x"].shape)
    return {name: np.asarray(value) for name, value in results.items()}
