"""A model without memory: a twin of one that is there, and what lets its layers run as they would on a GPU."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiled_torch.core.partitioned import whole_shape
from tiled_torch.models.attention import SDPA
from tiled_torch.models.heads.planned import without_memory
from tiled_torch.models.tiling import untile_model

_FLASH = "counted_attention"  # what stands for FlashAttention among transformers' attention functions
_VALUES = ("meta tensor", "torch.nonzero")  # in what PyTorch says where code asks a tensor without memory for values
_TABLES = ("position", "wpe")  # in names of tables of positions


def twin_of(model: Any) -> Any:
    """Return an untiled twin of a model of transformers on the meta device, in training; the model is not changed.

    Made by its class from its configuration; if it has other parameters than these, such as adapters, a copy.
    """
    untiled = getattr(type(model), "_untiled", type(model))
    config = copy.deepcopy(model.config)
    count_flash(config)
    with warnings.catch_warnings(), simulated_device(), torch.device("meta"):
        warnings.simplefilter("ignore")
        twin = untiled(config).to("meta")  # where torch.normal makes none
    sizes = {name: whole_shape(parameter) for name, parameter in model.named_parameters()}
    if sizes != {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}:
        twin = untile_model(without_memory(model))
        for module in twin.modules():
            count_flash(getattr(module, "config", None))
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in twin.named_parameters():
        parameter.requires_grad_(trained[name])
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    for name, buffer in twin.named_buffers():
        buffer.data = buffer.data.to(dtypes.get(name, buffer.dtype))
    return twin.train()


def count_flash(config: Any) -> None:
    """Let what stands for FlashAttention attend in place of any implementation that is neither eager nor PyTorch's."""
    for each in (config, config.get_text_config()) if hasattr(config, "get_text_config") else ():
        if getattr(each, "_attn_implementation", None) not in ("eager", "sdpa", SDPA, None):
            each._attn_implementation = _FLASH


def table_of(model: Any) -> Any:
    """Return the table of a model's tokens; None where it does not say."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def positions_of(twin: Any) -> int | None:
    """Return for how many tokens a model of transformers has learned positions, or makes them; None where it does not say."""
    if not hasattr(getattr(twin, "config", None), "get_text_config"):
        return None
    table = table_of(twin)
    tables = ((name, module) for name, module in twin.named_modules() if isinstance(module, nn.Embedding))
    found = [m.num_embeddings for name, m in tables if m is not table and any(part in name for part in _TABLES)]
    said = getattr(twin.config.get_text_config(), "max_position_embeddings", None)
    made = getattr(twin.config, "max_seq_len", None)  # for so many MPT makes its positions, in no table
    if not found:
        return made if type(made) is int else None
    if type(said) is not int:
        return min(found)
    return min([each for each in found if each >= said] or [*found, said])  # others are of parts of an image


def cast_parameters(twin: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter the dtype in which `fully_shard` gathers it. Buffers stay."""
    for parameter in twin.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def hooked(modules: Iterable[nn.Module], hook: Callable[..., Any], *, after: bool = False) -> Iterator[None]:
    """Call a hook before the forward of each of these modules inside this context, with module, args and kwargs; or after it,
    with module, args and its result."""
    if after:
        handles = [module.register_forward_hook(hook) for module in modules]
    else:
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def simulated_device() -> Iterator[None]:
    """Let models of transformers run on the meta device inside this context, with FlashAttention as on a GPU."""
    enabled = torch.is_autocast_enabled

    def is_enabled(kind: Any = None) -> bool:
        return False if kind == "meta" else enabled(kind) if kind is not None else enabled()

    patches: tuple[tuple[Any, str, Any], ...] = (
        (nn.functional, "scaled_dot_product_attention", _attend),
        (torch, "is_autocast_enabled", is_enabled),
        (masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),  # which asks for values: one document
    )
    with ExitStack() as stack, warnings.catch_warnings(), torch.random.fork_rng(devices=()):
        warnings.simplefilter("ignore")
        for target, name, value in patches:
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {_FLASH: _attend_by_flash}))
        stack.enter_context(patch.dict(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, {_FLASH: lambda *_, **__: None}))
        yield


def first_line(error: Exception, who: str) -> str:
    """Return what an error of code that is not ours says first. who: asks for values, where it says that."""
    if isinstance(error, NotImplementedError) and any(text in str(error) for text in _VALUES):
        return f"{who} asks for values, on which its sizes may depend"
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _CountedAttention(torch.autograd.Function):
    """What FlashAttention leaves in memory: its output, and the log-sum-exp of every head and token."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32), *mask)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, _, _, *mask = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), *(None for _ in mask)


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, *_: Any, **__: Any) -> Tensor:
    """As scaled_dot_product_attention, which makes of a mask of booleans one to add."""
    if attn_mask is None:
        return _CountedAttention.apply(q, k, v)  # type: ignore[no-any-return]
    added = q.new_empty(attn_mask.shape) if attn_mask.dtype == torch.bool else attn_mask
    return _CountedAttention.apply(q, k, v, added)  # type: ignore[no-any-return]


def _attend_by_flash(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    return _CountedAttention.apply(q, k, v).transpose(1, 2).contiguous(), None
