"""A choice of all that one may set for a training step, as `plan` makes it, and the sizes of the work."""

from dataclasses import dataclass
from typing import Literal

from shared_specs.collectives.costs import gathered_plan
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.config import Checkpointing, ContextKind, DataParallel, Half, ParallelConfig, TensorParallel
from shared_specs.layers.block_costs import WIDE
from shared_specs.layers.host_memory import POOL_VARIABLE, pool_gib
from shared_specs.shards import ShardPlan, plan_tokens

Scope = Literal["none", "mlp", "block"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd"]
ITEMSIZE = {"bfloat16": 2, "float32": 4}
NODE = 8  # GPUs of a node, between which the fastest links are


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A choice of all that one may set, and the sizes of the work.

    Attributes:
        tokens: of a sequence. sequences: that a rank, or the ranks of a context together, work on at a time.
        gpus: in all. context: ranks that cut every sequence among them. context_kind: how they attend (`DataParallel.context`).
        tensor: ranks that split every layer, the vocabulary and, between the split layers, the tokens (`TensorParallel`).
        inside: with "2d" the ranks in each place of a ring, which exchange tokens for heads.
        scope: of `tile_model`; "none" is transformers' own layers and loss. offload: layers' inputs wait in host memory.
        host_state: parameters, gradients and moments are in host memory (`DataParallel(cpu_offload=True)`).
        chunked_loss: with scope "none" the logits of a few tokens are there at a time all the same, as in other libraries.
        shard_tokens: of a shard; None is what the library chooses.
        attention: of `models.Llama` in JAX: "auto" is cuDNN where it can attend, "blocks" takes longer and fewer bytes.
        device: "cpu" is what a test on one measures: no kernels, and products of 16-bit operands in float32.
        kernels: on a GPU those of this library run; what simulates has PyTorch's operators alone.
    """

    tokens: int
    sequences: int = 1
    gpus: int = 1
    context: int = 1
    context_kind: ContextKind = "ulysses"
    inside: int = 1
    tensor: int = 1
    scope: Scope = "block"
    offload: bool = False
    host_state: bool = False
    chunked_loss: bool = False
    shard_tokens: int | None = None
    dtype: str = "bfloat16"
    optimizer: Optimizer = "adamw"
    half: Half = "torch"
    attention: Literal["auto", "blocks"] = "auto"
    device: Literal["gpu", "cpu"] = "gpu"
    kernels: bool = True

    @property
    def fused(self) -> bool:
        """Return whether what is elementwise is in the registers of kernels."""
        return self.kernels and self.device == "gpu"

    @property
    def rows(self) -> int:
        """T: tokens that one rank has, or the ranks that split its layers together."""
        return self.sequences * -(-self.tokens // self.context)

    @property
    def own_rows(self) -> int:
        """Return the tokens that one rank has between the split layers."""
        return -(-self.rows // self.tensor)

    @property
    def data(self) -> int:
        """Return how many groups of ranks have sequences of their own, the fully sharded ones."""
        return self.gpus // self.context // self.tensor

    @property
    def exchanging(self) -> int:
        """Return how many ranks exchange tokens for heads."""
        return {"ulysses": self.context, "ring": 1, "2d": self.inside}[self.context_kind]

    @property
    def ring(self) -> int:
        """Return how many places the ring has in which keys and values travel; 1 is no ring."""
        return self.context // self.exchanging

    @property
    def context_axes(self) -> dict[str, int]:
        """Return the mesh axes that cut sequences, name to size, that of the rings first where there are two."""
        if self.context_kind == "2d":
            return {"ring": self.ring, "cp": self.inside}
        return {"cp": self.context} if self.context > 1 else {}

    @property
    def axes(self) -> dict[str, int]:
        """Return the axes of the mesh, name to size."""
        return {"dp_shard": self.data, **self.context_axes} | ({"tp": self.tensor} if self.tensor > 1 else {})

    @property
    def config(self) -> ParallelConfig:
        """Return what `parallelize` is given."""
        data = DataParallel(
            param_dtype=None if self.dtype == "float32" else self.dtype,
            context_axis=("ring", "cp") if self.context_kind == "2d" else next(iter(self.context_axes), None),
            context=self.context_kind,
            cpu_offload=self.host_state,
        )
        tensor = TensorParallel() if self.tensor > 1 else None
        return ParallelConfig(data=data, tensor=tensor, checkpointing=Checkpointing(offload=self.offload))

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def stream(self) -> int:
        """Return the bytes of one element between layers: in JAX float32, whatever the dtype of the products."""
        return self.itemsize if self.half == "torch" else WIDE

    @property
    def shards(self) -> ShardPlan:
        """Return how a rank's tokens are cut; those of ranks that split layers, of all of them together."""
        if self.scope == "none" and not self.chunked_loss:
            return ShardPlan(self.rows, max(1, self.rows))
        if self.tensor > 1:
            return gathered_plan(self.split_shards)
        return plan_tokens(self.rows, shard_tokens=self.shard_tokens, device=self.device)

    @property
    def split_shards(self) -> SequencePlan:
        """Return how the tokens are cut that the ranks of a layer split among them."""
        tokens = (self.own_rows,) * self.tensor
        return plan_sequence("plan", tokens, shard_tokens=self.shard_tokens, device=self.device)


def what_to_set(setting: Setting, host: int = 0) -> list[tuple[str, str]]:
    """Return the calls that make this setting, and what each is set to; in JAX also the variable without which its pool of
    pinned memory is too small. host: bytes in host memory for each GPU.
    """
    scope = {"none": "not tiled", "mlp": 'scope="mlp"', "block": 'scope="block"'}[setting.scope]
    model = "tile_model" if setting.half == "torch" else "models.Llama"
    shard = "" if setting.shard_tokens is None else f", shard_tokens={setting.shard_tokens}"
    shard += "" if setting.attention == "auto" else f', attention="{setting.attention}"'
    offload = "offload=True" if setting.offload else "offload=False"
    context, axes = f"{setting.context}", "context"
    if setting.context_kind == "2d":
        context, axes = f"{setting.ring} x {setting.inside}", "ring x context inside"
    mesh = f"{setting.data} x {context} x {setting.tensor}: data and fully sharded x {axes} x tensor"
    lines = [
        ("mesh", mesh),
        (model, scope + shard),
        ("Checkpointing", f'mode="full", {offload}'),
    ]
    data_options = [f'context="{setting.context_kind}"'] * (setting.context > 1)
    data_options += ["cpu_offload=True"] * setting.host_state
    if data_options:
        lines.append(("DataParallel", ", ".join(data_options)))
    if setting.tensor > 1:
        lines.append(("TensorParallel", "sequence_parallel=True, loss_parallel=True"))
    if setting.half == "jax" and setting.offload:
        gpus = min(setting.gpus, NODE)
        lines.append((POOL_VARIABLE, f"{pool_gib(gpus * host)}, of a process with {gpus} of the GPUs"))
    return lines
