"""Hugging Face decoders whose loss is of several ranks: of context ranks, which cut a batch in front, and of data ranks."""

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shared_specs.config import ContextKind
from shared_specs.errors import UnsupportedError, error_text, fail, show_shape
from shared_specs.layers.ring import Order
from shared_specs.plans.checks import check_context_heads, refuse_context
from tiled_torch.collectives.conjugates import Sum, move
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.same_batch import check_same_batch
from tiled_torch.layers.attention import causal_attention
from tiled_torch.layers.context import context_attention, context_slice, whole_batch
from tiled_torch.layers.documents import packed
from tiled_torch.layers.ring import ring_attention

_NAME = "parallelize"
_FORWARD = "forward with context parallelism"
_AUXILIARY = "The losses of routers are means over all tokens, of which a rank has a part."
# What a model is given of every token, and how else it is told of them.
_CUT = ("input_ids", "inputs_embeds")
_REFUSED = {
    "past_key_values": "Generate with a model that was not parallelized.",
    "use_cache": "Generate with a model that was not parallelized.",
    "logits_to_keep": "Logits are those of this rank's tokens.",
    "output_attentions": "Weights of attention are nowhere written out.",
    "output_router_logits": _AUXILIARY,
}
_KNOWN = (*_CUT, *_REFUSED, "position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch")


def check_context(model: Any, ranks: Mapping[str, int]) -> None:
    """Check that the model's attention, its heads and its positions can be dealt out to ranks.

    ranks: of the axes that divide the heads, the context's last.

    Raises:
        SpecError: the ranks do not divide the heads.
        UnsupportedError: the model's attention or positions cannot be dealt out.
    """
    from tiled_torch.models.attention import reason_not_routed

    if model.base_model is not model and not hasattr(model, "lm_head"):
        # A head that reads a sequence's last token, or labels that are not shifted.
        refuse_context(_NAME, type(model).__name__, [*ranks][-1])
    check_router_losses(_NAME, model)
    reason = reason_not_routed(model)
    if reason is not None:
        rule = "one whose attention is torch's scaled_dot_product_attention with config.data.context_axis"
        raise UnsupportedError(error_text(_NAME, "model", rule, f"{type(model).__name__}: {reason}"))
    for kind in _rope_types(model.config) & {"dynamic", "longrope"}:
        rule = "one that does not depend on the length of the sequence, with config.data.context_axis"
        advice = "Each rank would take the length for that of its own tokens."
        raise UnsupportedError(error_text(_NAME, "rope_type", rule, repr(kind), advice=advice))
    check_context_heads(_NAME, model.config.num_attention_heads, ranks)


