"""`parallelize(..., wrt=)` trains a part of a model: by type of variable, by place, adapters; the rest is placed and stays.

The gradients are those of one untiled device, in float64, and there is optimizer state for what is trained alone.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shared_specs.config import DataParallel, ParallelConfig, TensorParallel
from shared_specs.errors import SpecError, UnsupportedError
from tests.plans.jax_parallel_models import (
    LEARNING_RATE,
    QUICKLY,
    Blocks,
    assert_same,
    blocks_loss,
    llama,
    mesh_of,
    padded,
    run_quickly,
    token_ids,
)
from tiled_jax.models import Llama, next_token_loss
from tiled_jax.parallel import parallelize

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("float64")]

LAYERS = 2
FSDP = ParallelConfig(data=DataParallel(reduce_dtype=None))
BOTH = ParallelConfig(data=DataParallel(reduce_dtype=None), tensor=TensorParallel())
WHOLE = ParallelConfig(tensor=TensorParallel(sequence_parallel=False))
PARTS = ParallelConfig(data=DataParallel(reduce_dtype=None), micro_batches=2)


class Frozen(nnx.Variable):
    """What a user freezes a parameter with."""


def around(plain: Any, random: np.random.Generator) -> Any:
    """A layer with an adapter, and the kernel of a plain one, as layers are stacked."""
    wide: Any = dict.fromkeys(("dtype", "param_dtype", "lora_dtype", "lora_param_dtype"), jnp.float64)
    sizes: Any = plain.shape[-2:]
    make = nnx.vmap(lambda rngs: nnx.LoRALinear(*sizes, lora_rank=3, use_bias=False, rngs=rngs, **wide))
    made: Any = nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(1))
    made.kernel = plain
    for key in ("lora_a", "lora_b"):
        leaf = getattr(made.lora, key)
        leaf[...] = jnp.asarray(random.standard_normal(leaf.shape)) / 4
    return made


def adapted(model: Any) -> Any:
    """The model with adapters around the four projections of attention."""
    random, attention = np.random.default_rng(5), model.layers.attention
    for name in "qkvo":
        setattr(attention, name, around(getattr(attention, name).kernel, random))
    return model


def adapted_mlp(model: Any) -> Any:
    """The model with an adapter in the place of the MLPs' gate."""
    mlp = model.layers.mlp
    made = around(mlp.w_gate, np.random.default_rng(6))
    del mlp.w_gate
    mlp.gate = made
    return model


def frozen_by_type(model: Any) -> Any:
    model.embed.embedding = Frozen(model.embed.embedding[...])
    model.layers.mlp.w_gate = Frozen(model.layers.mlp.w_gate[...])
    return model


def same(model: Any) -> Any:
    return model


# How a part is chosen -> (what is done to the model, wrt, how many of its parameters are trained).
CHOSEN: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
    "adapters": (adapted, nnx.LoRAParam, 8),
    "adapters of MLPs": (adapted_mlp, nnx.LoRAParam, 2),
    "type": (frozen_by_type, nnx.Param, 9),
    "place": (same, nnx.All(nnx.Param, nnx.PathContains("mlp")), 3),
    "predicate": (same, lambda path, _: "norm" in str(path), 3),
}
MESHES: dict[str, tuple[dict[str, int], ParallelConfig]] = {
    "fsdp 2": ({"dp_shard": 2}, FSDP),
    "fsdp 2 x sp 2": ({"dp_shard": 2, "tp": 2}, BOTH),
    "tp 2": ({"tp": 2}, WHOLE),
    "micro-batches": ({"dp_shard": 2}, PARTS),
}
ROWS = [
    ("adapters", "fsdp 2 x sp 2"),
    ("type", "fsdp 2"),
    ("place", "micro-batches"),
    ("adapters", "tp 2"),
    ("type", "fsdp 2 x sp 2"),
    ("predicate", "fsdp 2 x sp 2"),
    ("adapters", "micro-batches"),
    ("adapters of MLPs", "fsdp 2"),
]
BLOCKS = (
    ("type", "fsdp 2 x sp 2"),
    ("adapters", "fsdp 2 x sp 2"),
    ("adapters", "micro-batches"),
    ("adapters of MLPs", "fsdp 2"),
)
CALLED = ("type", "adapters of MLPs")  # only tiled MLPs hold these


