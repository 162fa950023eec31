"""Host memory where layers' inputs wait: how much of it there is, and one message before any work where it is too little."""

import os
from pathlib import Path
from typing import NamedTuple

from shared_specs.errors import UnsupportedError, refusal_text

_OPTION = "Checkpointing(offload=True)"
_GIB = 2**30
# Of JAX's pool of pinned memory, in GiB; its size where the variable is not set, and where it is and all is taken at once.
POOL_VARIABLE, _POOL_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
_PREALLOCATE, _PREALLOCATED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", 16


class MachineMemory(NamedTuple):
    """Bytes that the processes of a machine, or of the container they are in, may have: in all, and now."""

    total: int
    available: int


def read_host_memory(root: Path = Path("/")) -> MachineMemory | None:
    """Return them as Linux tells them; None where it does not. root: of the file system.

    The least of the machine's memory and of every control group around this process.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        fields = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines}
        found = MachineMemory(fields["MemTotal"], fields["MemAvailable"])
    except (OSError, ValueError, IndexError, KeyError):
        return None
    for folder, names in _groups(root):
        try:
            limit, used = (int((folder / name).read_text()) for name in names[:2])  # "max" where there is no limit
            lines = (folder / "memory.stat").read_text().splitlines()
            files = next(int(line.split()[1]) for line in lines if line.split()[0] == names[2])
        except (OSError, ValueError, StopIteration):
            continue
        found = MachineMemory(min(found.total, limit), min(found.available, max(0, limit - used + files)))
    return found


def _groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Return the folders of the control groups around this process, the innermost first, each with the names of its limit, of
    what is used and of the part of this that is given back when asked for.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, tuple[str, str, str]]] = []
    for line in lines:
        number, kinds, name = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if "memory" in kinds.split(","):
            top, names = top / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif number == "0":
            names = ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        inner = top / name.strip("/")
        found += [(folder, names) for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
    return found


def check_host_memory(inputs: int, size: int, *, had: int, machine: MachineMemory | None) -> None:
    """Check that the inputs of layers fit in host memory.

    Args:
        inputs: how many wait at the same time in this process. size: bytes of each. had: bytes of buffers that some of them
            are in already. machine: None where it is not known; then nothing is checked.
    Raises:
        UnsupportedError: they are more than is available, or those of all processes that torchrun started on this machine
            are more than it has.
    """
    if machine is None:
        return
    need, processes = inputs * size, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    advice = "Take fewer tokens, or share a sequence among more GPUs (data.context_axis)."
    if need - had > machine.available:
        there = f"and {_gib(machine.available + had)} are available here"
    elif processes * need > machine.total:
        there = f"those of {processes} processes {_gib(processes * need)}, and this machine has {_gib(machine.total)}"
    else:
        return
    wrong = f"the inputs of {inputs} layers take {_gib(need)} of host memory in a process, {there}"
    raise UnsupportedError(refusal_text(_OPTION, wrong, advice=advice))


def pool_bytes() -> int:
    """Return how large JAX's pool of pinned memory may become in this process, on GPUs. Source: GetGpuHostAllocator of XLA."""
    all_at_once = os.environ.get(_PREALLOCATE, "").lower() in ("1", "true")
    default = _PREALLOCATED_GIB if all_at_once else _POOL_GIB
    try:
        return int(os.environ.get(POOL_VARIABLE, default)) * _GIB
    except ValueError:
        return default * _GIB


def pool_gib(need: int) -> int:
    """Return a limit for the pool in GiB that `need` bytes of layers' inputs fit in, with a tenth and 1 GiB for what else is
    copied.
    """
    return -(-need * 11 // (10 * _GIB)) + 1


def check_pool(inputs: int, need: int, pool: int) -> None:
    """Check that the inputs of layers fit in JAX's pool of pinned memory.

    Args:
        need: bytes of all inputs in this process, at least. pool: of the pool, see `pool_bytes`.
    Raises:
        UnsupportedError: they are more.
    """
    if need > pool:
        wrong = (
            f"the inputs of {inputs} layers take at least {_gib(need)} of host memory in a process, and JAX's pool has "
        )
        advice = f"Set {POOL_VARIABLE}={pool_gib(need)} before JAX starts."
        raise UnsupportedError(refusal_text(_OPTION, wrong + _gib(pool), advice=advice))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
