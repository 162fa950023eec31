"""`python -m tiled_torch tune`: measures the kernels' block sizes for one model's widths and writes them to the table.

For every op the candidates of `shared_specs.blocks` run interleaved on one shard of random data, on buffers of their own:
kernels that work in place never see live values. Then the ways to make the MLP are compared with the chosen blocks.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shared_specs.app.tune import best_blocks, fastest
from shared_specs.blocks import TUNED, Blocks, Paths, write_tuned
from shared_specs.cli import InputError, TuneOptions
from tiled_torch.commands.bench_gpu import EventClock, Sizes, kernel_runs, logits_runs
from tiled_torch.kernels import launch

# Which question of `kernel_runs` an op answers, by which of its variants.
_QUESTIONS = {
    "glu_up": ("up", "dual"),
    "glu_up_aux": ("up", "auxiliary"),
    "glu_elementwise": ("glu_backward", "kernel"),
    "dgated": ("down", "dgated"),
    "dx": ("dx", "kernel"),
    "linear": ("linear", "kernel"),
    "weight_gradient": ("weight_gradient", "kernel"),
}


def tune(options: TuneOptions) -> int:
    """Measures on the GPU at hand; InputError without one."""
    if not torch.cuda.is_available():
        raise InputError("tune: a GPU must be there that PyTorch sees, got none.")
    return tune_on(options, torch.device("cuda"), Path(TUNED))


def tune_on(options: TuneOptions, device: torch.device, table: Path) -> int:
    """What `tune` does, on any device, written to any table."""
    dtype = getattr(torch, options.dtype)
    sizes = Sizes(name="tune", tokens=options.tokens, hidden=options.hidden, width=options.intermediate)
    logits = Sizes(name="tune", tokens=max(1, options.tokens // 2), hidden=options.hidden, width=options.vocab)
    key = {"kernels": "triton", "architecture": launch.architecture(device), "dtype": options.dtype}
    h, i = options.hidden, options.intermediate
    # As the launch wrappers ask: see blocks_for.
    shapes = {
        "glu_up": (i, h),
        "glu_up_aux": (i, h),
        "glu_elementwise": (i,),
        "dgated": (i, h),
        "dx": (h, i),
        "linear": (h, i),
    }
    shapes |= {"weight_gradient": (i, h), "cross_entropy": (options.vocab,)}
    questions = {name: runs for name, (runs, _) in kernel_runs(sizes, dtype, device).items()}
    clock, entries = EventClock(device), []
    try:
        for op, (question, variant) in _QUESTIONS.items():
            chosen = best_blocks("triton", op, _trying(op, questions[question][variant]), clock, options.repeats)
            launch.trying[op] = chosen
            entries.append({**key, "op": op, "shape": list(shapes[op]), "blocks": asdict(chosen)})
        run = _trying("cross_entropy", logits_runs(logits, dtype, device)["kernel"])
        chosen = best_blocks("triton", "cross_entropy", run, clock, options.repeats)
        entries.append({**key, "op": "cross_entropy", "shape": [options.vocab], "blocks": asdict(chosen)})
        paths = Paths(
            up=fastest({n: questions["up"][n] for n in ("vendor", "auxiliary", "dual")}, clock, options.repeats),  # type: ignore[arg-type]
            down=fastest({n: questions["down"][n] for n in ("vendor", "dgated")}, clock, options.repeats),  # type: ignore[arg-type]
            weight_gradient=fastest(
                {n: questions["weight_gradient"][n] for n in ("vendor", "kernel")}, clock, options.repeats
            ),  # type: ignore[arg-type]
        )
        entries.append({**key, "op": "paths", "shape": [i, h], "paths": asdict(paths)})
    finally:
        launch.trying.clear()
    write_tuned(entries, table)
    print(f"{len(entries)} entries written to {table}; commit it together with a record of `make gpu PART=kernels`")
    return 0


def _trying(op: str, run: Callable[[], Any]) -> Callable[[Blocks], Callable[[], None]]:
    def with_blocks(blocks: Blocks) -> Callable[[], None]:
        def launch_with_them() -> None:
            launch.trying[op] = blocks
            run()

        return launch_with_them

    return with_blocks
