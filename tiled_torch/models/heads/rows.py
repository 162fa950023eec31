"""Logits that stand for the rows they would be made of, through what models do with them on the way to their loss.

A view of tokens is taken of the hidden states instead, a bias, factors and casts are noted, and the cross entropy is computed
tiled. Everything else reads the values, on the graph: it gets what the untiled model would have given it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from shared_specs.errors import UnsupportedError
from tiled_torch.core.autocast import after_autocast
from tiled_torch.core.replay import RandomState
from tiled_torch.models.heads.steps import Step, Steps, columns_of, finished
from tiled_torch.models.heads.swap import as_before
from tiled_torch.models.lazy import LazyTensor, Meta, Values
from tiled_torch.models.logits import LogitsHead, logits_of

Handler = Callable[..., Any]


@dataclass
class HeadCall:
    """One call of a head: what its logits and everything derived from them have in common.

    run: computes the cross entropy of rows, or returns NotImplemented, and is told what reads the values.
    sharing: views and what they are of, which in the untiled model have the same memory.
    """

    head: Any
    vocab: int
    cast: torch.dtype | None
    random: RandomState | None
    run: Any
    sharing: list[Any] = field(default_factory=list)

    def shared(self, logits: Tensor) -> bool:
        """Return whether there still are others with the memory of these."""
        alive = {id(found) for found in (other() for other in self.sharing) if found is not None}
        return id(logits) in alive and len(alive) > 1


@dataclass(frozen=True)
class SwappedLogits(LogitsHead):
    run: Any = None

    def logits(self, rows: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
        self.run.made()
        with as_before(self.module):
            return super().logits(rows, parameters)


@dataclass
class HeadRows:
    """Hidden states and what is made of the head's result."""

    call: HeadCall
    rows: Tensor
    steps: Steps = ()
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = columns_of(self.steps) or self.call.vocab

    def logits(self) -> Tensor:
        """Return what stands for the logits."""
        call = self.call
        stand_in = partial(RowLogits.of, self)
        finish = partial(finished, steps=self.steps)
        head = SwappedLogits(call.head, finish, call.cast, False, call.random, stand_in, call.run)
        casts = [step.dtype for step in self.steps if step.kind == "cast"]
        dtype = casts[-1] if casts else None
        shape = torch.Size((*self.rows.shape[:-1], self.columns))
        return logits_of(head, self.rows, shape, dtype or after_autocast(self.rows, call.cast))

    def then(self, *steps: Step) -> Tensor:
        return HeadRows(self.call, self.rows, (*self.steps, *steps)).logits()

    def viewed(self, source: Tensor, rows: Tensor, *steps: Step) -> Tensor:
        found = HeadRows(self.call, rows, (*self.steps, *steps)).logits()
        self.call.sharing += [ref(source), ref(found)]
        return found


class RowLogits(LazyTensor):
    """Stands for the logits of `rows`."""

    made_of: HeadRows

    @classmethod
    def of(cls, made_of: HeadRows, values: Values, meta: Meta) -> "RowLogits":
        found = cls(values, meta)
        found.made_of = made_of  # type: ignore[attr-defined]
        return found  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, RowLogits)), None)
        if first is not None and first.values_of.made is None:
            handler = HANDLERS.get(func)
            if handler is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    found = handler(*args, **(kwargs or {}))
                if found is not NotImplemented:
                    return found
            first.made_of.call.run.note(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, RowLogits) and func._schema.is_mutable and first.made_of.call.shared(first):
            text = "logits are changed in place while a view of them is in use. Call untile_model(model) for its own forward."
            raise UnsupportedError(f"tile_model: {text}")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _cast_to(dtype: torch.dtype) -> Handler:
    return lambda lazy: _cast(lazy, dtype)


def _cast(lazy: Any, *args: Any, **kwargs: Any) -> Any:
    """Of `to` and `type`: a dtype, a device where it is, or a tensor like them."""
    known: dict[str, Any] = {name: kwargs.pop(name) for name in ("dtype", "device") if name in kwargs}
    kwargs.pop("non_blocking", None)
    for arg in args:
        kind = "dtype" if isinstance(arg, torch.dtype) else "device" if isinstance(arg, str | torch.device) else None
        if isinstance(arg, Tensor):
            known |= {"dtype": arg.dtype, "device": arg.device}
        elif kind is not None:
            known[kind] = arg
        elif not isinstance(arg, bool):
            return NotImplemented
    dtype, device = known.get("dtype") or lazy.dtype, known.get("device")
    if kwargs or not dtype.is_floating_point or True in args or isinstance(dtype, str):
        return NotImplemented
    if device is not None and torch.empty(0, device=device).device != lazy.device:
        return NotImplemented
    return lazy if dtype == lazy.dtype else lazy.made_of.then(Step("cast", dtype=dtype))


def _times(a: Any, b: Any) -> Any:
    lazy, factor = (a, b) if isinstance(a, RowLogits) else (b, a)
    return lazy.made_of.then(Step("times", by=float(factor))) if isinstance(factor, int | float) else NotImplemented


