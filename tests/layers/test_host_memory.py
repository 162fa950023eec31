"""How much host memory there is for layers' inputs, and the messages where it is too little."""

from pathlib import Path

import pytest

from shared_specs.errors import UnsupportedError
from shared_specs.layers.host_memory import (
    POOL_VARIABLE,
    MachineMemory,
    check_host_memory,
    check_pool,
    pool_bytes,
    pool_gib,
    read_host_memory,
)

GIB = 2**30
MACHINE = {
    "proc/meminfo": f"MemTotal: {64 * 2**20} kB\nMemFree: 7 kB\nMemAvailable: {48 * 2**20} kB\nHugePages_Total: 0\n"
}
NEW, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
LIMITED = {
    f"{NEW}/job/memory.max": f"{32 * GIB}\n",
    f"{NEW}/job/memory.current": f"{20 * GIB}\n",
    f"{NEW}/job/memory.stat": f"anon 1\ninactive_file {4 * GIB}\n",
    f"{NEW}/job/step/memory.max": "max\n",
}
BY_THE_OLD = {
    "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n",
    f"{OLD}/memory.limit_in_bytes": f"{24 * GIB}\n",  # as a container sees it: under no name
    f"{OLD}/memory.usage_in_bytes": f"{8 * GIB}\n",
    f"{OLD}/memory.stat": "inactive_file 5\ntotal_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MACHINE, (64, 48)),
        (MACHINE | {"proc/self/cgroup": "0::/job/step\n"} | LIMITED, (32, 16)),
        (MACHINE | {"proc/self/cgroup": "0::/elsewhere\n"} | LIMITED, (64, 48)),
        (MACHINE | BY_THE_OLD, (24, 16)),
        ({}, None),
        ({"proc/meminfo": "MemTotal: many kB\n"}, None),
    ],
    ids=["machine", "group", "another group", "version 1", "no Linux", "no number"],
)
def test_the_least_of_the_machine_and_its_control_groups(
    files: dict[str, str], expected: tuple[int, int] | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = read_host_memory(tmp_path)
    assert found == (None if expected is None else MachineMemory(*(GIB * each for each in expected)))


def test_inputs_that_fit_and_one_byte_more() -> None:
    machine = MachineMemory(total=100 * GIB, available=30 * GIB)
    check_host_memory(10, 3 * GIB, had=0, machine=machine)
    check_host_memory(10, 4 * GIB, had=10 * GIB, machine=machine)
    check_host_memory(10, 2**60, had=0, machine=None)
    with pytest.raises(UnsupportedError) as error:
        check_host_memory(10, 3 * GIB + 1, had=0, machine=machine)
    assert str(error.value) == (
        "Checkpointing(offload=True): the inputs of 10 layers take 30.0 GiB of host memory in a process, and 30.0 GiB are "
        "available here. Take fewer tokens, or share a sequence among more GPUs (data.context_axis)."
    )


def test_all_processes_of_a_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = MachineMemory(total=100 * GIB, available=30 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_host_memory(10, 5 * GIB // 2, had=0, machine=machine)
    with pytest.raises(
        UnsupportedError, match=r"those of 4 processes 116\.0 GiB, and this machine has 100\.0 GiB\. Take"
    ):
        check_host_memory(10, 29 * GIB // 10, had=0, machine=machine)


@pytest.mark.parametrize(
    ("variables", "gib"),
    [
        ({}, 64),
        ({POOL_VARIABLE: "600"}, 600),
        ({POOL_VARIABLE: "much"}, 64),
        ({"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "true"}, 16),
        ({"XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE": "true", POOL_VARIABLE: "8"}, 8),
    ],
)
def test_the_pool_of_jax_is_as_xla_makes_it(
    variables: dict[str, str], gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (POOL_VARIABLE, "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pool_bytes() == gib * GIB


def test_the_limit_that_a_message_names_is_enough() -> None:
    need = 512 * GIB
    with pytest.raises(
        UnsupportedError, match=rf"at least 512\.0 GiB .* pool has 64\.0 GiB\. Set {POOL_VARIABLE}=565 before"
    ):
        check_pool(32, need, 64 * GIB)
    assert pool_gib(need) == 565
    check_pool(32, need, pool_gib(need) * GIB)
    check_pool(32, need, need)
