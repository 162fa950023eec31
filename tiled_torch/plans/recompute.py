"""Activation checkpointing of a finished model: every layer, every k-th layer, or all but what costs most to compute again."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shared_specs.config import Checkpointing
from shared_specs.errors import UnsupportedError, error_text
from tiled_torch.collectives.conjugates import KeptParts
from tiled_torch.layers.random import RandomStates, Together, living, replay_contexts
from tiled_torch.models.block.offload import asked_to_offload, input_on_host
from tiled_torch.plans.registry import REGISTER, Plan, plan_of

_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default})
_REDUCE_SCATTERS = frozenset(
    {
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.reduce_scatter_tensor_coalesced.default,
    }
)
_SOFTMAXES = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})
_NOT_OFFLOADED = (
    "parallelize: activation_checkpointing_enable(offload=True) has no effect on layers whose config.checkpointing.mode keeps "
    'more than their inputs. Take mode="full" to keep these in host memory.'
)
_PLAIN = (Tensor, nn.Parameter, DTensor)
# Hooks of saved tensors, as `tile` has them, do not see what a selective checkpoint keeps. torch 2.14 wants to be told so.
_HOOKS = "respect_saved_tensors_hooks"
_HOOKS_UNASKED: dict[str, Any] = {_HOOKS: False} if _HOOKS in inspect.signature(checkpoint).parameters else {}


def apply_checkpointing(model: nn.Module, checkpointing: Checkpointing, plan: Plan | None = None) -> None:
    """Make the layers of a model keep less for backward and recompute the rest. The layers' classes change in place.

    Args:
        model: one whose layers a plan knows. plan: used instead of that plan.
        checkpointing: mode "full": every layer keeps its input; with `offload` the input is in host memory, and backward
            fetches it one layer ahead. "layers": every `every`-th layer keeps its input, the others keep everything.
            "products": a layer keeps its input and the results of its first, third, ... matrix product (of linear layers;
            products inside tiled functions are not counted). "op": a layer also keeps the output of attention and the results
            of reduce-scatters, so neither is recomputed. Every operator with attention in its name counts: PyTorch's own,
            FlexAttention's and those of packages. If attention is two products around a softmax, the second product's result
            is kept and the probabilities are recomputed.
            A transformers model's own checkpointing of such layers is replaced; its `offload=True` is kept, or
            warned of where more than inputs is kept.
    Numerics: layers are recomputed with the same random numbers, including those of every `RandomStates`.
    Memory: what a layer keeps for B x S tokens of hidden size H. "full": B S H of its dtype. "products": also the outputs of
        every second linear layer. "op": also B S heads d of attention, 4 B S heads bytes of its log-sum-exp, and for each
        reduce-scatter this rank's part of B S H.
    Raises:
        UnsupportedError: the model's layers are not known.
    Source: modes "products" and "op" are torchtitan's, arXiv 2410.06511.
    """
    every = checkpointing.every or 1
    context = {"products": every_second_product, "op": most_expensive}.get(checkpointing.mode)
    if plan is None:
        plan = plan_of(model, name := "apply_checkpointing")
        check_checkpointing(name, checkpointing, (), plan.no_layers)
    for blocks in plan.lists_of(model):
        for number, block in enumerate(blocks, start=1):
            if is_tiled_block(block):
                block._offload = checkpointing.offload  # type: ignore[assignment]
            elif number % every == 0:
                block.__class__ = _checkpointed_class(type(block))
                block._checkpoint_contexts = context  # type: ignore[assignment]
                block._offload, block._layer_count = checkpointing.offload, len(blocks)  # type: ignore[assignment]


def is_tiled_block(block: nn.Module) -> bool:
    """Return whether a layer is its own checkpoint: `tile_model(scope="block")`."""
    return hasattr(block, "_block_tiling")


def reason_not_offloaded(checkpointing: Checkpointing | None) -> str | None:
    """Return why the inputs of layers cannot wait in host memory in a mode; None where they can."""
    if checkpointing is None or checkpointing.mode == "full":
        return None
    return f"Of mode {checkpointing.mode!r} more is kept than the layers' inputs; take full."


def check_checkpointing(
    function: str, checkpointing: Checkpointing | None, blocks: Iterable[nn.Module], no_layers: str | None = None
) -> None:
    """Check that layers can be recomputed as asked.

    Args:
        no_layers: of the model's plan.
    Raises:
        UnsupportedError: they are not known, or are their own checkpoints, and another one is asked for than of each of them.
    """
    if checkpointing is not None and no_layers is not None:
        rule = "None for a model whose layers are not known"
        advice = f"{no_layers} {REGISTER}"
        raise UnsupportedError(error_text(function, "config.checkpointing", rule, "Checkpointing", advice=advice))
    if checkpointing is None or checkpointing.mode == "full" or not any(map(is_tiled_block, blocks)):
        return
    rule, got = "full with scope='block'", checkpointing.mode
    advice = "Such a layer keeps its input alone. Or use scope='mlp'."
    raise UnsupportedError(error_text(function, "config.checkpointing.mode", rule, got, advice=advice))


class Checkpointed:
    """Forward of a layer that is computed again in backward; comes before the original class in the order of methods."""

    _checkpoint_contexts: Callable[[], Any] | None
    _compiled_inside: Callable[..., Any] | None = None  # see `plans/compile.py`
    _offload: bool = False
    _layer_count: int = 1  # of the model

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Nothing: transformers' own checkpointing around this one would keep the input once more, on the host too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._compiled_inside or super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kwargs = _without_cache(self, kwargs)
        contexts = self._checkpoint_contexts
        if not torch.compiler.is_compiling() and living():
            contexts = partial(replay_contexts, contexts)
        options = {} if contexts is None else {"context_fn": contexts, **_HOOKS_UNASKED}
        x = args[0] if args else next(iter(kwargs.values()), None)
        asked, selective = asked_to_offload(self), self._checkpoint_contexts is not None
        if asked and selective:
            warnings.warn(_NOT_OFFLOADED, stacklevel=2)
        offload = self._offload or (asked and not selective)
        with input_on_host(x, inputs=self._layer_count) if offload else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """As nn.Module's, which leaves out what is compiled: it is this module's, and a copy would compute with its weights."""
        state: Any = super().__getstate__()
        state.pop("_compiled_inside", None)
        return state

    def compile(self, *args: Any, **options: Any) -> None:
        """As nn.Module's. Inside the checkpoint where modules of the layer have named streams: the compiler takes the contexts
        of a selective checkpoint alone, so that a replay inside compiled code would draw other numbers."""
        if self._checkpoint_contexts is None and _has_streams(self):
            self._compiled_inside = torch.compile(super().forward, *args, **options)  # type: ignore[misc]
        else:
            super().compile(*args, **options)  # type: ignore[misc]


def _has_streams(layer: Any) -> bool:
    return any(isinstance(value, RandomStates) for module in layer.modules() for value in vars(module).values())


@cache
def _checkpointed_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (Checkpointed, plain), {"__module__": plain.__module__})


def _without_cache(layer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face models fill a cache of keys and values unless told otherwise; a replay would fill it twice."""
    cache = kwargs.get("past_key_values")
    if cache is None:
        return kwargs
    if cache.get_seq_length(getattr(getattr(layer, "self_attn", layer), "layer_idx", 0)) > 0:
        text = error_text(
            "parallelize", "past_key_values", "empty in a checkpointed layer with gradients", "a filled one"
        )
        raise UnsupportedError(text)
    return kwargs | {"past_key_values": None}


