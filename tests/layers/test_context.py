"""Context parallelism in NumPy: heads dealt out over ranks, each with a run of tokens, attend as all of one process do."""

from dataclasses import replace

import numpy as np
import pytest

from shared_specs.collectives.partitions import even_range
from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import SpecError, UnsupportedError
from shared_specs.layers.heads import AttentionTurns, ContextHeads, attention_turns, context_heads
from shared_specs.plans.checks import check_context_heads, check_context_tokens, check_parallel_config, refuse_context
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within

# heads, key heads, ranks -> heads of one rank and copies of each key head
DEALT = {
    (8, 8, 4): ContextHeads(2, 2, 1),
    (8, 4, 4): ContextHeads(2, 1, 1),
    (8, 2, 4): ContextHeads(2, 1, 2),
    (8, 1, 8): ContextHeads(1, 1, 8),
    (12, 3, 2): ContextHeads(6, 3, 2),
    (12, 4, 6): ContextHeads(2, 2, 3),
    (6, 3, 1): ContextHeads(6, 3, 1),
}


def attention(q, k, v):
    """Causal, [tokens, heads, d]; query head i reads key head i // (heads / kv_heads)."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) + np.where(np.tri(q.shape[0]), 0.0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("sizes", DEALT, ids=str)
def test_every_rank_attends_with_its_heads(sizes):
    heads, kv_heads, ranks = sizes
    dealt = context_heads("f", heads, kv_heads, ranks)
    assert dealt == DEALT[sizes]
    random, tokens = np.random.default_rng(heads), 3 * ranks
    q, k, v = (random.standard_normal((tokens, count, 4)) for count in (heads, kv_heads, kv_heads))
    runs = [even_range("f", "tokens", tokens, ranks, rank) for rank in range(ranks)]
    parts = [[x[start:stop] for x in (q, k, v)] for start, stop in runs]
    results = []
    for rank in range(ranks):
        gathered = []
        for place, count in enumerate((dealt.query, dealt.key, dealt.key)):
            sent = [part[place] if place == 0 else np.repeat(part[place], dealt.copies, 1) for part in parts]
            gathered.append(np.concatenate([x[:, rank * count : (rank + 1) * count] for x in sent]))
        results.append(attention(*gathered))
    y = np.concatenate(results, 1)
    assert_within(y, attention(q, k, v), DISTRIBUTED_FLOAT64, "y")


# heads, key heads, ranks -> groups, parts of each, key heads of a group, copies of each
TURNS = {
    (32, 8, 1): AttentionTurns(8, 1, 1),
    (32, 8, 2): AttentionTurns(4, 1, 2),
    (32, 8, 4): AttentionTurns(2, 2, 4),
    (32, 8, 8): AttentionTurns(1, 4, 8),
    (32, 8, 16): AttentionTurns(1, 2, 16, 2),
    (32, 8, 32): AttentionTurns(1, 1, 32, 4),
    (64, 2, 2): AttentionTurns(1, 4, 2),
    (12, 2, 2): AttentionTurns(1, 6, 2),
    (12, 3, 2): AttentionTurns(1, 2, 6, 2),
}


@pytest.mark.parametrize("sizes", TURNS, ids=str)
def test_turns_in_which_heads_attend(sizes):
    """Four at least, where a rank's key heads have as many query heads; in a ring keys travel once."""
    found, (heads, kv_heads, ranks) = attention_turns(*sizes), sizes
    assert found == TURNS[sizes]
    assert heads % (found.count * ranks) == 0
    assert attention_turns(*sizes, parts=False) == replace(found, parts=1)
    assert attention_turns(*sizes, one_group=True).count == 1
    assert found.count == found.groups * found.parts
    assert found.keys * found.groups == kv_heads * found.copies


def test_heads_that_cannot_be_dealt_out():
    with pytest.raises(SpecError, match=r"^f: the number of query heads must be a multiple of the 3 ranks .*, got 8"):
        context_heads("f", 8, 8, 3)
    with pytest.raises(SpecError, match=r"^f: the number of key heads must be a divisor of the 8 query heads, got 3"):
        context_heads("f", 8, 3, 2)
    check_context_heads("f", 8, {"tp": 2, "cp": 4})
    message = r"^f: num_attention_heads must be a multiple of the 8 ranks of the mesh axes tp, cp, got 12\."
    with pytest.raises(SpecError, match=message):
        check_context_heads("f", 12, {"tp": 2, "cp": 4})


def test_tokens_and_models_that_cannot_be_cut():
    check_context_tokens("f", "input_ids", 12, 4, (2, 12))
    message = r"^f: input_ids must be of a multiple of 4 tokens, .*, got 11 \(input_ids is \[2, 11\]\)\. Pad"
    with pytest.raises(SpecError, match=message):
        check_context_tokens("f", "input_ids", 11, 4, (2, 11))
    with pytest.raises(
        UnsupportedError, match=r"^f: config\.data\.context_axis must be None for a model .*'cp'\. Stack"
    ):
        refuse_context("f", "Stack", "cp")


def test_a_stage_of_a_pipeline_is_not_given_tokens():
    config = ParallelConfig(data=DataParallel(context_axis="cp", pipeline=True))
    with pytest.raises(SpecError, match=r"^f: config\.data\.pipeline must be False with config\.data\.context_axis"):
        check_parallel_config("f", config, {"dp_shard": 1, "cp": 2}, "torch")
