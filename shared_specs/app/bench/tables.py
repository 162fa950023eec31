"""The tables of the README, generated from benchmark records. `python -m shared_specs.app.bench.tables` writes them in place.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; a test fails when a table differs from its records.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_specs.app.bench.records import read_records
from shared_specs.kernels import roofline
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan

ROOT = Path(__file__).parents[3]
README, RECORDS = ROOT / "README.md", ROOT / "benchmarks" / "records"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
MIB, GIB = 2**20, 2**30

Record = dict[str, Any]


def latest(records: list[Record], kind: str, half: str | None = None, jax: str = "") -> Record | None:
    """Return the newest record of a kind, and of one half where it is named, and of the versions of JAX that begin so."""
    found = [
        record
        for record in records
        if record["kind"] == kind
        and half in (None, record["half"])
        and record["versions"].get("jax", "").startswith(jax)
    ]
    return found[-1] if found else None


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]


def _rows(header: list[str], rows: list[list[str]], source: Record) -> str:
    lines = _lines(header, rows)
    hardware = source["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items())
    memory = f"{hardware['memory_bytes'] / GIB:.0f} GiB"
    lines += ["", f"{source['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores, {memory}; {versions}.", ""]
    return "\n".join(lines)


def op_table(records: list[Record], op: str, half: str, jax: str = "") -> str:
    """Time of every variant of an op relative to the plain one, a column a workload."""
    record = latest(records, op, half, jax)
    if record is None:
        return "No record yet.\n"
    workloads = list(dict.fromkeys(result["workload"] for result in record["results"]))
    variants = list(dict.fromkeys(result["variant"] for result in record["results"]))
    cells = {(r["variant"], r["workload"]): f"{r['ratio_to_plain']:.2f}" for r in record["results"]}
    rows = [[variant, *(cells.get((variant, workload), "") for workload in workloads)] for variant in variants]
    return _rows(["time / plain", *workloads], rows, record)


def bytes_table(records: list[Record], half: str) -> str:
    """Return peak bytes of every variant of the MLP in MiB, with what `costs.py` says of them behind, a column a workload.

    That is an upper bound of a program that XLA compiles. Variants that are products alone have none of either.
    """
    record = latest(records, "mlp", half)
    name, behind = ("temp_bytes", "at most") if half == "tiled_jax" else ("peak_bytes", "predicted")
    results = [result for result in record["results"] if name in result] if record else []
    if record is None or not any("predicted_bytes" in result for result in results):
        return "No record yet.\n"
    workloads = list(dict.fromkeys(result["workload"] for result in results))
    variants = list(dict.fromkeys(result["variant"] for result in results))
    cells = {(r["variant"], r["workload"]): _mebibytes(r[name], r.get("predicted_bytes")) for r in results}
    rows = [[variant, *(cells.get((variant, workload), "") for workload in workloads)] for variant in variants]
    return _rows([f"peak MiB ({behind})", *workloads], rows, record)


def _mebibytes(measured: int, predicted: int | None) -> str:
    return f"{measured / MIB:.1f}" + ("" if predicted is None else f" ({predicted / MIB:.1f})")


def accuracy_table(records: list[Record], half: str) -> str:
    """Return the worst weight-gradient error of every variant, and the worst ratio of one to the plain error of the same
    weight.
    """
    record = latest(records, "accuracy", half)
    if record is None:
        return "No record yet.\n"
    several = len({result["workload"] for result in record["results"]}) > 1
    rows = []
    for result in record["results"]:
        name = f"{result['variant']}, {result['workload']}" if several else result["variant"]
        if "left_out" in result:
            rows.append([name, "left out", ""])
            continue
        rows.append([name, f"{result['worst_weight_error']:.2%}", f"{result['ratio_to_plain']:.2f}"])
    return _rows(["variant", "worst weight-gradient error", "error / plain, worst weight"], rows, record)


def mesh_table(records: list[Record]) -> str:
    """Time, a device's temporary bytes and the collectives of a step on a mesh, of every variant and workload."""
    record = latest(records, "mesh")
    if record is None:
        return "No record yet.\n"
    rows = []
    for result in record["results"]:
        collectives = ", ".join(f"{count} {name}" for name, count in result["collectives"].items())
        numbers = [f"{result['ratio_to_plain']:.2f}", f"{result['temp_bytes'] / MIB:.1f}"]
        rows.append([f"{result['variant']}, {result['workload']}", *numbers, collectives])
    return _rows(["variant, eight devices", "time / plain", "temporary MiB a device", "collectives"], rows, record)


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


