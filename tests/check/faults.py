"""A silent fault: a way of training that looks right, and what `check` must say of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Make = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """make: returns the arguments of `check`. kind, name: of the first result that differs. says: in its description."""

    make: Make
    kind: str
    name: str
    says: str = ""


class Faults(dict[str, Fault]):
    """Every fault of one half, by the name of the function that makes it."""

    def fault(self, kind: str, name: str, says: str = "") -> Callable[[Make], Make]:
        """Return a decorator that adds a function."""

        def add(make: Make) -> Make:
            self[make.__name__] = Fault(make, kind, name, says)
            return make

        return add
