"""`python -m tiled_torch.commands.gpu.worker`: the process that runs one job of `bench --device gpu` or `tune`.

It reads the job as a line of JSON from its input.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shared_specs.app.bench.tune import WAYS
from shared_specs.app.gpu.worker import Groups, Variant, channel, receive, serve
from shared_specs.app.plan.decoder import Decoder
from shared_specs.kernels.blocks import Blocks, candidates_on
from shared_specs.kernels.roofline import gpu_named
from tiled_torch.commands.gpu.device import TorchDevice, described
from tiled_torch.commands.gpu.kernels import Question, kernel_questions
from tiled_torch.commands.gpu.models import loss_groups, mlp_groups
from tiled_torch.core import launch

NO_GPU = {
    "bench": "--device gpu needs a GPU that PyTorch sees, and there is none",
    "tune": "it needs a GPU that PyTorch sees, and there is none",
}
# Which question of `kernel_questions` an op answers, by which of its variants.
TUNED = {
    "glu_up": ("up", "dual"),
    "glu_up_aux": ("up", "auxiliary"),
    "glu_elementwise": ("glu_backward", "kernel"),
    "dgated": ("down", "dgated"),
    "dx": ("dx", "kernel"),
    "linear": ("linear", "kernel"),
    "weight_gradient": ("weight_gradient", "kernel"),
    "cross_entropy": ("cross_entropy", "kernel"),
}


def groups_of(job: Mapping[str, Any], device: torch.device) -> Groups:
    """Return, for each group of a job, the function that draws its data and returns its variants."""
    facts, dtype = job["facts"], getattr(torch, job["dtype"])
    gpu = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if job["op"] == "layer":
        from tiled_torch.commands.gpu.layers import (
            layer_groups,
        )  # and with it transformers, which nothing else here needs

        sizes = {"tokens": facts["tokens"], "shard": facts["shard_tokens"]}
        return layer_groups(**sizes, decoder=Decoder(**facts["decoder"]), dtype=dtype, device=device, gpu=gpu)
    tokens, hidden, width, vocab = (facts[name] for name in ("tokens", "hidden", "intermediate", "vocab"))
    like: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "dtype": dtype, "device": device, "gpu": gpu}
    if job["op"] == "mlp":
        return mlp_groups(**like, width=width, shard=facts["shard_tokens"])
    if job["op"] == "loss":
        return loss_groups(**like, vocab=vocab, shards=facts["shards"])
    questions = kernel_questions(tokens, hidden, width, max(1, tokens // 2), vocab, dtype, device, gpu)
    if job["op"] == "tune":
        return {op: lambda op=op: candidates(op, questions, device) for op in job["groups"]}
    if job["op"] == "paths":
        launch.trying.update({op: Blocks(**chosen) for op, chosen in facts["blocks"].items()})
        return {name: lambda name=name: _among(questions[name](), WAYS[name]) for name in job["groups"]}
    return questions


def candidates(op: str, questions: Mapping[str, Question], device: torch.device) -> dict[str, Variant]:
    """Return the library's form, then an op's kernel with every block size that `tune` tries on this device."""
    question, name = TUNED[op]
    variants = questions[question]()
    library = {key: variant for key, variant in variants.items() if variant.library}
    tried = candidates_on("triton", op, launch.architecture(device))
    return library | {str(n): _with(op, blocks, variants[name]) for n, blocks in tried.items()}


def _with(op: str, blocks: Blocks, variant: Variant) -> Variant:
    results, run = variant.results, variant.run
    assert results is not None

    def chosen(call: Any) -> Any:
        launch.trying[op] = blocks
        return call()

    return replace(variant, run=lambda: chosen(run), results=lambda: chosen(results))


def _among(variants: Mapping[str, Variant], ways: tuple[str, ...]) -> dict[str, Variant]:
    return {name: variant for name, variant in variants.items() if variant.library or name in ways}


def main() -> int:
    emit, job = channel(), receive()
    toy = job["facts"]["toy"]
    if not toy and not torch.cuda.is_available():
        command = "tune" if job["op"] in ("tune", "paths") else "bench"
        emit({"event": "refused", "reason": f"{command}: {NO_GPU[command]}."})
        return 0
    device = torch.device("cpu" if toy else "cuda")
    torch.manual_seed(0)
    emit({"event": "device", "device": {**described(device), "architecture": launch.architecture(device)}})
    serve(job, groups_of(job, device), TorchDevice(device), emit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
