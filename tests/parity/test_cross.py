"""The halves against each other, through DLPack: every result and gradient of every case, of the MLP and of the loss.

Both are within their limit of the oracle, so they may differ by the sum of the two limits and no more.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from shared_specs.cases import LOSS_CASES, MLP_CASES, LossCase, MLPCase
from tests.adapters import JaxAdapter, TorchAdapter
from tests.asserting import assert_within, truth
from tiled_torch.bridge import to_jax, to_torch


class Tensors(TorchAdapter):
    """The PyTorch half's results as they are."""

    def to_numpy(self, tensor: Any) -> Any:
        return tensor.detach()


class Arrays(JaxAdapter):
    """The JAX half's results as they are."""

    def to_numpy(self, array: Any) -> Any:
        return array


def assert_round_trip(tensor: torch.Tensor, array: jax.Array) -> None:
    """There and back is the same memory, or the same values where only a copy can cross."""
    there, back = to_torch(array), to_torch(to_jax(tensor))
    assert there.data_ptr() == array.unsafe_buffer_pointer() or not array.size
    assert np.array_equal(to_jax(there), array)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def assert_agree(case: MLPCase | LossCase, tensors: dict[str, torch.Tensor], arrays: dict[str, jax.Array]) -> None:
    oracle, limits = truth(case)
    assert set(tensors) == set(arrays) == set(oracle)
    with jax.enable_x64(case.dtype == "float64"):
        for name, expected in oracle.items():
            assert_round_trip(tensors[name], arrays[name])
            difference = (tensors[name].double() - to_torch(arrays[name]).double()).numpy()
            # The oracle plus the difference errs by exactly the difference, relative to the oracle's size.
            assert_within(expected + difference, expected, 2 * limits[name], f"{case.id} {name}: torch against JAX")


@pytest.mark.parametrize("case", MLP_CASES, ids=lambda case: case.id)
def test_the_halves_agree(case: MLPCase) -> None:
    assert_agree(case, Tensors().run(case), Arrays().run(case))


@pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.id)
def test_the_losses_agree(case: LossCase) -> None:
    assert_agree(case, Tensors().run_loss(case), Arrays().run_loss(case))


def test_a_difference_is_found() -> None:
    """Two gradients swapped in one half, one shard missing from one gradient, one gradient missing."""
    case = replace(MLP_CASES[0], dims=(64,), num_shards=64)
    tensors, arrays = Tensors().run(case), Arrays().run(case)
    assert_agree(case, tensors, arrays)
    swapped = {**tensors, "dw_gate": tensors["dw_up"], "dw_up": tensors["dw_gate"]}
    dropped = {**tensors, "dx": torch.cat([tensors["dx"][:-1], torch.zeros_like(tensors["dx"][-1:])])}
    missing = {name: tensor for name, tensor in tensors.items() if name != "dw_down"}
    for wrong in (swapped, dropped, missing):
        with pytest.raises(AssertionError):
            assert_agree(case, wrong, arrays)
