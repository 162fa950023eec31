"""The Pallas kernels: their numbers in JAX's GPU interpreter, their lowering for CUDA, and `tiled_mlp` through them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.blocks import CANDIDATES, DEFAULTS, PALLAS_UNMEASURED, Blocks, Paths
from shared_specs.cases import MLPCase
from shared_specs.config import ACTIVATIONS
from shared_specs.errors import UnsupportedError
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan
from shared_specs.tolerances import FLOOR
from tests.adapters import ADAPTERS
from tests.asserting import assert_case, assert_within
from tests.on_jax import untiled
from tests.on_jax.interpreted import FINDS_RACES, assert_true, operands
from tests.on_jax.untiled import operands as mlp_operands
from tests.on_jax.untiled import y_and_gradients
from tiled_jax import backends, tiled_linear_cross_entropy, tiled_mlp, usable_backends
from tiled_jax.functional import shard_math
from tiled_jax.functional.mlp_vjp import Call, run
from tiled_jax.kernels.activations import activate
from tiled_jax.kernels.common import interpreter, mlp_reason
from tiled_jax.kernels.dgated import dgated
from tiled_jax.kernels.glu_up import gate_and_up, glu_up
from tiled_jax.kernels.glu_up_aux import glu_up_auxiliary

pytestmark = pytest.mark.usefixtures("clean")

H, I = 128, 128  # noqa: E741
LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336}
WEIGHTS = ("w_gate", "w_up")


@pytest.mark.parametrize(
    ("activation", "dtype", "tokens", "biases"),
    [
        ("silu", "bfloat16", 200, ()),
        ("gelu", "bfloat16", 128, ("gate", "up")),
        ("gelu_tanh", "float16", 1, ("up",)),
        ("relu", "float16", 130, ("gate",)),
    ],
)
def test_glu_up(activation: str, dtype: str, tokens: int, biases: tuple[str, ...]) -> None:
    """h alone, then h with gate and up: the same h, whatever else is stored."""
    arrays = operands(tokens, H, I, dtype, biases)
    call = partial(_glu_up, arrays, activation=activation, interpret=interpreter())
    h, gate, up = call(keep=True)
    assert_true({"h": h, "gate": gate, "up": up}, arrays, dtype, activation)
    np.testing.assert_array_equal(np.asarray(call()), np.asarray(h))


def test_gate_and_up_are_those_of_glu_up() -> None:
    arrays = operands(130, H, I, "bfloat16", ("gate", "up"))
    options = {"b_gate": arrays["b_gate"], "b_up": arrays["b_up"], "interpret": interpreter()}
    gate, up = gate_and_up(*(arrays[name] for name in ("x", *WEIGHTS)), **options)
    assert_true({"gate": gate, "up": up}, arrays, "bfloat16", "silu")


@pytest.mark.parametrize(
    ("activation", "dtype", "tokens", "biases"),
    [("silu", "bfloat16", 200, ()), ("gelu", "float16", 1, ("gate", "up")), ("relu", "bfloat16", 130, ("up",))],
)
def test_glu_up_auxiliary(activation: str, dtype: str, tokens: int, biases: tuple[str, ...]) -> None:
    """h of a gate that a product of XLA has made."""
    arrays = operands(tokens, H, I, dtype, biases)
    gate = shard_math.linear(arrays["x"], arrays["w_gate"], arrays.get("b_gate"))
    options = {"b_up": arrays.get("b_up"), "activation": activation, "interpret": interpreter()}
    assert_true({"h": glu_up_auxiliary(arrays["x"], arrays["w_up"], gate, **options)}, arrays, dtype, activation)


@pytest.mark.parametrize(
    ("activation", "dtype", "tokens"),
    [
        ("silu", "bfloat16", 200),
        ("gelu", "float16", 1),
        ("gelu_tanh", "bfloat16", 128),
        ("relu", "bfloat16", 130),
    ],
)
def test_dgated(activation: str, dtype: str, tokens: int) -> None:
    arrays = operands(tokens, H, I, dtype)
    dgate, dup, h = dgated(
        *(arrays[name] for name in ("dy", "w_down", "gate", "up")), activation=activation, interpret=interpreter()
    )
    assert_true({"dgate": dgate, "dup": dup, "h_again": h}, arrays, dtype, activation)


def test_one_program_makes_many_blocks() -> None:
    """Nine blocks on the interpreter's two multiprocessors, four of them in the second group of the raster."""
    arrays = operands(384, 64, 384, "bfloat16")
    options = {"activation": "silu", "interpret": interpreter()}
    blocks = Blocks(rows=128, columns=128, depth=64, group=2)
    found = {"h": _glu_up(arrays, blocks=blocks, **options)}
    gate = shard_math.linear(arrays["x"], arrays["w_gate"], None)
    again = glu_up_auxiliary(arrays["x"], arrays["w_up"], gate, blocks=blocks, **options)
    assert_true({"h": again}, arrays, "bfloat16", "silu")
    found |= zip(
        ("dgate", "dup", "h_again"),
        dgated(*(arrays[name] for name in ("dy", "w_down", "gate", "up")), blocks=blocks, **options),
        strict=True,
    )
    assert_true(found, arrays, "bfloat16", "silu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activations_are_those_of_the_xla_path(activation: str) -> None:
    a = jnp.linspace(-12, 12, 4001, dtype=jnp.float32)
    for mine, xla in zip(activate(activation, a), shard_math.activate(activation, a), strict=True):
        assert_within(np.asarray(mine), np.asarray(xla), FLOOR["float32"], activation)


@pytest.mark.parametrize("formulas", [activate, shard_math.activate], ids=["kernel", "xla"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_are_those_of_automatic_differentiation(activation: str, formulas: Any) -> None:
    # Not 5: there 1 - sigmoid(2u) of gelu_tanh is 0 in float32 and jax.nn.gelu's 1 - tanh(u)^2 not yet.
    edges = [0.0, 1e-3, 2, 4, 9, 60, 3e38, np.inf]
    pairs = np.meshgrid([*edges, *np.negative(edges), np.nan], [-np.inf, -1, 0, 1, np.inf, np.nan])
    a, dact = (jnp.asarray(value.ravel(), jnp.float32) for value in pairs)

    @jax.jit
    def both(a: jax.Array, dact: jax.Array) -> Any:
        act, pull = jax.vjp(untiled.ACTIVATIONS[activation], a)
        return formulas(activation, a, dact), (act, *pull(dact))

    with jax.debug_nans(False):
        found, expected = jax.device_get(both(a, dact))
    for of, of_jax in zip(found, expected, strict=True):
        np.testing.assert_array_equal(*(np.where(np.isfinite(value), 0, value) for value in (of, of_jax)))


@pytest.mark.parametrize("activation", ["silu", "relu_squared"])
def test_dgated_beside_infinity(activation: str) -> None:
    """NaN and infinities where the formula of the XLA path has them; one token has them all."""
    arrays = operands(4, 128, 128, "bfloat16")
    arrays["up"] = arrays["up"].at[1, ::3].set(jnp.inf)
    arrays["gate"] = arrays["gate"].at[1, ::5].set(-jnp.inf).at[1, 1::7].set(jnp.nan)
    with jax.debug_nans(False):
        found = dgated(
            *(arrays[name] for name in ("dy", "w_down", "gate", "up")), activation=activation, interpret=interpreter()
        )
        pre = {name: arrays[name] for name in ("gate", "up")}
        h, d = shard_math.pre_activation_gradients(
            arrays["dy"], pre, {"w_down": arrays["w_down"]}, activation, ("w_gate", "w_up")
        )
        pairs = jax.device_get(tuple(zip(found, (d["gate"], d["up"], h), strict=True)))
    for a, b in pairs:
        assert not np.isfinite(b[1]).all()
        np.testing.assert_array_equal(*(np.where(np.isfinite(v), 0, v).astype(np.float32) for v in (a, b)))


def test_sizes_that_the_blocks_do_not_divide_are_refused() -> None:
    arrays = operands(4, 96, 128, "bfloat16")
    with pytest.raises(ValueError, match="glu_up: H, I = 96, 128 must be multiples of 64, 128"):
        _glu_up(arrays, activation="silu")
    with pytest.raises(ValueError, match="glu_up_aux: H, I = 96, 128 must be multiples of 64, 128"):
        glu_up_auxiliary(arrays["x"], arrays["w_up"], arrays["gate"], activation="silu")
    with pytest.raises(ValueError, match="dgated: H, I = 96, 128 must be multiples of 64, 128"):
        dgated(*(arrays[name] for name in ("dy", "w_down", "gate", "up")), activation="silu")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("op", ["glu_up", "glu_up_keep", "gate_and_up", "glu_up_aux", "dgated"])
def test_lowers_for_cuda(op: str, activation: str, dtype: Any) -> None:
    """Layouts and shared memory of the table's blocks, at the widths of Llama 3 8B; any tokens are the same kernel."""
    assert_lowers(*launches(dtype, activation)[op])


@pytest.mark.parametrize(
    ("op", "blocks"),
    [(op, blocks) for op in ("glu_up", "glu_up_aux", "dgated") for blocks in CANDIDATES["pallas"][op][1:]],
    ids=str,
)
def test_what_tune_may_choose_lowers_for_cuda(op: str, blocks: Blocks) -> None:
    fn, shapes = launches(jnp.bfloat16, "silu")[op]
    assert_lowers(partial(fn, blocks=blocks), shapes)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", ["glu_up_keep", "glu_up_aux", "dgated"])
def test_lowers_inside_shard_map(op: str, check_vma: bool) -> None:
    """The results vary along the axes of every operand, or out_specs that split them would be refused."""
    mesh = jax.make_mesh((2, 4), ("sequence", "tensor"), axis_types=(AxisType.Auto,) * 2)
    fn, shapes = launches(jnp.bfloat16, "silu")[op]
    split = P("tensor", None) if op == "dgated" else P(None, "tensor")
    specs = {
        "glu_up_keep": (P("sequence", None), split, split, P("tensor"), P("tensor")),
        "glu_up_aux": (P("sequence", None), split, P("sequence", "tensor")),
        "dgated": (P("sequence", None), split, P("sequence", "tensor"), P("sequence", "tensor")),
    }[op]
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("sequence", "tensor"), check_vma=check_vma)
    with jax.set_mesh(mesh):
        assert_lowers(sharded, shapes)


def launches(dtype: Any, activation: str) -> dict[str, tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]]:
    """Every launch by name, with the shapes of its operands."""
    tokens, hidden, intermediate = 2048, *LLAMA_3_8B.values()
    tensor = partial(jax.ShapeDtypeStruct, dtype=dtype)
    x, up, bias = tensor((tokens, hidden)), tensor((hidden, intermediate)), tensor((intermediate,))
    down, pre = tensor((intermediate, hidden)), tensor((tokens, intermediate))
    biased = lambda *a: glu_up(*a[:3], b_gate=a[3], b_up=a[4], activation=activation, keep=True)  # noqa: E731
    return {
        "glu_up": (partial(glu_up, activation=activation), (x, up, up)),
        "glu_up_keep": (biased, (x, up, up, bias, bias)),
        "gate_and_up": (gate_and_up, (x, up, up)),
        "glu_up_aux": (partial(glu_up_auxiliary, activation=activation), (x, up, pre)),
        "dgated": (partial(dgated, activation=activation), (x, down, pre, pre)),
    }


def assert_lowers(fn: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    __tracebackhide__ = True
    lowered = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


def _glu_up(arrays: dict[str, Any], **options: Any) -> Any:
    biases = {name: arrays[name] for name in ("b_gate", "b_up") if name in arrays}
    return glu_up(*(arrays[name] for name in ("x", *WEIGHTS)), **biases, **options)


def test_every_block_size_of_the_table_has_a_launch() -> None:
    assert {"glu_up", "glu_up_aux", "dgated"} <= set(DEFAULTS["pallas"]["sm_90"])


MLP = partial(MLPCase, hidden=64, intermediate=128, dtype="bfloat16", num_shards=2)
MLP_CASES = [
    MLP(dims=(150,), biases=("gate", "up", "down"), reason="two shards, the last one ragged, and every bias"),
    MLP(dims=(150,), keep=1.0, activation="gelu", reason="gate and up of both shards are kept"),
    MLP(dims=(3, 100), keep=0.5, out=128, dtype="float16", frozen=("x",), reason="one kept, one computed again"),
    MLP(dims=(150,), fused=True, reason="one [gate; up] weight, whose gradient comes in one piece"),
    MLP(dims=(128,), num_shards=1, frozen=("x", "w_gate", "w_up"), reason="w_down alone needs no product before it"),
]


def slow_before_0_11(*values: Any) -> Any:
    """A case that the interpreter of jax 0.10, several times slower, runs with the slow tests only."""
    return pytest.param(*values, marks=() if FINDS_RACES else pytest.mark.slow)


@pytest.mark.parametrize("case", [MLP_CASES[0], *map(slow_before_0_11, MLP_CASES[1:])], ids=lambda case: case.id)
def test_tiled_mlp(case: MLPCase, interpreting: None) -> None:
    """Value and every gradient, under jit."""
    backends.record_run("tiled_mlp", "nothing")
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))
    assert backends.last_run("tiled_mlp") == "pallas"


