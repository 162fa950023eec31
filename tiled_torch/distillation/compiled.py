"""The distillation loss as opaque operators, for torch.compile: a graph holds one node, not N shards."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from shared_specs.distillation.objective import Objective
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.distillation import call as distillation_call
from tiled_torch.distillation.call import DistillationCall, Distilled
from tiled_torch.distillation.math import DistillationRules
from tiled_torch.loss.loops import Needs, scaled

_NUMBERS = ("temperature", "beta", "weight_hard", "weight_soft")
_NO_CAP = 0.0  # which no cap is


class StaticDistillation(NamedTuple):
    """The part of a call that is no tensor, as operators take it."""

    sizes: list[int]  # shard_tokens, vocab, ignore_index
    factors: list[float]  # those of the objective, then logit_scale and logit_softcap of student and teacher
    words: str  # kind, reduction
    dtype: torch.dtype
    dtype_teacher: torch.dtype

    @classmethod
    def of(cls, call: DistillationCall) -> "StaticDistillation":
        rules = call.rules
        objective = asdict(rules.objective)
        of_logits = [(o.logit_scale, o.logit_softcap or _NO_CAP) for o in (rules.options, rules.options_teacher)]
        return cls(
            [call.shard_tokens, rules.vocab, rules.options.ignore_index],
            [*(objective[name] for name in _NUMBERS), *of_logits[0], *of_logits[1]],
            f"{rules.objective.kind},{rules.options.reduction}",
            call.dtype,
            call.dtype_teacher,
        )

    @property
    def call(self) -> DistillationCall:
        """Return the call of which this was made."""
        shard_tokens, vocab, ignore_index = self.sizes
        kind, reduction = self.words.split(",")
        numbers: dict[str, Any] = dict(zip(_NUMBERS, self.factors[:4], strict=True))
        scale, cap, scale_teacher, cap_teacher = self.factors[4:]
        given: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        options = LossOptions(logit_scale=scale, logit_softcap=cap or None, **given)
        teacher = LossOptions(logit_scale=scale_teacher, logit_softcap=cap_teacher or None)
        rules = DistillationRules(Objective(kind=kind, **numbers), options, teacher, vocab)  # type: ignore[arg-type]
        return DistillationCall(rules, shard_tokens, self.dtype, self.dtype_teacher)


def traced_loss(given: Distilled, call: DistillationCall, needs: Needs) -> Tensor:
    """Return the loss of a call that is being traced."""
    static = StaticDistillation.of(call)
    if call.rules.options.reduction != "none" and any(needs):
        return with_gradients_op(*given, *static, list(needs))[0]
    return value_op(*given, *static)


def _filled(a: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if a is None else a


@torch.library.custom_op("tiled_mlp::distillation_with_gradients", mutates_args=())
def with_gradients_op(
    student: Tensor,
    w_student: Tensor,
    bias_student: Tensor | None,
    teacher: Tensor,
    w_teacher: Tensor,
    bias_teacher: Tensor | None,
    targets: Tensor | None,
    num_valid: Tensor | None,
    token_weight: Tensor | None,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
    dtype_teacher: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the factor of the gradients, and the unscaled gradients (empty where nobody needs them)."""
    call = StaticDistillation(list(sizes), list(factors), words, dtype, dtype_teacher).call
    heads = student, w_student, bias_student, teacher, w_teacher, bias_teacher
    given = Distilled(*heads, targets, num_valid, token_weight)
    value, factor, dx, dweight, dbias = distillation_call.with_gradients(given, call, Needs(*needs))
    parts = (None if dx is None else dx.view(student.shape), dweight, dbias)
    return tuple(_filled(a, student) for a in (value, factor, *parts))  # type: ignore[return-value]


@with_gradients_op.register_fake
def _(student, w_student, bias_student, *args):  # type: ignore[no-untyped-def]
    dtype, _, needs = args[-3:]
    wide = wide_dtype(dtype)
    parts = [
        a.new_empty(a.shape, dtype=a.dtype if a is student else wide)
        if a is not None and need
        else student.new_empty(0)
        for a, need in zip((student, w_student, bias_student), needs, strict=True)
    ]
    return (student.new_empty((), dtype=wide), student.new_empty((), dtype=wide), *parts)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, factor, *parts = output
    ctx.mark_non_differentiable(factor, *parts)
    ctx.save_for_backward(factor, *parts)
    ctx.dtypes = [None if a is None else a.dtype for a in inputs[:3]]
    ctx.needs = inputs[-1]


def _scale_gradients(ctx: Any, dvalue: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    factor, *parts = ctx.saved_tensors
    scale = dvalue.to(factor.dtype) * factor
    grads = [
        (part.to(factor.dtype) * scale).to(dtype) if need else None
        for part, dtype, need in zip(parts, ctx.dtypes, ctx.needs, strict=True)
    ]
    return *grads, *(None,) * (6 + len(StaticDistillation._fields) + 1)


with_gradients_op.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("tiled_mlp::distillation_value", mutates_args=())
def value_op(
    student: Tensor,
    w_student: Tensor,
    bias_student: Tensor | None,
    teacher: Tensor,
    w_teacher: Tensor,
    bias_teacher: Tensor | None,
    targets: Tensor | None,
    num_valid: Tensor | None,
    token_weight: Tensor | None,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
    dtype_teacher: torch.dtype,
) -> Tensor:
    """Return the loss."""
    call = StaticDistillation(list(sizes), list(factors), words, dtype, dtype_teacher).call
    heads = student, w_student, bias_student, teacher, w_teacher, bias_teacher
    return distillation_call.value(Distilled(*heads, targets, num_valid, token_weight), call)


@value_op.register_fake
def _(student, *args):  # type: ignore[no-untyped-def]
    words, dtype, _ = args[-3:]
    shape = student.shape[:-1] if words.endswith("none") else ()
    return student.new_empty(shape, dtype=wide_dtype(dtype))


@torch.library.custom_op("tiled_mlp::distillation_backward", mutates_args=())
def backward(
    dloss: Tensor,
    student: Tensor,
    w_student: Tensor,
    bias_student: Tensor | None,
    teacher: Tensor,
    w_teacher: Tensor,
    bias_teacher: Tensor | None,
    targets: Tensor | None,
    num_valid: Tensor | None,
    token_weight: Tensor | None,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
    dtype_teacher: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    call = StaticDistillation(list(sizes), list(factors), words, dtype, dtype_teacher).call
    heads = student, w_student, bias_student, teacher, w_teacher, bias_teacher
    given = Distilled(*heads, targets, num_valid, token_weight)
    found, size = distillation_call.gradients(dloss, given, call, Needs(*needs))
    pairs = zip((found.dx, found.dweight, found.dbias), heads, strict=False)
    grads = [None if d is None or a is None else scaled(d, size, a.dtype).view(a.shape) for d, a in pairs]
    return tuple(_filled(a, student) for a in grads)  # type: ignore[return-value]


@backward.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    operands, needs = args[1:4], args[-1]
    pairs = zip(operands, needs, strict=True)
    return tuple(a.new_empty(a.shape) if a is not None and need else operands[0].new_empty(0) for a, need in pairs)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.static = inputs[9:]


def _call_backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])  # of this call: an exported program was traced with others
    found = backward(dloss, *ctx.saved_tensors, *ctx.static, needs)
    grads = [a if need else None for a, need in zip(found, needs, strict=True)]
    return *grads, *(None,) * (6 + len(StaticDistillation._fields))


value_op.register_autograd(_call_backward, setup_context=_keep_operands)
