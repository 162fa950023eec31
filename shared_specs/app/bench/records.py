"""A record: one measured run with all that is needed to believe or repeat it, as one JSON file."""

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FORMAT = 1


def hardware() -> dict[str, Any]:
    """CPU model, cores this process may use, and memory in bytes."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"cpu": model, "cores": cores, "memory_bytes": memory}


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions; packages that are missing are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit of the source, with `+changes` where the tree differs from it; "unknown" outside a checkout.

    A copy of a checkout without its .git is told by TILED_COMMIT.
    """
    told = os.environ.get("TILED_COMMIT")
    if told:
        return told
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def make_record(
    kind: str, half: str, packages: Iterable[str], results: list[dict[str, Any]], **facts: Any
) -> dict[str, Any]:
    """Return the record of one run.

    Args:
        kind: what was measured, such as "mlp". half: the package that measured it.
        packages: whose versions matter. results: one dict a measured line; times in seconds, memory in bytes.
        facts: whatever else a reader has to know, such as which kernels of a peer were replaced.
    """
    return {
        "format": FORMAT,
        "kind": kind,
        "half": half,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        # Of a path its name alone: a record tells nothing of the machine's folders.
        "command": " ".join(["python", "-m", half, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(packages),
        **facts,
        "results": results,
    }


def write_record(folder: str | Path, record: dict[str, Any]) -> Path:
    """Write `<kind>_<half>_<date>.json` and return its path; an existing file is never replaced."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = record["date"].replace(":", "").replace("-", "")
    path = folder / f"{record['kind']}_{record['half']}_{stamp}.json"
    with path.open("x", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    return path


def read_records(folder: str | Path) -> list[dict[str, Any]]:
    """Return every record of a folder, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("*.json"))]
    return sorted(found, key=lambda record: record["date"])


def latest(records: list[dict[str, Any]], kind: str, half: str | None = None, jax: str = "") -> dict[str, Any] | None:
    """Return the newest record of a kind, and of one half where it is named, and of the versions of JAX that begin so."""
    found = [
        record
        for record in records
        if record["kind"] == kind
        and half in (None, record["half"])
        and record["versions"].get("jax", "").startswith(jax)
    ]
    return found[-1] if found else None


def source_of(record: dict[str, Any]) -> str:
    """Return the line under a table: the date, the machine and the versions of its record."""
    hardware = record["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    memory = f"{hardware['memory_bytes'] / 2**30:.0f} GiB"
    return f"{record['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores, {memory}; {versions}."
