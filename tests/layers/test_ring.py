"""Who holds and computes what in a ring: every token once, every score once, and as many in every step on every rank."""

import numpy as np
import pytest

from shared_specs.config import DataParallel, ParallelConfig
from shared_specs.errors import SpecError
from shared_specs.layers.ring import check_order, exchange_bytes, held_runs, ring_bytes, ring_multiple, ring_steps
from shared_specs.plans.applied import applied_lines
from shared_specs.plans.checks import check_axis_order, check_context_tokens, check_parallel_config, mesh_axes

TWO_D = DataParallel(context_axis=("ring", "cp"), context="2d")


@pytest.mark.parametrize("inside", [1, 2, 3])
@pytest.mark.parametrize("ring", [1, 2, 3, 4])
def test_every_token_is_held_once(ring: int, inside: int) -> None:
    """Ranks that share a place of the ring hold its two runs, one behind the other."""
    tokens = 2 * ring_multiple(ring, inside)
    held = []
    for rank in range(ring):
        places = [held_runs(tokens, ring, rank, inside=inside, place=place) for place in range(inside)]
        rows = [[token for run in runs for token in range(*run)] for runs in places]
        assert {len(row) for row in rows} == {tokens // ring // inside}
        whole = [token for run in held_runs(tokens, ring, rank) for token in range(*run)]
        assert [token for row in rows for token in row] == whole
        held += whole
    assert sorted(held) == list(range(tokens))


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_every_score_is_computed_once(ring: int) -> None:
    """Those of keys up to the query's own place; in every step behind the first as many on every rank."""
    tokens = 3 * ring_multiple(ring)
    places = [np.concatenate([np.arange(*run) for run in held_runs(tokens, ring, rank)]) for rank in range(ring)]
    computed = np.zeros((tokens, tokens), int)
    for rank in range(ring):
        steps = ring_steps(tokens // ring, ring, rank)
        assert [step.owner for step in steps] == [(rank - number) % ring for number in range(ring)]
        for step in steps:
            queries, keys = places[rank][slice(*step.queries)], places[step.owner][slice(*step.keys)]
            seen = queries[:, None] >= keys if step.causal else np.ones((len(queries), len(keys)), bool)
            computed[np.ix_(queries, keys)] += seen
            assert step.causal or len(queries) * len(keys) == 2 * 3**2
    assert (computed == np.tri(tokens, dtype=int)).all()


def test_bytes() -> None:
    """Two ranks swap keys and values forward, again backward, and then their gradients in float32."""
    assert ring_bytes(ring=2, batch=1, held=4, kv_heads=3, features=10, itemsize=2) == 4 * 3 * 10 * (2 + 2 + 4)
    assert ring_bytes(ring=1, batch=1, held=4, kv_heads=3, features=10, itemsize=2, forwards=2) == 0
    sizes = {"batch": 1, "held": 4, "heads": 6, "kv_heads": 2, "head_dim": 5, "itemsize": 8}
    assert exchange_bytes(ranks=2, **sizes) == 2 * (4 * 16 * 5 * 8) // 2


REFUSED = [
    ({"context": "rings"}, "config.data.context must be one of ulysses, ring, 2d, got 'rings'"),
    (
        {"context": "ring", "context_axis": None},
        'config.data.context_axis must be given with config.data.context="ring", got None. Name the axis whose ranks share',
    ),
    ({"context": "2d"}, 'context_axis must be a pair of axes, that of the rings first, with config.data.context="2d", got'),
    ({"context_axis": ("a", "cp")}, "context_axis must be one axis with config.data.context=\"ulysses\", got ('a', 'cp')"),
    ({"context_axis": ("cp", "cp"), "context": "2d"}, "context_axis[1] must be another axis than config.data.context_axis[0]"),
    ({"context_axis": ("cp",), "context": "2d"}, "config.data.context_axis must be a string, a pair of strings or None"),
    ({"context_axis": 3}, "config.data.context_axis must be a string, a pair of strings or None, got 3"),
    ({"context": "ring", "engine": "ddp"}, "config.data.context_axis must be left at None with engine=\"ddp\", got 'cp'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=lambda value: None if isinstance(value, dict) else value[:30]
)
def test_refused(fields: dict, message: str) -> None:
    config = ParallelConfig(data=DataParallel(**{"context_axis": "cp"} | fields))
    with pytest.raises((SpecError, TypeError)) as caught:
        check_parallel_config("f", config, {"dp_shard": 1, "cp": 4}, "torch")
    assert message in str(caught.value)


def test_two_axes() -> None:
    config, axes = ParallelConfig(data=TWO_D), {"dp_shard": 1, "ring": 2, "cp": 4}
    assert check_parallel_config("f", config, axes, "torch") is config
    assert [*mesh_axes(config).values()] == [*axes]
    assert (TWO_D.ring_axis, TWO_D.heads_axis) == ("ring", "cp")
    assert applied_lines(config, axes, {})[0] == "context parallelism: ring=2 x cp=4, 2d"
    with pytest.raises(SpecError, match="with its axes in the order dp_shard, ring, cp, got dp_shard, cp, ring"):
        check_axis_order("f", TWO_D, ["dp_shard", "cp", "ring"])


def test_tokens_and_orders_that_cannot_be() -> None:
    check_context_tokens("f", "ids", 16, 4, (1, 16), order="zigzag", inside=2)
    message = (
        r"^f: ids must be of a multiple of 8 tokens, for 4 ranks that hold two runs in a ring of them, got 12 \(ids is"
    )
    with pytest.raises(SpecError, match=message):
        check_context_tokens("f", "ids", 12, 4, (1, 12), order="zigzag")
    check_order("f", "zigzag", pair=True)
    with pytest.raises(SpecError, match=r"^f: order must be one of tokens, zigzag, got 'zag'"):
        check_order("f", "zag")
    with pytest.raises(SpecError, match=r"^f: order must be 'zigzag' over a pair"):
        check_order("f", "tokens", pair=True)
