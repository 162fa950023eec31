"""The tiled cross entropy as opaque operators, for torch.compile and torch.export: a graph holds one node, not N shards.

Differentiated by `register_autograd`: unlike the MLP, a loss has nothing to gain from two nodes under checkpointing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.loss import call
from tiled_torch.loss.call import Operands, Problem
from tiled_torch.loss.loops import Needs, scaled

Parts = tuple[Tensor, Tensor, Tensor]
_OTHERS = 3 + 12 + 2  # arguments of an operator that have no gradient: arrays, the fields of Static, dtype and needs


class Static(NamedTuple):
    """The part of a call that is no tensor, as operators take it: plain values, which may be symbolic."""

    function: str
    shard_tokens: int
    cuts: int
    vocab: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logit_softcap: float | None
    logit_scale: float
    reduction: str
    outputs: str
    backend: str

    @classmethod
    def of(cls, problem: Problem) -> "Static":
        o = problem.options
        numbers = o.ignore_index, o.label_smoothing, o.z_loss, o.logit_softcap, o.logit_scale
        sizes = problem.shard_tokens, problem.cuts, problem.vocab
        return cls(problem.function, *sizes, *numbers, o.reduction, ",".join(o.outputs), problem.backend)

    @property
    def options(self) -> LossOptions:
        return LossOptions(
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logit_softcap=self.logit_softcap,
            logit_scale=self.logit_scale,
            reduction=self.reduction,  # type: ignore[arg-type]
            outputs=tuple(self.outputs.split(",")) if self.outputs else (),  # type: ignore[arg-type]
        )

    def problem(self, dtype: torch.dtype) -> Problem:
        return Problem(
            self.function, self.options, self.shard_tokens, self.cuts, dtype, self.vocab, backend=self.backend
        )


def _filled(a: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if a is None else a


@torch.library.custom_op("tiled_mlp::loss_with_gradients", mutates_args=())
def with_gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    function: str,
    shard_tokens: int,
    cuts: int,
    vocab: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_softcap: float | None,
    logit_scale: float,
    reduction: str,
    outputs: str,
    backend: str,
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the accuracy, the factor of the gradients, and the unscaled gradients (empty where nobody needs
    them).
    """
    numbers = ignore_index, label_smoothing, z_loss, logit_softcap, logit_scale
    static = Static(function, shard_tokens, cuts, vocab, *numbers, reduction, outputs, backend)
    given = Operands(x, weight, bias, targets, class_weight, num_valid)
    *results, dx, dweight, dbias = call.with_gradients(given, static.problem(dtype), Needs(*needs))
    parts = (None if dx is None else dx.view(x.shape), dweight, dbias)
    return tuple(_filled(a, x) for a in (*results, *parts))  # type: ignore[return-value]


@with_gradients.register_fake
def _(x, weight, bias, *args):  # type: ignore[no-untyped-def]
    dtype, needs = args[-2:]
    wide = wide_dtype(dtype)
    scalars = [x.new_empty((), dtype=wide) for _ in range(3)]
    parts = [
        a.new_empty(a.shape, dtype=a.dtype if a is x else wide) if a is not None and need else x.new_empty(0)
        for a, need in zip((x, weight, bias), needs, strict=True)
    ]
    return (*scalars, *parts)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, right, factor, *parts = output
    ctx.mark_non_differentiable(right, factor, *parts)
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
    return *grads, *(None for _ in range(_OTHERS))


with_gradients.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("tiled_mlp::loss_values", mutates_args=())
def values(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    function: str,
    shard_tokens: int,
    cuts: int,
    vocab: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_softcap: float | None,
    logit_scale: float,
    reduction: str,
    outputs: str,
    backend: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, log_probs, lse, entropy (empty where not asked for) and the accuracy."""
    numbers = ignore_index, label_smoothing, z_loss, logit_softcap, logit_scale
    static = Static(function, shard_tokens, cuts, vocab, *numbers, reduction, outputs, backend)
    given = Operands(x, weight, bias, targets, class_weight, num_valid)
    return tuple(_filled(a, x) for a in call.values(given, static.problem(dtype)))  # type: ignore[return-value]


@values.register_fake
def _(x, weight, bias, targets, class_weight, num_valid, *args):  # type: ignore[no-untyped-def]
    options, wide = Static(*args[: len(Static._fields)]).options, wide_dtype(args[-1])

    def rows(asked: bool = True) -> Tensor:
        return x.new_empty(targets.shape, dtype=wide) if asked else x.new_empty(0)

    def reduced() -> Tensor:
        return rows() if options.reduction == "none" else x.new_empty((), dtype=wide)

    return reduced(), rows(), rows(), rows("entropy" in options.outputs), reduced()


@torch.library.custom_op("tiled_mlp::loss_backward", mutates_args=())
def backward(
    dvalue: Tensor,
    dlog_probs: Tensor,
    dlse: Tensor,
    dentropy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    function: str,
    shard_tokens: int,
    cuts: int,
    vocab: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_softcap: float | None,
    logit_scale: float,
    reduction: str,
    outputs: str,
    backend: str,
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> Parts:
    upstream = (dvalue, dlog_probs, dlse, dentropy if dentropy.numel() else None)
    numbers = ignore_index, label_smoothing, z_loss, logit_softcap, logit_scale
    static = Static(function, shard_tokens, cuts, vocab, *numbers, reduction, outputs, backend)
    given = Operands(x, weight, bias, targets, class_weight, num_valid)
    saved = (lse, entropy if entropy.numel() else None)
    found, scale = call.gradients(upstream, given, saved, static.problem(dtype), Needs(*needs))
    pairs = zip((found.dx, found.dweight, found.dbias), (x, weight, bias), strict=True)
    grads = [None if d is None or a is None else scaled(d, scale, a.dtype).view(a.shape) for d, a in pairs]
    return tuple(_filled(a, x) for a in grads)  # type: ignore[return-value]


@backward.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    x, weight, bias, needs = *args[4:7], args[-1]
    pairs = zip((x, weight, bias), needs, strict=True)
    return tuple(a.new_empty(a.shape) if a is not None and need else x.new_empty(0) for a, need in pairs)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    operands, static, dtype = inputs[:6], inputs[6:-1], inputs[-1]
    _, _, lse, entropy, right = output
    ctx.mark_non_differentiable(right)
    ctx.save_for_backward(*operands, lse, entropy)
    ctx.static, ctx.dtype = static, dtype


def _call_backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])  # of this call: an exported program was traced with others
    found = backward(*upstream[:4], *ctx.saved_tensors, *ctx.static, ctx.dtype, needs)
    grads = [a if need else None for a, need in zip(found, needs, strict=True)]
    return *grads, *(None for _ in range(_OTHERS - 1))


values.register_autograd(_call_backward, setup_context=_keep_operands)
