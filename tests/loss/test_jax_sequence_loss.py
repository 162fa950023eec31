"""The loss with vocabulary and tokens split over 1, 2, 4 and 8 virtual devices, equal to one device in float64."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import LossOptions, LossResult, Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.loss.costs import LossShape
from shared_specs.loss.sequence_costs import compiled_sequence_loss_peak_bytes
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.core.jax_counting import temp_bytes
from tests.loss.jax_split_tokens import abstract, count_collectives, largest_arrays, mesh_of, place
from tests.mlp.jax_untiled import cross_entropy
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError, tiled_linear_cross_entropy
from tiled_jax.parallel import vocab_parallel_linear_cross_entropy

pytestmark = pytest.mark.ranks

T, H, V, ROWS = 56, 6, 21, 24  # 7 tokens on each of 8 devices; three padding entries of the vocabulary
OUTPUTS = ("log_probs", "lse", "entropy", "accuracy")
EVERYTHING = {"label_smoothing": 0.2, "z_loss": 1e-1, "logit_softcap": 7.0, "logit_scale": 0.7, "outputs": OUTPUTS}
TOKENS = P(("data", "tp"))
SPECS = {"x": P(("data", "tp"), None), "weight": P(None, "tp"), "bias": P("tp")}
Operands = dict[str, jax.Array]


def make(tokens: int = T, dtype: Any = None) -> tuple[Operands, jax.Array, jax.Array]:
    """x [T, H], weight [H, ROWS], bias [ROWS]; targets below V, every fifth ignored; class weights [V]."""
    rng = np.random.default_rng(0)
    shapes = {"x": (tokens, H), "weight": (H, ROWS), "bias": (ROWS,)}
    given = {name: jnp.asarray(rng.standard_normal(shape), dtype or jnp.float64) for name, shape in shapes.items()}
    targets = np.where(np.arange(tokens) % 5 == 1, -100, rng.integers(0, V, tokens))
    return given, jnp.asarray(targets, jnp.int32), jnp.asarray(rng.uniform(0.25, 2.0, V))


def with_gradients(fn: Any) -> Any:
    """fn(operands, targets) and the gradients of its operands, for upstream gradients that differ from value to value."""

    def run(given: Operands, targets: jax.Array) -> Any:
        result, pull = jax.vjp(lambda given: fn(given, targets), given)
        upstream = jax.tree.map(lambda a: jnp.cos(a) if a.ndim else jnp.ones_like(a) * 3, result)
        return result, pull(upstream)[0]

    return jax.jit(run)


def whole(loss: LossOptions) -> Any:
    """The loss of all tokens on one device; padding of the vocabulary is cut off."""

    def fn(given: Operands, targets: jax.Array) -> Any:
        return tiled_linear_cross_entropy(
            given["x"], given["weight"][:, :V], targets, bias=given["bias"][:V], loss=loss
        )

    return with_gradients(fn)


def split(mesh: jax.sharding.Mesh, loss: LossOptions, *, check_vma: bool = True, **options: Any) -> Any:
    """The loss over the mesh: tokens over both axes, the vocabulary over `tp`; sums are taken over `data` here."""

    def on_device(given: Operands, targets: jax.Array) -> Any:
        result = vocab_parallel_linear_cross_entropy(
            given["x"],
            given["weight"],
            targets,
            bias=given.get("bias"),
            loss=loss,
            sequence_parallel=True,
            axis_name="tp",
            **{"vocab_size": V, **options},
        )
        return jax.tree.map(lambda a: a if a.ndim else lax.psum(a, "data"), result)

    total = TOKENS if loss.reduction == "none" else P()
    kinds = {name: total if name in ("loss", "accuracy") else TOKENS for name in ("loss", *loss.outputs)}
    out = LossResult(**kinds) if loss.outputs else total

    def fn(given: Operands, targets: jax.Array) -> Any:
        specs = {name: SPECS[name] for name in given}, TOKENS
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)(given, targets)

    return fn


def assert_equal(actual: Any, expected: Any) -> None:
    found, wanted = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, jax.tree_util.keystr(path))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({}, {"num_shards": 3}),
    "mean of num_valid": ({"num_valid": 40.0, **EVERYTHING}, {"num_shards": 2}),
    "sum": ({"reduction": "sum", "label_smoothing": 0.1}, {"tiling": Tiling(shard_tokens=7)}),
    "none": ({"reduction": "none", **EVERYTHING}, {"num_shards": 3}),
    "none, parts": ({"reduction": "none", **EVERYTHING}, {"tiling": Tiling(shard_tokens=2, vocab_shards=2)}),
}
# devices of tp, of data, check_vma, kind of mesh axes
MESHES = [
    (1, 1, True, AxisType.Auto),
    (2, 1, False, AxisType.Explicit),
    (4, 2, True, AxisType.Explicit),
    (8, 1, True, AxisType.Auto),
    (8, 1, False, AxisType.Auto),
]


@cache
def expected(case: str) -> Any:
    given, targets, class_weight = make()
    options, cut = CASES[case]
    loss = LossOptions(**options, class_weight=class_weight if "outputs" in options else None)
    return given, targets, loss, cut, whole(loss)(given, targets)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        (case, devices)
        for at, case in enumerate(CASES)
        for devices in (MESHES[at % len(MESHES)], MESHES[-1 - at % 2])
        if case != "mean" or devices[1] == 1
    ],
    ids=str,
)
def test_one_device_and_many_agree(case: str, devices: tuple[int, int, bool, AxisType], x64: None) -> None:
    """Without num_valid a mean is over the tokens of `tp`; with one, over those of all axes."""
    given, targets, loss, cut, wanted = expected(case)
    ranks, data, check_vma, kind = devices
    mesh = mesh_of(ranks, data, kind)
    with jax.set_mesh(mesh):
        placed = place(mesh, given, SPECS), place(mesh, targets, TOKENS)
        actual = quickly(with_gradients(split(mesh, loss, check_vma=check_vma, **cut)), *placed)
    assert_equal(actual, wanted)
    assert not np.asarray(actual[1]["weight"])[:, V:].any(), "padding of the vocabulary has a gradient"


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_weights_of_tokens(reduction: Any, x64: None) -> None:
    """Of each device's own tokens, as the targets are; in the second pass they travel with what else is of every token."""
    given, targets, _ = make()
    loss, weights = LossOptions(reduction=reduction), jnp.asarray(np.random.default_rng(5).standard_normal(T))

    def whole(given: Operands, targets: jax.Array) -> Any:
        w, b = given["weight"][:, :V], given["bias"][:V]
        return tiled_linear_cross_entropy(given["x"], w, targets, bias=b, loss=loss, token_weight=weights)

    def on_device(given: Operands, targets: jax.Array, weights: jax.Array) -> Any:
        options = {"vocab_size": V, "loss": loss, "num_shards": 3, "sequence_parallel": True, "axis_name": "tp"}
        found = vocab_parallel_linear_cross_entropy(**given, targets=targets, token_weight=weights, **options)
        return found if found.ndim else lax.psum(found, "data")

    mesh = mesh_of(4, 2, AxisType.Auto)
    out = TOKENS if reduction == "none" else P()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(SPECS, TOKENS, TOKENS), out_specs=out)
    found = with_gradients(lambda given, targets: mapped(given, targets, weights))(given, targets)
    assert_equal(found, with_gradients(whole)(given, targets))


