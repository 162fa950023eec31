"""What `parallelize` refuses, by name and before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from shared_specs.config import Checkpointing, Compile, DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError, UnsupportedError
from tests.plans.jax_parallel_models import Blocks, blocks_loss, llama_config, mesh_of
from tiled_jax.models import Llama
from tiled_jax.parallel import ModelRules, parallelize, register_rules

pytestmark = pytest.mark.ranks

FSDP = DataParallel()
WHOLE = TensorParallel(sequence_parallel=False, loss_parallel=False)


def llama_shapes(**changes: Any) -> Llama:
    scope = changes.pop("scope", "mlp")
    return nnx.eval_shape(lambda: Llama(llama_config(**changes), scope=scope, rngs=nnx.Rngs(0)))


CONFIGS: dict[str, tuple[dict[str, int], dict[str, Any], type[Exception], str]] = {
    "missing axis": ({"tp": 2}, {"data": FSDP}, SpecError, r"config\.data\.shard_axis must be an axis of the mesh"),
    "unused axis": ({"dp_shard": 2, "tp": 2}, {"data": FSDP}, SpecError, "mesh must be of axes that config names"),
    "compile": (
        {"dp_shard": 2},
        {"data": FSDP, "compile": Compile()},
        SpecError,
        r"config\.compile must be left at None",
    ),
    "float8": ({"dp_shard": 2}, {"data": FSDP, "float8": True}, SpecError, r"config\.float8 must be left at False"),
    "asynchronous": (
        {"tp": 2},
        {"tensor": TensorParallel(asynchronous=True)},
        SpecError,
        r"config\.tensor\.asynchronous must be left at False in tiled_jax",
    ),
    "pipeline": (
        {"dp_shard": 2},
        {"data": DataParallel(pipeline=True)},
        SpecError,
        r"config\.data\.pipeline must be left at False in tiled_jax",
    ),
    "offload of layers that keep everything": (
        {"dp_shard": 2},
        {"data": FSDP, "checkpointing": Checkpointing(mode="layers", every=2, offload=True)},
        UnsupportedError,
        r"config\.checkpointing\.offload must be False here, got True\. What a layer without recomputation keeps has no names",
    ),
    "cpu_offload": (
        {"dp_shard": 2},
        {"data": DataParallel(cpu_offload=True)},
        UnsupportedError,
        r"config\.data\.cpu_offload must be False here",
    ),
    "heads": (
        {"tp": 3},
        {"tensor": TensorParallel()},
        SpecError,
        "num_attention_heads must be a multiple of the 3 ranks",
    ),
    "hidden": (
        {"dp_shard": 5},
        {"data": FSDP},
        SpecError,
        "must be a multiple of the 5 devices of the mesh axes dp_shard, got 32",
    ),
    "context": (
        {"dp_shard": 1, "cp": 3, "tp": 2},
        {"data": DataParallel(context_axis="cp"), "tensor": TensorParallel()},
        SpecError,
        "num_attention_heads must be a multiple of the 6 ranks of the mesh axes tp, cp, got 8",
    ),
    "context of rings": (
        {"dp_shard": 1, "ring": 2, "cp": 3},
        {"data": DataParallel(context_axis=("ring", "cp"), context="2d")},
        SpecError,
        "num_attention_heads must be a multiple of the 3 ranks of the mesh axes cp, got 8",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(case: str) -> None:
    axes, config, error, message = CONFIGS[case]
    with pytest.raises(error, match="^parallelize: .*" + message):
        parallelize(llama_shapes(num_key_value_heads=4), mesh_of(**axes), ParallelConfig(**config))


def test_a_layer_that_is_one_function_is_split_by_no_compiler() -> None:
    text = "the model's scope must be 'mlp' with tensor parallelism and loss_fn, got 'block'. Leave loss_fn out"
    with pytest.raises(UnsupportedError, match=f"^parallelize: {text}"):
        parallelize(
            llama_shapes(scope="block"), mesh_of(tp=2), ParallelConfig(tensor=WHOLE), loss_fn=lambda model, x: 0
        )


def blocks() -> Blocks:
    return nnx.eval_shape(lambda: Blocks(nnx.Rngs(0), jnp.float32))


@pytest.mark.parametrize(
    ("tensor", "kind", "message"),
    [
        (TensorParallel(), AxisType.Auto, r"config\.tensor\.sequence_parallel must be False with loss_fn"),
        (
            TensorParallel(sequence_parallel=False),
            AxisType.Auto,
            r"config\.tensor\.loss_parallel must be False with loss_fn",
        ),
        (
            TensorParallel(sequence_parallel=False, loss_parallel=False),
            AxisType.Explicit,
            r"the mesh axis 'tp' must be of axis type Auto with loss_fn",
        ),
    ],
)
def test_tensor_parallelism_of_a_model_that_computes_by_itself(tensor: Any, kind: AxisType, message: str) -> None:
    with pytest.raises(UnsupportedError, match="^parallelize: " + message):
        parallelize(blocks(), mesh_of(kind, tp=2), ParallelConfig(tensor=tensor), loss_fn=blocks_loss)


def test_tensor_parallelism_with_nothing_to_split() -> None:
    """Every device of the axis would compute the same."""
    message = r"^parallelize: config\.tensor must be None for a model of which no parameter is split, got 'tp'"
    model = nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    with pytest.raises(SpecError, match=message):
        parallelize(model, mesh_of(tp=2), ParallelConfig(tensor=WHOLE), loss_fn=lambda m, x: m(x).mean())


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (DataParallel(reduce_dtype="bfloat16"), jnp.float32),
        (DataParallel(param_dtype="bfloat16", reduce_dtype=None), jnp.float32),
        (DataParallel(reduce_dtype=None), jnp.float16),
    ],
    ids=["asked for", "of the computation", "of the parameters"],
)
def test_sums_that_would_end_the_process(data: DataParallel, dtype: Any) -> None:
    """XLA on a CPU aborts where it is to sum 16 bits over some axes of a mesh and splits others by itself."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros((4, 8), dtype))

    register_rules(Model, ModelRules(axes={"w": ("hidden", "intermediate")}))
    message = r"^parallelize: config\.data\.reduce_dtype must be float32 on a CPU with loss_fn and config\.tensor, got"
    config = ParallelConfig(data=data, tensor=WHOLE)
    with pytest.raises(UnsupportedError, match=message):
        parallelize(Model(), mesh_of(dp_shard=2, tp=2), config, loss_fn=lambda m, x: x.mean())


