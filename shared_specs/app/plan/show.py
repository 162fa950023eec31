"""`plan` as tables, as JSON and as a picture."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from shared_specs.app.options import InputError, PlanOptions
from shared_specs.app.plan.decoder import Decoder, check_planned, check_tensor, decoder_named
from shared_specs.app.plan.search import Plan, memory_of, plan
from shared_specs.app.plan.setting import what_to_set as what_to_set
from shared_specs.app.plan.simulated import Simulator, beside_simulation
from shared_specs.app.plan.step import Parts
from shared_specs.app.progress import GIB, show_bytes
from shared_specs.config import Half

_BAR = 40  # columns of the longest bar
_NOTE = (
    "Communication and copies to the host are in no time; the reserve is for CUDA, the "
    "communication library and the allocator."
)


def show_plan(
    options: PlanOptions,
    half: Half,
    simulator: Callable[[], Simulator] | None = None,
    other: Callable[[dict[str, Any], str], Decoder] | None = None,
) -> int:
    """Print the plan that the options ask for and return the exit code: 1 where the context fits with no setting.

    simulator: imports that of the half; None where there is none. other: as `decoder_named` takes it.
    """
    if options.simulate and simulator is None:
        raise InputError(
            "plan: --simulate must be left out here. A half's step is what runs: python -m tiled_torch plan."
        )
    found = plan_of(options, half, other)
    if options.simulate and found.decoder.by_structure:
        raise InputError(
            f"plan: --simulate must be left out for {found.decoder.kind}, which has no model of its sizes."
        )
    beside = None
    if options.simulate and simulator is not None and found.setting is not None:
        beside = beside_simulation(found.decoder, found.setting, simulator())
    stored = as_json(found) | ({} if beside is None else {"simulated": beside})
    if options.out is not None:
        _write(found, stored, Path(options.out))
    if options.json:
        print(json.dumps(stored, indent=2))
    else:
        console = Console()
        _print(found, options, console)
        if beside is not None:
            console.print(_beside(beside))
    return 0 if found.setting is not None else 1


def plan_of(options: PlanOptions, half: Half, other: Callable[[dict[str, Any], str], Decoder] | None = None) -> Plan:
    """Return the plan; InputError where the model or the GPU is unknown, or the half has no formulas of it."""
    memory, gpu = memory_of(options.gpu, "plan: --gpu")
    decoder = decoder_named(options.model, other)
    check_planned(decoder, half, options.gpus)
    if options.tp is not None:
        check_tensor(decoder, options.tp, options.gpus, half)
    return plan(
        decoder,
        options.tokens,
        memory=memory,
        host=options.host,
        gpus=options.gpus,
        gpu=gpu,
        half=half,
        tp=options.tp,
        sequences=options.sequences,
        dtype=options.dtype,
        optimizer=options.optimizer,
        shard_tokens=options.shard_tokens,
    )


def as_json(found: Plan) -> dict[str, Any]:
    """Return the plan as plain values; bytes and seconds are numbers."""
    sizes = asdict(found.decoder)
    sizes |= {"measured": found.decoder.measured is not None, "caps": list(found.decoder.caps)}
    del sizes["lists"], sizes["whole"]  # paths in the code of a model, and a function
    if found.decoder.held is None:
        del sizes["held"]
    return {
        "model": sizes | {"parameters": found.decoder.parameters},
        "tokens": found.tokens,
        "gpus": found.gpus,
        "memory_bytes": found.memory,
        "set": None if found.setting is None else asdict(found.setting),
        "bytes": None if found.parts is None else _bytes(found.parts),
        "seconds": found.seconds,
        "longest": [
            {"lever": r.lever, "tokens": r.tokens, "set": asdict(r.setting), "bytes": _bytes(r.parts)}
            for r in found.reach
        ],
    }


def _bytes(parts: Parts) -> dict[str, int]:
    return parts.by_name | {"total": parts.total, "host": parts.host}


def _print(found: Plan, options: PlanOptions, console: Console) -> None:
    head = f"{options.model}, {found.decoder.parameters / 1e9:.2f}e9 parameters, {found.tokens} tokens"
    console.print(f"{head}, {found.gpus} x {options.gpu} ({show_bytes(found.memory)} each)", highlight=False)
    if found.setting is None or found.parts is None:
        console.print("Does not fit with any setting. More GPUs, or fewer tokens: see the longest contexts.")
        if found.gpus > 1 and found.tokens % found.gpus:
            console.print(f"GPUs share a sequence only in equal parts: a multiple of {found.gpus} tokens may fit.")
    else:
        table = Table(box=SIMPLE, title="What to set", title_justify="left", show_header=False)
        for row in what_to_set(found.setting, found.parts.host):
            table.add_row(*row)
        console.print(table)
        console.print(_bars(found.parts, found.memory))
        if found.seconds is not None:
            sequences = found.setting.sequences * found.setting.data
            rate = sequences * found.tokens / found.seconds
            console.print(f"A step should take {found.seconds:,.0f} s at least: {rate:.0f} tokens/s.", highlight=False)
    table = Table(box=SIMPLE, title="Longest context, all GPUs in one", title_justify="left")
    for name in ("with", "tokens", "GPU", "host"):
        table.add_column(name, justify="left" if name == "with" else "right")
    for reach in found.reach:
        row = (f"{reach.tokens}", show_bytes(reach.parts.total), show_bytes(reach.parts.host))
        table.add_row(reach.lever, *row)
    console.print(table)
    console.print(f"{found.note} {_NOTE}")


def _bars(parts: Parts, memory: int) -> Table:
    table = Table(box=SIMPLE, title="Bytes on each GPU at the peak", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    for name, size in parts.by_name.items():
        table.add_row(name, show_bytes(size), "#" * round(_BAR * size / memory))
    table.add_row("total", show_bytes(parts.total), f"{100 * parts.total / memory:.0f} % of {show_bytes(memory)}")
    if parts.host:
        table.add_row("host", show_bytes(parts.host), "in host memory, for each GPU")
    return table


def _beside(beside: Mapping[str, Any]) -> Table:
    """The formulas and the simulation next to each other, and what is on the device at the simulation's peak."""
    run = beside["set"]
    title = f"Simulated: {run['half']}, {run['dtype']}, on a {run['device']}; the peak is in: {beside['peak']}"
    table = Table(box=SIMPLE, title=title, title_justify="left")
    for name in ("bytes on each GPU", "formulas", "simulated", "formulas / simulated"):
        table.add_column(name, justify="left" if name.startswith("bytes") else "right")
    ratio = beside["predicted_bytes"] / beside["simulated_bytes"]
    sizes = (show_bytes(beside[f"{name}_bytes"]) for name in ("predicted", "simulated"))
    table.add_row("without the reserve", *sizes, f"{ratio:.3f}")
    table.add_row("host", *(show_bytes(beside[f"{name}_host_bytes"]) for name in ("predicted", "simulated")), "")
    for name, size in beside["moments"][beside["peak"]].items():
        table.add_row(f"  {name}", "", show_bytes(size), "")
    for name, count in beside["collectives"].items():
        table.add_row(f"  {name}", "", f"{count} times", "")
    return table


def _write(found: Plan, stored: Mapping[str, Any], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        _draw(found, folder / "plan.png")
    except OSError as error:
        raise InputError(f"plan: --out cannot be written to: {error.strerror or error} ({folder}).") from error


def _draw(found: Plan, path: Path) -> None:
    """One bar for each lever at the longest context that it reaches, its parts above one another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from shared_specs.app.plots import save_figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    labels = [f"{reach.lever}\n{reach.tokens} tokens" for reach in found.reach]
    starts = [0.0] * len(labels)
    for name in found.reach[0].parts.by_name if found.reach else ():
        sizes = [reach.parts.by_name[name] / GIB for reach in found.reach]
        axes.barh(labels, sizes, left=starts, label=name)
        starts = [a + b for a, b in zip(starts, sizes, strict=True)]
    axes.axvline(found.memory / GIB, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel(f"GiB on each of {found.gpus} GPUs at the longest context (formulas)")
    if found.reach:
        axes.legend(ncols=3, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15))
    save_figure(figure, path)
