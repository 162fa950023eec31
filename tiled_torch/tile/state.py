"""What fn's modules hold and what fn writes, as every shard found it: kept in forward, put back for each recomputation."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_not
from typing import Any, NamedTuple, Never, Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from shared_specs.errors import fail, fail_with, show_shape

Table = dict[Any, Any]
Held = tuple[Table, ...]  # of every table a copy
Override = tuple[Table, Any, Any]  # a table, and what a name in it is bound to during backward

# Bytes of one tensor. Up to so many are copied for every shard. Of a larger one that fn writes there is a single copy, of
# before the first shard: the recomputed shards write it again, in order.
SMALL_BYTES = 2**16


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor is a FakeTensor, which has no values."""
    return type(tensor).__name__ == "FakeTensor" and isinstance(tensor, torch._subclasses.FakeTensor)


def mode_of(tensors: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return the mode that makes new tensors fake, as the given ones are; an empty context where none is."""
    fake: Any = next(filter(is_fake, tensors), None)
    return nullcontext() if fake is None else fake.fake_mode


class Slot(Protocol):
    """Memory that can be copied and put back, both without a new version of the tensors that live there."""

    nbytes: int

    def copy(self) -> Any: ...

    def put(self, copy: Any) -> None: ...


class _StorageSlot:
    def __init__(self, storage: UntypedStorage) -> None:
        self.storage, self.nbytes = storage, storage.nbytes()

    def copy(self) -> UntypedStorage:
        return self.storage.clone()

    def put(self, copy: UntypedStorage) -> None:
        self.storage.copy_(copy)


class _TensorSlot:
    """For what is no plain strided tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.nbytes = tensor, tensor.nbytes

    def copy(self) -> Tensor:
        return self.tensor.detach().clone()

    def put(self, copy: Tensor) -> None:
        self.tensor.data.copy_(copy)


def plain_storage(tensor: Any) -> UntypedStorage | None:
    """Return a tensor's storage; None where it has no bytes of its own: subclasses, sparse and meta tensors."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if plain else None


def key_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, as far as that can be seen."""
    strided = type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)
    return tensor.untyped_storage()._cdata if strided and tensor.layout is torch.strided else id(tensor)


class _NoSlot:
    """Of fake and meta tensors, which have no values."""

    nbytes = 0

    def copy(self) -> None:
        pass

    def put(self, copy: None) -> None:
        pass


def slot_of(tensor: Tensor) -> Slot:
    storage = plain_storage(tensor)
    if storage is not None:
        return _StorageSlot(storage)
    return _NoSlot() if is_fake(tensor) or tensor.is_meta or tensor.is_inference() else _TensorSlot(tensor)


class Bindings:
    """The bindings of modules' names: attributes, parameters, buffers and submodules, as found at first."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.kind: type | None = None  # of the last module
        self.tables: list[Table] = []
        for module in modules:
            tables: tuple[Any, ...] = (vars(module), module._parameters, module._buffers, module._modules)
            self.tables += tables
            self.kind = type(module)
        self.found = list(map(_copy, self.tables))

    def differ(self) -> bool:
        return any(map(_differ, self.tables, self.found))

    def bind_tensors(self) -> bool:
        """Return whether a name is bound to a tensor that it was not bound to."""
        pairs = zip(self.tables, self.found, strict=True)
        changed = (value for table, old in pairs for name, value in table.items() if value is not old.get(name))
        return any(isinstance(value, Tensor) for value in changed)

    def now(self, last: Held) -> Held:
        """Return the values as they are now; `last` itself where nothing has changed since."""
        if not any(map(_differ, self.tables, last)):
            return last
        return tuple(_copy(t) if _differ(t, old) else old for t, old in zip(self.tables, last, strict=True))

    def put(self, held: Sequence[Table]) -> None:
        for table, wanted in zip(self.tables, held, strict=True):
            if _differ(table, wanted):
                if table.keys() != wanted.keys():
                    table.clear()
                table.update(wanted)

    def usable(self, held: Sequence[Table], overrides: Sequence[Override]) -> Held:
        """`held` with the overrides, and with what stands there now in place of tensors whose memory an engine has freed."""
        return tuple(
            _usable(table, copy, {name: value for place, name, value in overrides if place is table})
            for table, copy in zip(self.tables, held, strict=True)
        )

    def tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers and other attributes that are tensors, as they were found."""
        for copy in self.found:
            for value in copy.values():
                if isinstance(value, Tensor):
                    yield value


def _copy(table: Table) -> Table:
    """Past __getitem__, at which a table of ZeRO-3's gathers."""
    return dict(table.items())


def _differ(table: Table, other: Table) -> bool:
    if not table and not other:
        return False
    return len(table) != len(other) or table.keys() != other.keys() or any(map(is_not, table.values(), other.values()))


def _usable(table: Table, copy: Table, overrides: Table) -> Table:
    if _differ(table, copy):
        freed = {name for name, value in copy.items() if table.get(name, value) is not value and _is_freed(value)}
        overrides = {name: table[name] for name in freed} | overrides
    return {**copy, **overrides} if overrides else copy


