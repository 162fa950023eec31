"""`doctor`: what is installed, what can run here and why the rest cannot, and what "auto" takes."""

import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from shared_specs.app.memory import machine_bytes
from shared_specs.app.options import DoctorOptions
from shared_specs.app.progress import show_bytes
from shared_specs.kernels.blocks import tables, user_table

PROJECT = "tiled-mlp"
# Not what runs a model, but what changes the project.
_LEFT_OUT = ("test", "all")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and backends that a half's framework finds here.

    Attributes:
        devices: its devices, in words.
        backends: name -> None where it can run here, else the reason.
        automatic: what backend="auto" takes at the widths of Llama-3-8B: operation -> dtype -> backend.
    """

    devices: tuple[str, ...]
    backends: Mapping[str, str | None]
    automatic: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that an extra brings: the versions that are supported and the one that is installed.

    fits: whether the one is among the others; None where it is not installed, or nobody here can compare versions.
    """

    name: str
    extras: tuple[str, ...]
    supported: str
    installed: str | None
    fits: bool | None


def packages() -> tuple[Package, ...]:
    """Return the packages of every extra, by the metadata of the installed project; none where it is not installed."""
    try:
        lines = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    extras: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        found = re.match(r"""(?P<name>[\w.-]+)(?P<range>[^;\[]*)(;.*extra == ["'](?P<extra>\w+)["'])?""", line)
        extra = "" if found is None else found["extra"] or ""
        if found is None or extra in _LEFT_OUT or found["name"] == PROJECT:
            continue
        extras.setdefault((found["name"], found["range"].strip()), []).append(extra or "always")
    return tuple(
        Package(name=name, extras=tuple(dict.fromkeys(of)), supported=supported, **_installed(name, supported))
        for (name, supported), of in extras.items()
    )


def _installed(name: str, supported: str) -> dict[str, Any]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return {"installed": None, "fits": None}
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with most of the packages, and with none for sure
        return {"installed": version, "fits": None}
    return {"installed": version, "fits": SpecifierSet(supported).contains(version, prereleases=True)}


def doctor(
    options: DoctorOptions, half: str, find: Callable[[], Machine], version: str, console: Console | None = None
) -> int:
    """Print what is found and return the exit code: 1 where the half's framework cannot be imported.

    Args:
        half: the package, such as "tiled_torch".
        find: imports the framework and looks.
        version: of the project.
    """
    try:
        machine, reason = find(), None
    except ImportError as error:
        machine, reason = None, " ".join(str(error).split())
    found = {
        "version": version,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "memory_bytes": machine_bytes(),
        "packages": [asdict(package) for package in packages()],
        "tuned_blocks": [str(path) for path in tables()],
        "machine": None if machine is None else asdict(machine),
        "reason": reason,
    }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print(half, found, machine, console or Console())
    return 0 if machine is not None else 1


def _tables_told(read: list[str]) -> str:
    *own, package = read
    names = [f"{path} (your own, of tune)" for path in own] + [f"{package} (the package's)", "the defaults"]
    place = user_table()
    return ", ".join(names) + (f"; tune would write {place}" if not own and place is not None else "")


def _print(half: str, found: dict, machine: Machine | None, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True, markup=False)

    say(f"{half} {found['version']}, Python {found['python']}, {found['system']}, {show_bytes(found['memory_bytes'])}")
    shown = Table(box=SIMPLE)
    for name in ("package", "installed", "supported", "extra"):
        shown.add_column(name)
    for package in found["packages"]:
        installed = package["installed"] or "no"
        if package["fits"] is False:
            installed += " (not supported)"
        shown.add_row(package["name"], installed, package["supported"], ", ".join(package["extras"]))
    console.print(shown)
    if machine is None:
        say(f"{half} cannot run here: {found['reason']}")
        return
    say(f"devices: {', '.join(machine.devices)}")
    say(f"block sizes of kernels, the first that has a shape: {_tables_told(found['tuned_blocks'])}")
    for name, reason in machine.backends.items():
        say(f'backend="{name}": {"can run here" if reason is None else f"cannot run here. {reason}"}')
    for operation, taken in machine.automatic.items():
        by_backend: dict[str, list[str]] = {}
        for dtype, backend in taken.items():
            by_backend.setdefault(backend, []).append(dtype)
        words = "; ".join(f"{backend} in {', '.join(dtypes)}" for backend, dtypes in by_backend.items())
        say(f'backend="auto" of {operation} takes {words}')
