"""Predictions and top log-probabilities under JAX's transformations and on meshes: those of one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, LossResult, Tiling, TopLogprobs
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.mlp.jax_untiled import loss_operands
from tiled_jax import TiledLinearCrossEntropy, linen, tiled_linear_cross_entropy
from tiled_jax.parallel import vocab_parallel_linear_cross_entropy

B, S, V, K = 4, 6, 13, 3
LOSS = LossOptions(outputs=("prediction", "top_logprobs"), top_k=K, logit_scale=-0.7)
EACH = LossOptions(outputs=LOSS.outputs, top_k=K, logit_scale=-0.7, reduction="none")


def expected(x: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Prediction, values and indices, by sorting whole logits."""
    z = -0.7 * np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    order = np.argsort(-z, axis=-1, kind="stable")[..., :K]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    return order[..., 0], np.take_along_axis(log_p, order, -1), order


def assert_found(found: Any, x: Any, weight: Any) -> None:
    prediction, values, indices = expected(x, weight)
    np.testing.assert_array_equal(found.prediction, prediction)
    np.testing.assert_array_equal(found.top_logprobs.indices, indices)
    assert_within(np.asarray(found.top_logprobs.values), values, DISTRIBUTED_FLOAT64, "values")


def mesh_of(data: int, tensor: int, kind: AxisType) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: data * tensor]).reshape(data, tensor)
    return jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(kind, kind))


@pytest.mark.deep
def test_a_vmap_and_derivatives_of_derivatives(x64: None) -> None:
    x, weight, targets = loss_operands(B, S)
    call = partial(tiled_linear_cross_entropy, loss=LOSS, tiling=Tiling(num_shards=3, vocab_shards=2))
    assert_found(jax.vmap(call, (0, None, 0))(x, weight, targets), x, weight)

    def of(x: jax.Array) -> Any:
        found = call(x, weight, targets)
        return found.loss + jnp.sum(found.top_logprobs.values), found

    slope = jax.grad(of, has_aux=True)
    moved, found = jax.jit(lambda x: jax.jvp(slope, (x,), (jnp.cos(x),), has_aux=True)[1:])(x)
    assert_found(found, x, weight)
    plain = jax.grad(lambda x: tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(logit_scale=-0.7)))
    truth = jax.jvp(plain, (x,), (jnp.cos(x),))[1]
    assert_within(np.asarray(moved), np.asarray(truth), DISTRIBUTED_FLOAT64, "dx")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tokens_and_columns_that_a_mesh_cuts_under_plain_jit(kind: AxisType, x64: None) -> None:
    x, weight, targets = loss_operands(B, S, vocab=12)
    mesh = mesh_of(2, 2, kind)
    specs = P("data", None, None), P(None, "tensor"), P("data", None)
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, weight, targets), specs, strict=True)
        ]
        step = jax.jit(
            jax.value_and_grad(
                lambda x, *rest: (lambda r: (jnp.sum(r.loss), r))(
                    tiled_linear_cross_entropy(x, *rest, loss=EACH, num_shards=3)
                ),
                has_aux=True,
            )
        )
        (_, found), _ = step(*given)
    assert_found(found, x, weight)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("check_vma", "sequence_parallel"), [(True, True), (False, False)])
def test_a_vocabulary_over_devices(check_vma: bool, sequence_parallel: bool, x64: None) -> None:
    """13 entries where four devices share 16; with sequence_parallel they share the tokens too."""
    x, weight, targets = loss_operands(B, S)
    mesh, padded = mesh_of(1, 4, AxisType.Auto), jnp.pad(weight, ((0, 0), (0, 3)))
    call = partial(
        vocab_parallel_linear_cross_entropy,
        loss=EACH,
        tiling=Tiling(num_shards=2, vocab_shards=2),
        vocab_size=V,
        sequence_parallel=sequence_parallel,
        axis_name="tensor",
    )
    tokens = P("tensor") if sequence_parallel else P()
    out: Any = LossResult(tokens, prediction=tokens, top_logprobs=TopLogprobs(tokens, tokens))
    specs = tokens, P(None, "tensor"), tokens
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)

    def run(x: Any, weight: Any) -> Any:
        found = mapped(x, weight, targets)
        return jnp.sum(found.loss), found

    gradient, found = jax.jit(jax.grad(run, has_aux=True))(x, padded)
    assert_found(found, x, weight)
    whole = jax.grad(lambda x: jnp.sum(tiled_linear_cross_entropy(x, weight, targets, loss=EACH).loss))(x)
    assert_within(np.asarray(gradient), np.asarray(whole), DISTRIBUTED_FLOAT64, "dx")


def test_modules_hand_it_on(x64: None) -> None:
    x, weight, targets = loss_operands(B, S)
    module: Any = TiledLinearCrossEntropy.from_weights(weight, loss=LOSS)
    assert_found(module(x, targets), x, weight)
    twin: Any = linen.TiledLinearCrossEntropy(8, V, loss=LOSS)
    assert_found(twin.apply({"params": {"weight": weight}}, x, targets), x, weight)
    assert_found(lax.map(lambda a: module(*a), (x, targets)), x, weight)