def _is_freed(value: Any) -> bool:
    return (storage := plain_storage(value)) is not None and bool(value.numel()) and not storage.nbytes()


class _Frame(NamedTuple):
    """The state that a shard found. copies: of slots, by their key."""

    held: Held
    copies: dict[int, Any]


class State:
    """Everything that fn binds and writes, as every shard found it.

    followed: modules that are followed shard by shard. others: those that fn has not been seen to use. written: slots
    that fn was seen to write, by key. seen: whether it was seen to write or to bind anything.
    """

    def __init__(
        self, function: str, followed: Bindings, others: Bindings, written: dict[int, Slot], seen: bool = False
    ) -> None:
        self.function, self.followed, self.others = function, followed, others
        self.written, self.seen = dict(written), seen
        self.frames: list[_Frame] = []
        self._small: dict[int, tuple[Tensor, Slot]] = {}  # what a later shard might write

    def record(self) -> None:
        """Note the state in which a shard begins."""
        last = self.frames[-1] if self.frames else None
        held = self._held(tuple(self.followed.found) if last is None else last.held)
        copies = {key: s.copy() for key, s in self.written.items() if last is None or s.nbytes <= SMALL_BYTES}
        if last is None or held is not last.held:
            self._small |= self._new_small(held)
        for key, (tensor, slot) in self._small.items():
            known = None if last is None else last.copies.get(key)
            unwritten = known is not None and known[0] == tensor._version
            copies[key] = known if unwritten else (tensor._version, slot.copy())
        self.frames.append(_Frame(held, copies))

    def finish(self) -> None:
        """The last shard is done: what no shard wrote needs no copies."""
        self._held(self.frames[-1].held)
        for key, (tensor, slot) in self._small.items():
            with_copy = [frame.copies for frame in self.frames if key in frame.copies]
            if any(copies[key][0] != tensor._version for copies in with_copy):
                self.written[key] = slot
            for copies in with_copy:
                _, copies[key] = copies[key]
                if key not in self.written:
                    del copies[key]
        self._small = {}
        for table, found in zip(self.others.tables, self.others.found, strict=True):
            if _differ(table, found):
                names = [name for name in {**table, **found} if table.get(name) is not found.get(name)]
                refuse_late_write(self.function, f"{', '.join(names)} of a module")

    @contextmanager
    def again(self, overrides: Sequence[Override]) -> Iterator[Callable[[int], None]]:
        """Put back the state that a shard found, inside this context; afterwards the present state again."""
        later = [(bindings, list(map(_copy, bindings.tables))) for bindings in (self.followed, self.others)]
        frames = [_Frame(self.followed.usable(frame.held, overrides), frame.copies) for frame in self.frames]
        slots = {key: slot for key, slot in self.written.items() if any(key in frame.copies for frame in frames)}
        contents = [(slot, slot.copy()) for slot in slots.values()]

        def put(shard: int) -> None:
            held, copies = frames[shard]
            self.followed.put(held)
            for key, copy in copies.items():
                slots[key].put(copy)

        try:
            self.others.put(self.others.usable(self.others.found, overrides))
            yield put
        finally:
            for bindings, held in later:
                bindings.put(held)
            for slot, copy in contents:
                slot.put(copy)

    def _held(self, last: Held) -> Held:
        """Return what names are bound to now, graphs of shards let go: a shard's recomputation starts from values."""
        held = self.followed.now(last)
        if held is last:
            return last
        for table, copy, found in zip(self.followed.tables, held, last, strict=True):
            for name, value in () if copy is found else copy.items():
                if isinstance(value, Tensor) and value.grad_fn is not None and found.get(name) is not value:
                    table[name] = copy[name] = value.detach()
        return held

    def _new_small(self, held: Held) -> dict[int, tuple[Tensor, Slot]]:
        found: dict[int, tuple[Tensor, Slot]] = {}
        for value in (value for copy in held for value in copy.values() if isinstance(value, Tensor)):
            if isinstance(value, nn.Parameter) or value.is_inference():
                continue
            key = key_of(value)
            if key not in self.written and key not in self._small:
                slot = slot_of(value)
                if slot.nbytes <= SMALL_BYTES:
                    found[key] = value, slot
        return found


def refuse_late_write(function: str, what: str) -> None:
    """Refuse an fn that writes something, `what`, only with a later shard than its first.

    Raises:
        SpecError: always.
    """
    advice = "Pass the nn.Module itself, or write it for every token."
    fail_with(function, f"only a later shard of fn wrote {what}", advice=advice)


def refuse_written_argument(function: str) -> Never:
    """Refuse an fn that writes to one of its arguments in place.

    Raises:
        SpecError: always.
    """
    fail_with(function, "fn writes to one of its arguments in place", advice="Let it write to a copy.")


def refuse_history(function: str, tensors: Iterable[Tensor]) -> None:
    """Raise SpecError where fn wrote values that need a gradient into a tensor: forward keeps no graph for it."""
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.detach_()
            advice = "Return such values, or write them under torch.no_grad()."
            got = f"values that require grad in one of shape {show_shape(tuple(tensor.shape))}"
            fail(function, "a tensor that fn writes", "given values without a gradient", got, advice=advice)
