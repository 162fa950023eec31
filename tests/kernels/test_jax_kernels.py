"""The Pallas kernels: their numbers in JAX's GPU interpreter, and their lowering for CUDA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import ACTIVATIONS
from shared_specs.kernels.blocks import CANDIDATES, DEFAULTS, Blocks
from shared_specs.tolerances import FLOOR
from tests.asserting import assert_within
from tests.kernels.jax_interpreted import assert_true, operands, written_over
from tests.mlp import jax_untiled as untiled
from tiled_jax.core.activations import activate, activate_in_kernel
from tiled_jax.core.mosaic import interpreter
from tiled_jax.mlp.kernels.dgated import dgated
from tiled_jax.mlp.kernels.glu_up import gate_and_up, glu_up
from tiled_jax.mlp.kernels.glu_up_aux import glu_up_auxiliary
from tiled_jax.mlp.steps import XLA

pytestmark = pytest.mark.usefixtures("clean")

H, I = 128, 128  # noqa: E741
LLAMA_3_8B = {"hidden": 4096, "intermediate": 14336}
WEIGHTS = ("w_gate", "w_up")


@pytest.mark.deep_but(1)
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
    gate = XLA.linear(arrays["x"], arrays["w_gate"], arrays.get("b_gate"))
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


@pytest.mark.deep
def test_one_program_makes_many_blocks() -> None:
    """Nine blocks on the interpreter's two multiprocessors, four of them in the second group of the raster."""
    arrays = operands(384, 64, 384, "bfloat16")
    options = {"activation": "silu", "interpret": interpreter()}
    blocks = Blocks(rows=128, columns=128, depth=64, group=2)
    found = {"h": _glu_up(arrays, blocks=blocks, **options)}
    gate = XLA.linear(arrays["x"], arrays["w_gate"], None)
    again = glu_up_auxiliary(arrays["x"], arrays["w_up"], gate, blocks=blocks, **options)
    assert_true({"h": again}, arrays, "bfloat16", "silu")
    found |= zip(
        ("dgate", "dup", "h_again"),
        dgated(*(arrays[name] for name in ("dy", "w_down", "gate", "up")), blocks=blocks, **options),
        strict=True,
    )
    assert_true(found, arrays, "bfloat16", "silu")


@pytest.mark.parametrize("op", ["glu_up", "dgated"])
def test_warpgroups_in_turns(op: str) -> None:
    """Three blocks of three steps in two slots: one program has a block for each warpgroup, the other one for the first."""
    arrays = operands(130, 192, 128, "bfloat16", ("gate", "up"))
    blocks = Blocks(rows=64, columns=128, depth=64, stages=2, turns=True)
    options: dict[str, Any] = {"activation": "silu", "blocks": blocks, "interpret": interpreter()}
    if op == "glu_up":
        found = dict(zip(("h", "gate", "up"), _glu_up(arrays, keep=True, **options), strict=True))
    else:
        made = dgated(*(arrays[name] for name in ("dy", "w_down", "gate", "up")), **options)
        found = dict(zip(("dgate", "dup", "h_again"), made, strict=True))
    assert_true(found, arrays, "bfloat16", "silu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activations_are_those_of_the_xla_path(activation: str) -> None:
    a = jnp.linspace(-12, 12, 4001, dtype=jnp.float32)
    for mine, xla in zip(activate_in_kernel(activation, a), activate(activation, a), strict=True):
        assert_within(np.asarray(mine), np.asarray(xla), FLOOR["float32"], activation)


@pytest.mark.parametrize("formulas", [activate_in_kernel, activate], ids=["kernel", "xla"])
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
        h, d = XLA.pre_activation_gradients(arrays["dy"], pre, arrays["w_down"], activation)
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


# Every launch in both dtypes, and every formula of an activation in a forward and in a backward.
LOWERED = [
    (op, "silu", dtype) for op in ("glu_up", "gate_and_up", "glu_up_aux") for dtype in (jnp.bfloat16, jnp.float16)
]
LOWERED += [(op, activation, jnp.bfloat16) for op in ("glu_up_keep", "dgated") for activation in ACTIVATIONS]
LOWERED += [(op, "silu", jnp.float16) for op in ("glu_up_keep", "dgated")]


@pytest.mark.deep_but(6)
@pytest.mark.parametrize(("op", "activation", "dtype"), LOWERED)
def test_lowers_for_cuda(op: str, activation: str, dtype: Any) -> None:
    """Layouts and shared memory of the table's blocks, at the widths of Llama 3 8B; any tokens are the same kernel."""
    assert_lowers(*launches(dtype, activation)[op])


@pytest.mark.deep_but(4)
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


@pytest.mark.parametrize(("op", "results"), [("dgated", 2), ("glu_up_aux", 1), ("glu_up", 0)])
def test_results_that_take_the_place_of_an_operand(op: str, results: int) -> None:
    """dgate and dup that of gate and up, h of a gate that is an input that of gate."""
    fn, shapes = launches(jnp.bfloat16, "silu")[op]
    assert written_over(fn, *shapes) == results


@pytest.mark.deep
def test_dgated_of_a_batch() -> None:
    """One launch after the other, each in place: what is there under vmap is what is there without."""
    arrays = operands(64, H, I, "bfloat16")
    first = [arrays[name] for name in ("dy", "w_down", "gate", "up")]
    second = [first[0] * 2, first[1], first[3], first[2]]
    run = partial(dgated, activation="silu", interpret=interpreter())
    batch = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    batch[1] = first[1]
    found = jax.vmap(run, (0, None, 0, 0))(*batch)
    for i, alone in enumerate((run(*first), run(*second))):
        for a, b in zip(found, alone, strict=True):
            np.testing.assert_array_equal(np.asarray(a[i]), np.asarray(b))


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
