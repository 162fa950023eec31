"""Named shapes that benchmarks run, with the reason for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared_specs.core.rounding import DTYPES
from shared_specs.loss.costs import LossShape
from shared_specs.mlp.costs import MLPShape


@dataclass(frozen=True, kw_only=True)
class MLPWorkload:
    """One gated SiLU MLP: T tokens, H hidden, I intermediate."""

    name: str
    tokens: int
    hidden: int
    intermediate: int
    dtype: str
    reason: str

    @property
    def sizes(self) -> str:
        return f"T, H, I = {self.tokens}, {self.hidden}, {self.intermediate}"

    @property
    def shape(self) -> MLPShape:
        size = DTYPES[self.dtype].itemsize
        return MLPShape(
            tokens=self.tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            itemsize=size,
            weight_itemsize=size,
        )


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
    """One linear cross entropy: T tokens, H hidden, V entries of the vocabulary. ignored: the share of labels that are -100."""

    name: str
    tokens: int
    hidden: int
    vocab: int
    dtype: str
    reason: str
    ignored: float = 0.0

    @property
    def sizes(self) -> str:
        ignored = f", {self.ignored:.0%} of the labels ignored" if self.ignored else ""
        return f"T, H, V = {self.tokens}, {self.hidden}, {self.vocab}{ignored}"

    def targets(self) -> np.ndarray[Any, Any]:
        """Return labels [T], drawn, and -100 at as many of them, drawn too, as are ignored."""
        rng = np.random.default_rng(0)
        labels = rng.integers(0, self.vocab, self.tokens)
        labels[rng.permutation(self.tokens)[: round(self.ignored * self.tokens)]] = -100
        return labels

    @property
    def shape(self) -> LossShape:
        size = DTYPES[self.dtype].itemsize
        return LossShape(tokens=self.tokens, hidden=self.hidden, vocab=self.vocab, itemsize=size, weight_itemsize=size)


LOSS_WORKLOADS = (
    LossWorkload(
        name="smollm2-loss-4k",
        tokens=4096,
        hidden=576,
        vocab=49152,
        dtype="float32",
        reason="the head and loss of SmolLM2-135M at 4K tokens, on a CPU",
    ),
    LossWorkload(
        name="smollm2-loss-4k-90%-ignored",
        tokens=4096,
        hidden=576,
        vocab=49152,
        dtype="float32",
        reason="the same of a chat, of which the answers alone are learned",
        ignored=0.9,
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

    @property
    def sizes(self) -> str:
        return f"T, H, I = {self.tokens}, {self.hidden}, {self.intermediate}"


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


@dataclass(frozen=True, kw_only=True)
class MeshWorkload:
    """One gated SiLU MLP over a mesh: x [B, S, H] with its batch over all devices; weights whole or sharded over them."""

    name: str
    sharded_weights: bool
    reason: str
    devices: int = 8
    sequences: int = 16
    tokens: int = 512
    hidden: int = 576
    intermediate: int = 1536
    dtype: str = "float32"
    shards: int = 4  # of a device's own tokens

    @property
    def sizes(self) -> str:
        return f"B, S, H, I = {self.sequences}, {self.tokens}, {self.hidden}, {self.intermediate}"


MESH_WORKLOADS = (
    MeshWorkload(
        name="smollm2-135m-dp-8",
        sharded_weights=False,
        reason="data parallelism under plain jit: nothing but the sums of the weight gradients has to be moved",
    ),
    MeshWorkload(
        name="smollm2-135m-fsdp-8",
        sharded_weights=True,
        reason="fully-sharded weights under plain jit: they are gathered once a pass, not once a shard",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelWorkload:
    """One sequence of real text through a whole model, of which errors are measured and no time.

    dtype: of the weights and products, in JAX of products alone, of weights that are rounded to it.
    """

    name: str
    tokens: int
    reason: str
    dtype: str = "float32"


MODEL_WORKLOADS = (
    ModelWorkload(
        name="smollm2-135m-512-tokens",
        tokens=512,
        reason="the default model of `finetune` on the default text: what a user's loss and gradients are off by",
    ),
    ModelWorkload(
        name="smollm2-135m-512-tokens-bfloat16",
        tokens=512,
        reason="the same in the dtype that most training is in, whose roundings are what it is off by, tiled or not",
        dtype="bfloat16",
    ),
)

Workload = MLPWorkload | LossWorkload | AccuracyWorkload | MeshWorkload
WORKLOADS: dict[str, Sequence[Workload | ModelWorkload]] = {
    "mlp": MLP_WORKLOADS,
    "loss": LOSS_WORKLOADS,
    "accuracy": ACCURACY_WORKLOADS,
    "mesh": MESH_WORKLOADS,
    "model": MODEL_WORKLOADS,
}


@dataclass(frozen=True, kw_only=True)
class GPUSizes:
    """The sizes that `bench --device gpu` measures.

    Attributes:
        widths: name -> (H, I). tokens: of whole calls, ascending. shards: tokens of a shard, ascending; the last but one
            is what everything but the sweep over them runs with. vocab: V.
    """

    widths: Mapping[str, tuple[int, int]]
    tokens: tuple[int, ...]
    shards: tuple[int, ...]
    vocab: int
    dtype: str


# Llama-3-8B and 70B; the vocabulary is that of Qwen3.
GPU_SIZES = GPUSizes(
    widths={"8b": (4096, 14336), "70b": (8192, 28672)},
    tokens=(8192, 32768, 131072),
    shards=(2048, 4096, 8192, 16384),
    vocab=151936,
    dtype="bfloat16",
)
# Of variants, by what they are for; kernels have groups of their own.
GPU_GROUPS = ("main", "peers", "rest", "sweep", "long", "ignored")
# Every path of the harness on a CPU, the kernels in Triton's interpreter.
TOY_SIZES = GPUSizes(
    widths={"toy": (16, 32), "toy-wide": (24, 48)},
    tokens=(130, 140, 150),
    shards=(64, 128, 140),
    vocab=50,
    dtype="float32",
)
