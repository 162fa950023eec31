"""`TiledLinearCrossEntropy`: a language-model head and its loss as one module. No math."""

import math
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared_specs.config import TORCH, LossOptions, LossResult, Tiling
from shared_specs.core import checks
from shared_specs.loss import checks as loss_checks
from tiled_torch import backends
from tiled_torch.core.operands import as_operand, check_param_dtype
from tiled_torch.core.partitioned import gathering, whole_shape
from tiled_torch.loss.api import tiled_linear_cross_entropy

_NAME = "TiledLinearCrossEntropy"


class TiledLinearCrossEntropy(nn.Module):
    """The loss of a linear head, computed a shard of tokens at a time: the logits of all tokens never exist.

    Args:
        hidden_size, vocab_size: H and V.
        bias: a bias on the logits.
        loss: what is computed and returned. See shared_specs.config.LossOptions.
        num_shards, tiling, backend: as in `tiled_linear_cross_entropy`.
        device, dtype: of the parameters.
    Parameters are `weight` [V, H] and, with bias, `bias` [V], named and initialised as those of nn.Linear, so that a
    head's checkpoint loads.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_linear_cross_entropy`, at construction.
    Source: derived in shared_specs/README.md.
    Example:
        >>> import torch
        >>> head = TiledLinearCrossEntropy(8, 12, num_shards=4)
        >>> head(torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)).shape
        torch.Size([])
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        loss: LossOptions = LossOptions(),
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_sizes(_NAME, {"hidden_size": hidden_size, "vocab_size": vocab_size})
        checks.check_flags(_NAME, bias=bias)
        self._set_options(loss, num_shards, tiling, backend)
        check_param_dtype(_NAME, dtype)
        self.weight = nn.Parameter(torch.empty((vocab_size, hidden_size), device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(vocab_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def _set_options(self, loss: LossOptions, num_shards: int | None, tiling: Tiling | None, backend: str) -> None:
        loss_checks.check_loss_options(_NAME, loss)
        checks.check_backend(_NAME, backend, TORCH, backends.usable_backends())
        self.loss, self.backend = loss, backend
        self.tiling = checks.resolve_tiling(_NAME, num_shards, 0.0, tiling, unused=("keep", "deterministic"))

    @classmethod
    def from_weights(
        cls,
        weight: Tensor,
        *,
        bias: Tensor | None = None,
        loss: LossOptions = LossOptions(),
        num_shards: int | None = None,
        tiling: Tiling | None = None,
        backend: str = "auto",
    ) -> Self:
        """Return a module around an existing head; weight [V, H] and bias [V] become its parameters without a copy."""
        function = f"{_NAME}.from_weights"
        seen = as_operand(function, "weight", weight)
        seen_bias = None if bias is None else as_operand(function, "bias", bias)
        loss_checks.check_head(function, seen, seen_bias, TORCH)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._set_options(loss, num_shards, tiling, backend)
        module.weight = _parameter(weight)
        module.bias = None if bias is None else _parameter(bias)
        return module

    def reset_parameters(self) -> None:
        """Draw every parameter anew, uniformly within 1/sqrt(H), as nn.Linear does."""
        bound = 1 / math.sqrt(whole_shape(self.weight)[1])
        for parameter in self.parameters():
            with gathering(parameter, write=True):
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: Tensor, targets: Tensor, *, num_valid: Any = None, token_weight: Tensor | None = None
    ) -> Tensor | LossResult:
        """x [..., H], targets and token_weight [...]: the loss, or a LossResult. num_valid replaces the option's."""
        loss = self.loss if num_valid is None else replace(self.loss, num_valid=num_valid)
        return tiled_linear_cross_entropy(
            x,
            self.weight,
            targets,
            bias=self.bias,
            loss=loss,
            tiling=self.tiling,
            backend=self.backend,
            token_weight=token_weight,
        )

    def extra_repr(self) -> str:
        vocab, hidden = whole_shape(self.weight)
        return f"hidden_size={hidden}, vocab_size={vocab}, {self.loss}, {self.tiling}, backend={self.backend}"


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach())
