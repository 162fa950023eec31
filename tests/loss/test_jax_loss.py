"""`tiled_linear_cross_entropy` under JAX's transformations, and its FLOP and bytes against shared_specs/costs.py."""

import importlib.util
from dataclasses import fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import MODEL_FLOAT32
from tests.adapters import ADAPTERS
from tests.asserting import assert_case, assert_within
from tests.core.jax_counting import flop, kept_bytes, temp_bytes
from tests.mlp.jax_untiled import cross_entropy, loss_operands
from tiled_jax import SpecError, backends, tiled_linear_cross_entropy

BARRIERS = jax.__version_info__ >= (0, 11)
needs_barriers = pytest.mark.skipif(not BARRIERS, reason="XLA's CPU compiler of jax 0.10 drops optimization barriers")

PER_TOKEN = LossOptions(reduction="none", label_smoothing=0.1, z_loss=1e-2, outputs=("log_probs", "lse", "entropy"))
MEAN = LossOptions(label_smoothing=0.1, z_loss=1e-2, logit_softcap=5.0, outputs=("accuracy",))


if importlib.util.find_spec("torch") is None:  # else test_both_loss.py runs every case in both halves

    @pytest.mark.parametrize("case", LOSS_CASES, ids=lambda case: case.id)
    def test_case(case: LossCase) -> None:
        assert_case(case, ADAPTERS["jax"].run_loss(case))


def scalar(fn: Any, **options: Any) -> Any:
    """One number from all of fn's results, for upstream gradients that differ from value to value."""

    def run(*arguments: Any) -> Any:
        return sum(jnp.sum(jnp.sin(a)) for a in jax.tree.leaves(fn(*arguments, **options)))

    return run


@pytest.mark.parametrize("loss", [MEAN, PER_TOKEN], ids=["mean", "none"])
def test_second_order(loss: LossOptions, same: Any) -> None:
    arguments = loss_operands(11)

    def slope(fn: Any) -> Any:
        first = jax.grad(scalar(fn, loss=loss), argnums=(0, 1))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(g * g) for g in first(*a)), argnums=(0, 1)))

    same(slope(partial(tiled_linear_cross_entropy, num_shards=3))(*arguments), slope(cross_entropy)(*arguments))


@pytest.mark.parametrize(("in_axes", "loss"), [((0, None, 0), MEAN), ((None, 0, None), PER_TOKEN)], ids=str)
def test_vmap(in_axes: tuple[int | None, ...], loss: LossOptions, same: Any) -> None:
    x, weight, targets = loss_operands(2, 11)
    arguments = [
        a if axis == 0 else a[0] for a, axis in zip((x, jnp.stack([weight, -weight]), targets), in_axes, strict=True)
    ]

    def mapped(fn: Any) -> Any:
        return jax.jit(jax.vmap(jax.value_and_grad(scalar(fn, loss=loss), argnums=(0, 1)), in_axes))

    same(mapped(partial(tiled_linear_cross_entropy, num_shards=3))(*arguments), mapped(cross_entropy)(*arguments))


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.checkpoint], ids=["", "checkpoint"])
def test_accumulation_in_a_scan_with_a_traced_count(wrap: Any, same: Any) -> None:
    """Micro-batches whose mean is over the labels of all of them; the count and the class weights are traced."""
    x, weight, targets = loss_operands(2, 11)
    class_weight = jnp.linspace(0.5, 2.0, 13)
    total = jnp.sum(jnp.where(targets != -100, class_weight[targets], 0))

    def accumulated(x: jax.Array, weight: jax.Array, class_weight: jax.Array, total: jax.Array) -> jax.Array:
        def one(x: jax.Array, targets: jax.Array) -> jax.Array:
            loss = LossOptions(class_weight=class_weight, num_valid=total)
            return tiled_linear_cross_entropy(x, weight, targets, loss=loss, num_shards=3)

        step = lambda sum, batch: (sum + wrap(one)(*batch), None)  # noqa: E731
        return lax.scan(step, jnp.zeros((), x.dtype), (x, targets))[0]

    value, gradients = jax.jit(jax.value_and_grad(accumulated, argnums=(0, 1, 2, 3)))(x, weight, class_weight, total)
    plain = partial(cross_entropy, loss=LossOptions(class_weight=class_weight))
    wanted = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(x, weight, targets)
    same((value, gradients[:2]), wanted)
    assert not any(np.asarray(d).any() for d in gradients[2:]), "options get no gradient"


