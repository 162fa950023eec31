"""Context parallelism over 2, 4 and 8 virtual devices: its two functions, and `parallelize` of a Llama with grouped heads."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shared_specs.config import Checkpointing, DataParallel, ParallelConfig, TensorParallel, Tiling
from shared_specs.errors import SpecError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import (
    QUICKLY,
    assert_same,
    llama,
    llama_config,
    loss_and_gradients,
    mesh_of,
    run_quickly,
    token_ids,
)
from tiled_jax.models import Llama, causal_attention, next_token_loss
from tiled_jax.parallel import context_attention, context_slice, parallelize

pytestmark = pytest.mark.ranks

CONTEXT = DataParallel(context_axis="cp", reduce_dtype=None)


@pytest.mark.parametrize(
    ("devices", "heads", "kv_heads", "check_vma"),
    [(4, 8, 2, True), (8, 8, 2, False), (2, 12, 3, True)],
)
def test_attention_is_that_of_one_device(devices: int, heads: int, kv_heads: int, check_vma: bool, x64: None) -> None:
    """Key heads that the devices do not divide are repeated, and their gradients added up."""
    random, tokens = np.random.default_rng(heads), 3 * devices
    sizes = (heads, kv_heads, kv_heads, heads)
    q, k, v, dy = (jnp.asarray(random.standard_normal((2, tokens, count, 5))) for count in sizes)
    spec = P(None, "cp")
    split = jax.shard_map(
        partial(context_attention, axis_name="cp"),
        mesh=mesh_of(cp=devices),
        in_specs=(spec,) * 3,
        out_specs=spec,
        check_vma=check_vma,
    )

    @partial(jax.jit, static_argnums=0)
    def with_gradients(attend: Any, dy: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(attend, *arrays)
        return y, *pull(dy)

    given = dy, q, k, v
    both = (
        with_gradients.lower(fn, *given).compile(QUICKLY)(*given) for fn in (split, causal_attention)
    )  # fn is static
    for name, found, wanted in zip("yqkv", *both, strict=True):
        assert_within(np.asarray(found), np.asarray(wanted), DISTRIBUTED_FLOAT64, name)


@pytest.mark.deep
def test_a_slice_has_its_positions_and_the_next_run_s_first_label() -> None:
    ids = np.arange(24, dtype=np.int32).reshape(2, 12)
    spec = P(None, "cp")

    def cut(ids: jax.Array) -> Any:
        found = context_slice({"input_ids": ids, "labels": ids, "other": None}, ignore_index=-7, axis_name="cp")
        assert found.pop("other") is None
        return found

    found = jax.shard_map(cut, mesh=mesh_of(cp=4), in_specs=P(), out_specs=spec)(ids)
    shifted = np.concatenate((ids[:, 1:], [[-7], [-7]]), 1)
    wanted = {"input_ids": ids, "labels": ids, "shift_labels": shifted, "position_ids": np.arange(12)[None]}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, name)


# (axes, tensor parallelism, checkpointing, what the model has)
LLAMAS: dict[str, Any] = {
    "cp 2, plain": ({"dp_shard": 1, "cp": 2}, None, None, {"num_key_value_heads": 2, "plain": True}),
    "cp 4, repeated key heads": ({"dp_shard": 1, "cp": 4}, None, Checkpointing(), {"num_key_value_heads": 2}),
    "cp 2 x tp 4, repeated key heads": (
        {"dp_shard": 1, "cp": 2, "tp": 4},
        TensorParallel(),
        None,
        {"num_key_value_heads": 4},
    ),
}
IN_EVERY_RUN = ("cp 4, repeated key heads",)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in LLAMAS]
)
def test_llama_with_grouped_heads(case: str, float64: None) -> None:
    axes, tensor, checkpointing, changes = LLAMAS[case]
    tiled = {name: value for name, value in changes.items() if name != "plain"}
    loss, gradients = loss_and_gradients(llama(**tiled), next_token_loss, token_ids(2))
    config = ParallelConfig(data=CONTEXT, tensor=tensor, checkpointing=checkpointing)
    plan = parallelize(llama(**changes), mesh_of(**axes), config)
    found, updates = run_quickly(plan.gradients, plan.state.parameters, token_ids(2), plan)
    assert_same(found, loss)
    assert_same(updates, gradients)


def test_no_device_holds_a_whole_sequence() -> None:
    """Of 520 tokens of 128 features a device has, between the layers, 130, and in attention 2 of 8 heads of 16."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 16, "num_hidden_layers": 1}
    model = nnx.eval_shape(lambda: Llama(llama_config(**sizes), tiling=Tiling(num_shards=2), rngs=nnx.Rngs(0)))
    config = ParallelConfig(data=DataParallel(context_axis="cp"), checkpointing=Checkpointing())
    plan = parallelize(model, mesh_of(dp_shard=1, cp=4), config)
    tokens = jax.ShapeDtypeStruct((3, 521), jnp.int32)
    text = plan.gradients.lower(plan.shapes.parameters, tokens).compile(QUICKLY).as_text()
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    whole = [shape for shape in shapes if 128 in shape and (520 in shape or 3 * 520 in shape)]
    assert not whole
    assert any(np.prod(shape) == 3 * 520 * 2 * 16 and 520 in shape for shape in shapes), "of its own heads it has all"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 5),) * 3, "the number of query heads must be a multiple of the 2 ranks"),
        (((1, 4, 4, 5), (1, 4, 3, 5), (1, 4, 4, 5)), "k, v must be heads whose number divides the query heads"),
        (((1, 4, 4, 5), (1, 3, 4, 5), (1, 3, 4, 5)), "q, k, v must be of the same sequences and tokens"),
        (((4, 4, 5), (1, 4, 4, 5), (1, 4, 4, 5)), r"q must be of shape \[B, tokens, heads, d\], got \[4, 4, 5\]"),
    ],
)
def test_attention_refuses(shapes: Any, message: str) -> None:
    def call(*arrays: jax.Array) -> jax.Array:
        return context_attention(*arrays, axis_name="cp")

    arrays = [jnp.zeros(shape) for shape in shapes]
    with pytest.raises(SpecError, match="^context_attention: " + message):
        jax.shard_map(call, mesh=mesh_of(cp=2), in_specs=(P(),) * 3, out_specs=P())(*arrays)


