"""Tokens on a mesh in 16 bits, with float32 master weights, through the kernels, and arrays that are on no mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.core.jax_program import counted
from tests.mlp.jax_untiled import cross_entropy, loss_operands, mlp, operands, y_and_gradients
from tiled_jax import backends, tile, tiled_linear_cross_entropy, tiled_mlp

pytestmark = pytest.mark.ranks

KINDS = AxisType.Auto, AxisType.Explicit
B, S, H, I, V = 8, 32, 8, 16, 24  # noqa: E741


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "context"), axis_types=(kind,) * 2)


def on_mesh(kind: AxisType, arrays: Any, spec: P) -> list[jax.Array]:
    mesh = mesh_of(kind)
    return [jax.device_put(a, NamedSharding(mesh, spec if a.shape[:2] == (B, S) else P())) for a in arrays]


def numbers(arrays: Any) -> list[Any]:
    return [np.asarray(jax.device_get(a)) for a in arrays]


def as_right(found: Any, alone: Any, truth: Any, dtype: Any) -> None:
    for a, one, true in zip(*map(numbers, (found, alone, truth)), strict=True):
        allowed = limit(relative_error(one.astype(np.float64), true), str(jnp.dtype(dtype)))
        assert_within(a.astype(np.float64), true.astype(np.float64), allowed, "result")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("kind", "dtype", "master"),
    [
        (AxisType.Auto, jnp.bfloat16, True),
        (AxisType.Auto, jnp.float16, False),
        (AxisType.Explicit, jnp.bfloat16, False),
        (AxisType.Explicit, jnp.float16, True),
    ],
)
def test_the_mlp_in_16_bits(kind: AxisType, dtype: Any, master: bool) -> None:
    """As right as one device with all the tokens, and gradients in the dtypes of their operands."""
    x, *weights = operands(B, S, hidden=H, intermediate=I, dtype=jnp.float32)
    arrays = [x.astype(dtype), *(w if master else w.astype(dtype) for w in weights)]
    step = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=4, keep=0.5)))
    found = step(*on_mesh(kind, arrays, P("data", "context")))
    assert [a.dtype for a in found] == [dtype] * 2 + [jnp.float32 if master else dtype] * 3
    truth = jax.jit(y_and_gradients(mlp))(*(a.astype(jnp.float32) for a in arrays))
    as_right(found, step(*arrays), truth, dtype)


@pytest.mark.parametrize(("kind", "dtype"), [(AxisType.Auto, jnp.bfloat16), (AxisType.Explicit, jnp.float16)])
def test_the_loss_with_a_master_weight(kind: AxisType, dtype: Any) -> None:
    x, weight, targets = loss_operands(B, S, hidden=H, vocab=V, dtype=jnp.float32)
    arrays = [x.astype(dtype), weight, targets]

    def loss(x: jax.Array, weight: jax.Array, targets: jax.Array) -> Any:
        return tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(reduction="sum"), num_shards=4)

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, (dx, dw) = step(*on_mesh(kind, arrays, P(None, ("data", "context"))))
    alone, of_alone = step(*arrays)
    assert (value.dtype, dx.dtype, dw.dtype) == (jnp.float32, dtype, jnp.float32)

    def plain(x: jax.Array, weight: jax.Array) -> Any:
        return cross_entropy(x, weight, targets, loss=LossOptions(reduction="sum"))

    true, of_true = jax.jit(jax.value_and_grad(plain, (0, 1)))(arrays[0].astype(jnp.float32), weight)
    as_right([value, dx, dw], [alone, *of_alone], [true, *of_true], dtype)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernels_on_a_device_s_own_tokens(kind: AxisType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for GPUs: every device launches the kernels on its own rows, and nothing gathers tokens."""
    monkeypatch.setattr("tiled_jax.backends._no_hopper", lambda: None)
    tokens, weight = (1024, 64), (64, 128)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))

    def shape(dims: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    given = [shape((8, *tokens), P("data")), shape(weight, P()), shape(weight, P()), shape(weight[::-1], P())]
    step = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=2, backend="pallas")))
    text = step.trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    assert ("CustomSPMDPartitioning" in text) == (kind == AxisType.Auto)
    if kind == AxisType.Explicit:  # the shard_map's body is there to be read
        assert "mosaic_gpu_v2" in text
        assert "all_gather" not in text


@pytest.mark.deep
def test_kernels_in_the_interpreter(interpreting: None) -> None:
    x, *weights = operands(2, 128, hidden=64, intermediate=128, dtype=jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    given = [jax.device_put(x, NamedSharding(mesh, P("data"))), *jax.device_put(weights, NamedSharding(mesh, P()))]
    kernels, library = (partial(tiled_mlp, num_shards=1, backend=backend) for backend in ("pallas", "xla"))
    found = jax.jit(y_and_gradients(kernels))(*given)
    assert backends.last_run("tiled_mlp") == "pallas"
    alone = jax.jit(y_and_gradients(library))(x, *weights)
    truth = jax.jit(y_and_gradients(mlp))(*(a.astype(jnp.float32) for a in (x, *weights)))
    as_right(*(jax.tree.leaves(each) for each in (found, alone, truth)), jnp.bfloat16)


@pytest.mark.parametrize("known", [True, False], ids=["under set_mesh", "alone"])
def test_arrays_on_no_mesh_that_jit_puts_on_one(known: bool, same: Any) -> None:
    """Only `in_shardings` names the mesh: under `jax.set_mesh` every device computes its own tokens, else XLA decides."""
    mesh, arrays = mesh_of(AxisType.Auto), operands(B, S, hidden=H, intermediate=I)
    cut = [NamedSharding(mesh, P("data", "context")), *[NamedSharding(mesh, P())] * 3]
    fn = y_and_gradients(partial(tiled_mlp, num_shards=4))
    step = jax.jit(fn, in_shardings=tuple(cut))

    def run() -> Any:
        outside, inside, _ = counted(step.lower(*arrays).compile().as_text())
        return outside["all-gather"] + sum(inside.values()), step(*arrays)

    if known:
        with jax.set_mesh(mesh):
            gathers, found = run()
        assert gathers == 0
    else:
        _, found = run()
    same(found, jax.jit(fn)(*arrays))


def test_tile_adds_up_gradients_of_many_shards_of_a_device_in_float32() -> None:
    """Of each of 1024 tokens, in shards of one, the gradient is 1: of more than 256 ones in bfloat16 the sum stays at 256."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = jax.device_put(jnp.ones((1024, 1), jnp.bfloat16), NamedSharding(mesh, P("data")))

    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(tile(lambda x: x * w, tiling=Tiling(shard_tokens=1))(x).astype(jnp.float32))

    assert jax.jit(jax.grad(total))(jnp.ones(1, jnp.bfloat16), x) == 1024
