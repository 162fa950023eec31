"""The documents' tables, generated from benchmark records. `python -m shared_specs.app.bench.tables` writes them in place.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; a test fails when a table differs from its records.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared_specs.app.bench.gpu_tables import SHORT, expected_table, gpu_table, kernels_table
from shared_specs.app.bench.records import latest, read_records, source_of
from shared_specs.app.bench.workloads import MODEL_WORKLOADS
from shared_specs.app.plan.decoder import MODELS
from shared_specs.app.plan.published import NOT_COMPARABLE, PUBLISHED
from shared_specs.app.plan.record import KIND as PLAN_KIND
from shared_specs.app.plan.record import simulated_setting
from shared_specs.app.plan.simulated import predicted_device

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "benchmarks" / "records"
BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.S)
MIB, GIB = 2**20, 2**30
HALVES = {"tiled_torch": "PyTorch", "tiled_jax": "JAX"}

Record = dict[str, Any]


def _lines(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]


def _rows(header: list[str], rows: list[list[str]], *sources: Record) -> str:
    return "\n".join([*_lines(header, rows), "", *map(source_of, sources), ""])


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


def model_table(records: list[Record], dtype: str) -> str:
    """Return the errors of a whole model's loss and of its gradients, plain and tiled, in both halves."""
    found = {name: latest(records, "model", half) for half, name in HALVES.items()}
    sources = {name: record for name, record in found.items() if record is not None}
    if not sources:
        return "No record yet.\n"
    errors = ("loss_error", "gradients_error", "worst_gradient_error")
    wanted = {workload.name for workload in MODEL_WORKLOADS if workload.dtype == dtype}
    rows = [
        [f"{name}, {row['variant']}", *(f"{row[error]:.1e}" for error in errors)]
        for name, record in sources.items()
        for row in record["results"]
        if row["workload"] in wanted
    ]
    header = [f"SmolLM2-135M, {dtype}", "error of the loss", "of all gradients", "of the worst gradient"]
    return _rows(header, rows, *sources.values())


# Column of the table of alternatives -> its variant in the records.
ALTERNATIVES = {
    "plain": "plain",
    "checkpoint": "checkpoint",
    "Liger": "liger",
    "DeepSpeed": "deepspeed",
    "**this**": "tiled",
}
# Counted by a dispatch mode, and tried on two CPU ranks: Liger-Kernel ead96b61 and DeepSpeed 0.19.8 with torch 2.13, 2026-08.
OF_ALTERNATIVES = {
    "products, of T H I": ["9", "11", "12", "12", "**11**"],
    "products in a checkpoint (non-reentrant)": ["11", "", "15", "15", "**11**"],
    "DDP": ["yes", "yes", "no", "no", "yes"],
    "FSDP2 around layers": ["yes", "yes", "yes", "yes", "yes"],
    "ZeRO-3": ["yes", "yes", "no", "yes, where shards divide", "yes"],
    "dropout inside": ["yes", "yes", "wrong", "wrong", "yes"],
    "`torch.compile(fullgraph=True)`": ["yes", "yes", "no", "no", "yes"],
    "hooks of a weight fire": ["once", "once", "once a shard", "once a shard", "once"],
}


def alternatives_table(records: list[Record]) -> str:
    """Return what one MLP takes in PyTorch, plain, checkpointed and tiled by others and here: records, and what was tried."""
    measured, accuracy = (latest(records, kind, "tiled_torch") for kind in ("mlp", "accuracy"))
    if measured is None or accuracy is None:
        return "No record yet.\n"
    workload = measured["results"][0]["workload"]
    of_mlp = {row["variant"]: row for row in measured["results"] if row["workload"] == workload}
    errors = {row["variant"]: row for row in accuracy["results"] if "left_out" not in row}

    def cells(rows: dict[str, Record], name: str, show: Callable[[float], str]) -> list[str]:
        found = [rows.get(variant, {}).get(name) for variant in ALTERNATIVES.values()]
        return ["" if value is None else show(value) for value in found]

    numbers = {
        "peak MiB (a)": cells(of_mlp, "peak_bytes", lambda size: f"{size / MIB:.0f}"),
        "time / plain (a)": cells(of_mlp, "ratio_to_plain", lambda ratio: f"{ratio:.2f}"),
        "worst weight-gradient error, bfloat16 (b)": cells(errors, "worst_weight_error", lambda error: f"{error:.2%}"),
    }
    rows = [[name, *found] for name, found in {**numbers, **OF_ALTERNATIVES}.items()]
    shards = accuracy["results"][0]["shards"]
    notes = f"(a) {workload}, float32, on a CPU, `keep=0`. (b) {shards} shards, against float64.\n"
    notes += (
        "Below them: Liger-Kernel ead96b61 and DeepSpeed 0.19.8, tried on a CPU and on two ranks of it in 2026-08.\n"
    )
    return _rows(["", *ALTERNATIVES], rows, measured) + notes


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


