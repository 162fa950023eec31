"""The formulas against numbers worked out by hand; counted figures of the halves are compared in their own tests."""

from functools import partial

import pytest

from shared_specs.config import LossOptions
from shared_specs.core.budget import shard_tokens_within
from shared_specs.errors import SpecError
from shared_specs.loss import costs as loss_costs
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan, plan_tokens

SHAPE = mlp_costs.MLPShape(tokens=1000, hidden=10, intermediate=30)
PLAN = plan_tokens(1000, num_shards=10)


def test_flop() -> None:
    assert mlp_costs.thi(SHAPE) == 600_000
    assert mlp_costs.mlp_flop(SHAPE, PLAN) == 11 * 600_000
    assert mlp_costs.mlp_flop(SHAPE, PLAN, keep=0.5) == 10 * 600_000
    assert mlp_costs.mlp_flop(SHAPE, PLAN, keep=1.0) == mlp_costs.plain_flop(SHAPE) == 9 * 600_000
    assert mlp_costs.mlp_flop(SHAPE, PLAN, checkpointing="reentrant") == 14 * 600_000
    assert mlp_costs.plain_flop(SHAPE, checkpointing="non-reentrant") == 11 * 600_000


def test_saved_bytes() -> None:
    assert mlp_costs.saved_bytes(SHAPE, PLAN) == 0
    assert mlp_costs.saved_bytes(SHAPE, PLAN, keep=0.5) == 2 * 500 * 30 * 4
    assert mlp_costs.plain_saved_bytes(SHAPE) == 4 * 1000 * 30 * 4


def test_peak_does_not_grow_with_tokens() -> None:
    peaks = {mlp_costs.peak_bytes(mlp_costs.MLPShape(tokens=T, hidden=64, intermediate=256), ShardPlan(T, 1024))
             for T in (4096, 65536, 2**20)}  # fmt: skip
    assert len(peaks) == 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_longest_shard_within_a_budget(itemsize: int) -> None:
    shape = mlp_costs.MLPShape(tokens=50_000, hidden=64, intermediate=256, itemsize=itemsize, weight_itemsize=itemsize)
    for budget in (2**21, 2**23, 2**30):
        t = shard_tokens_within("test", budget, shape.tokens, partial(mlp_costs.peak_bytes, shape))
        assert mlp_costs.peak_bytes(shape, ShardPlan(50_000, t)) <= budget
        assert t == 50_000 or mlp_costs.peak_bytes(shape, ShardPlan(50_000, t + 1)) > budget


def test_too_small_a_budget_names_the_least() -> None:
    with pytest.raises(SpecError, match=r"test: memory_budget must be >= \d+ bytes, one token at a time, got 10\."):
        shard_tokens_within("test", 10, SHAPE.tokens, partial(mlp_costs.peak_bytes, SHAPE))


def test_accumulators_only_where_the_gradient_cannot_hold_the_sum() -> None:
    half = mlp_costs.MLPShape(tokens=1000, hidden=10, intermediate=30, itemsize=2, weight_itemsize=2)
    assert mlp_costs.accumulator_bytes(SHAPE, PLAN) == 0
    assert mlp_costs.accumulator_bytes(half, PLAN) == 3 * 300 * 4
    assert mlp_costs.accumulator_bytes(half, ShardPlan(1000, 1000)) == 0


def test_weights_in_another_dtype_are_copied() -> None:
    """A memory budget counts them; the automatic plan, which compares with the untiled MLP, that saves them, stays."""
    stored = mlp_costs.MLPShape(tokens=1000, hidden=10, intermediate=30, itemsize=2, weight_itemsize=2)
    cast = mlp_costs.MLPShape(tokens=1000, hidden=10, intermediate=30, itemsize=2)
    assert cast.cast_bytes == 3 * 300 * 2
    assert stored.cast_bytes == SHAPE.cast_bytes == 0
    sums = mlp_costs.accumulator_bytes(stored, PLAN)
    assert mlp_costs.peak_bytes(cast, PLAN) == mlp_costs.peak_bytes(stored, PLAN) - sums + cast.cast_bytes
    assert mlp_costs.plain_peak_bytes(cast) == mlp_costs.plain_peak_bytes(stored) + cast.cast_bytes


LOSS = loss_costs.LossShape(tokens=1000, hidden=10, vocab=301)


