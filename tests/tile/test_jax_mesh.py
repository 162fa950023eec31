"""Tokens sharded over a mesh: every device computes its own, and each weight gradient is reduced once.

On Auto meshes under plain `jit`, and on Explicit ones. Collectives are counted in the compiled program.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from tests.core.jax_counting import temp_bytes
from tests.core.jax_program import counted
from tests.mlp.jax_untiled import loss_operands, mlp, operands, y_and_gradients
from tiled_jax import SpecError, UnsupportedError, tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp

pytestmark = pytest.mark.ranks

BATCH, SEQUENCE, BOTH = P(("data", "context")), P(None, ("data", "context")), P("data", "context")
WHOLE, FSDP = P(), P(("data", "context"))


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    return jax.make_mesh((4, 2), ("data", "context"), axis_types=(kind,) * 2)


def place(mesh: jax.sharding.Mesh, arrays: Any, specs: Any) -> list[jax.Array]:
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]


def layer(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return jnp.dot(jax.nn.silu(jnp.dot(x, w_gate)) * jnp.dot(x, w_up), w_down)


def head_loss(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(jnp.dot(x, weight))
    return -jnp.sum(jnp.take_along_axis(log_p, targets[..., None], axis=-1))


def scalar(fn: Any) -> Any:
    def run(*arguments: jax.Array) -> jax.Array:
        y = fn(*arguments)
        return jnp.sum(y * jnp.cos(y))

    return run


N = 4  # shards of a device's own tokens
B, S, H, I, V = 8, 32, 8, 16, 24  # noqa: E741
NAMES = ("tiled_mlp", "tile", "tiled_linear_cross_entropy", "tiled_loss")


def case(name: str) -> tuple[Any, Any, list[jax.Array], int]:
    """The tiled function, the plain one, operands with x and targets first, and multiply-adds per token and step."""
    x, weight, targets = loss_operands(B, S, hidden=H, vocab=V)
    targets = jnp.abs(targets) % V
    total = LossOptions(reduction="sum")
    if name == "tiled_linear_cross_entropy":

        def head(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
            return tiled_linear_cross_entropy(x, weight, targets, loss=total, num_shards=N)

        return head, head_loss, [x, targets, weight], 3 * H * V
    if name == "tiled_loss":
        return lambda *a: tiled_loss(head_loss, *a, num_shards=N), head_loss, [x, targets, weight], 4 * H * V
    arrays = operands(B, S, hidden=H, intermediate=I)
    fn = partial(tiled_mlp, num_shards=N) if name == "tiled_mlp" else tile(layer, num_shards=N)
    return scalar(fn), scalar(layer), arrays, (11 if name == "tiled_mlp" else 12) * H * I


def step_of(fn: Any, arrays: list[jax.Array]) -> Any:
    floating = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]
    return jax.jit(jax.value_and_grad(fn, floating))


def split(mesh: jax.sharding.Mesh, arrays: list[jax.Array], tokens: P, of_weights: P) -> list[jax.Array]:
    return place(mesh, arrays, [tokens if a.shape[:2] == (B, S) else of_weights for a in arrays])


WAYS = ((SEQUENCE, WHOLE), (BATCH, FSDP))
AUTO = [(name, *way) for at, name in enumerate(NAMES) for way in ((BOTH, FSDP), WAYS[at % 2])]


@pytest.mark.deep_but(4)
@pytest.mark.parametrize(("name", "tokens", "of_weights"), AUTO, ids=str)
def test_a_device_computes_its_own_tokens_under_plain_jit(name: str, tokens: P, of_weights: P, same: Any) -> None:
    tiled, plain, arrays, per_token = case(name)
    given, weights = (
        split(mesh_of(), arrays, tokens, of_weights),
        len(arrays) - (2 if "loss" in name or "cross" in name else 1),
    )
    step = step_of(tiled, arrays)
    outside, inside, products = counted(step.lower(*given).compile().as_text(), turns=N)  # every target is valid
    of_plain, _, _ = counted(step_of(plain, arrays).lower(*given).compile().as_text())
    assert not inside, "a collective in the loop over shards"
    assert outside["all-gather"] <= of_plain["all-gather"], "tokens are gathered"
    assert set(outside) <= {"all-gather", "all-reduce", "reduce-scatter"}
    cut = sum(entry is not None for entry in tokens)  # XLA sums the loss over the axes of one dim after the other
    assert outside["all-reduce"] + outside["reduce-scatter"] <= weights + cut, "weight gradients are reduced once"
    assert B * S // 8 * per_token / 2 <= products <= B * S // 8 * per_token, "a device computes what others compute"
    same(step(*given), step_of(plain, arrays)(*arrays))


@pytest.mark.parametrize(
    ("name", "tokens"), [*zip(NAMES, (BOTH, SEQUENCE, BATCH, BOTH), strict=True), ("tiled_mlp", SEQUENCE)], ids=str
)
def test_tokens_on_explicit_axes(name: str, tokens: P, same: Any) -> None:
    tiled, plain, arrays, per_token = case(name)
    given, step = split(mesh_of(AxisType.Explicit), arrays, tokens, FSDP), step_of(tiled, arrays)
    outside, inside, products = counted(step.lower(*given).compile().as_text(), turns=N)  # every target is valid
    weights = sum(a.shape[:2] != (B, S) for a in arrays)
    assert not inside, "a collective in the loop over shards"
    assert outside["all-gather"] <= weights, "tokens are gathered"
    cut = sum(entry is not None for entry in tokens)
    assert outside["all-reduce"] + outside["reduce-scatter"] <= weights + cut, "weight gradients are reduced once"
    assert B * S // 8 * per_token / 2 <= products <= B * S // 8 * per_token, "a device computes what others compute"
    same(step(*given), step_of(plain, arrays)(*arrays))


@pytest.mark.parametrize("token_axes", [("data", "context"), (("data", "context"),), "context"], ids=str)
def test_named_token_axes(token_axes: Any, same: Any) -> None:
    mesh, arrays = mesh_of(), operands(B, S, hidden=H, intermediate=I)
    tiling = Tiling(num_shards=N, keep=0.5, token_axes=token_axes)
    step = jax.jit(y_and_gradients(partial(tiled_mlp, tiling=tiling)))
    with jax.set_mesh(mesh):
        text = step.lower(*arrays).as_text()
        actual = step(*arrays)
    assert "CustomSPMDPartitioning" not in text
    same(actual, y_and_gradients(mlp)(*arrays))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("checked", [True, False])
def test_axes_that_a_shard_map_leaves_out(checked: bool, same: Any) -> None:
    """Tokens cut by an Auto axis that the `shard_map` around the call leaves out: named, a device computes its own alone."""
    mesh, arrays = mesh_of(), operands(B, S, hidden=H, intermediate=I)
    given = split(mesh, arrays, BOTH, WHOLE)

    def step_with(tiling: Tiling) -> Any:
        def total(x: jax.Array, *weights: jax.Array) -> jax.Array:
            y = tiled_mlp(x, *weights, tiling=tiling)
            return lax.psum(jnp.sum(y * jnp.cos(y)), "data")

        specs, axes = (P("data"), P(), P(), P()), {"data"}
        return step_of(
            jax.shard_map(total, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=axes, check_vma=checked), arrays
        )

    named, left = (step_with(Tiling(num_shards=N, token_axes=axes)) for axes in (("data", "context"), None))
    outside, inside, products = counted(named.lower(*given).compile().as_text())
    assert not inside
    assert not outside["all-gather"]
    of_one = B * S // 8 * 11 * H * I
    assert of_one / 2 <= products <= of_one, "a device computes what others compute"
    assert counted(left.lower(*given).compile().as_text())[0]["all-gather"], "JAX has learned what a name says here"
    expected = step_of(scalar(layer), arrays)(*arrays)
    for step in (named, left):
        same(step(*given), expected)


def test_gradients_of_weights_are_summed_over_two_axes_at_once(same: Any) -> None:
    """Batch and sequence on an axis each: XLA sums gradients of the untiled MLP over one axis and then over the other."""
    tiled, plain, arrays, _ = case("tiled_mlp")
    given = split(mesh_of(), arrays, BOTH, WHOLE)
    sums = [
        re.findall(r" = \((.*?)\) all-reduce(?:-start)?\(", step_of(fn, arrays).lower(*given).compile().as_text() or "")
        for fn in (tiled, plain)
    ]
    of_weights = [sum(f"[{H},{I}]" in each or f"[{I},{H}]" in each for each in found) for found in sums]
    assert of_weights == [1, 2]


def test_names_inside_a_shard_map_are_checked() -> None:
    x, *weights = operands(B, S, hidden=H, intermediate=I, dtype=jnp.float32)
    tiled = partial(tiled_mlp, tiling=Tiling(token_axes="model"))
    specs = {"in_specs": (P("data"), P(), P(), P()), "out_specs": P("data"), "axis_names": {"data"}}
    message = r"tiled_mlp: token_axes must be axes of the mesh that is here \(data, context\), got model"
    with pytest.raises(SpecError, match=message):
        jax.shard_map(tiled, mesh=mesh_of(), **specs)(x, *weights)


def test_explicit_axes_that_a_typed_shard_map_leaves_out() -> None:
    """`tile` traces fn without such types; the others take them."""
    mesh = jax.make_mesh((4, 2), ("data", "context"), axis_types=(AxisType.Auto, AxisType.Explicit))
    x, *weights = place(
        mesh, operands(B, S, hidden=H, intermediate=I, dtype=jnp.float32), [P(None, "context")] + [P()] * 3
    )
    specs = {"in_specs": (P("data"), P(), P(), P()), "out_specs": P("data"), "axis_names": {"data"}}
    message = (
        r"tile: x must be cut by no Explicit axis \(context\) that a shard_map over data with check_vma=True leaves out"
    )
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=message):
        jax.jit(jax.shard_map(tile(layer, num_shards=N), mesh=mesh, **specs))(x, *weights)


@pytest.mark.parametrize(
    ("token_axes", "message"),
    [
        ("model", r"axes of the mesh that is here \(data, context\), got model"),
        (("data", None, "context"), "at most one entry for each of the 2 leading dims of x, got 3 entries"),
        ((None, ("data", "context")), r"axes whose 8 devices divide dim 1 of x, got \('data', 'context'\)"),
    ],
    ids=str,
)
def test_wrong_token_axes(token_axes: Any, message: str) -> None:
    x, *weights = operands(B, S + 1, hidden=H, intermediate=I, dtype=jnp.float32)
    with jax.set_mesh(mesh_of()), pytest.raises(SpecError, match=f"tiled_mlp: token_axes must be {message}"):
        tiled_mlp(x, *weights, tiling=Tiling(token_axes=token_axes))


def test_kept_shards_remainders_biases_and_two_matrices(same: Any) -> None:
    """15 tokens a device in shards of 4; the batch does not divide over `data`, the sequence does over `context`."""
    mesh = mesh_of()
    x, _, up, down = operands(4, 30, hidden=H, intermediate=I)
    biases = {"up": jnp.cos(up[0]), "down": jnp.sin(down[0])}

    def tiled(x: jax.Array, up: jax.Array, down: jax.Array, biases: Any) -> jax.Array:
        return tiled_mlp(x, None, up, down, biases=biases, tiling=Tiling(shard_tokens=4, keep=0.5))

    def plain(x: jax.Array, up: jax.Array, down: jax.Array, biases: Any) -> jax.Array:
        return mlp(x, None, up, down, biases=biases)

    columns = [P("data", "context"), P(), P(), {"up": P(), "down": P()}]
    given = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), [x, up, down, biases], columns)
    same(jax.jit(y_and_gradients(tiled))(*given), y_and_gradients(plain)(x, up, down, biases))


def test_tensor_parallel_columns_beside_sharded_tokens(same: Any) -> None:
    mesh, arrays = mesh_of(), operands(B, S, hidden=H, intermediate=I)
    specs = P("data"), P(None, "context"), P(None, "context"), P("context", None)
    step = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=N, keep=0.5)))
    given = place(mesh, arrays, specs)
    outside, inside, _ = counted(step.lower(*given).compile().as_text())
    assert (outside["all-gather"], sum(inside.values())) == (0, 0)
    same(step(*given), y_and_gradients(mlp)(*arrays))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_the_bias_of_y_is_added_once_where_devices_split_the_columns(kind: AxisType, same: Any) -> None:
    x, _, up, down = operands(B, S, hidden=H, intermediate=I)
    biases = {"up": jnp.cos(up[0]), "down": jnp.sin(down[0])}

    def tiled(x: jax.Array, up: jax.Array, down: jax.Array, biases: Any) -> jax.Array:
        return tiled_mlp(x, None, up, down, biases=biases, num_shards=N)

    def plain(x: jax.Array, up: jax.Array, down: jax.Array, biases: Any) -> jax.Array:
        return mlp(x, None, up, down, biases=biases)

    specs = [P("data"), P(None, "context"), P("context", None), {"up": P("context"), "down": P()}]
    put = partial(jax.tree.map, lambda a, spec: jax.device_put(a, NamedSharding(mesh_of(kind), spec)))
    given = put([x, up, down, biases], specs)
    same(jax.jit(y_and_gradients(tiled))(*given), y_and_gradients(plain)(x, up, down, biases))


@pytest.mark.parametrize(
    ("function", "kind"),
    [("tiled_mlp", AxisType.Auto), ("tiled_mlp", AxisType.Explicit), ("tile", AxisType.Auto)],
    ids=str,
)
def test_temporary_bytes_are_those_of_a_device_and_its_sums(function: str, kind: AxisType) -> None:
    """The sums of weight gradients are beside their reduction, which on one device are the results themselves."""
    arrays = operands(B, 1024, hidden=H, intermediate=64, dtype=jnp.float32)
    fn = partial(tiled_mlp, num_shards=8) if function == "tiled_mlp" else tile(layer, num_shards=8)
    step, sums = y_and_gradients(fn), 3 * H * 64 * 4
    given = place(mesh_of(kind), arrays, [BATCH, WHOLE, WHOLE, WHOLE])
    scalars = 128 if function == "tile" else 0  # counters of its loops
    assert temp_bytes(step, *given) <= temp_bytes(step, arrays[0][:1], *arrays[1:]) + sums + scalars


def test_a_stack_of_checkpointed_layers_gathers_no_tokens(same: Any) -> None:
    """A scan over layers with `jax.checkpoint`, fully-sharded weights, gradients accumulated over two micro-batches."""
    mesh = mesh_of()
    x, *weights = operands(2, B, S, hidden=H, intermediate=I)
    weights = [jnp.stack([w, w / 2]) for w in weights]

    def step(layer: Any, x: jax.Array, weights: Any) -> Any:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            body = jax.checkpoint(lambda x, w: (x + layer(x, *w), None))
            return jnp.sum(jnp.sin(lax.scan(body, x, weights)[0]))

        def accumulated(total: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        return lax.scan(accumulated, jax.tree.map(jnp.zeros_like, weights), x)[0]

    given = place(mesh, [x], [P(None, "data", "context")])[0], place(mesh, weights, [P(None, "data")] * 3)
    tiled = jax.jit(partial(step, partial(tiled_mlp, num_shards=N)))
    text = str(tiled.lower(*given).compile().as_text())
    rows = [m for m in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text) if m.split(",")[-2:-1] == [str(S)]]
    assert not rows, "tokens are gathered"
    same(tiled(*given), jax.jit(partial(step, layer))(x, weights))


def test_every_token_draws_its_own_mask_on_a_mesh() -> None:
    x = jax.device_put(jnp.ones((B, S, 64)), NamedSharding(mesh_of(), BATCH))
    y = jax.jit(lambda x: tile(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), num_shards=2)(x))(x)
    assert len({row.tobytes() for row in np.asarray(y).reshape(B * S, 64)}) == B * S, "two tokens have the same mask"


def test_nothing_of_it_is_in_a_program_for_one_device() -> None:
    arrays = operands(B, S, hidden=H, intermediate=I, dtype=jnp.float32)
    tiled = jax.jit(y_and_gradients(partial(tiled_mlp, num_shards=N)))
    assert "custom_call" not in tiled.lower(*arrays).as_text()
    sharded = place(mesh_of(), arrays, [BATCH, WHOLE, WHOLE, WHOLE])
    assert "CustomSPMDPartitioning" in tiled.lower(*sharded).as_text()
    assert "custom_call" not in jax.export.export(tiled)(*arrays).mlir_module()