def test_a_loss_fn_is_not_given_parts_of_sequences() -> None:
    """In the words of the other half."""
    config = ParallelConfig(data=DataParallel(context_axis="cp"))
    text = (
        r"^parallelize: config\.data\.context_axis must be None for a model that does not say how its tokens are split, "
        r"got 'cp'\. loss_fn computes with whole sequences\.$"
    )
    with pytest.raises(UnsupportedError, match=text):
        parallelize(llama_shapes(), mesh_of(dp_shard=1, cp=2), config, loss_fn=blocks_loss)


def test_models_without_what_is_needed() -> None:
    mesh, config = mesh_of(dp_shard=2), ParallelConfig(data=FSDP)
    with pytest.raises(SpecError, match=r"^parallelize: loss_fn must be given for a model without a loss"):
        parallelize(blocks(), mesh, config)
    with pytest.raises(TypeError, match=r"^parallelize: model must be a flax\.nnx\.Module, got int"):
        parallelize(1, mesh, config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^parallelize: mesh must be a jax\.sharding\.Mesh, got tuple"):
        parallelize(blocks(), (2,), config, loss_fn=lambda m, x: x)  # type: ignore[arg-type]


def test_batches_that_do_not_divide() -> None:
    plan = parallelize(llama_shapes(), mesh_of(dp_shard=2, cp=2), ParallelConfig(data=DataParallel(context_axis="cp")))
    for shape, message in (
        ((3, 9), r"of a multiple of 2 sequences.*got \[3, 9\]"),
        ((2, 10), r"of a multiple of 2 tokens, for the ranks .*, got 9 \(batch is \[2, 10\]\)\. Pad the sequences"),
        ((2,), r"\[sequences, tokens \+ 1\], got \[2\]"),
    ):
        with pytest.raises(SpecError, match="^parallelize: batch must be .*" + message):
            plan.gradients(plan.shapes.parameters, np.zeros(shape, np.int32))
    batch = {name: np.zeros((2, 9), np.int32) for name in ("input_ids", "labels")}
    with pytest.raises(SpecError, match=r"of a multiple of 2 tokens, .*, got 9 \(batch is \[2, 9\]\)"):
        plan.gradients(plan.shapes.parameters, batch)
    with pytest.raises(TypeError, match=r"^parallelize: batch must be a pytree of arrays, got int"):
        plan.gradients(plan.shapes.parameters, 3)


def test_batches_that_a_ring_cannot_deal_out() -> None:
    """Two runs of each sequence for every place in a ring, in equal parts for those that share it."""
    data = DataParallel(context_axis=("ring", "cp"), context="2d")
    plan = parallelize(llama_shapes(), mesh_of(dp_shard=1, ring=2, cp=4), ParallelConfig(data=data))
    message = r"^parallelize: batch must be of a multiple of 8 tokens, for 8 ranks that hold two runs in a ring of them, got 12"
    with pytest.raises(SpecError, match=message):
        plan.gradients(plan.shapes.parameters, np.zeros((1, 13), np.int32))


def test_rows_that_sequence_parallelism_cannot_deal_out() -> None:
    plan = parallelize(llama_shapes(), mesh_of(tp=4), ParallelConfig(tensor=TensorParallel()))
    with pytest.raises(SpecError, match=r"the tokens of a data rank must be a multiple of the 4 devices .*, got 6"):
        plan.gradients.lower(plan.shapes.parameters, np.zeros((1, 7), np.int32))


def test_rules_that_do_not_fit() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros((4, 8)))

    mesh, config = mesh_of(dp_shard=2), ParallelConfig(data=FSDP)
    for axes, message in (
        (("hidden",), "w must be of 1 dims, as the rules name them, got 2"),
        (("hidden", "width"), "a dim of w must be one of .*, got 'width'"),
        (("hidden", "hidden"), "w must be split along one dim by the shard axes"),
    ):
        register_rules(Model, ModelRules(axes={"w": axes}))
        with pytest.raises(SpecError, match="^parallelize: " + message):
            parallelize(Model(), mesh, config, loss_fn=lambda m, x: x.mean())


def test_the_state_of_a_model_of_shapes_is_not_there() -> None:
    plan = parallelize(llama_shapes(), mesh_of(dp_shard=2), ParallelConfig(data=FSDP))
    assert plan.state is None
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(plan.shapes))