@pytest.mark.deep
def test_without_jit_used_twice_and_scaled(same: Any) -> None:
    x, weight, targets = loss_operands(3, 7)

    def step(fn: Any) -> Any:
        def run(x: jax.Array, weight: jax.Array) -> jax.Array:
            first, second = fn(x, weight, targets), fn(jnp.sin(x), weight, targets)
            return 65536.0 * first * first - 3 * second + jnp.sum(x @ weight)

        return jax.value_and_grad(run, argnums=(0, 1))(x, weight)

    same(step(partial(tiled_linear_cross_entropy, num_shards=4)), step(cross_entropy))


def test_gradients_of_other_operands_first_change_nothing(same: Any) -> None:
    """JAX keeps what a rule saves by program; a checkpoint once got the structure of another gradient's trace."""
    arguments, fn = loss_operands(10), partial(tiled_linear_cross_entropy, num_shards=2)
    for argnums in (0, 1):
        jax.make_jaxpr(jax.grad(fn, argnums))(*arguments)
    gradient = jax.jit(jax.grad(jax.checkpoint(fn), (0, 1)))(*arguments)
    same(gradient, jax.jit(jax.grad(cross_entropy, (0, 1)))(*arguments))


def test_results_that_nobody_uses_and_the_accuracy_have_no_gradient(same: Any) -> None:
    x, weight, targets = loss_operands(9)
    loss = LossOptions(outputs=("lse", "accuracy"))

    @jax.jit
    def run(x: jax.Array, weight: jax.Array) -> Any:
        gradients = []
        for fn in (tiled_linear_cross_entropy, cross_entropy):
            _, pull = jax.vjp(lambda x, weight, fn=fn: fn(x, weight, targets, loss=loss).lse, x, weight)
            gradients.append(pull(jnp.arange(9.0)))
        accuracy = lambda x: tiled_linear_cross_entropy(x, weight, targets, loss=loss).accuracy  # noqa: E731
        return gradients, jax.grad(accuracy)(x)

    gradients, of_accuracy = run(x, weight)
    same(*gradients)
    same(of_accuracy, jnp.zeros_like(x))


@pytest.mark.parametrize(
    ("loss", "check_vma"), [(LossOptions(num_valid=12.0), True), (PER_TOKEN, False)], ids=["mean", "none"]
)
def test_tokens_over_devices(loss: LossOptions, check_vma: bool, same: Any) -> None:
    """Each device has its tokens and all of the weight; the mean is over the labels of all devices."""
    x, weight, targets = loss_operands(16)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    per_token = loss.reduction == "none"

    def on_device(*arguments: jax.Array) -> Any:
        result = tiled_linear_cross_entropy(*arguments, loss=loss, num_shards=2)
        return result if per_token else lax.psum(result, "data")

    specs, out = (P("data"), P(), P("data")), P("data") if per_token else P()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    gradients = [
        jax.jit(jax.value_and_grad(scalar(fn), argnums=(0, 1)))(x, weight, targets)
        for fn in (mapped, partial(cross_entropy, loss=loss))
    ]
    same(*gradients)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_wrong_target_under_jit_is_nan_for_its_token_alone(reduction: Any) -> None:
    x, weight, targets = loss_operands(12, dtype=jnp.float32)
    wrong = np.zeros(12, bool)
    wrong[[3, 7]] = True
    broken = targets.at[3].set(13).at[7].set(-2)
    loss = LossOptions(reduction=reduction, outputs=("log_probs", "accuracy"))

    @jax.jit
    def run(targets: jax.Array) -> Any:
        call = lambda x, weight: tiled_linear_cross_entropy(x, weight, targets, loss=loss, num_shards=4)  # noqa: E731
        result, pull = jax.vjp(call, x, weight)
        return result, pull(jax.tree.map(jnp.ones_like, result))

    with jax.debug_nans(False):
        result, (dx, dweight) = run(broken)
        clean, (dx_clean, _) = run(targets)
    np.testing.assert_array_equal(np.isnan(result.log_probs), wrong)
    np.testing.assert_array_equal(result.log_probs[~wrong], clean.log_probs[~wrong])
    np.testing.assert_array_equal(np.isnan(dx).all(axis=1), wrong)
    assert_within(np.asarray(dx)[~wrong], np.asarray(dx_clean)[~wrong], MODEL_FLOAT32, "dx of the other tokens")
    assert np.isnan(dweight).all()
    np.testing.assert_array_equal(np.isnan(result.loss), wrong if reduction == "none" else True)


