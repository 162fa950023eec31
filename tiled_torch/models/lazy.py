"""A tensor without storage whose values are computed when an operation needs them.

Autograd, hooks, containers and sharding engines take it for the tensor that it stands for. A copy or a cast of one is
another: nothing is computed for it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Make = Callable[[], Tensor]
Meta = tuple[torch.Size, torch.dtype, torch.device]


class Values:
    """The values of one or several lazy tensors, computed once, without gradients."""

    def __init__(self, make: Make) -> None:
        self.make = make
        self.made: Tensor | None = None

    def get(self) -> Tensor:
        if self.made is None:
            with torch.no_grad():
                self.made = self.make()
        return self.made


# What has the same memory, and what copies it, without a look at a value.
_SHARED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_COPIED = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
# Methods that look at memory through no operation. The storage stays empty: meters ask for it.
_MEMORY = frozenset({
    Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__, Tensor.share_memory_,
    Tensor.__format__,
})  # fmt: skip


class LazyTensor(Tensor):
    """Stands for the tensor that `values` makes."""

    values_of: Values

    @staticmethod
    def __new__(cls, values: Values, meta: Meta) -> "LazyTensor":
        shape, dtype, device = meta
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)
        made.values_of = values
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _MEMORY:
                args, kwargs = pytree.tree_map_only(LazyTensor, plain, (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor):
            if func in _SHARED:
                return LazyTensor(first.values_of, _meta(first))
            if func in _COPIED and first.values_of.made is None:
                return _copied(func, first, args[1:], kwargs)
        known_args, known = pytree.tree_map_only(LazyTensor, lambda lazy: lazy.values_of.get(), (args, kwargs))
        found = func(*known_args, **known)
        return first if isinstance(first, LazyTensor) and found is known_args[0] else found  # changed in place

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return plain(self).__deepcopy__(memo)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return plain(self).__repr__(**kwargs)


def plain(lazy: LazyTensor) -> Tensor:
    """Return the values as a plain tensor, on the graph where the lazy one is."""
    return lazy.view_as(lazy) if lazy.requires_grad else lazy.values_of.get()


def _meta(lazy: Tensor) -> Meta:
    return lazy.shape, lazy.dtype, lazy.device


def _copied(func: Any, lazy: LazyTensor, args: Any, kwargs: Any) -> LazyTensor:
    """Return a copy of values that were not read yet, made anew: those of `lazy` may be changed in place."""
    make = lazy.values_of.make
    meta = lazy.shape, kwargs.get("dtype") or lazy.dtype, torch.device(kwargs.get("device") or lazy.device)
    return LazyTensor(Values(lambda: func(make(), *args, **kwargs)), meta)
