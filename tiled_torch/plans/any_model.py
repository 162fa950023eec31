"""The plans of models that are no decoders of a known kind: one of the library's own modules, or any model of transformers.

The latter is sharded, recomputed and compiled layer by layer. Its layers are not split, and its sequences are not shared: these
need to know what a layer computes.
"""

import sys
from typing import Any

from torch import nn

from shared_specs.config import TensorParallel
from shared_specs.errors import fail
from shared_specs.plans.checks import TensorSizes, check_divides
from tiled_torch.linear.module import TiledLinear
from tiled_torch.loss.module import TiledLinearCrossEntropy
from tiled_torch.mlp.module import TiledMLP
from tiled_torch.plans.registry import Plan, plan_by_structure, register_plan
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


@plan_by_structure
def structural_plan(model: Any) -> Plan | str:
    """Return the plan of a model of transformers, or why it has none.

    Its layers are those of the lists that hold nothing but modules of the classes in `_no_split_modules`, by which accelerate
    shards models as well, or else of the class that transformers checkpoints, or else of the only list of modules alike. Where
    there are several lists, it is the last one in its decoder, and the others are towers.
    """
    transformers: Any = sys.modules.get("transformers")  # if it is not loaded, no model is one of its
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return "It is no model of transformers."
    named = (frozenset(model._no_split_modules or ()), frozenset({"GradientCheckpointingLayer"}))
    lists = next((found for names in named if (found := _lists_of(model, names))), None) or _only_list(model)
    if not lists:
        return f"{type(model).__name__} has no list of layers."
    if any(hasattr(layer, "backward_pass") for layers in lists.values() for layer in layers):  # Reformer's, reversible
        return f"Layers of {type(model).__name__} are not called in backward, but parts of them."
    of_text = {id(module) for module in _decoder_of(model).modules()}
    blocks = [path for path, layers in lists.items() if id(layers) in of_text][-1:] or [[*lists][-1]]
    return Plan(blocks=blocks[0], towers=tuple(path for path in lists if path != blocks[0]), ends_apart=False)


def _decoder_of(model: Any) -> nn.Module:
    """Return where a model has its layers of text: the model itself where it does not say."""
    try:
        found = model.get_decoder()
    except (AttributeError, NotImplementedError):
        found = None
    return found if isinstance(found, nn.Module) else model


def _lists_of(model: nn.Module, wholes: frozenset[str]) -> dict[str, nn.ModuleList]:
    """Return by path the lists that hold nothing but modules of these classes, none of which is inside another one."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) and not inside and all(_is_of(m, wholes) for m in module):
            found[path] = module
    return found


def _only_list(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return by path the list of modules of one class that have parts; none where there are several such lists."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other}.") for other in found)
        if (
            isinstance(module, nn.ModuleList)
            and len({*map(type, module)}) == 1
            and not inside
            and any(module[0].children())
        ):
            found[path] = module
    return found if len(found) == 1 else {}


def _is_of(module: nn.Module, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(module).__mro__)
