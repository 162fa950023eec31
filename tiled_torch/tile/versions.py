"""Tensors that fn reaches must be in backward what they were in forward, as autograd asks of those that it saves."""

from collections.abc import Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Never

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shared_specs.errors import show_shape
from tiled_torch.tile.state import key_of, refuse_late_write

_Versions = list[tuple[Tensor, int]]


class Versions:
    """The versions of tensors as fn's first run left them.

    reached: those that the run read, and its modules' parameters. others: those that a later shard might read.
    """

    def __init__(self, function: str, reached: Iterable[Tensor], others: Iterable[Tensor]) -> None:
        self.function = function
        self.reached = _versions(reached)
        seen = {id(tensor) for tensor, _ in self.reached}
        self.others = _versions(tensor for tensor in others if id(tensor) not in seen)

    def check_forward(self, written: Container[int]) -> None:
        """Raise SpecError where a later shard wrote what the first tokens did not. written: keys that may be."""
        for tensor, version in (*self.reached, *self.others):
            if tensor._version != version and key_of(tensor) not in written:
                refuse_late_write(self.function, f"a tensor of shape {show_shape(tuple(tensor.shape))}")

    def check_backward(self, written: Container[int]) -> AbstractContextManager[Any]:
        """Check that no tensor that fn reached was written since the forward pass.

        Inside the context it returns, reading one of the other tensors that were written since is refused too.

        Raises:
            RuntimeError: a reached tensor was written.
        """
        for tensor, version in self.reached:
            if tensor._version != version and key_of(tensor) not in written:
                _refuse_written(self.function, tensor, version)
        changed = {
            key_of(tensor): (tensor, version)
            for tensor, version in self.others
            if tensor._version != version and key_of(tensor) not in written
        }
        return _Guard(self.function, changed) if changed else nullcontext()


def _versions(tensors: Iterable[Tensor]) -> _Versions:
    found = {id(tensor): tensor for tensor in tensors if not tensor.is_inference()}
    return [(tensor, tensor._version) for tensor in found.values()]


class _Guard(TorchDispatchMode):
    """Raises where an operation reads one of the changed tensors."""

    supports_higher_order_operators = True

    def __init__(self, function: str, changed: dict[int, tuple[Tensor, int]]) -> None:
        super().__init__()
        self.function, self.changed = function, changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and (found := self.changed.get(key_of(value))) is not None:
                _refuse_written(self.function, *found)
        return func(*args, **(kwargs or {}))


def _refuse_written(function: str, tensor: Tensor, version: int) -> Never:
    """The error of autograd itself for a saved tensor."""
    shape = show_shape(tuple(tensor.shape))
    raise RuntimeError(
        f"{function}: one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {shape} that fn reaches is at version {tensor._version}; expected version {version} instead. Change it "
        "after backward, or compute the loss again."
    )
