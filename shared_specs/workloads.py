"""Named shapes that benchmarks run, with the reason for each."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MLPWorkload:
    """One gated SiLU MLP: T tokens, H hidden, I intermediate."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    dtype: str
    reason: str


MLP_WORKLOADS = (
    MLPWorkload(
        name="smollm2-135m-8k",
        tokens=8192,
        hidden=576,
        intermediate=1536,
        dtype="float32",
        reason="the MLP of SmolLM2-135M at 8K tokens, on a CPU",
    ),
    MLPWorkload(
        name="1b-4k",
        tokens=4096,
        hidden=1024,
        intermediate=4096,
        dtype="float32",
        reason="the MLP of a model of about a billion parameters at 4K tokens, on a CPU",
    ),
)