def test_a_wrong_target_that_can_be_read_is_refused() -> None:
    x, weight, targets = loss_operands(12, dtype=jnp.float32)
    bad: Any
    for bad in (targets.at[5].set(13).at[9].set(-1), np.where(np.arange(12) == 5, 13, 0)):
        with pytest.raises(SpecError, match=r"targets must be in \[0, 13\) or ignore_index = -100, got 13\."):
            tiled_linear_cross_entropy(x, weight, bad)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_nan_and_infinity_stay_in_their_token(value: float) -> None:
    x, weight, targets = loss_operands(12, dtype=jnp.float32)
    tiled = jax.jit(partial(tiled_linear_cross_entropy, loss=PER_TOKEN, num_shards=4))
    with jax.debug_nans(False):
        broken, clean = (tiled(a, weight, targets) for a in (x.at[4, 2].set(value), x))
    for a, b in zip(jax.tree.leaves(broken), jax.tree.leaves(clean), strict=True):
        assert not np.isfinite(a[4])
        np.testing.assert_array_equal(np.delete(a, 4), np.delete(b, 4))


def test_float32_master_weights_beside_bfloat16() -> None:
    x, weight, targets = loss_operands(64, dtype=jnp.float32)
    fn = jax.jit(jax.value_and_grad(partial(tiled_linear_cross_entropy, num_shards=8), argnums=(0, 1)))
    value, (dx, dweight) = fn(x.astype(jnp.bfloat16), weight, targets)
    assert (value.dtype, dx.dtype, dweight.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    same_value, (_, rounded) = fn(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), targets)
    assert value == same_value
    np.testing.assert_array_equal(np.asarray(dweight.astype(jnp.bfloat16)), np.asarray(rounded))
    assert np.asarray(dweight != rounded.astype(jnp.float32)).any(), "the master's gradient was rounded on its way"


def test_flax_parameters_and_numpy_arrays_are_taken(same: Any) -> None:
    x, weight, targets = loss_operands(7)
    expected = cross_entropy(x, weight, targets)
    param: Any = nnx.Param(weight)
    same(tiled_linear_cross_entropy(x, param, targets), expected)
    arrays: list[Any] = [np.asarray(a) for a in (x, weight, targets)]
    same(tiled_linear_cross_entropy(*arrays), expected)
    options = LossOptions(num_valid=np.int64(5), class_weight=np.ones(13))
    same(tiled_linear_cross_entropy(x, weight, targets, loss=options), expected)
    with pytest.raises(TypeError, match=r"loss\.num_valid must be a number or a 0-d array, got str\.$"):
        tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(num_valid="5"))


