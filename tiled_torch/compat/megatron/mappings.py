"""Megatron-core's conjugate collectives by its own names, arguments in its order, over `tiled_torch.parallel`'s.

Each: see the function of `tiled_torch.parallel` that it calls. A group that is None is `parallel_state`'s.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from tiled_torch.collectives import api
from tiled_torch.collectives.groups import rank_group
from tiled_torch.compat.megatron.parallel_state import group_or_default


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return x; backward sums its gradient."""
    return api.copy_to_tensor_parallel_region(input_, group=group_or_default(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return the sum over the ranks; backward hands the gradient through."""
    return api.reduce_from_tensor_parallel_region(input_, group=group_or_default(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return this rank's stretch of the last dim; backward gathers."""
    return api.scatter_to_tensor_parallel_region(input_, group=group_or_default(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return all ranks' last dims side by side; backward keeps this rank's stretch."""
    return api.gather_from_tensor_parallel_region(input_, group=group_or_default(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return this rank's stretch of the first dim; backward gathers."""
    return api.scatter_to_sequence_parallel_region(input_, group=group_or_default(group))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Return all ranks' first dims side by side; backward sums and scatters, or keeps this rank's rows."""
    _no_buffer("gather_from_sequence_parallel_region", use_global_buffer)
    return api.gather_from_sequence_parallel_region(
        input_,
        split_sizes=output_split_sizes,
        tensor_parallel_output_grad=tensor_parallel_output_grad,
        group=group_or_default(group),
    )


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Any = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Return this rank's rows of the sum over the ranks; backward gathers."""
    _no_buffer("reduce_scatter_to_sequence_parallel_region", use_global_buffer)
    return api.reduce_scatter_to_sequence_parallel_region(
        input_, split_sizes=input_split_sizes, group=group_or_default(group)
    )


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return all ranks' last dims side by side; backward sums and scatters."""
    return api.all_gather_last_dim_from_tensor_parallel_region(input_, group=group_or_default(group))


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    """Return this rank's stretch of the last dim of the sum; backward gathers."""
    return api.reduce_scatter_last_dim_to_tensor_parallel_region(input_, group=group_or_default(group))


def all_to_all(
    group: Any,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Return rows from every rank; backward sends the gradients the way back. group: has to be given."""
    if group is None:
        fail_type("all_to_all", "group", "a process group or a DeviceMesh", "None")
    if use_nccl_stream is not False:
        fail("all_to_all", "use_nccl_stream", "False", use_nccl_stream, advice="Streams are torch.distributed's here.")
    return api.all_to_all(
        input_, output_split_sizes=output_split_sizes_, input_split_sizes=input_split_sizes, group=group
    )


def all_to_all_sp2hp(input_: Tensor, group: Any = None) -> Tensor:
    """[tokens / R, H] becomes [tokens, H / R]; leading dims are merged into the tokens."""
    rows = input_.reshape(-1, input_.shape[-1])
    return api.all_to_all_sequence_to_hidden(rows, group=group_or_default(group))


def all_to_all_hp2sp(input_: Tensor, group: Any = None) -> Tensor:
    """[tokens, H / R] becomes [tokens / R, H]; leading dims are merged into the tokens."""
    rows = input_.reshape(-1, input_.shape[-1])
    return api.all_to_all_hidden_to_sequence(rows, group=group_or_default(group))


def _no_buffer(function: str, use_global_buffer: bool) -> None:
    checks.check_flags(function, use_global_buffer=use_global_buffer)
    if use_global_buffer:
        fail(function, "use_global_buffer", "False", True, advice="There is no global buffer here.")


def _pair(there: Callable[..., Tensor], back: Callable[[Any, Tensor], Tensor], options: int = 0) -> Any:
    """Return what stands for an autograd function of Megatron-core's by its static methods: its two directions."""

    def symbolic(graph: Any, input_: Tensor, group: Any = None, *rest: Any) -> Tensor:
        del graph
        return there(input_, *rest, group=group)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        return back(ctx, grad_output.detach()), *(None,) * (1 + options)

    methods = {"symbolic": staticmethod(symbolic), "backward": staticmethod(backward)}
    return type(
        "Region", (), methods | {"apply": staticmethod(lambda x, group, *rest: symbolic(None, x, group, *rest))}
    )


def _of_rows(ctx: Any, dy: Tensor) -> Tensor:
    if ctx.tensor_parallel_output_grad:
        return reduce_scatter_to_sequence_parallel_region(dy, ctx.group, ctx.output_split_sizes)
    over = rank_group("gather_from_sequence_parallel_region", ctx.group)
    sizes = ctx.output_split_sizes or [dy.shape[0] // over.size] * over.size
    return dy.split(list(sizes))[over.rank]


# Megatron-core's own tests call these by name.
_CopyToModelParallelRegion = _pair(
    copy_to_tensor_model_parallel_region, lambda ctx, dy: reduce_from_tensor_model_parallel_region(dy, ctx.group)
)
_ReduceFromModelParallelRegion = _pair(reduce_from_tensor_model_parallel_region, lambda ctx, dy: dy)
_ScatterToModelParallelRegion = _pair(
    scatter_to_tensor_model_parallel_region,
    lambda ctx, dy: gather_from_tensor_model_parallel_region(dy, ctx.group),
)
_GatherFromModelParallelRegion = _pair(
    gather_from_tensor_model_parallel_region, lambda ctx, dy: scatter_to_tensor_model_parallel_region(dy, ctx.group)
)
_ScatterToSequenceParallelRegion = _pair(
    scatter_to_sequence_parallel_region,
    lambda ctx, dy: gather_from_sequence_parallel_region(dy, False, ctx.group),
)
_GatherFromSequenceParallelRegion = _pair(gather_from_sequence_parallel_region, _of_rows, 3)
_ReduceScatterToSequenceParallelRegion = _pair(
    reduce_scatter_to_sequence_parallel_region,
    lambda ctx, dy: gather_from_sequence_parallel_region(dy, True, ctx.group, ctx.input_split_sizes),
    2,
)
