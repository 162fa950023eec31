"""The MLP with its columns and tokens split over 1, 2, 4 and 8 virtual devices, equal to one device in float64."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import Tiling
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.loss.jax_split_tokens import SPECS, Operands, called, count_collectives, mesh_of, place, use_rings
from tests.mlp.jax_untiled import ACTIVATIONS, operands
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError, UnsupportedError, tiled_mlp
from tiled_jax.parallel import tensor_parallel_mlp

pytestmark = pytest.mark.ranks

H, I = 8, 16  # noqa: E741


def make(tokens: int, *, gated: bool = True, bias: bool = True, dtype: Any = None) -> Operands:
    values = dict(
        zip(("x", "w_gate", "w_up", "w_down"), operands(tokens, hidden=H, intermediate=I, dtype=dtype), strict=True)
    )
    rng = np.random.default_rng(1)
    sizes = {"gate": I, "up": I, "down": H} if bias else {}
    values |= {name: jnp.asarray(rng.standard_normal(size), values["x"].dtype) for name, size in sizes.items()}
    return values if gated else {name: a for name, a in values.items() if "gate" not in name}


def untiled(given: Operands, activation: str = "silu") -> jax.Array:
    def linear(x: jax.Array, name: str) -> jax.Array:
        y = jnp.dot(x, given[f"w_{name}"], precision="highest")
        return y + given[name] if name in given else y

    act, up = ACTIVATIONS[activation], linear(given["x"], "up")
    return linear(act(linear(given["x"], "gate")) * up if "w_gate" in given else act(up), "down")


def split(
    mesh: jax.sharding.Mesh, given: Operands, *, sequence_parallel: bool = True, check_vma: bool = True, **options: Any
) -> tuple[Any, dict[str, P]]:
    """The MLP over the mesh, and how its operands are split: the tokens over `data` and perhaps `tp`."""
    tokens = P(("data", "tp") if sequence_parallel else "data", None)
    specs = {name: SPECS.get(name, tokens) for name in given}
    on_device = partial(called, tensor_parallel_mlp, sequence_parallel=sequence_parallel, axis_name="tp", **options)
    return jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=tokens, check_vma=check_vma), specs


def with_gradients(fn: Any) -> Any:
    """y and the gradient of every operand, for an upstream gradient that differs from row to row."""

    def run(given: Operands) -> dict[str, jax.Array]:
        y, pull = jax.vjp(fn, given)
        return {"y": y, **{f"d{name}": d for name, d in pull(jnp.cos(y))[0].items()}}

    return jax.jit(run)


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        assert_within(np.asarray(actual[name]), np.asarray(value), DISTRIBUTED_FLOAT64, name)


# devices of tp, of data, sequence_parallel, check_vma, ring, keep, kind of mesh axes
SPLITS = [
    (1, 1, True, True, False, 0.5, AxisType.Auto),
    (2, 2, False, True, False, 0.0, AxisType.Explicit),
    (2, 1, True, False, True, 0.5, AxisType.Auto),
    (4, 2, True, True, True, 0.5, AxisType.Auto),
    (4, 2, False, False, False, 0.5, AxisType.Auto),
    (4, 2, True, False, False, 0.0, AxisType.Explicit),
    (8, 1, False, True, False, 1.0, AxisType.Explicit),
]


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("ranks", "data", "sequence_parallel", "check_vma", "ring", "keep", "kind"), SPLITS, ids=str)
def test_one_device_and_many_agree(
    sequence_parallel: bool,
    ranks: int,
    data: int,
    check_vma: bool,
    ring: bool,
    keep: float,
    kind: AxisType,
    x64: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """7 tokens of each device: two shards of 3 and one of 1."""
    use_rings(monkeypatch, ring)
    mesh, given = mesh_of(ranks, data, kind), make(7 * ranks * data)
    options = {"sequence_parallel": sequence_parallel, "check_vma": check_vma, "keep": keep}
    fn, specs = split(mesh, given, num_shards=3, **options)
    with jax.set_mesh(mesh):
        actual = quickly(with_gradients(fn), place(mesh, given, specs))
    assert_equal(actual, with_gradients(untiled)(given))


@pytest.mark.parametrize("tokens", [24, 8, 4, 0])
def test_a_plain_mlp_of_few_shards(tokens: int, x64: None) -> None:
    """Three shards of two tokens, one of two, one of one, none."""
    given = make(tokens, gated=False)
    fn, _ = split(mesh_of(4), given, tiling=Tiling(shard_tokens=2, keep=0.4), activation="gelu")
    assert_equal(with_gradients(fn)(given), with_gradients(partial(untiled, activation="gelu"))(given))


def test_checkpointed_layers_in_a_scan(x64: None) -> None:
    mesh, given = mesh_of(2, 2), make(32)
    weights = {name: jnp.stack([a, a * 0.7]) for name, a in given.items() if name != "x"}

    def stack(layer: Any, given: Operands) -> jax.Array:
        def step(x: jax.Array, w: Operands) -> tuple[jax.Array, None]:
            return x + jax.checkpoint(layer)({"x": x, **w}), None

        return lax.scan(step, given["x"], {name: a for name, a in given.items() if name != "x"})[0]

    layer, _ = split(mesh, given, num_shards=3, keep=0.5)
    both = {"x": given["x"], **weights}
    assert_equal(with_gradients(partial(stack, layer))(both), with_gradients(partial(stack, untiled))(both))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_taken_inside(sequence_parallel: bool, x64: None) -> None:
    """A training step that is mapped as a whole; some weights are frozen."""
    mesh, given = mesh_of(4, 2), make(56)
    trained = ("x", "w_up", "down")

    def loss(fn: Any, given: Operands) -> dict[str, jax.Array]:
        frozen = {name: a for name, a in given.items() if name not in trained}

        def total(free: Operands) -> jax.Array:
            return jnp.sum(jnp.sin(fn({**free, **frozen})))

        return jax.grad(total)({name: given[name] for name in trained})

    tokens = P(("data", "tp") if sequence_parallel else "data", None)
    specs = {name: SPECS.get(name, tokens) for name in given}
    inside = partial(called, tensor_parallel_mlp, sequence_parallel=sequence_parallel, axis_name="tp", num_shards=3)
    out = {name: specs[name] for name in trained}
    step = jax.shard_map(partial(loss, inside), mesh=mesh, in_specs=(specs,), out_specs=out)
    assert_equal(jax.jit(step)(given), jax.jit(partial(loss, untiled))(given))


def test_devices_with_other_numbers_of_tokens(x64: None) -> None:
    """Rows behind a device's tokens are padding, whatever they hold: y is zero there, and they have no gradient."""
    sizes, rows = (5, 0, 3, 7), 7
    real = (np.arange(rows)[None] < np.asarray(sizes)[:, None]).reshape(-1)
    given = make(4 * rows)
    fn, _ = split(mesh_of(4), given, split_sizes=sizes, num_shards=3)
    wanted = with_gradients(untiled)(given | {"x": given["x"][real]})
    with jax.debug_nans(False):
        actual = dict(with_gradients(fn)(given | {"x": jnp.where(real[:, None], given["x"], jnp.nan)}))
    for name in ("y", "dx"):
        assert not np.asarray(actual[name])[~real].any()
        actual[name] = np.asarray(actual[name])[real]
    assert_equal(actual, wanted)


