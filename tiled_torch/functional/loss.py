"""`tiled_linear_cross_entropy`: the loss of a language-model head, exact, one shard of logits at a time.

The only file that knows its autograd structure. With one upstream number for everything (`LossOptions.gradients_in_forward`)
the gradients are computed with the loss and multiplied in backward; they become the returned gradients in place, so a
second backward through the same graph computes them again. Otherwise backward computes the logits again.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from shared_specs import checks, costs
from shared_specs.config import TORCH, LossOptions, LossResult, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from shared_specs.shards import ShardPlan
from tiled_torch import backends
from tiled_torch.functional import loss_math, loss_ops
from tiled_torch.functional.accumulate import main_grad_of, returned_gradient
from tiled_torch.functional.activations import wide_dtype
from tiled_torch.functional.casting import after_autocast, autocast_dtype, without_autocast
from tiled_torch.functional.loss_math import Coefficients, Labels
from tiled_torch.functional.loss_shards import (
    Gradients,
    Head,
    Needs,
    Ranks,
    Tokens,
    gradients_of,
    losses,
    losses_and_gradients,
    scaled,
)
from tiled_torch.functional.rows import refuse_dtensor

_NAME = "tiled_linear_cross_entropy"


def tiled_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Tensor | LossResult:
    """The cross entropy of logits x weight^T + bias with the targets, with exact gradients.

    loss = (1 - eps) w_y (lse - z_y) + (eps / V) sum_k w_k (lse - z_k) + z_loss lse^2, per token. The logits of one shard of
    tokens, [t, V], are the largest thing that exists; the logits of all tokens never do.

    Args:
        x: [T, H] or [B, S, H] (any leading dims), float32 | bfloat16 | float16 | float64. Hidden states.
        weight: [V, H], as in nn.Linear. bias: [V] or None.
        targets: [T] or [B, S], int64 | int32: the entry of the vocabulary that each row of x should predict (a causal
            language model shifts them before), or loss.ignore_index.
        loss: what is computed and returned. See shared_specs.config.LossOptions.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form of num_shards, which it excludes; vocab_shards also cuts the vocabulary.
        backend: "auto", "eager" or "triton"; a backend named explicitly runs or raises.
    Returns:
        The loss: a scalar, or [same leading dims] with reduction="none", float32 (float64 for float64). With
        loss.outputs a LossResult that holds it and what was asked for.
    Numerics: products in the compute dtype, everything between in float32 (float64 for float64). dlogits are held in the
        compute dtype near 1, and multiplied by the upstream gradient and 1/num_valid in float32 after the products.
        The weight's gradient is summed over shards in float32 and cast once, or added to `weight.main_grad`.
    Memory: peak `costs.loss_peak_bytes`: one shard of logits. Keeps the gradients until backward, or, with reduction
        "none" or outputs that have gradients, x and two numbers per token.
    Raises:
        SpecError: shapes, dtypes or devices disagree; a number is out of its range; on a CPU, a target is neither in
            [0, V) nor ignore_index (on other devices such a token's loss and gradients are NaN).
        TypeError: an argument of the wrong kind.
        UnsupportedError: a backend named explicitly that cannot run here; a backward with create_graph=True.
    Source: derived in shared_specs/README.md; gradients with the loss: Liger Kernel, arXiv 2410.10989.
    Example:
        >>> import torch
        >>> x, weight, targets = torch.zeros(2, 5, 8), torch.zeros(4, 8), torch.ones(2, 5, dtype=torch.long)
        >>> tiled_linear_cross_entropy(x, weight, targets, num_shards=4)  # log 4
        tensor(1.3863)
    """
    _refuse_partitions(weight)
    given = Given(_NAME, x, weight, targets, bias, loss)
    plan, cuts = given.check(num_shards, tiling, backend, weight.shape[0] if isinstance(weight, Tensor) else 0)
    backends.record_run(_NAME, "eager")
    return given.run(Problem.of(given, plan, cuts, weight.shape[0]))


def _refuse_partitions(weight: Any) -> None:
    if isinstance(weight, Tensor) and type(weight) is not Tensor:
        try:
            refuse_dtensor("weight", weight)
        except UnsupportedError:
            advice = "Use vocab_parallel_linear_cross_entropy for a head that is split over ranks by vocabulary."
            text = error_text(_NAME, "weight", "a plain tensor", "a DTensor", advice=advice)
            raise UnsupportedError(text) from None


class Given(NamedTuple):
    """The arguments of one call."""

    function: str
    x: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    loss: LossOptions

    def check(
        self, num_shards: int | None, tiling: Tiling | None, backend: str, vocab: int, entries: int | None = None
    ) -> tuple[ShardPlan, int]:
        """The plan and the number of vocabulary shards, once every argument is right.

        entries: the most that any rank holds, where ranks must come to the same plan; else the weight's own.
        """
        name, loss = self.function, self.loss
        tensors = {"x": self.x, "weight": self.weight, "targets": self.targets}
        tensors |= {} if self.bias is None else {"bias": self.bias}
        for argument, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                fail_type(name, argument, "an array", type(tensor).__name__)
        tiling = checks.resolve_tiling(name, num_shards, 0.0, tiling, x=tuple(self.x.shape), unused=("keep",))
        checks.check_backend(name, backend, TORCH, backends.usable_backends())
        checks.check_loss_options(name, loss)
        for argument in ("class_weight", "num_valid"):
            value = getattr(loss, argument)
            if isinstance(value, Tensor) and value.requires_grad:
                fail(name, f"loss.{argument}", "free of requires_grad", "a tensor that requires grad")
            if not isinstance(value, Tensor | None) and not (
                argument == "num_valid" and isinstance(value, int | float)
            ):
                fail_type(name, f"loss.{argument}", "an array or None", type(value).__name__)
        cast = autocast_dtype(self.x)
        operand = _operand(self.weight, cast)
        checks.check_linear_cross_entropy(
            name,
            x=_operand(self.x, cast),
            weight=operand,
            targets=_operand(self.targets, None),
            bias=None if self.bias is None else _operand(self.bias, cast),
            class_weight=None if loss.class_weight is None else _operand(loss.class_weight, None),
            num_valid=_operand(loss.num_valid, None) if isinstance(loss.num_valid, Tensor) else None,
            names=TORCH,
            vocab=vocab,
        )
        entries = self.weight.shape[0] if entries is None else entries
        cuts = min(tiling.vocab_shards or 1, max(1, entries))
        shape = costs.LossShape(
            tokens=checks.flat_tokens(self.x.shape),
            hidden=self.x.shape[-1],
            vocab=entries,
            vocab_shards=cuts,
            itemsize=after_autocast(self.x, cast).itemsize,
            weight_itemsize=self.weight.dtype.itemsize,
            bends=(loss.logit_softcap is not None) + ("entropy" in loss.outputs),
        )
        plan = costs.plan_loss(
            name,
            shape,
            num_shards=tiling.num_shards,
            shard_tokens=tiling.shard_tokens,
            memory_budget=tiling.memory_budget,
            device="cpu" if self.x.device.type == "cpu" else "gpu",
        )
        return plan, cuts

    def run(self, problem: "Problem") -> Tensor | LossResult:
        operands = (self.x, self.weight, self.bias)
        grads = torch.is_grad_enabled()
        needs = Needs(*(grads and a is not None and a.requires_grad for a in operands))
        arrays = (self.targets, self.loss.class_weight, _number(self.loss.num_valid, self.x))
        if torch.compiler.is_compiling():
            return self._compiled(problem, needs, arrays)
        if problem.options.gradients_in_forward:
            value, right = WithGradients.apply(*operands, *arrays, problem, needs)[:2]
            return LossResult(value, accuracy=right) if problem.options.outputs else value
        value, log_probs, lse, entropy, right = Recomputed.apply(*operands, *arrays, problem)
        found = {"log_probs": log_probs, "lse": lse, "entropy": entropy, "accuracy": right}
        wanted = {name: found[name] for name in problem.options.outputs}
        return LossResult(value, **wanted) if wanted else value

    def _compiled(
        self, problem: "Problem", needs: Needs, arrays: tuple[Tensor, Tensor | None, Tensor | None]
    ) -> Tensor | LossResult:
        if any(main_grad_of(a) is not None for a in (self.weight, self.bias)):
            raise UnsupportedError(
                f"{self.function}: main_grad must be None under torch.compile, got a buffer. A compiled backward returns "
                "gradients; compile around the loss, or let the optimizer read .grad."
            )
        operands = (self.x, self.weight, self.bias, *arrays, *problem.static(), problem.dtype, list(needs))
        outputs = problem.options.outputs
        if problem.options.gradients_in_forward:
            value, right = loss_ops.with_gradients(*operands)[:2]
            return LossResult(value, accuracy=right) if outputs else value
        value, log_probs, lse, entropy, right = loss_ops.values(*operands)
        found = {"log_probs": log_probs, "lse": lse, "entropy": entropy, "accuracy": right}
        return LossResult(value, **{name: found[name] for name in outputs}) if outputs else value


def _operand(tensor: Tensor, cast: torch.dtype | None) -> checks.Operand:
    name = str(after_autocast(tensor, cast)).removeprefix("torch.")
    return checks.Operand(tuple(tensor.shape), name, str(tensor.device))


def _number(value: Any, x: Tensor) -> Tensor | None:
    """num_valid as a 0-d tensor on x's device; making it does not wait for the device."""
    if value is None:
        return None
    wide = wide_dtype(x.dtype)
    return value.to(x.device, wide) if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=x.device)


