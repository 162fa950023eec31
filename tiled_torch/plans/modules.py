"""The plans of the library's own modules where one of them is the whole model."""

from typing import Any

from shared_specs.config import TensorParallel
from shared_specs.errors import fail
from shared_specs.plans.checks import TensorSizes, check_divides
from tiled_torch.linear.module import TiledLinear
from tiled_torch.loss.module import TiledLinearCrossEntropy
from tiled_torch.mlp.module import TiledMLP
from tiled_torch.plans.registry import Plan, register_plan
from tiled_torch.plans.tensor_styles import TiledLossStyle, TiledMLPStyle

_NAME = "parallelize"


def check_mlp(module: TiledMLP, tensor: TensorParallel, ranks: int) -> None:
    """Check that a TiledMLP can be split over so many ranks.

    Raises:
        SpecError: it cannot.
    """
    if module.fused_gate_up:
        advice = "Rows of gate and up would land on different ranks."
        fail(_NAME, "fused_gate_up", "False with config.tensor", True, advice=advice)
    w_down: Any = module.w_down
    sizes = TensorSizes(even={"intermediate_size": w_down.shape[1]})
    check_divides(_NAME, sizes, tensor.axis, ranks)


def check_loss_module(module: TiledLinearCrossEntropy, tensor: TensorParallel, ranks: int) -> None:
    """Check that a TiledLinearCrossEntropy can be split over so many ranks.

    Raises:
        SpecError: it cannot.
    """
    if not tensor.loss_parallel:
        fail(_NAME, "config.tensor.loss_parallel", "True where the loss is tiled", False)
    check_divides(_NAME, TensorSizes(vocab=module.weight.shape[0]), tensor.axis, ranks)


def _mlp_styles(_: Any, tensor: TensorParallel) -> dict[str, Any]:
    return {"": TiledMLPStyle(sequence_parallel=tensor.sequence_parallel)}


register_plan(TiledLinear, Plan(blocks=""))
register_plan(TiledMLP, Plan(blocks="", check=check_mlp, styles=_mlp_styles, same_batch=False))
register_plan(
    TiledLinearCrossEntropy,
    Plan(blocks="", check=check_loss_module, styles=lambda *_: {"": TiledLossStyle()}, same_batch=False),
)
