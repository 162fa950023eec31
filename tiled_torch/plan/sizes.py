"""The sizes of a transformers model, and its parameters as they are: dtypes, adapters, what is frozen."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from shared_specs.app.plan.decoder import Decoder, decoder_from, reason_no_formulas
from shared_specs.app.plan.function.checks import check_loss_fn, fail_no_module
from shared_specs.app.plan.held import Parameter, Place, held_of
from tiled_torch.core.partitioned import whole_shape
from tiled_torch.plans.data import sharing_layers

_HEADS = ("lm_head", "embed_out")


def decoder_of_model(function: str, model: Any, loss_fn: Any = None, tokens: int = 0) -> Decoder:
    """Return the sizes that the model's config says, or its layers, with the parameters that the model has; of a model of
    others, with a loss of its own and where no formula knows layers or loss, one whose step is measured.

    Args:
        model: a module, also on the meta device; of transformers, or of peft around one. loss_fn: see `plan`.
        tokens: of a sequence, for a step of a model that takes no other ones.
    Raises:
        TypeError: it is no module, or loss_fn no function. InputError: no formula knows it, and it cannot run without values.
    """
    if not isinstance(model, nn.Module):
        fail_no_module(function, model)
    check_loss_fn(function, loss_fn)
    config: Any = getattr(model, "config", None)
    if loss_fn is not None or not hasattr(config, "to_dict"):
        from tiled_torch.plan.whole import whole_decoder  # here, since it loads transformers

        return whole_decoder(function, model, loss_fn, tokens)
    what, known = f"{function}: model", config.to_dict()
    if reason_no_formulas(known) is None and not attends_eagerly(model):
        decoder = decoder_from(known, what)
    else:
        from tiled_torch.plan.structure import decoder_by_structure

        decoder = decoder_by_structure(model, what, tokens)
    return decoder if decoder.whole is not None else with_parameters(model, decoder)


def attends_eagerly(model: Any) -> bool:
    """Return whether a model's attention writes the scores of all pairs of tokens, of which there is no formula."""
    return getattr(model.config, "_attn_implementation", None) == "eager"


def with_parameters(model: nn.Module, decoder: Decoder) -> Decoder:
    """Return the sizes with the parameters that a model has."""
    found = tuple(_parameters(model, decoder))
    held = held_of(found, tied=decoder.tied)
    if decoder.measured is None:
        return replace(decoder, held=held)
    outside = sum(parameter.count for parameter in found if parameter.layer is None)
    return replace(decoder, held=held, beside=outside - decoder.end_parameters)


def _parameters(model: Any, decoder: Decoder) -> Iterator[Parameter]:
    ends = _ends_of(model, decoder.tied)
    places: dict[tuple[str, ...], int] = {}
    lists = "|".join(map(re.escape, decoder.lists)) or "layers"
    layers = re.compile(rf"(?:^|\.)({lists})\.(\d+)\.")
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's puts names in front
    together = [f".{path}." for path in sharing_layers(inside, decoder.lists)]
    for name, parameter in model.named_parameters():
        found = None if any(path in f".{name}" for path in together) else layers.search(name)
        layer = None if found is None else places.setdefault(found.groups(), len(places))
        count = math.prod(whole_shape(parameter))
        place = ends.get(id(parameter)) or _at_ends(name, count == decoder.hidden * decoder.vocab)
        place = _in_layer(name, parameter.ndim) if found else place
        yield Parameter(place, layer, count, parameter.element_size(), parameter.requires_grad)


def _ends_of(model: Any, tied: bool) -> dict[int, Place]:
    """Return the place of the weights that a model, or adapters around one, says are its table and its head."""
    found: dict[int, Place] = {}
    places: tuple[tuple[str, Place], ...] = (("get_output_embeddings", "head"), ("get_input_embeddings", "embedding"))
    for function, place in places[tied:]:
        try:
            found[id(getattr(model, function)().weight)] = place
        except (AttributeError, NotImplementedError):  # it does not say
            continue
    return found


def _in_layer(name: str, dims: int) -> Place:
    if ".mlp." in name:
        return "mlp"
    return "norm" if dims == 1 and not name.endswith("bias") else "attention"


def _at_ends(name: str, of_vocabulary: bool) -> Place:
    """Adapters of the head are none of its weight: it has no gradient for them."""
    if not of_vocabulary:
        return "ends"
    return "head" if any(head in name for head in _HEADS) else "embedding"
