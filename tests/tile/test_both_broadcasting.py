"""An array that broadcasts over the tokens is passed whole, and an error that fn then raises says so."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tiled_jax
import tiled_torch
from shared_specs import SpecError

SHAPES = {"one sequence": (1, 7), "tokens alone": (7,), "sequences alone": (2, 1)}


def masked(x: Any, mask: Any) -> Any:
    return x * mask[..., None]


def notes(error: Exception) -> list[str]:
    """Of ours; JAX has one too."""
    return [note for note in getattr(error, "__notes__", []) if note.startswith("tile: ")]


def by_torch(x: np.ndarray, mask: np.ndarray) -> Any:
    return tiled_torch.tile(masked, num_shards=3)(torch.from_numpy(x).requires_grad_(), torch.from_numpy(mask))


def by_jax(x: np.ndarray, mask: np.ndarray) -> Any:
    return tiled_jax.tile(masked, num_shards=3)(jnp.asarray(x), jnp.asarray(mask))


HALVES = {"torch": by_torch, "jax": by_jax}


@pytest.mark.parametrize("call", HALVES.values(), ids=HALVES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_an_error_says_what_was_passed_whole(shape: tuple[int, ...], call: Any) -> None:
    x, mask = np.ones((2, 7, 8), np.float32), np.ones(shape, np.float32)
    with pytest.raises(Exception) as raised:  # noqa: PT011  # fn's own error, whatever it is
        call(x, mask)
    told = f"tile: an argument [{', '.join(map(str, shape))}] was passed whole to every shard of tokens, as all without x's "
    assert notes(raised.value) == [told + "leading dims [2, 7]. Where it is of tokens, expand it to [2, 7]."]
    assert call(x, np.broadcast_to(mask.reshape(-1, 7) if shape[-1] == 7 else mask, (2, 7)).copy()).shape == x.shape


def test_in_jax_nothing_is_cut_beside_an_x_of_two_dims() -> None:
    x, mask = np.ones((7, 8), np.float32), np.ones(7, np.float32)
    with pytest.raises(SpecError) as raised:
        by_jax(x, mask)
    assert [note.endswith("give x and it a leading dim of 1.") for note in notes(raised.value)] == [True]
    assert by_jax(x[None], mask[None]).shape == (1, 7, 8)
    assert by_torch(x, mask).shape == (7, 8)


@pytest.mark.parametrize("call", HALVES.values(), ids=HALVES.keys())
def test_other_errors_are_as_they_were(call: Any) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call(np.ones((2, 7, 8), np.float32), np.ones((3, 5), np.float32))
    assert notes(raised.value) == []
