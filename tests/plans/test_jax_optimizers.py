"""`parallelize` with every kind of optimizer state: two steps are those of one device, and moments lie with their parameters.

State that has nothing where a parameter is masked, and state of another rank than its parameter, was a raw pytree error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.tolerances import between
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import llama_config, mesh_of
from tiled_jax import TiledMLP
from tiled_jax.models import Llama
from tiled_jax.parallel import parallelize
from tiled_jax.plans.registry import MeshAxes, Placement, as_parameters, placement_of, rules_of

GATE = "w_gate"


def of_gate(parameters: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: GATE in str(path), parameters)


def labels(parameters: Any) -> Any:
    return jax.tree.map(lambda is_gate: "gate" if is_gate else "others", of_gate(parameters))


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.1),
    "masked": lambda: optax.masked(optax.adam(0.1), of_gate),
    "multi_transform": lambda: optax.multi_transform(
        {"gate": optax.adam(0.1), "others": optax.sgd(0.1, momentum=0.9)}, labels
    ),
    "frozen by partition": lambda: optax.partition({"gate": optax.adam(0.1), "others": optax.set_to_zero()}, labels),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(0.1),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(0.1)),
}


def loss_of(module: TiledMLP, x: jax.Array) -> jax.Array:
    return jnp.mean(module(x) ** 2)


@pytest.mark.deep_but(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_steps_are_those_of_one_device(name: str) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), jnp.float32)
    module, optimizer = TiledMLP(8, 16, rngs=nnx.Rngs(0)), OPTIMIZERS[name]()
    config = ParallelConfig(data=DataParallel())
    plan = parallelize(module, mesh_of(dp_shard=2), config, loss_fn=loss_of, optimizer=optimizer)
    state: Any = plan.state
    graph, parameters = nnx.split(module)
    own = optimizer.init(parameters)
    assert plan.step is not None
    for _ in range(2):
        state, _ = plan.step(state, x)
        gradients = jax.grad(lambda parameters: loss_of(nnx.merge(graph, parameters), x))(parameters)
        with jax.numpy_dtype_promotion("standard"):
            updates, own = optimizer.update(gradients, own, parameters)
        parameters = optax.apply_updates(parameters, updates)
    for found, expected in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(parameters), strict=True):
        assert_within(np.asarray(found), np.asarray(expected), between("float32"), name)
    if name == "adamw":
        moments = {a.sharding for a in jax.tree.leaves(state.optimizer) if a.ndim}
        assert moments == {a.sharding for a in jax.tree.leaves(state.parameters)}


def test_an_array_lies_with_the_parameter_whose_place_and_shape_it_has() -> None:
    mesh = mesh_of(a=2, b=2)
    whole, first, second = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("a",), ("b",)))

    def shape(*dims: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)

    # The place of one parameter ends that of another.
    parameters = {"w": shape(4, sharding=first), "mlp": {"w": shape(4, sharding=second)}}
    state = ({"w": shape(4), "mlp": {"w": shape(4)}}, {"w": shape(2, 2), "count": shape()}, {"mlp": {"w": shape(4)}})
    found = jax.tree.map(lambda a: a.sharding, as_parameters(state, parameters, whole))
    expected = ({"w": first, "mlp": {"w": second}}, {"w": whole, "count": whole}, {"mlp": {"w": second}})
    assert found == expected


def test_a_stacked_parameter_without_a_rule_is_not_split_along_its_layers() -> None:
    """The scale of an adapter, say, of more layers than it has rows."""
    axes = MeshAxes(batch=("d",), shard=("d",), context=(), ring=None, heads=None, tensor=None, size={"d": 2})
    model = nnx.eval_shape(lambda: Llama(llama_config(), rngs=nnx.Rngs(0)))
    for shape, dim in (((32, 4, 6), -1), ((32, 4, 3), -2), ((32, 3), None)):
        placed = placement_of("parallelize", ("layers", "mlp", "own"), shape, None, rules_of(model), axes)
        assert placed == Placement(dim, None, len(shape) - 1)
    assert placement_of("parallelize", ("own",), (32, 4), None, rules_of(model), axes) == Placement(-2, None, 2)
