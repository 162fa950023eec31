"""Named random streams in one process: what forks draw, states, errors, recomputation; CUDA's swapping by a fake."""

import copy
import gc
import pickle
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shared_specs import SpecError, UnsupportedError
from shared_specs.layers.random import RANDOM_STREAMS, derived_seed, stream_coordinates
from tiled_torch import tile
from tiled_torch.layers import random
from tiled_torch.parallel import CheckpointWithoutOutput, RandomStates, checkpoint, seed_parallel


def draw() -> list[float]:
    return torch.rand(5).tolist()


def numbers(seed: int, times: int = 1) -> list[list[float]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(5, generator=generator).tolist() for _ in range(times)]


@pytest.fixture(autouse=True)
def _default_generator():
    """Each test leaves the default generator as it was."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


def two_streams() -> RandomStates:
    states = RandomStates()
    states.add("a", 1)
    states.add("b", 2)
    return states


def test_a_fork_draws_from_its_stream_and_leaves_the_default_generator_alone():
    torch.manual_seed(5)
    states, (first, second) = two_streams(), numbers(1, 2)
    for expected in (first, second):
        with states.fork("a"):
            assert draw() == expected
    assert draw() == numbers(5)[0]
    with states.fork("b"):
        assert draw() == numbers(2)[0]


def test_an_error_inside_a_fork():
    """The default generator is back, and the stream stands behind what was drawn."""
    torch.manual_seed(5)
    states = two_streams()

    def fail() -> None:
        draw()
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        forked(states, "a", fail)
    assert draw() == numbers(5)[0]
    with states.fork("a"):
        assert draw() == numbers(1, 2)[1]


def test_forks_of_different_streams_nest():
    states = two_streams()
    with states.fork("a"):
        draw()
        with states.fork("b"):
            assert draw() == numbers(2)[0]
        assert draw() == numbers(1, 2)[1]


def test_forks_of_one_stream_nest():
    """It is one sequence of numbers: also around a fork of another stream, and of another RandomStates."""
    torch.manual_seed(5)
    states, other, (first, second, third, fourth) = two_streams(), RandomStates(), numbers(1, 4)
    other.add("c", 3)
    with states.fork("a"):
        assert draw() == first
        with states.fork("a"):
            assert draw() == second
        with states.fork("b"), other.fork("c"):
            with states.fork("a"):
                assert draw() == third
            assert draw() == numbers(3)[0]
        assert draw() == fourth
    assert draw() == numbers(5)[0]
    for name, seed in (("a", 1), ("b", 2)):
        with states.fork(name):
            assert draw() == numbers(seed, 5)[4 if name == "a" else 0]
    with other.fork("c"):
        assert draw() == numbers(3, 2)[1]


def test_states_go_on_where_they_were_taken():
    states = two_streams()
    with states.fork("a"):
        draw()
    taken = states.states()
    for _ in range(2):
        with states.fork("a"):
            assert draw() == numbers(1, 2)[1]
        states.set_states(taken)
    other = RandomStates()
    other.set_states(taken)
    with other.fork("a"):
        assert draw() == numbers(1, 2)[1]
    with other.fork("b"):
        assert draw() == numbers(2)[0]
    assert all(torch.equal(a["cpu"], b["cpu"]) for a, b in zip(taken.values(), states.states().values(), strict=True))


def test_reset_forgets():
    states = two_streams()
    states.reset()
    assert states.states() == {}
    states.add("a", 1)
    with states.fork("a"):
        assert draw() == numbers(1)[0]


def test_copies():
    """A copied module shares its streams; a pickled one goes on with its own, which recomputation knows."""
    states = two_streams()
    assert copy.deepcopy(nn.ModuleDict({"block": Block(states)}))["block"].states is states
    with states.fork("a"):
        draw()
    other = pickle.loads(pickle.dumps(states))
    with other.fork("a"):
        assert draw() == numbers(1, 2)[1]
    assert other in random.living()
    with pytest.raises(SpecError, match="seed must be new"):
        other.add("c", 2)


def test_seed_parallel():
    states = seed_parallel(7, data=1, tensor=2, expert=3)
    assert draw() == numbers(derived_seed(7, (len(RANDOM_STREAMS), 1)))[0]
    for stream in RANDOM_STREAMS:
        with states.fork(stream):
            expected = derived_seed(7, stream_coordinates(stream, data=1, tensor=2, expert=3))
            assert draw() == numbers(expected)[0]
    states = seed_parallel(7, tensor=1)
    with states.fork():
        assert draw() == numbers(derived_seed(7, stream_coordinates("tensor-parallel", tensor=1)))[0]


def forked(states: RandomStates, name: str, then: Any) -> None:
    with states.fork(name):
        then()


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "name taken": (
        lambda s: s.add("a", 3),
        SpecError,
        "RandomStates.add: name must be new, got 'a'. reset() forgets all streams.",
    ),
    "seed taken": (
        lambda s: s.add("c", 1),
        SpecError,
        "RandomStates.add: seed must be new, got 1. Two streams of one seed are the same numbers.",
    ),
    "seed below zero": (lambda s: s.add("c", -1), SpecError, "RandomStates.add: seed must be >= 0, got -1."),
    "seed kind": (lambda s: s.add("c", 1.5), TypeError, "RandomStates.add: seed must be an integer, got float."),
    "no such stream": (
        lambda s: forked(s, "c", lambda: None),
        SpecError,
        "RandomStates.fork: name must be one of a, b, got 'c'.",
    ),
    "states in fork": (
        lambda s: forked(s, "a", s.states),
        SpecError,
        "RandomStates.states: this call is inside fork('a'). Call it after the fork.",
    ),
    "reset in fork": (
        lambda s: forked(s, "a", s.reset),
        SpecError,
        "RandomStates.reset: this call is inside fork('a'). Call it after the fork.",
    ),
    "states kind": (
        lambda s: s.set_states([]),
        TypeError,
        "RandomStates.set_states: states must be a mapping, got list.",
    ),
    "state kind": (
        lambda s: s.set_states({"a": 3}),
        TypeError,
        "RandomStates.set_states: states['a'] must be a mapping, got int.",
    ),
    "data": (lambda s: seed_parallel(1, data=-1), SpecError, "seed_parallel: data must be >= 0, got -1."),
    "seed": (lambda s: seed_parallel(None), TypeError, "seed_parallel: seed must be an integer, got NoneType."),  # type: ignore[arg-type]
    "device": (
        lambda s: RandomStates(device="meta"),
        SpecError,
        "RandomStates: device must be a CUDA device, cpu or None, got meta.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, message = REFUSED[what]
    with pytest.raises(error) as caught:
        call(two_streams())
    assert type(caught.value) is error
    assert str(caught.value) == message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_is_refused_where_it_is_not():
    with pytest.raises(UnsupportedError, match="RandomStates: device must be usable here, got cuda"):
        RandomStates(device="cuda")
    with pytest.raises(UnsupportedError, match=r"RandomStates\.register: a CUDA device must be there, got none"):
        two_streams().register(None)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"states\['a'\] must be of cpu, got cpu and cuda"):
        RandomStates().set_states({"a": {"cpu": torch.get_rng_state(), "cuda": torch.get_rng_state()}})


class Block(nn.Module):
    """Dropout in two streams and from the default generator."""

    def __init__(self, states: RandomStates) -> None:
        super().__init__()
        self.states, self.masks = states, list[torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("a", "b"):
            with self.states.fork(name):
                x = self.drop(x)
        return self.drop(x).sin()

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(x, 0.4)
        self.masks.append(y.detach() != 0)
        return y


@pytest.mark.parametrize("backward", ["outside", "inside a fork", "after more draws"])
def test_recomputation_draws_the_same_numbers(backward):
    """Two calls, backward in reverse order; streams afterwards are where they would be without checkpointing."""
    states = two_streams()
    block, x = Block(states), torch.rand(64, requires_grad=True)
    y = checkpoint(block, checkpoint(block, x))
    masks, block.masks = block.masks, []
    after, default = states.states(), torch.get_rng_state()
    if backward == "after more draws":
        block(x)
        block.masks = []
        after, default = states.states(), torch.get_rng_state()
    if backward == "inside a fork":
        with states.fork("a"):
            y.sum().backward()
    else:
        y.sum().backward()
        assert all(torch.equal(s["cpu"], after[name]["cpu"]) for name, s in states.states().items())
        assert torch.equal(torch.get_rng_state(), default)
    assert len(block.masks) == len(masks) == 6
    assert all(torch.equal(a, b) for a, b in zip(block.masks[:3], masks[3:], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(block.masks[3:], masks[:3], strict=True))


class Nested(Block):
    """Dropout in a stream, and in the same one again inside a fork of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        with self.states.fork("a"):
            x = self.drop(x)
            with self.states.fork("a"):
                x = self.drop(x)
            x = self.drop(x)
        return self.drop(x).sin()


