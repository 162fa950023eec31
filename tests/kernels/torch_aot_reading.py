"""Reads what ahead-of-time compilation of the Triton kernels leaves: SASS, and the table of what the binaries need."""

import json
import re
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("kernel_resources.json")
TENSOR_CORES = {"HGMMA": r"\bHGMMA", "HMMA": r"\bHMMA", "UTCHMMA": r"\bUTC\w*MMA"}


def read_table() -> dict[str, dict[str, dict[str, Any]]]:
    """Version of Triton -> architecture -> kernel -> resources."""
    return json.loads(TABLE.read_text())


def write_table(version: str, architecture: str, kernels: dict[str, Any]) -> None:
    table = read_table()
    table.setdefault(version, {})[architecture] = kernels
    TABLE.write_text(as_json(dict(sorted(table.items()))) + "\n")


def as_json(value: dict[str, Any], indent: str = "") -> str:
    """JSON with one line a kernel, so that a change is a line."""
    if "registers" in value or not any(isinstance(part, dict) for part in value.values()):
        return json.dumps(value)
    inner = indent + " "
    parts = [
        f"{inner}{json.dumps(name)}: {as_json(part, inner) if isinstance(part, dict) else json.dumps(part)}"
        for name, part in value.items()
    ]
    return "{\n" + ",\n".join(parts) + f"\n{indent}}}"


def spills_in_product_loops(sass: str) -> int:
    """Local loads and stores between a label and a branch back to it, in loops that hold tensor-core instructions."""
    lines = sass.splitlines()
    labels = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    spills: set[int] = set()
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line)
        if jump is None or labels.get(jump[1], i) >= i:
            continue
        body = range(labels[jump[1]], i)
        if any(re.search(p, lines[n]) for n in body for p in TENSOR_CORES.values()):
            spills |= {n for n in body if re.search(r"\b(?:LDL|STL)\b", lines[n])}
    return len(spills)


def serialised_products(sass: str) -> int:
    """Products of a Hopper warpgroup that are waited for before the next one begins.

    ptxas does so, and says C7510 to C7519, where it cannot show that nothing touches an accumulator meanwhile: each
    HGMMA then stands between an ARRIVE and a DEPBAR of its own, where one of each around all products of a step is meant.
    """
    found, waited, before = 0, False, False
    for line in sass.splitlines():
        if re.match(r"\s*\.L_x_\d+:", line):
            waited = before = False
        elif re.search(r"\bHGMMA", line):
            found += before and waited
            before, waited = True, False
        elif "WARPGROUP.DEPBAR" in line:
            waited = True
    return found
