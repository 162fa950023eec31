"""The Pallas kernels of plain products: numbers in JAX's GPU interpreter, the order of their sums, lowering for CUDA."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.core.rounding import DTYPES, compute_dtype, relative_error, round_to
from shared_specs.kernels.blocks import CANDIDATES, DEFAULTS, DETERMINISTIC, Blocks
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.kernels.jax_interpreted import written_over
from tiled_jax.core.mosaic import interpreter, mlp_reason
from tiled_jax.mlp.kernels.linear import dx, linear
from tiled_jax.mlp.kernels.weight_gradient import weight_gradient
from tiled_jax.mlp.steps_kernels import KernelMLPSteps

pytestmark = pytest.mark.usefixtures("clean")

Array = np.ndarray[Any, Any]
H, I = 4096, 14336  # noqa: E741  Llama 3 8B
# Several blocks in every dim of the shapes below.
SMALL = Blocks(rows=128, columns=64, depth=64, stages=2, group=2)


def draw(dtype: str, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(len(shapes))
    return [jnp.asarray(rng.standard_normal(shape).astype(DTYPES[dtype])) for shape in shapes]


def assert_true(found: jax.Array, formula: Callable[..., Array], arrays: list[jax.Array | None], dtype: str) -> None:
    """As right as the shared tolerance asks of a result in `dtype`. What nothing wrote is NaN, which never passes."""
    __tracebackhide__ = True
    assert str(found.dtype) == dtype
    given = [
        [None if a is None else np.asarray(a).astype(d) for a in arrays] for d in (np.float64, compute_dtype(dtype))
    ]
    exact, plain = formula(*given[0]), round_to(dtype)(formula(*given[1]))
    assert_within(np.asarray(found), exact, limit(relative_error(plain, exact), dtype), dtype)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("dtype", "tokens", "with_bias", "blocks"),
    [
        ("bfloat16", 200, True, SMALL),
        ("float16", 1, False, SMALL),
        ("float16", 130, True, None),
    ],
)
def test_linear(dtype: str, tokens: int, with_bias: bool, blocks: Blocks | None) -> None:
    """192 columns are three blocks, of the table's blocks narrowed too."""
    x, w, bias = draw(dtype, (tokens, 128), (128, 192), (192,))
    maybe_bias = bias if with_bias else None
    y = linear(x, w, bias=maybe_bias, blocks=blocks, interpret=interpreter())
    assert_true(y, lambda x, w, b: x @ w + (0 if b is None else b), [x, w, maybe_bias], dtype)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("dtype", "tokens", "gated", "blocks"),
    [
        ("bfloat16", 200, True, SMALL),
        ("float16", 130, False, SMALL),
        ("bfloat16", 128, True, None),
    ],
)
def test_dx(dtype: str, tokens: int, gated: bool, blocks: Blocks | None) -> None:
    dgate, dup, w_gate, w_up = draw(dtype, (tokens, 128), (tokens, 128), (192, 128), (192, 128))
    arrays = [dgate, dup, w_gate, w_up] if gated else [None, dup, None, w_up]

    def formula(dgate: Any, dup: Any, w_gate: Any, w_up: Any) -> Array:
        return dup @ w_up.T + (0 if dgate is None else dgate @ w_gate.T)

    assert_true(dx(*arrays, blocks=blocks, interpret=interpreter()), formula, arrays, dtype)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("dtype", "tokens", "blocks"),
    [
        ("bfloat16", 200, SMALL),
        ("float16", 1, SMALL),
        ("bfloat16", 128, None),
    ],
)
def test_weight_gradient(dtype: str, tokens: int, blocks: Blocks | None) -> None:
    """200 tokens are three blocks of 64 and a ragged one."""
    a, b = draw(dtype, (tokens, 256), (tokens, 128))
    (acc,) = draw("float32", (256, 128))
    found = weight_gradient(acc, a, b, blocks=blocks, interpret=interpreter())
    assert_true(found, lambda acc, a, b: acc + a.T @ b, [acc, a, b], "float32")


def test_a_sum_over_shards_is_that_over_all_tokens() -> None:
    """To the last bit, because it starts from the stored sum: adding a shard's own sum to it gives other bits."""
    a, b = draw("bfloat16", (256, 128), (256, 64))
    run = partial(weight_gradient, blocks=SMALL, interpret=interpreter())
    zero = jnp.zeros((128, 64), jnp.float32)
    whole, first = run(zero, a, b), run(zero, a[:128], b[:128])
    np.testing.assert_array_equal(np.asarray(run(first, a[128:], b[128:])), np.asarray(whole))
    assert (np.asarray(first + run(zero, a[128:], b[128:])) != np.asarray(whole)).any()


def test_sizes_that_the_blocks_do_not_divide_are_refused() -> None:
    x, w, acc = (
        jnp.zeros(shape, dtype)
        for shape, dtype in (((4, 96), "bfloat16"), ((96, 96), "bfloat16"), ((96, 96), "float32"))
    )
    for call, sizes in (
        (lambda: linear(x, w), "linear: K, N = 96, 96 must be multiples of 64, 64"),
        (lambda: dx(None, x, None, w), "dx: K, N = 96, 96 must be multiples of 32, 64"),
        (lambda: weight_gradient(acc, x, x), "weight_gradient: M, N = 96, 96 must be multiples of 128, 64"),
    ):
        with pytest.raises(ValueError, match=sizes):
            call()


