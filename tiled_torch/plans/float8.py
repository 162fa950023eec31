"""Linear layers whose products are in float8, by torchao, as an option of `parallelize`."""

import importlib.util

import torch
from torch import nn

from shared_specs.config import SELECTIVE_MODES, ParallelConfig
from shared_specs.errors import UnsupportedError, error_text, fail
from tiled_torch.models.mlps.tiled import note_made
from tiled_torch.plans.registry import Plan


def reason_no_float8() -> str | None:
    """Return why linear layers cannot be float8 here; None where they can."""
    if importlib.util.find_spec("torchao") is None:
        return "The package torchao is not installed."
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        return "It needs a GPU of compute capability 8.9."
    return None


def check_float8(function: str, config: ParallelConfig, model: nn.Module, plan: Plan) -> None:
    """Check that layers of the model can be converted to float8, together with what else `config` asks for.

    Raises:
        SpecError: no layer can be converted.
        UnsupportedError: not together with the rest of `config`.
    """
    tiled = any(hasattr(module, "_tiling") for module in model.modules())
    if config.tensor is not None and tiled:
        advice = "A tiled MLP that is split computes with the weights of its layers, in their own precision."
        rule = "False with config.tensor where the model is tiled"
        raise UnsupportedError(error_text(function, "config.float8", rule, True, advice=advice))
    if not _float8_layers(model, plan):
        advice = "Float8 products have sizes that are multiples of 16."
        fail(function, "config.float8", "False where no linear layer of a block can be converted", True, advice=advice)
    mode = None if config.checkpointing is None else config.checkpointing.mode
    if mode in SELECTIVE_MODES and tiled:
        advice = "Products inside a tiled MLP of float8 layers cannot be told from the others, and would be kept."
        rule = '"full" or "layers" with config.float8 where the model is tiled'
        raise UnsupportedError(error_text(function, "config.checkpointing.mode", rule, repr(mode), advice=advice))


def _float8_layers(model: nn.Module, plan: Plan) -> set[str]:
    """Return names of the linear layers that become float8: those of the blocks, whatever has sizes that fit.

    Embedding and head keep their precision, and a tiled loss its way.
    """
    blocks = [id(module) for block in plan.blocks_of(model) for module in block.modules()]
    return {
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and name
        and id(module) in blocks
        and not (module.in_features % 16 or module.out_features % 16)
    }


def use_float8(model: nn.Module, plan: Plan) -> None:
    """Convert the linear layers of the blocks in place."""
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]

    names = _float8_layers(model, plan)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names)
    note_made(model)
