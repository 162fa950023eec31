"""`tiled_distillation_loss`: a student's head learns from a teacher's, exact, one shard of the logits of both at a time.

The only file that knows its autograd structure, which is the cross entropy's: with reduction "mean" or "sum" the gradients are
computed with the loss and multiplied in backward; with "none" backward computes the logits again.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared_specs.config import TORCH, LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.distillation import checks as distillation_checks
from shared_specs.distillation.costs import DistillationShape, plan_distillation
from shared_specs.distillation.objective import Kind
from shared_specs.errors import fail_type, fail_with
from tiled_torch.core.autocast import after_autocast, autocast_dtype, operand
from tiled_torch.core.operands import check_tensor
from tiled_torch.core.replay import refuse_transforms
from tiled_torch.core.tangents import refuse_tangents
from tiled_torch.core.tensors import device_kind, refuse_second_order, wide_dtype
from tiled_torch.distillation import call as distillation_call
from tiled_torch.distillation import compiled
from tiled_torch.distillation.call import FUNCTION, DistillationCall, Distilled
from tiled_torch.distillation.math import DistillationRules
from tiled_torch.loss.api import refuse_main_grad_of, remember_operands, returned
from tiled_torch.loss.loops import Needs

_UNTILED = "; differentiate the untiled loss, or use tiled_jax."
_SPLIT = "Gather it first: a head whose vocabulary is split over ranks is not supported here."
_FROZEN = "The teacher is frozen: detach it, or compute it under torch.no_grad()."


def tiled_distillation_loss(
    student: Tensor,
    w_student: Tensor,
    teacher: Tensor,
    w_teacher: Tensor,
    targets: Tensor | None = None,
    *,
    kind: Kind = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    weight_hard: float = 0.0,
    weight_soft: float | None = None,
    bias_student: Tensor | None = None,
    bias_teacher: Tensor | None = None,
    loss: LossOptions = LossOptions(),
    loss_teacher: LossOptions | None = None,
    token_weight: Tensor | None = None,
    num_shards: int | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Return the divergence of a student's predictions from a frozen teacher's, with exact gradients for the student.

    loss = weight_soft D(p, q) + weight_hard (lse - z_y), per token. q = softmax(z / temperature) are the student's
    probabilities, and p are the teacher's, computed in the same way. The logits of one shard of tokens, [t, V] for each head,
    are the largest arrays that exist. The logits of all tokens never exist at once.

    Args:
        student: [T, H] or [B, S, H] (any leading dims), float32 | bfloat16 | float16 | float64. The student's last hidden
            states.
        w_student: [V, H], as in nn.Linear. bias_student: [V] or None.
        teacher: [T, G] or [B, S, G], the same leading dims, in any of these dtypes. No gradient goes to it.
        w_teacher: [V, G]. bias_teacher: [V] or None. Both heads have one vocabulary: cut padding rows away (w[:V]).
        targets: [T] or [B, S], int64 | int32, or None: every token counts, and there is no hard loss. Tokens whose target is
            loss.ignore_index have no loss of either kind.
        kind: "forward_kl", KL(p || q); "reverse_kl", KL(q || p); "jsd", beta KL(p || m) + (1 - beta) KL(q || m) with
            m = beta p + (1 - beta) q.
        temperature: > 0, what the logits of both are divided by in D. The cross entropy has temperature 1.
        beta: between 0 and 1, for "jsd" only.
        weight_hard, weight_soft: >= 0, the weights of the cross entropy with the targets and of D. weight_soft None is
            1 - weight_hard. D is not multiplied by temperature^2: weight_soft=temperature**2 does it.
        loss: its ignore_index, reduction and num_valid, and the logit_scale and logit_softcap of the logits of both heads.
            The other fields do not apply.
        loss_teacher: LossOptions with the logit_scale and logit_softcap of the teacher's logits where they are others.
        token_weight: [T] or [B, S], what the loss of each token is multiplied by; no gradient goes to it, and a mean divides
            by the number of tokens that count all the same.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards, shard_tokens or memory_budget.
    Returns:
        The loss: a scalar, or [same leading dims] with reduction="none", float32 (float64 for float64).
    Numerics: products in the dtypes of student and teacher (autocast's, where it is on), everything between in float32
        (float64 for a float64 student); an entry of probability 0 adds nothing to D.
    Cost: 6 THV FLOP of the student and 2 TGV of the teacher, times the share of tokens that count where a sixteenth of them or
        more do not; with reduction "none" 8 THV and 4 TGV.
    Memory: peak `distillation_peak_bytes` of shared_specs.distillation.costs: the logits of one shard of both heads. Keeps the
        gradients until backward, and what it was given, which a second backward (and any with reduction "none") reads again.
    Raises:
        SpecError: shapes, dtypes or devices disagree; a number is out of its range or has no use; a tensor of the teacher
            requires a gradient; on a CPU, a target is neither in [0, V) nor ignore_index (elsewhere its loss is NaN).
        TypeError: an argument of the wrong kind.
        UnsupportedError: a DTensor; torch.func; forward mode; a backward with create_graph=True.
    Source: derived here; the divergences: GKD, arXiv 2306.13649; a shard at a time: Liger Kernel, arXiv 2410.10989.
    Example:
        >>> import torch
        >>> student, teacher = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 5, 16)
        >>> w_student, w_teacher = torch.zeros(4, 8), torch.zeros(4, 16)
        >>> tiled_distillation_loss(student, w_student, teacher, w_teacher, num_shards=3).item()
        0.0
    """
    needed = {"student": student, "w_student": w_student, "teacher": teacher, "w_teacher": w_teacher}
    optional = {"bias_student": bias_student, "bias_teacher": bias_teacher, "targets": targets}
    optional |= {"token_weight": token_weight}
    there = needed | {name: each for name, each in optional.items() if each is not None}
    for name, each in there.items():
        check_tensor(FUNCTION, name, each, _SPLIT)
    options = checks.resolve_tiling(
        FUNCTION, num_shards, 0.0, tiling, x=tuple(student.shape), unused=("keep", "vocab_shards", "deterministic")
    )
    distillation_checks.check_options(FUNCTION, loss, loss_teacher)
    numbers = kind, temperature, beta, weight_hard, weight_soft
    objective = distillation_checks.check_objective(FUNCTION, *numbers, has_targets=targets is not None)
    _refuse_gradients(there, loss)
    casts = autocast_dtype(student), autocast_dtype(teacher)
    cast_of = {"student": casts[0], "w_student": casts[0], "bias_student": casts[0]}
    cast_of |= {"teacher": casts[1], "w_teacher": casts[1], "bias_teacher": casts[1]}
    seen = {name: operand(each, cast_of.get(name)) for name, each in there.items()}
    seen |= {"loss.num_valid": operand(loss.num_valid, None)} if isinstance(loss.num_valid, Tensor) else {}
    every = (*needed, *optional, "loss.num_valid")
    distillation_checks.check_distillation(FUNCTION, {name: seen.get(name) for name in every}, TORCH)
    refuse_transforms(FUNCTION, "the untiled loss")
    refuse_tangents(FUNCTION, "the untiled loss", there.values())
    dtypes = after_autocast(student, casts[0]), after_autocast(teacher, casts[1])
    plan = plan_distillation(
        FUNCTION,
        _shape(student, w_student, teacher, w_teacher, dtypes),
        **options.cut(),
        device=device_kind(student.device),
    )
    of_logits = LossOptions(logit_scale=loss.logit_scale, logit_softcap=loss.logit_softcap)
    rules = DistillationRules(
        objective,
        replace(loss, num_valid=None),
        of_logits if loss_teacher is None else loss_teacher,
        w_student.shape[0],
    )
    call = DistillationCall(rules, plan.shard_tokens, *dtypes)
    count = _number(loss.num_valid, student.device, wide_dtype(dtypes[0]))
    given = Distilled(student, w_student, bias_student, teacher, w_teacher, bias_teacher, targets, count, token_weight)
    grads = torch.is_grad_enabled()
    needs = Needs(*(grads and a is not None and a.requires_grad for a in given[:3]))
    if torch.compiler.is_compiling():
        refuse_main_grad_of(FUNCTION, (w_student, bias_student))
        return compiled.traced_loss(given, call, needs)
    if loss.reduction != "none" and any(needs):
        return DistillationWithGradients.apply(*given, call, needs)[0]
    return DistillationPerToken.apply(*given, call)


