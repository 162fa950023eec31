"""Combinations of activations, gates, fused weights, biases, frozen operands, lengths, shards and keep, against plain JAX and
automatic differentiation in float64. The PyTorch half runs the same list (tests/mlp/test_torch_matrix.py)."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shared_specs.mlp.cases import MLPCase, make_inputs
from tests.adapters import ADAPTERS
from tests.matrix import MATRIX
from tests.mlp.jax_untiled import mlp


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.id)
def test_matrix(case: MLPCase, same: Any) -> None:
    arrays = {name: jnp.asarray(array) for name, array in make_inputs(case).items()}
    dy = arrays.pop("dy")

    def untiled(given: dict[str, jax.Array]) -> jax.Array:
        biases = {name[2:]: bias for name, bias in given.items() if name.startswith("b_")}
        return mlp(given["x"], given.get("w_gate"), given["w_up"], given["w_down"], case.activation, biases)

    y, pull = jax.vjp(untiled, arrays)
    gradients = {f"d{name}": gradient for name, gradient in pull(dy)[0].items() if name not in case.frozen}
    same(ADAPTERS["jax"].run(case), {"y": y} | gradients)
