"""Rows without a label are never multiplied: results are those of all rows, from as many shards as there are labels for."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from shared_specs.loss import costs as loss_costs
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, MODEL_FLOAT32, between
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.mlp.jax_untiled import cross_entropy, loss_operands
from tiled_jax import tiled_linear_cross_entropy, vocab_parallel_linear_cross_entropy
from tiled_jax.loss import api
from tiled_jax.loss.steps import LossSteps

T, H, V, SHARD = 22, 8, 13, 4  # five shards of four rows and one of two
SHARES = (0.0, 0.1, 0.5, 0.9, 1.0)


def labels(share: float, tokens: int = T, seed: int = 0) -> jax.Array:
    """Targets of which this share, anywhere among the tokens, is ignored."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, V, tokens)
    targets[rng.permutation(tokens)[: round(share * tokens)]] = -100
    return jnp.asarray(targets, jnp.int32)


def operands(tokens: int = T, dtype: Any = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, weight and bias."""
    x, weight, _ = loss_operands(tokens, hidden=H, vocab=V, dtype=dtype)
    return x, weight, jnp.linspace(-1, 1, V, dtype=weight.dtype)


def with_gradients(fn: Any, **options: Any) -> Any:
    """(x, weight, bias, targets) -> fn's results and the gradients of its operands, for upstream ones that all differ."""

    def run(x: jax.Array, weight: jax.Array, bias: jax.Array, targets: jax.Array) -> Any:
        result, pull = jax.vjp(lambda x, w, b: fn(x, w, targets, bias=b, **options), x, weight, bias)
        return result, pull(
            jax.tree.map(lambda a: jnp.cos(a + jnp.arange(a.size, dtype=a.dtype).reshape(a.shape)), result)
        )

    return jax.jit(run)


tiled = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=SHARD))

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


def token_weights(tokens: int = T) -> jax.Array:
    """Of both signs, and some zero."""
    found = 3 * np.random.default_rng(1).standard_normal(tokens)
    return jnp.asarray(np.where(np.arange(tokens) % 7 == 2, 0, found))


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


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_weights_of_tokens_that_a_mesh_cuts(kind: AxisType, same: Any) -> None:
    """Each device has those of its own tokens; in float64 what gradients are divided by in between changes no bit of them."""
    mesh, targets, (x, weight, _), weights = mesh_of(4, kind=kind), of_devices(4), operands(4 * T), token_weights(4 * T)
    fn = jax.jit(jax.value_and_grad(partial(tiled, loss=LossOptions(reduction="sum")), argnums=(0, 1)))
    each = LossOptions(reduction="none")
    by_hand = jax.value_and_grad(
        lambda x, w: jnp.sum(weights * cross_entropy(x, w, targets, loss=each)), argnums=(0, 1)
    )
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        arguments = place(x, "data"), place(weight), place(targets, "data")
        found = fn(*arguments, token_weight=place(weights, "data"))
    same(found, by_hand(x, weight))


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


# How often. Nothing is timed.

RUN: list[tuple[str, int]] = []  # appending is safe from several devices' threads


