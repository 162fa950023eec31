"""Labels that are all ignored, and weights of tokens that are negative or not finite, in both halves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tiled_jax
import tiled_torch
from shared_specs import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32

T, H, V = 24, 4, 7
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((T, H)).astype("float32"), RNG.standard_normal((H, V)).astype("float32")
LABELS = np.where(np.arange(T) % 3 == 0, -100, np.arange(T) % V)
NONE = np.full(T, -100)


def torch_loss(targets: Any, weights: Any, loss: LossOptions, tiling: Tiling) -> tuple[Any, Any, Any]:
    x, weight = torch.from_numpy(X.copy()).requires_grad_(), torch.from_numpy(W.T.copy()).requires_grad_()
    given: Any = None if weights is None else torch.from_numpy(weights)
    found: Any = tiled_torch.tiled_linear_cross_entropy(
        x, weight, torch.from_numpy(targets), loss=loss, tiling=tiling, token_weight=given
    )
    dx, dw = torch.autograd.grad(found.sum(), (x, weight))
    return found.detach().numpy(), dx.numpy(), dw.numpy().T


def jax_loss(targets: Any, weights: Any, loss: LossOptions, tiling: Tiling) -> tuple[Any, Any, Any]:
    def value(x: Any, weight: Any) -> Any:
        found = tiled_jax.tiled_linear_cross_entropy(
            x, weight, jnp.asarray(targets, jnp.int32), loss=loss, tiling=tiling,
            token_weight=None if weights is None else jnp.asarray(weights),
        )  # fmt: skip
        return jnp.sum(found), found

    (dx, dw), found = jax.grad(value, argnums=(0, 1), has_aux=True)(jnp.asarray(X), jnp.asarray(W))
    return np.asarray(found), np.asarray(dx), np.asarray(dw)


CALLS = pytest.mark.parametrize("call", [torch_loss, jax_loss], ids=["torch", "jax"])
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "none"])


@CALLS
@REDUCTIONS
@pytest.mark.parametrize("vocab_shards", [1, 2])
def test_labels_that_are_all_ignored(vocab_shards: int, reduction: Any, call: Any) -> None:
    """A loss of 0, and gradients of zeros; what their weights are does not matter."""
    for weights in (None, np.full(T, np.nan, "float32")):
        tiling = Tiling(num_shards=3, vocab_shards=vocab_shards)
        found = call(NONE, weights, LossOptions(reduction=reduction), tiling)
        assert not any(a.any() for a in found)


@CALLS
@REDUCTIONS
def test_negative_weights_count_as_they_are(reduction: Any, call: Any) -> None:
    """The opposite of the positive ones, loss and gradients."""
    weights = np.linspace(0.5, 2, T, dtype="float32")
    both = (call(LABELS, s * weights, LossOptions(reduction=reduction), Tiling(num_shards=3)) for s in (1, -1))
    for a, b in zip(*both, strict=True):
        assert a.any()
        assert relative_error(-b, a) <= MODEL_FLOAT32


@CALLS
@REDUCTIONS
@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_its_users(odd: float, reduction: Any, call: Any) -> None:
    """Of an ignored token it is nothing; of one that counts the loss is not finite, and nothing is refused."""
    weights = np.linspace(0.5, 2, T, dtype="float32")
    expected = call(LABELS, weights, LossOptions(reduction=reduction), Tiling(num_shards=3))
    ignored, counted = weights.copy(), weights.copy()
    ignored[0], counted[1] = odd, odd
    for a, b in zip(
        call(LABELS, ignored, LossOptions(reduction=reduction), Tiling(num_shards=3)), expected, strict=True
    ):
        assert relative_error(a, b) <= MODEL_FLOAT32
    loss, dx, _ = call(LABELS, counted, LossOptions(reduction=reduction), Tiling(num_shards=3))
    assert not np.isfinite(loss.reshape(-1)[1 if reduction == "none" else 0])
    assert not np.isfinite(dx[1]).all()
    if reduction == "none":
        assert np.isfinite(np.delete(loss, 1)).all()
        assert np.isfinite(np.delete(dx, 1, axis=0)).all()