@cache
def in_bfloat16() -> tuple[Operands, Operands, Operands]:
    """Operands, and what one device makes of them untiled, and in float64."""
    given = make(8 * 16, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(a, np.float64)) for name, a in given.items()}
        truth = with_gradients(untiled)(exact)
    return given, with_gradients(untiled)(given), truth


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "ring"),
    [
        pytest.param(1, True, False, marks=pytest.mark.slow),
        (2, True, False),
        (4, True, False),
        pytest.param(4, False, False, marks=pytest.mark.slow),
        (8, True, False),
        (8, True, True),
        (8, False, False),
    ],
)
def test_bfloat16(ranks: int, sequence_parallel: bool, ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_rings(monkeypatch, ring)
    given, baseline, truth = in_bfloat16()
    fn, _ = split(mesh_of(ranks), given, sequence_parallel=sequence_parallel, num_shards=3)
    found = quickly(with_gradients(fn), given)
    for name, value in truth.items():
        allowed = limit(relative_error(np.asarray(baseline[name]), np.asarray(value)), "bfloat16")
        assert_within(np.asarray(found[name]), np.asarray(value), allowed, name)


@pytest.mark.parametrize("ring", [True, False])
def test_collectives(ring: bool, monkeypatch: pytest.MonkeyPatch, x64: None) -> None:
    """Four shards: the last straight-line, beside it the gather of the first, and one loop each way that gathers ahead.

    In backward x and dy are gathered and dx is handed back; the only sums beside these are of the bias of y and of weights
    over `data`. A ring of four devices has three steps.
    """
    use_rings(monkeypatch, ring)
    given = make(4 * 2 * 8)
    fn, _ = split(mesh_of(4, 2), given, num_shards=4)
    found = count_collectives(with_gradients(fn), given)
    steps = {"ppermute": 3} if ring else {}
    y, dx = (0 if ring else 1), 1
    assert found[True] == {"all_gather": 1 + 2, "reduce_scatter": y + dx} | steps
    outside = {name: count for name, count in found[False].items() if name != "psum"}
    assert outside == {"all_gather": 2 * (1 + 2), "reduce_scatter": y + dx} | steps
    assert found[False]["psum"] == 6


def test_one_sum_of_y_and_one_of_dx_where_tokens_are_whole(x64: None) -> None:
    given = make(16, bias=False)
    fn, _ = split(mesh_of(4), given, sequence_parallel=False, num_shards=4)
    assert count_collectives(with_gradients(fn), given)[True] == {}
    assert count_collectives(with_gradients(fn), given)[False]["psum"] <= 2 + 3  # over `data`, of one device, weights


def test_split_weights_under_plain_jit_on_an_explicit_mesh(x64: None) -> None:
    """`tiled_mlp` itself, without `shard_map`; the twin of test_sharding.py's, whose mesh is Auto."""
    mesh, given = mesh_of(4, 2, AxisType.Explicit), make(60)
    specs = {name: SPECS.get(name, P(None, None)) for name in given}
    with jax.set_mesh(mesh):
        actual = with_gradients(partial(called, tiled_mlp, num_shards=4))(place(mesh, given, specs))
        shardings = {name: jax.typeof(a).sharding.spec for name, a in actual.items()}
    assert_equal(actual, with_gradients(untiled)(given))
    assert {name[1:]: spec for name, spec in shardings.items() if name != "y"} == specs


NAME = "tensor_parallel_mlp"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sequence_parallel": (TypeError, {"sequence_parallel": 1}, "sequence_parallel must be True or False, got int."),
    "split_sizes alone": (
        SpecError,
        {"sequence_parallel": False, "split_sizes": (8, 8)},
        "split_sizes must be left out without sequence_parallel, got (8, 8). It says how many",
    ),
    "split_sizes kind": (
        TypeError,
        {"split_sizes": 8},
        "split_sizes must be a sequence of integers or None, got int.",
    ),
    "split_sizes length": (
        SpecError,
        {"split_sizes": [8, 8, 8]},
        "split_sizes must be of one size for each of the 2 ranks, got [8, 8, 8].",
    ),
    "negative split_sizes": (SpecError, {"split_sizes": [-8, 8]}, "split_sizes must be >= 0, got [-8, 8]."),
    "too many tokens": (
        SpecError,
        {"split_sizes": [9, 8]},
        "split_sizes must be <= 8, the rows of x, got [9, 8] (x is",
    ),
    "num_shards": (SpecError, {"num_shards": 0}, "num_shards must be >= 1, got 0 (x is [8, 8])."),
    "budget": (SpecError, {"tiling": Tiling(memory_budget=1)}, "memory_budget must be >= "),
    "activation": (SpecError, {"activation": "swish"}, "activation must be one of silu, "),
    "deterministic": (UnsupportedError, {"tiling": Tiling(deterministic=True)}, "deterministic must be False here"),
    "backend": (UnsupportedError, {"backend": "pallas"}, "backend must be usable here, got 'pallas'."),
    "axis_name": (
        SpecError,
        {"axis_name": "model"},
        "axis_name must be an axis of the surrounding jax.shard_map, got 'model'.",
    ),
    "axis kind": (TypeError, {"axis_name": 0}, "axis_name must be the name of a mesh axis, got int."),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    kind, options, text = REFUSED[what]
    given = make(16, bias=False, dtype=jnp.float32)
    on_device = partial(called, tensor_parallel_mlp, **{"sequence_parallel": True, "axis_name": "tp", **options})
    specs = {name: SPECS.get(name, P("tp", None)) for name in given}
    mapped = jax.shard_map(on_device, mesh=mesh_of(2), in_specs=(specs,), out_specs=P("tp", None))
    with pytest.raises(kind) as caught:
        jax.eval_shape(mapped, given)
    assert str(caught.value).startswith(f"{NAME}: {text}")


def test_whole_weights_are_refused() -> None:
    given = make(16, bias=False, dtype=jnp.float32)
    specs = {name: SPECS.get(name, P("tp", None)) for name in given} | {"w_down": P(None, None)}
    on_device = partial(called, tensor_parallel_mlp, sequence_parallel=True, axis_name="tp")
    mapped = jax.shard_map(on_device, mesh=mesh_of(2), in_specs=(specs,), out_specs=P("tp", None))
    with pytest.raises(SpecError, match=rf"^{NAME}: w_down must be \[intermediate, out\] = \[8, 16\], got \[16, 8\]"):
        jax.eval_shape(mapped, given)
    with pytest.raises(SpecError, match=rf"^{NAME}: axis_name must be an axis of the surrounding jax.shard_map"):
        called(tensor_parallel_mlp, given, axis_name="tp")
