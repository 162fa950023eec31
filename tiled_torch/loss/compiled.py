"""The tiled cross entropy as opaque operators, for torch.compile and torch.export: a graph holds one node, not N shards.

Differentiated by `register_autograd`: unlike the MLP, a loss has nothing to gain from two nodes under checkpointing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared_specs.config import LossOptions
from tiled_torch.core.tensors import wide_dtype
from tiled_torch.loss import call as loss_call
from tiled_torch.loss.call import LossCall, Operands
from tiled_torch.loss.loops import Needs, scaled
from tiled_torch.loss.math import Rules

MadeParts = tuple[Tensor, Tensor, Tensor]


class Static(NamedTuple):
    """The part of a call that is no tensor, as operators take it: numbers may be symbolic, words may not."""

    sizes: list[int]  # shard_tokens, vocab_shards, vocab, ignore_index, and top_k where there is one
    factors: list[float]  # label_smoothing, z_loss, logit_scale, and logit_softcap where there is one
    words: str  # function, backend, reduction and outputs, separated by commas
    dtype: torch.dtype

    @classmethod
    def of(cls, call: LossCall) -> "Static":
        o = call.rules.options
        softcap = [] if o.logit_softcap is None else [o.logit_softcap]
        top_k = [] if o.top_k is None else [o.top_k]
        return cls(
            [call.shard_tokens, call.vocab_shards, call.rules.vocab, o.ignore_index, *top_k],
            [o.label_smoothing, o.z_loss, o.logit_scale, *softcap],
            ",".join((call.function, call.backend, o.reduction, *o.outputs)),
            call.dtype,
        )

    @property
    def call(self) -> LossCall:
        """Return the call of which this was made."""
        shard_tokens, vocab_shards, vocab, ignore_index, *top_k = self.sizes
        label_smoothing, z_loss, logit_scale, *softcap = self.factors
        function, backend, reduction, *outputs = self.words.split(",")
        options = LossOptions(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            logit_softcap=softcap[0] if softcap else None,
            logit_scale=logit_scale,
            reduction=reduction,  # type: ignore[arg-type]
            outputs=tuple(outputs),  # type: ignore[arg-type]
            top_k=top_k[0] if top_k else None,
        )
        return LossCall(function, Rules(options, vocab), shard_tokens, vocab_shards, self.dtype, backend=backend)


def _filled(a: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if a is None else a


def _ranked(call: LossCall, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors like those of `LossCall.ranked`, empty where not asked for."""
    options = call.rules.options
    top = None if options.top_k is None else (*targets.shape, options.top_k)
    prediction = targets.shape if "prediction" in options.outputs else None
    like = (prediction, torch.int64), (top, wide_dtype(call.dtype)), (top, torch.int64)
    return tuple(x.new_empty(0) if dims is None else x.new_empty(dims, dtype=dtype) for dims, dtype in like)  # type: ignore[return-value]


@torch.library.custom_op("tiled_mlp::loss_with_gradients", mutates_args=())
def with_gradients_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    token_weight: Tensor | None,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the accuracy, the factor of the gradients, the unscaled gradients (empty where nobody needs them), and
    what `LossCall.ranked` has (empty where not asked for).
    """
    call = Static(list(sizes), list(factors), words, dtype).call
    given = Operands(x, weight, bias, targets, class_weight, num_valid, token_weight)
    value, right, factor, dx, *rest = loss_call.with_gradients(given, call, Needs(*needs))
    found = (value, right, factor, None if dx is None else dx.view(x.shape), *rest)
    return tuple(_filled(a, x) for a in found)  # type: ignore[return-value]


@with_gradients_op.register_fake
def _(x, weight, bias, targets, class_weight, num_valid, token_weight, *args):  # type: ignore[no-untyped-def]
    *static, needs = args
    call = Static(*static).call
    wide = wide_dtype(call.dtype)
    scalars = [x.new_empty((), dtype=wide) for _ in range(3)]
    parts = [
        a.new_empty(a.shape, dtype=a.dtype if a is x else wide) if a is not None and need else x.new_empty(0)
        for a, need in zip((x, weight, bias), needs, strict=True)
    ]
    return (*scalars, *parts, *_ranked(call, x, targets))


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, right, factor, *rest = output
    parts = rest[:3]
    ctx.mark_non_differentiable(right, factor, *rest)
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
    return *grads, *(None for _ in range(4 + len(Static._fields) + 1))


with_gradients_op.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("tiled_mlp::loss_values", mutates_args=())
def values_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weight: Tensor | None,
    num_valid: Tensor | None,
    token_weight: Tensor | None,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, log_probs, lse, entropy, the accuracy, and what `LossCall.ranked` has (empty where not asked for)."""
    call = Static(list(sizes), list(factors), words, dtype).call
    given = Operands(x, weight, bias, targets, class_weight, num_valid, token_weight)
    return tuple(_filled(a, x) for a in loss_call.values(given, call, call.rows_run(given)))  # type: ignore[return-value]


@values_op.register_fake
def _(x, weight, bias, targets, class_weight, num_valid, token_weight, *args):  # type: ignore[no-untyped-def]
    call = Static(*args).call
    options, wide = call.rules.options, wide_dtype(call.dtype)

    def rows(asked: bool = True) -> Tensor:
        return x.new_empty(targets.shape, dtype=wide) if asked else x.new_empty(0)

    def reduced() -> Tensor:
        return rows() if options.reduction == "none" else x.new_empty((), dtype=wide)

    ranked = _ranked(call, x, targets)
    return reduced(), rows(), rows(), rows("entropy" in options.outputs), reduced(), *ranked


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
    token_weight: Tensor | None,
    lse: Tensor,
    entropy: Tensor,
    sizes: Sequence[int],
    factors: Sequence[float],
    words: str,
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> MadeParts:
    upstream = (dvalue, dlog_probs, dlse, dentropy if dentropy.numel() else None)
    call = Static(list(sizes), list(factors), words, dtype).call
    given = Operands(x, weight, bias, targets, class_weight, num_valid, token_weight)
    saved = (lse, entropy if entropy.numel() else None)
    found, scale = loss_call.gradients(upstream, given, saved, call, Needs(*needs), call.rows_run(given))
    pairs = zip((found.dx, found.dweight, found.dbias), (x, weight, bias), strict=True)
    grads = [None if d is None or a is None else scaled(d, scale, a.dtype).view(a.shape) for d, a in pairs]
    return tuple(_filled(a, x) for a in grads)  # type: ignore[return-value]


@backward.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    x, weight, bias, needs = *args[4:7], args[-1]
    pairs = zip((x, weight, bias), needs, strict=True)
    return tuple(a.new_empty(a.shape) if a is not None and need else x.new_empty(0) for a, need in pairs)


def _keep_operands(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, lse, entropy, *without = output
    ctx.mark_non_differentiable(*without)
    ctx.save_for_backward(*inputs[:7], lse, entropy)
    ctx.static = inputs[7:]


def _call_backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:3])  # of this call: an exported program was traced with others
    found = backward(*upstream[:4], *ctx.saved_tensors, *ctx.static, needs)
    grads = [a if need else None for a, need in zip(found, needs, strict=True)]
    return *grads, *(None for _ in range(4 + len(Static._fields)))


values_op.register_autograd(_call_backward, setup_context=_keep_operands)
