"""Rows without a label are never multiplied: results are those of all rows, from as many shards as there are labels for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shared_specs.config import LossOptions, Tiling
from shared_specs.loss import costs as loss_costs
from shared_specs.tolerances import MODEL_FLOAT32, between
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.loss.jax_ignored import (
    SHARD,
    SHARES,
    H,
    T,
    V,
    counting,
    labels,
    operands,
    rows_for,
    tiled,
    token_weights,
    with_gradients,
)
from tests.mlp.jax_untiled import cross_entropy
from tiled_jax import tiled_linear_cross_entropy
from tiled_jax.loss import api

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {"outputs": ("accuracy",)},
    "none": {"reduction": "none", "outputs": ("log_probs", "accuracy"), "label_smoothing": 0.1, "z_loss": 1e-2},
    "sum, all that bends": {
        "reduction": "sum",
        "logit_softcap": 5.0,
        "logit_scale": -0.7,
        "label_smoothing": 0.2,
        "z_loss": 1e-2,
    },
    "mean, class weights": {"class_weight": np.linspace(0.5, 2.0, V), "label_smoothing": 0.1},
    "mean, a count": {"num_valid": 7.0, "z_loss": 1e-2},
    "mean, log_probs": {"outputs": ("log_probs",)},
    "mean, every row": {"outputs": ("lse", "entropy", "log_probs"), "z_loss": 1e-2},
}


CASES = [
    ("none", {}),
    ("sum, all that bends", {}),
    ("mean, class weights", {"vocab_shards": 3}),
    ("mean", {"shard_tokens": 11}),
    ("none", {"vocab_shards": 3}),
    *((name, {}) for name in ("mean", "mean, a count", "mean, class weights", "mean, log_probs", "mean, every row")),
]


@pytest.mark.deep_but(4)
@pytest.mark.parametrize(("options", "cut"), CASES, ids=str)
def test_results_and_gradients_are_those_of_the_formula(options: str, cut: dict[str, Any], same: Any) -> None:
    """At every share of ignored labels; 0 where there is no other."""
    given_tiling: Any = {"shard_tokens": SHARD} | cut
    fn = partial(tiled_linear_cross_entropy, tiling=Tiling(**given_tiling))
    given: Any = dict(OPTIONS[options])
    if "class_weight" in given:
        given["class_weight"] = jnp.asarray(given["class_weight"])
    loss = LossOptions(**given)
    found, wanted = (with_gradients(partial(each, loss=loss)) for each in (fn, cross_entropy))
    for share in SHARES:
        arguments = *operands(), labels(share)
        actual = found(*arguments)
        if share < 1 or loss.reduction != "mean" or loss.num_valid:
            same(actual, wanted(*arguments))
        elif "lse" not in loss.outputs:
            assert not any(np.asarray(a).any() for a in jax.tree.leaves(actual)), "a mean of nothing is 0"


def test_rows_without_a_label_have_the_values_that_they_had(x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row as where all of them are run, to the last bit; the gradients of x at them are 0."""
    loss = LossOptions(reduction="none", outputs=("log_probs", "accuracy"))
    arguments = *operands(), labels(0.5)
    result, gradients = with_gradients(partial(tiled, loss=loss))(*arguments)
    monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
    wanted, _ = with_gradients(partial(tiled, loss=loss))(*arguments)
    for actual, expected in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert not np.asarray(gradients[0])[arguments[-1] == -100].any()


WEIGHTED: dict[str, dict[str, Any]] = {
    "mean": {"z_loss": 1e-2, "label_smoothing": 0.1},
    "sum, outputs": {"reduction": "sum", "outputs": ("log_probs", "accuracy")},
    "none": {"reduction": "none"},
    "mean, class weights": {"class_weight": np.linspace(0.5, 2.0, V), "logit_softcap": 5.0},
    "mean, a count": {"num_valid": 7.0},
}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("options", WEIGHTED)
def test_a_weight_of_every_token_multiplies_its_loss(options: str, same: Any) -> None:
    """As the losses of reduction "none" times the weights do; a mean is divided by what it is divided by without."""
    given: Any = dict(WEIGHTED[options])
    if "class_weight" in given:
        given["class_weight"] = jnp.asarray(given["class_weight"])
    loss, weights, reduction = LossOptions(**given), token_weights(), given.get("reduction", "mean")

    def by_hand(x: jax.Array, weight: jax.Array, targets: jax.Array, bias: jax.Array) -> Any:
        each = LossOptions(**given | {"reduction": "none", "num_valid": None})
        found = cross_entropy(x, weight, targets, bias, loss=each)
        losses = weights * (found.loss if loss.outputs else found)
        heaviness = jnp.ones(V) if loss.class_weight is None else loss.class_weight
        count = loss.num_valid or jnp.sum(jnp.where(targets == -100, 0, heaviness[targets]))
        total = {"none": losses, "sum": jnp.sum(losses), "mean": jnp.sum(losses) / count}[reduction]
        if not loss.outputs:
            return total
        return found._replace(loss=total, accuracy=lax.stop_gradient(jnp.sum(found.accuracy)))

    for share in (0.0, 0.5):
        arguments = *operands(), labels(share)
        fn = partial(tiled, loss=loss, token_weight=weights)
        same(with_gradients(fn)(*arguments), with_gradients(by_hand)(*arguments))


