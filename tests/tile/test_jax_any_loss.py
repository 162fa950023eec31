"""`tiled_loss`: any loss by shards, with the sums and gradients of the whole."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.config import Tiling
from shared_specs.tolerances import MODEL_FLOAT32
from tests.core.jax_counting import temp_bytes
from tests.mlp.jax_untiled import loss_operands
from tiled_jax import SpecError, tiled_loss

LEADS = [((33,), 4), ((2, 3, 7), 5), ((32,), 4), ((5,), None), ((0,), 4)]


def losses(x: jax.Array, targets: jax.Array, mask: jax.Array, weight: jax.Array) -> dict[str, Any]:
    """What a user writes: a masked sum, a count, another sum, and values per token."""
    logits = jnp.tanh(x @ weight)
    labels = jnp.where(targets < 0, 0, targets)
    of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    valid = (targets >= 0) & (mask > 0)
    total = jnp.sum(jnp.where(valid, -of_target * mask, 0))
    return {"loss": total, "count": jnp.sum(valid), "more": (jnp.sum(logits**2), None), "each": of_target}


def arguments(*lead: int) -> list[Any]:
    x, weight, targets = loss_operands(*lead)
    return [x, targets, jnp.abs(jnp.sin(jnp.arange(targets.size, dtype=x.dtype))).reshape(lead), weight]


def with_gradients(fn: Any) -> Any:
    def run(x: jax.Array, targets: jax.Array, mask: jax.Array, weight: jax.Array) -> Any:
        def scalar(x: jax.Array, mask: jax.Array, weight: jax.Array) -> Any:
            found = fn(x, targets, mask, weight)
            count = jnp.maximum(found["count"], 1).astype(x.dtype)
            value = 3 * found["loss"] / count + found["more"][0] + jnp.sum(jnp.sin(found["each"]))
            return value, {**found, "count": count}

        return jax.grad(scalar, (0, 1, 2), has_aux=True)(x, mask, weight)

    return jax.jit(run)


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("lead", "num_shards"), LEADS, ids=str)
def test_sums_and_values_per_token(lead: tuple[int, ...], num_shards: int | None, same: Any) -> None:
    """Beside x [T, H] the arrays with T rows are cut too."""
    tiled = with_gradients(lambda *a: tiled_loss(losses, *a, num_shards=num_shards))
    same(tiled(*arguments(*lead)), with_gradients(losses)(*arguments(*lead)))


def test_every_array_is_cut_as_x_is_or_whole(same: Any) -> None:
    x, _, mask, weight = arguments(12)
    seen = set()

    def fn(x: jax.Array, tree: dict[str, jax.Array], scale: float) -> jax.Array:
        seen.add((x.shape, tree["mask"].shape, tree["weight"].shape, scale))
        return jnp.sum(x @ tree["weight"] * tree["mask"][:, None]) * scale

    tree = {"mask": mask, "weight": weight}
    same(jax.jit(lambda x: tiled_loss(fn, x, tree, 2.0, tiling=Tiling(shard_tokens=5)))(x), fn(x, tree, 2.0))
    assert {shapes for shapes in seen if shapes[0][0] != 12} == {
        ((2, 8), (2,), (8, 13), 2.0),
        ((5, 8), (5,), (8, 13), 2.0),
    }


class Head(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 13, rngs=rngs)

    def __call__(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(self.out(self.drop(x)))
        return -jnp.sum(jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1))


def test_a_module_with_random_numbers() -> None:
    """As fn and as an argument; its parameters get gradients, and two calls draw other numbers."""
    x, _, targets = loss_operands(3, 11, dtype=jnp.float32)
    by_argument = lambda x, targets, head: head(x, targets)  # noqa: E731
    uses = [
        lambda head: tiled_loss(head, x, targets, num_shards=4),
        lambda head: tiled_loss(by_argument, x, targets, head, num_shards=4),
    ]
    found = []
    for use in uses:
        head = Head(rngs=nnx.Rngs(0))
        pairs = [nnx.jit(nnx.value_and_grad(use))(head) for _ in range(2)]
        assert pairs[0][0] != pairs[1][0]
        found.append(jax.tree.map(np.asarray, nnx.to_pure_dict(pairs[0][1])))
        assert found[-1]["out"]["kernel"].any()
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_sums_are_float32_and_counts_are_integers() -> None:
    x = jnp.full((64, 8), 0.01, jnp.bfloat16)
    total, count, number = tiled_loss(lambda x: (jnp.sum(x), jnp.sum(x > 0), x.shape[0]), x, num_shards=64)
    assert (total.dtype, count.dtype, number.dtype) == (jnp.float32, jnp.int32, jnp.int32)
    assert (int(count), int(number)) == (512, 64)
    assert float(total) == pytest.approx(64 * float(jnp.sum(x[0])), rel=MODEL_FLOAT32)


def mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(x @ weight, axis=-1))


def test_a_mean_is_refused_where_it_can_be_seen() -> None:
    x, weight, _ = loss_operands(3, 11, dtype=jnp.float32)
    message = (
        "tiled_loss: fn must be a sum over its tokens, got a mean. Return sums (reduction='sum') and divide the results by "
        "a count."
    )
    for fn in (mean, lambda x, weight: {"sum": jnp.sum(x), "loss": mean(x, weight)}):
        with pytest.raises(SpecError) as caught:
            tiled_loss(fn, x, weight, num_shards=4)
        assert str(caught.value) == message
    tiled_loss(lambda x, weight: jnp.sum(x @ weight) + x.shape[-2], x, weight)
    jax.jit(partial(tiled_loss, mean))(x, weight)  # no value to look at


def mean_or_sum(reduction: str, runs: list[int]) -> Any:
    def fn(x: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
        runs.append(x.shape[-2])
        logits = x @ weight
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        total = jnp.sum(jnp.where(targets >= 0, jax.nn.logsumexp(logits, axis=-1) - picked, 0))
        return total / jnp.sum(targets >= 0).astype(total.dtype) if reduction == "mean" else total

    return fn


@pytest.mark.deep
@pytest.mark.parametrize("valid", [9, 1])
def test_a_mean_is_found_where_the_first_tokens_are_ignored(valid: int) -> None:
    x, weight, _ = loss_operands(12, dtype=jnp.float32)
    targets = jnp.where(jnp.arange(12) < 12 - valid, -100, 3)
    with pytest.raises(SpecError, match=r"^tiled_loss: fn must be a sum over its tokens, got a mean"):
        tiled_loss(mean_or_sum("mean", []), x, targets, weight, num_shards=3)


def test_a_mean_is_looked_for_once() -> None:
    """fn, made anew for every call, is traced for the shards alone after the first."""
    x, weight, _ = loss_operands(12, dtype=jnp.float32)
    targets, counted = jnp.full(12, 3), []
    for _ in range(3):
        runs: list[int] = []
        tiled_loss(mean_or_sum("sum", runs), x, targets, weight, num_shards=3)
        counted.append(len(runs))
    assert counted[1] == counted[2] == counted[0] - 4
    with pytest.raises(SpecError, match="got a mean"):
        tiled_loss(mean_or_sum("mean", []), x, targets, weight, num_shards=3)


@pytest.mark.deep
def test_looking_for_a_mean_draws_no_random_numbers() -> None:
    x, _, targets = loss_operands(3, 11, dtype=jnp.float32)
    head: Any = Head(rngs=nnx.Rngs(0))
    tiled_loss(head, x, targets)
    assert int(head.drop.rngs.count[...]) == 1


NOT_A_FUNCTION: Any = 3
A_LIST: Any = [1.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: tiled_loss(NOT_A_FUNCTION, x), TypeError, "tiled_loss: fn must be a module or a function, got int."),
        (
            lambda x: tiled_loss(jnp.sum, x, num_shards=0),
            SpecError,
            "tiled_loss: num_shards must be >= 1, got 0 (x is [12, 8]). Pass num_shards=None to let the plan choose.",
        ),
        (
            lambda x: tiled_loss(jnp.sum, x, tiling=Tiling(vocab_shards=2)),
            SpecError,
            "tiled_loss: vocab_shards must be left out, got 2. This function has no use for it.",
        ),
        (
            lambda x: tiled_loss(jnp.sum, A_LIST),
            TypeError,
            "tiled_loss: x, the first argument, must be an array, got list.",
        ),
        (
            lambda x: tiled_loss(jnp.sum, x[0]),
            SpecError,
            "tiled_loss: x must be [tokens, hidden] or more dims, got [8].",
        ),
        (
            lambda x: jax.jit(lambda x: tiled_loss(lambda x: jnp.ones(3), x, num_shards=2))(x),
            SpecError,
            "tiled_loss: output 0 of fn must be a scalar or [t, ...], or [1, t, ...] where x has three or more dims, for a "
            "shard of t tokens, got [3]. fn has to return one "
            "row for each token of its shard.",
        ),
    ],
)
def test_bad_input(call: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        call(jnp.ones((12, 8)))
    assert str(caught.value) == message


def test_temp_bytes_are_those_of_one_shard() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 64), (64, 2048))]

    def gradient(use: Any) -> Any:
        return jax.value_and_grad(lambda x, weight: use(x, weight), (0, 1))

    total = lambda x, weight: jnp.sum(jax.nn.logsumexp(x @ weight, axis=-1))  # noqa: E731
    assert temp_bytes(gradient(total), *shapes) > 8192 * 2048 * 4
    tiled = temp_bytes(gradient(lambda x, weight: tiled_loss(total, x, weight, num_shards=16)), *shapes)
    assert tiled < 8192 * 2048 * 4 / 4
