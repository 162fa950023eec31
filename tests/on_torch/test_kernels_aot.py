"""Every Triton kernel compiles ahead of time for three architectures, and its binary needs what the table says.

kernel_resources.json is for the Triton of the lock; `python -m tests.on_torch.aot_kernels <architecture>` prints a new
one. The gates hold for any version: no spill in a loop with tensor-core instructions, shared memory within the limit,
tensor-core instructions where there are 16-bit products.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

TABLE = json.loads(Path(__file__).with_name("kernel_resources.json").read_text())
# Bytes of shared memory that one program may use: CUDA programming guide, table of compute capabilities.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
WITHOUT_PRODUCTS = ("glu forward", "glu backward", "cross_entropy")


@pytest.fixture(scope="module", params=SHARED)
def binaries(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, Any]]]:
    """Resources of every kernel on one architecture, from a process in which Triton compiles."""
    command = [sys.executable, "-m", "tests.on_torch.aot_kernels", request.param]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return request.param, json.loads(run.stdout)


def test_resources_are_those_of_the_table(binaries):
    architecture, found = binaries
    if triton.__version__ != TABLE["triton"]:
        pytest.skip(f"the table is for Triton {TABLE['triton']}, this is {triton.__version__}")
    assert found == TABLE[architecture]


def test_no_spill_beside_tensor_core_instructions(binaries):
    _, found = binaries
    assert {name: kernel["spills in product loops"] for name, kernel in found.items()} == dict.fromkeys(found, 0)


def test_float32_spills_nothing(binaries):
    """It has no tensor cores: its products are loops like any other."""
    _, found = binaries
    spills = {name: kernel["spills"] for name, kernel in found.items() if "float32" in name}
    assert len(spills) == 10
    assert not any(spills.values()), spills


def test_shared_memory_is_within_the_limit(binaries):
    architecture, found = binaries
    assert {name: kernel["shared"] for name, kernel in found.items() if kernel["shared"] > SHARED[architecture]} == {}


def test_products_use_tensor_cores(binaries):
    architecture, found = binaries
    instruction = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}[architecture]
    for name, kernel in found.items():
        expected = not name.startswith(WITHOUT_PRODUCTS) and "float32" not in name
        assert (instruction in kernel["tensor cores"]) == expected, name
