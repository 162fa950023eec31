"""Checkpointing policies of the two halves: a stack of sharded layers on gloo ranks and on virtual devices, in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import Checkpointing
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.ranks import Ranks
from tiled_jax.parallel import checkpoint_without_output, column_parallel_linear, row_parallel_linear, scan_layers

pytestmark = pytest.mark.ranks

RANKS, T, H, I, LAYERS = 2, 6, 4, 8, 5  # noqa: E741
# The fields of a Checkpointing, whether the activation's output is dropped, and which of the layers run twice.
CASES: dict[str, tuple[dict[str, Any] | None, bool, list[int]]] = {
    "none": (None, False, []),
    "full": ({"mode": "full"}, False, [0, 1, 2, 3, 4]),
    "every 2": ({"mode": "layers", "every": 2}, False, [1, 3]),
    "products": ({"mode": "products"}, False, [0, 1, 2, 3, 4]),
    "op": ({"mode": "op"}, False, [0, 1, 2, 3, 4]),
    "without output": (None, True, []),
    "every 2, without output": ({"mode": "layers", "every": 2}, True, [1, 3]),
}
Arrays = dict[str, np.ndarray[Any, Any]]
# How a result, as JAX has it, is split over the ranks.
DIMS = {"y": 0, "dx": 0, "dup": 2, "ddown": 1}


def operands() -> Arrays:
    """Weights as JAX has them."""
    rng = np.random.default_rng(0)
    shapes = {"x": (T, H), "dy": (T, H), "up": (LAYERS, H, I), "down": (LAYERS, I, H)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def of_torch(pools: dict[int, Ranks]) -> dict[str, list[dict[str, Any]]]:
    """Of every case, every rank's results."""
    given = {name: (a.swapaxes(1, 2) if a.ndim == 3 else a).tolist() for name, a in operands().items()}
    found = pools[RANKS].run(
        "tests.plans.ranks_torch_parity_checkpointing:stacks",
        operands=given,
        cases=[fields for fields, _, _ in CASES.values()],
        without_output=[apart for _, apart, _ in CASES.values()],
    )
    return {name: [answers[at] for answers in found] for at, name in enumerate(CASES)}


def of_jax(fields: dict[str, Any] | None, without_output: bool) -> Arrays:
    mesh = jax.make_mesh((RANKS,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])
    checkpointing = None if fields is None else Checkpointing(**fields)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
        def down(h: jax.Array) -> jax.Array:
            return row_parallel_linear(h, w["down"], input_is_parallel=True, sequence_parallel=True, axis_name="tp")

        h = column_parallel_linear(x, w["up"], sequence_parallel=True, axis_name="tp")
        return x + (checkpoint_without_output(jnp.tanh, down)(h) if without_output else down(jnp.tanh(h)))

    split = {"up": P(None, None, "tp"), "down": P(None, "tp")}
    stack = jax.shard_map(
        lambda x, w: scan_layers(layer, x, w, checkpointing),
        mesh=mesh,
        in_specs=(P("tp"), split),
        out_specs=P("tp"),
    )

    @jax.jit
    def run(x: jax.Array, w: Any, dy: jax.Array) -> Any:
        y, pull = jax.vjp(stack, x, w)
        dx, dw = pull(dy)
        return {"y": y, "dx": dx} | {f"d{name}": a for name, a in dw.items()}

    with jax.enable_x64(True):
        x, dy, up, down = (jnp.asarray(operands()[name]) for name in ("x", "dy", "up", "down"))
        return {name: np.asarray(a) for name, a in run(x, {"up": up, "down": down}, dy).items()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_ranks_and_of_devices(name: str, of_torch: Any) -> None:
    """And PyTorch's layers ran as often as the policy says."""
    fields, without_output, twice = CASES[name]
    ours = of_jax(fields, without_output)
    assert set(ours) == set(DIMS)
    for what, dim in DIMS.items():
        for rank, (answer, part) in enumerate(zip(of_torch[name], np.split(ours[what], RANKS, dim), strict=True)):
            found = np.asarray(answer[what])
            found = found.swapaxes(1, 2) if found.ndim == 3 else found
            assert_within(found, part, DISTRIBUTED_FLOAT64, f"{name}: {what} of rank {rank}")
            assert answer["runs"] == [2 if layer in twice else 1 for layer in range(LAYERS)]
