"""`tiled_distillation_loss`: a student's head learns from a teacher's, exact, a shard of logits at a time: checks, plan."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shared_specs.config import JAX, LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.distillation import checks as distillation_checks
from shared_specs.distillation.costs import DistillationShape, plan_distillation
from shared_specs.distillation.objective import Kind
from shared_specs.errors import fail_type
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.own_tokens import split_of
from tiled_jax.core.products import refuse_exchanged_products, wide
from tiled_jax.core.row_shards import may_stop_early
from tiled_jax.distillation.autodiff import FUNCTION, run
from tiled_jax.distillation.loops import DistillationCall
from tiled_jax.distillation.math import DistillationRules
from tiled_jax.loss.api import as_labels, check_targets

# What the loops call the student's arrays.
_STUDENT = {"student": "x", "w_student": "weight", "bias_student": "bias"}


def tiled_distillation_loss(
    student: jax.Array,
    w_student: jax.Array,
    teacher: jax.Array,
    w_teacher: jax.Array,
    targets: jax.Array | None = None,
    *,
    kind: Kind = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    weight_hard: float = 0.0,
    weight_soft: float | None = None,
    bias_student: jax.Array | None = None,
    bias_teacher: jax.Array | None = None,
    loss: LossOptions = LossOptions(),
    loss_teacher: LossOptions | None = None,
    token_weight: jax.Array | None = None,
    num_shards: int | None = None,
    tiling: Tiling | None = None,
) -> jax.Array:
    """Return the divergence of a student's predictions from a frozen teacher's, with exact gradients for the student.

    loss = weight_soft D(p, q) + weight_hard (lse - z_y), per token, where q = softmax(z / temperature) are the student's
    probabilities and p, likewise, the teacher's. The logits of one shard of tokens of both heads, [t, V] each, are the largest
    thing that exists; the logits of all tokens never do.

    Args:
        student: [T, H] or [B, S, H] (any leading dims), float32 | bfloat16 | float16 | float64. The student's last hidden
            states.
        w_student: [H, V]; beside a 16-bit student also float32. bias_student: [V] or None, likewise.
        teacher: [T, G] or [B, S, G], the same leading dims, in any of these dtypes. The teacher gets no gradient, as if it
            stood in jax.lax.stop_gradient.
        w_teacher: [G, V]. bias_teacher: [V] or None. Both heads have one vocabulary: cut padding columns away (w[:, :V]).
        targets: [T] or [B, S], int64 | int32 | uint16 | uint8, or None: every token counts, and there is no hard loss. Tokens
            whose target is loss.ignore_index have no loss of either kind.
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
        tiling: the long form: num_shards, shard_tokens or memory_budget, and token_axes.
    Returns:
        The loss: a scalar, or [same leading dims] with reduction="none", float32 (float64 for float64).
    Numerics: products in the dtypes of student and teacher, everything between in float32 (float64 for a float64 student); an
        entry of probability 0 adds nothing to D.
    Cost: 6 THV FLOP of the student and 2 TGV of the teacher; with reduction "none" 8 THV and 4 TGV. Of tokens whose target is
        ignored only what is left of the last shard is multiplied, as in `tiled_linear_cross_entropy`, which says where not.
    Memory: the logits of one shard of both heads: `compiled_distillation_peak_bytes` of shared_specs.distillation.costs. Keeps
        the gradients until backward, or, with reduction "none", what it was given.
    Raises:
        SpecError: shapes, dtypes or devices disagree; a number is out of its range or has no use; a target is neither in
            [0, V) nor ignore_index (under `jit` its loss is NaN).
        TypeError: an argument of the wrong kind.
        UnsupportedError: products that are exchanged while the model runs.
    Sharding: as in `tiled_mlp`: every device its own tokens. A vocabulary that is split is gathered.
    Derivatives: of forward and reverse mode, and of each other.
    Source: derived here; the divergences: GKD, arXiv 2306.13649; a shard at a time: Liger Kernel, arXiv 2410.10989.
    Example:
        >>> student, teacher = jnp.ones((2, 5, 8)), jnp.ones((2, 5, 16))
        >>> w_student, w_teacher = jnp.zeros((8, 4)), jnp.zeros((16, 4))
        >>> print(tiled_distillation_loss(student, w_student, teacher, w_teacher, num_shards=3))
        0.0
    """
    needed = {"student": student, "w_student": w_student, "teacher": teacher, "w_teacher": w_teacher}
    optional = {"bias_student": bias_student, "bias_teacher": bias_teacher, "targets": targets}
    optional |= {"token_weight": token_weight}
    refuse_exchanged_products(FUNCTION, {"w_student": w_student, "w_teacher": w_teacher})
    given: dict[str, Any] = needed | {name: each for name, each in optional.items() if each is not None}
    there = {name: array(FUNCTION, name, each) for name, each in given.items()}
    if "targets" in there:
        there["targets"] = as_labels(there["targets"])
    student = there["student"]
    options = checks.resolve_tiling(
        FUNCTION,
        num_shards,
        0.0,
        tiling,
        x=student.shape,
        unused=("keep", "vocab_shards", "deterministic"),
        token_axes=True,
    )
    distillation_checks.check_options(FUNCTION, loss, loss_teacher)
    numbers = kind, temperature, beta, weight_hard, weight_soft
    objective = distillation_checks.check_objective(FUNCTION, *numbers, has_targets=targets is not None)
    count = _count(loss)
    seen = operands(there | ({} if count is None else {"loss.num_valid": count}))
    every = (*needed, *optional, "loss.num_valid")
    distillation_checks.check_distillation(FUNCTION, {name: seen.get(name) for name in every}, JAX, master_weights=True)
    if targets is not None:
        read = targets if isinstance(targets, np.ndarray) else there["targets"]
        check_targets(FUNCTION, read, there["w_student"].shape[1], loss.ignore_index)
    shape = DistillationShape(
        tokens=checks.flat_tokens(student.shape),
        hidden=student.shape[-1],
        teacher_hidden=there["teacher"].shape[-1],
        vocab=there["w_student"].shape[1],
        itemsize=student.dtype.itemsize,
        teacher_itemsize=there["teacher"].dtype.itemsize,
        weight_itemsize=there["w_student"].dtype.itemsize,
        teacher_weight_itemsize=there["w_teacher"].dtype.itemsize,
    )
    replan = _MakeDistillationPlan(shape, options, backends.device_kind())
    plan = replan(shape.tokens)
    split = split_of(
        FUNCTION, student, [each for name, each in there.items() if name != "student"], (), options.token_axes
    )
    of_logits = LossOptions(logit_scale=loss.logit_scale, logit_softcap=loss.logit_softcap)
    teacher_options = of_logits if loss_teacher is None else loss_teacher
    call = DistillationCall(
        plan=plan,
        rules=DistillationRules(objective, replace(loss, num_valid=None), teacher_options, shape.vocab),
        split=split,
        replan=None if split is None else replan,
        valid_first=len(plan) > 1 and "targets" in there and may_stop_early((), there["targets"], None, split),
    )
    lead = student.shape[:-1]
    if split is None:
        rows = ("student", "teacher", "targets", "token_weight")
        there |= {name: a.reshape(shape.tokens, *a.shape[len(lead) :]) for name, a in there.items() if name in rows}
    own = {_STUDENT[name]: a for name, a in there.items() if name in _STUDENT}
    fixed = {name: a for name, a in there.items() if name not in _STUDENT}
    if count is not None:
        fixed["num_valid"] = count.astype(wide(student.dtype))
    found = run(call, own, fixed)
    return found.reshape(lead) if found.ndim else found


def _count(loss: LossOptions) -> jax.Array | None:
    """Return num_valid as an array."""
    count = loss.num_valid
    if count is None or isinstance(count, int | float):
        return None if count is None else jnp.asarray(float(count))
    if not isinstance(count, jax.Array | np.ndarray | np.generic):
        fail_type(FUNCTION, "loss.num_valid", "a number or a 0-d array", type(count).__name__)
    return jnp.asarray(count)


@dataclass(frozen=True)
class _MakeDistillationPlan:
    """The plan of so many tokens of one call. Static."""

    shape: DistillationShape
    options: Tiling
    device: str

    def __call__(self, tokens: int) -> ShardPlan:
        shape = replace(self.shape, tokens=tokens)
        return plan_distillation(FUNCTION, shape, **self.options.cut(), device=self.device, compiled=True)