def _rope_types(config: Any) -> set[Any]:
    """Kinds of rotary positions, of all layers or by kind of layer."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return {one.get("rope_type", one.get("type")) for one in (given, *given.values()) if isinstance(one, dict)}


def apply_context(model: Any, mesh: DeviceMesh, kind: ContextKind = "ulysses") -> None:
    """Let the model be called with whole sequences and compute with this rank's tokens of them.

    mesh: of one axis, with "2d" of two, that of the rings first.
    """
    from tiled_torch.models.attention import route_attention

    axes = [mesh[axis] for axis in mesh.mesh_dim_names or ()] if mesh.ndim > 1 else [mesh]
    ring, heads = (axes[0] if kind != "ulysses" else None), (axes[-1] if kind != "ring" else None)
    attentions = [layer.self_attn for layer in model.base_model.layers]
    route_attention(model, attentions, partial(_attend, ring, heads))
    for attention in attentions:
        attention._exchanged_route, attention._exchanging = partial(_inside, ring), heads
        attention._in_ring = ring is not None
    cut = _Cut(axes, "tokens") if ring is None else _Cut(axes, "zigzag")
    model.register_forward_pre_hook(cut, with_kwargs=True)
    model.register_forward_hook(SummedLoss(*axes))


def _attend(
    ring: DeviceMesh | None,
    heads: DeviceMesh | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    documents: Any,
    **options: Any,
) -> Tensor:
    """Return attention over a ring, over ranks that exchange tokens for heads, or over rings of those."""
    attend = partial(_inside, ring, **options)
    if heads is None:
        return attend(q, k, v, documents=documents)
    return context_attention(q, k, v, attend, documents=documents, group=heads)


def _inside(
    ring: DeviceMesh | None, q: Tensor, k: Tensor, v: Tensor, *, documents: Any = None, **options: Any
) -> Tensor:
    """Return attention of the heads of a rank, over a ring or to all tokens."""
    if ring is None:
        return causal_attention(q, k, v, documents=documents, **options)
    options.pop("dropout")  # none: `check_ring`
    return ring_attention(q, k, v, documents=documents, group=ring, **options)


class _Cut:
    """In front of the model: whole sequences become this rank's tokens, their positions and their shifted labels.

    The loss of these is divided by the valid labels of all tokens, so that the ranks' losses add up to the whole's mean. Where
    positions restart, attention is told of the documents of all tokens, and nothing is predicted at their seams.
    """

    def __init__(self, axes: list[DeviceMesh], order: Order) -> None:
        self.axes, self.compared = axes, False
        self.order: Order = order

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given = arguments_of(model, args, kwargs)
        _check_given(given)
        ignore_index = given.get("ignore_index", -100)
        names = (*_CUT, "position_ids", "labels", "shift_labels")
        whole = {name: given[name] for name in names if given.get(name) is not None}
        if not whole.keys().isdisjoint(("labels", "shift_labels")):
            check_decoder_loss(model)
        if not self.compared:  # who hands out batches wrongly does so in the first step
            for axis in self.axes:
                check_same_batch(_FORWARD, whole, axis, "Each takes its own tokens of it.")
            self.compared = True
        group: Any = self.axes[0] if len(self.axes) == 1 else tuple(self.axes)
        mine = context_slice(whole, ignore_index=ignore_index, order=self.order, group=group)
        given |= mine | {"attention_mask": None, "use_cache": False}
        documents = packed(whole.get("position_ids"))
        if documents is not None:
            given["documents"] = documents
        targets = given.pop("shift_labels", None)
        if targets is not None:
            given |= {"labels": targets, "shift_labels": targets}
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = _valid(whole, ignore_index)
        return (), given


class SummedLoss:
    """Behind the model: the loss of all tokens of the ranks of these axes, the same on every rank."""

    def __init__(self, *axes: DeviceMesh) -> None:
        self.axes = axes

    def __call__(self, model: Any, _: Any, outputs: Any) -> Any:
        # Every rank goes on with the whole loss, so that its backward sums what all of them ask for: the mean over the
        # ranks that sharded data parallelism takes of gradients is then that of equal parts.
        def total(loss: Tensor) -> Tensor:
            for axis in self.axes:
                loss = move(loss, rank_group(_FORWARD, axis), Sum(), Sum())
            return loss

        if isinstance(outputs, tuple):
            return (total(outputs[0]), *outputs[1:]) if outputs and outputs[0].dim() == 0 else outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = total(outputs.loss)
        return outputs


def apply_token_mean(model: Any, meshes: Sequence[DeviceMesh]) -> None:
    """Let the model, called with labels on every data rank, return the mean over all of their labels on each.

    Engines average the gradients of the ranks' losses, which are means over unequal numbers of labels that count. Here each
    rank's sum is divided by the number of all ranks', which they add up in front of the model; behind it the losses are added
    up. Two numbers are exchanged in a call.

    `num_items_in_batch`, where it is given, is how many labels count in all micro-batches of this rank's step; the ranks' are
    added up, and the losses of the micro-batches add up to the mean over all of them.

    Args:
        meshes: of one axis each, along which batches differ.
    """
    model.register_forward_pre_hook(_Counted(meshes), with_kwargs=True)
    model.register_forward_hook(SummedLoss(*meshes))


class _Counted:
    """In front of the model: what its loss is divided by."""

    def __init__(self, meshes: Sequence[DeviceMesh]) -> None:
        self.meshes = meshes

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = arguments_of(model, args, kwargs)
        names = ("labels", "shift_labels", "position_ids")
        whole = {name: given[name] for name in names if given.get(name) is not None}
        if whole.keys().isdisjoint(("labels", "shift_labels")):
            return None
        check_decoder_loss(model)
        check_router_losses("forward with config.data.loss_mean='tokens'", model, given)
        ignore_index = given.get("ignore_index", -100)
        # What is counted is what the loss is of: nothing across a seam of documents, in untiled models neither.
        targets = whole_batch(whole, ignore_index)["shift_labels"]
        count = given.get("num_items_in_batch")
        if count is None:
            count = (targets != ignore_index).sum()
        total = self._of_all(torch.as_tensor(count).to(targets.device, torch.int64))
        return (), given | {"labels": targets, "shift_labels": targets, "num_items_in_batch": total}

    def _of_all(self, count: Tensor) -> Tensor:
        total = count.clone()  # a tensor that a caller gave stays
        for mesh in self.meshes:
            dist.all_reduce(total, group=mesh.get_group())
        return total.clamp(min=1)


def arguments_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by their names."""
    found = dict(inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments)
    found.pop("self", None)
    return found | found.pop("kwargs", {})


def _check_given(given: Mapping[str, Any]) -> None:
    """Only what every rank is given alike is looked at, so that all of them refuse the same call."""
    for name, advice in _REFUSED.items():
        value = given.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):
            fail(_FORWARD, name, "left out", type(value).__name__, advice=advice)
    positions = given.get("position_ids")
    if positions is not None and not (isinstance(positions, Tensor) and positions.dim() == 2):
        got = show_shape(tuple(positions.shape)) if isinstance(positions, Tensor) else type(positions).__name__
        fail(_FORWARD, "position_ids", "[B or 1, tokens], of whole sequences", got)
    mask = given.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        advice = (
            "Pad on the right and leave the mask out: no token sees a later one, and labels of padding are ignored."
        )
        fail(_FORWARD, "attention_mask", "left out, or all ones", "a mask that hides tokens", advice=advice)
    for name, value in given.items():
        if name not in _KNOWN and isinstance(value, Tensor):
            raise UnsupportedError(
                error_text(_FORWARD, name, "left out: nothing is known of how it is split", "a tensor")
            )


def check_decoder_loss(model: Any) -> None:
    """Check that the model's loss is a mean over tokens, of which ranks can compute parts.

    Raises:
        UnsupportedError: it is another one.
    """
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        advice = "Compute it from the logits and the labels of context_slice."
        raise UnsupportedError(error_text(_FORWARD, "loss_function", "ForCausalLMLoss", loss, advice=advice))


def check_router_losses(function: str, model: Any, given: Mapping[str, Any] | None = None) -> None:
    """Check that a model, as it is configured or called, adds no losses of routers to its own: they are no sums over tokens.

    Raises:
        UnsupportedError: it does.
    """
    name = "output_router_logits"
    asked = (given or {}).get(name)
    if getattr(model.config, name, False) if asked is None else asked:
        raise UnsupportedError(error_text(function, name, "False", True, advice=_AUXILIARY))


def _valid(whole: Mapping[str, Tensor], ignore_index: int) -> Tensor:
    """Return how many labels count in the whole sequences, none at the end of a document."""
    targets = whole_batch(whole, ignore_index)["shift_labels"]
    return (targets != ignore_index).sum().clamp(min=1)
