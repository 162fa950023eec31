"""The loss through its Pallas kernel: numbers in JAX's GPU interpreter, lowering for CUDA, and who may have it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreted_kernels

from shared_specs.config import LossOptions, Tiling
from shared_specs.core.rounding import DTYPES, relative_error, round_to
from shared_specs.errors import UnsupportedError
from shared_specs.kernels.blocks import Blocks
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.cases import LOSS_CASES, LossCase
from shared_specs.loss.oracle import linear_cross_entropy, log_sum_exp
from shared_specs.shards import ShardPlan
from shared_specs.tolerances import MODEL_FLOAT32, limit
from tests.adapters import ADAPTERS
from tests.asserting import assert_case, assert_within
from tests.kernels.jax_interpreted import FINDS_RACES, race_finder
from tests.mlp.jax_untiled import loss_operands
from tiled_jax import TiledLinearCrossEntropy, backends, tiled_linear_cross_entropy
from tiled_jax.core.mosaic import interpreter
from tiled_jax.loss import autodiff as loss_autodiff
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.api import choose_steps
from tiled_jax.loss.kernels import cross_entropy as kernel
from tiled_jax.loss.math import Part, Rules
from tiled_jax.loss.steps import XLA
from tiled_jax.loss.steps_kernels import KernelLossSteps

pytestmark = pytest.mark.usefixtures("clean")

Array = np.ndarray[Any, Any]
NAME = "tiled_linear_cross_entropy"
STEPS = KernelLossSteps(interpret=True)
OPTIONS = {
    "plain": LossOptions(),
    "smooth": LossOptions(label_smoothing=0.1, z_loss=1e-2),
    "bent": LossOptions(logit_softcap=3.0, logit_scale=-0.5, label_smoothing=0.2, ignore_index=7),
}


def draw(rows: int, vocab: int, dtype: str, ignore_index: int = -100) -> tuple[Array, Array]:
    """Logits, and targets of which every third is ignored and the last one is the last entry."""
    rng = np.random.default_rng(5)
    targets = rng.integers(8, vocab, rows)
    targets[::3], targets[-1] = ignore_index, vocab - 1
    return (4 * rng.standard_normal((rows, vocab))).astype(DTYPES[dtype]), targets


def truth(
    logits: Array, targets: Array, upstream: dict[str, Array], options: LossOptions, dtype: str, *, rounded: bool
) -> dict[str, Array]:
    """The oracle with the identity for x: its dweight is then the gradient of the logits."""
    compute = np.float32 if rounded else np.float64
    found = linear_cross_entropy(
        np.eye(len(logits), dtype=compute),
        logits.astype(compute),
        targets,
        {name: d.astype(compute) for name, d in upstream.items()},
        options=LossOptions(**{**vars(options), "reduction": "none", "outputs": ("lse", "entropy")}),
        rounding=round_to(dtype) if rounded else None,
    )
    return {**found, "dlogits": found["dweight"]}


def assert_true(found: dict[str, Any], exact: dict[str, Array], plain: dict[str, Array], dtype: str) -> None:
    __tracebackhide__ = True
    for name, value in found.items():
        of = dtype if name == "dlogits" else "float32"
        assert str(value.dtype) == of
        allowed = limit(relative_error(plain[name].astype(DTYPES[of]), exact[name]), of)
        assert_within(np.asarray(value), exact[name], allowed, f"{dtype} {name}")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_statistics_and_gradient(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V = 840 in blocks of 256 leaves 72, padded to 128. "bent" has two programs of three rows each."""
    resident = int(name == "bent")
    monkeypatch.setattr(kernel, "default_blocks", lambda *_: Blocks(rows=1, columns=256, resident=resident))
    options, vocab = OPTIONS[name], 840
    logits, targets = draw(6, vocab, dtype, options.ignore_index)
    rules, part = Rules(options=options, vocab=vocab), Part(0, None, None, None, vocab)
    labels = loss_math.make_labels(rules, jnp.asarray(targets, jnp.int32), None, jnp.float32)
    padded = loss_math.with_columns(jnp.asarray(logits), STEPS.columns(vocab))
    found, dlogits = jax.block_until_ready(STEPS.statistics_and_gradient(rules, padded, part, labels, vocab))
    assert not np.asarray(dlogits[:, vocab:]).any(), "padding has a gradient"
    values = loss_math.values(rules, labels, found, vocab)
    got = {"loss": values["loss"], "lse": values["lse"], "dlogits": dlogits[:, :vocab]}
    ones = {"loss": np.ones(6)}
    assert_true(got, *(truth(logits, targets, ones, options, dtype, rounded=r) for r in (False, True)), dtype)
    alone = jax.block_until_ready(STEPS.statistics(rules, padded, part, labels))
    for mine, other in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.deep
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "float32"])
def test_parts_of_the_vocabulary(dtype: str) -> None:
    """As two devices with 160 entries each have them, of which the last 20 are padding, for every upstream gradient."""
    vocab, local = 300, 160
    logits, targets = draw(7, vocab, dtype)
    rng = np.random.default_rng(6)
    class_weight = rng.uniform(0.5, 2.0, vocab)
    options = LossOptions(label_smoothing=0.2, z_loss=1e-2, logit_softcap=9.0, outputs=("entropy",))
    upstream = {name: rng.standard_normal(7) for name in ("loss", "lse", "log_probs", "entropy")}
    given = LossOptions(**{**vars(options), "class_weight": class_weight})
    exact, plain = (truth(logits, targets, upstream, given, dtype, rounded=r) for r in (False, True))

    rules = Rules(options=options, vocab=vocab, padded=True)
    weight, total = jnp.asarray(class_weight, jnp.float32), jnp.float32(class_weight.sum())
    labels = loss_math.make_labels(rules, jnp.asarray(targets, jnp.int32), weight, jnp.float32)
    behind = loss_math.with_columns(weight, 2 * local)
    parts = [Part(first, None, None, behind[first : first + local], local) for first in (0, local)]
    junk = np.concatenate([logits, np.full((7, 2 * local - vocab), 1e3, logits.dtype)], axis=1)  # logits of padding
    columns = STEPS.columns(local)
    of = [loss_math.with_columns(jnp.asarray(junk[:, first : first + local]), columns) for first in (0, local)]
    statistics = [
        jax.block_until_ready(STEPS.statistics(rules, a, part, labels)) for a, part in zip(of, parts, strict=True)
    ]
    found = loss_math.merge(rules, *statistics)
    values = loss_math.values(rules, labels, found, total)
    g = {name: jnp.asarray(d, jnp.float32) for name, d in upstream.items()}
    k = loss_math.coefficients(rules, labels, values["lse"], total, g)
    d = [
        jax.block_until_ready(STEPS.gradient(rules, a, part, labels, found, k, values["entropy"]))[:, :local]
        for a, part in zip(of, parts, strict=True)
    ]
    dlogits = jnp.concatenate(d, axis=1)
    assert not np.asarray(dlogits[:, vocab:]).any(), "padding has a gradient"
    got = {name: values[name] for name in ("loss", "lse", "entropy")} | {"dlogits": dlogits[:, :vocab]}
    assert_true(got, exact, plain, dtype)


