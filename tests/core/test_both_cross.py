"""The halves against each other, through DLPack: every result and gradient of cases of each dtype and of no tokens.

Both are within their limit of the oracle in every case (test_mlp.py, test_loss.py), so that they differ by the sum of the two
limits at most; here the results themselves cross, of the cases that have the most of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.mlp.cases import MLP_CASES, MLPCase
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


def results(case: Any) -> int:
    """How many more results there are than the fewest of its kind."""
    return len(case.biases if isinstance(case, MLPCase) else case.outputs)


def crossing(cases: Sequence[Any]) -> list[Any]:
    """Of each dtype the cases with the most and the fewest results, and those of no tokens."""
    chosen = [case for case in cases if 0 in case.dims]
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        ordered = sorted((case for case in cases if case.dtype == dtype), key=results)
        chosen += [ordered[0], ordered[-1]]
    return list(dict.fromkeys(chosen))


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


@pytest.mark.parametrize("case", crossing(MLP_CASES), ids=lambda case: case.id)
def test_the_halves_agree(case: MLPCase) -> None:
    assert_agree(case, Tensors().run(case), Arrays().run(case))


@pytest.mark.parametrize("case", crossing(LOSS_CASES), ids=lambda case: case.id)
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
