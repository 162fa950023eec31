"""The framework-free body of `tune`: candidates of a kernel's block sizes, timed in turn, and the entries they become."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shared_specs.app.gpu.bench import Pack, measuring, packing, record, show
from shared_specs.app.gpu.supervisor import Job, Rows
from shared_specs.app.options import InputError, TuneOptions
from shared_specs.kernels.blocks import CANDIDATES, TUNED, VARIABLE, Blocks, Kernels, Paths, user_table, write_tuned

# Seconds of one candidate that hangs or compiles too long; seconds that the ways to make an MLP may take.
FIRST_SECONDS = 30.0
PATHS_SECONDS = 40.0
TOY = {"hidden": 16, "intermediate": 32, "vocab": 50, "tokens": 130, "dtype": "float32", "repeats": 1}


def tune_on_gpu(
    options: TuneOptions,
    kernels: Kernels,
    half: str,
    packages: Iterable[str],
    ways: Iterable[str],
) -> int:
    """Times every candidate, then the ways to make an MLP with the fastest, and writes the table.

    An op none of whose candidates was right and in time keeps its entry. Returns 1 where a candidate was wrong.

    Args:
        ways: the fields of `Paths` that this half chooses. What is written is `options.table` or the user's own; with `toy` a
            copy of it.
    """
    table = _table_of(options)
    if options.toy:
        options = replace(options, **TOY)
    shapes = shapes_of(options, kernels)
    facts = {name: getattr(options, name) for name in ("hidden", "intermediate", "vocab", "tokens", "toy")}
    first = Job(
        name="tune",
        op="tune",
        groups=tuple(shapes),
        seconds=max(1.0, options.seconds - min(PATHS_SECONDS, options.seconds / 4)),
        repeats=options.repeats,
        dtype=options.dtype,
        first_seconds=FIRST_SECONDS,
        facts={**facts, "shards": [options.tokens]},
    )
    wrong = 0
    with _pack_of(options, f"tune-{half.removeprefix('tiled_')}") as pack:

        def measured(job: Job, seconds: float) -> tuple[Rows, dict[str, Any]]:
            ((_, rows, device),) = measuring([job], half, seconds, pack.log, toy=options.toy)
            show(job, rows)
            record(pack.folder, half, packages, job, rows, device)
            return rows, device

        rows, device = measured(first, first.seconds)
        wrong += sum("wrong" in row for row in rows)
        chosen = best_blocks(kernels, rows)
        known = {op: asdict(blocks) for op, blocks in chosen.items()}
        second = replace(first, name="paths", op="paths", groups=tuple(ways), seconds=PATHS_SECONDS)
        second = replace(second, facts={**second.facts, "blocks": known})
        rows, _ = measured(second, max(1.0, options.seconds - first.seconds))
        wrong += sum("wrong" in row for row in rows)
        key = {"kernels": kernels, "architecture": device.get("architecture", "sm_90"), "dtype": options.dtype}
        entries = [{**key, "op": op, "shape": list(shapes[op]), "blocks": known[op]} for op in known]
        parts: Any = best_paths(rows)
        if set(parts) == set(ways):
            shape = [options.intermediate, options.hidden]
            entries.append({**key, "op": "paths", "shape": shape, "paths": asdict(Paths(**parts))})
            print(", ".join(f"{part}: {way}" for part, way in parts.items()))
        if options.toy:
            copy = pack.folder / table.name
            copy.write_text(table.read_text() if table.exists() else "[]")
            table = copy
        write_tuned(entries, table)
        if table.parent != pack.folder:
            (pack.folder / table.name).write_text(table.read_text())
    print(f"{len(entries)} entries written to {table}")
    return 1 if wrong else 0


def _table_of(options: TuneOptions) -> Path:
    """Return the table to write.

    Raises:
        InputError: there is none, or it could not be written.
    """
    table = user_table() if options.table is None else Path(options.table)
    if options.toy:
        return table or Path(TUNED.name)  # of which a copy is written
    if table is None:
        raise InputError(f"tune: --table must be given where {VARIABLE} is empty, which says that there is no table.")
    place = next(folder for folder in table.absolute().parents if folder.exists())
    try:
        if table.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=place):
            return table
    except OSError as error:
        raise InputError(
            f"tune: --table must be a file that can be written, got {table} ({error.strerror})."
        ) from error


def shapes_of(options: TuneOptions, kernels: Kernels) -> dict[str, tuple[int, ...]]:
    """Return op -> what the launch wrappers look its blocks up by."""
    h, i = options.hidden, options.intermediate
    return {
        "dgated": (i, h),
        "glu_up": (i, h),
        "glu_up_aux": (i, h),
        "cross_entropy": (options.vocab,),
        "linear": (h, i),
        "dx": (h, i),
        "weight_gradient": (i, h) if kernels == "triton" else (h, i),  # a weight as its half lays it out
        "glu_elementwise": (i,),
    }


@contextmanager
def _pack_of(options: TuneOptions, name: str) -> Iterator[Pack]:
    """As `packing`; without --out nothing of it is kept but the table."""
    with contextlib.ExitStack() as stack:
        out = options.out or stack.enter_context(tempfile.TemporaryDirectory())
        with packing(Path(out), f"gpu-{name}", kept=options.out is not None) as pack:
            yield pack


def best_blocks(kernels: Kernels, rows: Rows) -> dict[str, Blocks]:
    """Op -> the fastest of its candidates that were right; an op without one is left out."""
    found: dict[str, Blocks] = {}
    for op in dict.fromkeys(row["group"] for row in rows):
        timed = [row for row in rows if row["group"] == op and "left_out" not in row and row["variant"].isdecimal()]
        if timed:
            fastest = min(timed, key=lambda row: row["median_seconds"])
            found[op] = CANDIDATES[kernels][op][int(fastest["variant"])]
            print(f"{op}: {', '.join(f'{name} {value}' for name, value in asdict(found[op]).items())}")
    return found


def best_paths(rows: Rows) -> dict[str, str]:
    """Part of an MLP -> the fastest way to make it among those a table can name."""
    found: dict[str, str] = {}
    for part in dict.fromkeys(row["group"] for row in rows):
        timed = [row for row in rows if row["group"] == part and "left_out" not in row and row["variant"] in WAYS[part]]
        if timed:
            found[part] = min(timed, key=lambda row: row["median_seconds"])["variant"]
    return found


# Part -> what `Paths` can say of it.
WAYS = {"up": ("vendor", "auxiliary", "dual"), "down": ("vendor", "dgated"), "weight_gradient": ("vendor", "kernel")}
