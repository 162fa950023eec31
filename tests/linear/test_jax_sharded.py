"""`TiledLinear` with its tiles split over virtual devices, nnx and linen: the plain layer, a gathered tile at a time."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.core.jax_counting import collectives
from tests.linear.test_jax_linear import IN, OUT, as_linear, dense, drawn, plain, results_and_gradients
from tiled_jax import SpecError, TiledLinear, linen
from tiled_jax.linear.autodiff import Cut, Tiles, tiled_linear

pytestmark = pytest.mark.ranks


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)


TOKENS = P(("replica", "fsdp"), None)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("kind", "sharding"), [(AxisType.Auto, ("fsdp", None)), (AxisType.Explicit, (None, "fsdp"))], ids=str
)
def test_tiles_split_over_devices(kind: AxisType, sharding: Any, same: Any) -> None:
    """Tokens over all devices, tiles over four of them, two replicas: the plain layer; gradients sharded as weights."""
    x, params = drawn(16, 24), dense(24, 16)
    expected = results_and_gradients(plain, x, params)
    mesh = mesh_of(kind)
    options = {"in_splits": 3, "out_splits": 2, "dtype": jnp.float64, "param_dtype": jnp.float64}
    with jax.set_mesh(mesh):
        module = TiledLinear(24, 16, rngs=nnx.Rngs(0), sharding=sharding, **options)
        module.copy_params_from(as_linear(params))
        assert module.weight[...].sharding.spec == P(None, None, *sharding)
        x = jax.device_put(x, NamedSharding(mesh, TOKENS))
        fn = jax.jit(lambda x, m: results_and_gradients(lambda x, m: m(x), x, m))
        y, (dx, grads) = fn(x, module)
        assert grads.weight[...].sharding.is_equivalent_to(module.weight[...].sharding, 4)
    tiles = module.config.tiles
    back = {"kernel": tiles.unstack(jnp.asarray(np.asarray(grads.weight[...]))), "bias": np.asarray(grads.bias[...])}
    same(jax.device_get((y, (dx, back))), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tiles_of_linen_split_over_devices(kind: AxisType, same: Any) -> None:
    """By the partitioning that the module says; gradients are split as the weight is."""
    x, params, mesh = drawn(16, 24), dense(24, 16), mesh_of(kind)
    layer: Any = linen.TiledLinear(24, 16, in_splits=3, out_splits=2, sharding=("fsdp", None), param_dtype=jnp.float64)
    specs: Any = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x)["params"])
    assert specs == {"weight": P(None, None, "fsdp", None), "bias": P()}
    with jax.set_mesh(mesh):
        given = {
            name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in layer.tile_params(params).items()
        }
        placed = jax.device_put(x, NamedSharding(mesh, TOKENS))
        y, (dx, grads) = results_and_gradients(lambda x, p: layer.apply({"params": p}, x), placed, given)
    assert grads["weight"].sharding.is_equivalent_to(NamedSharding(mesh, specs["weight"]), 4)
    back = layer.untile_params(jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), grads))
    same(jax.device_get((y, (dx, back))), results_and_gradients(plain, x, params))


@pytest.mark.parametrize(
    ("sharding", "message"), [(("fsdp", None), "evenly divide"), (("rows", None), "rows.* not found in mesh")]
)
def test_tiles_that_the_devices_do_not_divide(sharding: Any, message: str) -> None:
    """Refused by JAX when the module is made: tiles of 5, 4, 4 rows over four devices, and no such axis."""
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.raises(ValueError, match=message):
        TiledLinear(IN, OUT, in_splits=3, sharding=sharding, rngs=nnx.Rngs(0))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("sharding", "check_vma"), [(("fsdp", None), False), ((None, "fsdp"), True), (("fsdp", "replica"), True)], ids=str
)
def test_inside_shard_map(sharding: Any, check_vma: bool, same: Any) -> None:
    """Every device gathers a tile from the parts; gradients of parts are summed over the devices and stay parts."""
    x, params = drawn(16, 26), dense(26, 22)  # tiles of 9, 9, 8 by 6, 6, 5, 5: padding is split as well
    tiles = Tiles(Cut(26, 3), Cut(22, 4))
    if sharding[0] == "fsdp":
        x, params = drawn(16, 24), dense(24, 22)
        tiles = Tiles(Cut(24, 3), Cut(22, 4))
    elif sharding[1] == "fsdp":
        params = dense(26, 30)  # 8, 8, 7, 7
        tiles = Tiles(Cut(26, 3), Cut(30, 4))
    expected = results_and_gradients(plain, x, params)
    sizes = tiles.inputs.features, tiles.outputs.features
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        module = TiledLinear(
            *sizes, in_splits=3, out_splits=4, sharding=sharding, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
        )
        module.copy_params_from(as_linear(params))
    graph, state = nnx.split(module)
    specs = nnx.get_partition_spec(state)
    fn = jax.shard_map(
        lambda x, state: nnx.merge(graph, state)(x),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(TOKENS, specs),
        out_specs=TOKENS,
        check_vma=check_vma,
    )
    y, (dx, grads) = jax.jit(lambda *a: results_and_gradients(fn, *a))(x, state)
    back = nnx.merge(graph, grads)
    same((y, (dx, {"kernel": back.to_linear().kernel[...], "bias": back.bias[...]})), expected)


def sharded_results(devices: int, kind: AxisType, x: jax.Array, params: Any, *, mapped: bool) -> Any:
    """Tokens and tiles over all the devices: y, dx and the gradients of the whole weight and of the bias."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(kind,), devices=jax.devices()[:devices])
    tiles, tokens, parts = Tiles(Cut(24, 3), Cut(22, 4)), P("fsdp", None), P(None, None, "fsdp", None)

    def layer(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return tiles.outputs.strip(tiled_linear("here", x, weight, bias, tiles, ("fsdp", None)))

    fn = layer if not mapped else jax.shard_map(layer, mesh=mesh, in_specs=(tokens, parts, P()), out_specs=tokens)
    given = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((x, tokens), (tiles.stack(params["kernel"]), parts), (params["bias"], P()))
    )
    with jax.set_mesh(mesh):
        y, (dx, dweight, dbias) = results_and_gradients(fn, *given)
    y, dx, dweight, dbias = (jnp.asarray(np.asarray(a)) for a in (y, dx, dweight, dbias))
    return y, (dx, {"kernel": tiles.unstack(dweight), "bias": dbias})