def test_every_way_to_say_the_plan_gives_the_same_result(same: Any) -> None:
    arguments = loss_operands(40)
    expected = cross_entropy(*arguments)
    for tiling in (
        Tiling(num_shards=3),
        Tiling(shard_tokens=7, vocab_shards=20),
        Tiling(memory_budget=10_000),
        Tiling(),
    ):
        same(jax.jit(partial(tiled_linear_cross_entropy, tiling=tiling))(*arguments), expected)


def test_the_backend_that_ran_is_recorded() -> None:
    backends.record_run("tiled_linear_cross_entropy", "nothing")
    jax.make_jaxpr(partial(tiled_linear_cross_entropy, backend="xla"))(*loss_operands(7, dtype=jnp.float32))
    assert backends.last_run("tiled_linear_cross_entropy") == "xla"


# FLOP and bytes, counted. Nothing below is timed or executed.

LOSSES = {
    "mean": ({}, {}),
    "sum": ({"reduction": "sum", "outputs": ("accuracy",)}, {}),
    "none": ({"reduction": "none"}, {}),
    "outputs": ({"outputs": ("entropy",)}, {}),
    "parts": ({}, {"vocab_shards": 3}),
}


def shapes(
    tokens: int, hidden: int = 8, vocab: int = 15, dtype: Any = "float32", weight_dtype: Any = None
) -> list[Any]:
    x, weight = (tokens, hidden), (hidden, vocab)
    operands = [jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(weight, weight_dtype or dtype)]
    return [*operands, jax.ShapeDtypeStruct((tokens,), jnp.int32)]


def calls(kind: str, shard_tokens: int) -> tuple[LossOptions, Any]:
    given, cut = LOSSES[kind]
    loss = LossOptions(**given)
    return loss, partial(tiled_linear_cross_entropy, loss=loss, tiling=Tiling(shard_tokens=shard_tokens, **cut))


@pytest.mark.parametrize("tokens", [64, 70, 32, 16], ids=["equal", "ragged", "two", "one"])
@pytest.mark.parametrize("kind", LOSSES)
def test_flop(kind: str, tokens: int) -> None:
    """6 THV where forward can compute the gradients, else 8; 2 without gradients; frozen operands cost nothing."""
    loss, fn = calls(kind, 16)
    shape = loss_costs.LossShape(tokens=tokens, hidden=8, vocab=15, vocab_shards=LOSSES[kind][1].get("vocab_shards", 1))
    count = partial(loss_costs.loss_flop, shape, gradients_in_forward=loss.gradients_in_forward)
    arguments, total = shapes(tokens), scalar(fn)
    thv = 2 * tokens * 8 * 15
    in_forward = kind in ("mean", "sum")
    assert flop(total, *arguments) == thv
    assert flop(jax.grad(total, argnums=(0, 1)), *arguments) == count() == (3 if in_forward else 4) * thv
    assert flop(jax.grad(total, argnums=0), *arguments) == count(dweight=False) == (2 if in_forward else 3) * thv
    assert flop(jax.grad(total, argnums=1), *arguments) == count(dx=False)
    # A replay computes the logits, for the gradients or for their statistics, once more.
    replayed = jax.grad(scalar(jax.checkpoint(fn)), argnums=(0, 1))
    assert flop(replayed, *arguments) == (4 if in_forward else 5) * thv


def test_flop_of_the_plain_loss_show_that_the_meter_counts() -> None:
    assert flop(jax.grad(scalar(cross_entropy), argnums=(0, 1)), *shapes(64)) == 3 * 2 * 64 * 8 * 15


def test_kept_bytes() -> None:
    """The gradients, dweight in float32, where forward computes them; else two or three numbers per token."""
    x, weight, targets = loss_operands(70, dtype=jnp.bfloat16)
    kept = {}
    for kind in ("mean", "none", "outputs"):
        fn = calls(kind, 16)[1]
        kept[kind] = kept_bytes(lambda x, weight, fn=fn: jax.tree.leaves(fn(x, weight, targets))[0], x, weight)
    kept = {kind: value - targets.nbytes for kind, value in kept.items()}
    gradients, mean = x.nbytes + weight.size * 4, 4
    assert kept["mean"] + targets.nbytes == gradients + mean
    assert kept["none"] == 2 * 70 * 4
    assert kept["outputs"] == 3 * 70 * 4 + mean