@pytest.mark.parametrize("around", [None, "a", "b"])
@pytest.mark.parametrize("how", ["checkpoint", "tile", "without output"])
def test_recomputation_in_nested_forks(how, around):
    """Masks, gradients and streams of plain autograd, where the region lies inside a fork of its own stream too."""
    found = []
    for plain in (False, True):
        states, x = two_streams(), torch.linspace(1, 2, 64).reshape(16, 4).requires_grad_()
        block = Nested(states)
        torch.manual_seed(1)
        with states.fork(around) if around else nullcontext():
            if plain:
                y = torch.cat([block(part) for part in x.split(8)]) if how == "tile" else block(x)
            elif how == "without output":
                call = CheckpointWithoutOutput()
                y = call.checkpoint(block, x)
            else:
                y = tile(block, num_shards=2)(x) if how == "tile" else checkpoint(block, x)
            z = y * y.cos()  # whose gradient is not 0 where forward dropped all
            value = y.detach().clone()
        if how == "without output" and not plain:
            call.discard_output_and_register_recompute(z)
        with states.fork("a"):
            z.sum().backward()
            after = torch.get_rng_state()
        found.append([value, x.grad, after, torch.get_rng_state(), *(s["cpu"] for s in states.states().values())])
    assert all(map(torch.equal, *found))