def test_a_weight_of_every_token_has_no_gradient_and_costs_no_product() -> None:
    """6 THV where the same sum made of the losses of each token takes 8."""
    x, weight, _ = operands(dtype=jnp.float32)
    targets, weights = labels(0.5), token_weights().astype(jnp.float32)
    fn = lambda x, w, weights: tiled(x, w, targets, token_weight=weights)  # noqa: E731
    assert not np.asarray(jax.grad(fn, argnums=2)(x, weight, weights)).any()
    assert flop(jax.grad(fn, argnums=(0, 1)), x, weight, weights) == 6 * T * H * V
    by_hand = lambda x, w: jnp.sum(weights * tiled(x, w, targets, loss=LossOptions(reduction="none")))  # noqa: E731
    assert flop(jax.grad(by_hand, argnums=(0, 1)), x, weight) == 8 * T * H * V


def test_float16_gradients_of_heavy_tokens_are_stored_near_one() -> None:
    """Weights of 1e6, of which float16 has none: the gradients of the logits are divided by their size in between."""
    x, weight, _ = operands(dtype=jnp.float32)
    targets, arrays = labels(0.5), (x.astype(jnp.float16), weight.astype(jnp.float16))
    weights = jnp.where(jnp.arange(T) % 2 == 0, 1e6, 2e6)
    loss = LossOptions(num_valid=1e6)
    fn = jax.jit(jax.grad(lambda x, w: tiled(x, w, targets, loss=loss, token_weight=weights), argnums=(0, 1)))
    found = fn(*arrays)
    wide = [a.astype(jnp.float32) for a in arrays]
    each = LossOptions(reduction="none")
    wanted = jax.grad(lambda x, w: jnp.sum(weights / 1e6 * cross_entropy(x, w, targets, loss=each)), argnums=(0, 1))
    for a, b in zip(found, wanted(*wide), strict=True):
        assert_within(np.asarray(a, np.float32), np.asarray(b), between("float16"), "a gradient")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    return counting(monkeypatch)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_as_many_shards_are_run_as_the_labels_need(reduction: Any, counted: Any) -> None:
    """In forward, in forward with the gradients, and in backward; one program for every share."""
    call = partial(tiled, loss=LossOptions(reduction=reduction))
    only_forward, with_backward = jax.jit(call), with_gradients(call)
    for share in SHARES:
        x, weight, bias = operands(dtype=jnp.float32)
        targets = labels(share)
        rows = rows_for(int((targets >= 0).sum()))
        run = {"statistics": rows} if rows else {}
        assert counted(only_forward, x, weight, targets) == run
        assert counted(with_backward, x, weight, bias, targets) == run | ({"gradient": rows} if rows else {})


def test_every_shard_is_run_for_what_every_row_has(counted: Any) -> None:
    """The log-sum-exp and the entropy are those of ignored rows too. A call of one shard runs it."""
    x, weight, _ = operands(dtype=jnp.float32)
    for loss in (LossOptions(outputs=("lse",)), LossOptions(outputs=("entropy", "accuracy"))):
        assert counted(partial(tiled, loss=loss), x, weight, labels(0.9)) == {"statistics": T}
    assert counted(partial(tiled_linear_cross_entropy, num_shards=1), x, weight, labels(0.9)) == {"statistics": T}


def test_flop_of_a_share() -> None:
    """`loss_flop` counts the rows that are run; of a program in which all may be valid it is what it was."""
    shape = loss_costs.LossShape(tokens=T, hidden=H, vocab=V)
    count = partial(loss_costs.loss_flop, shape, gradients_in_forward=True)
    program = jax.grad(lambda x, w: tiled(x, w, labels(0.9)), argnums=(0, 1))
    assert flop(program, *operands(dtype=jnp.float32)[:2]) == count() == 6 * T * H * V
    for share in SHARES:
        valid = int((labels(share) >= 0).sum())
        assert count(valid=valid / T) == 6 * valid * H * V


