"""Weights and AdamW's moments as torch.distributed.checkpoint writes them: every rank its part, readable at any rank count."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from shared_specs.app.finetune.stored import Array

FORMAT = "torch.distributed.checkpoint"
_MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}


def save(folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, group: Any) -> None:
    """Write this rank's part below `folder`.

    Args:
        group: of all ranks, for what they have to tell each other; None where there is one.
    Raises:
        OSError: one of the ranks could not write.
    """
    alone = not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
            state_dict_saver.save(
                _state(parameters, optimizer), checkpoint_id=folder, process_group=group, no_dist=alone
            )
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            _raise_cause(failure)
        raise


def _raise_cause(error: BaseException | None) -> None:
    """Raise the error of the file system that made this one, if one did."""
    while error is not None:
        if isinstance(error, OSError):
            raise error
        error = error.__cause__ or error.__context__


def load(folder: Path, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, group: Any) -> None:
    """Fill parameters and optimizer, as they lie on this rank, from what any number of ranks wrote."""
    empty_moments(parameters, optimizer, 0.0)
    state = _state(parameters, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
        state_dict_loader.load(state, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())
    for parameter in parameters.values():
        optimizer.state[parameter]["step"].fill_(state["step"].item())


def empty_moments(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, step: float) -> None:
    """Return the optimizer's state after `step` updates, its moments zero and laid out as the parameters are."""
    for parameter in parameters.values():
        moments = {name: torch.zeros_like(parameter.detach()) for name in _MOMENTS.values()}
        # Fused AdamW wants the count where the parameter is, on a GPU.
        optimizer.state[parameter] = {"step": torch.tensor(step, device=parameter.device)} | moments


class CheckpointParts:
    """An array, in a file or not, of which tensors are made part by part."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape = torch.Size(array.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Return a copy in one piece: fused AdamW reads the memory of all its inputs in order."""
        return torch.tensor(np.ascontiguousarray(self._array[index]))


def fill(part: Tensor, whole: CheckpointParts) -> None:
    """Copy what this rank holds of `whole`."""
    from tiled_torch.collectives.initialise import fill_local

    fill_local(part, whole)


def _state(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Flat names, those of `TrainerState`; what is loaded is written into these very tensors."""
    state = {f"weights.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state |= {f"{ours}.{name}": optimizer.state[parameter][theirs] for ours, theirs in _MOMENTS.items()}
    first = next(iter(parameters.values()))
    return state | {"step": optimizer.state[first]["step"].detach().cpu().clone()}
