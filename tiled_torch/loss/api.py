"""`tiled_linear_cross_entropy`: the loss of a language-model head, exact, one shard of logits at a time.

The only file that knows its autograd structure in eager mode. With one upstream number for everything
(`LossOptions.gradients_with_loss`) the gradients are computed with the loss and multiplied in backward; they become the
returned gradients in place, so a second backward through the same graph computes them again. Otherwise backward computes
the logits again.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import TORCH, LossOptions, LossResult, Tiling, TopLogprobs
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, fail_type, fail_with
from shared_specs.loss import checks as loss_checks
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.sequence_costs import plan_sequence_loss
from shared_specs.shards import ShardPlan
from tiled_torch import backends
from tiled_torch.core import exporting, tangents
from tiled_torch.core.autocast import after_autocast, autocast_dtype, operand
from tiled_torch.core.gradients import local_main_grad, main_grad_of, returned_gradient
from tiled_torch.core.operands import check_tensor
from tiled_torch.core.replay import refuse_transforms
from tiled_torch.core.tensors import device_kind, dtype_name, refuse_second_order, wide_dtype
from tiled_torch.loss import call as loss_call
from tiled_torch.loss import compiled, with_tangents
from tiled_torch.loss.call import LossCall, Operands, RowsRun
from tiled_torch.loss.loops import Needs, Ranks, SplitTokens, scaled
from tiled_torch.loss.math import Rules

_NAME = "tiled_linear_cross_entropy"
_UNTILED = "; differentiate the untiled loss, or use tiled_jax."


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
    token_weight: Tensor | None = None,
) -> Tensor | LossResult:
    """Return the cross entropy of logits x weight^T + bias with the targets, with exact gradients.

    loss = (1 - eps) w_y (lse - z_y) + (eps / V) sum_k w_k (lse - z_k) + z_loss lse^2, per token. The logits of one shard of
    tokens, [t, V], are the largest array that exists. The logits of all tokens never exist at once.

    Args:
        x: [T, H] or [B, S, H] (any leading dims), float32 | bfloat16 | float16 | float64. Hidden states.
        weight: [V, H], as in nn.Linear. bias: [V] or None.
        targets: [T] or [B, S], int64 | int32: the entry of the vocabulary that each row of x should predict (a causal
            language model shifts them before), or loss.ignore_index.
        loss: what is computed and returned. See shared_specs.config.LossOptions.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form of num_shards, which it excludes; vocab_shards also vocab_shards the vocabulary.
        backend: "auto", "eager" or "triton"; a backend named explicitly runs or raises.
        token_weight: [T] or [B, S], like targets, or None for ones. It multiplies the loss of each token (importance weights,
            packed examples) and gets no gradient. A mean divides by the number of valid tokens (or their class weights, or
            num_valid), not by these weights. Other outputs are not weighted.
    Returns:
        The loss: a scalar, or [same leading dims] with reduction="none", float32 (float64 for float64). With
        loss.outputs, a LossResult with the loss and the requested outputs.
    Numerics: products in the compute dtype, everything between in float32 (float64 for float64). dlogits are held in the
        compute dtype near 1, and multiplied by the upstream gradient and 1/num_valid in float32 after the products.
        The weight's gradient is summed over shards in float32 and cast once, or added to `weight.main_grad` (of 16 bits too,
        which is then rounded once in each backward).
    Cost: rows with an ignored label are not multiplied if they are a sixteenth of all rows or more. The cost is then 6 THV FLOP
        times the share of valid rows. Their number is read from the device once per call. All rows are multiplied if "lse",
        "entropy", "prediction" or "top_logprobs" is an output (these have values at ignored labels too), under fake tensors,
        and while a CUDA graph is captured.
    Memory: peak `loss_costs.loss_peak_bytes`: one shard of logits. Keeps the gradients until backward. With reduction "none"
        or outputs that have gradients, it keeps x and two numbers per token instead. So it does for float16 with a z_loss,
        because the size of the gradients is known only after the last log-sum-exp: 8 THV FLOP instead of 6. Forward mode
        (dual tensors of torch.autograd.forward_ad) carries tangents one shard at a time. If the same call also needs
        gradients, autograd keeps the same tensors for it as for the untiled loss.
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
    split = "Use vocab_parallel_linear_cross_entropy for a head that is split over ranks by vocabulary."
    whole = "Convert it with to_local()."
    for name, tensor in {"x": x, "weight": weight, "targets": targets, "bias": bias}.items():
        if tensor is not None or name != "bias":
            check_tensor(_NAME, name, tensor, split if name in ("weight", "bias") else whole)
    given = Given(_NAME, x, weight, targets, bias, loss, token_weight)
    plan, vocab_shards, chosen = given.check(
        num_shards, tiling, backend, weight.shape[0] if isinstance(weight, Tensor) else 0
    )
    return given.run(plan, vocab_shards, weight.shape[0], backend=chosen)


