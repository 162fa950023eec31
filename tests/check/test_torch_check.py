"""`check` of the PyTorch half: every published fault is found and named, and a right training is equal."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shared_specs.errors import SpecError
from tests.check.torch_faults import FAULTS
from tests.check.torch_models import H, tiny, tokens
from tiled_torch import check, tile, tile_model, tiling_paths, untile_model


@pytest.mark.parametrize("name", FAULTS)
def test_a_published_fault_is_found_and_named(name):
    fault = FAULTS[name]
    report = check(**fault.make())
    first = report.first
    assert first is not None
    assert (first.step, first.kind, first.name) == (1, fault.kind, fault.name), str(report)
    assert fault.says in str(first)
    assert not report.equal
    assert str(report).endswith(f"differs first at {first}")


@pytest.mark.deep_but(8)
@pytest.mark.parametrize("name", FAULTS)
def test_the_same_without_its_fault_is_right(name):
    given = FAULTS[name].make()
    report = check(
        **given | {"tile": given.get("plain", lambda model: model), "step": given.get("plain_step", given.get("step"))}
    )
    assert report.equal, str(report)


def test_what_watches_changes_no_path():
    """Neither what `check` sees of a model by itself nor hooks of its own on layers and weights."""
    model = tiny()
    report = check(model, tokens())
    tiled = tile_model(tiny(), num_shards=4)
    tiled(**tokens()).backward()
    assert report.paths == tiling_paths(tiled) == {f"layers.{i}.mlp": "tiled_mlp" for i in range(2)}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert tiling_paths(model) == {}
    assert not any(module._forward_hooks for module in model.modules())


class Dropping(nn.Module):
    """Drops inside of what is tiled: which numbers a token gets depends on how tokens are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        return F.dropout(self.other(F.dropout(self.one(x), 0.5, self.training)), 0.5, self.training)


def test_dropout_is_compared_where_it_can_be():
    beside = check(tiny(drop=0.5), tokens())
    assert (beside.equal, beside.notes, beside.reference) == (True, [], "float64")
    x = torch.randn(2, 16, H, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    step = lambda model, x: model(x).square().mean()  # noqa: E731
    inside = check(Dropping(), x, tile=lambda model: tile(model, num_shards=4), step=step)
    assert inside.equal
    (note,) = inside.notes
    assert note.startswith("As the model is, its training is not comparable: it draws random numbers")


def scaled(model):
    with torch.no_grad():
        model.weight.mul_(1.001)


def test_a_model_that_is_not_trained_in_float64_has_the_usual_limits():
    class Narrow(nn.Linear):
        def forward(self, x):
            if x.dtype == torch.float64:
                raise ValueError("no kernel for float64")
            return super().forward(x)

    given = dict(batch=torch.ones(1, 8, H), step=lambda model, x: model(x).square().mean())
    report = check(Narrow(H, H), **given, tile=lambda model: tile(model, num_shards=4))
    assert (report.equal, report.reference) == (True, "")
    (note,) = report.notes
    assert note == (
        "Limits are the usual ones: the untiled model has no training in higher precision (ValueError: no kernel for float64)."
    )
    wrong = check(Narrow(H, H), **given, tile=scaled)
    assert wrong.first.kind == "loss"


def test_a_step_that_runs_backward_itself_returns_no_graph():
    def step(model, batch):
        loss = model(**batch)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(SpecError) as caught:
        check(tiny(), tokens(), step=step)
    assert str(caught.value) == (
        "check: step must be free of a graph where it runs backward itself, got a loss that has one. Return loss.detach()."
    )


def test_nothing_of_the_users_random_state_moves():
    before = torch.get_rng_state()
    check(tiny, tokens(), steps=1)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_is_tiled_already_is_told():
    model = tile_model(tiny(), num_shards=2)
    (note,) = check(model, tokens(), steps=1).notes
    assert note == (
        "The untiled model has tiled parts as well, layers.0.mlp first: give it as it was before, or plain=untile_model."
    )
    assert check(model, tokens(), steps=1, plain=untile_model).notes == []
