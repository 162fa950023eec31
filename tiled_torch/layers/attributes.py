"""The marks by which training engines know the parameters of split layers, under the names that Megatron-LM gives them."""

from typing import Any

from torch import Tensor

from shared_specs.errors import fail, fail_type
from tiled_torch.collectives.groups import rank_group

# Of a tensor that says nothing.
DEFAULTS: dict[str, Any] = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
_COPIED = (*DEFAULTS, "allreduce", "sequence_parallel")


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Marks a tensor as this rank's part of a whole (`tensor_model_parallel`, `partition_dim`, `partition_stride`) or as whole.

    Args:
        is_parallel: whether each rank holds another part. dim: along which, -1 where it is whole.
        stride: in how many equal runs, one of each fused part.
    Raises:
        SpecError: the tensor is marked already. The layers of this package mark their own.
    """
    name = "set_tensor_model_parallel_attributes"
    _check(name, "tensor", tensor)
    marked = [attribute for attribute in DEFAULTS if hasattr(tensor, attribute)]
    if marked:
        fail(name, "tensor", "one that is not marked", f"one with {marked[0]}", advice="Delete its marks first.")
    for attribute, value in zip(DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, attribute, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Marks a tensor as whole on every rank where it does not say otherwise."""
    _check("set_defaults_if_not_set_tensor_model_parallel_attributes", "tensor", tensor)
    for attribute, value in DEFAULTS.items():
        if not hasattr(tensor, attribute):
            setattr(tensor, attribute, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Marks a copy, such as an optimizer's float32 one, as what it was copied from is marked.

    Also `allreduce` (an expert's) and `sequence_parallel`, so that `get_grad_norm` counts the copies as the parameters.
    """
    name = "copy_tensor_model_parallel_attributes"
    _check(name, "destination_tensor", destination_tensor)
    _check(name, "source_tensor", source_tensor)
    for attribute in _COPIED:
        if hasattr(source_tensor, attribute):
            setattr(destination_tensor, attribute, getattr(source_tensor, attribute))


def param_is_not_tensor_parallel_duplicate(param: Tensor, group: Any = None, expert_group: Any = None) -> bool:
    """Whether this rank is to count a parameter: it holds a part of its own, or the first of the same copies.

    Args:
        param: marked as the layers of this package mark theirs; one without marks is whole.
        group: the tensor-parallel process group, a DeviceMesh of one dim, or None for all ranks.
        expert_group: that of experts, whose parameters are marked allreduce=False; None: `group`.
    Raises:
        SpecError, TypeError, UnsupportedError: no group that this rank is in.
    """
    name = "param_is_not_tensor_parallel_duplicate"
    _check(name, "param", param)
    if getattr(param, "tensor_model_parallel", False):
        return True
    expert = expert_group is not None and not getattr(param, "allreduce", True)
    return rank_group(name, expert_group if expert else group).rank == 0


def _check(function: str, argument: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        fail_type(function, argument, "an array", type(tensor).__name__)
