"""`bench --device gpu` of both halves: which jobs in which order, one record a job, and one archive of them all."""

import os
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.bench.workloads import GPUSizes
from shared_specs.app.gpu.supervisor import Job, Rows, run_jobs
from shared_specs.app.options import BenchOptions, InputError
from shared_specs.app.plan.decoder import MODELS, Decoder

# What is measured, the most telling first; every width has its turn in each, so that no width comes last as a whole.
# (op, group of it, seconds that a job of the narrowest width may take).
STAGES = (
    ("mlp", "main", 40.0),
    ("kernels", "", 75.0),
    ("loss", "main", 30.0),
    ("mlp", "peers", 45.0),
    ("layer", "main", 60.0),
    ("layer", "long", 75.0),
    ("loss", "ignored", 20.0),
    ("loss", "peers", 40.0),
    ("mlp", "rest", 60.0),
    ("mlp", "sweep", 20.0),
)
# A width has so much more time than the narrowest one for every doubling of its products; kernels are short, and what
# takes time is to compile them.
WIDER = 1.3
# What kernels are measured for.
KERNEL_GROUPS = ("ceilings", "up", "down", "glu", "glu_backward", "cross_entropy", "linear", "dx", "weight_gradient")
NO_TIME = "no time was left for it"
# The layers that op "layer" runs, and their tokens, by group: several layers at so few tokens that attention does not hide
# the rest, and one of a long context.
LAYER_MODEL, LAYERS = "qwen3-8b", {"main": (4, 65536), "long": (1, 262144)}
TOY_DECODER = Decoder(hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocab=8, kind="qwen3")
# XLA compiles, and tries its library's algorithms, for seconds a variant.
COMPILING = {"tiled_jax": 2.0}
# What one variant that hangs may take: of a job's seconds, and of those of one with many kernels.
HANGING = 0.4
KERNEL_SECONDS = 25.0


