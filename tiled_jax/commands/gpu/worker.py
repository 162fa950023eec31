"""`python -m tiled_jax.commands.gpu.worker`: the process that runs one job of `bench --device gpu` or `tune`.

It reads the job as a line of JSON from its input.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shared_specs.app.gpu.worker import Groups, channel, receive, serve
from shared_specs.app.plan.decoder import Decoder
from tiled_jax import backends
from tiled_jax.commands.gpu.candidates import candidates, ways
from tiled_jax.commands.gpu.device import JaxDevice, described
from tiled_jax.commands.gpu.kernels import kernel_questions
from tiled_jax.commands.gpu.layers import layer_groups
from tiled_jax.commands.gpu.models import loss_groups, mlp_groups
from tiled_jax.core.mosaic import ARCHITECTURE

NO_GPU = {
    "bench": "--device gpu needs a GPU that JAX sees, and there is none",
    "tune": "it needs a GPU that JAX sees, and there is none",
}


def groups_of(job: Mapping[str, Any]) -> Groups:
    """Return, for each group of a job, the function that draws its data and returns its variants."""
    facts, dtype = job["facts"], jnp.dtype(job["dtype"])
    if job["op"] == "layer":
        sizes = {"tokens": facts["tokens"], "shard": facts["shard_tokens"]}
        return layer_groups(**sizes, decoder=Decoder(**facts["decoder"]), dtype=dtype)
    tokens, hidden, width, vocab = (facts[name] for name in ("tokens", "hidden", "intermediate", "vocab"))
    like: dict[str, Any] = {"tokens": tokens, "hidden": hidden, "dtype": dtype}
    if job["op"] == "mlp":
        return mlp_groups(**like, width=width, shard=facts["shard_tokens"])
    if job["op"] == "loss":
        return loss_groups(**like, vocab=vocab, shards=facts["shards"])
    if job["op"] == "kernels":
        return kernel_questions(tokens, hidden, width, max(1, tokens // 2), vocab, dtype)
    sizes = {**like, "width": width, "vocab": vocab}
    if job["op"] == "tune":
        return {op: partial(candidates, op, **sizes) for op in job["groups"]}
    return {part: partial(ways, part, facts["blocks"], **sizes) for part in job["groups"]}


def refusal(job: Mapping[str, Any]) -> str | None:
    """Return why nothing can be measured here; None where it can."""
    if job["facts"]["toy"]:
        return None
    tuning = job["op"] in ("tune", "paths")
    try:
        backend = jax.default_backend()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        backend = f"{error}"
    if backend != "gpu":
        command = "tune" if tuning else "bench"
        return f"{command}: {NO_GPU[command]}."
    reason = backends.usable_backends()["pallas"]
    if tuning and reason is not None:
        return f"tune: a GPU must be there that the kernels run on. {reason}"
    return None


def main() -> int:
    emit, job = channel(), receive()
    reason = refusal(job)
    if reason is not None:
        emit({"event": "refused", "reason": reason})
        return 0
    emit({"event": "device", "device": {**described(), "architecture": ARCHITECTURE}})
    serve(job, groups_of(job), JaxDevice(), emit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
