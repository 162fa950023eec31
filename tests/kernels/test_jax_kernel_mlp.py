"""`tiled_mlp` through the Pallas kernels: its numbers in JAX's GPU interpreter, its program, and what they cannot do."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.errors import UnsupportedError
from shared_specs.kernels.blocks import PALLAS_UNMEASURED, Paths
from shared_specs.mlp.cases import MLPCase
from shared_specs.shards import KERNEL_MULTIPLE, ShardPlan
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.kernels.jax_interpreted import FINDS_RACES
from tests.mlp.jax_untiled import operands as mlp_operands
from tests.mlp.jax_untiled import y_and_gradients
from tiled_jax import backends, tiled_linear_cross_entropy, tiled_mlp, usable_backends
from tiled_jax.core.mosaic import mlp_reason
from tiled_jax.mlp.autodiff import MLPCall, run
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.steps_kernels import KernelMLPSteps

pytestmark = pytest.mark.usefixtures("clean")

LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336}
DUAL = Paths(up="dual", down="dgated")

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
def test_tiled_mlp(case: MLPCase, interpreting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and every gradient, under jit, where kernels make both projections of the activation."""
    monkeypatch.setattr("tiled_jax.mlp.api.paths_for", lambda *key: DUAL)
    backends.record_run("tiled_mlp", "nothing")
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))
    assert backends.last_run("tiled_mlp") == "pallas"


# Other numbers than above, here and below: the adapter computes a case once.
@pytest.mark.deep
@pytest.mark.parametrize(
    "case",
    [replace(MLP_CASES[0], seed=2), slow_before_0_11(replace(MLP_CASES[2], seed=2))],
    ids=lambda case: case.id,
)
def test_tiled_mlp_by_default(case: MLPCase, interpreting: None) -> None:
    """gate and up are XLA's products until a record says otherwise."""
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))


@pytest.mark.parametrize(
    "case", [slow_before_0_11(replace(MLP_CASES[i], seed=1)) for i in (0, 2)], ids=lambda case: case.id
)
def test_tiled_mlp_with_gate_as_an_input(case: MLPCase, interpreting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that the table calls auxiliary."""
    taken = []

    def kernel(*operands: Any, **options: Any) -> jax.Array:
        taken.append(operands)
        return glu_up_auxiliary(*operands, **options)

    monkeypatch.setattr("tiled_jax.mlp.kernels.glu_up_aux.glu_up_auxiliary", kernel)
    monkeypatch.setattr("tiled_jax.mlp.api.paths_for", lambda *key: Paths(up="auxiliary"))
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))
    assert taken


def forward_and_backward(plan: ShardPlan, keep: float = 0.0, paths: Paths = DUAL) -> Any:
    """y and the gradients of the MLP through the kernels, compiled and not interpreted: for looking at its program."""
    call = MLPCall(plan=plan, kept_start=plan.kept_start(keep), activation="silu", steps=KernelMLPSteps(paths))
    return y_and_gradients(lambda x, *w: run(call, x, dict(zip(("w_gate", "w_up", "w_down"), w, strict=True))))


def mlp_shapes(tokens: int) -> list[jax.ShapeDtypeStruct]:
    hidden, intermediate = LLAMA_3_8B.values()
    shapes = (tokens, hidden), (hidden, intermediate), (hidden, intermediate), (intermediate, hidden)
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("keep", "kernels"), [(0.0, 3), (1.0, 2)])
def test_the_kernels_run_in_forward_and_in_the_recomputation(keep: float, kernels: int) -> None:
    """The forward, gate and up again, and dgated: each is lowered once for the straight-line shard and the loop."""
    traced = jax.jit(forward_and_backward(ShardPlan(4096, 1024), keep)).trace(*mlp_shapes(4096))
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == kernels


@pytest.mark.parametrize(("paths", "kernels"), [(Paths(up="auxiliary"), 2), (PALLAS_UNMEASURED, 1)])
def test_where_gate_is_no_kernels_the_recomputation_is_of_products_alone(paths: Paths, kernels: int) -> None:
    """The kernel of the forward where it has one, and dgated; a second derivative goes through the formulas."""
    step = forward_and_backward(ShardPlan(4096, 1024), paths=paths)
    lowered = jax.jit(step).trace(*mlp_shapes(4096)).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == kernels


@pytest.mark.deep_but(1)
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


@pytest.mark.deep
def test_second_order_lowers() -> None:
    """Whose derivative of the kernels is that of the XLA formulas."""
    step = forward_and_backward(ShardPlan(256, 128))

    def slope(*arguments: jax.Array) -> jax.Array:
        return sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in step(*arguments))

    traced = jax.jit(jax.grad(slope, argnums=(0, 1, 2, 3))).trace(*mlp_shapes(256))
    assert "stablehlo.dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.deep
def test_vmap_lowers() -> None:
    step = forward_and_backward(ShardPlan(256, 128))
    x, *weights = mlp_shapes(256)
    stacked = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    traced = jax.jit(jax.vmap(step, (0, None, None, None))).trace(stacked, *weights)
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_shards_are_whole_blocks_where_kernels_run(interpreting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    monkeypatch.setattr("tiled_jax.mlp.api.run", lambda call, x, w: plans.append(call.plan) or x)
    arguments = mlp_operands(300, hidden=128, intermediate=128, dtype=jnp.bfloat16)
    for backend in ("pallas", "xla", "auto"):
        tiled_mlp(*arguments, num_shards=3, backend=backend)
    assert plans == [ShardPlan(300, KERNEL_MULTIPLE), ShardPlan(300, 100), ShardPlan(300, 100)]


REFUSED = {
    "dtype": ({"dtype": jnp.float32}, {}, "The Pallas kernels take bfloat16 or float16, found float32."),
    "hidden": ({"hidden": 96}, {}, "The Pallas kernel dgated needs sizes that are multiples of 64, found 96."),
    "intermediate": (
        {"intermediate": 192},
        {},
        "The Pallas kernel dgated needs sizes that are multiples of 128, found 192.",
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


@pytest.mark.parametrize(
    ("up", "sizes", "reason"),
    [
        ("dual", {"out": 100}, "The Pallas kernel dgated needs sizes that are multiples of 64, found 100."),
        ("dual", {"hidden": 96}, "The Pallas kernel glu_up needs sizes that are multiples of 64, found 96."),
        ("auxiliary", {"hidden": 96}, "The Pallas kernel glu_up_aux needs sizes that are multiples of 64, found 96."),
        ("vendor", {"hidden": 96}, None),
    ],
)
def test_the_reason_is_about_every_kernel_that_runs(
    up: Any, sizes: dict[str, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiled_jax.core.mosaic.paths_for", lambda *key: Paths(up=up))
    given = {"hidden": 128, "intermediate": 128, "out": 128, **sizes}
    assert mlp_reason(jnp.bfloat16, gated=True, **given) == reason
