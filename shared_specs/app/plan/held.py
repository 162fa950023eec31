"""The parameters that a model object has: their bytes, and those of them that are trained."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Place = Literal["attention", "norm", "mlp", "head", "embedding", "ends"]


class Parameter(NamedTuple):
    """One parameter of a model.

    Attributes:
        place: where it is: in a layer in its MLP, a norm or else "attention"; or outside of them.
        layer: the number of the layer; None outside of them. count: elements. itemsize: bytes of one.
    """

    place: Place
    layer: int | None
    count: int
    itemsize: int
    trained: bool


@dataclass(frozen=True, kw_only=True)
class Held:
    """The parameters of a model object, where the formulas otherwise take all of them as trained and in float32.

    Attributes:
        bytes, trained_bytes: of all parameters, and of those that are trained, each in its own dtype.
        count, trained: how many there are, and how many of them are trained.
        layers_trained: trained ones of all layers. layer, layer_trained: all and trained ones of the layer with most.
        mlp, mlp_trained: the same of an MLP.
        trains_head, trains_embedding: whether each has a gradient. Of tied ones both have.
        trains_attention, trains_norms: whether anything of it has one, in any layer.
    """

    bytes: int
    trained_bytes: int
    count: int
    trained: int
    layers_trained: int
    layer: int
    layer_trained: int
    mlp: int
    mlp_trained: int
    trains_head: bool
    trains_embedding: bool
    trains_attention: bool
    trains_norms: bool

    def split(self, ranks: int) -> "Held":
        """Return what a rank has of it under tensor parallelism."""
        names = (
            *("bytes", "trained_bytes", "count", "trained"),
            *("layers_trained", "layer", "layer_trained", "mlp", "mlp_trained"),
        )
        return replace(self, **{name: getattr(self, name) // ranks for name in names})


def held_of(parameters: Iterable[Parameter], *, tied: bool) -> Held:
    """Return the sums of a model's parameters. tied: the head is the embedding."""
    found = tuple(parameters)
    trained = tuple(p for p in found if p.trained)
    outside = {p.place for p in trained if p.layer is None}
    inside = {p.place for p in trained if p.layer is not None}
    return Held(
        bytes=sum(p.count * p.itemsize for p in found),
        trained_bytes=sum(p.count * p.itemsize for p in trained),
        count=sum(p.count for p in found),
        trained=sum(p.count for p in trained),
        layers_trained=sum(p.count for p in trained if p.layer is not None),
        layer=_most(found),
        layer_trained=_most(trained),
        mlp=_most(p for p in found if p.place == "mlp"),
        mlp_trained=_most(p for p in trained if p.place == "mlp"),
        trains_head="head" in outside or (tied and "embedding" in outside),
        trains_embedding="embedding" in outside or (tied and "head" in outside),
        trains_attention="attention" in inside,
        trains_norms="norm" in inside,
    )


def _most(parameters: Iterable[Parameter]) -> int:
    """Return the parameters of the layer with most."""
    counts: dict[int, int] = {}
    for parameter in parameters:
        if parameter.layer is not None:
            counts[parameter.layer] = counts.get(parameter.layer, 0) + parameter.count
    return max(counts.values(), default=0)
