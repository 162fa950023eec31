"""`tiled_mlp` inside `shard_map`, and it and the tiled loss under plain `jit`: tokens and columns over eight virtual devices,
equal to one device in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions
from tests.core.jax_counting import collectives
from tests.mlp.jax_untiled import cross_entropy, loss_operands, mlp, operands, y_and_gradients
from tiled_jax import tiled_linear_cross_entropy, tiled_mlp

TOKENS, COLUMNS, ROWS = P("sequence", None), P(None, "tensor"), P("tensor", None)
SPECS = (TOKENS, COLUMNS, COLUMNS, ROWS)

pytestmark = pytest.mark.ranks


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((2, 4), ("sequence", "tensor"), axis_types=(kind,) * 2)


def sharded(mesh: jax.sharding.Mesh, *, check_vma: bool = True, **options: Any) -> Any:
    """The MLP over the mesh: each device has its tokens and its columns of I, y is summed over `tensor`."""

    def on_device(*arguments: jax.Array) -> jax.Array:
        return lax.psum(tiled_mlp(*arguments, **options), "tensor")

    return jax.shard_map(on_device, mesh=mesh, in_specs=SPECS, out_specs=TOKENS, check_vma=check_vma)


def place(mesh: jax.sharding.Mesh, arguments: list[jax.Array]) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arguments, SPECS, strict=True)]


@pytest.mark.parametrize(("check_vma", "keep"), [(True, 0.0), (True, 0.5), (False, 0.5)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tokens_and_columns(kind: AxisType, check_vma: bool, keep: float, same: Any) -> None:
    """60 tokens are 30 a device: three shards of 8 and one of 6."""
    mesh, arguments = mesh_of(kind), operands(60, hidden=8, intermediate=16)
    fn = sharded(mesh, check_vma=check_vma, num_shards=4, keep=keep)
    with jax.set_mesh(mesh):
        actual = jax.jit(y_and_gradients(fn))(*place(mesh, arguments))
    same(actual, y_and_gradients(mlp)(*arguments))


def test_replicated_weights_get_the_sum_of_every_device(same: Any) -> None:
    mesh, arguments = mesh_of(AxisType.Auto), operands(60, hidden=8, intermediate=16)
    whole = P(None, None)
    fn = jax.shard_map(
        partial(tiled_mlp, num_shards=4),
        mesh=mesh,
        in_specs=(P(("sequence", "tensor"), None), whole, whole, whole),
        out_specs=P(("sequence", "tensor"), None),
    )
    with pytest.raises(ValueError, match="divisible"):
        jax.jit(fn)(*arguments)
    arguments = operands(64, hidden=8, intermediate=16)
    same(jax.jit(y_and_gradients(fn))(*arguments), y_and_gradients(mlp)(*arguments))


def test_checkpointed_layers_in_a_scan(same: Any) -> None:
    mesh = mesh_of(AxisType.Auto)
    x, *weights = operands(60, hidden=8, intermediate=16, layers=2)

    def stack(layer: Any, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + jax.checkpoint(layer)(x, *w), None), x, weights)[0]

    layer = sharded(mesh, num_shards=4, keep=0.5)
    actual = jax.jit(y_and_gradients(partial(stack, layer)))(x, *weights)
    same(actual, jax.jit(y_and_gradients(partial(stack, mlp)))(x, *weights))


def test_one_sum_for_each_result_and_none_in_a_loop() -> None:
    """Per call: y and dx over `tensor`, and each of three weight gradients over `sequence`."""
    mesh = mesh_of(AxisType.Auto)
    arguments = operands(60, hidden=8, intermediate=16, dtype=jnp.float32)
    assert collectives(y_and_gradients(sharded(mesh, num_shards=4)), *arguments) == {False: 5, True: 0}


def test_tensor_parallel_weights_without_shard_map(same: Any) -> None:
    """An Auto mesh inserts the collectives by itself; the result is the same."""
    mesh, arguments = mesh_of(AxisType.Auto), operands(60, hidden=8, intermediate=16)
    specs = (P(None, None), COLUMNS, COLUMNS, ROWS)
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arguments, specs, strict=True)]
    actual = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=4)))(*placed)
    same(actual, y_and_gradients(mlp)(*arguments))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("kind", "reduction"), [(AxisType.Auto, "mean"), (AxisType.Explicit, "mean"), (AxisType.Explicit, "none")], ids=str
)
def test_a_split_vocabulary_without_shard_map(kind: AxisType, reduction: Any, same: Any) -> None:
    """`tiled_linear_cross_entropy` itself; gradients are split as the weight and its bias are."""
    mesh, (x, weight, targets) = mesh_of(kind), loss_operands(22, hidden=6, vocab=16)
    arguments = x, weight, jnp.cos(weight[0])
    loss = LossOptions(reduction=reduction, label_smoothing=0.1)

    def tiled(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, num_shards=4)

    def untiled(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return cross_entropy(x, weight, targets, bias, loss=loss)

    specs = P(None, None), COLUMNS, P("tensor")
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arguments, specs, strict=True)]
        actual = jax.jit(y_and_gradients(tiled))(*placed)
    same(actual, y_and_gradients(untiled)(*arguments))
    for a, spec in zip(actual[1:], specs, strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)