H, V = 128, 4096


@cache
def temp(tokens: int, shard_tokens: int, vocab_shards: int = 1, dtype: str = "float32", **given: Any) -> int:
    """Temporary bytes of the loss and its gradients."""
    weight_dtype = given.pop("weight_dtype", dtype)
    tiling = Tiling(shard_tokens=shard_tokens, vocab_shards=vocab_shards)
    total = scalar(partial(tiled_linear_cross_entropy, loss=LossOptions(**given), tiling=tiling))
    return temp_bytes(jax.value_and_grad(total, argnums=(0, 1)), *shapes(tokens, H, V, dtype, weight_dtype))


CALLS: list[Any] = [
    {},
    {"reduction": "none"},
    {"label_smoothing": 0.1, "z_loss": 1e-3},
    {"logit_scale": 0.5},
    {"logit_softcap": 5.0},
    {"logit_softcap": 5.0, "outputs": ("lse", "entropy")},
    {"vocab_shards": 3},
    {"shard_tokens": 64},
    {"tokens": 4000},
    {"tokens": 1024},
    {"tokens": 512},
    pytest.param({"tokens": 1000}, marks=needs_barriers),
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "weight_dtype": "float32", "reduction": "none"},
    {"dtype": "float16", "vocab_shards": 4},
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(f"{k}={v}" for k, v in call.items()) or "base")
def test_temp_bytes_are_within_the_formula(call: dict[str, Any]) -> None:
    given: dict[str, Any] = {"tokens": 4096, "shard_tokens": 512} | call
    dtype = given.get("dtype", "float32")
    options = {field.name: given[field.name] for field in fields(LossOptions) if field.name in given}
    shape = loss_costs.LossShape.of(
        LossOptions(**options),
        tokens=given["tokens"],
        hidden=H,
        vocab=V,
        vocab_shards=given.get("vocab_shards", 1),
        itemsize=jnp.dtype(dtype).itemsize,
        weight_itemsize=jnp.dtype(given.get("weight_dtype", dtype)).itemsize,
    )
    assert temp(**given) <= loss_costs.compiled_loss_peak_bytes(
        shape, ShardPlan(given["tokens"], given["shard_tokens"])
    )


def test_temp_bytes_are_one_shard_of_logits_and_one_product() -> None:
    """No second [t, V]: the gradient of the logits is written over them. The plain loss needs all of them."""
    logits, product, rows = 512 * V * 4, H * V * 4, 3 * 512 * H * 4
    assert temp(4096, 512) <= logits + product + rows
    plain = temp_bytes(jax.value_and_grad(cross_entropy, argnums=(0, 1)), *shapes(4096, H, V))
    assert plain >= 4096 * V * 4


@pytest.mark.parametrize("given", [{}, {"reduction": "none"}, {"vocab_shards": 3}], ids=str)
def test_temp_bytes_do_not_grow_with_tokens_but_for_numbers_per_token(given: dict[str, Any]) -> None:
    assert 0 <= temp(8192, 512, **given) - temp(4096, 512, **given) <= 4096 * 10 * 4


def test_temp_bytes_of_evaluation_are_one_shard_of_logits() -> None:
    fn = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=512))
    assert temp_bytes(fn, *shapes(4096, H, V)) <= 512 * V * 4 + 2 * 512 * H * 4


@pytest.mark.parametrize("budget", [4 * 2**20, 16 * 2**20])
def test_a_memory_budget_is_kept_and_used(budget: int) -> None:
    fn = partial(tiled_linear_cross_entropy, tiling=Tiling(memory_budget=budget))
    used = temp_bytes(jax.value_and_grad(fn, argnums=(0, 1)), *shapes(8192, H, V))
    assert budget / 2 < used <= budget