@pytest.mark.parametrize(
    ("sizes", "gated", "reason"),
    [
        ({}, True, None),
        ({}, False, None),
        ({"out": 64}, True, None),
        ({"hidden": 192}, True, "The Pallas kernel weight_gradient needs sizes that are multiples of 128, found 192."),
        ({"out": 96}, True, "The Pallas kernel dgated needs sizes that are multiples of 64, found 96."),
        ({"out": 32}, False, "The Pallas kernel linear needs sizes that are multiples of 64, found 32."),
        ({"hidden": 32}, False, "The Pallas kernel linear needs sizes that are multiples of 64, found 32."),
        ({"intermediate": 0}, False, "The Pallas kernel linear needs sizes that are multiples of 64, found 0."),
    ],
)
def test_the_reason_names_a_size_that_no_kernel_takes(sizes: dict[str, int], gated: bool, reason: str | None) -> None:
    given = {"hidden": 256, "intermediate": 128, "out": 256, **sizes}
    assert mlp_reason(jnp.bfloat16, gated=gated, deterministic=True, **given) == reason


def launches(dtype: Any) -> dict[str, tuple[Any, tuple[jax.ShapeDtypeStruct | None, ...]]]:
    """Every launch by name, with the shapes of its operands at the widths of Llama 3 8B."""
    tensor = partial(jax.ShapeDtypeStruct, dtype=dtype)
    x, d, w_up, w_down, bias = map(tensor, ((2048, H), (2048, I), (H, I), (I, H), (H,)))
    acc = jax.ShapeDtypeStruct((H, I), jnp.float32)
    return {
        "linear": (linear, (d, w_down)),
        "linear_bias": (lambda x, w, bias, **options: linear(x, w, bias=bias, **options), (d, w_down, bias)),
        "dx": (dx, (d, d, w_up, w_up)),
        "dx_plain": (dx, (None, d, None, w_up)),
        "weight_gradient": (weight_gradient, (acc, x, d)),
    }


LAUNCHES = {
    "linear": "linear",
    "linear_bias": "linear",
    "dx": "dx",
    "dx_plain": "dx",
    "weight_gradient": "weight_gradient",
}
CONFIGURATIONS = [(name, dtype, None) for name in LAUNCHES for dtype in (jnp.bfloat16, jnp.float16)]
CONFIGURATIONS += [
    (op, jnp.bfloat16, blocks) for op in sorted({*LAUNCHES.values()}) for blocks in CANDIDATES["pallas"][op][1:]
]


@pytest.mark.deep_but(6)
@pytest.mark.parametrize(("name", "dtype", "blocks"), CONFIGURATIONS, ids=str)
def test_lowers_for_cuda(name: str, dtype: Any, blocks: Blocks | None) -> None:
    """Layouts and shared memory of the table's blocks, and of all that `tune` may put there; any tokens are one kernel."""
    fn, shapes = launches(dtype)[name]
    assert kernels_in(partial(fn, blocks=blocks), *shapes) == 1


def kernels_in(fn: Any, *shapes: Any) -> int:
    return jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2")


def test_every_op_of_the_table_has_a_launch() -> None:
    assert {*LAUNCHES.values()} <= set(DEFAULTS["pallas"]["sm_90"])


STEPS = KernelMLPSteps(DETERMINISTIC)


def sum_step(acc: jax.Array, a: jax.Array, d: jax.Array) -> jax.Array:
    return STEPS.added(acc, a, d)


def test_the_sum_takes_the_place_of_the_accumulator() -> None:
    assert written_over(sum_step, *launches(jnp.bfloat16)["weight_gradient"][1]) == 1


@pytest.mark.deep
@pytest.mark.parametrize("check_vma", [True, False])
def test_steps_lower_inside_shard_map(check_vma: bool) -> None:
    """Where the operands, and so the results, vary over devices."""
    mesh = jax.make_mesh((2, 4), ("sequence", "tensor"), axis_types=(AxisType.Auto,) * 2)
    split, columns = P("sequence", "tensor"), P(None, "tensor")
    bf16, f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    tokens, w = bf16((256, 512)), bf16((128, 512))
    calls = (
        (lambda x, w: STEPS.linear(x, w, None), (P("sequence"), columns), (bf16((256, 128)), w)),
        (lambda d, w: STEPS.dx({"up": d, "gate": d}, {"up": w, "gate": w}), (split, columns), (tokens, w)),
        (sum_step, (split, P("sequence"), split), (f32((256, 512)), bf16((256, 128)), tokens)),
    )
    for fn, specs, shapes in calls:
        sharded = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=split, check_vma=check_vma)
        with jax.set_mesh(mesh):
            assert kernels_in(sharded, *shapes) == 1


def test_steps_lower_under_vmap_and_differentiate_as_their_formulas() -> None:
    acc, a, d = (
        jax.ShapeDtypeStruct((3, *shape), dtype)
        for shape, dtype in (((128, 64), jnp.float32), ((128, 128), jnp.bfloat16), ((128, 64), jnp.bfloat16))
    )
    assert kernels_in(jax.vmap(sum_step), acc, a, d) == 1
    slope = jax.grad(lambda *operands: jnp.sum(jnp.square(sum_step(*operands))), argnums=(0, 1, 2))
    traced = jax.jit(slope).trace(*(jax.ShapeDtypeStruct(s.shape[1:], s.dtype) for s in (acc, a, d)))
    assert "stablehlo.dot_general" in traced.lower(lowering_platforms=("cuda",)).as_text()
