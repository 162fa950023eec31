"""Entries of the vocabulary that a bias of -inf masks: values and gradients are those of the entries that are left.

p log p is 0 where p is 0. The formula is computed plainly, in float64, by what is left of the vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tests.triton_interpreter  # noqa: F401
import tiled_jax
import tiled_torch
from shared_specs import LossOptions, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import MODEL_FLOAT32, limit

T, H, V = 7, 5, 12
OPTIONS = LossOptions(reduction="none", outputs=("log_probs", "lse", "entropy"))
MASKS = {"one entry": [3], "a whole shard": list(range(6)), "all but one": [j for j in range(V) if j != 8]}
# The Triton kernel makes a shard of tokens with the whole vocabulary, or parts of it.
WAYS = [("torch", "eager", shards) for shards in (1, 2)]
WAYS += [("torch", "triton", shards) for shards in (1, 2)]
WAYS += [("jax", "xla", shards) for shards in (1, 2)]

rng = np.random.default_rng(0)
X, W, B = rng.normal(size=(T, H)), rng.normal(size=(V, H)), rng.normal(size=V)
UPSTREAM: dict[str, Any] = dict(zip(("loss", "log_probs", "lse", "entropy"), rng.normal(size=(4, T)), strict=True))


def expected(left: list[int]) -> dict[str, np.ndarray]:
    """By autograd of the formula on the entries that are left; nothing comes to the others."""
    leaves = {"x": torch.tensor(X), "w": torch.tensor(W), "b": torch.tensor(B)}
    x, w, b = (leaf.requires_grad_() for leaf in leaves.values())
    z = (x @ w.T + b)[:, left]
    log_p = z.log_softmax(1)
    picked = log_p[:, left.index(8)]
    found = {"loss": -picked, "log_probs": picked, "lse": z.logsumexp(1), "entropy": -(log_p.exp() * log_p).sum(1)}
    total: Any = sum((torch.tensor(UPSTREAM[name]) * value).sum() for name, value in found.items())
    return {name: a.detach().numpy() for name, a in found.items()} | {
        f"d{name}": d.numpy() for name, d in zip(leaves, torch.autograd.grad(total, (x, w, b)), strict=True)
    }


def by_torch(bias: np.ndarray, backend: str, tiling: Tiling) -> dict[str, np.ndarray]:
    leaves = [torch.tensor(a, dtype=torch.float32, requires_grad=True) for a in (X, W, bias)]
    targets = torch.full((T,), 8)
    found: Any = tiled_torch.tiled_linear_cross_entropy(
        leaves[0], leaves[1], targets, bias=leaves[2], loss=OPTIONS, tiling=tiling, backend=backend
    )
    values = {name: getattr(found, name) for name in UPSTREAM}
    total: Any = sum((torch.tensor(UPSTREAM[name]).float() * value).sum() for name, value in values.items())
    gradients = torch.autograd.grad(total, leaves)
    results = values | dict(zip(("dx", "dw", "db"), gradients, strict=True))
    return {name: a.detach().double().numpy() for name, a in results.items()}


def by_jax(bias: np.ndarray, backend: str, tiling: Tiling) -> dict[str, np.ndarray]:
    def total(x: Any, w: Any, b: Any) -> Any:
        targets = jnp.full((T,), 8)
        found: Any = tiled_jax.tiled_linear_cross_entropy(
            x, w.T, targets, bias=b, loss=OPTIONS, tiling=tiling, backend=backend
        )
        values = {name: getattr(found, name) for name in UPSTREAM}
        return sum(jnp.sum(jnp.float32(UPSTREAM[name]) * value) for name, value in values.items()), values

    operands = [jnp.asarray(a, jnp.float32) for a in (X, W, bias)]
    (_, values), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*operands)
    results = values | dict(zip(("dx", "dw", "db"), gradients, strict=True))
    return {name: np.asarray(a, np.float64) for name, a in results.items()}


# The interpreter computes with NumPy, which warns where a GPU just returns infinity.
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("masked", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("half", "backend", "shards"), WAYS)
def test_masked_entries(half: str, backend: str, shards: int, masked: list[int]) -> None:
    """The entropy and its gradients were NaN in PyTorch; where a whole shard of the vocabulary is masked, the loss too."""
    bias = B.copy()
    bias[masked] = -np.inf
    tiling = Tiling(num_shards=2, vocab_shards=shards)
    found = {"torch": by_torch, "jax": by_jax}[half](bias, backend, tiling)
    truth = expected([j for j in range(V) if j not in masked])
    for name, value in truth.items():
        if name == "entropy" and len(masked) == V - 1:
            assert np.abs(found[name]).max() <= MODEL_FLOAT32  # of one entry it is 0
        else:
            assert relative_error(found[name], value) <= limit(0.0, "float32"), name
