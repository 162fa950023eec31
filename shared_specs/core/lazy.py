"""The public names of a package, each imported when it is first asked for: who plans a run needs no framework."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from shared_specs.version import package_version


def import_lazily(package: str, names: Mapping[str, str]) -> None:
    """Let a package import its public names on first use; called in its `__init__`.

    A name may be a folder's as well, which Python would put in its place: it stays what `names` says. Everything else that
    is asked for is a module of the package, or AttributeError as ever; `__version__` is the project's.

    Args:
        package: its `__name__`. names: public name -> module of the package that has it.
    """
    module = sys.modules[package]
    module.__class__ = type("LazyPackage", (_LazyPackage,), {"_public": dict(names)})


class _LazyPackage(ModuleType):
    _public: Mapping[str, str]

    def __getattr__(self, name: str) -> Any:
        package = self.__name__
        if name == "__version__":
            value = package_version()
        elif name in self._public:
            value = getattr(importlib.import_module(f"{package}.{self._public[name]}"), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (
            name in self._public and isinstance(value, ModuleType)
        ):  # the import of a folder with a function's name
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._public})
