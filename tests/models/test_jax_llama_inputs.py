"""What `models.Llama` and `next_token_loss` are given: one clear message for what they cannot take, before any work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shared_specs.errors import SpecError, UnsupportedError
from tests.plans.jax_parallel_models import llama_config
from tiled_jax import TiledLinear, TiledLinearCrossEntropy, TiledMLP
from tiled_jax.models import Llama, from_hf, next_token_loss, to_hf


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(llama_config(num_hidden_layers=1), rngs=nnx.Rngs(0))


def ints(*dims: int) -> jax.Array:
    return jnp.ones(dims, jnp.int32)


BATCHES: dict[str, tuple[Any, type[Exception], str]] = {
    "one token": (
        ints(2, 1),
        SpecError,
        r"batch must be \[sequences, tokens \+ 1\], at least one of each, got \[2, 1\]",
    ),
    "no sequence": (ints(0, 4), SpecError, r"batch must be \[sequences, tokens \+ 1\], .* got \[0, 4\]"),
    "no batch": (ints(4), SpecError, r"batch must be \[sequences, tokens \+ 1\], .* got \[4\]"),
    "floats": (jnp.ones((2, 4)), TypeError, "batch must be an array of integers, got float32"),
    "a list": ([[1, 2, 3]], TypeError, "batch must be an array, got list"),
    "no sequence in a mapping": (
        {"input_ids": ints(0, 4), "labels": ints(0, 4)},
        SpecError,
        r"batch\['input_ids'\] must be \[sequences, tokens\], at least one of each, got \[0, 4\]",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_are_refused(name: str, model: Llama) -> None:
    batch, kind, message = BATCHES[name]
    with pytest.raises(kind, match=f"next_token_loss: {message}"):
        next_token_loss(model, batch)


@pytest.mark.parametrize(
    ("tokens", "kind", "message"),
    [
        (ints(4), SpecError, r"tokens must be \[sequences, tokens\], at least one of each, got \[4\]"),
        (ints(2, 0), SpecError, r"tokens must be .*, got \[2, 0\]"),
        (jnp.ones((1, 4)), TypeError, "tokens must be an array of integers, got float32"),
    ],
)
def test_tokens_that_are_refused(tokens: Any, kind: type[Exception], message: str, model: Llama) -> None:
    with pytest.raises(kind, match=f"Llama: {message}"):
        model(tokens)


@pytest.mark.parametrize("kind", [np.uint8, np.int16])
def test_tokens_of_any_integers(kind: Any, model: Llama) -> None:
    tokens = np.arange(10).reshape(2, 5)
    expected = next_token_loss(model, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_array_equal(next_token_loss(model, tokens.astype(kind)), expected)
    mapping = {"input_ids": tokens.astype(kind), "labels": tokens.astype(kind)}
    np.testing.assert_array_equal(next_token_loss(model, mapping), model(tokens, labels=tokens))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16)])
def test_a_dtype_by_any_name(dtype: Any) -> None:
    shapes = nnx.eval_shape(lambda: Llama(llama_config(num_hidden_layers=1), dtype=dtype, rngs=nnx.Rngs(0)))
    assert shapes.dtype == jnp.bfloat16
    with pytest.raises(SpecError, match=r"dtype must be one of .*, got int32"):
        Llama(llama_config(), dtype=jnp.int32, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("spec", [PartitionSpec("d"), PartitionSpec(None, "d")])
@pytest.mark.parametrize("labels", [False, True])
def test_tokens_that_explicit_axes_cut_are_refused(spec: PartitionSpec, labels: bool, model: Llama) -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    tokens = jax.device_put(ints(2, 8), NamedSharding(mesh, spec))
    message = r"Llama: the axes of the mesh must be of axis type Auto where they cut the tokens, got Explicit"
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match=message):
        model(tokens, labels=tokens if labels else None)


@pytest.mark.parametrize("module", [TiledMLP, TiledLinear, TiledLinearCrossEntropy])
@pytest.mark.parametrize("name", ["kernel_init", "bias_init"])
def test_an_initialiser_that_is_none_is_refused(module: Any, name: str) -> None:
    message = f"{module.__name__}: {name} must be an initialiser, as jax.nn.initializers has them, got NoneType"
    with pytest.raises(TypeError, match=message):
        module(8, 12, **{name: None}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("read", [lambda model: from_hf(model, {}), to_hf])
def test_weights_are_read_into_a_state(read: Any, model: Llama) -> None:
    message = r"^(from|to)_hf: parameters must be the nnx.State of a model, got Llama\. nnx\.state\(model, nnx\.Param\)"
    with pytest.raises(TypeError, match=message):
        read(model)
