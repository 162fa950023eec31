"""The logits of a tiled model beside its loss: there for whoever reads them, and computed only then."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.config import LossOptions
from shared_specs.errors import UnsupportedError
from tiled_torch.core.autocast import after_autocast
from tiled_torch.core.replay import RandomState, random_state, random_state_kept, set_random_state
from tiled_torch.core.tensors import refuse_second_order
from tiled_torch.models.family import is_unit, parts_of_unit, reason_linear_is_not_plain
from tiled_torch.models.lazy import LazyTensor, Meta, Values

Mark = tuple[int, int, int]
CHANGED = (
    "outputs.logits: the hidden states or the weights of lm_head were changed after the forward that these logits belong to. "
    "Read the logits before that: an optimizer's step, or a sharding engine that frees weights after forward."
)


@dataclass(frozen=True)
class LogitsHead:
    """The head and the hidden states of one forward, as that forward found them."""

    module: Any
    finish: Callable[[Tensor], Tensor]  # what the model makes of the head's result
    cast: torch.dtype | None  # of autocast
    changed: bool
    random: RandomState | None  # of the generators; None: the module is its weight and bias
    stand_in: Callable[[Values, Meta], LazyTensor] = LazyTensor

    def logits(self, rows: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
        if self.random is None:
            rows, *operands = (a.to(after_autocast(a, self.cast)) for a in (rows, *parameters))
            with _autocast(rows, None):
                found = F.linear(rows, *operands)
        else:
            if not is_unit(self.module) and self.has_others(parameters):  # a unit gathers its own
                raise RuntimeError(CHANGED)
            with _autocast(rows, self.cast), random_state_kept(rows.device):
                set_random_state(rows.device, self.random)
                found = self.module(rows)
        return self.finish(found)

    def has_others(self, parameters: tuple[Tensor, ...]) -> bool:
        """Return whether the module's parameters are others than these by now."""
        return any(now is not then for now, then in zip(self.module.parameters(), parameters, strict=True))


def adjusted(logits: Tensor, options: LossOptions) -> Tensor:
    """Return the logits as the model makes them of its head's result."""
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    if options.logit_softcap is not None:
        logits = options.logit_softcap * torch.tanh(logits / options.logit_softcap)
    return logits


def lazy_logits(
    model: Any, rows: Tensor, options: LossOptions, cast: torch.dtype | None, *, changed: bool = False
) -> Tensor:
    """Return [..., V] of hidden states, on the graph as if they were computed here. cast: the dtype of autocast in the forward.

    changed: the head is not that of the forward any more, so that they must not be read.
    """
    module = model.lm_head
    is_plain = reason_linear_is_not_plain("lm_head", module) is None
    finish = partial(adjusted, options=options)
    head = LogitsHead(module, finish, cast, changed, None if is_plain else random_state(rows.device))
    vocab = module.weight.shape[0] if is_plain else model.config.get_text_config().vocab_size
    shape = torch.Size((*rows.shape[:-1], vocab))
    return logits_of(head, rows, shape, after_autocast(rows, cast))


def logits_of(head: LogitsHead, rows: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return what stands for the logits of rows: of this shape and dtype, made by `head` when they are read."""
    # A plain layer's parameters are weight and bias, in this order.
    return _Logits.apply(head, (shape, dtype, rows.device), rows, *head.module.parameters())


def refused_logits(rows: Tensor, vocab: int) -> Tensor:
    """Return logits that refuse to be read: those of a split head need a collective of all ranks."""

    def make() -> Tensor:
        text = "outputs.logits: the head is split over ranks, so that its logits are not computed beside a tiled loss."
        raise UnsupportedError(f"{text} Call the model without labels for them.")

    return LazyTensor(Values(make), (torch.Size((*rows.shape[:-1], vocab)), rows.dtype, rows.device))


class _Logits(torch.autograd.Function):
    """The node of logits that do not exist; backward computes the head again, for its gradients."""

    @staticmethod
    def forward(ctx: Any, head: LogitsHead, meta: Meta, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(rows, *parameters)
        ctx.set_materialize_grads(False)
        owned = parts_of_unit(head.module) if is_unit(head.module) else parameters
        needed = (rows, *owned, *head.module.buffers())
        marks = [_mark(tensor) for tensor in needed]

        def make() -> Tensor:
            if head.changed or [_mark(tensor) for tensor in needed] != marks:
                raise RuntimeError(CHANGED)
            return head.logits(rows, parameters)

        return head.stand_in(Values(make), meta)

    @staticmethod
    def backward(ctx: Any, *dlogits: Tensor | None) -> Any:
        rows, *parameters = ctx.saved_tensors
        if dlogits[0] is None:  # what runs through every output, as DDP does, asks for nothing
            return (None,) * (3 + len(parameters))
        refuse_second_order("outputs.logits", ". Call the model without labels.", "Their backward")
        if ctx.head.changed:
            raise RuntimeError(CHANGED)
        if any(ctx.needs_input_grad[3:]):
            _refuse_parts(ctx.head, tuple(parameters))
        # Not the rows themselves: a tied weight is among what they were made from.
        operands = (rows.detach().requires_grad_(ctx.needs_input_grad[2]), *parameters)
        with torch.enable_grad():
            found = ctx.head.logits(operands[0], tuple(parameters))
        wanted = [a for a, needs in zip(operands, ctx.needs_input_grad[2:], strict=True) if needs]
        gradients = iter(torch.autograd.grad(found, wanted, dlogits[0], allow_unused=True))
        return None, None, *(next(gradients) if needs else None for needs in ctx.needs_input_grad[2:])


def _refuse_parts(head: LogitsHead, parameters: tuple[Tensor, ...]) -> None:
    """Refuse a gradient that would not reach the weights: a unit of FSDP2 had not gathered them, or freed them since then."""
    gathered = all(type(p) is nn.Parameter and p.untyped_storage().nbytes() for p in parameters)
    if is_unit(head.module) and (not gathered or head.has_others(parameters)):
        text = "outputs.logits: their gradient does not reach the weights of a head that is a unit of FSDP2 of its own."
        advice = "Call the model without labels, or give the head to the unit of the whole model."
        raise UnsupportedError(f"{text} {advice}")


def _autocast(rows: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """autocast to dtype, or without: whatever is on where the logits are read."""
    if not torch.amp.is_autocast_available(rows.device.type):
        return nullcontext()
    return torch.autocast(rows.device.type, dtype=dtype, enabled=dtype is not None)


def _mark(tensor: Tensor) -> Mark:
    """Changes when the tensor does: written in place, given other memory, or none, as a sharding engine does."""
    version = 0 if tensor.is_inference() else tensor._version
    if type(tensor) not in (Tensor, nn.Parameter):
        return version, 0, 0
    storage = tensor.untyped_storage()
    return version, storage._cdata, storage.nbytes()