class Given(NamedTuple):
    """The arguments of one call."""

    function: str
    x: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    loss: LossOptions
    token_weight: Tensor | None = None

    def check(
        self,
        num_shards: int | None,
        tiling: Tiling | None,
        backend: str,
        vocab: int,
        entries: int | None = None,
        tokens: tuple[int, ...] | None = None,
    ) -> tuple[ShardPlan | SequencePlan, int, str]:
        """Return the plan, the number of vocabulary shards and the backend, once every argument is right.

        entries: the most that any rank holds, where a vocabulary is split over ranks, who must come to the same plan; None
        where it is not. tokens: of every rank, where they are split over ranks.
        """
        name, loss = self.function, self.loss
        tensors = {"x": self.x, "weight": self.weight, "targets": self.targets}
        optional = {"bias": self.bias, "token_weight": self.token_weight}
        tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        for argument, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                fail_type(name, argument, "an array", type(tensor).__name__)
        tiling = checks.resolve_tiling(
            name, num_shards, 0.0, tiling, x=tuple(self.x.shape), unused=("keep", "deterministic")
        )
        loss_checks.check_loss_options(name, loss)
        fixed = {"loss.class_weight": loss.class_weight, "loss.num_valid": loss.num_valid}
        for argument, value in (fixed | {"token_weight": self.token_weight}).items():
            if isinstance(value, Tensor) and value.requires_grad:
                fail_with(name, f"{argument} requires a gradient, which a loss does not compute", advice="Detach it.")
            if tangents.carry_tangents([value]):
                fail_with(name, f"{argument} has a tangent, which a loss does not carry", advice="Detach it.")
            number = argument == "loss.num_valid" and isinstance(value, int | float)
            if not isinstance(value, Tensor | None) and not number:
                rule = "a number or a 0-d array" if argument == "loss.num_valid" else "an array"
                fail_type(name, argument, rule, type(value).__name__)
        cast = autocast_dtype(self.x)
        loss_checks.check_linear_cross_entropy(
            name,
            x=operand(self.x, cast),
            weight=operand(self.weight, cast),
            targets=operand(self.targets, None),
            bias=None if self.bias is None else operand(self.bias, cast),
            class_weight=None if loss.class_weight is None else operand(loss.class_weight, None),
            num_valid=operand(loss.num_valid, None) if isinstance(loss.num_valid, Tensor) else None,
            token_weight=None if self.token_weight is None else operand(self.token_weight, None),
            names=TORCH,
            vocab=vocab,
            top_k=loss.top_k,
        )
        dtype = after_autocast(self.x, cast)
        chosen = backends.choose(name, backend, self.x.device, dtype)
        if tangents.carry_tangents(tensors.values()):
            tangents.refuse_kernels(name, backend)
        over_ranks, entries = entries is not None, self.weight.shape[0] if entries is None else entries
        vocab_shards = min(tiling.vocab_shards or 1, max(1, entries))
        shape = loss_costs.LossShape.of(
            loss,
            tokens=checks.flat_tokens(self.x.shape),
            hidden=self.x.shape[-1],
            vocab=entries,
            vocab_shards=vocab_shards,
            itemsize=dtype.itemsize,
            weight_itemsize=self.weight.dtype.itemsize,
            copied=over_ranks and loss.gradients_with_loss(dtype_name(dtype)),
        )
        options: dict[str, Any] = {
            **tiling.cut(),
            "device": device_kind(self.x.device),
            "kernels": chosen == "triton",
        }
        if tokens is not None:
            return plan_sequence_loss(name, shape, tokens, **options), vocab_shards, chosen
        if torch.compiler.is_exporting():
            device = options["device"]
            peak = partial(loss_costs.loss_peak_bytes, shape, device=device, kernels=options["kernels"])
            return exporting.symbolic_plan(name, shape.tokens, tiling, device=device, peak=peak), vocab_shards, chosen
        return loss_costs.plan_loss(name, shape, **options), vocab_shards, chosen

    def run(
        self,
        plan: ShardPlan | SequencePlan,
        vocab_shards: int,
        vocab: int,
        start: int = 0,
        ranks: Ranks | None = None,
        split: SplitTokens | None = None,
        owners: tuple[Tensor | None, Tensor | None] = (None, None),
        *,
        backend: str,
    ) -> Tensor | LossResult:
        """Return the checked call. start, ranks, owners: of a vocabulary split over ranks. split: of tokens split over them
        too.
        """
        refuse_transforms(self.function, "the untiled loss")
        dual = tangents.carry_tangents((self.x, self.weight, self.bias))
        backend = "eager" if dual else backend
        backends.record_run(self.function, backend)
        options = replace(self.loss, class_weight=None, num_valid=None)
        dtype = after_autocast(self.x, autocast_dtype(self.x))
        rules, shards = Rules(options, vocab), (plan.shard_tokens, vocab_shards)
        call = LossCall(self.function, rules, *shards, dtype, start, ranks, backend, split, owners)
        number = _number(self.loss.num_valid, self.x)
        fixed = self.targets, self.loss.class_weight, number, self.token_weight
        given = Operands(self.x, self.weight, self.bias, *fixed)
        grads = torch.is_grad_enabled()
        needs = Needs(*(grads and a is not None and a.requires_grad for a in given[:3]))
        value: Any
        if dual:
            value, *found = with_tangents.loss(given, call)
        elif torch.compiler.is_compiling():
            value, *found = self._compiled(given, call, needs)
        elif call.with_loss:
            made = WithGradients.apply(*given, call, needs)
            value, found = made[0], [None, None, None, made[1], *made[6:]]
        else:
            value, *found = Recomputed.apply(*given, call)[:8]
        *of_tokens, values, indices = found
        names = ("log_probs", "lse", "entropy", "accuracy", "prediction")
        named: dict[str, Any] = dict(zip(names, of_tokens, strict=True))
        named["top_logprobs"] = TopLogprobs(values, indices)
        return LossResult(value, **{name: named[name] for name in options.outputs}) if options.outputs else value

    def _compiled(self, given: Operands, call: LossCall, needs: Needs) -> tuple[Tensor | None, ...]:
        refuse_main_grad_of(self.function, (self.weight, self.bias))
        static = compiled.Static.of(call)
        # What a program will be asked for is not known where it is exported: it computes gradients when somebody wants them.
        if not call.with_loss or torch.compiler.is_exporting():
            return compiled.values_op(*given, *static)
        made = compiled.with_gradients_op(*given, *static, list(needs))
        return made[0], None, None, None, made[1], *made[6:]