def simulated_table(records: list[Record]) -> str:
    """Bytes of a GPU by the formulas beside those of the newest simulation of every model, length and number of GPUs."""
    found: dict[tuple[Any, ...], tuple[Record, Record]] = {}
    for record in records:
        if record["kind"] == PLAN_KIND:
            for result in record["results"]:
                found[record["half"], result["model"], result["tokens"], result["gpus"]] = record, result
    if not found:
        return "No record yet.\n"
    rows = []
    for (half, model, tokens, gpus), (_, result) in sorted(
        found.items(), key=lambda item: (item[0][:2], item[0][3], item[0][2])
    ):
        predicted = predicted_device(MODELS[model], simulated_setting(result))
        sizes = [size / GIB for size in (predicted, result["simulated_bytes"], result["simulated_host_bytes"])]
        ratio = predicted / result["simulated_bytes"]
        rows.append([half, model, f"{tokens}", f"{gpus}", *(f"{size:.1f}" for size in sizes), f"{ratio:.3f}"])
    header = ["half", "model", "tokens", "GPUs", "formulas, GiB a GPU", "simulated", "and on the host", "ratio"]
    newest = {record["half"]: record for record, _ in sorted(found.values(), key=lambda pair: pair[0]["date"])}
    return _rows(header, rows, *(newest[half] for half in sorted(newest)))


def published_table() -> str:
    """Return what others have published beside what `plan` says of the same hardware and setup."""
    rows = []
    for each in PUBLISHED:
        planned = each.planned()
        numbers = [
            f"{each.figure:g} {each.unit}",
            f"{planned:.0f} {each.unit}" if planned >= 1000 else f"{planned:.3g} {each.unit}",
            f"{planned / each.figure:.2f}",
        ]
        rows.append([each.source, each.what, *numbers, each.assumption])
    rows += [[source, what, "", "not comparable", "", why] for source, what, why in NOT_COMPARABLE]
    return "\n".join(_lines(["source", "what", "published", "`plan`", "ratio", "assumptions"], rows)) + "\n"


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
    "model": lambda records: model_table(records, "float32"),
    "model-bfloat16": lambda records: model_table(records, "bfloat16"),
    "alternatives": alternatives_table,
    "gpu-mlp": lambda records: gpu_table(records, "mlp"),
    "gpu-mlp-short": lambda records: gpu_table(records, "mlp", SHORT),
    "gpu-mlp-jax": lambda records: gpu_table(records, "mlp-jax"),
    "gpu-loss": lambda records: gpu_table(records, "loss"),
    "gpu-loss-jax": lambda records: gpu_table(records, "loss-jax"),
    "gpu-loss-ignored-jax": lambda records: gpu_table(records, "loss-ignored-jax"),
    "gpu-layers-jax": lambda records: gpu_table(records, "layers-jax"),
    "gpu-layers": lambda records: gpu_table(records, "layers"),
    "gpu-kernels": kernels_table,
    "gpu-model": lambda _: expected_table(),
    "plan": simulated_table,
    "published": lambda _: published_table(),
    "demo": lambda records: demo_table(records, "demo"),
    "demo-long": lambda records: demo_table(records, "demo-long"),
}


def render(text: str, records: list[Record]) -> str:
    """Return the text with every marked table made anew; KeyError for a table nobody makes."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]](records) + match[3], text)


def documents() -> list[Path]:
    """Return the files that may hold tables: the README and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Rewrites the tables of all documents."""
    records = read_records(RECORDS)
    for path in documents():
        text = path.read_text(encoding="utf-8")
        written = render(text, records)
        if written != text:
            path.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
