"""`TiledMLP.from_linears` and `to_linears`: a module of the very parameters of existing layers, in both halves."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import tiled_jax
import tiled_torch
from shared_specs.tolerances import FLOOR, FORMULA_FLOAT32
from tests.asserting import assert_within
from tiled_torch import SpecError

HALVES = ("torch", "jax")
WIDTHS = {"gate": (8, 12), "up": (8, 12), "down": (12, 5)}
X = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)


def drawn(half: str, bias: bool = False, **widths: tuple[int, int]) -> dict[str, Any]:
    """Return layers of the same values in both halves."""
    layers, rng = {}, np.random.default_rng(1)
    for name, (inputs, outputs) in (WIDTHS | widths).items():
        kernel, offset = (rng.standard_normal(size).astype(np.float32) for size in ((inputs, outputs), (outputs,)))
        if half == "torch":
            layer: Any = torch.nn.Linear(inputs, outputs, bias=bias)
            layer.weight.data = torch.from_numpy(kernel.T.copy())
            if bias:
                layer.bias.data = torch.from_numpy(offset)
        else:
            layer = nnx.Linear(inputs, outputs, use_bias=bias, rngs=nnx.Rngs(0))
            layer.kernel[...] = jnp.asarray(kernel)
            if bias:
                layer.bias[...] = jnp.asarray(offset)
        layers[name] = layer
    return layers


def made(half: str, layers: dict[str, Any], **options: Any) -> Any:
    module = (tiled_torch if half == "torch" else tiled_jax).TiledMLP
    return module.from_linears(layers.get("gate"), layers["up"], layers["down"], num_shards=3, **options)


def called(half: str, module: Any, x: np.ndarray = X) -> np.ndarray:
    return module(torch.from_numpy(x)).detach().numpy() if half == "torch" else np.asarray(module(jnp.asarray(x)))


def weight(half: str, layer: Any) -> Any:
    return layer.weight if half == "torch" else layer.kernel


def expected(layers: dict[str, Any], half: str, bias: bool) -> np.ndarray:
    """Return the MLP of X in float64."""

    def project(name: str, x: np.ndarray) -> np.ndarray:
        kernel = np.asarray(
            weight(half, layers[name]).detach().T if half == "torch" else weight(half, layers[name])[...]
        )
        offset = layers[name].bias if bias else None
        offset = offset.detach() if half == "torch" and bias else offset[...] if bias else np.zeros(kernel.shape[1])
        return x @ kernel.astype(np.float64) + np.asarray(offset)

    gate, up = project("gate" if "gate" in layers else "up", X), project("up", X)
    act = gate / (1 + np.exp(-gate))
    return project("down", act * up if "gate" in layers else act)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("bias", [False, True], ids=["weights", "biases"])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_a_module_of_layers_has_their_parameters(half: str, bias: bool, gated: bool) -> None:
    layers = drawn(half, bias)
    if not gated:
        del layers["gate"]
    module = made(half, layers)
    assert_within(called(half, module), expected(layers, half, bias), FORMULA_FLOAT32, "values")
    for name, layer in layers.items():
        assert getattr(module, f"w_{name}") is weight(half, layer)
        assert getattr(module, f"b_{name}", None) is (layer.bias if bias else None)
    back = dict(zip(("gate", "up", "down"), module.to_linears(), strict=True))
    assert (back["gate"] is None) is not gated
    for name, layer in layers.items():
        assert type(back[name]) is type(layer)
        assert (back[name].in_features, back[name].out_features) == WIDTHS[name]
        assert weight(half, back[name]) is weight(half, layer)
        assert back[name].bias is (layer.bias if bias else None) or back[name].bias[...] is None
    again = made(half, {name: layer for name, layer in back.items() if layer is not None})
    np.testing.assert_array_equal(called(half, again), called(half, module))


@pytest.mark.parametrize("half", HALVES)
def test_layers_that_do_not_fit_are_refused(half: str) -> None:
    with pytest.raises(SpecError, match=r"^TiledMLP\.from_linears: w_gate must be "):
        made(half, drawn(half, gate=(8, 11)))
    with pytest.raises(TypeError, match=r"^TiledMLP\.from_linears: up must be an nn"):
        made(half, drawn(half) | {"up": weight(half, drawn(half)["up"])})
    with pytest.raises(TypeError, match=r"^TiledMLP\.from_linears: down must be an nn"):
        made(half, drawn(half) | {"down": None})
    with pytest.raises(SpecError, match=r"^TiledMLP\.from_linears: activation must be one of"):
        made(half, drawn(half), activation="swish")
    package: Any = tiled_torch if half == "torch" else tiled_jax
    fused = package.TiledMLP(8, 12, fused_gate_up=True, **({} if half == "torch" else {"rngs": nnx.Rngs(0)}))
    with pytest.raises(SpecError, match=r"^TiledMLP\.to_linears: fused_gate_up must be False, got True"):
        fused.to_linears()


def test_what_has_to_be_called_is_refused_in_torch() -> None:
    layers = drawn("torch")
    with pytest.raises(tiled_torch.UnsupportedError, match=r"gate must be a plain nn\.Linear, got Sequential"):
        made("torch", layers | {"gate": torch.nn.Sequential(layers["gate"])})
    layers["up"].register_forward_hook(lambda module, x, y: 2 * y)
    with pytest.raises(tiled_torch.UnsupportedError, match=r"up must be a plain nn\.Linear, got one with hooks"):
        made("torch", layers)


def test_frozen_parameters_stay_frozen_and_gradients_reach_the_layers() -> None:
    layers = drawn("torch")
    layers["gate"].weight.requires_grad_(False)
    made("torch", layers)(torch.from_numpy(X)).sum().backward()
    assert layers["gate"].weight.grad is None
    assert layers["up"].weight.grad.abs().max() > FLOOR["float32"]
