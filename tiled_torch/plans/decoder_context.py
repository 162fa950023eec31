"""Context parallelism of Hugging Face decoders: a batch is cut in front of the model, attention and loss are across ranks."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.plans.checks import check_context_heads, refuse_context
from tiled_torch.collectives.conjugates import Sum, move
from tiled_torch.collectives.groups import rank_group
from tiled_torch.collectives.same_batch import check_same_batch
from tiled_torch.layers.context import context_attention, context_slice

_NAME = "parallelize"
_FORWARD = "forward with context parallelism"
# What a model is given of every token, and how else it is told of them.
_CUT = ("input_ids", "inputs_embeds")
_REFUSED = {
    "position_ids": "Positions are those of the whole sequence; packed sequences need masks that are not there yet.",
    "past_key_values": "Generate with a model that was not parallelized.",
    "use_cache": "Generate with a model that was not parallelized.",
    "logits_to_keep": "Logits are those of this rank's tokens.",
    "output_attentions": "Weights of attention are nowhere written out.",
}
_KNOWN = (*_CUT, *_REFUSED, "attention_mask", "labels", "shift_labels", "num_items_in_batch")


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


def apply_context(model: Any, mesh: DeviceMesh) -> None:
    """Let the model be called with whole sequences and compute with this rank's tokens of them."""
    from tiled_torch.models.attention import route_attention

    def route(q: Tensor, k: Tensor, v: Tensor, attend: Any) -> Tensor:
        return context_attention(q, k, v, attend, group=mesh)

    attentions = [layer.self_attn for layer in model.base_model.layers]
    route_attention(model, attentions, route)
    for attention in attentions:
        attention._context_ranks = mesh.size()
    model.register_forward_pre_hook(_Cut(mesh), with_kwargs=True)
    model.register_forward_hook(_Summed(mesh))


class _Cut:
    """In front of the model: whole sequences become this rank's tokens, their positions and their shifted labels.

    The loss of these is divided by the valid labels of all tokens, so that the ranks' losses add up to the whole's mean.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.compared = mesh, False

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given = _named(model, args, kwargs)
        _check_given(given)
        ignore_index = given.get("ignore_index", -100)
        whole = {name: given[name] for name in (*_CUT, "labels", "shift_labels") if given.get(name) is not None}
        if not whole.keys().isdisjoint(("labels", "shift_labels")):
            _check_loss(model)
        if not self.compared:  # who hands out batches wrongly does so in the first step
            check_same_batch(_FORWARD, whole, self.mesh, "Each takes its own tokens of it.")
            self.compared = True
        mine = context_slice(whole, ignore_index=ignore_index, group=self.mesh)
        given |= mine | {"attention_mask": None, "use_cache": False}
        targets = given.pop("shift_labels", None)
        if targets is not None:
            given |= {"labels": targets, "shift_labels": targets}
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = _valid(whole, ignore_index)
        return (), given


class _Summed:
    """Behind the model: the loss of all ranks' tokens, the same on every rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, model: Any, _: Any, outputs: Any) -> Any:
        # Every rank goes on with the whole loss, so that its backward sums what all of them ask for: the mean over the
        # ranks that sharded data parallelism takes of gradients is then that of equal parts.
        def total(loss: Tensor) -> Tensor:
            return move(loss, rank_group(_FORWARD, self.mesh), Sum(), Sum())

        if isinstance(outputs, tuple):
            return (total(outputs[0]), *outputs[1:]) if outputs and outputs[0].dim() == 0 else outputs
        if getattr(outputs, "loss", None) is not None:
            outputs.loss = total(outputs.loss)
        return outputs


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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


def _check_loss(model: Any) -> None:
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        advice = "Compute it from the logits and the labels of context_slice."
        raise UnsupportedError(error_text(_FORWARD, "loss_function", "ForCausalLMLoss", loss, advice=advice))


def _valid(whole: Mapping[str, Tensor], ignore_index: int) -> Tensor:
    """Return how many labels count in the whole sequences."""
    targets = whole["shift_labels"] if "shift_labels" in whole else whole["labels"][:, 1:]
    return (targets != ignore_index).sum().clamp(min=1)
