"""Every Triton kernel compiles ahead of time for three architectures, and its binary needs what the table says.

By `make aot-triton` alone, with .venv's Triton and with the one that GPU machines have. The table has both;
`python -m tests.kernels.torch_aot_kernels <architecture> table` writes what belongs there. The gates hold for any version: no
spill in a loop with tensor-core instructions, no product of a Hopper warpgroup waited for by itself, shared memory within
the limit, tensor-core instructions where there are 16-bit products.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import triton

from shared_specs.kernels.blocks import TRITON_CANDIDATES, candidates_on
from tests.kernels.torch_aot_reading import read_table, serialised_products

# Bytes of shared memory that one program may use: CUDA programming guide, table of compute capabilities.
SHARED = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}
WITHOUT_PRODUCTS = ("glu forward", "glu backward", "cross_entropy")
Found = tuple[str, dict[str, dict[str, Any]]]


def compiled(*arguments: str) -> dict[str, dict[str, Any]]:
    """Resources of every kernel, from a process in which Triton compiles."""
    command = [sys.executable, "-m", "tests.kernels.torch_aot_kernels", *arguments]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=1200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["triton"] == triton.__version__
    return found["kernels"]


# With pytest -n, one process an architecture.
EACH = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SHARED]


@pytest.fixture(scope="module", params=EACH)
def binaries(request: pytest.FixtureRequest) -> Found:
    return request.param, compiled(request.param)


def test_resources_are_those_of_the_table(binaries: Found) -> None:
    architecture, found = binaries
    assert found == read_table()[triton.__version__][architecture]


def test_the_table_has_the_supported_versions() -> None:
    assert set(read_table()) == {"3.6.0", "3.9.0"}
    assert all(set(architectures) == set(SHARED) for architectures in read_table().values())


def check_gates(architecture: str, found: dict[str, dict[str, Any]]) -> None:
    assert {name: kernel["spills in product loops"] for name, kernel in found.items()} == dict.fromkeys(found, 0)
    assert {name: kernel["serialised"] for name, kernel in found.items()} == dict.fromkeys(found, 0)
    assert {name: kernel["shared"] for name, kernel in found.items() if kernel["shared"] > SHARED[architecture]} == {}
    for name, kernel in found.items():
        expected = not name.startswith(WITHOUT_PRODUCTS) and "float32" not in name
        assert (INSTRUCTION[architecture] in kernel["tensor cores"]) == expected, name


def test_products_are_not_held_up(binaries: Found) -> None:
    check_gates(*binaries)


def test_float32_spills_nothing(binaries: Found) -> None:
    """It has no tensor cores: its products are loops like any other."""
    _, found = binaries
    spills = {name: kernel["spills"] for name, kernel in found.items() if "float32" in name}
    assert len(spills) == 10
    assert not any(spills.values()), spills


def test_two_programs_fit_on_one_multiprocessor(binaries: Found) -> None:
    """Of 65536 registers and 228 KiB of shared memory, of which each program costs one more; 256 threads.

    Pointers, which sm_80 has instead of descriptors, take too many registers for two.
    """
    architecture, found = binaries
    pair = found["glu_up auxiliary, bfloat16, in pairs"]
    fits = 2 * (pair["shared"] + 1024) <= 228 * 1024 and 2 * 256 * pair["registers"] <= 65536
    assert fits == (architecture != "sm_80")


# Multiprocessors and bytes of L2 cache of A100, H100 and B200, the smallest of each architecture's.
L2 = {"sm_80": (108, 40e6), "sm_90": (132, 50e6), "sm_100": (148, 126e6)}


def test_the_second_sweep_finds_its_rows_in_the_l2_cache(binaries: Found) -> None:
    """Programs of 1024 threads: what all that run at once are reading fits, which six smaller ones a multiprocessor do not."""
    architecture, found = binaries
    processors, cache = L2[architecture]
    row = 128256 * 2
    for kind, threads, fits in ((", row alone", 1024, True), ("", 256, False)):
        kernel = found[f"cross_entropy, bfloat16{kind}"]
        registers = -(-kernel["registers"] // 8) * 8  # given out by eights
        programs = min(2048 // threads, 65536 // (threads * registers))
        assert kernel["spills"] == 0
        assert (programs * processors * row <= cache) == fits


def test_odd_vocabularies_keep_accesses_of_16_bytes(binaries: Found) -> None:
    """Rows of 50257 entries begin anywhere: the body of a row, read twice and written once, has none that are narrower."""
    _, found = binaries
    for name in ("cross_entropy", "cross_entropy gradient"):
        even, odd = (found[f"{name}, bfloat16{kind}"]["16-byte accesses"] for kind in ("", ", odd vocabulary"))
        assert even == odd > 0, name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("architecture", SHARED)
def test_candidates_are_not_held_up_either(architecture: str) -> None:
    """Any of those that `tune` tries may be what it finds the fastest."""
    found = compiled(architecture, "candidates")
    assert len(found) >= sum(len(candidates_on("triton", op, architecture)) for op in TRITON_CANDIDATES)
    check_gates(architecture, found)


# What Triton 3.6 makes of a linear kernel that may sum nothing, and of the same one that may not.
SERIALISED = """
.L_x_2:
        WARPGROUP.ARRIVE ;
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT ;
        WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        WARPGROUP.ARRIVE ;
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
  @!P0  BRA `(.L_x_2) ;
"""
TOGETHER = """
.L_x_2:
        WARPGROUP.ARRIVE ;
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT ;
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
  @!P0  BRA `(.L_x_2) ;
.L_x_3:
        WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""


def test_products_that_are_waited_for_one_by_one_are_counted() -> None:
    assert serialised_products(SERIALISED) == 1
    assert serialised_products(TOGETHER) == 0
    assert serialised_products(TOGETHER + TOGETHER) == 0