@pytest.mark.parametrize(
    "case", [slow_before_0_11(case) for case in (MLP_CASES[0], MLP_CASES[2])], ids=lambda case: case.id
)
def test_tiled_mlp_with_gate_as_an_input(case: MLPCase, interpreting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that the table calls auxiliary."""
    taken = []

    def kernel(*operands: Any, **options: Any) -> jax.Array:
        taken.append(operands)
        return glu_up_auxiliary(*operands, **options)

    monkeypatch.setattr("tiled_jax.kernels.glu_up_aux.glu_up_auxiliary", kernel)
    monkeypatch.setattr("tiled_jax.functional.mlp.paths_for", lambda *key: Paths(up="auxiliary"))
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))
    assert taken


def forward_and_backward(plan: ShardPlan, keep: float = 0.0, paths: Paths = PALLAS_UNMEASURED) -> Any:
    """y and the gradients of the MLP through the kernels, compiled and not interpreted: for looking at its program."""
    kernels = shard_math.Kernels(interpret=False, paths=paths)
    call = Call(plan=plan, kept_start=plan.kept_start(keep), activation="silu", kernels=kernels)
    return y_and_gradients(lambda x, *w: run(call, x, dict(zip(("w_gate", "w_up", "w_down"), w, strict=True))))


def mlp_shapes(tokens: int) -> list[jax.ShapeDtypeStruct]:
    hidden, intermediate = LLAMA_3_8B.values()
    shapes = (tokens, hidden), (hidden, intermediate), (hidden, intermediate), (intermediate, hidden)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


@pytest.mark.parametrize(("keep", "kernels"), [(0.0, 3), (1.0, 2)])
def test_the_kernels_run_in_forward_and_in_the_recomputation(keep: float, kernels: int) -> None:
    """The forward, gate and up again, and dgated: each is lowered once for the straight-line shard and the loop."""
    traced = jax.jit(forward_and_backward(ShardPlan(4096, 1024), keep)).trace(*mlp_shapes(4096))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == kernels


def test_with_gate_as_an_input_the_recomputation_is_of_products_alone() -> None:
    """The kernel of the forward, and dgated; a second derivative goes through the formulas."""
    step = forward_and_backward(ShardPlan(4096, 1024), paths=Paths(up="auxiliary"))
    lowered = jax.jit(step).trace(*mlp_shapes(4096)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_tiled_mlp_lowers_inside_shard_map(check_vma: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("sequence", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = P("sequence", None), P(None, "tensor"), P(None, "tensor"), P("tensor", None)
    step = forward_and_backward(ShardPlan(2048, 1024))

    def on_device(*arguments: jax.Array) -> Any:
        y, dx, *dw = step(*arguments)
        if check_vma:
            return lax.psum(y, "tensor"), dx, *dw
        return lax.psum(y, "tensor"), lax.psum(dx, "tensor"), *(lax.psum(d, "sequence") for d in dw)

    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(specs[0], *specs), check_vma=check_vma)
    with jax.set_mesh(mesh):
        text = jax.jit(sharded).trace(*mlp_shapes(4096)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") >= 3  # jax 0.10 lowers some of them again where types vary


def test_second_order_lowers() -> None:
    """Whose derivative of the kernels is that of the XLA formulas."""
    step = forward_and_backward(ShardPlan(256, 128))

    def slope(*arguments: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in step(*arguments))

    traced = jax.jit(jax.grad(slope, argnums=(0, 1, 2, 3))).trace(*mlp_shapes(256))
    assert "stablehlo.dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_vmap_lowers() -> None:
    step = forward_and_backward(ShardPlan(256, 128))
    x, *weights = mlp_shapes(256)
    stacked = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    traced = jax.jit(jax.vmap(step, (0, None, None, None))).trace(stacked, *weights)
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_shards_are_whole_blocks_where_kernels_run(interpreting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("tiled_jax.functional.mlp.run", lambda call, x, w: plans.append(call.plan) or x)
    arguments = mlp_operands(300, hidden=128, intermediate=128, dtype=jnp.bfloat16)
    for backend in ("pallas", "xla", "auto"):
        tiled_mlp(*arguments, num_shards=3, backend=backend)
    assert plans == [ShardPlan(300, KERNEL_MULTIPLE), ShardPlan(300, 100), ShardPlan(300, 100)]


REFUSED = {
    "dtype": ({"dtype": jnp.float32}, {}, "The Pallas kernels take bfloat16 or float16, found float32."),
    "hidden": ({"hidden": 96}, {}, "The Pallas kernel glu_up needs sizes that are multiples of 64, found 96."),
    "intermediate": (
        {"intermediate": 192},
        {},
        "The Pallas kernel glu_up needs sizes that are multiples of 128, found 192.",
    ),
    "plain": ({}, {"gated": False}, "The Pallas kernels are those of an MLP with a gate, found w_gate=None."),
}


@pytest.mark.parametrize(("shapes", "call", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_cannot_do_is_refused(
    shapes: dict[str, Any], call: dict[str, Any], reason: str, interpreting: None
) -> None:
    """By name only: "auto" takes XLA."""
    x, *weights = mlp_operands(4, **{"hidden": 128, "intermediate": 128, "dtype": jnp.bfloat16, **shapes})
    if not call.get("gated", True):
        weights[0] = None
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(x, *weights, backend="pallas")
    text = f"tiled_mlp: backend must be usable here, got 'pallas'. {reason} Pass backend=\"auto\"."
    assert str(caught.value) == text
    tiled_mlp(x, *weights)
    assert backends.last_run("tiled_mlp") == "xla"


def test_without_a_hopper_the_reason_names_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backends.INTERPRET, raising=False)
    assert usable_backends()["pallas"] == "A Pallas kernel needs a Hopper GPU (compute capability 9.x), found cpu."
    monkeypatch.setattr(jax, "devices", lambda: [Device("8.0", "NVIDIA A100")])
    found = "found NVIDIA A100 (8.0)."
    assert usable_backends()["pallas"] == f"A Pallas kernel needs a Hopper GPU (compute capability 9.x), {found}"


class Device:
    """As much of a jax.Device as the choice of a backend looks at."""

    platform = "gpu"

    def __init__(self, compute_capability: str, device_kind: str) -> None:
        self.compute_capability, self.device_kind = compute_capability, device_kind


def test_auto_takes_the_kernels_on_a_hopper_and_never_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = partial(backends.choose, "tiled_mlp", "auto")
    of_a_kernel = partial(choose, no_kernel=lambda: None)
    monkeypatch.setenv(backends.INTERPRET, "1")
    assert of_a_kernel() == "xla"
    monkeypatch.delenv(backends.INTERPRET)
    assert of_a_kernel() == "xla"
    monkeypatch.setattr(jax, "devices", lambda: [Device("9.0", "NVIDIA H200")])
    assert of_a_kernel() == "pallas"
    assert choose(no_kernel=lambda: "for this call none does.") == "xla"
    assert backends.choose("tiled_loss", "auto") == "xla"
    with pytest.raises(UnsupportedError, match="has no Pallas kernel for this operation yet"):
        backends.choose("tiled_loss", "pallas")


def test_what_can_run_here_is_found_out_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks JAX for its devices."""
    calls, usable = [], backends.usable_backends
    monkeypatch.setattr(backends, "usable_backends", lambda: (calls.append(1), usable())[1])
    x, *weights = mlp_operands(8, dtype=jnp.float32)
    for backend in ("auto", "xla"):
        tiled_mlp(x, *weights, backend=backend)
        tiled_linear_cross_entropy(x, weights[0], jnp.zeros(8, jnp.int32), backend=backend)
    assert len(calls) == 4


def test_no_kernel_is_asked_for_its_reason_where_none_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> str | None:
        raise AssertionError

    monkeypatch.delenv(backends.INTERPRET, raising=False)
    assert backends.choose("tiled_mlp", "auto", no_kernel=asked) == "xla"
    monkeypatch.setattr(jax, "devices", lambda: [Device("9.0", "NVIDIA H200")])
    assert backends.choose("tiled_mlp", "xla", no_kernel=asked) == "xla"


def test_the_reason_is_about_every_kernel() -> None:
    sizes = {"hidden": 128, "intermediate": 128, "out": 100}
    reason = mlp_reason(jnp.bfloat16, gated=True, **sizes)
    assert reason == "The Pallas kernel dgated needs sizes that are multiples of 64, found 100."
