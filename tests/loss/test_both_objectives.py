"""The objectives of examples/ over the tiled loss are the plain formulas over whole logits: DPO, SimPO, GRPO and DAPO."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.documents import script

B, S, H, V = 3, 10, 6, 20
DRAW = np.random.default_rng(0)
X, W = DRAW.standard_normal((2, B, S, H)), DRAW.standard_normal((V, H))
TARGETS = DRAW.integers(0, V, (2, B, S))
TARGETS[..., :4] = -100
COUNTED = (TARGETS != -100).astype(float)
REFERENCE = (DRAW.standard_normal((2, B, S)) - 3) * COUNTED
ADVANTAGES = np.array([1.0, -1.0])[:, None, None]


def preference(library: Any, log_probs: Any, kind: str, array: Any) -> Any:
    if kind == "simpo":
        return library.simpo(log_probs, array(COUNTED))
    return library.dpo(log_probs, array(REFERENCE), beta=0.3)


def plain(kind: str) -> tuple[float, Any]:
    """Value and gradient of x by PyTorch's own functions, in the words of the papers."""
    x = torch.tensor(X, requires_grad=True)
    targets, counted, reference = (torch.tensor(a) for a in (TARGETS, COUNTED, REFERENCE))
    log_p = F.linear(x, torch.tensor(W)).log_softmax(-1)
    new = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * counted
    if kind == "dpo":
        margins = 0.3 * ((new[0] - reference[0]).sum(-1) - (new[1] - reference[1]).sum(-1))
        value = -F.logsigmoid(margins).mean()
    elif kind == "simpo":
        rewards = 2.0 * new.sum(-1) / counted.sum(-1)
        value = -F.logsigmoid(rewards[0] - rewards[1] - 1.0).mean()
    else:
        low, high = (0.8, 1.2) if kind == "grpo" else (0.8, 1.28)
        ratio, advantages = torch.exp(new - OLD), torch.tensor(ADVANTAGES)
        clipped = torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        divergence = torch.exp(reference - new) - (reference - new) - 1
        value = ((0.04 * divergence - gain) * counted).sum() / counted.sum()
    value.backward()
    return value.item(), x.grad.numpy()  # type: ignore[union-attr]


# Near the policy's own, so that ratios lie on either side of both limits.
with torch.no_grad():
    _OWN = (
        F.linear(torch.tensor(X), torch.tensor(W))
        .log_softmax(-1)
        .gather(-1, torch.tensor(TARGETS).clamp(min=0)[..., None])
    )
OLD = (_OWN[..., 0] + 0.3 * torch.tensor(DRAW.standard_normal((2, B, S)))) * torch.tensor(COUNTED)


def by_torch(kind: str) -> tuple[float, Any]:
    x, weight, targets = torch.tensor(X, requires_grad=True), torch.tensor(W), torch.tensor(TARGETS)
    library = script("preference_torch")
    log_probs = library.log_probs_of(x, weight, targets)
    if kind in ("dpo", "simpo"):
        value = preference(library, log_probs, kind, torch.tensor)
    else:
        given = (OLD, torch.tensor(REFERENCE), torch.tensor(ADVANTAGES), torch.tensor(COUNTED))
        value = script("policy_gradient_torch").objective(log_probs, *given, **CLIP[kind])
    value.backward()
    return value.item(), x.grad.numpy()  # type: ignore[union-attr]


def by_jax(kind: str) -> tuple[float, Any]:
    library, targets = script("preference_jax"), jnp.asarray(TARGETS, jnp.int32)

    def value(x: jax.Array) -> jax.Array:
        log_probs = library.log_probs_of(x, jnp.asarray(W.T), targets)
        if kind in ("dpo", "simpo"):
            return preference(library, log_probs, kind, jnp.asarray)
        given = (jnp.asarray(OLD.numpy()), *map(jnp.asarray, (REFERENCE, ADVANTAGES, COUNTED)))
        return script("policy_gradient_jax").objective(log_probs, *given, **CLIP[kind])

    found, dx = jax.jit(jax.value_and_grad(value))(jnp.asarray(X))
    return float(found), np.asarray(dx)


CLIP: dict[str, dict[str, Any]] = {"grpo": {}, "dapo": {"clip": (0.2, 0.28)}}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["dpo", "simpo", "grpo", "dapo"])
@pytest.mark.parametrize("half", [by_torch, by_jax], ids=["torch", "jax"])
def test_an_objective_is_its_formula(half: Any, kind: str) -> None:
    (value, dx), (expected, gradient) = half(kind), plain(kind)
    assert relative_error(np.array(value), np.array(expected)) <= limit(0.0, "float64")
    assert relative_error(dx, gradient) <= limit(0.0, "float64")
    assert not dx[..., :4, :].any()


def test_the_limits_of_ratios_are_met() -> None:
    """Otherwise no test above would see them, or tell one from the other."""
    ratio = torch.exp(_OWN[..., 0] - OLD)[torch.tensor(COUNTED) > 0]
    assert (ratio < 0.8).any()
    assert (ratio > 1.28).any()
    assert ((ratio > 1.2) & (ratio < 1.28)).any()
