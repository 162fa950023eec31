"""The cases of the distillation loss that both halves run, and their arrays: drawn from a seed, rounded to the case's dtype."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shared_specs.config import LossOptions, LossReduction
from shared_specs.core.rounding import DTYPES, Array, compute_dtype, round_to
from shared_specs.distillation.objective import Kind, Objective
from shared_specs.distillation.oracle import distillation

_ARGUMENTS = ("student", "w_student", "teacher", "w_teacher", "bias_student", "bias_teacher", "targets", "token_weight")


@dataclass(frozen=True, kw_only=True)
class DistillationCase:
    """One call and what it must get right.

    Args:
        dims: leading dims. hidden, teacher_hidden, vocab: H, G, V. ignored: the share of the targets, drawn among them; None:
            there are no targets.
        bias, token_weight: whether there is one. scale: factor on the hidden states of both. weights: factor on token_weight.
        upstream: factor on the upstream gradient. the rest: arguments of `tiled_distillation_loss` and fields of LossOptions.
    """

    dims: tuple[int, ...] = (3, 11)
    hidden: int = 16
    teacher_hidden: int = 24
    vocab: int = 41
    dtype: str = "float32"
    num_shards: int | None = 4
    ignored: float | None = 0.4
    bias: bool = False
    token_weight: bool = False
    kind: Kind = "forward_kl"
    temperature: float = 1.0
    beta: float = 0.5
    weight_hard: float = 0.0
    weight_soft: float | None = None
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    reduction: LossReduction = "mean"
    num_valid: float | None = None
    upstream: float = 1.0
    scale: float = 1.0
    weights: float = 1.0
    seed: int = 0
    reason: str = field(compare=False)

    @property
    def id(self) -> str:
        plain = DistillationCase(reason="")
        changed = (name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(plain, name))
        return "-".join(
            [self.kind, *(f"{name}{getattr(self, name)}" for name in changed if name not in ("kind", "reason"))]
        )

    @property
    def options(self) -> LossOptions:
        return LossOptions(
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            reduction=self.reduction,
            num_valid=self.num_valid,
        )

    @property
    def objective(self) -> Objective:
        soft = 1 - self.weight_hard if self.weight_soft is None else self.weight_soft
        numbers = {name: getattr(self, name) for name in ("temperature", "beta", "weight_hard")}
        return Objective(kind=self.kind, weight_soft=soft, **numbers)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the call but for its arrays."""
        names = ("kind", "temperature", "beta", "weight_hard", "weight_soft", "num_shards")
        return {name: getattr(self, name) for name in names} | {"loss": self.options}


