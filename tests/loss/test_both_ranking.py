"""Predictions and top log-probabilities: those of whole logits, at the cost of the loss alone."""

from functools import partial
from typing import Any, NamedTuple

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
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.oracle import linear_cross_entropy
from shared_specs.shards import plan_tokens
from shared_specs.tolerances import COST_BYTES, limit
from tests.core.jax_counting import flop, temp_bytes
from tests.core.torch_counting import GemmFlop, LiveBytes

B, S, H, V, K = 2, 7, 6, 19, 4
OUTPUTS: Any = ("top_logprobs", "prediction")
DRAW = np.random.default_rng(0)
X, W, BIAS = DRAW.standard_normal((B, S, H)), DRAW.standard_normal((V, H)), DRAW.standard_normal(V)
TARGETS = DRAW.integers(0, V, (B, S))
TARGETS[:, :3] = -100


class Found(NamedTuple):
    prediction: Any
    values: Any
    indices: Any
    dx: Any
    dw: Any


def by_torch(x: Any, w: Any, bias: Any, backend: str = "eager", **options: Any) -> Found:
    loss, tiling = options["loss"], options["tiling"]
    leaves = [torch.tensor(a, requires_grad=True) for a in (x, w)]
    found: Any = tiled_torch.tiled_linear_cross_entropy(
        *leaves, torch.tensor(TARGETS), bias=torch.tensor(bias), loss=loss, tiling=tiling, backend=backend
    )
    found.loss.sum().backward()
    for a in (found.prediction, found.top_logprobs.indices):
        assert a.dtype == torch.int64
    assert not found.top_logprobs.values.requires_grad
    return Found(*(a.numpy() for a in (found.prediction, *found.top_logprobs, *(leaf.grad for leaf in leaves))))


def by_jax(x: Any, w: Any, bias: Any, **options: Any) -> Found:
    loss, tiling = options["loss"], options["tiling"]

    def run(x: Any, w: Any) -> Any:
        found = tiled_jax.tiled_linear_cross_entropy(
            x, w.T, jnp.asarray(TARGETS, jnp.int32), bias=jnp.asarray(bias), loss=loss, tiling=tiling
        )
        # The gradient of what has none is zero.
        return jnp.sum(found.loss) + jnp.sum(found.top_logprobs.values), found

    gradients, found = jax.jit(jax.grad(run, (0, 1), has_aux=True))(jnp.asarray(x), jnp.asarray(w))
    for a in (found.prediction, found.top_logprobs.indices):
        assert a.dtype == jnp.int32
    return Found(*map(np.asarray, (found.prediction, *found.top_logprobs, *gradients)))


def of_logits(x: Any, w: Any, bias: Any, loss: LossOptions) -> Found:
    """By sorting whole logits in float64."""
    shape = x.shape[:-1]
    given = [np.asarray(a, np.float64) for a in (x.reshape(-1, H), w.T)]
    upstream = {"loss": np.ones(shape).reshape(-1) if loss.reduction == "none" else np.array(1.0)}
    found = linear_cross_entropy(*given, TARGETS.reshape(-1), upstream, bias=np.asarray(bias, np.float64), options=loss)
    names = ("prediction", "top_logprobs", "top_indices", "dx")
    return Found(*(found[name].reshape(*shape, *found[name].shape[1:]) for name in names), found["dweight"].T)


HALVES: dict[str, Any] = {"torch": by_torch, "triton": partial(by_torch, backend="triton"), "jax": by_jax}
PLAIN = LossOptions(outputs=OUTPUTS, top_k=K)
OPTIONS = {
    "mean": PLAIN,
    "bent": LossOptions(outputs=(*OUTPUTS, "entropy"), top_k=K, logit_softcap=3.0, logit_scale=-0.7, z_loss=1e-2),
    "none": LossOptions(outputs=(*OUTPUTS, "lse"), top_k=V, reduction="none", logit_scale=0.5),
}
TILINGS = {1: Tiling(num_shards=3), 8: Tiling(num_shards=4, vocab_shards=8)}  # of 8 parts each has fewer entries than K

WAYS = [("torch", name, parts) for name in OPTIONS for parts in TILINGS]
WAYS += [("triton", "bent", 1), ("jax", "mean", 1), ("jax", "bent", 8), ("triton", "mean", 8)]


@pytest.mark.usefixtures("x64")
@pytest.mark.deep_but(len(WAYS) - 1)
@pytest.mark.parametrize(("half", "name", "parts"), WAYS)
def test_they_are_those_of_whole_logits(half: str, name: str, parts: int) -> None:
    """Also where the label is ignored; and the loss has its gradients, which these add nothing to."""
    dtype = "float32" if half == "triton" or name == "mean" else "float64"
    x, w, bias = (a.astype(dtype) for a in (X, W, BIAS))
    loss, truth = OPTIONS[name], of_logits(X, W, BIAS, OPTIONS[name])
    found = HALVES[half](x, w, bias, loss=loss, tiling=TILINGS[parts])
    np.testing.assert_array_equal(found.prediction, truth.prediction)
    np.testing.assert_array_equal(found.indices, truth.indices)
    assert found.values.dtype == dtype
    for name in ("values", "dx", "dw"):
        assert relative_error(getattr(found, name), getattr(truth, name)) <= limit(0.0, dtype), name