def test_bytes_without_ignored_labels_are_those_of_all_rows_and_a_shard_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most one [t, H] and a few numbers per token more than the loop over all rows has: no copy of x."""
    tokens, hidden, vocab, shard = 2048, 128, 512, 256
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, hidden), (hidden, vocab))]
    for reduction in ("mean", "none"):

        def fn(x: jax.Array, weight: jax.Array, targets: jax.Array, reduction: Any = reduction) -> jax.Array:
            loss = LossOptions(reduction=reduction)
            found = tiled_linear_cross_entropy(x, weight, targets, loss=loss, tiling=Tiling(shard_tokens=shard))
            return jnp.sum(jnp.sin(found))

        arguments = *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)
        found = temp_bytes(jax.value_and_grad(fn, argnums=(0, 1)), *arguments)
        with monkeypatch.context() as patch:
            patch.setattr(api, "may_stop_early", lambda *_: False)
            all_rows = temp_bytes(jax.value_and_grad(lambda *a: fn(*a), argnums=(0, 1)), *arguments)
        assert found <= all_rows + shard * hidden * 4 + 4 * tokens * 4


# Transformations.


def test_a_batch_of_different_counts(same: Any) -> None:
    """Each element's results are its own; the loop has the turns of the one that has most labels."""
    x, weight, bias = operands()
    batch = jnp.stack([labels(share) for share in SHARES[:4]])
    loss = LossOptions(reduction="none", outputs=("log_probs",))
    for options in ({"loss": loss}, {}):
        found, wanted = (
            jax.jit(jax.vmap(with_gradients(fn, **options), (None, None, None, 0))) for fn in (tiled, cross_entropy)
        )
        same(found(x, weight, bias, batch), wanted(x, weight, bias, batch))


@pytest.mark.deep
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_derivatives_of_every_order_and_mode(reduction: Any, same: Any) -> None:
    """Forward mode, and the gradient of the squared gradient, which runs every shard."""
    x, weight, _ = operands()
    targets, loss = labels(0.5), LossOptions(reduction=reduction, z_loss=1e-2)

    def derivatives(fn: Any) -> Any:
        total = lambda x, w: jnp.sum(jnp.sin(fn(x, w, targets, loss=loss)))  # noqa: E731

        def run(x: jax.Array, weight: jax.Array) -> Any:
            first = jax.grad(total, argnums=(0, 1))
            squared = jax.grad(lambda *a: sum(jnp.sum(g * g) for g in first(*a)), argnums=(0, 1))
            moved = jnp.cos(x), jnp.sin(weight)
            return jax.jvp(total, (x, weight), moved), jax.jvp(first, (x, weight), moved), squared(x, weight)

        return jax.jit(run)

    same(derivatives(tiled)(x, weight), derivatives(cross_entropy)(x, weight))


def test_under_a_checkpoint_in_a_scan(same: Any) -> None:
    """Micro-batches with different counts, recomputed in backward."""
    x, weight, bias = operands(3 * T)
    targets = jnp.stack([labels(share) for share in (0.9, 0.0, 1.0)])

    def total(fn: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        one = jax.checkpoint(partial(fn, loss=LossOptions(reduction="sum")))
        step = lambda sum, batch: (sum + one(batch[0], weight, batch[1], bias=bias), None)  # noqa: E731
        return lax.scan(step, jnp.zeros((), x.dtype), (x.reshape(3, T, H), targets))[0]

    found, wanted = (jax.jit(jax.value_and_grad(partial(total, fn), argnums=(0, 1))) for fn in (tiled, cross_entropy))
    same(found(x, weight), wanted(x, weight))


def test_by_the_kernels(interpreting: None) -> None:
    """They are given the same rows, and the weights of their tokens."""
    x, weight, bias = operands(11, dtype=jnp.float32)
    loss, weights = LossOptions(label_smoothing=0.1, z_loss=1e-2), token_weights(11).astype(jnp.float32)
    call = partial(tiled_linear_cross_entropy, loss=loss, tiling=Tiling(shard_tokens=4), token_weight=weights)
    arguments = x, weight, bias, labels(0.5, 11)
    found, wanted = (with_gradients(fn)(*arguments) for fn in (partial(call, backend="pallas"), call))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_within(np.asarray(a), np.asarray(b), MODEL_FLOAT32, "loss and gradients")