@pytest.mark.deep
def test_gradients_taken_inside_and_a_checkpoint(x64: None) -> None:
    mesh, (given, targets, _) = mesh_of(4), make()

    def step(given: Operands, targets: jax.Array) -> Any:
        def loss(given: Operands) -> jax.Array:
            options = {"vocab_size": V, "axis_name": "tp", "num_shards": 3, "sequence_parallel": True}
            call = partial(vocab_parallel_linear_cross_entropy, **options)
            return 3 * jax.checkpoint(call)(given["x"], given["weight"], targets, bias=given["bias"])

        return jax.value_and_grad(loss)(given)

    specs = SPECS | {"x": P("tp", None)}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P("tp")), out_specs=(P(), specs)))
    loss, gradients = whole(LossOptions())(given, targets)
    assert_equal(mapped(given, targets), (3 * loss, gradients))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_devices_with_other_numbers_of_tokens(reduction: Any, x64: None) -> None:
    """Rows behind a device's tokens are padding, whatever they hold: their numbers and gradients are zero."""
    sizes, rows = (5, 0, 3, 7), 7
    real = (np.arange(rows)[None] < np.asarray(sizes)[:, None]).reshape(-1)
    given, targets, _ = make(4 * rows)
    loss = LossOptions(reduction=reduction, outputs=("lse",))
    wanted = whole(loss)(given | {"x": given["x"][real]}, targets[real])
    padded = given | {"x": jnp.where(real[:, None], given["x"], jnp.nan)}
    with jax.debug_nans(False):
        result, d = with_gradients(split(mesh_of(4), loss, split_sizes=sizes, num_shards=3))(padded, targets)
    rowed = {"lse": result.lse, "dx": d["x"]} | ({"loss": result.loss} if reduction == "none" else {})
    cut = {name: np.asarray(a)[real] for name, a in rowed.items()}
    assert not any(np.asarray(a)[~real].any() for a in rowed.values())
    assert_equal((LossResult(cut.get("loss", result.loss), lse=cut["lse"]), d | {"x": cut["dx"]}), wanted)


