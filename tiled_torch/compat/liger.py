"""Liger Kernel's tiled MLPs by their own names: `apply_tiled_mlp` and the SwiGLU and GEGLU modules."""

import math
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shared_specs.config import Activation
from shared_specs.errors import fail
from tiled_torch.compat.loss import CrossEntropyOutput as CrossEntropyOutput
from tiled_torch.compat.loss import LigerFusedLinearCrossEntropyFunction as LigerFusedLinearCrossEntropyFunction
from tiled_torch.compat.loss import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from tiled_torch.compat.loss import liger_fused_linear_cross_entropy as liger_fused_linear_cross_entropy
from tiled_torch.compat.shards import check_call, of_rows, tiled
from tiled_torch.core.partitioned import gather_around
from tiled_torch.mlp.api import tiled_mlp
from tiled_torch.models.family import reason_linear_is_not_plain


def apply_tiled_mlp(
    fn: Callable[[Any, Tensor], Tensor],
    mlp_module: nn.Module,
    x: Tensor,
    num_shards: int | None = None,
    compute_params: Iterable[Tensor] | None = None,
) -> Tensor:
    """Return fn(mlp_module, x), a shard of tokens at a time, by Liger Kernel's name and arguments.

    Args:
        fn: of the module and a shard [1, t, H] ([t, H] of a two-dimensional x), token-wise.
        mlp_module: whose parameters fn uses. x: [B, S, H] or [T, H].
        num_shards: at most this many, of all tokens; None: ceil(S / H), as there. Below 1 it is 1.
        compute_params: under ZeRO-3 the parameters that are gathered around all shards; None: all of the module's. Elsewhere
            they say nothing.
    Returns:
        As fn: [B, S, H] or [T, H].
    Numerics, Memory: as `tiled_torch.tile`. Every parameter's hooks run once.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_torch.tile`.
    Source: named and called as Liger Kernel's (ops/tiled_mlp.py); the computation is `tiled_torch.tile`.
    Example:
        >>> import torch
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
        >>> apply_tiled_mlp(lambda module, x: module(x), mlp, torch.ones(1, 6, 4), num_shards=3).shape
        torch.Size([1, 6, 4])
    """
    name = "apply_tiled_mlp"
    named = check_call(name, fn, mlp_module, x, compute_params)
    shards = _shards(x) if num_shards is None else num_shards if isinstance(num_shards, bool) else max(1, num_shards)
    return tiled(name, of_rows(fn, mlp_module), (x,), shards, module=mlp_module, compute_params=named)


def _shards(x: Tensor) -> int:
    return max(1, math.ceil(x.shape[-2] / x.shape[-1])) if x.dim() > 1 and x.shape[-1] else 1


class _LigerTiledMLP(nn.Module):
    """gate_proj, up_proj and down_proj of a configuration, without biases: down(act(gate(x)) * up(x))."""

    activation: Activation
    names: tuple[str, ...]

    def __init__(self, config: Any, num_shards: int | None = None) -> None:
        super().__init__()
        self.config, self.num_shards = config, num_shards
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        given = getattr(config, "hidden_act", self.names[0])
        if given not in self.names:
            fail(type(self).__name__, "config.hidden_act", f"one of {', '.join(self.names)}", repr(given))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] or [T, H] -> the same shape."""
        linears = {name: getattr(self, name) for name in ("gate_proj", "up_proj", "down_proj")}
        if any(reason_linear_is_not_plain(name, one, gathered=True) for name, one in linears.items()):
            return apply_tiled_mlp(type(self)._untiled, self, x, self.num_shards)
        for linear in linears.values():
            gather_around(self, linear._parameters.values())
        weights = [linear.weight for linear in linears.values()]
        biases = {
            name: b
            for name, one in zip(("gate", "up", "down"), linears.values(), strict=True)
            if (b := one.bias) is not None
        }
        shards = _shards(x) if self.num_shards is None else max(1, self.num_shards)
        return tiled_mlp(x, *weights, biases=biases, activation=self.activation, num_shards=shards)

    def _untiled(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        acted = F.silu(gate) if self.activation == "silu" else F.gelu(gate, approximate="tanh")
        return self.down_proj(acted * self.up_proj(x))


class LigerTiledSwiGLUMLP(_LigerTiledMLP):
    """down(silu(gate(x)) * up(x)), a shard of tokens at a time, with Liger Kernel's constructor and state_dict keys.

    Args:
        config: has hidden_size, intermediate_size and, where it says so, a hidden_act of "silu" or "swish".
        num_shards: at most this many; None: ceil(S / H) of an x [B, S, H], as there.
    Parameters: gate_proj.weight, up_proj.weight [I, H] and down_proj.weight [H, I].
    Numerics, Memory: as `tiled_mlp`; where a projection is more than an nn.Linear (LoRA, hooks) as `tiled_torch.tile`.
    Raises:
        SpecError (a ValueError): another hidden_act; and as `tiled_mlp`.
    Source: named and called as Liger Kernel's (transformers/tiled_mlp.py).
    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> mlp = LigerTiledSwiGLUMLP(SimpleNamespace(hidden_size=4, intermediate_size=8, hidden_act="silu"), num_shards=2)
        >>> mlp(torch.ones(1, 6, 4)).shape
        torch.Size([1, 6, 4])
    """

    activation = "silu"
    names = ("silu", "swish")


class LigerTiledGEGLUMLP(_LigerTiledMLP):
    """down(gelu(gate(x)) * up(x)) with the tanh form of gelu whatever config.hidden_act says, as Liger Kernel's.

    Args:
        config: has hidden_size, intermediate_size and, where it says so, a hidden_act of "gelu", "gelu_new" or
            "gelu_pytorch_tanh".
        num_shards: as `LigerTiledSwiGLUMLP`.
    Parameters, Numerics, Memory, Raises, Source: as `LigerTiledSwiGLUMLP`.
    """

    activation = "gelu_tanh"
    names = ("gelu", "gelu_new", "gelu_pytorch_tanh")