@dataclass(frozen=True)
class Problem:
    """What is static about one call. options: without its arrays."""

    function: str
    options: LossOptions
    shard_tokens: int
    cuts: int
    dtype: torch.dtype
    vocab: int
    start: int = 0
    ranks: Ranks | None = None

    @classmethod
    def of(
        cls, given: Given, plan: ShardPlan, cuts: int, vocab: int, start: int = 0, ranks: Ranks | None = None
    ) -> "Problem":
        options = replace(given.loss, class_weight=None, num_valid=None)
        dtype = after_autocast(given.x, autocast_dtype(given.x))
        return cls(given.function, options, plan.shard_tokens, cuts, dtype, vocab, start, ranks)

    def static(self) -> loss_ops.Static:
        return loss_ops.Static.of(self.function, self.shard_tokens, self.cuts, self.vocab, self.options)

    @classmethod
    def from_static(cls, static: loss_ops.Static, dtype: torch.dtype) -> "Problem":
        return cls(static.function, static.options, static.shard_tokens, static.cuts, dtype, static.vocab)

    def plan(self, x: Tensor) -> ShardPlan:
        return ShardPlan(checks.flat_tokens(x.shape), self.shard_tokens)

    def head(self, weight: Tensor, bias: Tensor | None) -> Head:
        bias = None if bias is None else bias.to(self.dtype)
        return Head(weight.to(self.dtype), bias, self.vocab, self.start, self.cuts, self.ranks)

    def labels(self, targets: Tensor, class_weight: Tensor | None) -> Labels:
        """What the targets say; on a CPU an error for one that does not exist."""
        targets, ignore = targets.reshape(-1), self.options.ignore_index
        if targets.device.type == "cpu":
            missing = loss_math.first_missing_target(targets, self.vocab, ignore)
            if missing is not None:
                checks.fail_target(self.function, missing, self.vocab, ignore)
        return loss_math.labels_of(targets, self.vocab, class_weight, ignore, wide_dtype(self.dtype))

    def factors(self, labels: Labels, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the sums of the losses and of the right tokens are multiplied by; 0 for a mean of nothing."""
        if self.options.reduction != "mean":
            one = labels.counted.new_ones(())
            return one, one
        loss, count = (labels.weight.sum(), labels.counted.sum()) if num_valid is None else (num_valid, num_valid)
        return tuple(torch.where(a == 0, 0.0, a.reciprocal()) for a in (loss, count))  # type: ignore[return-value]


def _reduced(values: Tensor, factor: Tensor, reduction: str, dims: torch.Size) -> Tensor:
    return _of_dims(values, dims) if reduction == "none" else values.sum() * factor


def _of_dims(values: Tensor, dims: torch.Size) -> Tensor:
    """[T] as [*dims], not a view: callers may write to a result in place (mask a loss), engines do."""
    return torch.ops.aten._unsafe_view(values, dims)


def _rows(x: Tensor) -> Tensor:
    """[T, H]; a copy only where the leading dims cannot be merged."""
    return x.reshape(checks.flat_tokens(x.shape), x.shape[-1])


def _refuse_second_order(function: str) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UnsupportedError(
            f"{function}: create_graph must be False in backward, got True. The hand-written backward has no second "
            "derivative; differentiate the untiled loss, or use tiled_jax."
        )


class WithGradients(torch.autograd.Function):
    """The loss, the accuracy, and the gradients of the sum of the losses, which backward multiplies."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        num_valid: Tensor | None,
        problem: Problem,
        needs: Needs,
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(x):
            labels, head = problem.labels(targets, class_weight), problem.head(weight, bias)
            rows, plan = _rows(x), problem.plan(x)
            if any(needs):
                tokens, found = losses_and_gradients(rows, head, labels, problem.options, plan, needs)
            else:
                tokens = losses(rows, head, labels, problem.options, plan, entropy=False)
                found = None
            factor, count = problem.factors(labels, num_valid)
            reduction = problem.options.reduction
            value = _reduced(tokens.loss, factor, reduction, targets.shape)
            right = _reduced(tokens.right, count, reduction, targets.shape)
        parts = (None, None, None) if found is None else (found.dx, found.dweight, found.dbias)
        return value, right, factor, *parts

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, bias, targets, class_weight, num_valid, problem, _ = inputs
        _, right, factor, *found = output
        ctx.mark_non_differentiable(right, factor, *(a for a in found if a is not None))
        ctx.set_materialize_grads(False)
        # x, weight, bias, targets, class_weight: only a second backward computes the gradients from them again.
        ctx.save_for_backward(x, weight, bias, targets, class_weight, num_valid)
        # Not saved tensors: they become the gradients in place, and nothing else may see them.
        ctx.found, ctx.factor, ctx.problem = found, factor, problem
        ctx.mains = [w if main_grad_of(w) is not None else None for w in (weight, bias)]
        ctx.meta = [None if a is None else (a.shape, a.dtype) for a in (x, weight, bias)]

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dvalue is None:
            return (None,) * 8
        problem: Problem = ctx.problem
        _refuse_second_order(problem.function)
        found, ctx.found = ctx.found, None
        factor = ctx.factor
        if found is None:
            found = _found_again(ctx)
        scale = dvalue.to(factor.dtype) * factor
        grads: list[Tensor | None] = []
        for number, (need, main) in enumerate(zip(ctx.needs_input_grad[:3], (None, *ctx.mains), strict=True)):
            gradient, found[number] = found[number], None
            if not need or gradient is None:
                grads.append(None)
                continue
            shape, dtype = ctx.meta[number]
            if main is None:
                grads.append(scaled(gradient, scale, dtype, in_place=True).view(shape))
            else:
                main_grad_of(main).view(shape).add_(scaled(gradient, scale, gradient.dtype, in_place=True))
                grads.append(returned_gradient(main, None))
        return *grads, None, None, None, None, None


def _found_again(ctx: Any) -> list[Tensor | None]:
    x, weight, bias, targets, class_weight, _ = ctx.saved_tensors
    problem: Problem = ctx.problem
    with without_autocast(x):
        labels, head = problem.labels(targets, class_weight), problem.head(weight, bias)
        needs = Needs(*ctx.needs_input_grad[:3])
        _, found = losses_and_gradients(_rows(x), head, labels, problem.options, problem.plan(x), needs)
    return [found.dx, found.dweight, found.dbias]


class Recomputed(torch.autograd.Function):
    """The loss and every output; backward computes the logits again, for upstream gradients per token."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        class_weight: Tensor | None,
        num_valid: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(x):
            labels, head = problem.labels(targets, class_weight), problem.head(weight, bias)
            entropy = "entropy" in problem.options.outputs
            tokens: Tokens = losses(_rows(x), head, labels, problem.options, problem.plan(x), entropy=entropy)
            factor, count = problem.factors(labels, num_valid)
            reduction, dims = problem.options.reduction, targets.shape
            value = _reduced(tokens.loss, factor, reduction, dims)
            right = _reduced(tokens.right, count, reduction, dims)
        of_tokens = (None if a is None else _of_dims(a, dims) for a in (tokens.log_probs, tokens.lse, tokens.entropy))
        return value, *of_tokens, right

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, weight, bias, targets, class_weight, num_valid, problem = inputs
        _, _, lse, entropy, right = output
        ctx.mark_non_differentiable(right)
        ctx.set_materialize_grads(False)
        # x, weight, bias: logits are computed again; targets, class_weight, num_valid: what they are compared with;
        # lse, entropy: what exp(logits) is normalised with.
        ctx.save_for_backward(x, weight, bias, targets, class_weight, num_valid, lse, entropy)
        ctx.problem = problem
        ctx.mains = [w if main_grad_of(w) is not None else None for w in (weight, bias)]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        if all(d is None for d in upstream[:4]) or not any(ctx.needs_input_grad[:3]):
            return (None,) * 7
        _refuse_second_order(problem.function)
        grads = _recomputed_gradients(upstream, ctx.saved_tensors, problem, Needs(*ctx.needs_input_grad[:3]), ctx.mains)
        return *grads, None, None, None, None


def _recomputed_gradients(
    upstream: tuple[Tensor | None, ...],
    operands: tuple[Any, ...],
    problem: Problem,
    needs: Needs,
    mains: list[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of x, weight and bias from the upstream ones; operands: as `Recomputed` saves them."""
    x, weight, bias, targets, class_weight, num_valid, lse, entropy = operands
    with without_autocast(x):
        labels, head = problem.labels(targets, class_weight), problem.head(weight, bias)
        lse, entropy = lse.view(-1), None if entropy is None else entropy.view(-1)
        k = _coefficients(upstream, lse, labels, problem, num_valid)
        plan = problem.plan(x)
        found, scale = gradients_of(_rows(x), head, labels, problem.options, plan, needs, (lse, entropy), k)
    return _returned(found, scale, (x, weight, bias), mains)


def _coefficients(
    upstream: tuple[Tensor | None, ...], lse: Tensor, labels: Labels, problem: Problem, num_valid: Tensor | None
) -> Coefficients:
    """From the upstream gradients of the loss, log_probs, lse and entropy. [T] each."""
    dvalue, dlog_probs, dlse, dentropy = (None if d is None else d.reshape(-1).to(lse.dtype) for d in upstream[:4])
    k = loss_math.loss_coefficients(lse, labels, problem.options, problem.vocab)
    factor, _ = problem.factors(labels, num_valid)
    g = lse.new_zeros(()) if dvalue is None else dvalue if problem.options.reduction == "none" else dvalue * factor
    # 0 for ignored tokens even where the upstream gradient or lse is not finite
    k = Coefficients(*(None if part is None else torch.where(labels.counted == 0, 0.0, part * g) for part in k))  # type: ignore[arg-type]
    a, b = k.a, k.b
    if dlog_probs is not None:
        pull = torch.where(labels.counted == 0, 0.0, dlog_probs * labels.counted)
        a, b = a - pull, b - pull
    if dlse is not None:
        a = a + dlse
    return Coefficients(a, b, k.c, dentropy)


def _returned(
    found: Gradients, scale: Tensor, operands: tuple[Tensor, Tensor, Tensor | None], mains: list[Tensor | None]
) -> list[Tensor | None]:
    """The gradients as backward returns them: scaled, in their operands' dtypes, or added to main_grad."""
    grads: list[Tensor | None] = []
    parts = (found.dx, found.dweight, found.dbias)
    for operand, gradient, main in zip(operands, parts, (None, *mains), strict=True):
        if operand is None or gradient is None:
            grads.append(None)
        elif main is None:
            grads.append(scaled(gradient, scale, operand.dtype, in_place=True).view(operand.shape))
        else:
            total = scaled(gradient, scale, gradient.dtype, in_place=True)
            main_grad_of(main).view(operand.shape).add_(total)  # type: ignore[union-attr]
            grads.append(returned_gradient(main, None))
    return grads


def _op_with_gradients(*args: Any) -> tuple[Tensor | None, ...]:
    *tensors, static, dtype, needs = args
    *rest, dx, dweight, dbias = WithGradients.forward(*tensors, Problem.from_static(static, dtype), Needs(*needs))
    return *rest, None if dx is None else dx.view(tensors[0].shape), dweight, dbias


def _op_values(*args: Any) -> tuple[Tensor | None, ...]:
    *tensors, static, dtype = args
    return Recomputed.forward(*tensors, Problem.from_static(static, dtype))


def _op_backward(
    upstream: tuple[Tensor | None, ...], operands: tuple[Any, ...], static: Any, dtype: torch.dtype, needs: Any
) -> list[Tensor | None]:
    return _recomputed_gradients(upstream, operands, Problem.from_static(static, dtype), Needs(*needs), [None, None])


loss_ops.Loops.with_gradients = staticmethod(_op_with_gradients)
loss_ops.Loops.values = staticmethod(_op_values)
loss_ops.Loops.backward = staticmethod(_op_backward)
