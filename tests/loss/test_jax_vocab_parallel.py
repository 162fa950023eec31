"""The loss over a vocabulary split over 1, 2, 4 and 8 virtual devices, equal to one device in float64."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, LossResult, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.core.jax_counting import collectives, temp_bytes
from tests.mlp.jax_untiled import cross_entropy
from tests.plans.jax_parallel_models import quickly
from tiled_jax import (
    SpecError,
    tiled_linear_cross_entropy,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from tiled_jax.core.products import wide

pytestmark = pytest.mark.ranks

T, H, V, ROWS = 22, 6, 21, 24  # three padding entries where devices share 24
OUTPUTS = ("log_probs", "lse", "entropy", "accuracy")
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-2, "logit_softcap": 7.0, "logit_scale": 0.7}
Operands = dict[str, Any]


def mesh_of(data: int, tensor: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    assert jax.device_count() == 8, "tests/conftest.py asks for eight virtual devices"
    devices = np.asarray(jax.devices()[: data * tensor]).reshape(data, tensor)
    return jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=(kind,) * 2)


def make(rows: int = ROWS, *, dtype: Any = None, bias: bool = False) -> tuple[Operands, jax.Array, jax.Array]:
    """x [T, H], weight [H, rows] and bias [rows]; targets below V, every fifth ignored; class weights [V]."""
    rng = np.random.default_rng(0)
    values = {"x": rng.standard_normal((T, H)), "weight": rng.standard_normal((H, rows))}
    values |= {"bias": rng.standard_normal(rows)} if bias else {}
    operands = {name: jnp.asarray(value, dtype or jnp.float64) for name, value in values.items()}
    targets = jnp.asarray(np.where(np.arange(T) % 5 == 1, -100, rng.integers(0, V, T)), jnp.int32)
    return operands, targets, jnp.asarray(rng.uniform(0.25, 2.0, V))


def results_and_gradients(fn: Any) -> Any:
    """fn(operands, targets) and the gradients of its operands, for upstream gradients that differ from value to value."""

    def run(operands: Operands, targets: jax.Array) -> Any:
        result, pull = jax.vjp(lambda operands: fn(operands, targets), operands)
        upstream = jax.tree.map(lambda a: jnp.cos(a) if a.ndim else jnp.ones_like(a) * 3, result)
        return result, pull(upstream)[0]

    return jax.jit(run)


def whole(loss: LossOptions, **options: Any) -> Any:
    """The loss on one device: padding is cut off."""

    def fn(operands: Operands, targets: jax.Array) -> Any:
        weight, bias = operands["weight"][:, :V], operands["bias"][:V] if "bias" in operands else None
        return tiled_linear_cross_entropy(operands["x"], weight, targets, bias=bias, loss=loss, **options)

    return results_and_gradients(fn)


def split(
    mesh: jax.sharding.Mesh, loss: LossOptions, *, check_vma: bool, vocab_size: int | None = V, **options: Any
) -> Any:
    """The loss over the mesh: tokens over `data`, the vocabulary over `tensor`; sums are taken over `data`."""

    def on_device(operands: Operands, targets: jax.Array) -> Any:
        result = vocab_parallel_linear_cross_entropy(
            **operands, targets=targets, loss=loss, vocab_size=vocab_size, axis_name="tensor", **options
        )
        return jax.tree.map(lambda a: a if a.ndim else lax.psum(a, "data"), result)

    per_token, total = P("data"), P()
    of_loss = per_token if loss.reduction == "none" else total
    kinds = {"loss": of_loss, "accuracy": of_loss, "log_probs": per_token, "lse": per_token, "entropy": per_token}
    out = LossResult(**{name: kinds[name] for name in ("loss", *loss.outputs)}) if loss.outputs else of_loss
    specs = {"x": P("data", None), "weight": P(None, "tensor"), "bias": P("tensor")}

    def fn(operands: Operands, targets: jax.Array) -> Any:
        in_specs = {name: specs[name] for name in operands}, per_token
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out, check_vma=check_vma)
        return mapped(operands, targets)

    return results_and_gradients(fn)


def assert_equal(actual: Any, expected: Any) -> None:
    found, wanted = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, jax.tree_util.keystr(path))


CASES = {
    "mean": ({"num_valid": 18.0}, {}),
    "everything, sum": ({**EVERYTHING, "reduction": "sum", "outputs": OUTPUTS}, {"num_shards": 3}),
    "everything, none, parts": (
        {**EVERYTHING, "reduction": "none", "outputs": OUTPUTS},
        {"tiling": Tiling(shard_tokens=4, vocab_shards=2)},
    ),
    "smoothing in forward": ({"label_smoothing": 0.1, "reduction": "sum", "outputs": ("accuracy",)}, {"num_shards": 3}),
}
# (devices that share the tokens, devices that share the vocabulary, check_vma)
MESHES = {
    "mean": [(1, 2, True), (2, 2, False)],
    "everything, sum": [(1, 8, True), (2, 4, False)],
    "everything, none, parts": [(2, 4, True), (1, 2, False)],
    "smoothing in forward": [(2, 4, True)],
}


@cache
def expected(case: str) -> Any:
    given, options = CASES[case]
    operands, targets, class_weight = make(bias="everything" in case)
    loss = LossOptions(**given, class_weight=class_weight if "everything" in case else None)
    return operands, targets, loss, whole(loss, **options)(operands, targets)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("case", "devices"), [(case, devices) for case in CASES for devices in MESHES[case]], ids=str)
def test_one_device_and_many_agree(case: str, devices: tuple[int, int, bool], x64: None) -> None:
    operands, targets, loss, wanted = expected(case)
    data, tensor, check_vma = devices
    fn = split(mesh_of(data, tensor), loss, check_vma=check_vma, **CASES[case][1])
    actual = quickly(fn, operands, targets)
    assert_equal(actual, wanted)
    assert not np.asarray(actual[1]["weight"][:, V:]).any(), "padding has a gradient"


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none", "outputs": ("log_probs",)}], ids=str)
def test_weights_of_tokens(options: Any, x64: None) -> None:
    """As on one device, where they multiply the losses alone."""
    operands, targets, _ = make(bias=True)
    loss, weights = LossOptions(**options), jnp.asarray(np.random.default_rng(5).standard_normal(T))
    wanted = whole(loss, token_weight=weights)(operands, targets)

    def on_device(operands: Operands, targets: jax.Array, weights: jax.Array) -> Any:
        result = vocab_parallel_linear_cross_entropy(
            **operands, targets=targets, loss=loss, vocab_size=V, axis_name="tensor", num_shards=3, token_weight=weights
        )
        return jax.tree.map(lambda a: a if a.ndim else lax.psum(a, "data"), result)

    of_tokens = P("data")
    kinds = {"loss": of_tokens, "log_probs": of_tokens}
    out = LossResult(**kinds) if loss.outputs else P()
    specs = {"x": P("data", None), "weight": P(None, "tensor"), "bias": P("tensor")}, of_tokens, of_tokens
    mapped = jax.shard_map(on_device, mesh=mesh_of(2, 4), in_specs=specs, out_specs=out)
    found = results_and_gradients(lambda operands, targets: mapped(operands, targets, weights))(operands, targets)
    assert_equal(found, wanted)


def test_without_padding_on_an_explicit_mesh(x64: None) -> None:
    """Every entry counts where vocab_size is left out."""
    mesh, (operands, targets, _) = mesh_of(2, 4, AxisType.Explicit), make(V + 3)
    loss = LossOptions(num_valid=18)
    wanted = results_and_gradients(lambda o, t: tiled_linear_cross_entropy(o["x"], o["weight"], t, loss=loss))
    specs = {"x": P("data", None), "weight": P(None, "tensor")}
    placed = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in operands.items()}
    with jax.set_mesh(mesh):
        labels = jax.device_put(targets, NamedSharding(mesh, P("data")))
        actual = split(mesh, loss, check_vma=True, vocab_size=None)(placed, labels)
    assert_equal(actual, wanted(operands, targets))


def test_operands_that_vary_by_type_alone(x64: None) -> None:
    """x and targets may come typed as differing along the axis, as after a gather, though they are the same."""
    mesh, (operands, targets, _) = mesh_of(1, 4), make()
    loss = LossOptions(reduction="none", outputs=("entropy",))

    def on_device(operands: Operands, targets: jax.Array) -> Any:
        x, targets = (lax.pcast(a, "tensor", to="varying") for a in (operands["x"], targets))
        result = vocab_parallel_linear_cross_entropy(
            x, operands["weight"], targets, loss=loss, vocab_size=V, axis_name="tensor"
        )
        return jax.tree.map(lambda a: lax.pmean(a, "tensor"), result)

    specs = {"x": P(), "weight": P(None, "tensor")}, P()
    actual = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P())
    assert_equal(results_and_gradients(actual)(operands, targets), whole(loss)(operands, targets))


def test_gradients_taken_inside_and_a_checkpoint(x64: None) -> None:
    """What a training step does that is mapped as a whole: of replicated x the gradient is there on every device."""
    mesh, (operands, targets, _) = mesh_of(1, 4), make()

    def step(operands: Operands, targets: jax.Array) -> Any:
        def loss(operands: Operands) -> jax.Array:
            call = partial(vocab_parallel_linear_cross_entropy, vocab_size=V, axis_name="tensor", num_shards=3)
            return 3 * jax.checkpoint(call)(operands["x"], operands["weight"], targets)

        return jax.value_and_grad(loss)(operands)

    specs = {"x": P(), "weight": P(None, "tensor")}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs)))
    loss, gradients = mapped(operands, targets)
    wanted, of = whole(LossOptions())(operands, targets)
    assert_equal((loss, gradients), (3 * wanted, of))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_maximum_and_a_sum_for_each_shard_and_one_sum_of_dx(reduction: Any) -> None:
    """22 tokens in four shards: the last, shorter one in a loop of at most one turn, the others in another loop."""
    operands, targets, _ = make(dtype=jnp.float32)
    fn = split(mesh_of(1, 4), LossOptions(reduction=reduction, label_smoothing=0.1), check_vma=True, num_shards=4)
    # dx, dweight over `data`, and with a mean the loss over `data`.
    outside = {"mean": 3, "none": 2}[reduction]
    assert collectives(fn, operands, targets) == {False: outside, True: 2}


def test_no_device_holds_the_logits_of_its_entries() -> None:
    tokens, rows = 4096, 8192
    shapes = (tokens, 64), (64, rows)
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def step(num_shards: int) -> Any:
        return split(mesh_of(1, 4), LossOptions(), check_vma=True, vocab_size=None, num_shards=num_shards)

    logits = tokens * rows // 4 * 4
    untiled, tiled = (temp_bytes(step(n), {"x": x, "weight": weight}, targets) for n in (1, 32))
    assert untiled >= logits
    assert tiled < logits / 4


def plain(logits: jax.Array, target: jax.Array, smoothing: float) -> jax.Array:
    log_p = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    return (1 - smoothing) * nll - smoothing * jnp.mean(log_p, axis=-1)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("devices", "smoothing"), [((1, 1, True), 0.0), ((2, 4, True), 0.1), ((1, 8, True), 0.0), ((2, 2, False), 0.1)]
)
def test_given_logits(devices: tuple[int, int, bool], smoothing: float, x64: None) -> None:
    data, tensor, check_vma = devices
    rng = np.random.default_rng(0)
    logits, target = jnp.asarray(rng.standard_normal((4, 6, ROWS)) * 5), jnp.asarray(rng.integers(0, V, (4, 6)))
    mapped = jax.shard_map(
        lambda logits, target: vocab_parallel_cross_entropy(
            logits, target, smoothing, vocab_size=V, axis_name="tensor"
        ),
        mesh=mesh_of(data, tensor),
        in_specs=(P("data", None, "tensor"), P("data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    actual = quickly(results_and_gradients(lambda o, t: mapped(o["logits"], t)), {"logits": logits}, target)
    wanted = results_and_gradients(lambda o, t: plain(o["logits"][..., :V], t, smoothing))({"logits": logits}, target)
    assert_equal(actual, wanted)


@cache
def in_bfloat16() -> tuple[Any, ...]:
    """The losses of operands, fused and of given logits, and what one device makes of them untiled, and in float64."""
    operands, targets, _ = make(dtype=jnp.bfloat16, bias=True)
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((T, ROWS)) * 5, jnp.bfloat16)
    given = operands | {"logits": logits}
    loss = LossOptions(reduction="none", label_smoothing=0.1)

    def untiled(given: Operands, targets: jax.Array) -> Any:
        fused = cross_entropy(given["x"], given["weight"][:, :V], targets, given["bias"][:V], loss=loss)
        losses = plain(given["logits"][:, :V].astype(fused.dtype), jnp.where(targets < 0, 0, targets), 0.1)
        return fused.astype(wide(fused.dtype)), jnp.where(targets < 0, 0, losses).astype(wide(fused.dtype))

    on_one = results_and_gradients(untiled)
    baseline = on_one(given, targets)
    with jax.enable_x64(True):
        truth = on_one({name: jnp.asarray(np.asarray(a, np.float64)) for name, a in given.items()}, targets)
    return loss, given, targets, baseline, truth


@pytest.mark.deep
@pytest.mark.parametrize("devices", [pytest.param((1, 1), marks=pytest.mark.slow), (1, 2), (2, 4), (1, 8)], ids=str)
def test_in_bfloat16(devices: tuple[int, int]) -> None:
    """22 tokens; of two devices of `data` each has 11."""
    loss, given, targets, baseline, truth = in_bfloat16()

    def on_device(given: Operands, targets: jax.Array) -> Any:
        operands = {name: given[name] for name in ("x", "weight", "bias")}
        split: Any = dict(vocab_size=V, axis_name="tensor")
        fused = vocab_parallel_linear_cross_entropy(**operands, targets=targets, loss=loss, num_shards=3, **split)
        return fused, vocab_parallel_cross_entropy(given["logits"], targets, 0.1, **split)

    specs = {"x": P("data", None), "weight": P(None, "tensor"), "bias": P("tensor"), "logits": P("data", "tensor")}
    mapped = jax.shard_map(
        on_device, mesh=mesh_of(*devices), in_specs=(specs, P("data")), out_specs=(P("data"), P("data"))
    )
    found = quickly(results_and_gradients(mapped), given, targets)
    for (path, exact), a, b in zip(
        jax.tree.leaves_with_path(truth), *map(jax.tree.leaves, (found, baseline)), strict=True
    ):
        assert a.dtype == b.dtype
        a, b, exact = (np.asarray(value, np.float64) for value in (a, b, exact))
        assert_within(a, exact, limit(relative_error(b, exact), "bfloat16"), jax.tree_util.keystr(path))


def test_given_logits_in_bfloat16_and_targets_out_of_range() -> None:
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((5, ROWS)), jnp.bfloat16)
    target = jnp.asarray([3, V, -100, -1, 0], jnp.int32)
    mapped = jax.shard_map(
        partial(vocab_parallel_cross_entropy, vocab_size=V, axis_name="tensor"),
        mesh=mesh_of(1, 4),
        in_specs=(P(None, "tensor"), P()),
        out_specs=P(),
    )

    @jax.jit
    def run(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, pull = jax.vjp(lambda logits: mapped(logits, target), logits)
        return losses, pull(jnp.ones_like(losses))[0].astype(jnp.float32)

    with jax.debug_nans(False):
        losses, gradient = (np.asarray(a) for a in run(logits))
    assert losses.dtype == jnp.float32
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True, False])
    assert losses[2] == 0
    np.testing.assert_array_equal(np.isnan(gradient[:, :V]).all(axis=1), np.isnan(losses))
    assert not np.isnan(gradient[[0, 2, 4]]).any()
    assert not gradient[2].any()


def call(function: Any, *arguments: jax.Array, **options: Any) -> Any:
    """One call on four devices that have 6 entries each."""
    specs = [P(None, "tensor") if a.shape[-1:] == (ROWS,) else P() for a in arguments]
    mapped = jax.shard_map(
        partial(function, axis_name="tensor", **options), mesh=mesh_of(1, 4), in_specs=tuple(specs), out_specs=P()
    )
    return mapped(*arguments)


def test_bad_input() -> None:
    operands, targets, class_weight = make(dtype=jnp.float32)
    fused, given = vocab_parallel_linear_cross_entropy, vocab_parallel_cross_entropy
    arguments = operands["x"], operands["weight"], targets
    name = "vocab_parallel_linear_cross_entropy"
    with pytest.raises(
        SpecError, match=rf"^{name}: the partition of the vocabulary must be >= 7 entries on rank 0 of 4"
    ):
        call(fused, *arguments, vocab_size=25)
    with pytest.raises(SpecError, match=rf"^{name}: loss.class_weight must be \[24\], got \[21\]"):
        call(fused, *arguments, loss=LossOptions(class_weight=class_weight))
    with pytest.raises(SpecError, match=rf"^{name}: weight must be \[hidden, vocab\] = \[6, 24\]"):
        call(fused, operands["x"], operands["weight"].T, targets)
    logits = jnp.ones((T, ROWS))
    with pytest.raises(SpecError, match=r"^vocab_parallel_cross_entropy: target must be \[22\], got \[6\]"):
        call(given, logits, targets[:6])
    with pytest.raises(SpecError, match=r"label_smoothing must be in \[0, 1\], got 2.0"):
        call(given, logits, targets, label_smoothing=2.0)


def test_smoothing_by_megatrons_formula(x64: None) -> None:
    """0.1 of its label_smoothing, which it spreads over the V - 1 wrong entries, is 0.1 V / (V - 1) of ours."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((T, ROWS)))
    targets = jnp.asarray(np.random.default_rng(1).integers(0, ROWS, T), jnp.int32)

    def spread(logits: jax.Array) -> jax.Array:
        log_probs = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(log_probs, targets[:, None], -1)[:, 0]
        return -(0.9 * right + 0.1 / (ROWS - 1) * (log_probs.sum(-1) - right))

    smoothing = 0.1 * ROWS / (ROWS - 1)
    ours = jax.shard_map(
        lambda logits: vocab_parallel_cross_entropy(logits, targets, smoothing, axis_name="tensor"),
        mesh=mesh_of(1, 4),
        in_specs=P(None, "tensor"),
        out_specs=P(),
    )
    for found, expected in zip(*(_value_and_gradient(fn, logits) for fn in (jax.jit(ours), spread)), strict=True):
        assert_within(np.asarray(found), np.asarray(expected), DISTRIBUTED_FLOAT64, "smoothing")


def _value_and_gradient(fn: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, pull = jax.vjp(fn, logits)
    return y, pull(jnp.cos(jnp.arange(T, dtype=y.dtype)))[0]
