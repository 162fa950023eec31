"""What the layers read from a Megatron-core configuration, and how it becomes options of this library's layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.config import ParallelLinearOptions
from shared_specs.errors import fail
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.initialise import fill, own_slice
from tiled_torch.compat.megatron.parallel_state import group_or_default
from tiled_torch.compat.megatron.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name

# What a configuration that does not have an attribute says, as Megatron-core's ModelParallelConfig.
DEFAULTS: dict[str, Any] = {
    "params_dtype": torch.float32,
    "use_cpu_initialization": False,
    "perform_initialization": True,
    "sequence_parallel": False,
    "gradient_accumulation_fusion": False,
    "deterministic_mode": False,
    "expert_model_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "defer_embedding_wgrad_compute": False,
    "wgrad_deferral_limit": 0,
}
# What it has to say, if it says anything: attribute -> value, and why.
FIXED: dict[str, tuple[Any, str]] = {
    "cpu_offloading": (False, "Checkpointing(offload=True) keeps inputs in host memory."),
    "gtp_weight_remat_size": (1, "fully_shard is what shards weights here."),
    "expert_gtp_weight_remat_size": (1, "fully_shard is what shards weights here."),
}


def setting(config: Any, name: str) -> Any:
    """Return what a configuration says of one attribute, or Megatron-core's default."""
    value = getattr(config, name, DEFAULTS[name])
    return DEFAULTS[name] if value is None else value


def check_settings(function: str, config: Any) -> None:
    """Refuse settings that nothing here would follow.

    Raises:
        SpecError: one of them is not at its default.
    """
    for name, (value, advice) in FIXED.items():
        if getattr(config, name, value) not in (value, None):
            fail(function, f"config.{name}", f"left at {value}", getattr(config, name), advice=advice)


def check_unused(function: str, **arguments: Any) -> None:
    """Refuse arguments that nothing here would follow.

    Raises:
        SpecError: one of them is not None.
    """
    for name, value in arguments.items():
        if value is not None:
            fail(function, name, "left out", type(value).__name__)


@dataclass(frozen=True)
class Placement:
    """Where a layer's parameters live, what fills them, and which ranks hold the other parts."""

    config: Any
    group: Any
    expert: bool

    @classmethod
    def of(cls, name: str, config: Any, tp_group: Any, expert: bool) -> "Placement":
        """Return that of a layer, once its configuration is known to be followed."""
        check_settings(name, config)
        return cls(config, group_or_default(tp_group, expert=expert), expert)

    @property
    def several(self) -> bool:
        """Return whether the group has more than one rank."""
        return rank_group("a tensor-parallel layer", self.group).several

    @property
    def explicit(self) -> bool:
        """Return whether the caller makes an expert's collectives (Megatron-core's rule)."""
        return self.expert and (self.several or setting(self.config, "expert_model_parallel_size") > 1)

    @property
    def expert_marks(self) -> bool:
        """Return whether gradients are for the expert-data-parallel group: the marks are allreduce=False."""
        sizes = (
            getattr(self.config, "expert_tensor_parallel_size", None),
            setting(self.config, "tensor_model_parallel_size"),
        )
        other = sizes[0] is not None and sizes[0] != sizes[1]
        return self.expert and (setting(self.config, "expert_model_parallel_size") > 1 or other)

    @property
    def sequence_parallel(self) -> bool:
        """Return whether tokens are split over the group."""
        return bool(setting(self.config, "sequence_parallel")) and self.several

    def like(self) -> dict[str, Any]:
        """Return the device and the dtype of the parameters."""
        on_cpu = setting(self.config, "use_cpu_initialization") or not torch.cuda.is_available()
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        return {"device": device, "dtype": setting(self.config, "params_dtype")}

    def options(self, *, stride: int, disable_grad_reduce: bool = False) -> ParallelLinearOptions:
        """Return the options of a linear layer."""
        return ParallelLinearOptions(
            stride=stride,
            disable_grad_reduce=disable_grad_reduce,
            explicit_expert_comm=self.explicit,
            gradient_accumulation_fusion=bool(setting(self.config, "gradient_accumulation_fusion")),
        )

    @torch.no_grad()
    def initialise(
        self, weight: Tensor, whole: tuple[int, int], dim: int, stride: int, init_method: Callable[[Tensor], Any]
    ) -> Tensor | None:
        """Fill a weight as Megatron-core does; return the whole one where there was one.

        With use_cpu_initialization every rank draws the whole weight in float32 on the CPU and keeps its part; otherwise each
        draws its own part, from the stream of its tensor-parallel rank.
        """
        if not setting(self.config, "perform_initialization") or weight.is_meta:
            return None
        if not setting(self.config, "use_cpu_initialization"):
            stream = {"name": get_expert_parallel_rng_tracker_name()} if self.expert else {}
            with get_cuda_rng_tracker().fork(**stream):
                init_method(weight)
            return None
        master = torch.empty(whole, dtype=torch.float32)
        init_method(master)
        master = master.to(weight.dtype)
        fill(weight, own_slice(master, rank_group("initialisation", self.group), dim, stride))
        return master

    def zero(self, bias: nn.Parameter | None) -> None:
        """Set a bias to zero, which every bias of these layers begins as."""
        if bias is not None and setting(self.config, "perform_initialization") and not bias.is_meta:
            nn.init.zeros_(bias)