@pytest.mark.parametrize(
    ("devices", "kind", "mapped"),
    [
        (1, AxisType.Explicit, False),
        (2, AxisType.Auto, True),
        (4, AxisType.Auto, False),
        (8, AxisType.Auto, True),
    ],
)
def test_at_every_number_of_devices(devices: int, kind: AxisType, mapped: bool, same: Any) -> None:
    x, params = drawn(16, 24), dense(24, 22)
    expected = results_and_gradients(plain, x, params)
    same(sharded_results(devices, kind, x, params, mapped=mapped), expected)


@pytest.mark.deep
@pytest.mark.parametrize(("devices", "mapped"), [(2, False), (4, True), (8, False)])
def test_split_over_devices_in_bfloat16(devices: int, mapped: bool, x64: None) -> None:
    """Against float64, as wrong as the plain layer on one device in bfloat16 may be."""
    x, params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (drawn(16, 24), dense(24, 22)))
    exact = results_and_gradients(plain, *jax.tree.map(lambda a: a.astype(jnp.float64), (x, params)))
    baseline = results_and_gradients(plain, x, params)
    found = sharded_results(devices, AxisType.Auto, x, params, mapped=mapped)
    for a, b, wanted in zip(*map(jax.tree.leaves, (found, baseline, exact)), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        a, b, wanted = (np.asarray(value) for value in (a, b, wanted))
        assert_within(a, wanted, limit(relative_error(b, wanted), "bfloat16"), f"{a.shape}")


def test_a_part_that_is_not_a_part_of_a_tile() -> None:
    fn = jax.shard_map(
        lambda x, w: tiled_linear("here", x, w, None, Tiles(Cut(8, 1), Cut(8, 1)), ("fsdp", None)),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(TOKENS, P(None, None, ("replica", "fsdp"), None)),
        out_specs=TOKENS,
    )
    message = r"^here: weight must be 8 / 4 long in dim 2 on a device, got \[1, 1, 1, 8\]\. Split it over the axes"
    with pytest.raises(SpecError, match=message):
        fn(drawn(8, 8, dtype=jnp.float32), drawn(1, 1, 8, 8, dtype=jnp.float32))


H, N, ROWS = 256, 256, 64  # of one tile; tokens
TILE = 4 * H * N
"""Bytes of one gathered tile in float32."""


def compiled(form: str, splits: int, *, gradients: bool) -> Any:
    """The program of a layer [4 H, 4 N] whose weight is split over all eight devices, as its tokens are."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    tiles = Tiles(Cut(4 * H, splits), Cut(4 * N, splits))
    tokens, parts = P("fsdp", None), P(None, None, "fsdp", None)

    def fn(x: jax.Array, weight: jax.Array) -> jax.Array:
        return tiled_linear("here", x, weight, None, tiles, ("fsdp", None))

    if form == "shard_map":
        fn = jax.shard_map(fn, mesh=mesh, in_specs=(tokens, parts), out_specs=tokens)
    x = jax.ShapeDtypeStruct((ROWS, 4 * H), jnp.float32, sharding=NamedSharding(mesh, tokens))
    weight = jax.ShapeDtypeStruct(tiles.shape, jnp.float32, sharding=NamedSharding(mesh, parts))
    with jax.set_mesh(mesh):
        program = (lambda *a: results_and_gradients(fn, *a)) if gradients else fn
        return jax.jit(program).lower(x, weight).compile()


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("form", ["jit", "shard_map"])
def test_at_most_two_gathered_tiles_are_alive(form: str, gradients: bool) -> None:
    """Forward: one tile. Backward: one tile and the gradient of one tile, before it is reduced to the devices' parts.

    Beside them a device's part of each, and a few arrays of its own tokens. An untiled layer needs all 16.
    """
    tokens = 4 * (ROWS // 8) * 4 * (H + N)
    tiled, whole = (compiled(form, splits, gradients=gradients) for splits in (4, 1))
    alive = 2 if gradients else 1
    used = tiled.memory_analysis().temp_size_in_bytes
    assert alive * TILE <= used <= alive * (TILE + TILE // 8) + 2 * tokens < 3 * TILE
    assert whole.memory_analysis().temp_size_in_bytes >= 16 * TILE
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather", tiled.as_text())
    assert gathered == [f"{H},{N}"] * alive, "every gather is of one tile, and none of them stands before a loop"
    inside = [body for body in re.split(r"\n\n", tiled.as_text()) if "all-gather(" in body]
    assert not any(body.lstrip().startswith("ENTRY") for body in inside)


def test_replicas_are_summed_once_a_call() -> None:
    """Inside the loops: a gather, and a gather and a reduce-scatter of a tile. The sum over replicas is outside."""
    mesh = mesh_of(AxisType.Auto)
    tiles, parts = Tiles(Cut(16, 2), Cut(16, 2)), P(None, None, "fsdp", None)
    fn = jax.shard_map(
        lambda x, w: tiled_linear("here", x, w, None, tiles, ("fsdp", None)),
        mesh=mesh,
        in_specs=(TOKENS, parts),
        out_specs=TOKENS,
    )
    arguments = drawn(8, 16, dtype=jnp.float32), drawn(2, 2, 8, 8, dtype=jnp.float32)
    assert collectives(lambda *a: results_and_gradients(fn, *a), *arguments) == {False: 1, True: 0}
