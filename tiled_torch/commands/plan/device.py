"""A device that is not there: its tensors have sizes and no values, so that a step of any size can be run anywhere.

PyTorch lets a program bring a kind of device of its own (privateuse1). This one has streams that do nothing; with fake
tensors on it a memory tracker sees what is on the device and what waits in host memory apart. A process that has it keeps it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._tools import mod_tracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.library import Library
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tiled_torch.layers import ring

NAME = "simulated"


class _Event:
    """A moment that has come."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> "_Event":
        return self

    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    """A stream on which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Device:
    """The module that PyTorch asks for this kind of device, as `torch.cuda` is for CUDA's."""

    Stream, Event = _Stream, _Event

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...
    def set_device(self, device: Any) -> None: ...
    def synchronize(self, device: Any = None) -> None: ...
    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None: ...


@cache
def _registered() -> Library:
    """Return what the device's own operators are registered in, which has to stay: those that a GPU has one kernel for, where
    PyTorch composes them of several on a device that it does not know."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
    own = Library("aten", "IMPL")
    for name in ("silu_backward", "mish_backward"):
        own.impl(name, lambda gradient, x: torch.empty_like(gradient), "PrivateUse1")
    return own


@contextmanager
def simulated_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of `count` simulated ranks inside this context, with the device; the others are nobody."""
    _registered()
    _forget_meshes()
    dist.init_process_group(f"cpu:fake,{NAME}:fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        with ExitStack() as stack:
            for target, name, value in _PATCHES:
                stack.enter_context(patch.object(target, name, value))
            yield
    finally:
        dist.destroy_process_group()


def _forget_meshes() -> None:
    """DTensor remembers meshes by what they look like; one of a simulation before has process groups that are no more."""
    forget = getattr(debug, "_clear_sharding_prop_cache", None)  # with the fast path of newer ones
    forget = forget or DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear  # type: ignore[attr-defined]
    forget()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlashAttention, which a GPU takes: for a device that PyTorch does not know it would take the scores of all pairs."""
    if q.device.type != NAME:
        return _ATTEND(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:  # a mask, or heads of values of another size: PyTorch's memory-efficient attention
        attn_mask = q.new_empty(attn_mask.shape) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    if attn_mask is not None or v.shape[-1] != q.shape[-1]:
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def _fuses(q: Tensor, k: Tensor, v: Tensor, how: Any) -> bool:
    """Where a ring's parts are computed, it too takes FlashAttention."""
    return q.device.type == NAME or _FUSES(q, k, v, how)


def _hook_where_gradients_are(tensors: Any, *args: Any, **options: Any) -> Any:
    """The memory tracker asks for the gradients of modules' inputs, also inside of functions that make none."""
    kept = [t for t in tensors if t.grad_fn is not None or torch.is_grad_enabled()]
    return _HOOK(kept, *args, **options)


def _coordinates(mesh: DeviceMesh) -> Any:
    """fully_shard makes a mesh of two where weights are split already; of fake tensors nobody knows where in it a rank is."""
    with unset_fake_temporarily():
        return _COORDINATES(mesh)  # type: ignore[misc]


_COORDINATES = getattr(DeviceMesh, "_compute_coordinate_on_dim", None)  # not in every PyTorch
_ATTEND, _HOOK = torch.nn.functional.scaled_dot_product_attention, torch.autograd.graph.register_multi_grad_hook
_FUSES = ring.fuses
_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (torch.nn.functional, "scaled_dot_product_attention", _attend),
    (ring, "fuses", _fuses),
    *(((DeviceMesh, "_compute_coordinate_on_dim", _coordinates),) if _COORDINATES else ()),
    (mod_tracker, "register_multi_grad_hook", _hook_where_gradients_are),
    (Tensor, "record_stream", lambda *_: None),
)
