"""Records of simulations at real size: 8-billion models with up to a million tokens on one to thirty-two GPUs."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shared_specs.app.bench.records import make_record, write_record
from shared_specs.app.plan.decoder import MODELS
from shared_specs.app.plan.simulated import Simulator, beside_simulation
from shared_specs.app.plan.step import Setting
from shared_specs.config import NAMES, Half

KIND = "plan"
RECORDED_MODELS = ("llama-3-8b", "qwen3-8b")
RECORDED_TOKENS = (2**17, 2**19, 2**20)
RECORDED_GPUS = (1, 8, 32)


def recorded_setting(tokens: int, gpus: int, half: Half = "torch") -> Setting:
    """Return how they are run: all GPUs in one context, inputs on the host; on a GPU of its own the state as well."""
    return Setting(
        tokens=tokens, gpus=gpus, context=gpus, offload=True, host_state=gpus == 1 and half == "torch", half=half
    )


def simulated_setting(run: Mapping[str, Any]) -> Setting:
    """Return the setting of a recorded run as it was simulated: no kernels run without a GPU, cuDNN's neither."""
    return replace(Setting(**run["set"]), kernels=False)


def record_simulations(simulator: Simulator, half: Half, packages: Sequence[str], words: Sequence[str]) -> None:
    """Write one record. words: the folder, a model's name, how many GPUs, and lengths; without these every one."""
    folder, model, gpus, *lengths = words
    decoder, results = MODELS[model], []
    for tokens in map(int, lengths or RECORDED_TOKENS):
        started = time.monotonic()
        beside = beside_simulation(decoder, recorded_setting(tokens, int(gpus), half), simulator)
        spent = {"simulating_seconds": round(time.monotonic() - started, 1)}
        results.append({"model": model, "tokens": tokens, "gpus": int(gpus)} | beside | spent)
        print(model, tokens, gpus, beside["predicted_bytes"] / beside["simulated_bytes"], flush=True)
    package = NAMES[half].package
    command = " ".join(["python -m", f"{package}.commands.plan.record benchmarks/records", *words[1:]])
    print(f"record: {write_record(folder, make_record(KIND, package, packages, results) | {'command': command})}")