def _number(value: Any, x: Tensor) -> Tensor | None:
    """num_valid as a 0-d tensor on x's device; making it does not wait for the device."""
    if value is None:
        return None
    wide = wide_dtype(x.dtype)
    return value.to(x.device, wide) if isinstance(value, Tensor) else torch.full((), value, dtype=wide, device=x.device)


class WithGradients(torch.autograd.Function):
    """The loss, the accuracy, and the gradients of the sum of the losses, which backward multiplies."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor | None, ...]:
        return loss_call.with_gradients(Operands(*args[:7]), *args[7:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, right, factor, *rest = output
        ctx.mark_non_differentiable(right, factor, *(a for a in rest if a is not None))
        ctx.set_materialize_grads(False)
        # All but the factor: only a second backward computes the gradients from them again.
        ctx.save_for_backward(*inputs[:7])
        # Not saved tensors: they become the gradients in place, and nothing else may see them.
        ctx.found, ctx.factor, ctx.call = rest[:3], factor, inputs[7]
        remember_operands(ctx, inputs[:3], ctx.call.owners)

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if dvalue is None:
            return (None,) * 9
        call: LossCall = ctx.call
        refuse_second_order(call.function, _UNTILED)
        found, ctx.found = ctx.found, None
        if found is None:
            needs = Needs(*ctx.needs_input_grad[:3])
            found = list(loss_call.with_gradients(Operands(*ctx.saved_tensors), call, needs)[3:6])
        grads = returned(ctx, found, dvalue.to(ctx.factor.dtype) * ctx.factor)
        return *grads, None, None, None, None, None, None


class Recomputed(torch.autograd.Function):
    """The loss and every output; backward computes the logits again, for upstream gradients per token."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor | None, ...]:
        given, call = Operands(*args[:7]), args[7]
        run = call.rows_run(given)
        return *loss_call.values(given, call, run), run.chosen, run.split

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, _, lse, entropy, right, *ranked, chosen, split = output
        ctx.mark_non_differentiable(right, *(a for a in (*ranked, chosen) if a is not None))
        ctx.set_materialize_grads(False)
        # x, weight, bias: logits are computed again; targets and what they weigh: what logits are compared with;
        # lse, entropy: what exp(logits) is normalised with; chosen: the rows that were run.
        ctx.save_for_backward(*inputs[:7], lse, entropy, chosen)
        ctx.call, ctx.split = inputs[7], split
        remember_operands(ctx, inputs[:3], ctx.call.owners)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: LossCall = ctx.call
        needs = Needs(*ctx.needs_input_grad[:3])
        if all(d is None for d in upstream[:4]) or not any(needs):
            return (None,) * 8
        refuse_second_order(call.function, _UNTILED)
        *given, lse, entropy, chosen = ctx.saved_tensors
        run = RowsRun(chosen, ctx.split)
        found, scale = loss_call.gradients(upstream, Operands(*given), (lse, entropy), call, needs, run)
        return *returned(ctx, [found.dx, found.dweight, found.dbias], scale), None, None, None, None, None