@cache
def in_bfloat16(reduction: Any) -> tuple[Any, ...]:
    """Options and operands, and what one device makes of them untiled, and in float64."""
    given, targets, _ = make(dtype=jnp.bfloat16)
    loss = LossOptions(reduction=reduction, label_smoothing=0.1)
    untiled = with_gradients(
        lambda given, targets: cross_entropy(
            given["x"], given["weight"][:, :V], targets, given["bias"][:V], loss=loss
        ).astype(jnp.float32)
    )
    baseline = untiled(given, targets)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(a, np.float64)) for name, a in given.items()}
        truth = whole(loss)(exact, targets)
    return loss, given, targets, baseline, truth


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ranks", "reduction"),
    [
        pytest.param(1, "none", marks=pytest.mark.slow),
        (2, "none"),
        (4, "mean"),
        (8, "mean"),
        (8, "none"),
    ],
)
def test_bfloat16(ranks: int, reduction: Any) -> None:
    loss, given, targets, baseline, truth = in_bfloat16(reduction)
    found = quickly(with_gradients(split(mesh_of(ranks), loss, num_shards=3)), given, targets)
    results = ({"loss": loss, **d} for loss, d in (found, baseline, truth))
    actual, plain, exact = ({name: np.asarray(a) for name, a in result.items()} for result in results)
    for name, value in exact.items():
        assert_within(actual[name], value, limit(relative_error(plain[name], value), "bfloat16"), name)


def program(mesh: jax.sharding.Mesh, local: int, reduction: Any) -> tuple[Any, Any]:
    """Loss and gradients of `local` tokens on every device, 64 at a time, H = 64, V = 256."""
    given = {
        "x": abstract(mesh, (local * mesh.size, 64), SPECS["x"], jnp.float32),
        "weight": abstract(mesh, (64, 256), SPECS["weight"], jnp.float32),
    }
    targets = abstract(mesh, (local * mesh.size,), TOKENS, jnp.int32)
    options = {"vocab_size": None, "tiling": Tiling(shard_tokens=64)}
    return with_gradients(split(mesh, LossOptions(reduction=reduction), **options)), (given, targets)


