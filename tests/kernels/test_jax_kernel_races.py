"""The kernels under the race detection of JAX's GPU interpreter, and that it finds a race where one is planted."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreted_kernels
from jax.experimental.pallas import mosaic_gpu as plgpu

from shared_specs.kernels.blocks import Blocks
from tests.kernels.jax_interpreted import FINDS_RACES, assert_true, clean_interpreter, operands, race_finder
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_elementwise import glu, glu_backward
from tiled_jax.mlp.kernels.glu_up import glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.kernels.linear import dx, linear
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient
from tiled_jax.mlp.steps import XLA

pytestmark = pytest.mark.skipif(
    not FINDS_RACES, reason="the interpreter of jax 0.10 knows few of the ways in which copies and computation can race"
)

# Four blocks for two multiprocessors: each goes through the seam between one block's stores and the next one's loads.
TOKENS, HIDDEN, INTERMEDIATE = 256, 128, 256
STAGES = Blocks(rows=128, columns=128, depth=64, stages=2)
PAIRS = replace(STAGES, cluster=2)
TURNS = replace(STAGES, rows=64, turns=True)  # eight blocks: two for each warpgroup of a multiprocessor


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Without the caches too: the launches are jitted, and what one test left out must not be in the next one."""
    jax.clear_caches()
    with clean_interpreter():
        yield
    jax.clear_caches()


def run_glu_up(arrays: dict[str, Any], blocks: Blocks = STAGES) -> dict[str, Any]:
    names = ("h", "gate", "up")
    operands = (arrays[name] for name in ("x", "w_gate", "w_up"))
    biases = {name: arrays[name] for name in ("b_gate", "b_up")}
    options = {"activation": "silu", "keep": True, "blocks": blocks, "interpret": race_finder()}
    return dict(zip(names, glu_up(*operands, **biases, **options), strict=True))


def run_narrow_glu_up(arrays: dict[str, Any]) -> dict[str, Any]:
    """Three stores a block: an odd number cannot take turns between two slots."""
    return run_glu_up(arrays, replace(STAGES, columns=64))


def run_glu_up_in_turns(arrays: dict[str, Any]) -> dict[str, Any]:
    return run_glu_up(arrays, TURNS)


def run_dgated(arrays: dict[str, Any], blocks: Blocks = STAGES) -> dict[str, Any]:
    names = ("dgate", "dup", "h_again")
    operands = (arrays[name] for name in ("dy", "w_down", "gate", "up"))
    options = {"activation": "silu", "blocks": blocks, "interpret": race_finder()}
    return dict(zip(names, dgated(*operands, **options), strict=True))


def run_glu_up_in_pairs(arrays: dict[str, Any]) -> dict[str, Any]:
    """Two programs copy half of each other's weights."""
    return run_glu_up(arrays, PAIRS)


def run_dgated_in_pairs(arrays: dict[str, Any]) -> dict[str, Any]:
    return run_dgated(arrays, PAIRS)


def run_dgated_in_turns(arrays: dict[str, Any]) -> dict[str, Any]:
    return run_dgated(arrays, TURNS)


def run_glu_up_auxiliary(arrays: dict[str, Any]) -> dict[str, Any]:
    """Of a gate that is there already."""
    gate = XLA.linear(arrays["x"], arrays["w_gate"], arrays["b_gate"])
    options = {"activation": "silu", "blocks": STAGES, "interpret": race_finder()}
    return {"h": glu_up_auxiliary(arrays["x"], arrays["w_up"], gate, b_up=arrays["b_up"], **options)}


PRODUCT: dict[str, Any] = {"blocks": STAGES, "interpret": race_finder()}


def run_linear(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"up": linear(arrays["x"], arrays["w_up"], bias=arrays["b_up"], **PRODUCT)}


def run_dx(arrays: dict[str, Any]) -> jax.Array:
    """The weights as they are stored: dgate and dup are as wide as the hidden size."""
    return dx(arrays["x"], arrays["dy"], arrays["w_down"], arrays["w_down"], **PRODUCT)


def run_weight_gradient(arrays: dict[str, Any]) -> jax.Array:
    acc = jnp.ones((INTERMEDIATE, INTERMEDIATE), jnp.float32)
    return weight_gradient(acc, arrays["gate"], arrays["up"], **PRODUCT)


ELEMENTWISE: dict[str, Any] = {
    "activation": "silu",
    "blocks": Blocks(rows=1, columns=256),
    "interpret": race_finder(),
}


def run_glu(arrays: dict[str, Any]) -> jax.Array:
    return glu(arrays["gate"][:3], arrays["up"][:3], **ELEMENTWISE)


def run_glu_backward(arrays: dict[str, Any]) -> Any:
    dh, gate, up = (arrays[name][:3] for name in ("up", "gate", "up"))
    return glu_backward(dh, gate, up, **ELEMENTWISE)


@pytest.mark.parametrize("kernel", [run_dx, run_weight_gradient, run_glu, run_glu_backward])
def test_no_race_in(kernel: Any) -> None:
    jax.block_until_ready(kernel(operands(TOKENS, HIDDEN, INTERMEDIATE, "bfloat16")))
    assert not interpreted_kernels.get_races().races_found


IN_TURNS = [run_glu_up_in_turns, run_dgated_in_turns]
IN_PAIRS = [run_glu_up_in_pairs, run_dgated_in_pairs]


@pytest.mark.parametrize(
    "kernel", [run_glu_up, run_narrow_glu_up, run_glu_up_auxiliary, run_dgated, run_linear, *IN_TURNS, *IN_PAIRS]
)
def test_no_race(kernel: Any) -> None:
    arrays = operands(TOKENS, HIDDEN, INTERMEDIATE, "bfloat16", ("gate", "up"))
    found = kernel(arrays)
    assert_true(found, arrays, "bfloat16", "silu")
    assert not interpreted_kernels.get_races().races_found


@pytest.mark.parametrize("left_out", ["commit_smem", "wait_smem_to_gmem"])
@pytest.mark.parametrize(
    "kernel", [run_glu_up, run_glu_up_auxiliary, run_dgated, run_linear, run_weight_gradient, *IN_TURNS]
)
def test_a_missing_fence_or_wait_is_found(kernel: Any, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may leave before its values are there, or they may be overwritten on their way.

    What is left out is the first one of a block, and every wait that lets copies go on, where those of `glu_up` are.
    """
    original, calls = getattr(plgpu, left_out), count()

    def mutant(*args: int, **options: Any) -> None:
        if next(calls) > 0 and not any(args):
            original(*args, **options)

    monkeypatch.setattr(plgpu, left_out, mutant)
    found = kernel(operands(TOKENS, HIDDEN, INTERMEDIATE, "bfloat16", ("gate", "up")))
    jax.block_until_ready(found)
    assert interpreted_kernels.get_races().races_found


@pytest.mark.parametrize("kernel", [run_glu, run_glu_backward])
def test_programs_that_share_elements_are_found(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have one run: what both write has one value, and still who writes it is a race."""
    index = lax.axis_index
    monkeypatch.setattr(lax, "axis_index", lambda axis: index(axis) // 2)
    jax.block_until_ready(kernel(operands(TOKENS, HIDDEN, INTERMEDIATE, "bfloat16", ("gate", "up"))))
    assert interpreted_kernels.get_races().races_found