def _refuse_gradients(given: dict[str, Tensor], loss: LossOptions) -> None:
    """Refuse what would need a gradient that nobody computes."""
    if not isinstance(loss.num_valid, Tensor | int | float | None):
        fail_type(FUNCTION, "loss.num_valid", "a number or a 0-d array", type(loss.num_valid).__name__)
    fixed: dict[str, Any] = {name: given.get(name) for name in ("teacher", "w_teacher", "bias_teacher", "token_weight")}
    for name, each in (fixed | {"loss.num_valid": loss.num_valid}).items():
        if isinstance(each, Tensor) and each.requires_grad and torch.is_grad_enabled():
            advice = _FROZEN if "teacher" in name else "Detach it."
            fail_with(FUNCTION, f"{name} requires a gradient, which this loss does not compute", advice=advice)


def _shape(
    student: Tensor, w_student: Tensor, teacher: Tensor, w_teacher: Tensor, dtypes: tuple[torch.dtype, torch.dtype]
) -> DistillationShape:
    return DistillationShape(
        tokens=checks.flat_tokens(student.shape),
        hidden=student.shape[-1],
        teacher_hidden=teacher.shape[-1],
        vocab=w_student.shape[0],
        itemsize=dtypes[0].itemsize,
        teacher_itemsize=dtypes[1].itemsize,
        weight_itemsize=w_student.dtype.itemsize,
        teacher_weight_itemsize=w_teacher.dtype.itemsize,
    )


