"""A num_valid of 0, which an array can hold unseen: a mean of nothing is 0, a mean of something divided by it infinite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tiled_jax
import tiled_torch
from shared_specs import LossOptions, SpecError

LABELS = {"labels": np.arange(6) % 5, "no labels": np.full(6, -100)}
OPTIONS: dict[str, dict[str, Any]] = {"in forward": {}, "in backward": {"outputs": ("lse",)}}


def torch_loss(targets: Any, options: dict[str, Any], count: float = 0.0) -> tuple[float, Any]:
    x, weight = torch.ones(6, 4, requires_grad=True), torch.eye(5, 4, requires_grad=True)
    loss = LossOptions(num_valid=torch.tensor(count), **options)
    found: Any = tiled_torch.tiled_linear_cross_entropy(x, weight, torch.tensor(targets), loss=loss, num_shards=2)
    value = found.loss if options else found
    return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()


def jax_loss(targets: Any, options: dict[str, Any], count: float = 0.0) -> tuple[float, Any]:
    loss = LossOptions(num_valid=jnp.asarray(count), **options)

    def value(x: Any) -> Any:
        of = tiled_jax.tiled_linear_cross_entropy
        found = of(x, jnp.eye(4, 5), jnp.asarray(targets, jnp.int32), loss=loss, num_shards=2)
        return found.loss if options else found

    found, dx = jax.value_and_grad(value)(jnp.ones((6, 4)))
    return float(found), np.asarray(dx)


@pytest.mark.parametrize("call", [torch_loss, jax_loss], ids=["torch", "jax"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("labels", LABELS)
def test_a_count_of_zero(labels: str, options: dict[str, Any], call: Any) -> None:
    """It gave a loss of 0 whatever there was to divide, so that a wrong count looked like a perfect model."""
    loss, dx = call(LABELS[labels], options)
    if labels == "labels":
        assert loss == np.inf
        assert not np.isfinite(dx).all()
    else:
        assert loss == 0
        assert not dx.any()


@pytest.mark.parametrize("call", [torch_loss, jax_loss], ids=["torch", "jax"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_negative_count_that_can_be_read_is_refused(options: dict[str, Any], call: Any) -> None:
    """As a number is; it changed the sign of the loss."""
    text = r"^tiled_linear_cross_entropy: loss\.num_valid must be > 0, got -3\.0\."
    with pytest.raises(SpecError, match=text):
        call(LABELS["labels"], options, -3.0)
