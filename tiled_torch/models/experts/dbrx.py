"""DBRX: the weights of all experts are three matrices of a child, the rows of one expert after another; x has three dims."""

from typing import Any

from torch import Tensor

from tiled_torch.core.partitioned import gathers
from tiled_torch.models import family
from tiled_torch.moe.steps import ExpertWeights

FLAT = frozenset({"DbrxExperts"})
NAMES = ("mlp.v1", "mlp.w2", "mlp.w1")  # as `matrices`


def flat_operands(experts: Any) -> ExpertWeights:
    """Return views of the weights. down, w2, is the only one that is not [out, in]."""
    mlp, shape = experts.mlp, (-1, experts.ffn_hidden_size, experts.hidden_size)
    return ExpertWeights(up=mlp.v1.view(shape), down=mlp.w2.view(shape).mT, gate=mlp.w1.view(shape))


def matrices(operands: ExpertWeights) -> tuple[Any, ...]:
    return operands.up, operands.down, operands.gate


def flat_gate(experts: Any) -> Any:
    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return experts.mlp.activation_fn(gate) * up

    return gate


def reason_not_whole(experts: Any) -> str | None:
    """Return why the weights are not there when experts are called; None where they are."""
    return "ZeRO-3 gathers its weights" if gathers(experts.mlp) else None


def reason_not_flat(experts: Any) -> str | None:
    """Return why experts are more than their formula; None where they are not."""
    mlp = experts.mlp
    more = [name for name, _ in (*experts.named_parameters(), *experts.named_buffers()) if name not in NAMES]
    more += [name for name, _ in experts.named_children() if name != "mlp"]
    if more:
        return f"it has {more[0]}"
    return family.reason_called("mlp", mlp) or family.reason_called("mlp.activation_fn", mlp.activation_fn)
