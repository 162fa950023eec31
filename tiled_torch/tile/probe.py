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
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tiled_torch.tile.state import (
    SMALL_BYTES,
    Bindings,
    Slot,
    State,
    key_of,
    plain_storage,
    refuse_history,
    refuse_written_argument,
    slot_of,
)


class Watch(TorchDispatchMode):
    """Everything that a run uses, as it stood before the run first used it.

    modules: what names of each that was known are bound to. called: those whose forward ran, and what is in them. read:
    tensors from outside the run that its operations read, by key. written: slots from outside that they write, by key.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: Iterable[nn.Module], own: Iterable[Tensor]) -> None:
        super().__init__()
        self.modules: dict[nn.Module, Bindings] = {}
        self.called: dict[nn.Module, bool] = {}  # whether its own forward ran
        self.read: dict[int, Tensor] = {}
        self.written: dict[int, Slot] = {}
        self.bound: list[nn.Module] = []  # those of which the run bound a name anew
        self.binds_tensors = False  # to a tensor
        self._copies: list[tuple[Slot, Any]] = []
        self._targets: list[Tensor] = []
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._own = {key_of(tensor) for tensor in own}  # of the run's arguments
        self._settled: set[int] = set()  # of what the run has made
        self._held: list[Tensor] = []
        for module in modules:
            self._add(module)

    @property
    def generators(self) -> list[torch.Generator]:
        """Return the generators that were passed to an operation; a default one only where it was passed too."""
        return [generator for generator, _ in self._generators.values()]

    def see(self, module: nn.Module) -> None:
        if not self.called.get(module):
            for part in module.modules():
                self._add(part)
                self.called.setdefault(part, False)
            self.called[module] = True

    def put_back(self) -> None:
        for slot, copy in self._copies:
            slot.put(copy)
        for generator, state in self._generators.values():
            generator.set_state(state)
        for module, bindings in self.modules.items():
            if bindings.kind is not type(module):  # a lazy module that now is what it was to become
                self.modules[module] = Bindings([module])
            elif bindings.differ():
                self.bound.append(module)
                self.binds_tensors |= bindings.bind_tensors()
                bindings.put(bindings.found)
        self._held.clear()

    def state(self, function: str) -> State:
        """Return the state that has to be kept of every shard."""
        used = dict.fromkeys([*self.called, *self.bound])
        followed, others = Bindings(used), Bindings(module for module in self.modules if module not in used)
        late: dict[int, Slot] = {}
        for module, ran in self.called.items():
            for tensor in () if ran else module._buffers.values():
                # Nobody has seen what it writes, and not every write has a new version (batch norm's, those to .data).
                if tensor is not None and (slot := slot_of(tensor)).nbytes <= SMALL_BYTES:
                    late[key_of(tensor)] = slot
        return State(function, followed, others, {**late, **self.written}, bool(self.written or self.bound))

    def tables(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the tables of every module, each with a copy of what the run found there."""
        for bindings in self.modules.values():
            yield from zip(bindings.tables, bindings.found, strict=True)

    def parameters(self, module: nn.Module | None) -> Iterator[Tensor]:
        """Return the parameters of a module, and of the modules that the run called."""
        yield from () if module is None else module.parameters()
        for called in self.called:
            yield from (p for p in called._parameters.values() if p is not None)

    def reached(self) -> Iterator[Tensor]:
        """Yield the tensors that the run read, and parameters of modules that it called, which kernels may read unseen."""
        yield from self.read.values()
        for module, ran in self.called.items():
            if ran:
                yield from (p for p in module._parameters.values() if p is not None)

    def known(self) -> Iterator[Tensor]:
        """Yield the tensors that modules hold."""
        for bindings in self.modules.values():
            yield from bindings.tensors()

    def refuse_writes(self, function: str) -> None:
        """Raise SpecError where the run wrote to its arguments, or values that need a gradient to what is not its own."""
        if any(key in self._own for key in self.written):
            refuse_written_argument(function)
        refuse_history(function, self._targets)

    def _add(self, module: nn.Module) -> None:
        if module not in self.modules:
            self.modules[module] = Bindings([module])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self._read(value)
            elif isinstance(value, tuple | list):
                for item in value:
                    if isinstance(item, Tensor):
                        self._read(item)
            # torch wraps a generator anew for every operation; the address is that of what it wraps.
            elif isinstance(value, torch.Generator) and value._cdata not in self._generators:  # type: ignore[attr-defined]
                self._generators[value._cdata] = (value, value.get_state())  # type: ignore[attr-defined]
        effect = _effect(func)
        for position, name in effect.written:
            for tensor in _several(args[position] if position < len(args) else kwargs.get(name)):
                if isinstance(tensor, Tensor):
                    self._keep(tensor)
        result = func(*args, **kwargs)
        if effect.fresh:
            for tensor in _several(result):
                if isinstance(tensor, Tensor):
                    self._settled.add(key_of(tensor))
                    if plain_storage(tensor) is None:
                        self._held.append(tensor)  # or its key could be another's
        return result

    def _read(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key not in self._settled and key not in self._own:
            self.read.setdefault(key, tensor)

    def _keep(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        if key in self._settled or key in self.written:
            return
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and base.grad_fn is None:
            self._targets.append(base)
        slot = slot_of(tensor)
        self._copies.append((slot, slot.copy()))
        self.written[key] = slot


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


@contextmanager
def watched(
    modules: Iterable[nn.Module], check: Callable[[nn.Module], None], own: Iterable[Tensor] = ()
) -> Iterator[Watch]:
    """Put modules, tensors and the generators that are given back as they were, and yield what was used.

    Args:
        modules: what is known already. check: called with every module before its forward. own: the run's arguments.
    """
    thread, watch = get_ident(), Watch(modules, own)

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
    """Run compiled functions uncompiled inside this context.

    The probe cannot see into compiled code, and a compiled function would be compiled anew for the probe's two tokens.
    """
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
