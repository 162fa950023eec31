"""The parallel layers as nnx modules: global arrays on either kind of mesh, one master at any device count, checkpoints."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import ParallelLinearOptions
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.core.jax_compiling import OPTIMIZED, assert_passes_optimized
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError
from tiled_jax.parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelTiledMLP, VocabParallelEmbedding

pytestmark = pytest.mark.ranks

B, S, IN, OUT, V, H = 4, 8, 16, 32, 21, 8
FUSED = ParallelLinearOptions(stride=2)
SEQUENCE = ParallelLinearOptions(sequence_dim=1)


def mesh_of(data: int, tensor: int, *kinds: AxisType) -> jax.sharding.Mesh:
    """`kinds`: one for both axes, or one for each."""
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    devices, both = jax.devices()[: data * tensor], (kinds or (AxisType.Auto,)) * 2
    return jax.make_mesh((data, tensor), ("data", "tp"), axis_types=both[:2], devices=devices)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(3)


class Block(nnx.Module):
    """Embedding, column, row: split by tokens in between where `sequence` says so."""

    def __init__(self, mesh: jax.sharding.Mesh, *, sequence: bool, fused: bool, dtype: Any, param_dtype: Any) -> None:
        more: dict[str, Any] = {"mesh": mesh, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs()}
        options = ParallelLinearOptions(sequence_dim=1 if sequence else 0, stride=2 if fused else 1)
        of_table = {"reduce_scatter_embeddings": True, "sequence_dim": 1} if sequence else {}
        self.table = VocabParallelEmbedding(V, IN, **of_table, **more)
        self.up = ColumnParallelLinear(IN, OUT, sequence_parallel=sequence, options=options, **more)
        self.down = RowParallelLinear(
            OUT, H, input_is_parallel=True, sequence_parallel=sequence, options=options, **more
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(self.table(ids))))


def plain(parameters: Any, ids: jax.Array) -> jax.Array:
    """The same with whole weights."""

    def whole(a: jax.Array, dims: int) -> jax.Array:
        return a.reshape(-1, a.shape[-1]) if dims == 2 and a.shape[-1] == H else a.reshape(*a.shape[: dims - 1], -1)

    up, down = parameters["up"], parameters["down"]
    hidden = parameters["table"]["weight"][ids] @ whole(up["weight"], 2) + whole(up["bias"], 1)
    return jnp.tanh(hidden) @ whole(down["weight"], 2) + down["bias"]


def arrays(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def on_one_device(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), tree)


def loss_and_gradients(module: nnx.Module, ids: jax.Array) -> Any:
    graph, state = nnx.split(module, nnx.Param)

    def loss(state: Any) -> jax.Array:
        return jnp.sum(jnp.sin(nnx.merge(graph, state)(ids)))

    value, gradients = quickly(jax.jit(jax.value_and_grad(loss)), state)
    return value, nnx.to_pure_dict(gradients)


def ids_of() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, V, (B, S)), jnp.int32)


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("devices", "kind", "sequence", "fused"),
    [
        ((1, 1), AxisType.Auto, True, False),
        ((1, 2), AxisType.Auto, False, True),
        ((2, 4), AxisType.Auto, True, True),
        ((2, 4), AxisType.Explicit, True, False),
        ((2, 2), AxisType.Explicit, False, True),
        ((1, 8), AxisType.Auto, True, False),
    ],
)
def test_equal_to_whole_weights(
    devices: tuple[int, int], kind: AxisType, sequence: bool, fused: bool, x64: None
) -> None:
    """Gradients of every parameter, with tokens over a second axis that the layers know nothing of."""
    mesh = mesh_of(*devices, kind)
    block = Block(mesh, sequence=sequence, fused=fused, dtype=None, param_dtype=jnp.float64)
    ids = jax.device_put(ids_of(), NamedSharding(mesh, P("data", None)))
    with jax.set_mesh(mesh):
        actual = loss_and_gradients(block, ids)
    parameters = on_one_device(arrays(block))
    wanted = jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(plain(p, ids_of())))))(parameters)
    for (path, b), a in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(actual), strict=True):
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, jax.tree_util.keystr(path))
    # Global arrays have one norm: each part of a split parameter once, a copied parameter once.
    norm, exact = (np.asarray(jax.jit(optax.tree.norm)(gradients)) for gradients in (actual[1], wanted[1]))
    assert_within(norm, exact, DISTRIBUTED_FLOAT64, "global norm")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("kinds", "rows"),
    [
        ((AxisType.Explicit, AxisType.Auto), 4),
        ((AxisType.Auto, AxisType.Explicit), 4),
        ((AxisType.Auto, AxisType.Explicit), 3),
    ],
    ids=["data Explicit", "tp Explicit", "tp Explicit, 3 rows"],
)
def test_on_a_mesh_of_both_kinds(kinds: tuple[AxisType, AxisType], rows: int) -> None:
    """Layers and MLP as on a mesh of Auto axes; 3 rows do not lie over `data`."""
    x = np.random.default_rng(0).standard_normal((rows, 8, IN)).astype(np.float32)
    found = []
    for mesh in (mesh_of(2, 4), mesh_of(2, 4, *kinds)):
        more: dict[str, Any] = {"sequence_parallel": True, "mesh": mesh, "rngs": rngs()}
        up = ColumnParallelLinear(IN, OUT, options=SEQUENCE, **more)
        down = RowParallelLinear(OUT, IN, input_is_parallel=True, options=SEQUENCE, **more)
        mlp = TensorParallelTiledMLP(IN, OUT, **more)
        spec = P("data" if mesh.axis_types[0] == AxisType.Explicit else None)
        with jax.set_mesh(mesh):
            given = jax.device_put(x, NamedSharding(mesh, spec))
            y = jax.jit(lambda up, down, mlp, x: mlp(down(jnp.tanh(up(x)))))(up, down, mlp, given)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data" if rows % 2 == 0 else None, "tp")), 3)
        found.append(np.asarray(y))
    np.testing.assert_array_equal(*found)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ranks", "kind", "sequence"),
    [
        (2, AxisType.Auto, True),
        pytest.param(4, AxisType.Explicit, False, marks=pytest.mark.slow),
        pytest.param(8, AxisType.Auto, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_without_a_surrounding_jit_and_in_bfloat16(ranks: int, kind: AxisType, sequence: bool) -> None:
    """float32 parameters, the computation in bfloat16: gradients are float32, and all as right as on one device."""
    mesh = mesh_of(1, ranks, kind)
    block = Block(mesh, sequence=sequence, fused=False, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    ids = jax.device_put(ids_of(), NamedSharding(mesh, P()))
    y = block(ids)
    assert (y.dtype, y.shape) == (jnp.bfloat16, (B, S, H))
    _, gradients = loss_and_gradients(block, ids)
    assert {a.dtype for a in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    parameters = on_one_device(arrays(block))

    def on_one(parameters: Any, dtype: Any) -> Any:
        def loss(parameters: Any) -> Any:
            y = plain(jax.tree.map(lambda a: a.astype(dtype), parameters), ids_of())
            return jnp.sum(jnp.sin(y)), y

        gradients, y = quickly(jax.jit(jax.grad(loss, has_aux=True)), parameters)
        return y, gradients

    plainly = on_one(parameters, jnp.bfloat16)
    with jax.enable_x64(True):
        exact = on_one(jax.tree.map(lambda a: a.astype(jnp.float64), parameters), jnp.float64)
    for (path, truth), a, b in zip(
        jax.tree.leaves_with_path(exact), *map(jax.tree.leaves, ((y, gradients), plainly)), strict=True
    ):
        assert a.dtype == b.dtype
        a, b, truth = (np.asarray(value, np.float64) for value in (a, b, truth))
        assert_within(a, truth, limit(relative_error(b, truth), "bfloat16"), jax.tree_util.keystr(path))


@pytest.mark.deep
def test_one_master_at_every_number_of_devices(request: pytest.FixtureRequest) -> None:
    """To the bit, fused weights included; every device holds its part only, and the table's padding is zero."""
    if not OPTIMIZED:
        assert_passes_optimized(request.node.nodeid)
        return
    drawn = {}
    for ranks in (1, 2, 4, 8):
        block = Block(mesh_of(1, ranks), sequence=False, fused=True, dtype=None, param_dtype=jnp.float32)
        drawn[ranks] = on_one_device(arrays(block))
        for name, dim in (("up", 2), ("down", 1)):
            weight = getattr(block, name).weight[...]
            assert weight.addressable_shards[0].data.shape[dim] == weight.shape[dim] // ranks
        table = drawn[ranks]["table"]["weight"]
        assert table.shape == (-(-V // ranks) * ranks, IN)
        assert not table[V:].any()
        drawn[ranks]["table"]["weight"] = table[:V]
    assert drawn[1]["up"]["weight"].shape == (IN, 2, OUT // 2)
    for ranks in (2, 4, 8):
        jax.tree.map(np.testing.assert_array_equal, drawn[ranks], drawn[1])
    whole = nnx.initializers.lecun_normal()(nnx.Rngs(3).params(), (IN, OUT), jnp.float32)
    alone = ColumnParallelLinear(IN, OUT, options=FUSED, mesh=mesh_of(1, 4), rngs=rngs())
    np.testing.assert_array_equal(np.asarray(alone.weight[...]).reshape(IN, OUT), whole)


def test_an_initialiser_of_the_callers() -> None:
    def counting(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)

    for ranks in (1, 4):
        layer = RowParallelLinear(IN, OUT, init_method=counting, options=FUSED, mesh=mesh_of(1, ranks), rngs=rngs())
        assert layer.weight[...].shape == (2, IN // 2, OUT)
        np.testing.assert_array_equal(np.asarray(layer.weight[...]).reshape(-1), np.arange(IN * OUT))


def test_gathered_at_run_time_with_a_weight_from_elsewhere_and_a_bias_apart() -> None:
    mesh = mesh_of(1, 4)
    make = partial(ColumnParallelLinear, IN, OUT, mesh=mesh, rngs=rngs(), options=FUSED)
    layer, x = make(skip_bias_add=True, allocate_weight=False), jnp.ones((B, IN))
    assert layer.weight is None
    weight = make().weight[...]
    whole = x @ np.asarray(weight).reshape(IN, OUT)
    parts, bias = layer(x, weight)
    assert parts.shape == (B, 2, OUT // 2)
    assert bias is not None
    assert bias.shape == (2, OUT // 2)
    gathered, _ = layer(x, weight, runtime_gather_output=True)
    assert_within(np.asarray(gathered), np.asarray(whole), limit(0.0, "float32"), "gathered")
    np.testing.assert_array_equal(np.asarray(parts).reshape(B, OUT), gathered)
    assert gathered.sharding.is_fully_replicated
    with pytest.raises(SpecError, match="weight must be given to a layer made with allocate_weight=False"):
        layer(x)
    with pytest.raises(SpecError, match=r"ColumnParallelLinear: weight must be \[16, 2, 16\], got \[16, 32\]"):
        layer(x, weight.reshape(IN, OUT))


@pytest.mark.deep
def test_a_checkpoint_reloads_at_another_number_of_devices(tmp_path: Any) -> None:
    """Every device of 2 and of 8 reads its own part of what 4 wrote, to the bit."""

    def make(ranks: int) -> Block:
        return Block(mesh_of(1, ranks), sequence=False, fused=True, dtype=None, param_dtype=jnp.float32)

    written = make(4)
    # Something that no initialiser makes again.
    state = jax.tree.map(lambda a: a * 2 + 1, arrays(written))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", state)
        checkpointer.wait_until_finished()
        for ranks in (2, 8):
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays(make(ranks)))
            # The table's padding differs (24, 22, 24 rows): rows of zeros are cut off or added.
            read = checkpointer.restore(tmp_path / "step", target, strict=False)
            for (path, a), like in zip(jax.tree.leaves_with_path(read), jax.tree.leaves(target), strict=True):
                assert a.sharding == like.sharding
                assert a.shape == like.shape
                b = state
                for key in path:
                    b = b[key.key]
                rows = V if path[0].key == "table" else None
                np.testing.assert_array_equal(np.asarray(a)[:rows], np.asarray(b)[:rows])


def build(kind: Any, *sizes: int, **options: Any) -> Any:
    return kind(*sizes, **{"mesh": mesh_of(1, 4), "rngs": rngs(), **options})


BAD = {
    "outputs that do not divide": (
        lambda: build(ColumnParallelLinear, IN, 30),
        SpecError,
        r"ColumnParallelLinear: out_features must be a multiple of the 4 ranks it is split over, got 30",
    ),
    "fused outputs that do not divide": (
        lambda: build(ColumnParallelLinear, IN, 12, options=FUSED),
        SpecError,
        r"ColumnParallelLinear: out_features must be a multiple of .*stride.*, got 12",
    ),
    "inputs that do not divide": (
        lambda: build(RowParallelLinear, 18, OUT),
        SpecError,
        r"RowParallelLinear: in_features must be a multiple of the 4 ranks",
    ),
    "no such axis": (
        lambda: build(RowParallelLinear, IN, OUT, axis_name="pp"),
        SpecError,
        r"RowParallelLinear: axis_name must be an axis of the mesh, one of data, tp, got 'pp'",
    ),
    "no mesh": (
        lambda: build(VocabParallelEmbedding, V, H, mesh=None),
        TypeError,
        r"VocabParallelEmbedding: mesh must be a jax.sharding.Mesh, got NoneType",
    ),
    "another half's option": (
        lambda: build(ColumnParallelLinear, IN, OUT, options=ParallelLinearOptions(defer_weight_grad=True)),
        SpecError,
        r"ColumnParallelLinear: options.defer_weight_grad must be left at False",
    ),
    "a partial sum": (
        lambda: build(RowParallelLinear, IN, OUT, options=ParallelLinearOptions(explicit_expert_comm=True)),
        SpecError,
        r"RowParallelLinear: options.explicit_expert_comm must be left at False, got True\. A global array is never a part",
    ),
    "tokens that do not divide": (
        lambda: build(ColumnParallelLinear, IN, OUT, sequence_parallel=True, options=SEQUENCE)(jnp.ones((2, 6, IN))),
        SpecError,
        r"ColumnParallelLinear: dim 1 of x must be a multiple of the 4 ranks it is split over, got 6",
    ),
    "a whole x with split tokens": (
        lambda: build(RowParallelLinear, IN, OUT, sequence_parallel=True),
        SpecError,
        r"RowParallelLinear: input_is_parallel must be True with sequence_parallel, got False",
    ),
    "a dim of tokens that nothing splits": (
        lambda: build(VocabParallelEmbedding, V, H, sequence_dim=1),
        SpecError,
        r"VocabParallelEmbedding: sequence_dim must be left out without reduce_scatter_embeddings, got 1",
    ),
    "no function": (
        lambda: build(VocabParallelEmbedding, V, H, init_method="zeros"),
        TypeError,
        r"VocabParallelEmbedding: init_method must be a function or None, got str",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    call, error, message = BAD[what]
    with pytest.raises(error, match=message):
        call()