def _number(value: Any, device: torch.device, wide: torch.dtype) -> Tensor | None:
    if value is None:
        return None
    return value.to(device, wide) if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=device)


class DistillationWithGradients(torch.autograd.Function):
    """The loss and the gradients of the sum of the losses, which backward multiplies."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor | None, ...]:
        return distillation_call.with_gradients(Distilled(*args[:9]), *args[9:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, factor, *found = output
        ctx.mark_non_differentiable(factor, *(a for a in found if a is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:9])  # a second backward computes the gradients from them again
        # Not saved tensors: they become the gradients in place, and nothing else may see them.
        ctx.found, ctx.factor, ctx.call = found, factor, inputs[9]
        remember_operands(ctx, inputs[:3], (None, None))

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dvalue is None:
            return (None,) * 11
        refuse_second_order(FUNCTION, _UNTILED)
        found, ctx.found = ctx.found, None
        if found is None:
            needs = Needs(*ctx.needs_input_grad[:3])
            found = list(distillation_call.with_gradients(Distilled(*ctx.saved_tensors), ctx.call, needs)[2:])
        return *returned(ctx, found, dvalue.to(ctx.factor.dtype) * ctx.factor), *(None,) * 8


class DistillationPerToken(torch.autograd.Function):
    """The loss; backward computes the logits again, for upstream gradients per token."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        return distillation_call.value(Distilled(*args[:9]), args[9])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:9])
        ctx.call = inputs[9]
        remember_operands(ctx, inputs[:3], (None, None))

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = Needs(*ctx.needs_input_grad[:3])
        if dvalue is None or not any(needs):
            return (None,) * 10
        refuse_second_order(FUNCTION, _UNTILED)
        found, size = distillation_call.gradients(dvalue, Distilled(*ctx.saved_tensors), ctx.call, needs)
        return *returned(ctx, [found.dx, found.dweight, found.dbias], size), *(None,) * 7
