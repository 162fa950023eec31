"""Parameters between the twin modules: every value arrives, transposed where it is a weight, or nothing is written."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from torch import nn

import tiled_jax
import tiled_torch
from shared_specs.errors import SpecError
from shared_specs.mlp.cases import MLP_CASES, MLPCase, make_inputs
from tests.adapters import ADAPTERS
from tests.asserting import assert_within, truth
from tiled_torch.bridge import params_to_jax, params_to_torch, to_torch

H, I = 16, 24  # noqa: E741
BASE = replace(MLP_CASES[0], dtype="float32")
BIASES = ("gate", "up", "down")
KINDS = {
    "gated": BASE,
    "plain": replace(BASE, gated=False),
    "biases": replace(BASE, biases=BIASES),
    "fused": replace(BASE, fused=True),
    "fused with biases": replace(BASE, fused=True, biases=BIASES),
    "float64": replace(BASE, dtype="float64"),
    "bfloat16": replace(BASE, dtype="bfloat16", biases=BIASES),
}


def options(case: MLPCase) -> dict[str, Any]:
    return {"gated": case.gated, "bias": bool(case.biases), "fused_gate_up": case.fused}


def torch_mlp(case: MLPCase = BASE, seed: int = 0) -> tiled_torch.TiledMLP:
    torch.manual_seed(seed)
    return tiled_torch.TiledMLP(H, I, dtype=getattr(torch, case.dtype), **options(case))


def jax_mlp(case: MLPCase = BASE, seed: int = 0) -> tiled_jax.TiledMLP:
    return tiled_jax.TiledMLP(H, I, param_dtype=case.dtype, rngs=nnx.Rngs(seed), **options(case))


def values(jax_module: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(jax_module, nnx.Param))
    return {".".join(map(str, path)): np.array(variable[...]) for path, variable in flat}


def expected(torch_module: nn.Module) -> dict[str, np.ndarray]:
    """What the JAX twin must hold."""
    to_numpy = ADAPTERS["torch"].to_numpy
    return {
        name: to_numpy(tensor.T if name.rpartition(".")[2].startswith("w_") else tensor)
        for name, tensor in torch_module.named_parameters()
    }


def assert_equal(actual: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert actual[name].dtype == wanted[name].dtype
        assert np.array_equal(actual[name], wanted[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_arrives_in_both_directions(kind: str) -> None:
    case = KINDS[kind]
    with jax.enable_x64(case.dtype == "float64"):
        ours, theirs, other = torch_mlp(case), jax_mlp(case), torch_mlp(case, seed=1)
        kept = dict(other.named_parameters())
        params_to_jax(ours, theirs)
        assert_equal(values(theirs), expected(ours))
        params_to_torch(theirs, other)
        assert_equal(expected(other), expected(ours))
    assert all(other.get_parameter(name) is parameter for name, parameter in kept.items())
    assert all(parameter.requires_grad for parameter in kept.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_twins_compute_the_same_afterwards(kind: str) -> None:
    case = KINDS[kind]
    arrays = make_inputs(case)
    oracle, limits = truth(case)
    make = ADAPTERS["torch"].from_numpy
    weights = [make(arrays[name].T.copy()) if name in arrays else None for name in ("w_gate", "w_up", "w_down")]
    biases = {name: make(arrays[f"b_{name}"]) for name in case.biases}
    ours = tiled_torch.TiledMLP.from_weights(*weights, biases=biases, fused_gate_up=case.fused)
    with jax.enable_x64(case.dtype == "float64"):
        theirs = jax_mlp(case)
        params_to_jax(ours, theirs)
        y = to_torch(theirs(jnp.asarray(arrays["x"])))
    difference = (ours(make(arrays["x"])).detach().double() - y.double()).numpy()
    assert_within(oracle["y"] + difference, oracle["y"], 2 * limits["y"], kind)


def test_the_copies_are_independent() -> None:
    ours, theirs = torch_mlp(replace(BASE, biases=BIASES)), jax_mlp(replace(BASE, biases=BIASES))
    params_to_jax(ours, theirs)
    before = values(theirs)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(2)
    assert_equal(values(theirs), before)
    params_to_torch(theirs, ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(2)
    assert_equal(values(theirs), before)


class TorchStack(nn.Module):
    """Two MLPs under other names."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(torch_mlp(seed=seed) for seed in range(count))


class JaxStack(nnx.Module):
    """Its twin."""

    def __init__(self) -> None:
        self.layers = nnx.List([jax_mlp(), jax_mlp()])


def test_several_mlps_are_matched_by_name() -> None:
    ours, theirs, other = TorchStack(), JaxStack(), TorchStack()
    params_to_jax(ours, theirs)
    wanted = expected(ours)
    assert len(wanted) == 6
    assert_equal(values(theirs), wanted)
    with torch.no_grad():
        other.layers[1].w_up.zero_()
    params_to_torch(theirs, other)
    assert_equal(expected(other), wanted)


