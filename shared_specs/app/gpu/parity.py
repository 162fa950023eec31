"""`python -m shared_specs.app.gpu.parity`: the GPU tests within their time, side by side, then the large ones alone.

A test that fails, hangs or dies is one line of the log and of the exit status; what comes after it is run all the same.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shared_specs.app.gpu.bench import packing

ROOT = Path(__file__).parents[3]
TESTS = "tests/gpu"
# What needs the device's memory for itself.
LARGE = "tests/gpu/test_large.py"
# At most; and what both may take together.
PARITY_SECONDS, ALL_SECONDS = 380.0, 495.0
PROCESSES = 8
# That a command has to say what it knows when its time is over.
LAST_WORDS = 5.0


def bounded(command: Sequence[str], seconds: float, log: Path) -> int:
    """Run a command, its output here and in the log; 124 where it was ended for its time."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0)
        timer_end, ended = time.monotonic() + seconds, False
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        try:
            while True:
                chunk = process.stdout.read()
                if chunk:
                    file.write(chunk)
                    file.flush()
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.flush()
                elif process.poll() is not None:
                    return 124 if ended else process.returncode
                elif time.monotonic() > timer_end + LAST_WORDS:
                    return 124
                elif time.monotonic() > timer_end and not ended:
                    print(f"\nended after {seconds:.0f} s: {' '.join(command)}", flush=True)
                    process.send_signal(signal.SIGINT)  # pytest then says what has failed so far
                    ended = True
                else:
                    time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()
            process.wait()


def side_by_side() -> list[str]:
    """pytest-xdist's options, where it is there."""
    return ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") is not None else []


def per_test(seconds: int) -> list[str]:
    """pytest-timeout's option, where it is there; without it the whole is bounded alone."""
    return [f"--timeout={seconds}"] if importlib.util.find_spec("pytest_timeout") is not None else []


def run_parity(
    out: Path,
    arguments: Sequence[str],
    *,
    tests: str = TESTS,
    large: str = LARGE,
    parity_seconds: float = PARITY_SECONDS,
    all_seconds: float = ALL_SECONDS,
) -> int:
    """nvidia-smi, the tests, the large ones; the first status that is not 0. arguments: for pytest, both times.

    Each test is named as it ends, so that one that hangs is known. Warnings of that machine's versions are no errors.
    """
    end = time.monotonic() + all_seconds
    options = ["-m", "gpu", "-v", "--durations=8", "-W", "default", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", *options, *arguments]
    statuses = []
    with packing(out, "gpu-parity") as pack:
        if (smi := shutil.which("nvidia-smi")) is not None:
            bounded([smi], 30, pack.folder / "nvidia-smi.log")
        parts = [
            ("parity", [*pytest, *side_by_side(), *per_test(90), f"--ignore={large or LARGE}", tests], parity_seconds)
        ]
        if large:
            parts.append(("large", [*pytest, *per_test(90), large], all_seconds))
        for name, command, limit in parts:
            limit = min(limit, max(1.0, end - time.monotonic()))
            xml = f"--junitxml={pack.folder / f'{name}.xml'}"
            statuses.append(bounded([*command, xml], limit, pack.folder / f"{name}.log"))
            print(f"{name}: exit status {statuses[-1]}", flush=True)
            pack.write()
    return next((status for status in statuses if status), 0)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shared_specs.app.gpu.parity", description=__doc__)
    parser.add_argument("--out", default="out/gpu", help="folder for the archive of the logs")
    parser.add_argument("--seconds", type=float, help="that all may take; the large tests are then left out")
    known, arguments = parser.parse_known_args(given)
    if known.seconds is None:
        return run_parity(Path(known.out), arguments)
    return run_parity(Path(known.out), arguments, parity_seconds=known.seconds, all_seconds=known.seconds, large="")


if __name__ == "__main__":
    sys.exit(main())
