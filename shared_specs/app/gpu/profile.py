"""`python -m shared_specs.app.gpu.profile`: Triton's dgated once under Nsight Compute, where `ncu` is there.

It fails nothing: a machine without `ncu`, or one that does not let it read the counters, is told, and so is a profile that
took too long.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared_specs.app.gpu.parity import bounded

SECONDS = 75.0


def command(ncu: str, report: Path, scratch: Path) -> list[str]:
    """Return the command that profiles the first launch of dgated in the benchmark of the kernels, with every section."""
    profiler = [
        ncu,
        "--target-processes",
        "all",
        "--kernel-name",
        "regex:dgated",
        "--launch-count",
        "1",
        "--kill",
        "yes",
    ]
    profiled = [sys.executable, "-m", "tiled_torch", "bench", "--device", "gpu", "--op", "kernels", "--widths", "8b"]
    return [*profiler, "--set", "full", "--force-overwrite", "--export", str(report), *profiled, "--out", str(scratch)]


def profile(out: Path, seconds: float = SECONDS) -> bool:
    """Return whether a report, `gpu-dgated.ncu-rep`, was left in `out`."""
    ncu = shutil.which("ncu")
    if ncu is None:
        print("profile: ncu is not on PATH, so dgated is not profiled")
        return False
    out.mkdir(parents=True, exist_ok=True)
    report = out / "gpu-dgated.ncu-rep"
    with tempfile.TemporaryDirectory() as scratch:
        status = bounded(command(ncu, report, Path(scratch)), seconds, out / "gpu-dgated.log")
    if not report.exists():
        print(f"profile: ncu left no report (exit status {status}); what it said is in {out / 'gpu-dgated.log'}")
    return report.exists()


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_specs.app.gpu.profile", description=__doc__)
    parser.add_argument("--out", default="out/gpu", help="folder for the report and the log")
    profile(Path(parser.parse_args(given).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
