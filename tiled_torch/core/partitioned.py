"""Parameters that DeepSpeed's ZeRO-3 keeps in parts: who gathers them, and gathering them where no module's hooks do.

Its engine hangs hooks on modules, which gather what a module owns before its forward and its backward, and also what has
been registered with it ("external" parameters). A module with `_z3_leaf` is the last one that gets hooks: they gather all
that is inside, and reduce its gradients together, which works for one call in each backward and where its input requires
grad. DeepSpeed itself is never imported here: where one of its parameters is, it has been.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Never

import torch
from torch import Tensor, nn

from shared_specs.errors import UnsupportedError, error_text

ENGINE = "deepspeed"
_HELD: dict[
    int, int
] = {}  # parameters that calls under way have gathered around all of their shards, by id, and how many calls


def is_partitioned(tensor: Any) -> bool:
    """Return whether a tensor is a parameter of ZeRO-3, gathered now or not."""
    return hasattr(tensor, "ds_id")


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of a parameter of ZeRO-3 that it has when it is gathered."""
    return tuple(tensor.ds_shape if is_partitioned(tensor) else tensor.shape)  # type: ignore[attr-defined]


def gathering(*tensors: Tensor | None, write: bool = False) -> AbstractContextManager[Any]:
    """The parameters of ZeRO-3 among tensors are whole inside. write: rank 0's values are everyone's afterwards.

    Every rank has to come here.
    """
    found = [tensor for tensor in tensors if is_partitioned(tensor)]
    if not found:
        return nullcontext()
    return sys.modules[ENGINE].zero.GatheredParameters(found, modifier_rank=0 if write else None)


def rows_in_whole(part: Tensor) -> slice | None:
    """Return which rows a view of a parameter of ZeRO-3 is; None of any other tensor.

    Who keeps the view keeps what was gathered: keep the parameter, and cut it again where it has been gathered again.
    """
    whole = None if torch.compiler.is_compiling() else part._base
    if whole is None or not is_partitioned(whole) or part.stride() != whole.stride():
        return None
    start = int(part.storage_offset() - whole.storage_offset()) // whole.stride(0)
    return slice(start, start + part.shape[0])


def gathers(module: nn.Module) -> bool:
    """Return whether ZeRO-3 hung its hooks on a module."""
    return "ds_id" in vars(module)


def weight_of(linear: nn.Module) -> Any:
    """Return a layer's weight, looked at from outside its forward: to ZeRO-3 that is to want it gathered, from now on every
    time.
    """
    found = linear._parameters.get("weight")  # past its __getitem__
    return linear.weight if found is None else found


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module's hooks gather all that is inside, and nothing inside has hooks."""
    return getattr(module, "_z3_leaf", False)


def gather_around(module: nn.Module, parameters: Iterable[Any]) -> None:
    """Make a module's own hooks gather these parameters from now on: their owners are not called in its forward."""
    if not gathers(module) or is_leaf(module):
        return
    for parameter in parameters:
        if is_partitioned(parameter) and id(parameter) not in module._external_params:  # type: ignore[operator]
            sys.modules[ENGINE].zero.register_external_parameter(module, parameter)
            parameter.all_gather()  # they have run already


def is_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a hook of a module is one of ZeRO-3's; those of DeepSpeed's profiler are not."""
    return getattr(hook, "__module__", "").startswith((f"{ENGINE}.runtime.zero.", f"{ENGINE}.utils.nvtx"))


def called_once(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """forward(x) with what a module's hooks do before and after its own forward, and in backward, done once around it."""
    module.forward = forward  # type: ignore[method-assign]
    try:
        return module(x)
    finally:
        del module.forward


@contextmanager
def held(parameters: Iterable[Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the shards of a call read parameters that the caller has gathered around all of them, without a module's hooks.

    modules: those whose own parameters are all among them. ZeRO-3's hooks on them stay silent here: they would gather and free
    for every shard.
    """
    ids = [id(parameter) for parameter in parameters]
    silenced = [table for module in modules for table in (module._forward_pre_hooks, module._forward_hooks)]
    before = [(table, dict(table)) for table in silenced if any(map(is_hook, table.values()))]
    for table, hooks in before:
        for number, hook in hooks.items():
            if is_hook(hook):
                del table[number]
    for key in ids:
        _HELD[key] = _HELD.get(key, 0) + 1
    try:
        yield
    finally:
        for key in ids:
            _HELD[key] -= 1
            if not _HELD[key]:
                del _HELD[key]
        for table, hooks in before:
            table.clear()
            table.update(hooks)


def refuse_parts(parameters: Iterable[Any]) -> None:
    """Refuse parameters that ZeRO-3 has split: it would fetch each one module by module, once for every shard.

    Parameters that a leaf module around fn has gathered, or that are `held`, are whole for all shards, and pass.

    Raises:
        UnsupportedError: one of them is split.
    """
    whole = ((hasattr(p, "ds_z3_leaf_module") and p.numel()) or id(p) in _HELD for p in parameters if is_partitioned(p))
    if not all(whole):
        _refuse()


def refuse_called(module: nn.Module) -> None:
    """Raise UnsupportedError for a module that fn calls and whose hooks gather."""
    own = module.parameters(recurse=is_leaf(module)) if gathers(module) else ()
    if any(is_partitioned(parameter) and id(parameter) not in _HELD for parameter in own):
        _refuse()


def _refuse() -> Never:
    advice = (
        "Call tile inside the forward of a leaf module of ZeRO-3 that owns it (deepspeed.utils.set_z3_leaf_modules), as the "
        "modules of tile_model are, or use ZeRO stage 0, 1 or 2, or fully_shard."
    )
    raise UnsupportedError(error_text("tile", "a parameter of fn", "whole", "a ZeRO-3 part", advice=advice))


def refuse_early_gradient(module: nn.Module, args: Sequence[Any]) -> None:
    """Refuse a leaf module under ZeRO-3 none of whose inputs requires grad.

    ZeRO-3 reduces a leaf module's gradients in a hook on the gradient of its input. Without such an input the hook runs
    first, and takes gradients that are not there yet for zeros.

    Raises:
        UnsupportedError: no positional argument requires grad.
    """
    if (
        not (gathers(module) and is_leaf(module))
        or not torch.is_grad_enabled()
        or not any(p.requires_grad for p in module.parameters())
    ):
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in args):
        return
    rule, got = "a positional argument that requires grad, where ZeRO-3 trains the MLP", "none that does"
    advice = "Call model.enable_input_require_grads() first: the engine reduces gradients once that of x is there."
    raise UnsupportedError(error_text("tile_model", "x of an MLP", rule, got, advice=advice))