def every_second_product() -> Any:
    """Return the contexts of one selective checkpoint; it counts the products of one forward and of its replay."""
    return create_selective_checkpoint_contexts(_Products())


def most_expensive() -> Any:
    """Return the contexts of one selective checkpoint of mode "op"."""
    forward, again = create_selective_checkpoint_contexts(_Operators())
    if torch.compiler.is_compiling():
        return forward, again  # the compiler takes no others, and collectives of `transport` are in no graph
    parts = KeptParts()
    return Together(lambda: (parts.taken(), forward)), Together(lambda: (parts.given(), again))


class _Products:
    """Keeps the results of the first, third, ... product."""

    def __init__(self) -> None:
        self.counts = {False: 0, True: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        kept = self.keeps(context.is_recompute, operator, args)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def keeps(self, again: bool, operator: Any, args: tuple[Any, ...]) -> bool:
        if operator not in _PRODUCTS or _is_part(args):
            return False
        self.counts[again] += 1
        return self.counts[again] % 2 == 1


class _Operators(_Products):
    """Keeps what attention and reduce-scatters return as well."""

    def __init__(self) -> None:
        super().__init__()
        self.probabilities: dict[bool, Any] = {False: None, True: None}  # shape of the last softmax

    def keeps(self, again: bool, operator: Any, args: tuple[Any, ...]) -> bool:
        if operator in _SOFTMAXES:
            self.probabilities[again] = args[0].shape
        if operator is torch.ops.aten.bmm.default:
            return self._is_attended(again, args[0].shape)
        return operator in _REDUCE_SCATTERS or _is_attention(operator) or super().keeps(again, operator, args)

    def _is_attended(self, again: bool, factor: Any) -> bool:
        """Return whether a product's first factor is the softmax before it, its leading dims made one."""
        found, self.probabilities[again] = self.probabilities[again], None
        return found is not None and found.numel() == factor.numel() and found[-2:] == factor[-2:]


@cache
def _is_attention(operator: Any) -> bool:
    """Return an operator, of PyTorch or of a package, that attends: by its name, as packages have one for each of their
    kernels.
    """
    schema = getattr(operator, "_schema", None)
    name = operator.name()
    return (
        ("attention" in name or "attn" in name)
        and "backward" not in name
        and not (schema is not None and schema.is_mutable)  # what is written in place would be missing in the replay
    )


def _is_part(args: tuple[Any, ...]) -> bool:
    """Return whether a product is a step of an autograd function, such as a tiled MLP, whose backward never asks for it.

    Products of float8 are functions of their own, of tensors that are not plain.
    """
    return not torch.is_grad_enabled() and all(type(a) in _PLAIN for a in args if isinstance(a, Tensor))