@pytest.mark.parametrize(("half", "parts"), [("torch", 1), ("torch", 8), ("triton", 1), ("jax", 8)])
def test_ties_and_entries_that_cannot_be(half: str, parts: int) -> None:
    """Small integers, which every dtype adds exactly: many logits are equal. Every second entry is masked by -inf."""
    x, w = (np.rint(a).astype("float32") for a in (X, W))
    bias = np.where(np.arange(V) % 2 == 0, -np.inf, 0).astype("float32")
    loss = LossOptions(outputs=OUTPUTS, top_k=12)
    targets, TARGETS[:] = TARGETS.copy(), np.where(TARGETS < 0, TARGETS, TARGETS | 1)
    try:
        with np.errstate(all="ignore"):
            truth, found = of_logits(x, w, bias, loss), HALVES[half](x, w, bias, loss=loss, tiling=TILINGS[parts])
    finally:
        TARGETS[:] = targets
    np.testing.assert_array_equal(found.prediction, truth.prediction)
    np.testing.assert_array_equal(found.indices[..., 0], truth.prediction)
    assert (found.values[..., 9:] == -np.inf).all()
    assert relative_error(found.values[..., :9], truth.values[..., :9]) <= limit(0.0, "float32")
    np.testing.assert_array_equal(
        found.indices[..., :9], truth.indices[..., :9]
    )  # nine are possible, so none is cut off
    assert ((found.indices >= 0) & (found.indices < V)).all()
    assert all(len({*row}) == 12 for row in found.indices.reshape(-1, 12))
    if half == "jax":
        np.testing.assert_array_equal(found.indices, truth.indices)


# PyTorch's first forward-mode derivative scripts formulas of its own.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_dual_tensors_have_them_too() -> None:
    x, w, bias = (torch.tensor(a) for a in (X, W, BIAS))
    truth = of_logits(X, W, BIAS, OPTIONS["bent"])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found: Any = tiled_torch.tiled_linear_cross_entropy(
            dual, w, torch.tensor(TARGETS), bias=bias, loss=OPTIONS["bent"], num_shards=3
        )
        assert torch.autograd.forward_ad.unpack_dual(found.entropy).tangent is not None
        values = torch.autograd.forward_ad.unpack_dual(found.top_logprobs.values)
        assert values.tangent is None
        assert relative_error(values.primal.numpy(), truth.values) <= limit(0.0, "float64")
    np.testing.assert_array_equal(found.prediction, truth.prediction)
    np.testing.assert_array_equal(found.top_logprobs.indices, truth.indices)


SHAPE = loss_costs.LossShape.of(PLAIN, tokens=512, hidden=32, vocab=8192)


@pytest.mark.parametrize("asked", [OUTPUTS, ("prediction",)], ids=str)
def test_torch_makes_no_product_and_no_second_shard_of_logits(asked: Any) -> None:
    x, w = (torch.randn(n, 32, requires_grad=True) for n in (512, 8192))
    loss = LossOptions(outputs=asked, top_k=20 if "top_logprobs" in asked else None)
    with GemmFlop() as counter, LiveBytes() as live:
        found: Any = tiled_torch.tiled_linear_cross_entropy(
            x, w, torch.randint(8192, (512,)), loss=loss, tiling=Tiling(shard_tokens=128)
        )
        found.loss.backward()
    assert counter.flop == loss_costs.loss_flop(SHAPE, gradients_in_forward=True)
    results = sum(a.numel() * a.itemsize for a in (x, w, found.prediction, *(found.top_logprobs or ())))
    peak = loss_costs.loss_peak_bytes(SHAPE, plan_tokens(512, shard_tokens=128))
    assert live.peak - results <= (1 + COST_BYTES) * peak


@pytest.mark.parametrize("vocab_shards", [1, 3])
def test_jax_makes_no_product_and_no_second_shard_of_logits(vocab_shards: int) -> None:
    tiling = Tiling(shard_tokens=128, vocab_shards=vocab_shards)
    x, w, targets = (jax.ShapeDtypeStruct(a, d) for a, d in (((512, 32), "f4"), ((32, 8192), "f4"), ((512,), "i4")))

    def program(loss: LossOptions) -> Any:
        def total(x: Any, w: Any, targets: Any) -> Any:
            found: Any = tiled_jax.tiled_linear_cross_entropy(x, w, targets, loss=loss, tiling=tiling)
            return (found.loss, found) if loss.outputs else (found, ())

        return jax.value_and_grad(total, (0, 1), has_aux=True)

    plain, ranked = (program(loss) for loss in (LossOptions(), LossOptions(outputs=OUTPUTS, top_k=20)))
    assert flop(ranked, x, w, targets) == flop(plain, x, w, targets)
    beside = 512 * 20 * 8 + 4 * 128 * 40 * 8  # the results; candidates of one shard, sorted
    assert temp_bytes(ranked, x, w, targets) <= temp_bytes(plain, x, w, targets) + beside
