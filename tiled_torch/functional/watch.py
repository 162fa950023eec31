"""The first run of fn in a call, watched: what it calls, draws from and writes to, so that nothing of the run remains.

A hook that torch runs before every module's forward sees the modules; the operations themselves show generators and
writes in place. So it does not matter how fn reaches them: through a list, an object, a default argument.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tiled_torch.functional.replay import Copies


class Watch(TorchDispatchMode):
    """What a run uses, as it stood before the run first used it.

    modules: each that was known or is called, and theirs, with its `training`. written: storages of plain tensors that
    are not the run's own and are written in place.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.modules: dict[nn.Module, bool] = {}
        self.written: list[UntypedStorage] = []
        self._copies = Copies()
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._settled: set[int] = set()  # storages without need of a copy: the run's own, or copied already
        for module in modules:
            self._add(module)

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that were passed to an operation; the default ones only where they were passed too."""
        return [generator for generator, _ in self._generators.values()]

    def see(self, module: nn.Module) -> None:
        if module not in self.modules:
            for part in module.modules():
                self._add(part)

    def put_back(self) -> None:
        self._copies.put_back()
        for generator, state in self._generators.values():
            generator.set_state(state)

    def _add(self, module: nn.Module) -> None:
        if module in self.modules:
            return
        self.modules[module] = module.training
        for buffer in self._copies.add_buffers(module):
            storage = _storage(buffer)
            if storage is not None and storage.nbytes() == buffer.nbytes:
                self._settled.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            # torch wraps a generator anew for every operation; the address is that of what it wraps.
            if isinstance(value, torch.Generator) and value._cdata not in self._generators:  # type: ignore[attr-defined]
                self._generators[value._cdata] = (value, value.get_state())  # type: ignore[attr-defined]
        effect = _effect(func)
        for position, name in effect.written:
            for tensor in _several(args[position] if position < len(args) else kwargs.get(name)):
                self._keep(tensor)
        result = func(*args, **kwargs)
        if effect.fresh:
            self._settled.update(s._cdata for a in _several(result) if (s := _storage(a)) is not None)
        return result

    def _keep(self, tensor: Any) -> None:
        storage = _storage(tensor)
        if storage is not None and storage._cdata not in self._settled:
            self._settled.add(storage._cdata)
            self._copies.add_storage(storage)
            self.written.append(storage)


class _Effect(NamedTuple):
    """Positions and names of the arguments that an operation writes; whether its results are new."""

    written: tuple[tuple[int, str], ...]
    fresh: bool


@functools.cache
def _effect(func: Any) -> _Effect:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator, which neither writes nor returns its arguments
        return _Effect((), True)
    written = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        # Schemas of batch norm do not say that it writes its statistics.
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in ("running_mean", "running_var")
    )
    new = func is torch.ops.aten.lift_fresh.default  # of torch.tensor, whose schema says that it is a view
    return _Effect(written, new or all(a.alias_info is None for a in schema.returns))


def _several(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _storage(tensor: Any) -> UntypedStorage | None:
    """None where it has no bytes of its own: subclasses, sparse and meta tensors."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if plain else None


@contextmanager
def watched(modules: Iterable[nn.Module], check: Callable[[nn.Module], None]) -> Iterator[Watch]:
    """What runs inside leaves no trace in buffers, in plain tensors and in generators that it is given.

    Args:
        modules: what is known already. check: called with every module before its forward.
    """
    thread, watch = get_ident(), Watch(modules)

    def hook(module: nn.Module, _: Any) -> None:
        if get_ident() == thread:
            check(module)
            watch.see(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        with _uncompiled(watch.modules), watch:
            yield watch
    finally:
        handle.remove()
        watch.put_back()


@contextmanager
def _uncompiled(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compiled functions run as they are written: in compiled code nothing could be seen, nor is it made for two tokens."""
    compiler = sys.modules.get("torch._dynamo")
    with ExitStack() as stack:
        if compiler is not None:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if any(isinstance(module, compiler.OptimizedModule) for module in modules):
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings(
                    "ignore", message=r"Using `torch.compile\(module\)` when there are global hooks"
                )
        yield
