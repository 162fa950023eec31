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


@dataclass(frozen=True, kw_only=True)
class LossWorkload:
    """One linear cross entropy: T tokens, H hidden, V entries of the vocabulary."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    reason: str


LOSS_WORKLOADS = (
    LossWorkload(
        name="smollm2-loss-4k",
        tokens=4096,
        hidden=576,
        vocab=49152,
        dtype="float32",
        reason="the head and loss of SmolLM2-135M at 4K tokens, on a CPU",
    ),
)


@dataclass(frozen=True, kw_only=True)
class AccuracyWorkload:
    """One gated SiLU MLP in `shards` shards, of which errors are measured and no time."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    dtype: str
    shards: int
    reason: str


ACCURACY_WORKLOADS = (
    AccuracyWorkload(
        name="smollm2-135m-256-shards",
        tokens=8192,
        hidden=576,
        intermediate=1536,
        dtype="bfloat16",
        shards=256,
        reason="the MLP of SmolLM2-135M: so many sums of 16-bit weight gradients that their rounding shows",
    ),
)
WORKLOADS: dict[str, tuple[MLPWorkload, ...] | tuple[LossWorkload, ...] | tuple[AccuracyWorkload, ...]] = {
    "mlp": MLP_WORKLOADS,
    "loss": LOSS_WORKLOADS,
    "accuracy": ACCURACY_WORKLOADS,
}