def row_operands(rows: int) -> tuple[kernel.Columns, kernel.RowCoefficients]:
    ones = jnp.ones(rows, jnp.float32)
    return kernel.Columns(jnp.arange(rows, dtype=jnp.int32) * 127 % 128), kernel.RowCoefficients(ones, ones)


def test_equal_and_extreme_logits() -> None:
    """Where a sum of exponentials that is not relative to the largest logit overflows."""
    logits = np.full((2, 256), 1e4, np.float32)
    logits[1, :128] = -1e4
    options = {"blocks": Blocks(rows=1, columns=128), "options": LossOptions(), "interpret": interpreter()}
    found, dlogits = kernel.statistics_and_gradient(jnp.asarray(logits), *row_operands(2), **options)
    lse = found.top + jnp.log(found.total)
    np.testing.assert_array_equal(np.asarray(lse), log_sum_exp(logits.astype(np.float64)).astype(np.float32))
    assert np.isfinite(np.asarray(dlogits)).all()


@pytest.mark.deep
@pytest.mark.parametrize("weighted", [False, True])
def test_vmap(weighted: bool) -> None:
    """The rows of all examples in one launch; class weights that differ between examples in one launch each."""
    options = LossOptions(label_smoothing=0.1)
    columns, k = row_operands(2)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 2, 128)), jnp.float32)
    weights = jnp.asarray(rng.uniform(0.5, 2, (3, 128)), jnp.float32)

    def run(logits: jax.Array, weight: jax.Array) -> Any:
        given = columns._replace(weight=weight if weighted else None)
        of = k._replace(c=k.b / 128)
        return kernel.statistics_and_gradient(logits, given, of, options=options, interpret=interpreter())

    examples = [jax.block_until_ready(run(*pair)) for pair in zip(logits, weights, strict=True)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *examples)
    for mine, wanted in zip(jax.tree.leaves(jax.vmap(run)(logits, weights)), jax.tree.leaves(stacked), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(wanted))