def _cases() -> tuple[DistillationCase, ...]:
    base = DistillationCase(reason="33 tokens, 4 shards, the last one shorter, ignored labels")
    kinds: tuple[dict[str, Any], ...] = ({"kind": "forward_kl"}, {"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.3})
    cases = [
        replace(base, dtype=dtype, **kind) for dtype in ("float64", "float32", "bfloat16", "float16") for kind in kinds
    ]
    every: dict[str, Any] = {"temperature": 2.5, "weight_hard": 0.3, "bias": True, "token_weight": True}
    every |= {"logit_softcap": 6.0, "logit_scale": 0.7, "reason": "everything at once"}
    for reduction in ("mean", "sum", "none"):
        cases += [replace(base, reduction=reduction, dtype="float64", **every, **kind) for kind in kinds]
    cases += [replace(base, ignored=None, reason="no targets: every token counts", **kind) for kind in kinds]
    cases += [
        replace(base, ignored=0.0, reduction="none", reason="a loss of every token"),
        replace(base, ignored=0.02, weight_hard=1.0, weight_soft=2.0, reason="both whole, few labels ignored"),
        replace(base, weight_hard=1.0, reason="nothing but the cross entropy"),
        replace(base, ignored=1.0, reason="no label: zero, not NaN"),
        replace(base, ignored=1.0, reduction="none", reason="the same per token"),
        replace(base, num_valid=100.0, reason="a count over all micro-batches and ranks"),
        replace(base, dims=(0,), ignored=None, reason="zero tokens"),
        replace(base, dims=(2, 3, 5), num_shards=None, bias=True, reason="three leading dims, the automatic plan"),
        replace(base, dims=(7,), num_shards=64, reason="one token per shard"),
        replace(base, num_shards=1, reason="one shard"),
        replace(base, vocab=1, reason="one class: loss and gradients are zero"),
        replace(base, scale=60.0, kind="reverse_kl", ignored=None, reason="probabilities near 0 and 1"),
        replace(base, dtype="float16", upstream=65536.0, reason="a loss scaler: gradients must not be lost"),
        replace(base, dtype="float16", reduction="none", upstream=512.0, reason="a loss scaler, per token"),
        replace(
            base, dtype="float16", token_weight=True, weights=1e7, upstream=1e-3, reason="weights above float16's range"
        ),
        replace(base, dtype="bfloat16", dims=(256,), num_shards=256, reason="float32 sums: 256 shards, no drift"),
    ]
    return tuple(cases)


DISTILLATION_CASES = _cases()


def make_distillation_inputs(case: DistillationCase) -> dict[str, Array]:
    """Return the arrays of a case by their arguments' names, weights [in, out], and `dloss`, the upstream gradient."""
    rng = np.random.default_rng(case.seed)
    stored, wide = DTYPES[case.dtype], compute_dtype(case.dtype)
    arrays: dict[str, Array] = {}
    for whose, width in (("student", case.hidden), ("teacher", case.teacher_hidden)):
        arrays[whose] = (case.scale * rng.standard_normal((*case.dims, width))).astype(stored)
        arrays[f"w_{whose}"] = (rng.standard_normal((width, case.vocab)) / np.sqrt(width)).astype(stored)
        if case.bias:
            arrays[f"bias_{whose}"] = (0.5 * rng.standard_normal(case.vocab)).astype(stored)
    tokens = int(np.prod(case.dims))
    labels = rng.integers(0, case.vocab, tokens)
    if case.ignored is not None:
        labels[rng.permutation(tokens)[: round(case.ignored * tokens)]] = -100
        arrays["targets"] = labels.reshape(case.dims)
    if case.token_weight:
        arrays["token_weight"] = (case.weights * rng.standard_normal(case.dims)).astype(wide)
    per_token = case.dims if case.reduction == "none" else ()
    arrays["dloss"] = np.asarray(case.upstream * (rng.standard_normal(per_token) if per_token else 1.0), wide)
    return arrays


def evaluate_distillation(case: DistillationCase, *, rounded: bool) -> dict[str, Array]:
    """Return the loss and the gradients of the student: the oracle's, or rounded as a plain implementation's."""
    dtype = compute_dtype(case.dtype) if rounded else np.dtype(np.float64)
    arrays = {k: v if k == "targets" else v.astype(dtype) for k, v in make_distillation_inputs(case).items()}
    flat = {k: v.reshape(-1, *v.shape[len(case.dims) :]) for k, v in arrays.items() if k in ("student", "teacher")}
    flat |= {k: v.reshape(-1) for k, v in arrays.items() if k in ("targets", "token_weight")}
    given: dict[str, Any] = {name: (arrays | flat).get(name) for name in _ARGUMENTS}
    found = distillation(
        upstream=arrays["dloss"].reshape(-1) if arrays["dloss"].ndim else arrays["dloss"],
        objective=case.objective,
        options=case.options,
        rounding=round_to(case.dtype) if rounded else None,
        **given,
    )
    found["dstudent"] = found["dstudent"].reshape(arrays["student"].shape)
    found["loss"] = found["loss"].reshape(case.dims) if found["loss"].ndim else found["loss"]
    return found