@pytest.mark.parametrize(("kind", "reduction"), [(AxisType.Auto, "mean"), (AxisType.Explicit, "none")])
def test_no_device_holds_the_full_sequence(kind: AxisType, reduction: Any) -> None:
    mesh = mesh_of(4, 1, kind)
    with jax.set_mesh(mesh):
        fn, arguments = program(mesh, 1024, reduction)
        found = largest_arrays(fn.lower(*arguments).compile().as_text())
    assert found["gathered"] == 4 * 64 * 64
    assert found["any"] == 1024 * 64  # x and dx of a device's own tokens


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_temp_bytes_grow_by_the_numbers_per_token_alone(reduction: Any) -> None:
    found = []
    for local in (512, 1024):
        fn, arguments = program(mesh_of(4), local, reduction)
        bound = compiled_sequence_loss_peak_bytes(
            LossShape(tokens=4 * local, hidden=64, vocab=64), SequencePlan((local,) * 4, 64)
        )
        found.append(temp_bytes(fn, *arguments))
        assert found[-1] <= bound + 16 * 4 * local
    assert found[1] - found[0] <= 16 * 4 * 512


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_collectives(reduction: Any, x64: None) -> None:
    """x and targets of a shard are gathered ahead, in backward the numbers per token in one more array; statistics of the
    vocabulary are a maximum and a sum, and dx is handed back."""
    given, targets, _ = make()
    fn = with_gradients(split(mesh_of(8), LossOptions(reduction=reduction), num_shards=3))
    found = count_collectives(fn, given, targets)
    inside = {"all_gather": 2, "psum": 1, "pmax": 1, "reduce_scatter": 1}
    if reduction == "none":
        inside["all_gather"] += 3
    # The shorter last shard is a loop of one turn or none; the gather of the first shard is the only one outside.
    assert found[True] == {name: 2 * count for name, count in inside.items()}
    assert found[False]["all_gather"] == inside["all_gather"]
    assert found[False]["pmax"] == (
        1 if reduction == "mean" else 3
    )  # for how many turns; the size of upstream gradients


def test_refused() -> None:
    given, targets, _ = make(dtype=jnp.float32)
    name = "vocab_parallel_linear_cross_entropy"

    def refused(**options: Any) -> str:
        with pytest.raises((SpecError, TypeError)) as caught:
            jax.eval_shape(split(mesh_of(8), LossOptions(), **options), given, targets)
        return str(caught.value)

    assert refused(split_sizes=[7]).startswith(
        f"{name}: split_sizes must be of one size for each of the 8 ranks, got [7]."
    )
    assert refused(split_sizes=[8] * 8).startswith(f"{name}: split_sizes must be <= 7, the rows of x, got [8, 8,")
    assert refused(tiling=Tiling(memory_budget=1)).startswith(f"{name}: memory_budget must be >= ")
    with pytest.raises(SpecError, match=rf"^{name}: axis_name must be an axis of the surrounding jax.shard_map"):
        vocab_parallel_linear_cross_entropy(given["x"], given["weight"], targets, axis_name="tp")


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_error_of_a_float16_head_does_not_depend_on_the_scale_of_class_weights(tp: int) -> None:
    """A mean over all tokens of both devices, whose largest coefficients differ: the same bits at any power of two."""
    given, targets, class_weight = make(16, jnp.float16)
    rising = jnp.asarray(class_weight, jnp.float32) * jnp.exp2(jnp.arange(V, dtype=jnp.float32) / 4)
    mesh, found = mesh_of(tp), []
    for scale in (1.0, 2.0**-40, 2.0**20):
        loss = split(mesh, LossOptions(class_weight=scale * rising), num_shards=2)
        gradients = jax.jit(jax.grad(lambda given, loss=loss: loss(given, targets)))(given)
        found.append({name: np.asarray(a) for name, a in gradients.items()})
    for odd in found[1:]:
        for name, usual in found[0].items():
            assert np.abs(usual).max() > 0
            np.testing.assert_array_equal(odd[name], usual)
