"""`check` where the tiled training runs over a mesh of devices: by `parallelize`, or by plain jit with tokens that are cut."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from tests.check.jax_models import MLP, H, T
from tests.plans.jax_parallel_models import llama_config, mesh_of
from tiled_jax import Tiling, check, tile_model
from tiled_jax.models import Llama, next_token_loss
from tiled_jax.parallel import parallelize

pytestmark = pytest.mark.ranks

KINDS = (AxisType.Auto, AxisType.Explicit)
FSDP = DataParallel()
# What the mesh is and what is done with it.
PLANS: dict[str, tuple[dict[str, int], ParallelConfig]] = {
    "ddp": ({"dp": 8}, ParallelConfig(data=DataParallel(engine="ddp", shard_axis="dp"))),
    "fsdp": ({"dp_shard": 8}, ParallelConfig(data=FSDP)),
    "tp": ({"tp": 8}, ParallelConfig(tensor=TensorParallel())),
    "fsdp-tp": ({"dp_shard": 4, "tp": 2}, ParallelConfig(data=FSDP, tensor=TensorParallel())),
    "fsdp-cp": ({"dp_shard": 4, "cp": 2}, ParallelConfig(data=DataParallel(context_axis="cp"))),
}
IDS = np.random.default_rng(0).integers(0, 200, (8, 17)).astype(np.int32)


def by_parallelize(name: str, kind: AxisType, scope: Any = "mlp", fault: str = "") -> Any:
    """What `check` says of a plan beside one device. fault: "" or what is wrong with it."""
    axes, config = PLANS[name]
    plans: list[Any] = []

    def tile(model: Any) -> Any:
        options: Any = dict(tiling=Tiling(num_shards=3), scope=scope)
        shapes = nnx.eval_shape(lambda: Llama(llama_config(), **options, rngs=nnx.Rngs(0)))
        plan = parallelize(nnx.merge(nnx.graphdef(shapes), nnx.state(model)), mesh_of(kind, **axes), config)
        plans.append(plan)
        assert plan.state is not None
        return nnx.merge(plan.graph, plan.state.parameters, plan.state.variables)

    def step(model: Any, batch: Any) -> Any:
        batch = jnp.tile(batch[:1], (len(batch), 1)) if fault == "one part for all" else batch
        loss, gradients = plans[-1].gradients(nnx.state(model, nnx.Param), batch)
        return loss, jax.tree.map(lambda g: g / 8, gradients) if fault == "divided twice" else gradients

    model = Llama(llama_config(), plain=True, rngs=nnx.Rngs(0))
    return check(model, IDS, tile=tile, step=step, plain_step=next_token_loss)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "Auto") for name in PLANS), ("fsdp", "Explicit"), ("fsdp-tp", "Explicit")]
)
def test_a_plan_is_proven(name: str, kind: str) -> None:
    report = by_parallelize(name, AxisType[kind])
    assert report.equal, str(report)
    assert report.paths == {"layers.mlp": "tiled_mlp"}
    assert {result.kind for result in report.results} >= {"loss", "gradient", "parameter"}


@pytest.mark.deep
def test_a_plan_of_whole_layers_is_proven() -> None:
    report = by_parallelize("fsdp", AxisType.Auto, scope="block")
    assert report.equal, str(report)
    assert report.paths == {"layers": "tiled_block"}


@pytest.mark.deep
@pytest.mark.parametrize(("fault", "kind"), [("one part for all", "loss"), ("divided twice", "gradient")])
def test_what_is_wrong_with_a_plan_is_found(fault: str, kind: str) -> None:
    first = by_parallelize("fsdp", AxisType.Auto, fault=fault).first
    assert (first.step, first.kind) == (1, kind)


class Layer(nnx.Module):
    """Its loss needs no sharding of results to be named."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm, self.mlp = nnx.RMSNorm(H, rngs=rngs), MLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean((x + self.mlp(self.norm(x))) ** 2)


X = np.random.default_rng(1).standard_normal((8, T, H)).astype(np.float32)


def by_jit(kind: AxisType, fault: bool = False) -> Any:
    """What `check` says of a step whose sequences lie on several devices. fault: half of them are left out."""
    mesh = mesh_of(kind, data=4, model=2)
    tokens, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def tile(model: Any) -> Any:
        graph, state = nnx.split(tile_model(model, num_shards=4))
        return nnx.merge(graph, jax.device_put(state, whole))

    def step(model: Any, x: jax.Array) -> jax.Array:
        x = x[:4] if fault else x
        place: Any = jax.lax.with_sharding_constraint if kind == AxisType.Auto else jax.sharding.reshard
        return model(place(x, tokens))

    return check(Layer(), X, tile=tile, step=step, plain_step=lambda model, x: model(x))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tokens_on_several_devices(kind: AxisType) -> None:
    report = by_jit(kind)
    assert report.equal, str(report)
    assert report.paths == {"mlp": "tiled_mlp"}


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_sequences_that_no_device_has_are_missed(kind: AxisType) -> None:
    first = by_jit(kind, fault=True).first
    assert (first.step, first.kind) == (1, "loss")


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_model_and_a_batch_that_are_on_a_mesh_already(kind: AxisType) -> None:
    mesh = mesh_of(kind, data=8)
    graph, state = nnx.split(Layer())
    model = nnx.merge(graph, jax.device_put(state, NamedSharding(mesh, P())))
    report = check(model, {"x": jax.device_put(X, NamedSharding(mesh, P("data")))})
    assert report.equal, str(report)