def test_tile_computes_shards_again_from_their_numbers():
    """What is tried before leaves no trace: masks, gradients and streams are those of plain autograd over the shards."""
    found = []
    for tiled in (True, False):
        states, x = two_streams(), torch.linspace(1, 2, 24).reshape(6, 4).requires_grad_()
        block = Block(states)
        torch.manual_seed(1)
        y = tile(block, num_shards=3)(x) if tiled else torch.cat([block(part) for part in x.split(2)])
        drawn = [s["cpu"] for s in states.states().values()]
        y.sum().backward()
        assert all(torch.equal(a, s["cpu"]) for a, s in zip(drawn, states.states().values(), strict=True))
        found.append([y.detach(), x.grad, *drawn, torch.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_a_checkpoint_that_would_draw_other_numbers_is_refused():
    """Of PyTorch's own; also inside one of ours. A fork outside of the region is none of its business."""
    states, x = two_streams(), torch.ones(8, requires_grad=True)
    plain = partial(torch_checkpoint, use_reentrant=False)
    message = r"^RandomStates\.fork: this call is inside torch\.utils\.checkpoint\."
    for region in (lambda x: plain(Block(states), x), lambda x: checkpoint(lambda x: plain(Block(states), x), x)):
        with pytest.raises(SpecError, match=message):
            region(x)
    with states.fork("a"):
        y = plain(torch.nn.functional.dropout, x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_streams_that_are_gone_do_not_matter():
    states = two_streams()
    x = torch.rand(4, requires_grad=True)
    y = checkpoint(torch.sin, x)
    del states
    gc.collect()
    y.sum().backward()
    assert x.grad is not None


class FakeState:
    """A state of CUDA's generator: a seed and how many numbers were drawn, which `get_state` copies."""

    def __init__(self, seed: int, offset: int = 0) -> None:
        self.seed, self.offset = seed, offset

    def manual_seed(self, seed: int) -> "FakeState":
        self.seed, self.offset = seed, 0
        return self

    def get_state(self) -> torch.Tensor:
        return torch.tensor([self.seed, self.offset])

    def set_state(self, state: torch.Tensor) -> None:
        self.seed, self.offset = state.tolist()


class FakeGenerator:
    """CUDA's default generator: whatever state it is given it shares, as the graph-safe calls do."""

    def __init__(self) -> None:
        self.state = FakeState(0)

    def clone_state(self) -> FakeState:
        return FakeState(self.state.seed, self.state.offset)

    def graphsafe_get_state(self) -> FakeState:
        return self.state

    def graphsafe_set_state(self, state: FakeState) -> None:
        self.state = state

    def draw(self) -> tuple[int, int]:
        self.state.offset += 1
        return self.state.seed, self.state.offset


@pytest.fixture
def cuda(monkeypatch) -> FakeGenerator:
    generator = FakeGenerator()
    monkeypatch.setattr(random, "_cuda_generator", lambda device: generator)
    return generator


def test_cuda_states_are_swapped_and_never_copied(cuda):
    """What a graph captured stays the object in use: through forks, and through set_states."""
    states = two_streams()
    captured: list[FakeState] = []
    states.register(type("Graph", (), {"register_generator_state": lambda self, state: captured.append(state)})())
    default = cuda.state
    assert [state.seed for state in captured] == [1, 2]
    with states.fork("a"):
        assert cuda.state is captured[0]
        assert [cuda.draw(), cuda.draw()] == [(1, 1), (1, 2)]
        with states.fork("b"):
            assert cuda.state is captured[1]
    assert cuda.state is default
    taken = states.states()
    assert taken["a"]["cuda"].tolist() == [1, 2]
    with states.fork("a"):
        assert cuda.draw() == (1, 3)
    states.set_states(taken)
    with states.fork("a"):
        assert cuda.state is captured[0]
        assert cuda.draw() == (1, 3)
    other = RandomStates()
    other.set_states(taken)
    with other.fork("a"):
        assert cuda.draw() == (1, 3)
    assert captured[0].offset == 3


def test_cuda_streams_in_recomputation(cuda):
    """Backward inside a fork of the same stream: recomputation sees forward's numbers and disturbs nothing."""
    states, drawn = two_streams(), list[tuple[int, int]]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        with states.fork("a"):
            drawn.append(cuda.draw())
        return x.sin()

    x = torch.rand(3, requires_grad=True)
    y = checkpoint(fn, x)
    with states.fork("a"):
        assert cuda.draw() == (1, 2)
        y.sum().backward()
        assert cuda.draw() == (1, 3)
    assert drawn == [(1, 1), (1, 1)]


@pytest.mark.parametrize("around", [False, True])
def test_nested_cuda_streams_in_recomputation(cuda, around):
    """One sequence there too, which recomputation goes through again from where the region began."""
    states, drawn = two_streams(), list[tuple[int, int]]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        drawn.append(cuda.draw())
        with states.fork("a"), states.fork("b"), states.fork("a"):
            drawn.append(cuda.draw())
        drawn.append(cuda.draw())
        return x.sin()

    x = torch.rand(3, requires_grad=True)
    with states.fork("a") if around else nullcontext():
        assert cuda.draw() == ((1, 1) if around else (0, 1))
        y = checkpoint(fn, x)
        assert cuda.draw() == ((1, 5) if around else (0, 4))
    y.sum().backward()
    if around:  # the fake's default generator is not put back by torch's checkpoint, as the real one is
        assert drawn == [(1, 2), (1, 3), (1, 4)] * 2
    assert drawn[1] == drawn[4] == ((1, 3) if around else (1, 1))
    with states.fork("a"):
        assert cuda.draw() == ((1, 6) if around else (1, 2))
