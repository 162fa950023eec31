"""The tables of the README, generated from benchmark records. `python -m shared_specs.app.tables` writes them in place.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; a test fails when a table differs from its records.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_specs.records import read_records

ROOT = Path(__file__).parents[2]
README, RECORDS = ROOT / "README.md", ROOT / "benchmarks" / "records"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
GIB = 2**30

Record = dict[str, Any]


def latest(records: list[Record], kind: str, half: str | None = None) -> Record | None:
    """The newest record of a kind, and of one half where it is named."""
    found = [record for record in records if record["kind"] == kind and half in (None, record["half"])]
    return found[-1] if found else None


def _rows(header: list[str], rows: list[list[str]], source: Record) -> str:
    lines = ["| " + " | ".join(header) + " |", "| " + " | ".join(["---"] * len(header)) + " |"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    hardware = source["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    memory = f"{hardware['memory_bytes'] / GIB:.0f} GiB"
    lines += ["", f"{source['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores, {memory}; {versions}.", ""]
    return "\n".join(lines)


def op_table(records: list[Record], op: str, half: str) -> str:
    """Time of every variant of an op relative to the plain one, a column a workload."""
    record = latest(records, op, half)
    if record is None:
        return "No record yet.\n"
    workloads = list(dict.fromkeys(result["workload"] for result in record["results"]))
    variants = list(dict.fromkeys(result["variant"] for result in record["results"]))
    cells = {(r["variant"], r["workload"]): f"{r['ratio_to_plain']:.2f}" for r in record["results"]}
    rows = [[variant, *(cells.get((variant, workload), "") for workload in workloads)] for variant in variants]
    return _rows(["time / plain", *workloads], rows, record)


def demo_table(records: list[Record], kind: str) -> str:
    """Loss, peak memory and speed of every run of the demo, beside what the plain model would need."""
    record = latest(records, kind)
    if record is None:
        return "No record yet.\n"
    rows = []
    for run in record["results"]:
        losses = ", ".join(f"{loss:.5f}" for loss in run["losses"])
        peaks = [f"{run[name] / GIB:.1f} GiB" for name in ("peak_bytes", "plain_peak_bytes_predicted")]
        rows.append([run["label"], str(run["tokens"]), losses, *peaks, f"{run['tokens_per_second']:.0f}"])
    header = ["run", "tokens", "loss per step", "peak memory", "plain, predicted", "tokens/s"]
    return _rows(header, rows, record)


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "mlp-torch": lambda records: op_table(records, "mlp", "tiled_torch"),
    "mlp-jax": lambda records: op_table(records, "mlp", "tiled_jax"),
    "loss-torch": lambda records: op_table(records, "loss", "tiled_torch"),
    "loss-jax": lambda records: op_table(records, "loss", "tiled_jax"),
    "demo": lambda records: demo_table(records, "demo"),
    "demo-long": lambda records: demo_table(records, "demo-long"),
}


def render(text: str, records: list[Record]) -> str:
    """The text with every marked table made anew; KeyError for a table nobody makes."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]](records) + match[3], text)


def main() -> None:
    """Rewrites the README's tables."""
    README.write_text(render(README.read_text(encoding="utf-8"), read_records(RECORDS)), encoding="utf-8")


if __name__ == "__main__":
    main()
