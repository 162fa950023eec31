"""Looking for a mean among the scalars of a loss that is computed by shards: at which tokens, how, and how often.

A mean of all tokens is no sum of the means of shards, so `tiled_loss` refuses it. Of some tokens, each given twice, a mean
is what it is of the same tokens given once; a sum is twice as much. That holds whatever tokens count (labels that are
ignored, weights), if only some do: so the tokens are spread over all of them, and more are tried where none seems to count.
"""

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import isfinite
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

from shared_specs.errors import fail

_FIRST, _STEP = 8, 8  # so many tokens at first, and so many times more in each further round
_ALWAYS = 64  # tokens that are no burden, however short a shard is
_LOOKS = 3  # at calls where nothing can be told: all zero, or not a number
_KINDS = 16  # ways to call one function, after which nobody looks any more
_PARTS, _DEPTH = 50, 4  # of a function's closure and what hangs on it


def samples(tokens: int, shard_tokens: int) -> Iterator[list[int]]:
    """Yield which tokens to look at, in rounds: spread over all, at most half a shard (or _ALWAYS): twice that is one shard."""
    most = min(tokens, max(_ALWAYS, shard_tokens // 2))
    count = min(_FIRST, most)
    while True:
        yield [i * tokens // count for i in range(count)]
        if count == most:
            return
        count = min(most, _STEP * count)


def is_sum(function: str, halves: Sequence[float], once: float, twice: float) -> bool:
    """Return whether fn's scalar is seen to be a sum; SpecError where it is a mean; False where nothing can be told.

    halves: of the first and of the second half of some tokens. once: of all of them. twice: of each of them twice.
    """
    size = max((abs(value) for value in halves if isfinite(value)), default=0.0)
    if not (isfinite(once) and isfinite(twice)) or not once or abs(once) < 1e-2 * size:
        return False
    if abs(twice - once) <= 1e-3 * abs(once):
        advice = "Return sums (reduction='sum') and divide the results by a count."
        fail(function, "fn", "a sum over its tokens", "a mean", advice=advice)
    return abs(twice - 2 * once) <= 0.1 * abs(once)


def look(function: str, samples: Iterator[list[int]], scalars: Callable[[list[int]], Sequence[float]]) -> bool:
    """Return whether all scalars are seen to be sums; SpecError where one is a mean. scalars: those of fn for some tokens."""
    for chosen in samples:
        middle = len(chosen) // 2 or 1
        parts = [scalars(part) for part in (chosen[:middle], chosen[middle:] or chosen, chosen, chosen + chosen)]
        told = [is_sum(function, each[:2], each[2], each[3]) for each in zip(*parts, strict=True)]
        if all(told):
            return True
    return False


class Looks:
    """For which functions, and which arguments, it has been looked. Keeps no function alive.

    A function made anew for every call (a lambda) is known by its code and by the words and switches that it closes over.
    """

    def __init__(self) -> None:
        self._left: dict[int, dict[Hashable, int]] = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def wanted(self, fn: Any, arguments: Hashable) -> bool:
        left = self._of(fn)
        return left.get(self._key(fn, arguments), _LOOKS if len(left) < _KINDS else 0) > 0

    def done(self, fn: Any, arguments: Hashable, *, told: bool) -> None:
        left, key = self._of(fn), self._key(fn, arguments)
        left[key] = 0 if told else left.get(key, _LOOKS) - 1

    def _of(self, fn: Any) -> dict[Hashable, int]:
        anchor = _anchor(fn)
        number = id(anchor)
        if number not in self._known or self._known[number]() is not anchor:
            try:
                self._known[number] = weakref.ref(anchor, lambda _: self._forget(number))
            except TypeError:  # a builtin
                return self._left.setdefault(0, {})
            self._left[number] = {}
        return self._left[number]

    def _forget(self, number: int) -> None:
        self._known.pop(number, None)
        self._left.pop(number, None)

    def _key(self, fn: Any, arguments: Hashable) -> Hashable:
        parts = iter(range(_PARTS))
        return arguments, signature(fn, parts)


def _anchor(fn: Any) -> Any:
    """Return an object that lives as long as the function can be called: its code, or the object that is called."""
    while isinstance(fn, functools.partial | MethodType):
        fn = fn.func if isinstance(fn, functools.partial) else fn.__func__
    return fn.__code__ if isinstance(fn, FunctionType) else fn


def signature(value: Any, parts: Iterator[int] | None = None, depth: int = _DEPTH) -> Hashable:
    """Return a key that tells one use of a function from another: words and switches by value, arrays by dtype and rank,
    else the type.
    """
    parts = iter(range(_PARTS)) if parts is None else parts
    whole: Any = value
    cls: Any = whole.__class__
    kind: str = cls.__qualname__
    if value is None or isinstance(value, str | bool):
        return value
    if hasattr(cls, "dtype") and hasattr(cls, "shape"):
        return kind, str(value.dtype), len(value.shape)
    if depth == 0:
        return kind
    inner: Any = ()
    match value:
        case functools.partial():
            inner = {"": value.func, **dict(enumerate(value.args)), **value.keywords}
        case MethodType():
            inner = {"": value.__func__, "self": value.__self__}
        case FunctionType():
            code = value.__code__
            kind = f"{code.co_filename}:{code.co_firstlineno}:{code.co_name}"
            inner = dict(zip(code.co_freevars, map(_content, value.__closure__ or ()), strict=True))
            inner |= dict(enumerate(value.__defaults__ or ())) | (value.__kwdefaults__ or {})
        case dict():
            inner = whole
        case list() | tuple():
            inner = dict(enumerate(cast(Sequence[Any], whole)))
        case type():
            return value.__qualname__
        case BuiltinFunctionType():
            return kind, value.__name__
        case _:
            inner = getattr(value, "__dict__", {})
    found: list[Hashable] = []
    for name, item in inner.items():
        if _may_tell(name, item):
            if next(parts, None) is None:
                break
            found.append((str(name), signature(item, parts, depth - 1)))
    return kind, tuple(found)


def _may_tell(name: Any, value: Any) -> bool:
    hidden = isinstance(name, str) and name.startswith("_") and name != "_modules"
    return not hidden and (isinstance(value, bool) or not isinstance(value, int | float))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
