"""The norm of all gradients of a model whose layers were split by hand, counting every part once and every copy once.

Models that `parallelize` has split have DTensors, whose norm torch.nn.utils.clip_grad_norm_ knows; this one takes them too.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared_specs.errors import fail, fail_type, fail_with
from tiled_torch.collectives import transport
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.collectives.split_module import ParallelLayer
from tiled_torch.core.tensors import is_dtensor, wide_dtype


@not_compiled
@torch.no_grad()
def get_grad_norm(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    group: Any = None,
    expert_group: Any = None,
    expert_parallel_group: Any = None,
) -> Tensor:
    """Return the p-norm of the gradients of a whole model, as in a single process.

    A parameter with the attribute `tensor_model_parallel` is a different part on every rank of the group. Any other parameter
    is a copy and counts once. The layers of this package set the attributes. `fully_shard` and copies lose them. Pass the
    module, so that its layers set them again, or see `copy_tensor_model_parallel_attributes`.

    Args:
        parameters: a module, or its parameters. Parameters without a gradient are left out. The gradient is read from
            `main_grad` if the parameter has one, else from `.grad`. It must be final: averaged over data ranks and, if tokens
            are split over the tensor group, summed by `reduce_sequence_parallel_grads`. The shards of a DTensor are summed
            over its own mesh.
        norm_type: p > 0, or inf.
        group: the tensor-parallel process group, a DeviceMesh of one dim, or None for all ranks.
        expert_group: the group over which experts are split; needed if there are parameters with allreduce=False.
        expert_parallel_group: the group whose ranks hold different experts, if there is one.
    Returns:
        A scalar, float32 (float64 where a gradient is), the same on every rank. The call does not wait for the device.
    Numerics: the norm of each gradient is computed in float32 (float64 for float64) for any dtype; sums over gradients and
        ranks are in float64.
    Raises:
        SpecError: norm_type out of range; a gradient both in `main_grad` and in `.grad`; experts without their group.
        TypeError: arguments of the wrong kind. UnsupportedError: no process group.
    Source: Megatron-LM's get_grad_norm_fp32.
    """
    name = "get_grad_norm"
    every = _parameters(name, parameters)
    owned = _with_gradients(name, every)
    norm = _GradNorm(name, norm_type, every, owned)
    dense = rank_group(name, group)
    experts = [one for one in owned if not getattr(one, "allreduce", True)]
    if experts and expert_group is None:
        advice = "Experts are split over another group than the rest of the model."
        fail(name, "expert_group", "given for parameters with allreduce=False", None, advice=advice)
    total = norm.over_ranks(dense, [one for one in owned if getattr(one, "allreduce", True)])
    if expert_group is None and expert_parallel_group is None:
        return norm.finish(total)
    own = norm.over_ranks(rank_group(name, expert_group), experts)
    if expert_parallel_group is not None:
        own = norm.reduce(rank_group(name, expert_parallel_group), own)
    return norm.finish(norm.joined([total, own]))


@not_compiled
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: Any = None,
    expert_group: Any = None,
    expert_parallel_group: Any = None,
) -> Tensor:
    """Scale all gradients so that `get_grad_norm` is at most `max_norm`, and return the norm before scaling.

    It is torch.nn.utils.clip_grad_norm_ for parameters that are split over the ranks of a group.

    Args:
        max_norm: >= 0. The rest: as in `get_grad_norm`.
    Returns:
        The norm before scaling, a scalar, the same on every rank.
    Raises:
        SpecError, TypeError, UnsupportedError: as `get_grad_norm`.
    """
    name = "clip_grad_norm_"
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
        fail_type(name, "max_norm", "a number", type(max_norm).__name__)
    if not max_norm >= 0:
        fail(name, "max_norm", ">= 0", max_norm)
    every = _parameters(name, parameters)
    groups = {"group": group, "expert_group": expert_group, "expert_parallel_group": expert_parallel_group}
    total = get_grad_norm(every, norm_type, **groups)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in _with_gradients(name, every):
        gradient = _local(_gradient(name, parameter))
        gradient.mul_(scale.to(gradient.device))
    return total


@not_compiled
@torch.no_grad()
def reduce_sequence_parallel_grads(parameters: nn.Module | Tensor | Iterable[Tensor], *, group: Any = None) -> int:
    """Sum the gradients of whole parameters that saw only this rank's tokens, over the tensor group and in place.

    Under sequence parallelism, a norm between two split layers sees T / R tokens, so its gradient is one rank's part of a
    sum. Such parameters have the attribute `sequence_parallel`, which the caller sets to True (Megatron's attribute).
    The layers of this package sum the gradients of their own parameters. The function makes one collective per dtype.

    Args:
        parameters: a module, or its parameters. group: as in `get_grad_norm`.
    Returns:
        How many gradients were summed.
    Raises:
        TypeError, UnsupportedError: as `get_grad_norm`.
    Source: Megatron-LM, arXiv 2205.05198.
    """
    name = "reduce_sequence_parallel_grads"
    over = rank_group(name, group)
    marked = [
        one for one in _with_gradients(name, _parameters(name, parameters)) if getattr(one, "sequence_parallel", False)
    ]
    kinds: dict[Any, list[Tensor]] = {}
    for parameter in marked:
        gradient = _local(_gradient(name, parameter))
        kinds.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for gradients in kinds.values():
        flat = transport.all_reduce_(over, torch.cat([one.reshape(-1) for one in gradients])).wait()
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))
    return len(marked)


class _GradNorm:
    """A p-norm of the gradients of `parameters` as sums of p-th powers, or for p = inf as maxima."""

    def __init__(self, function: str, norm_type: object, every: list[Tensor], parameters: list[Tensor]) -> None:
        if isinstance(norm_type, bool) or not isinstance(norm_type, int | float):
            fail_type(function, "norm_type", "a number", type(norm_type).__name__)
        if not norm_type > 0:
            fail(function, "norm_type", "> 0", norm_type)
        self.function, self.order = function, float(norm_type)
        self.largest = math.isinf(self.order)
        # A rank whose parameters have no gradient takes part in the sums.
        self.device = every[0].device if every else torch.device("cuda" if torch.cuda.is_available() else "cpu")
        double = any(_gradient(function, one).dtype == torch.float64 for one in parameters)
        self.dtype = torch.float64 if double else torch.float32

    def over_ranks(self, over: RankGroup, parameters: list[Tensor]) -> Tensor:
        """Return the norm's sum over one group: parts from every rank, copies from its first."""
        kinds: dict[Any, list[Tensor]] = {}  # parts and copies apart, and what is to be added over dims of a mesh
        for parameter in parameters:
            gradient = _gradient(self.function, parameter)
            part = bool(getattr(parameter, "tensor_model_parallel", False))
            kinds.setdefault((part, *_sharded_over(self.function, gradient)), []).append(self._term(_local(gradient)))
        counted = list[Tensor]()
        for (part, mesh, dims), terms in kinds.items():
            term = self.joined(terms)
            for dim in dims:
                term = self.reduce(rank_group(self.function, mesh.get_group(dim)), term)
            if part or over.rank == 0:
                counted.append(term)
        return self.reduce(over, self.joined(counted))

    def _term(self, gradient: Tensor) -> Tensor:
        if not gradient.numel():
            return self._zero()
        found = torch.linalg.vector_norm(gradient, self.order, dtype=wide_dtype(gradient.dtype)).to(torch.float64)
        return found if self.largest else found**self.order

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def joined(self, terms: list[Tensor]) -> Tensor:
        stacked = torch.stack([self._zero(), *(one.to(self.device) for one in terms)])
        return stacked.max() if self.largest else stacked.sum()

    def reduce(self, over: RankGroup, term: Tensor) -> Tensor:
        """Return the sum, or the largest, over the ranks."""
        return transport.all_reduce_(over, term, dist.ReduceOp.MAX if self.largest else dist.ReduceOp.SUM).wait()

    def finish(self, total: Tensor) -> Tensor:
        return (total if self.largest else total ** (1 / self.order)).to(self.dtype)


def _parameters(function: str, given: object) -> list[Tensor]:
    """Return the parameters, each once."""
    if isinstance(given, nn.Module):
        for layer in given.modules():
            if isinstance(layer, ParallelLayer):
                layer.mark_parameters()
        given = given.parameters()
    if isinstance(given, Tensor):
        given = [given]
    if not isinstance(given, Iterable):
        fail_type(function, "parameters", "a module or parameters", type(given).__name__)
    found = list[Any](dict.fromkeys(given))
    for one in found:
        if not isinstance(one, Tensor):
            fail_type(function, "parameters", "a module or parameters", f"one with a {type(one).__name__}")
    return found


def _with_gradients(function: str, parameters: list[Tensor]) -> list[Tensor]:
    return [one for one in parameters if _gradient(function, one) is not None]


def _gradient(function: str, parameter: Tensor) -> Any:
    """Return the gradient that the optimizer will read: `main_grad` where there is one."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return parameter.grad
    if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
        advice = "Add .grad to main_grad and set it to None."
        fail_with(function, "a parameter has gradients in both main_grad and .grad", advice=advice)
    return main


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if is_dtensor(gradient) else gradient


def _sharded_over(function: str, gradient: Any) -> tuple[Any, tuple[int, ...]]:
    """Return (mesh, its dims whose ranks hold other elements) of a DTensor; (None, ()) of a tensor."""
    if not is_dtensor(gradient):
        return None, ()
    if any(one.is_partial() for one in gradient.placements):
        fail_with(function, f"a gradient is not reduced yet: {gradient.placements}", advice="Redistribute it first.")
    return gradient.device_mesh, tuple(dim for dim, one in enumerate(gradient.placements) if not one.is_replicate())
