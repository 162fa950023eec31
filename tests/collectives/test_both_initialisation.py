"""How the modules of both halves draw their parameters: by the number of inputs, not of outputs, as the frameworks' own do."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import tiled_jax
import tiled_jax.modules.linen as linen
import tiled_torch

H, I, V = 8, 512, 1024  # noqa: E741
# Inputs of every weight, far from its outputs; a bias is drawn with its weight in PyTorch and zero in Flax.
INPUTS = {"gate": H, "up": H, "gate_up": H, "down": I, "weight": H, "bias": H}

TORCH: dict[str, Callable[[], Any]] = {
    "gated": lambda: tiled_torch.TiledMLP(H, I, bias=True),
    "plain": lambda: tiled_torch.TiledMLP(H, I, gated=False, bias=True),
    "fused": lambda: tiled_torch.TiledMLP(H, I, fused_gate_up=True, bias=True),
    "head": lambda: tiled_torch.TiledLinearCrossEntropy(H, V, bias=True),
}


def inputs_of(name: str) -> int:
    return INPUTS[name.removeprefix("w_").removeprefix("b_")]


@pytest.mark.parametrize("make", TORCH.values(), ids=TORCH.keys())
def test_torch_draws_within_one_over_the_root_of_the_inputs(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(9.0)
    module.reset_parameters()
    for name, parameter in module.named_parameters():
        bound = 1 / math.sqrt(inputs_of(name))
        assert parameter.abs().max() <= bound, name
        # Of one that has only the H of b_down, the mean: of more, the largest come close to the bound.
        assert parameter.abs().max() >= (0.95 if parameter.numel() > H else 0.3) * bound, name
        if parameter.numel() > V:
            assert abs(parameter.mean()) <= 0.05 * bound, name


def _linen(module: Any, *given: Any) -> dict[str, Any]:
    return dict(module.init(jax.random.key(0), *given)["params"])


def _nnx(module: Any) -> dict[str, Any]:
    return {str(path[0]): value[...] for path, value in nnx.to_flat_state(nnx.state(module, nnx.Param))}


JAX: dict[str, Callable[[], dict[str, Any]]] = {
    "gated": lambda: _nnx(tiled_jax.TiledMLP(H, I, bias=True, rngs=nnx.Rngs(0))),
    "plain": lambda: _nnx(tiled_jax.TiledMLP(H, I, gated=False, bias=True, rngs=nnx.Rngs(0))),
    "fused": lambda: _nnx(tiled_jax.TiledMLP(H, I, fused_gate_up=True, bias=True, rngs=nnx.Rngs(0))),
    "head": lambda: _nnx(tiled_jax.TiledLinearCrossEntropy(H, V, bias=True, rngs=nnx.Rngs(0))),
    "linen gated": lambda: _linen(linen.TiledMLP(H, I, bias=True), jnp.ones((2, H))),
    "linen head": lambda: _linen(linen.TiledLinearCrossEntropy(H, V), jnp.ones((2, H)), jnp.zeros(2, jnp.int32)),
}


@pytest.mark.parametrize("make", JAX.values(), ids=JAX.keys())
def test_jax_draws_with_one_over_the_inputs_as_variance(make: Callable[[], dict[str, Any]]) -> None:
    for name, value in make().items():
        drawn = np.asarray(value)
        if drawn.ndim == 1:
            assert not drawn.any(), name
        else:
            assert abs(drawn.std() * math.sqrt(inputs_of(name)) - 1) <= 0.1, name
            assert abs(drawn.mean() * math.sqrt(inputs_of(name))) <= 0.05, name
