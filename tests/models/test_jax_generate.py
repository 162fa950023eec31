"""Generation: token by token what the forward without a cache says, its ends, its draws, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs import SpecError, UnsupportedError
from tests.models.families import VOCAB
from tests.models.test_jax_families import IDS, built
from tiled_jax.models import Llama, generate
from tiled_jax.models.generate import _How, _next

NEW = 5


@pytest.fixture(scope="module")
def gemma() -> Llama:
    """A window, caps, two kinds of layer."""
    return nnx.merge(*built("gemma2"))


@pytest.fixture(scope="module")
def greedy(gemma: Llama) -> np.ndarray:
    return np.asarray(generate(gemma, IDS, NEW))


def test_every_token_is_the_likeliest_of_the_forward_without_a_cache(gemma: Llama, greedy: np.ndarray) -> None:
    assert greedy.shape == (2, 12 + NEW)
    np.testing.assert_array_equal(greedy[:, :12], IDS)
    expected = np.asarray(jnp.argmax(gemma(jnp.asarray(greedy)), axis=-1))
    np.testing.assert_array_equal(greedy[:, 12:], expected[:, 11:-1])


@pytest.mark.deep
def test_padding_on_either_side_is_moved_to_the_front(gemma: Llama) -> None:
    alone = np.asarray(generate(gemma, IDS[:1, :7], NEW))[0, 7:]
    ids, mask = np.full((2, 12), 9, np.int32), np.zeros((2, 12), np.int32)
    ids[0, 5:] = ids[1, :7] = IDS[0, :7]
    mask[0, 5:] = mask[1, :7] = 1
    found = np.asarray(generate(gemma, ids, NEW, attention_mask=mask, pad_token_id=3))
    for row in found:
        np.testing.assert_array_equal(row, [3] * 5 + [*IDS[0, :7]] + [*alone])


def test_a_sequence_ends_and_the_others_go_on(gemma: Llama, greedy: np.ndarray) -> None:
    end = int(greedy[0, 13])
    found = np.asarray(generate(gemma, IDS, NEW, eos_token_id=[end, VOCAB - 1], pad_token_id=4))
    for row, whole in zip(found[:, 12:], greedy[:, 12:], strict=True):
        ends = np.flatnonzero(np.isin(whole, [end, VOCAB - 1]))
        kept = ends[0] + 1 if len(ends) else NEW
        np.testing.assert_array_equal(row, [*whole[:kept]] + [4] * (NEW - kept))
    assert (found[0, 14:] == 4).all()


def test_draws_follow_the_key_and_narrow_to_the_likeliest(gemma: Llama, greedy: np.ndarray) -> None:
    def drawn(seed: int, **how: Any) -> np.ndarray:
        return np.asarray(generate(gemma, IDS, NEW, key=jax.random.key(seed), **how))

    first = drawn(0, temperature=3.0)
    np.testing.assert_array_equal(first, drawn(0, temperature=3.0))
    assert (first != drawn(1, temperature=3.0)).any()
    np.testing.assert_array_equal(drawn(2, temperature=3.0, top_p=1e-6), greedy)


@pytest.mark.deep
def test_draws_have_the_probabilities_asked_for() -> None:
    probabilities = np.asarray([0.5, 0.25, 0.15, 0.1])
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (20000, 4))
    for top_p, kept in ((1.0, 4), (0.8, 3), (0.74, 2), (0.3, 1)):
        how = _How(1, sampled=True, nucleus=top_p < 1, ends=(), pad=0)
        found = np.asarray(_next(how, logits, jnp.asarray([1.0, top_p], jnp.float32), jax.random.key(0)))
        expected = probabilities[:kept] / probabilities[:kept].sum()
        counts = np.bincount(found, minlength=4) / len(found)
        assert not counts[kept:].any()
        assert (np.abs(counts[:kept] - expected) <= 5 * np.sqrt(expected * (1 - expected) / len(found))).all()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"max_new_tokens": np.int64(-1)}, "max_new_tokens must be an integer >= 1, got -1"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer >= 1, got True"),
        ({"max_new_tokens": np.bool_(True)}, "max_new_tokens must be an integer >= 1, got True"),
        ({"max_new_tokens": jnp.asarray(True)}, "max_new_tokens must be an integer >= 1, got True"),
        ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer >= 1, got 2.0"),
        ({"temperature": -1.0}, "temperature must be >= 0, got -1.0"),
        ({"temperature": 1.0}, r"key must be given with a temperature, got None\. Pass jax.random.key"),
        ({"top_p": 0.5}, "a key and top_p have no meaning without a temperature"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"input_ids": IDS[0]}, r"input_ids must be of shape \[batch, tokens\], one token or more, got \[12\]"),
        ({"attention_mask": IDS[:, :3]}, r"attention_mask must be of shape \[2, 12\]"),
    ],
)
def test_what_is_refused(gemma: Llama, how: Any, message: str) -> None:
    with pytest.raises(SpecError, match=f"^generate: {message}"):
        generate(gemma, **{"input_ids": IDS, "max_new_tokens": 1} | how)


def test_the_number_of_new_tokens_may_be_of_numpy(gemma: Llama) -> None:
    expected = np.asarray(generate(gemma, IDS, 2))
    for count in (np.int32(2), np.uint8(2), np.asarray(2), jnp.int32(2)):
        np.testing.assert_array_equal(generate(gemma, IDS, count), expected)


def test_keys_that_longrope_would_turn_again_are_refused() -> None:
    model = nnx.merge(*built("phi3-long"))
    with pytest.raises(UnsupportedError, match="max_new_tokens must be at most 3 for prompts of 7 tokens, got 4"):
        generate(model, IDS[:, :7], 4)