def expected_of(model: Any, wrt: Any, loss_fn: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Loss and gradients of one device."""
    graph, trained, rest = nnx.split(model, wrt, ...)
    lowered = jax.jit(jax.value_and_grad(lambda p: loss_fn(nnx.merge(graph, p, rest), batch))).lower(trained)
    return lowered.compile(QUICKLY)(trained)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:Llama. TiledMLP runs through tile:UserWarning")
@pytest.mark.parametrize(("how", "where"), ROWS, ids=str)
def test_what_wrt_takes_is_trained(how: str, where: str) -> None:
    change, wrt, count = CHOSEN[how]
    axes, config = MESHES[where]
    scope = "block" if (how, where) in BLOCKS else "mlp"
    model, tokens = change(llama(scope=scope, num_hidden_layers=LAYERS)), padded(token_ids(4, 8))
    loss, gradients = expected_of(
        model if how in CALLED else change(llama(plain=True, num_hidden_layers=LAYERS)), wrt, next_token_loss, tokens
    )
    plan = parallelize(model, mesh_of(**axes), config, optimizer=optax.sgd(LEARNING_RATE, momentum=0.9), wrt=wrt)
    before: Any = jax.tree.map(np.asarray, plan.state.parameters) if plan.state is not None else None
    state: Any
    state, found = run_quickly(plan.step, plan.state, tokens, plan)
    assert len(jax.tree.leaves(gradients)) == count
    assert_same(found, loss)
    taken = dict(nnx.to_flat_state(gradients))
    after = {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(state.parameters)}
    for path, leaf in nnx.to_flat_state(before):
        old = np.asarray(leaf.get_value())
        if path in taken:
            gradient = np.asarray(taken[path].get_value())
            assert np.abs(gradient).max() > 0, path
            assert_same((old - after[path]) / LEARNING_RATE, gradient)
        else:
            np.testing.assert_array_equal(after[path], old, err_msg=str(path))
    assert len([a for a in jax.tree.leaves(state.optimizer) if a.ndim]) == count


def held_elsewhere(model: Any) -> Any:
    """The model with an nnx.LoRA around the output projection of attention."""
    plain = model.layers.attention.o

    def make(rngs: nnx.Rngs) -> nnx.LoRA:
        base = nnx.Linear(plain.in_features, plain.out_features, use_bias=False, rngs=rngs)
        return nnx.LoRA(plain.in_features, 3, plain.out_features, base_module=base, rngs=rngs)

    model.layers.attention.o = nnx.split_rngs(splits=LAYERS)(nnx.vmap(make))(nnx.Rngs(1))
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adapted_mlp, r"layers\.mlp\.gate must be a weight of the MLP with config\.tensor, got LoRA"),
        (held_elsewhere, r"layers\.attention\.o must be an nnx\.Linear, or a subclass, with config\.tensor, got LoRA"),
    ],
)
def test_adapters_that_tensor_parallelism_cannot_split_are_refused(change: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parallelize(change(llama(num_hidden_layers=LAYERS)), mesh_of(tp=2), WHOLE, wrt=nnx.LoRAParam)


def test_gradients_and_loss_of_a_part() -> None:
    """Of a model with a loss_fn: `gradients` are of the trained parameters, and fewer sums leave the device."""
    wrt = nnx.All(nnx.Param, nnx.PathContains("last"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 5, 6)))
    model, mesh = Blocks(nnx.Rngs(0)), mesh_of(dp_shard=2)
    plan, whole = (parallelize(model, mesh, FSDP, loss_fn=blocks_loss, wrt=each) for each in (wrt, nnx.Param))
    assert plan.state is not None
    loss, gradients = expected_of(model, wrt, blocks_loss, x)
    found = run_quickly(plan.gradients, plan.state.parameters, x, plan)
    assert_same(found, (loss, gradients))
    assert_same(plan.loss(plan.state.parameters, x), loss)
    assert_same(nnx.merge(plan.graph, plan.state.parameters)(x), model(x))

    def scatters(plan: Any) -> int:
        return plan.gradients.lower(plan.state.parameters, x).compile(QUICKLY).as_text().count(" reduce-scatter(")

    assert 0 < scatters(plan) < scatters(whole)


@pytest.mark.parametrize(
    ("wrt", "message"),
    [
        (
            nnx.BatchStat,
            r"wrt must be a filter that takes a parameter of the model, got .*BatchStat.*, which takes none",
        ),
        (3.5, r"wrt must be a filter of nnx: .*, got float"),
    ],
)
def test_a_filter_that_takes_nothing_is_refused(wrt: Any, message: str) -> None:
    model: Llama = llama(num_hidden_layers=1)
    with pytest.raises(SpecError if wrt is nnx.BatchStat else TypeError, match=message):
        parallelize(model, mesh_of(dp_shard=2), FSDP, wrt=wrt)


def test_a_filter_of_integers_is_refused() -> None:
    class Counting(Blocks):
        def __init__(self) -> None:
            super().__init__(nnx.Rngs(0))
            self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    message = "wrt must be a filter of floating-point parameters, got one that takes seen, of int32"
    with pytest.raises(SpecError, match=message):
        parallelize(Counting(), mesh_of(dp_shard=2), FSDP, loss_fn=blocks_loss, wrt=nnx.Variable)