@pytest.mark.skipif(not FINDS_RACES, reason="the interpreter of jax 0.10 knows few of the ways in which programs race")
@pytest.mark.parametrize(("raced", "resident"), [(False, 0), (True, 0), (False, 1), (True, 1)])
def test_races(raced: bool, resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program has a row of its own, or row after row; were it one row for all of them, it would be noticed."""
    if raced:
        monkeypatch.setattr(kernel.lax, "axis_index", lambda _: jnp.int32(0))
    options: dict[str, Any] = {"options": LossOptions(), "blocks": Blocks(rows=1, columns=128, resident=resident)}
    launch = partial(kernel.statistics_and_gradient, **options, interpret=race_finder())
    jax.block_until_ready(launch(jnp.ones((3, 128), jnp.bfloat16), *row_operands(3)))
    assert interpreted_kernels.get_races().races_found is raced


def test_columns_that_no_program_of_128_threads_can_share_are_refused() -> None:
    with pytest.raises(ValueError, match="V must be a multiple of 128, got 100"):
        kernel.statistics_and_gradient(jnp.zeros((2, 100)), *row_operands(2), options=LossOptions())


# Whole calls, under jit.

CASES = tuple(case for case in LOSS_CASES if case.dtype != "float64")


def is_fast(case: LossCase) -> bool:
    """One case of every way through the loops, in 16 bits alone before jax 0.11; the others take a minute together."""
    first = next(other for other in CASES if way_of(other) == way_of(case))
    return case is first and (case.dtype == "bfloat16" or (FINDS_RACES and bool(case.outputs)))


def way_of(case: LossCase) -> tuple[Any, ...]:
    return case.dtype, case.reduction == "none", case.vocab_shards is None, "entropy" in case.outputs


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=() if is_fast(case) else pytest.mark.slow) for case in CASES]
)
def test_case(case: LossCase, interpreting: None) -> None:
    loss_autodiff.run_compiled.clear_cache()  # cases of one program: what is found compiled says nothing of its backend
    backends.record_run(NAME, "nothing")
    assert_case(case, ADAPTERS["jax"].run_loss(case, "pallas"))
    assert backends.last_run(NAME) == "pallas"


@pytest.mark.deep
def test_second_order(interpreting: None) -> None:
    """The derivative of the kernel is that of the formulas: in forward, and with upstream gradients per token."""
    x, weight, targets = loss_operands(5, dtype=jnp.float32)

    def slope(reduction: Any, backend: str) -> Any:
        loss = LossOptions(reduction=reduction, label_smoothing=0.1, z_loss=1e-2)
        fn = partial(tiled_linear_cross_entropy, loss=loss, num_shards=1, backend=backend)
        first = jax.grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), argnums=(0, 1))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(g * g) for g in first(*a)), argnums=(0, 1)))

    for reduction in ("mean", "none"):
        found = [jax.device_get(slope(reduction, backend)(x, weight, targets)) for backend in ("pallas", "xla")]
        for mine, wanted in zip(*found, strict=True):
            assert_within(mine, wanted, MODEL_FLOAT32, reduction)


def test_a_wrong_target_is_nan_for_its_token_alone(interpreting: None) -> None:
    x, weight, targets = loss_operands(6, dtype=jnp.float32)
    fn = partial(tiled_linear_cross_entropy, loss=LossOptions(reduction="sum"), num_shards=1, backend="pallas")
    with jax.debug_nans(False):
        loss, dx = jax.jit(jax.value_and_grad(fn))(x, weight, targets.at[3].set(13))
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(dx).all(axis=1), np.arange(6) == 3)
    np.testing.assert_array_equal(np.isnan(dx).any(axis=1), np.arange(6) == 3)


def test_the_module_hands_its_backend_on(interpreting: None) -> None:
    x, weight, targets = loss_operands(4, dtype=jnp.float32)
    backends.record_run(NAME, "nothing")
    jax.make_jaxpr(TiledLinearCrossEntropy.from_weights(weight, backend="pallas"))(x, targets)
    assert backends.last_run(NAME) == "pallas"


# Who may have the kernel.

FLOAT64 = "The Pallas kernel cross_entropy takes bfloat16, float16, float32, found float64."


def test_float64_is_refused_by_name_alone(interpreting: None, x64: None) -> None:
    arguments = loss_operands(4)
    with pytest.raises(UnsupportedError) as caught:
        tiled_linear_cross_entropy(*arguments, backend="pallas")
    text = f"{NAME}: backend must be usable here, got 'pallas'. {FLOAT64} Pass backend=\"auto\"."
    assert str(caught.value) == text
    tiled_linear_cross_entropy(*arguments)
    assert backends.last_run(NAME) == "xla"


class Hopper:
    """As much of a jax.Device as the choice of a backend looks at."""

    platform, compute_capability, device_kind = "gpu", "9.0", "NVIDIA H200"


def test_auto_takes_the_kernel_on_a_hopper_and_never_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.INTERPRET, "1")
    assert choose_steps(NAME, "auto", jnp.bfloat16) == XLA
    assert choose_steps(NAME, "pallas", jnp.bfloat16) == KernelLossSteps(interpret=True)
    monkeypatch.delenv(backends.INTERPRET)
    assert choose_steps(NAME, "auto", jnp.bfloat16) == XLA
    monkeypatch.setattr(jax, "devices", lambda: [Hopper()])
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert choose_steps(NAME, "auto", dtype) == KernelLossSteps(interpret=False)
    assert choose_steps(NAME, "xla", jnp.bfloat16) == XLA
    assert choose_steps(NAME, "auto", jnp.float64) == XLA
    with pytest.raises(UnsupportedError, match="found float64"):
        choose_steps(NAME, "pallas", jnp.float64)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_memory_budget_has_room_for_what_the_kernel_adds(
    in_place: bool, interpreting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V = 200 becomes 256: one copy of the weight, wider logits, and their gradient where it cannot lie in their place."""
    monkeypatch.setattr("tiled_jax.loss.steps_kernels.takes_ref", lambda *_: in_place)
    plans: dict[str, ShardPlan] = {}
    arguments = loss_operands(400, hidden=16, vocab=200, dtype=jnp.float32)
    monkeypatch.setattr(
        "tiled_jax.loss.api.run",
        lambda call, *_: plans.update({call.steps.backend: call.plan}) or {"loss": jnp.zeros(())},
    )
    shape = loss_costs.LossShape(tokens=400, hidden=16, vocab=200)
    padded, copy = loss_costs.LossShape(tokens=400, hidden=16, vocab=256), 16 * 256 * 4
    budget = loss_costs.compiled_loss_peak_bytes(shape, ShardPlan(400, 100))
    for backend in ("xla", "pallas"):
        tiled_linear_cross_entropy(*arguments, tiling=Tiling(memory_budget=budget), backend=backend)
    assert plans["xla"] == ShardPlan(400, 100)
    t = plans["pallas"].shard_tokens
    needed = [
        loss_costs.compiled_loss_peak_bytes(padded, ShardPlan(400, t)) + copy + (0 if in_place else t * 256 * 4)
        for t in (t, t + 1)
    ]
    assert needed[0] <= budget < needed[1]
