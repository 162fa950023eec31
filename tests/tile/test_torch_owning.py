"""`tile(module)` is a module that owns the one it tiles: kept as an attribute it trains, saves and loads as without.

Under DDP, FSDP1, FSDP2 and tensor parallelism it runs in mlp/test_torch_ranks_engines, as the kind "tile".
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.tile.torch_checks import draw
from tiled_torch import tile

HIDDEN = 6


class Inner(nn.Module):
    """A token-wise module with parameters, a buffer and a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.scale = nn.Linear(HIDDEN, 8), nn.BatchNorm1d(8), 2.0
        self.down = nn.Linear(8, HIDDEN)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(torch.tanh(self.norm(up.flatten(0, -2)).view(up.shape))) * self.scale


class Model(nn.Module):
    def __init__(self, *, tiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = Inner().double()
        self.first, self.inner = nn.Linear(HIDDEN, HIDDEN).double(), tile(inner, num_shards=3) if tiled else inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def pair() -> tuple[Any, Any, Tensor]:
    """A model with a tiled module, the same one without, and an input."""
    return Model(tiled=True), Model(tiled=False), draw(2, 5, HIDDEN)


def near(found: Tensor, expected: Tensor) -> None:
    assert_within(found.detach().numpy(), expected.detach().numpy(), between("float64"), "the values")


def test_an_optimizer_trains_it() -> None:
    ours, plain, x = pair()
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    before = Model(tiled=False).state_dict()
    for key, value in plain.state_dict().items():
        near(ours.state_dict()[key], value)
        assert "norm" in key or not torch.equal(value, before[key]), f"{key} did not train"


def test_checkpoints_are_those_of_the_model_without() -> None:
    ours, plain, x = pair()
    state = ours.state_dict()
    assert list(state) == list(plain.state_dict())
    assert {key: state._metadata[key] for key in plain.state_dict()._metadata} == plain.state_dict()._metadata
    with torch.no_grad():
        plain.inner.up.weight.mul_(2.0)
    ours.load_state_dict(plain.state_dict())
    near(ours(x), plain(x))
    plain.load_state_dict(Model(tiled=True).state_dict())
    near(plain(x), Model(tiled=True)(x))


def test_what_a_checkpoint_lacks_is_named_by_its_key() -> None:
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: .*"inner\.up\.weight"'):
        Model(tiled=True).load_state_dict({})


def test_distributed_checkpoints_know_its_keys() -> None:
    """`get_state_dict` takes PyTorch's own name for a wrapped module out of every key."""
    ours, plain, x = pair()
    states = []
    for model in (ours, plain):
        optimizer = torch.optim.AdamW(model.inner.down.parameters())
        model(x).sum().backward()
        optimizer.step()
        states.append(get_state_dict(model, optimizer))
        set_state_dict(model, optimizer, model_state_dict=states[-1][0], optim_state_dict=states[-1][1])
    assert [list(each) for each in states[0]] == [list(each) for each in states[1]]
    assert list(states[0][1]["state"]) == ["inner.down.weight", "inner.down.bias"]


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: torch.load(_saved(model), weights_only=False),
}


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_parameters_of_its_own(how: str) -> None:
    ours, plain, x = pair()
    copied = COPIES[how](ours)
    with torch.no_grad():
        ours.inner.up.weight.zero_()
    near(copied(x), plain(x))
    copied(x).sum().backward()
    assert copied.inner.up.weight.grad is not None
    assert ours.inner.up.weight.grad is None
    assert list(copied.state_dict()) == list(plain.state_dict())


def test_attributes_and_items_are_those_of_the_module() -> None:
    ours, plain, x = pair()
    for model in (ours, plain):
        model.inner.scale = 5.0
        model.inner.up = nn.Linear(HIDDEN, 8).double()
    plain.inner.up.load_state_dict(ours.inner.up.state_dict())
    near(ours(x), plain(x))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert isinstance(tile(nn.Sequential(nn.ReLU(), nn.Tanh()))[1], nn.Tanh)  # type: ignore[index]
    with pytest.raises(AttributeError, match="'Inner' object has no attribute 'gate'"):
        _ = ours.inner.gate


def test_training_and_evaluation_reach_the_module() -> None:
    ours = tile(nn.Dropout(0.5), num_shards=2)
    x = torch.ones(64, 8)
    assert (ours(x) == 0).any()
    assert torch.equal(ours.eval()(x), x)


def test_functional_call_puts_weights_in() -> None:
    ours, plain, x = pair()
    weights = {name: torch.full_like(value, 0.25) for name, value in ours.named_parameters()}
    expected = {name: torch.full_like(value, 0.25) for name, value in plain.named_parameters()}
    near(torch.func.functional_call(ours, weights, x), torch.func.functional_call(plain, expected, x))


def test_hooks_run_once_around_and_once_a_shard_inside() -> None:
    ours, _, x = pair()
    seen: list[str] = []
    ours.inner.register_forward_hook(lambda *_: seen.append("around"))
    ours.inner.get_submodule("_checkpoint_wrapped_module").register_forward_hook(lambda *_: seen.append("inside"))
    with torch.no_grad():
        ours(x)
    assert seen == ["inside"] * 3 + ["around"]


def test_of_a_function_a_function() -> None:
    module = Inner()
    for fn in (torch.tanh, module.forward, lambda x: module(x)):
        assert not isinstance(tile(fn), nn.Module)