@dataclass(frozen=True)
class _CountingSteps(LossSteps):
    """Steps that count the rows of logits that a running program makes statistics of, and gradients of."""

    name: ClassVar[str] = "counting"

    def statistics(self, rules: Any, logits: jax.Array, part: Any, labels: Any) -> Any:
        jax.debug.callback(lambda rows=logits.shape[0]: RUN.append(("statistics", rows)))
        return super().statistics(rules, logits, part, labels)

    def gradient(self, rules: Any, logits: jax.Array, *of_rows: Any) -> jax.Array:
        jax.debug.callback(lambda rows=logits.shape[0]: RUN.append(("gradient", rows)))
        return super().gradient(rules, logits, *of_rows)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the rows that a call ran, by what was made of them."""
    monkeypatch.setattr(api, "XLA", _CountingSteps())

    def count(fn: Any, *arguments: Any) -> dict[str, int]:
        RUN.clear()
        jax.block_until_ready(fn(*arguments))
        jax.effects_barrier()
        return {kind: sum(rows for each, rows in RUN if each == kind) for kind in {kind for kind, _ in RUN}}

    return count


def rows_for(valid: int, tokens: int = T, shard: int = SHARD) -> int:
    """Rows of as many shards as `valid` rows need; the last one may be shorter."""
    return min(-(-valid // shard) * shard, tokens)


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


# Meshes. Each device has 22 rows, with different shares of labels.


def of_devices(count: int) -> jax.Array:
    return jnp.concatenate([labels(share, seed=i) for i, share in enumerate(SHARES[:count])])


def mesh_of(*sizes: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("data", "tensor")[: len(sizes)], axis_types=(kind,) * len(sizes))


@pytest.mark.ranks
def test_tokens_cut_by_an_auto_mesh(same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mean over all tokens; how often a device's loop of five shards runs is not known before it does."""
    mesh, targets, (x, weight, _) = mesh_of(4), of_devices(4), operands(4 * T)
    place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
    arguments = place(x, "data"), place(weight), place(targets, "data")
    wanted = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))(x, weight, targets)
    turns = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
        program = jax.jit(jax.value_and_grad(partial(tiled), argnums=(0, 1))).lower(*arguments).compile()
        same(program(*arguments), wanted)
        turns.append('"known_trip_count":{"n":"5"}' in str(program.as_text()))
    assert turns == [False, True]


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tokens_and_vocabulary_that_a_mesh_cuts_over_two_axes(
    kind: AxisType, reduction: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices with parts of one vocabulary have the same tokens and stop together, each such group where its labels end."""
    mesh, (x, weight, _) = mesh_of(4, 2, kind=kind), operands(4 * T)
    weight, targets = weight[:, : V - 1], jnp.minimum(of_devices(4), V - 2)
    loss, place = LossOptions(reduction=reduction), lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))

    def total(fn: Any, *given: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(fn(*given, loss=loss)))

    wanted = jax.jit(jax.value_and_grad(partial(total, cross_entropy), argnums=(0, 1)))(x, weight, targets)
    turns = []
    with jax.set_mesh(mesh):
        arguments = place(x, "data"), place(weight, None, "tensor"), place(targets, "data")
        for early in (True, False):
            if not early:
                monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
            program = jax.jit(jax.value_and_grad(partial(total, tiled), argnums=(0, 1))).lower(*arguments).compile()
            same(program(*arguments), wanted)
            text = str(program.as_text())
            assert f"f64[{weight.shape[0]},{weight.shape[1] // 2}]" in text, "the vocabulary is not split"
            turns.append('"known_trip_count":{"n":"5"}' in text)
    assert turns == [False, True]


@pytest.mark.ranks
def test_tokens_cut_by_an_explicit_mesh(counted: Any, same: Any) -> None:
    """Every device stops where its own labels end."""
    mesh, targets, (x, weight, _) = mesh_of(4, kind=AxisType.Explicit), of_devices(4), operands(4 * T)
    wanted = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))(x, weight, targets)
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        fn = jax.jit(jax.value_and_grad(tiled, argnums=(0, 1)))
        arguments = place(x, "data"), place(weight), place(targets, "data")
        same(fn(*arguments), wanted)
        rows = sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))
        assert counted(fn, *arguments) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_device_of_a_shard_map_has_its_own_count(check_vma: bool, counted: Any, same: Any) -> None:
    mesh, targets, (x, weight, _) = mesh_of(4), of_devices(4), operands(4 * T)

    def on_device(*arguments: jax.Array) -> Any:
        return lax.psum(tiled(*arguments, loss=LossOptions(reduction="sum")), "data")

    specs = P("data"), P(), P("data")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    plain = partial(cross_entropy, loss=LossOptions(reduction="sum"))
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    arguments = x, weight, targets
    same(found(*arguments), wanted(*arguments))
    rows = sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))
    assert counted(found, *arguments) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("data", "check_vma"), [(1, True), (2, False), (1, False), (2, True)])
def test_a_vocabulary_that_is_split(data: int, check_vma: bool, counted: Any, same: Any) -> None:
    """Devices meet in every shard, and have the same labels. Where others have other tokens all take the most turns of any."""
    mesh, targets, (x, weight, _) = mesh_of(data, 2), of_devices(4)[T : T * (1 + data)], operands(data * T)
    x, weight = x[: data * T], jnp.pad(weight, ((0, 0), (0, 1)))

    def on_device(*arguments: jax.Array) -> Any:
        fn = partial(vocab_parallel_linear_cross_entropy, vocab_size=V, axis_name="tensor")
        total = fn(*arguments, loss=LossOptions(reduction="sum"), tiling=Tiling(shard_tokens=SHARD))
        return lax.psum(total, "data")

    of_rows = P("data") if data > 1 else P()
    specs = of_rows, P(None, "tensor"), of_rows
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    plain = lambda x, w, targets: cross_entropy(x, w[:, :V], targets, loss=LossOptions(reduction="sum"))  # noqa: E731
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    actual = found(x, weight, targets)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted(x, weight, targets)), strict=True):
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "loss and gradients")
    rows = 2 * data * rows_for(max(int((own >= 0).sum()) for own in targets.reshape(data, T)))
    assert counted(found, x, weight, targets) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("data", "check_vma", "reduction"), [(1, True, "mean"), (2, False, "none"), (2, True, "sum")])
def test_tokens_that_are_split_with_the_vocabulary(
    data: int, check_vma: bool, reduction: Any, counted: Any, same: Any
) -> None:
    """Each device's own rows that count come first; all take the turns of the one with most labels."""
    mesh, (x, weight, _) = mesh_of(data, 2), operands(2 * data * T)
    weight = jnp.pad(weight, ((0, 0), (0, 1)))

    def on_device(x: jax.Array, weight: jax.Array, targets: jax.Array) -> Any:
        fn = partial(vocab_parallel_linear_cross_entropy, vocab_size=V, axis_name="tensor", sequence_parallel=True)
        loss = LossOptions(reduction="none" if reduction == "none" else "sum")
        found = fn(x, weight, targets, loss=loss, tiling=Tiling(shard_tokens=SHARD))
        return lax.psum(jnp.sum(jnp.sin(found)), ("data", "tensor")) if found.ndim else lax.psum(found, "data")

    def plain(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        found = cross_entropy(x, weight[:, :V], targets, loss=LossOptions(reduction="none"))
        return jnp.sum(jnp.sin(found) if reduction == "none" else found)

    of_rows = P(("data", "tensor"))
    specs = of_rows, P(None, "tensor"), of_rows
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    for shares in [(0.9, 0.9), (0.5, 0.9), (0.1, 0.1), (0.0, 1.0), (1.0, 1.0)]:
        targets = jnp.concatenate([labels(share, seed=i) for i, share in enumerate(shares * data)])
        run = counted(found, x, weight, targets)
        pairs = zip(*(jax.tree.leaves(fn(x, weight, targets)) for fn in (found, wanted)), strict=True)
        for a, b in pairs:
            assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "loss and gradients")
        most = rows_for(max(int((own >= 0).sum()) for own in targets.reshape(2 * data, T)))
        rows = 2 * 2 * data * most  # of every device's gathered shards
        assert run == ({"statistics": rows, "gradient": rows} if rows else {}), shares


@pytest.mark.ranks
@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bytes_of_split_tokens_are_those_of_all_rows(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a few numbers per token: no shard is there more than where all are run."""
    tokens, hidden, vocab, shard = 1024, 64, 512, 64
    fn = partial(vocab_parallel_linear_cross_entropy, axis_name="tensor", sequence_parallel=True)
    given = {"loss": LossOptions(reduction=reduction), "tiling": Tiling(shard_tokens=shard)}
    specs = P("tensor"), P(None, "tensor"), P("tensor")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, hidden), (hidden, vocab))]
    found = []
    for _ in range(2):
        out = P("tensor") if reduction == "none" else P()
        mapped = jax.shard_map(partial(fn, **given), mesh=mesh_of(1, 2), in_specs=specs, out_specs=out)
        total = lambda *a, mapped=mapped: jnp.sum(jnp.sin(mapped(*a)))  # noqa: E731
        arguments = *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)
        found.append(temp_bytes(jax.value_and_grad(total, argnums=(0, 1)), *arguments))
        monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
    assert found[0] <= found[1] + 4 * tokens * 4


def test_by_the_kernels(interpreting: None) -> None:
    """They are given the same rows, and the weights of their tokens."""
    x, weight, bias = operands(11, dtype=jnp.float32)
    loss, weights = LossOptions(label_smoothing=0.1, z_loss=1e-2), token_weights(11).astype(jnp.float32)
    call = partial(tiled_linear_cross_entropy, loss=loss, tiling=Tiling(shard_tokens=4), token_weight=weights)
    arguments = x, weight, bias, labels(0.5, 11)
    found, wanted = (with_gradients(fn)(*arguments) for fn in (partial(call, backend="pallas"), call))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_within(np.asarray(a), np.asarray(b), MODEL_FLOAT32, "loss and gradients")
