"""The documents' tables of a GPU: what records of `bench --device gpu` measured, and what the model of the time expects."""

from functools import partial
from typing import Any

from shared_specs.app.bench.records import latest, source_of
from shared_specs.app.gpu.layer_bytes import compiled_layers_bytes
from shared_specs.app.plan.decoder import Decoder
from shared_specs.kernels import roofline
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan

Record = dict[str, Any]
GIB = 2**30
# One MLP of Llama-3-8B, bfloat16, in shards of 8192 tokens.
GPU_SHAPE = mlp_costs.MLPShape(tokens=131072, hidden=4096, intermediate=14336, itemsize=2, weight_itemsize=2)
GPU_PLAN = ShardPlan(GPU_SHAPE.tokens, 8192)
_MLP = f"gpu-mlp-8b-{GPU_SHAPE.tokens}-{GPU_PLAN.shard_tokens}"
# Table -> (the half, the kinds of its records). Of a variant in several of them the first one's row is shown.
MEASURED = {
    "mlp": ("tiled_torch", (f"{_MLP}-main", f"{_MLP}-peers", f"{_MLP}-rest")),
    "mlp-jax": ("tiled_jax", (f"{_MLP}-main", f"{_MLP}-rest")),
    "loss": ("tiled_torch", ("gpu-loss-8b-32768-main", "gpu-loss-8b-32768-peers")),
    "loss-jax": ("tiled_jax", ("gpu-loss-8b-32768-main",)),
    "loss-ignored-jax": ("tiled_jax", ("gpu-loss-8b-32768-ignored",)),
    "layers": ("tiled_torch", ("gpu-layer-qwen3-8b-4-65536-main",)),
    "layers-jax": ("tiled_jax", ("gpu-layer-qwen3-8b-4-65536-main",)),
}
KERNELS = "gpu-kernels-8b"
EXPECTED: dict[str, tuple[roofline.MLPVariant, float]] = {
    "plain": ("plain", 0.0),
    "checkpoint": ("checkpoint", 0.0),
    "tiled, in a checkpoint too": ("tiled", 0.0),
    "tiled-keep-1": ("tiled", 1.0),
    "liger, deepspeed": ("whole", 0.0),
    "liger, deepspeed in a checkpoint": ("whole-in-checkpoint", 0.0),
}


# What the README shows.
SHORT = ("plain", "checkpoint", "liger", "liger-in-checkpoint", "tiled", "tiled-in-checkpoint", "tiled-keep-1")


def gpu_table(records: list[Record], name: str, only: tuple[str, ...] = ()) -> str:
    """Return time, rate and bytes of every variant that was measured, with the bytes that the formulas predicted.

    Of JAX the bytes are the temporary ones of the compiled program, of which the formula is an upper bound.

    Args:
        name: of MEASURED. only: variants, in this order; all of them where it is empty.
    """
    half, kinds = MEASURED[name]
    found = [record for kind in kinds if (record := latest(records, kind, half)) is not None]
    rows: dict[str, list[str]] = {}
    for result in (result for record in found for result in map(partial(_predicted, record), record["results"])):
        cells = [_left_out(result), *[""] * 4] if "left_out" in result else _cells(result)
        rows.setdefault(result["variant"], [result["variant"], *cells])
    if only:
        rows = {name: rows[name] for name in only if name in rows}
    if not rows:
        return "No record yet.\n"
    reference = next(iter(rows))
    size, behind = ("temporary", "at most") if half == "tiled_jax" else ("peak", "predicted")
    header = ["", "ms", f"time / {reference}", "TFLOP/s", f"{size} GiB", f"{behind} GiB"]
    return _table(header, list(rows.values()), found[0])


def _predicted(record: Record, result: Record) -> Record:
    """Return a result with the bytes that the formulas of today predict: when the layers of JAX were measured, they did not
    count what cuDNN's attention works with."""
    shape = record.get("shape", {})
    if "decoder" not in shape or record["half"] != "tiled_jax" or not result.get("predicted_bytes"):
        return result
    sizes = Decoder(**shape["decoder"]), shape["tokens"], shape["shard_tokens"], 2
    offload = result["variant"].endswith("offload")
    return result | {"predicted_bytes": compiled_layers_bytes(*sizes, offload=offload, device="gpu", cudnn=True)}


def _cells(result: Record) -> list[str]:
    used = result.get("peak_bytes") or result.get("temp_bytes")
    ratio = next(value for name, value in result.items() if name.startswith("ratio_to_"))
    sizes = (used, result.get("predicted_bytes"))
    return [
        f"{1e3 * result['median_seconds']:.1f}",
        f"{ratio:.2f}",
        f"{result['tflops']:.0f}" if result.get("tflops") else "",
        *("" if not size else f"{size / GIB:.2f}" for size in sizes),
    ]


def _left_out(result: Record) -> str:
    return "wrong" if result["left_out"].startswith("wrong") else "not measured"


def kernels_table(records: list[Record]) -> str:
    """Return every kernel of one shard beside the library's form, in both halves: milliseconds, and the rate."""
    rows, source = [], None
    for half, name in (("tiled_torch", "PyTorch"), ("tiled_jax", "JAX")):
        record = latest(records, KERNELS, half)
        source = source or record
        for result in record["results"] if record else ():
            if "median_seconds" in result:
                rate = f"{result['tflops']:.0f} TFLOP/s" if result.get("tflops") else None
                rate = rate or f"{result['gbytes_per_second']:.0f} GB/s"
                milliseconds = f"{1e3 * result['median_seconds']:.3f}"
                rows.append([f"{name}, {result['group']}", result["variant"], milliseconds, rate])
    if source is None:
        return "No record yet.\n"
    return _table(["", "by", "ms", "rate"], rows, source)


def expected_table() -> str:
    """Return the milliseconds that the model of the time expects of every variant of one MLP, on large GPUs."""
    gpus = [roofline.GPUS[name] for name in ("a100", "h100", "h200", "b200")]
    lines = ["| ms by the model | " + " | ".join(gpu.name for gpu in gpus) + " |"]
    lines.append("| --- " * (1 + len(gpus)) + "|")
    for name, (variant, keep) in EXPECTED.items():
        runs = [roofline.mlp_seconds(GPU_SHAPE, GPU_PLAN, gpu, variant=variant, keep=keep) for gpu in gpus]
        lines.append(f"| {name} | " + " | ".join(f"{1e3 * run.total:.0f}" for run in runs) + " |")
    return "\n".join(lines) + "\n"


def _table(header: list[str], rows: list[list[str]], source: Record) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    return "\n".join([*lines, "", f"{source['gpu']['name']}; {source_of(source)}", ""])