def mlp_workloads(tokens: tuple[int, ...], shards: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (tokens, tokens of a shard): the longest context first, then every shard length at the second, then the others."""
    default = shards[-2]
    sweep = [(tokens[1], shard) for shard in shards if shard <= tokens[1]]
    return [(tokens[-1], default), *sweep, *((total, default) for total in tokens[:-1] if total != tokens[1])]


def bench_jobs(options: BenchOptions, half: str) -> list[Job]:
    """Return the jobs of `--op` in their order."""
    sizes, groups = options.sizes(), options.chosen_groups()
    return [
        job
        for op, group, seconds in STAGES
        if options.op in ("all", op) and (not group or group in groups) and (group or options.groups is None)
        for job in (
            _of_layers(group, seconds * COMPILING.get(half, 1.0), sizes, options)
            if op == "layer"
            else _of_stage(op, group, seconds * COMPILING.get(half, 1.0), sizes, options)
        )
    ]


def _of_layers(group: str, seconds: float, sizes: GPUSizes, options: BenchOptions) -> Iterator[Job]:
    layers, tokens = LAYERS[group]
    decoder = TOY_DECODER if options.toy else replace(MODELS[LAYER_MODEL], layers=layers)
    tokens = sizes.tokens[0] if options.toy else tokens
    name = "toy" if options.toy else LAYER_MODEL
    facts = {"model": name, "decoder": asdict(decoder), "tokens": tokens, "shard_tokens": sizes.shards[-2]}
    yield Job(
        name=f"{name}-{decoder.layers}-{tokens}-{group}",
        op="layer",
        groups=(group,),
        seconds=seconds,
        repeats=1 if group == "long" else options.gpu_turns("layer"),
        dtype=sizes.dtype,
        facts={**facts, "toy": options.toy},
    )


def _of_stage(op: str, group: str, seconds: float, sizes: GPUSizes, options: BenchOptions) -> Iterator[Job]:
    narrowest = min(h * i for h, i in sizes.widths.values())
    workloads = mlp_workloads(sizes.tokens, sizes.shards)
    # (tokens, tokens of a shard): kernels see one shard, a loss the second of the lengths, at every shard length.
    points = {
        "kernels": [(sizes.shards[-2], sizes.shards[-2])],
        "loss": [(sizes.tokens[1], 0)],
        "mlp": workloads[1:] if group == "sweep" else workloads[:1],
    }[op]
    for total, shard in points:
        for name, (h, i) in sizes.widths.items():
            facts = {"tokens": total, "hidden": h, "intermediate": i, "vocab": sizes.vocab, "shard_tokens": shard}
            longest = seconds * (1.0 if op == "kernels" else WIDER ** _doublings(h * i, narrowest))
            label = {"kernels": name, "loss": f"{name}-{total}"}.get(op, f"{name}-{total}-{shard}")
            yield Job(
                name=label if not group else f"{label}-{group}",
                op=op,
                groups=(group,) if group else KERNEL_GROUPS,
                seconds=longest,
                first_seconds=KERNEL_SECONDS if op == "kernels" else HANGING * longest,
                repeats=options.gpu_turns(op),
                dtype=sizes.dtype,
                facts={**facts, "shards": list(sizes.shards), "width": name, "toy": options.toy},
            )


def _doublings(products: int, narrowest: int) -> int:
    return max(0, (products // narrowest).bit_length() - 1)


def bench_on_gpu(options: BenchOptions, half: str, packages: Iterable[str], **facts: Any) -> int:
    """Measures, writes a record a job and packs all of them; 1 where a variant of the project's own was wrong."""
    jobs = bench_jobs(options, half)
    name = f"gpu-{half.removeprefix('tiled_')}-{options.op}"
    wrong = 0
    with packing(Path(options.out), name) as pack:
        with closing(measuring(jobs, half, options.seconds, pack.log, toy=options.toy)) as measured:
            for job, rows, device in measured:
                show(job, rows)
                wrong += sum("wrong" in row for row in rows)
                if any(row.get("left_out") != NO_TIME for row in rows):
                    record(pack.folder, half, packages, job, rows, device, **facts)
                pack.write()
    if wrong:
        print(f"{wrong} results were wrong: their rows say which", flush=True)
    return 1 if wrong else 0


def measuring(
    jobs: Sequence[Job], half: str, seconds: float, log: Path, *, toy: bool
) -> Generator[tuple[Job, Rows, dict[str, Any]], None, None]:
    """`run_jobs` with a half's workers. toy: on the CPU, Triton's kernels in its interpreter."""
    command = [sys.executable, "-m", f"{half}.commands.gpu.worker"]
    if toy:
        env = {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return run_jobs(jobs, command, seconds, log, env=env, spare=False)
    env = {"TRITON_INTERPRET": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return run_jobs(jobs, command, seconds, log, env=env)


def record(
    folder: Path, half: str, packages: Iterable[str], job: Job, rows: Rows, device: Mapping[str, Any], **facts: Any
) -> Path:
    """Write the record of one job."""
    shape = {**job.facts, "dtype": job.dtype}
    made = make_record(f"gpu-{job.op}-{job.name}", half, packages, rows, gpu=dict(device), shape=shape, **facts)
    return write_record(folder, made)


def show(job: Job, rows: Rows) -> None:
    """A short line a row: what comes back of a run on a machine that is lent may be the end of its output alone."""
    print(f"{job.op} {job.name}", flush=True)
    group = ""
    for row in rows:
        if row["group"] != group and len(job.groups) > 1:
            group = row["group"]
            print(f" {group}")
        print(f"  {row['variant']:<24.24} {_figures(row)}", flush=True)


def _figures(row: Mapping[str, Any]) -> str:
    if "left_out" in row:
        return f"left out: {row['left_out']}"[:110]
    ratio = row[f"ratio_to_{row['reference']}"]
    parts = [f"{1e3 * row['median_seconds']:9.3f} ms x{ratio:.3f}"]
    parts += [f"{row['tflops']:.0f} TFLOP/s"] if row.get("tflops") else []
    parts += [f"{row['gbytes_per_second']:.0f} GB/s"] if row.get("gbytes_per_second") else []
    parts += [f"{row['of_the_model']:.0%} of model"] if row.get("of_the_model") else []
    parts += [f"{row['peak_bytes'] / 2**30:.2f} GiB"] if row.get("peak_bytes") else []
    parts += [f"err {max(row['errors'].values()):.0e}"] if row.get("errors") else []
    return " ".join(parts)


class Pack:
    """A folder that records and logs are written into, and the archive that is made of it again and again."""

    def __init__(self, folder: Path, archive: Path) -> None:
        self.folder, self.archive, self.log = folder, archive, folder / "worker.log"

    def write(self) -> None:
        """The archive as of now; the one before stays until it is whole."""
        partial = self.archive.with_suffix(".partial")
        with tarfile.open(partial, "w:gz") as tar:
            for path in sorted(self.folder.iterdir()):
                tar.add(path, arcname=f"{self.archive.name.partition('.')[0]}/{path.name}")
        os.replace(partial, self.archive)


@contextmanager
def packing(out: Path, name: str, *, kept: bool = True) -> Iterator[Pack]:
    """Yield a `Pack` whose archive is written whatever happens, a signal to end included, unless the call is refused.

    kept: it says where that is.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="tiled-gpu-"))
    pack = Pack(folder, out / f"{name}-{stamp}.tar.gz")
    before = signal.getsignal(signal.SIGTERM)

    def end(*_: object) -> None:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, end)
    refused = False
    try:
        yield pack
    except InputError:
        refused = not any(folder.glob("*.json"))  # before anything was measured
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if not refused:
            pack.write()
            if kept:
                print(f"archive: {pack.archive}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
