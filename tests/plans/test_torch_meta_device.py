"""`materialize` in one process: given weights, drawn ones, tied ones, buffers, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import nn

from shared_specs.errors import SpecError
from tests.models.torch_decoders import batch, decoder, loss_of
from tiled_torch.parallel import materialize


def empty(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def test_given_weights_and_computed_buffers() -> None:
    """The angles of positions are buffers that no state dict holds."""
    plain = decoder(tie_word_embeddings=True)
    weights = dict(plain.named_parameters())
    model = materialize(empty(lambda: decoder(tie_word_embeddings=True)), weights=weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(loss_of(model, *batch(), inside=True), loss_of(plain, *batch(), inside=True))


def test_drawn_weights_depend_on_the_seed_and_the_name() -> None:
    build = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))  # noqa: E731
    first, again, other = (materialize(empty(build), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)
    assert torch.equal(first[2].running_var, torch.ones(4))


class Bare(nn.Module):
    """Says nothing of how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Half(Bare):
    """Forgets its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(3.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Forgetful(Bare):
    def reset_parameters(self) -> None:
        pass


@pytest.mark.parametrize(
    ("build", "given", "words"),
    [
        (Bare, None, "Bare must be a module that initialises itself, got Bare"),
        (Forgetful, None, "scale must be set by its module, got left as it was"),
        (Half, None, "angles must be set by its module, got left as it was"),
        (Half, {"scale": torch.ones(3)}, "angles must be set by its module, got left as it was"),
        (Forgetful, {}, "weights must be one for every parameter, got none for scale"),
        (
            Forgetful,
            {"scale": torch.ones(3), "x": torch.ones(3)},
            "weights must be one for every parameter, got one too many",
        ),
        (Forgetful, {"scale": torch.ones(4)}, r"weights\['scale'\] must be of shape \[3\], got \[4\]"),
    ],
)
def test_refused(build: Any, given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=f"^materialize: {words}"):
        materialize(empty(build), weights=given)


def test_given_weights_need_no_initialisation() -> None:
    model = materialize(empty(Forgetful), weights={"scale": torch.arange(3.0)})
    assert torch.equal(model.scale, torch.arange(3.0))
