"""The picture of the documents, memory against context, from the newest record of the demo.

`python -m shared_specs.app.demo.document_picture` writes it in place; a test fails when it shows another record.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shared_specs.app.bench.records import read_records
from shared_specs.app.bench.tables import RECORDS, ROOT, Record, latest
from shared_specs.app.demo.contexts import VARIANTS, Measured, draw_contexts
from shared_specs.app.models.model_config import complete_config
from shared_specs.app.plan.decoder import MODELS
from shared_specs.app.plots import save_figure

PICTURE = ROOT / "docs" / "images" / "memory.png"
DATA = "Description"  # the term of the PNG under which its numbers stand
HALF = "PyTorch "


def data_of(records: list[Record]) -> dict[str, Any]:
    """Return what the picture shows: the first steps of PyTorch's runs, by variant.

    Bytes that a process has before it loads the model are the prediction of the shortest plain run less the model's.
    """
    record = latest(records, "demo")
    if record is None:
        raise ValueError("document_picture: a record of the demo must be there, got none. Run make demo.")
    runs = [run for run in record["results"] if run["label"].removeprefix(HALF) in VARIANTS]
    plain = min((run for run in runs if run["label"] == f"{HALF}plain"), key=lambda run: run["tokens"])
    predicted = plain.get("first_step_bytes_predicted") or plain["peak_bytes_predicted"]
    before = predicted - VARIANTS["plain"].model_bytes(model_config(), plain["tokens"])
    points = [
        {"variant": run["label"].removeprefix(HALF), "tokens": run["tokens"], "peak_bytes": peak}
        for run in runs
        if (peak := _first_peak(run)) is not None and _predicted(run) is not None
    ]
    return {
        "record": record["date"],
        "machine_bytes": record["hardware"]["memory_bytes"],
        "before": before,
        "points": points,
    }


def _first_peak(run: dict[str, Any]) -> int | None:
    """Return the peak of the first step; older records have it of runs of one step alone."""
    return run.get("first_step_peak_bytes") or (run["peak_bytes"] if len(run["losses"]) == 1 else None)


def _predicted(run: dict[str, Any]) -> int | None:
    """Return what was predicted; None of a run that is no point of the demo's own picture."""
    return run.get("first_step_bytes_predicted") or run.get("peak_bytes_predicted")


def model_config() -> dict[str, Any]:
    """Return the demo's model in Hugging Face terms."""
    sizes = MODELS["smollm2-135m"]
    terms = {
        "model_type": "llama",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab,
        "tie_word_embeddings": True,
    }
    return complete_config(terms, "smollm2-135m")


def draw(data: dict[str, Any], path: Path) -> None:
    """Write the picture with its data inside."""
    figure = Figure(figsize=(7, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    points = [Measured(**point) for point in data["points"]]
    axes = figure.subplots()
    draw_contexts(axes, model_config(), data["before"], points, machine=data["machine_bytes"])
    axes.set_title("SmolLM2-135M, float32: peak memory of a step in PyTorch (GiB)")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, {DATA: json.dumps(data)})


if __name__ == "__main__":
    draw(data_of(read_records(RECORDS)), PICTURE)
