"""Documents packed into one sequence, in JAX: the functions of the specification, and attention within documents alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shared_specs.errors import SpecError
from shared_specs.layers import documents as spec
from tests.plans.jax_parallel_models import mesh_of
from tiled_jax.layers import documents as ours
from tiled_jax.layers.attention import causal_attention
from tiled_jax.parallel import context_slice

RESTARTS = np.array([[0, 1, 50, 51, 0, 1, 1], [2, 2, 2, 2, 2, 2, 2], [0, 2, 4, 6, 8, 9, 0]], np.int32)
DOCUMENTS = np.array([[5, 5, 5, 2, 2, 9, 9, 5], [1, 1, 1, 1, 1, 1, 0, 0]], np.int32)


@pytest.mark.parametrize(
    "documents", [DOCUMENTS, DOCUMENTS[:, :1], DOCUMENTS[:1, :0]], ids=["several", "a token", "none"]
)
def test_functions_are_those_of_the_specification(documents: np.ndarray) -> None:
    positions = spec.positions_in(documents)
    labels = np.arange(documents.size, dtype=np.int32).reshape(documents.shape)
    for found, expected in (
        (ours.first_keys(jnp.asarray(documents)), spec.first_keys(documents)),
        (ours.positions_in(jnp.asarray(documents)), positions),
        (ours.documents_of_positions(jnp.asarray(positions)), spec.documents_of_positions(positions)),
        (
            ours.shifted_labels(jnp.asarray(labels), jnp.asarray(documents), -7),
            spec.shifted_labels(labels, documents, -7),
        ),
    ):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [RESTARTS, RESTARTS[:, :1], RESTARTS[:, :0]], ids=["several", "a token", "none"])
def test_restarts_are_those_of_the_specification(rows: np.ndarray) -> None:
    found = ours.documents_of_restarts(jnp.asarray(rows))
    np.testing.assert_array_equal(found, spec.documents_of_restarts(rows))


@pytest.mark.parametrize("block", [3, 64])
def test_each_document_attends_to_itself(block: int, same: Any) -> None:
    random = np.random.default_rng(0)
    q, k, v, dy = (jnp.asarray(random.standard_normal((2, 8, heads, 4))) for heads in (4, 2, 2, 4))

    def one_by_one(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        rows = []
        for row, numbers in enumerate(DOCUMENTS):
            ends = [*np.flatnonzero(np.diff(numbers)) + 1, 8]
            cuts = zip([0, *ends[:-1]], ends, strict=True)
            rows.append(
                jnp.concatenate([causal_attention(*(a[row, None, i:j] for a in (q, k, v))) for i, j in cuts], 1)
            )
        return jnp.concatenate(rows)

    def packed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return causal_attention(q, k, v, documents=DOCUMENTS, block_tokens=block)

    def with_gradients(fn: Any) -> Any:
        y, pull = jax.vjp(fn, q, k, v)
        return y, pull(dy)

    same(*(jax.jit(lambda fn=fn: with_gradients(fn))() for fn in (packed, one_by_one)))


@pytest.mark.ranks
def test_a_slice_of_a_packed_batch() -> None:
    """From documents come positions that restart, from either come labels that end with a document."""
    labels = np.arange(16, dtype=np.int32).reshape(2, 8)
    positions, shifted = spec.positions_in(DOCUMENTS), spec.shifted_labels(labels, DOCUMENTS, -100)

    def cut(batch: Any) -> Any:
        return context_slice(batch, axis_name="cp")

    for given in ({"documents": DOCUMENTS}, {"position_ids": positions.astype(np.int32)}):
        call = jax.jit(jax.shard_map(cut, mesh=mesh_of(cp=2), in_specs=P(), out_specs=P(None, "cp")))
        found = call(given | {"labels": labels})
        np.testing.assert_array_equal(found["position_ids"], positions)
        np.testing.assert_array_equal(found["shift_labels"], shifted)


def test_documents_that_do_not_fit() -> None:
    q = jnp.zeros((2, 8, 2, 4))
    message = r"^causal_attention: documents must be of shape \[2, 8\] or \[1, 8\], got \[2, 7\]"
    with pytest.raises(SpecError, match=message):
        causal_attention(q, q, q, documents=DOCUMENTS[:, 1:])