def test_loss_flop_counts_products() -> None:
    product = 2 * 1000 * 10 * 301
    parts = loss_costs.LossShape(tokens=1000, hidden=10, vocab=301, vocab_shards=2)
    assert loss_costs.loss_flop(LOSS, gradients_in_forward=True) == 3 * product
    assert loss_costs.loss_flop(LOSS, gradients_in_forward=False) == 4 * product
    assert loss_costs.loss_flop(parts, gradients_in_forward=True) == 4 * product
    assert loss_costs.loss_flop(LOSS, gradients_in_forward=True, dweight=False) == 2 * product
    assert loss_costs.loss_flop(LOSS, gradients_in_forward=False, dx=False, dweight=False) == product


def test_loss_peak_is_one_shard_of_logits() -> None:
    for T in (2**14, 2**20):
        shape = loss_costs.LossShape(tokens=T, hidden=576, vocab=49152)
        peak = loss_costs.loss_peak_bytes(shape, ShardPlan(T, 1024))
        assert 1 <= peak / (1024 * 49152 * 4) <= 1.02
        assert loss_costs.plain_loss_peak_bytes(shape) == 3 * T * 49152 * 4


@pytest.mark.parametrize(
    ("loss", "eager", "compiled"),
    [
        (LossOptions(reduction="none", z_loss=0.1, outputs=("lse", "accuracy")), 0, 0),
        (LossOptions(logit_scale=0.5), 0, 2),  # the eager loss multiplies in place, XLA does not
        (LossOptions(logit_softcap=5.0), 1, 2),
        (LossOptions(outputs=("entropy",)), 1, 2),
        (LossOptions(logit_scale=0.5, logit_softcap=5.0, outputs=("entropy",)), 2, 2),
    ],
)
def test_loss_peak_counts_what_comes_between_logits_and_gradients(loss: LossOptions, eager: int, compiled: int) -> None:
    """Temporaries of the logits of a shard, in float32, beyond those of the plain loss. Both halves make the shape so."""
    plan, logits = ShardPlan(1000, 50), 50 * 301 * 4
    shape = loss_costs.LossShape.of(loss, tokens=1000, hidden=10, vocab=301)
    for peak, more in ((loss_costs.loss_peak_bytes, eager), (loss_costs.compiled_loss_peak_bytes, compiled)):
        assert peak(shape, plan) - peak(LOSS, plan) == more * logits


def test_loss_peak_counts_copies() -> None:
    """Of rows for statistics over ranks, and of a head in another dtype."""
    plan = ShardPlan(1000, 50)
    copied = loss_costs.LossShape(tokens=1000, hidden=10, vocab=301, copied=True)
    assert loss_costs.loss_peak_bytes(copied, plan) == loss_costs.loss_peak_bytes(LOSS, plan) + 50 * 301 * 4
    assert loss_costs.loss_peak_bytes(copied, plan, kernels=True) == loss_costs.loss_peak_bytes(
        LOSS, plan, kernels=True
    )
    parts = {"tokens": 1000, "hidden": 10, "vocab": 301, "vocab_shards": 7}
    twice = [loss_costs.LossShape(**parts, copied=copied) for copied in (True, False)]
    assert loss_costs.loss_peak_bytes(twice[0], plan) == loss_costs.loss_peak_bytes(twice[1], plan)
    stored = loss_costs.LossShape(tokens=1000, hidden=10, vocab=301, itemsize=2, weight_itemsize=2)
    cast = loss_costs.LossShape(tokens=1000, hidden=10, vocab=301, itemsize=2)
    sums = loss_costs.loss_accumulator_bytes(stored)
    assert loss_costs.loss_peak_bytes(cast, plan) == loss_costs.loss_peak_bytes(stored, plan) - sums + 301 * 10 * 2


def test_a_budget_for_the_loss() -> None:
    shape = loss_costs.LossShape(tokens=2**14, hidden=576, vocab=49152)
    for peak in (loss_costs.loss_peak_bytes, loss_costs.compiled_loss_peak_bytes):
        plan = loss_costs.plan_loss("test", shape, memory_budget=2**29, peak=peak)
        assert peak(shape, plan) <= 2**29 < peak(shape, ShardPlan(2**14, plan.shard_tokens + 1))