# What the README's rows of a GPU are of: one MLP of Llama-3-8B, bfloat16, in shards of 8192 tokens.
GPU_SHAPE = mlp_costs.MLPShape(tokens=131072, hidden=4096, intermediate=14336, itemsize=2, weight_itemsize=2)
GPU_PLAN = ShardPlan(GPU_SHAPE.tokens, 8192)
GPU_KIND = f"gpu-mlp-8b-{GPU_SHAPE.tokens}-{GPU_PLAN.shard_tokens}-main"
GPU_ROWS: dict[str, tuple[roofline.MLPVariant, float]] = {
    "plain": ("plain", 0.0),
    "checkpoint": ("checkpoint", 0.0),
    "tiled, in a checkpoint too": ("tiled", 0.0),
    "tiled-keep-1": ("tiled", 1.0),
    "liger, deepspeed": ("whole", 0.0),
    "liger, deepspeed in a checkpoint": ("whole-in-checkpoint", 0.0),
}


def gpu_table(records: list[Record]) -> str:
    """Milliseconds of each variant of one MLP on a GPU: those of the record, or, without one, what the model expects."""
    record = latest(records, GPU_KIND, "tiled_torch")
    if record is not None:
        timed = [result for result in record["results"] if "median_seconds" in result]
        return _rows(["variant", "ms"], [[r["variant"], f"{1e3 * r['median_seconds']:.1f}"] for r in timed], record)
    header = ["ms by the model, not measured", *(gpu.name for gpu in roofline.GPUS.values())]
    rows = []
    for name, (variant, keep) in GPU_ROWS.items():
        runs = [
            roofline.mlp_seconds(GPU_SHAPE, GPU_PLAN, gpu, variant=variant, keep=keep) for gpu in roofline.GPUS.values()
        ]
        rows.append([name, *(f"{1e3 * run.total:.0f}" for run in runs)])
    return "\n".join(_lines(header, rows)) + "\n"


TABLES: dict[str, Callable[[list[Record]], str]] = {
    "mlp-torch": lambda records: op_table(records, "mlp", "tiled_torch"),
    "mlp-jax": lambda records: op_table(records, "mlp", "tiled_jax", jax="0.10"),
    "mlp-jax-new": lambda records: op_table(records, "mlp", "tiled_jax", jax="0.11"),
    "loss-torch": lambda records: op_table(records, "loss", "tiled_torch"),
    "loss-jax": lambda records: op_table(records, "loss", "tiled_jax"),
    "mlp-bytes-torch": lambda records: bytes_table(records, "tiled_torch"),
    "mlp-bytes-jax": lambda records: bytes_table(records, "tiled_jax"),
    "mesh-jax": mesh_table,
    "accuracy-torch": lambda records: accuracy_table(records, "tiled_torch"),
    "accuracy-jax": lambda records: accuracy_table(records, "tiled_jax"),
    "gpu-mlp": gpu_table,
    "demo": lambda records: demo_table(records, "demo"),
    "demo-long": lambda records: demo_table(records, "demo-long"),
}


def render(text: str, records: list[Record]) -> str:
    """Return the text with every marked table made anew; KeyError for a table nobody makes."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]](records) + match[3], text)


def main() -> None:
    """Rewrites the README's tables."""
    README.write_text(render(README.read_text(encoding="utf-8"), read_records(RECORDS)), encoding="utf-8")


if __name__ == "__main__":
    main()