def test_attend_has_to_return_all_tokens_of_its_heads() -> None:
    def call(x: jax.Array) -> jax.Array:
        return context_attention(x, x, x, lambda q, k, v: q[:, :1], axis_name="cp")

    message = r"^context_attention: the result of attend must be of shape \[1, 8, 2, \.\.\.\], got \[1, 1, 2, 5\]"
    with pytest.raises(SpecError, match=message):
        jax.shard_map(call, mesh=mesh_of(cp=2), in_specs=P(), out_specs=P())(jnp.zeros((1, 4, 4, 5)))


def test_slice_refuses() -> None:
    def call(**batch: Any) -> None:
        jax.shard_map(
            lambda: context_slice(batch, axis_name="cp"), mesh=mesh_of(cp=2), in_specs=(), out_specs=P(None, "cp")
        )()

    with pytest.raises(SpecError, match=r"^context_slice: batch\['x'\] must be of a multiple of 2 tokens, .* got 3"):
        call(x=np.zeros((1, 3)))
    with pytest.raises(
        SpecError, match=r"^context_slice: batch\['y'\] must be of \[sequences, 4, \.\.\.\], got \[1, 2\]"
    ):
        call(x=np.zeros((1, 4)), y=np.zeros((1, 2)))
    with pytest.raises(SpecError, match=r"^context_slice: batch must be of one array or more, got none"):
        call(x=None)
    with pytest.raises(TypeError, match=r"^context_slice: batch\['x'\] must be an array, got list"):
        call(x=[1])