def refuse_main_grad_of(function: str, operands: Iterable[Tensor | None]) -> None:
    """Raise UnsupportedError under torch.compile for parameters whose gradient is to be added to a buffer."""
    if any(main_grad_of(a) is not None for a in operands):
        raise UnsupportedError(
            f"{function}: main_grad must be None under torch.compile, got a buffer. A compiled backward returns "
            "gradients; compile around the loss, or let the optimizer read .grad."
        )


def remember_operands(ctx: Any, operands: tuple[Tensor | None, ...], owners: tuple[Tensor | None, ...]) -> None:
    """Note dtypes and owners of x, weight and bias for `returned`, without keeping them."""
    given = (w if owner is None else owner for w, owner in zip(operands[1:], owners, strict=True))
    ctx.mains = [None, *(owner if main_grad_of(owner) is not None else None for owner in given)]
    ctx.like = [None if a is None else (a.shape, a.dtype) for a in operands]


def returned(ctx: Any, found: list[Tensor | None], scale: Tensor) -> list[Tensor | None]:
    """Return gradients of x, weight and bias as backward returns them: scaled, in their dtypes, or added to main_grad."""
    grads: list[Tensor | None] = []
    for number, (like, main) in enumerate(zip(ctx.like, ctx.mains, strict=True)):
        gradient, found[number] = found[number], None  # the only reference, so that .grad may take it as it is
        if gradient is None:
            grads.append(None)
        elif main is None:
            grads.append(scaled(gradient, scale, like[1]).view(like[0]))
        else:
            local_main_grad(main, like[0]).add_(scaled(gradient, scale, gradient.dtype))  # type: ignore[union-attr]
            grads.append(returned_gradient(main, None, *like))
    return grads
