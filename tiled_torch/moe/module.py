"""`TiledMoE`: the parameters of a mixture of experts and one call of `tiled_moe`. No math."""

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared_specs.config import TORCH, Activation, Scoring, Tiling
from shared_specs.moe import checks as moe_checks
from tiled_torch.core.activation_functions import ActivationFunction, activation_name
from tiled_torch.core.operands import as_operand, check_param_dtype
from tiled_torch.core.partitioned import gathering, whole_shape
from tiled_torch.moe.api import EXPERT_BACKENDS, tiled_moe

_NAME = "TiledMoE"


class TiledMoE(nn.Module):
    """A router and its gated experts, computed shard by shard.

    Args:
        hidden_size, intermediate_size: H and I, the latter of one expert.
        num_experts, top_k: E and k.
        scoring, normalize_top_k, return_router_logits: as in `tiled_moe`.
        activation: silu, gelu, gelu_tanh, relu or relu_squared, or a function that computes one of them, as in `TiledMLP`.
        num_shards, tiling, backend: as in `tiled_moe`.
        device, dtype: of the parameters.
    Parameters are `w_router` [E, H], `w_gate`, `w_up` [E, I, H] and `w_down` [E, H, I], each matrix initialised as nn.Linear
    initialises. Experts are on one device: there is no expert or tensor parallelism.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_moe`, at construction.
    Source: Jiang et al. 2024, Mixtral of Experts (arXiv 2401.04088).
    Example:
        >>> import torch
        >>> TiledMoE(8, 12, 4, 2, num_shards=4)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    w_router: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        scoring: Scoring = "softmax",
        normalize_top_k: bool = True,
        activation: Activation | ActivationFunction = "silu",
        return_router_logits: bool = False,
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shapes = moe_checks.moe_shapes(_NAME, hidden_size, intermediate_size, num_experts, TORCH)
        self._set_options(
            _NAME,
            num_experts,
            top_k,
            scoring,
            normalize_top_k,
            activation,
            return_router_logits,
            num_shards,
            tiling,
            backend,
        )
        check_param_dtype(_NAME, dtype)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self.reset_parameters()

    def _set_options(
        self,
        function: str,
        experts: int,
        top_k: int,
        scoring: Scoring,
        normalize_top_k: bool,
        activation: Activation | ActivationFunction,
        return_router_logits: bool,
        num_shards: int | None,
        tiling: Tiling | None,
        backend: str,
    ) -> None:
        flags = {"normalize_top_k": normalize_top_k, "return_router_logits": return_router_logits}
        choice: dict[str, Any] = {
            "experts": experts,
            "top_k": top_k,
            "scoring": scoring,
            "activation": activation_name(function, activation),
        }
        moe_checks.check_module_options(function, **choice, **flags)
        self.tiling = moe_checks.moe_tiling(function, num_shards, tiling, backend, names=TORCH, usable=EXPERT_BACKENDS)
        self.top_k, self.scoring, self.normalize_top_k = int(top_k), scoring, normalize_top_k
        self.activation, self.return_router_logits, self.backend = choice["activation"], return_router_logits, backend

    @classmethod
    def from_weights(
        cls,
        w_router: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        *,
        top_k: int,
        scoring: Scoring = "softmax",
        normalize_top_k: bool = True,
        activation: Activation | ActivationFunction = "silu",
        return_router_logits: bool = False,
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around existing weights ([out, in]); they become its parameters without a copy.

        Args:
            w_router: [E, H]. w_gate, w_up: [E, I, H]. w_down: [E, H, I].
        """
        function = f"{_NAME}.from_weights"
        weights: dict[str, Any] = {"w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
        seen = {name: as_operand(function, name, w) for name, w in weights.items()}
        moe_checks.check_moe_weights(function, seen, TORCH)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        choice = (len(w_up), top_k, scoring, normalize_top_k, activation, return_router_logits)
        module._set_options(function, *choice, num_shards, tiling, backend)
        for name, w in weights.items():
            setattr(module, name, w if isinstance(w, nn.Parameter) else nn.Parameter(w.detach()))
        return module

    def reset_parameters(self) -> None:
        """Draw every parameter anew, uniformly within 1/sqrt(inputs), as nn.Linear does."""
        for parameter in self.parameters():
            inputs = whole_shape(parameter)[-1]
            with gathering(parameter, write=True):
                nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Any:
        """[..., H] -> [..., H], with return_router_logits a pair of that and the logits [..., E]."""
        return tiled_moe(
            x,
            self.w_router,
            self.w_gate,
            self.w_up,
            self.w_down,
            top_k=self.top_k,
            scoring=self.scoring,  # type: ignore[arg-type]
            normalize_top_k=self.normalize_top_k,
            activation=self.activation,  # type: ignore[arg-type]
            return_router_logits=self.return_router_logits,
            tiling=self.tiling,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        experts, intermediate, hidden = whole_shape(self.w_up)
        sizes = f"hidden_size={hidden}, intermediate_size={intermediate}, num_experts={experts}, top_k={self.top_k}"
        return f"{sizes}, scoring={self.scoring}, activation={self.activation}, {self.tiling}, backend={self.backend}"
