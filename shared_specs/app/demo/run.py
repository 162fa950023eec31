"""`python -m shared_specs.app.demo [--long]`: the main job, plain against tiled, in PyTorch and in JAX.

Four fine-tuning runs of the same model on the same text, one after another in processes of their own, have to show the
same losses; then single steps at longer contexts, each with one more thing tiled, whose memory is drawn on what was
predicted of it. With --long, one step of twice the positions the model was made for, in both halves, each layer recomputed
in backward, in little memory.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from shared_specs.app.demo.contexts import VARIANTS
from shared_specs.app.demo.report import Result, Run, picture, record, table, verdict
from shared_specs.app.finetune.log import read_log, step_records
from shared_specs.app.memory import machine_bytes
from shared_specs.app.progress import show_bytes

OUT = Path("out/demo")
STEPS, TOKENS, SHARDS = 2, 1024, 4
LONG_TOKENS, LONGEST_TOKENS, LONG_SCALE = 6144, 16384, 2
# Of each variant the contexts of single steps: together with the four short runs what ten minutes have room for, also on a
# machine half as fast as most.
CONTEXTS = {
    "plain": (2048,),
    "checkpointed": (3072,),
    "tiled": (3072,),
    "block-tiled": (3072, LONG_TOKENS),
}
LONGEST_PEAK_BYTES = 6 * 10**9  # what `--long` may take
HALVES = {"PyTorch": "tiled_torch", "JAX": "tiled_jax"}


def short_runs() -> list[Run]:
    """Plain and tiled in both halves."""
    flags = ("--tokens", str(TOKENS), "--steps", str(STEPS))
    return [
        Run(
            label=f"{half} {kind}",
            package=package,
            flags=(*flags, *extra),
            variant="plain" if (half, kind) == ("PyTorch", "plain") else None,
        )
        for half, package in HALVES.items()
        for kind, extra in (("plain", ("--plain",)), ("tiled", ("--num-shards", str(SHARDS))))
    ]


def context_runs() -> list[Run]:
    """Return one step of PyTorch at each of `CONTEXTS`, the longest last."""
    return [
        Run(
            label=f"PyTorch {variant}",
            package=HALVES["PyTorch"],
            flags=("--tokens", str(tokens), "--steps", "1", *VARIANTS[variant].flags),
            long=tokens == LONG_TOKENS,
            variant=variant,
        )
        for variant, contexts in CONTEXTS.items()
        for tokens in contexts
    ]


def long_run(half: str, tokens: int, *extra: str) -> Run:
    """Return one tiled step of `--long`."""
    flags = ("--tokens", str(tokens), "--steps", "1", "--rope-scale", str(LONG_SCALE), *extra)
    return Run(label=f"{half} tiled", package=HALVES[half], flags=flags, long=True)


def execute(run: Run, folder: Path, console: Console) -> Result | None:
    """Run one process to its end, its lines shown as they come; None where it failed."""
    steps, tokens = (run.flags[run.flags.index(name) + 1] for name in ("--steps", "--tokens"))
    out = folder / run.label.replace(" ", "-") / tokens
    fixed = ("--device", "cpu", "--seed", "0", "--save-every", "0")
    words = ["-m", run.package, "finetune", *run.flags, *fixed, "--out", str(out)]
    console.rule(f"{run.label}, {tokens} tokens, {'one step' if steps == '1' else f'{steps} steps'}", align="left")
    code = subprocess.run([sys.executable, *words], env=os.environ | {"PYTHONUNBUFFERED": "1"}).returncode
    if code != 0:
        console.print(f"[bold]{run.label} ended with exit code {code}[/]")
        return None
    records = read_log(out)
    return Result(run=run, start=records[0], steps=step_records(records))


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 when every run ended well and all short runs had the same losses."""
    if arguments not in ([], ["--long"]):
        print("demo: the only option is --long: the long step in both halves, nothing else.", file=sys.stderr)
        return 2
    console = Console()
    runs = [*short_runs(), *context_runs()]
    if arguments:
        runs = [long_run(half, LONGEST_TOKENS, "--checkpointing") for half in HALVES]
    name = "demo-long" if arguments else "demo"
    began = time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory(prefix="tiled-demo-") as folder:
        for run in runs:
            result = execute(run, Path(folder), console)
            if result is None:
                return 1
            results.append(result)
    seconds = time.perf_counter() - began
    OUT.mkdir(parents=True, exist_ok=True)
    picture(results, OUT / f"{name}.png")
    (OUT / f"{name}.json").write_text(json.dumps(record(name, results, seconds), indent=1) + "\n")
    console.print(table(results))
    code = verdict(results, console, LONGEST_PEAK_BYTES if arguments else None)
    for result in results:
        if result.run.long:
            took = f"{result.steps[0]['seconds']:.0f} s"
            console.print(f"{result.run.label}: one step on {result.tokens} tokens in {took}.", highlight=False)
    last = f"This machine has {show_bytes(machine_bytes())}. {seconds:.0f} s in all; picture and numbers are in {OUT}."
    console.print(last, highlight=False, soft_wrap=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