def test_a_sharded_parameter_stays_sharded_and_is_gathered_on_the_way_back() -> None:
    ours, theirs, other = torch_mlp(), jax_mlp(), torch_mlp(seed=1)
    sharding = NamedSharding(jax.make_mesh((2,), ("tp",)), PartitionSpec(None, "tp"))
    theirs.w_up = nnx.Param(jax.device_put(theirs.w_up[...], sharding))
    params_to_jax(ours, theirs)
    assert theirs.w_up[...].sharding == sharding
    assert len(theirs.w_up[...].devices()) == 2
    params_to_torch(theirs, other)
    assert_equal(expected(other), expected(ours))


def mixed() -> nn.Module:
    return nn.Sequential(torch_mlp(), nn.Linear(H, 3))


def wider() -> nnx.Module:
    """Only its last parameter has another shape."""
    module = jax_mlp(replace(BASE, biases=BIASES))
    module.b_up = nnx.Param(jnp.zeros(I + 1))
    return module


def other_activation() -> nnx.Module:
    """Only its last module has another one."""
    stack = JaxStack()
    stack.layers[1] = tiled_jax.TiledMLP(H, I, activation="relu", rngs=nnx.Rngs(0))
    return stack


BAD: dict[str, tuple[Any, Any, str]] = {
    "another layer": (
        mixed,
        jax_mlp,
        "torch_module must be made of TiledMLP alone, got a parameter 1.bias. "
        "Other layouts are unknown here; pass its TiledMLP modules one by one.",
    ),
    "fused": (
        torch_mlp,
        lambda: jax_mlp(replace(BASE, fused=True)),
        "jax_module must be a twin with parameters w_down, w_gate, w_up, got w_down, w_gate_up.",
    ),
    "no parameters": (
        torch_mlp,
        nnx.Module,
        "jax_module must be a twin with parameters w_down, w_gate, w_up, got none.",
    ),
    "one layer more": (
        lambda: TorchStack(3),
        JaxStack,
        "jax_module must be a twin with parameters layers.0.w_down, layers.0.w_gate, layers.0.w_up, layers.1.w_down, "
        "layers.1.w_gate, layers.1.w_up, layers.2.w_down, layers.2.w_gate, layers.2.w_up, got layers.0.w_down, "
        "layers.0.w_gate, layers.0.w_up, layers.1.w_down, layers.1.w_gate, layers.1.w_up.",
    ),
    "shape": (
        lambda: torch_mlp(replace(BASE, biases=BIASES)),
        wider,
        "jax_module.b_up must be [24] float32, got [25] float32 (torch_module.b_up is [24] float32).",
    ),
    "dtype": (
        torch_mlp,
        lambda: jax_mlp(replace(BASE, dtype="bfloat16")),
        "jax_module.w_gate must be [16, 24] float32, got [16, 24] bfloat16 (torch_module.w_gate is [24, 16] float32).",
    ),
    "activation": (
        torch_mlp,
        lambda: tiled_jax.TiledMLP(H, I, activation="gelu", rngs=nnx.Rngs(0)),
        "jax_module.activation must be 'silu', that of torch_module, got 'gelu'.",
    ),
    "activation of one of several": (
        TorchStack,
        other_activation,
        "jax_module.layers.1.activation must be 'silu', that of torch_module, got 'relu'.",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("copy", [params_to_jax, params_to_torch])
def test_modules_that_are_no_twins_are_refused_and_untouched(name: str, copy: Any) -> None:
    make_ours, make_theirs, message = BAD[name]
    ours, theirs = make_ours(), make_theirs()
    before = [parameter.detach().clone() for parameter in ours.parameters()], values(theirs)
    with pytest.raises(SpecError) as caught:
        copy(*((ours, theirs) if copy is params_to_jax else (theirs, ours)))
    assert str(caught.value) == f"{copy.__name__}: {message}"
    assert all(map(torch.equal, before[0], ours.parameters()))
    assert_equal(values(theirs), before[1])


def test_a_value_that_cannot_cross_leaves_everything_untouched() -> None:
    with jax.enable_x64(True):
        ours, theirs = torch_mlp(KINDS["float64"]), jax_mlp(KINDS["float64"])
    before = values(theirs)
    with pytest.raises(TypeError, match=r"^params_to_jax: torch_module\.w_gate must be of at most 32 bits a number"):
        params_to_jax(ours, theirs)
    assert_equal(values(theirs), before)
    with pytest.raises(TypeError, match=r"^params_to_torch: torch_module\.w_gate must be a plain .* meta device"):
        params_to_torch(jax_mlp(), torch_mlp().to("meta"))


def test_other_kinds_of_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^params_to_jax: torch_module must be an nn\.Module, got TiledMLP\.$"):
        params_to_jax(jax_mlp(), torch_mlp())
    with pytest.raises(TypeError, match=r"^params_to_torch: jax_module must be an nnx\.Module, got dict\.$"):
        params_to_torch({"w_up": 1}, torch_mlp())
