"""A Llama of documents packed into one sequence is that of each document by itself, and so is its loss."""

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.errors import SpecError
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.plans.jax_parallel_models import QUICKLY, assert_same, llama, llama_config, loss_and_gradients, packed
from tiled_jax.layers import attention_blocks
from tiled_jax.models import Llama, next_token_loss

TOKENS = 12


def by_itself(batch: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The documents of a packed batch, each as a batch."""
    found = []
    for row, positions in enumerate(batch["position_ids"]):
        starts = [*np.flatnonzero(positions == 0), positions.size]
        for start, stop in pairwise(starts):
            found.append({name: batch[name][row, None, start:stop] for name in ("input_ids", "labels")})
    return found


def one_by_one(model: Llama, batches: Any) -> jax.Array:
    counts = [int(np.sum(each["labels"][:, 1:] != -100)) for each in batches]
    losses = [count * next_token_loss(model, each) for each, count in zip(batches, counts, strict=True) if count]
    return sum(losses[1:], losses[0]) / sum(counts)


@pytest.mark.parametrize("scope", ["mlp", pytest.param("block", marks=pytest.mark.slow)])
def test_loss_and_gradients(scope: str, float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 4, "gpu": 4})
    batch, small = packed(1, TOKENS), {"num_hidden_layers": 1}
    expected = loss_and_gradients(llama(**small), one_by_one, by_itself(batch))
    assert_same(loss_and_gradients(llama(scope=scope, **small), next_token_loss, batch), expected)


def test_positions_of_one_document_change_nothing(float64: None) -> None:
    """Padding behind the tokens goes in as it did; shifted labels are what they are."""
    graph, state = nnx.split(llama(num_hidden_layers=1))
    ids = packed(2, TOKENS)["input_ids"]
    targets = np.concatenate((ids[:, 1:], [[-100]] * 2), 1).astype(np.int32)
    positions = np.tile(np.arange(3, 3 + TOKENS, dtype=np.int32), (2, 1)) - 3
    given = (
        np.concatenate((ids, [[-100]] * 2), 1).astype(np.int32),
        {"input_ids": ids, "labels": ids},
        {"input_ids": ids, "shift_labels": targets, "position_ids": positions, "labels": None},
    )

    def losses(state: Any) -> list[jax.Array]:
        return [next_token_loss(nnx.merge(graph, state), batch) for batch in given]

    first, *others = jax.jit(losses).lower(state).compile(QUICKLY)(state)
    for other in others:
        assert_within(np.asarray(other), np.asarray(first), DISTRIBUTED_FLOAT64, "loss")


IDS = np.zeros((2, 4), np.int32)
REFUSED: dict[str, Any] = {
    "batch must be a mapping with input_ids, and either labels or shift_labels, got input_ids": {"input_ids": IDS},
    "batch must be a mapping with .*, got input_ids, labels, shift_labels": {
        "input_ids": IDS,
        "labels": IDS,
        "shift_labels": IDS,
    },
    r"batch must be a mapping of input_ids, labels, .*, got 'token_type_ids'": {
        "input_ids": IDS,
        "labels": IDS,
        "token_type_ids": IDS,
    },
    r"batch\['position_ids'\] must be of shape \[2, 4\], got \[1, 3\]": {
        "input_ids": IDS,
        "labels": IDS,
        "position_ids": IDS[:1, :3],
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_batches_that_do_not_fit(message: str) -> None:
    model = nnx.eval_shape(lambda: Llama(llama_config(), rngs=nnx.Rngs(0)))
    with pytest.raises(SpecError, match="^next_token_loss: " + message):
        next_token_loss(model, REFUSED[message])


def test_positions_that_do_not_fit() -> None:
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(llama_config(), rngs=nnx.Rngs(0))))
    for positions, message in (
        (jnp.zeros((2, 3), jnp.int32), r"position_ids must be of shape \[2, 4\] or \[1, 4\], got \[2, 3\]"),
        (jnp.zeros((2, 4)), "position_ids must be of integers, got float32"),
    ):
        with pytest.raises((SpecError, TypeError), match="^Llama: " + message):
            jax.eval_shape(lambda p, positions=positions: nnx.merge(graph, p)(IDS, positions), state)


POSITIONS = {
    "steps of two": np.arange(TOKENS) * 2,
    "a jump, as in PoSE": np.concatenate((np.arange(5), np.arange(TOKENS - 5) + 100)),
    "one position": np.full(TOKENS, 3),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS.keys())
def test_positions_that_do_not_restart_take_no_label_away(positions: np.ndarray, float64: None) -> None:
    """The loss was 0 at steps of two."""
    model, ids = llama(num_hidden_layers=1), packed(2, TOKENS)["input_ids"]
    given = {"input_ids": ids, "position_ids": np.tile(positions.astype(np.int32), (2, 1))}
    targets = np.concatenate((ids[:, 1:], [[-100]] * 2), 1).astype(np.int32)
    found, expected = (
        next_token_loss(model, given | {name: of}) for name, of in (("labels", ids), ("shift_labels", targets))
    )
    assert float(expected) > 1
    assert_within(np.asarray(found), np.asarray(expected), DISTRIBUTED_FLOAT64, "loss")


def test_where_no_label_is_left_a_warning_says_so(float64: None) -> None:
    model, ids = llama(num_hidden_layers=1), packed(2, TOKENS)["input_ids"]
    backwards = np.tile(np.arange(TOKENS, dtype=np.int32)[::-1], (2, 1))
    with pytest.warns(UserWarning, match=r"^next_token_loss: the loss is of no label: every label looks across a seam"):
        found = next_token_loss(model, {"input_ids": ids, "labels": ids, "position_ids": backwards})
    assert float(found) == 0