def _over(a: Any, b: Any, **kwargs: Any) -> Any:
    plain = isinstance(a, RowLogits) and isinstance(b, int | float) and b and not kwargs
    return a.made_of.then(Step("over", by=float(b))) if plain else NotImplemented


def _plus(a: Any, b: Any, **kwargs: Any) -> Any:
    """A frozen bias of the vocabulary, as `final_logits_bias` is: a copy, since logits are made later."""
    lazy, bias = (a, b) if isinstance(a, RowLogits) else (b, a)
    if kwargs or not isinstance(bias, Tensor) or isinstance(bias, LazyTensor) or bias.requires_grad:
        return NotImplemented
    made_of: HeadRows = lazy.made_of
    fits = bias.is_floating_point() and bias.dim() and bias.numel() == bias.shape[-1] == made_of.columns
    apart = bias.dim() > lazy.dim() or bias.device != lazy.device or any(s.kind != "cast" for s in made_of.steps)
    if not fits or apart:
        return NotImplemented
    dtype = torch.promote_types(lazy.dtype, bias.dtype)
    wider = () if dtype == lazy.dtype else (Step("cast", dtype=dtype),)
    return made_of.then(*wider, Step("plus", bias=bias.detach().flatten().clone()))


def _tanh(lazy: Any) -> Any:
    return lazy.made_of.then(Step("tanh"))


def _same(lazy: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented if args or kwargs else lazy


def _view(lazy: Any, *sizes: Any, **kwargs: Any) -> Any:
    """view and reshape: where each row of the result is a row of the logits."""
    shape = (
        [*(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)] if sizes else kwargs.get("shape")
    )
    if not shape or any(not isinstance(size, int) for size in shape) or shape.count(-1) > 1 or not lazy.numel():
        return NotImplemented
    known = -math.prod(shape) if -1 in shape else 0
    shape = [lazy.numel() // known if size == -1 and known else size for size in shape]
    if math.prod(shape) != lazy.numel() or shape[-1] != lazy.shape[-1]:
        return NotImplemented
    rows = lazy.made_of.rows
    return lazy.made_of.viewed(lazy, rows.reshape(*shape[:-1], rows.shape[-1]))


def _flatten(lazy: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % lazy.dim(), end_dim % lazy.dim()
    if end == lazy.dim() - 1 or end <= start:
        return NotImplemented
    return lazy.made_of.viewed(lazy, lazy.made_of.rows.flatten(start, end))


def _item(lazy: Any, index: Any) -> Any:
    """lazy[index]: tokens that are chosen, with all entries of the vocabulary or its first ones."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (part is None or part is ... or isinstance(part, int | slice | Tensor)) for part in parts):
        return NotImplemented
    if any(isinstance(part, RowLogits) for part in parts):
        return NotImplemented
    consumed = sum(part.dim() if _is_mask(part) else part is not None and part is not ... for part in parts)
    ends = ... in [part for part in parts if part is ...]
    last: Any = slice(None)
    if parts[-1] is not ... and (ends or consumed == lazy.dim()):
        last, parts = parts[-1], parts[:-1]
    elif consumed >= lazy.dim():
        return NotImplemented
    made_of = lazy.made_of
    if not isinstance(last, slice) or (last.start or 0) != 0 or last.step not in (None, 1):
        return NotImplemented
    rows = made_of.rows[(*parts, slice(None))] if ends else made_of.rows[parts] if parts else made_of.rows
    columns = len(range(made_of.columns)[last])
    steps = () if columns == made_of.columns else (Step("first", columns=columns),)
    return made_of.viewed(lazy, rows, *steps)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _cross_entropy(input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
                   reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0) -> Any:  # fmt: skip
    """The arguments of torch.nn.functional.cross_entropy, by its names."""
    indices = isinstance(input, RowLogits) and input.dim() <= 2 and not target.is_floating_point()
    if not indices or size_average is not None or reduce is not None:
        return NotImplemented
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return input.made_of.call.run.loss(input.made_of, target, class_weight=weight, **options)


HANDLERS: dict[Any, Handler] = {
    Tensor.mul: _times, torch.mul: _times, Tensor.__mul__: _times, Tensor.__rmul__: _times, torch.multiply: _times,
    Tensor.div: _over, torch.div: _over, Tensor.__truediv__: _over, torch.true_divide: _over, Tensor.divide: _over,
    Tensor.add: _plus, torch.add: _plus, Tensor.__add__: _plus, Tensor.__radd__: _plus,
    Tensor.tanh: _tanh, torch.tanh: _tanh,
    Tensor.float: _cast_to(torch.float32), Tensor.double: _cast_to(torch.float64), Tensor.to: _cast, Tensor.type: _cast,
    Tensor.contiguous: _same,
    Tensor.view: _view, Tensor.reshape: _view, torch.reshape: _view, Tensor.flatten: _flatten, torch.flatten: _flatten,
    Tensor.__getitem__: _item,
    F.cross_entropy: _cross_entropy,
}  # fmt: skip
