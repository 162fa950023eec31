"""Every wrong use of `tile` fails with one line that says what to do instead, before results are handed out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_specs import SpecError, Tiling, UnsupportedError
from tiled_torch import tile

X = torch.ones(2, 4, 6)


def fails(error: type[Exception], message: str) -> Any:
    return pytest.raises(error, match="^" + re.escape(message) + "$")


BAD_TILINGS = [
    (
        {"num_shards": 0},
        SpecError,
        "tile: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose.",
    ),
    ({"num_shards": 2.0}, TypeError, "tile: num_shards must be an integer or None, got float."),
    (
        {"num_shards": 2, "tiling": Tiling()},
        SpecError,
        "tile: num_shards must be left out when tiling is given, got 2.",
    ),
    ({"tiling": Tiling(shard_tokens=0)}, SpecError, "tile: shard_tokens must be >= 1, got 0."),
    (
        {"tiling": Tiling(keep=0.5)},
        SpecError,
        "tile: keep must be 0, got 0.5. A generic function has no gate and up to keep.",
    ),
    (
        {"tiling": Tiling(memory_budget=100)},
        SpecError,
        "tile: memory_budget must be None, got 100. "
        "The bytes of a generic function are unknown; pass num_shards or shard_tokens.",
    ),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD_TILINGS, ids=lambda value: str(value)[:40])
def test_bad_tilings_fail_at_once(options, error, message):
    with fails(error, message):
        tile(torch.sin, **options)


def test_fn_must_be_callable():
    with fails(TypeError, "tile: fn must be a module or a function, got int."):
        tile(3)  # type: ignore[arg-type]


def test_x_must_have_tokens():
    with fails(SpecError, "tile: x must be [tokens, hidden] or more dims, got [6]."):
        tile(torch.sin)(torch.ones(6))
    with fails(TypeError, "tile: x, the first argument, must be an array, got list."):
        tile(torch.sin)([X])
    with fails(TypeError, "tile: x, the first argument, must be an array, got NoneType."):
        tile(lambda x, y: x)(y=X)


def numbered(fn: Callable[[Tensor, int], Any]) -> Callable[[Tensor], Any]:
    """fn of a shard and its number, counted anew for every call."""
    calls = iter(range(100))
    return lambda x: fn(x, next(calls))


BAD_RESULTS: list[tuple[str, Callable[[], Callable[[Tensor], Any]], type[Exception], str]] = [
    (
        "scalar",
        lambda: lambda x: (x, x.sum()),
        SpecError,
        "tile: output 1 of fn must be [t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens, "
        "got []. fn has to return one row for each token of its shard.",
    ),
    (
        "summed over tokens",
        lambda: lambda x: x.sum(1),
        SpecError,
        "tile: output 0 of fn must be [t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens, "
        "got [1, 6]. fn has to return one row for each token of its shard.",
    ),
    ("number", lambda: lambda x: (x, 3), TypeError, "tile: output 1 of fn must be an array or None, got int."),
    (
        "another width",
        lambda: numbered(lambda x, i: x[..., : 6 - i]),
        SpecError,
        "tile: output 0 of fn must be [1, 4, 6], got [1, 4, 5].",
    ),
    (
        "another dtype",
        lambda: numbered(lambda x, i: x.double() if i else x),
        SpecError,
        "tile: output 0 of fn must be of dtype torch.float32 for every shard, got torch.float64.",
    ),
    (
        "None once",
        lambda: numbered(lambda x, i: (x, None) if i else (x, x)),
        SpecError,
        "tile: output 1 of fn must be None for every shard or for none, got NoneType.",
    ),
]


@pytest.mark.parametrize(
    ("make", "error", "message"), [case[1:] for case in BAD_RESULTS], ids=[c[0] for c in BAD_RESULTS]
)
def test_results_without_a_row_per_token(make, error, message):
    with torch.no_grad(), fails(error, message):
        tile(make(), num_shards=2)(X)


def test_results_of_another_structure():
    fn = numbered(lambda x, i: (x, x) if i else [x, x])
    with torch.no_grad(), pytest.raises(SpecError, match=r"^tile: fn's output must be of one structure, "):
        tile(fn, num_shards=2)(X)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("trainable", [True, False])
def test_writing_to_an_argument_is_refused(trainable, late):
    """Late: not for the two first tokens; else before any shard, and nothing has been written."""
    x = (X * 1).requires_grad_(trainable) * 1
    with fails(SpecError, "tile: fn writes to one of its arguments in place. Let it write to a copy."):
        tile(lambda x: x.detach().add_(1) if x.shape[1] > 2 or not late else x + 1, num_shards=2)(x)
    assert late or torch.equal(x, X)


def test_what_fn_raises_comes_through_and_leaves_no_trace():
    """An error in the middle of a call restores random numbers, buffers, modes and hooks."""
    module: Any = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.BatchNorm1d(6))
    shards = []

    class Broken(Exception):
        pass

    def breaking(_: nn.Module, args: tuple[Tensor]) -> None:
        shards.append(args)
        if len(shards) == 4:  # the first shard of backward, after the probe and two shards
            raise Broken

    module.register_forward_pre_hook(breaking)
    module[0].weight.register_hook(lambda g: g)
    y = tile(module, num_shards=2)(torch.ones(8, 6))
    state = torch.get_rng_state(), module[2].running_mean.clone()
    with pytest.raises(Broken):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state[0])
    assert torch.equal(module[2].running_mean, state[1])
    assert len(module[0].weight._backward_hooks) == 1
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("closure", [False, True])
def test_zero_3_is_refused(closure):
    """Its parameters carry ds_id; their data is fetched and freed around every layer."""
    module = nn.Linear(6, 6)
    module.weight.ds_id = 0  # type: ignore[attr-defined]
    message = (
        "tile: a parameter of fn must be whole, got a ZeRO-3 part. Call tile inside the forward of a leaf module of ZeRO-3 "
        "that owns it (deepspeed.utils.set_z3_leaf_modules), as the modules of tile_model are, or use ZeRO stage 0, 1 or 2, "
        "or fully_shard."
    )
    with fails(UnsupportedError, message):
        tile((lambda x: module(x)) if closure else module)(X)


def test_dtensors_are_refused():
    from torch.distributed.tensor import DTensor

    class Pretending(torch.Tensor):
        __class__ = DTensor  # type: ignore[assignment]

    with fails(
        UnsupportedError,
        "tile: an argument of fn must be a plain tensor, got a DTensor. "
        "Convert it with to_local(), or let the parallel plan of fn's own layers do it.",
    ):
        tile(torch.sin)(torch.ones(4, 6).as_subclass(Pretending))
