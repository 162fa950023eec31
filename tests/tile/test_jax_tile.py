"""`tile`: any function or module by shards, with the numbers and gradients of the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs.config import Tiling
from shared_specs.tolerances import FLOOR
from tests.core.jax_counting import temp_bytes
from tests.mlp.jax_untiled import operands, y_and_gradients
from tiled_jax import SpecError, UnsupportedError, tile


class Drop(nnx.Module):
    """nnx.Dropout in any dtype under strict promotion."""

    def __init__(self, rate: float, *, rngs: nnx.Rngs) -> None:
        self.rate, self.rngs = rate, rngs.dropout.fork()

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.rate == 0.0:
            return x
        kept = jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), jnp.zeros_like(x))


class Block(nnx.Module):
    """Up, dropout, down, and a second result of another size."""

    def __init__(self, *, rate: float = 0.0, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 12, rngs=rngs, param_dtype=jnp.float64)
        self.drop = Drop(rate, rngs=rngs)
        self.down = nnx.Linear(12, 8, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        h = jnp.tanh(self.up(x))
        return self.down(self.drop(h)), {"router": jax.nn.softmax(h)[..., :3], "nothing": None}


LEADS = [
    ((33,), 4),
    ((3, 11), 4),
    ((2, 3, 7), 4),
    ((4, 8), 4),
    ((3,), 4),
    ((0,), 4),
    ((2, 0), 1),
    ((9,), 1),
    ((9,), None),
]


@pytest.mark.parametrize(("lead", "num_shards"), LEADS, ids=str)
def test_function_over_explicit_weights(lead: tuple[int, ...], num_shards: int | None, same: Any) -> None:
    x, w_gate, w_up, _ = operands(*lead)
    bias = jnp.cos(jnp.arange(12.0))

    def fn(x: jax.Array, weights: dict[str, jax.Array], bias: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights["gate"] + bias) * (x @ weights["up"])

    arguments = (x, {"gate": w_gate, "up": w_up}, bias)
    tiled = tile(fn, num_shards=num_shards)
    same(jax.jit(y_and_gradients(tiled))(*arguments), jax.jit(y_and_gradients(fn))(*arguments))


@pytest.mark.parametrize("lead", [(3, 11), (32,), (0,)], ids=str)
def test_module_with_several_results(lead: tuple[int, ...], same: Any) -> None:
    x = operands(*lead)[0]
    module = Block(rngs=nnx.Rngs(0))

    def loss(use: Any) -> Any:
        def run(module: Block, x: jax.Array) -> jax.Array:
            y, more = use(module)(x)
            assert more["nothing"] is None
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(more["router"]))

        return nnx.value_and_grad(run, argnums=(0, 1))

    (value, (of_module, of_x)), (value_whole, (whole, of_x_whole)) = (
        nnx.jit(loss(use))(module, x) for use in (lambda module: tile(module, num_shards=4), lambda module: module)
    )
    same((value, of_x), (value_whole, of_x_whole))
    same(nnx.to_pure_dict(of_module), nnx.to_pure_dict(whole))


def test_module_as_argument_and_as_owner_of_a_method(same: Any) -> None:
    x, module = operands(3, 11)[0], Block(rngs=nnx.Rngs(0))
    expected = module(x)
    same(tile(lambda x, module: module(x), num_shards=4)(x, module), expected)
    same(tile(module.__call__, num_shards=4)(x), expected)
    same(tile(lambda x, module: module(x), num_shards=4)(module=module, x=x), expected)


def test_a_closure_gets_its_gradients(same: Any) -> None:
    x, w, _, _ = operands(3, 11)

    def run(use: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.sin(use(lambda x: jnp.tanh(x @ w))(x))))(w)

    same(run(lambda fn: tile(fn, num_shards=4)), run(lambda fn: fn))


def test_which_arguments_are_cut(same: Any) -> None:
    """Beside [B, S, H] whatever starts with B, S is cut; beside [T, H] nothing else is, for it may be a weight."""
    x, mask = operands(3, 11)[0], jnp.arange(33.0).reshape(3, 11)
    shapes = []

    def fn(x: jax.Array, extra: dict[str, jax.Array], *, scale: float) -> jax.Array:
        shapes.append((x.shape, extra["mask"].shape, extra["table"].shape))
        return scale * x * extra["mask"][..., None] + extra["table"]

    extra = {"mask": mask, "table": jnp.ones(8)}
    same(tile(fn, tiling=Tiling(shard_tokens=10))(x, extra, scale=2.0), fn(x, extra, scale=2.0))
    assert set(shapes[:-1]) == {((1, 3, 8), (1, 3), (8,)), ((1, 10, 8), (1, 10), (8,))}

    x, square = operands(8, hidden=8)[0], jnp.eye(8)
    same(tile(lambda x, w: x @ w, num_shards=4)(x, square), x)


def test_results_without_the_leading_one_come_back_flat(same: Any) -> None:
    x = operands(3, 11)[0]
    same(tile(lambda x: x[0] * 2, num_shards=4)(x), 2 * x.reshape(33, 8))


def test_second_order_and_vmap(same: Any) -> None:
    x, w, _, _ = operands(3, 11)

    def curvature(use: Any) -> Any:
        fn = use(lambda x, w: jnp.tanh(x @ w))
        slope = jax.grad(lambda x, w: jnp.sum(fn(x, w)), argnums=1)
        return jax.jit(jax.grad(lambda x, w: jnp.sum(slope(x, w) ** 2), argnums=(0, 1)))(x, w)

    same(curvature(lambda fn: tile(fn, num_shards=4)), curvature(lambda fn: fn))
    tiled = jax.vmap(tile(lambda x, w: jnp.tanh(x @ w), num_shards=4), (0, None))
    same(tiled(x, w), jnp.tanh(x @ w))


def dropped(module: nnx.Module, x: jax.Array, **options: Any) -> np.ndarray:
    return np.asarray(nnx.jit(lambda module, x: tile(module, **options)(x))(module, x)).reshape(-1, x.shape[-1]) != 0


@pytest.mark.parametrize("lead", [(12,), (11,)], ids=str)
def test_every_shard_draws_its_own_mask(lead: tuple[int, ...]) -> None:
    x, module = jnp.ones((*lead, 64)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first, second = (dropped(module, x, num_shards=4) for _ in range(2))
    assert len({mask.tobytes() for mask in first}) == len(first), "two tokens have the same mask"
    assert (first != second).any(), "two calls have the same mask"
    again = dropped(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), x, num_shards=4)
    np.testing.assert_array_equal(first, again, err_msg="the same seed draws other masks")


def test_a_stream_is_advanced_only_if_it_was_drawn_from() -> None:
    module, x = Drop(0.5, rngs=nnx.Rngs(0)), jnp.ones((12, 4))
    counts = [int(module.rngs.count[...])]
    tile(module, num_shards=4)(x)
    counts.append(int(module.rngs.count[...]))
    module.rate = 0.0
    tile(module, num_shards=4)(x)
    counts.append(int(module.rngs.count[...]))
    assert counts == [0, 1, 1]


@pytest.mark.parametrize("lead", [(12,), (11,)], ids=str)
def test_backward_sees_the_masks_of_forward(lead: tuple[int, ...], x64: None) -> None:
    """The gradient along a direction is the central difference of two calls with the same seed."""
    x, direction = operands(*lead)[0], operands(*lead, seed=1)[0]

    @jax.jit
    def value(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(tile(Block(rate=0.5, rngs=nnx.Rngs(0)), num_shards=4)(x)[0]))

    step = 1e-5
    difference = (value(x + step * direction) - value(x - step * direction)) / (2 * step)
    along = jnp.sum(jax.jit(jax.grad(value))(x) * direction)
    # A central difference errs by step^2 and by rounding / step; another mask is wrong by tens of percent.
    assert abs(float(along - difference)) <= (step**2 + FLOOR["float64"] / step) * abs(float(along)) * 10


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "rngs", [lambda: jax.random.key(0), lambda: nnx.Rngs(0), lambda: nnx.Rngs(0).params], ids=["key", "Rngs", "stream"]
)
def test_rngs_for_a_function(rngs: Any) -> None:
    def fn(x: jax.Array, *, rngs: Any) -> jax.Array:
        key = rngs if isinstance(rngs, jax.Array) else rngs()
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, jnp.zeros_like(x))

    x = jnp.ones((11, 64))
    mask = np.asarray(tile(fn, num_shards=4, rngs=rngs())(x))
    assert len({row.tobytes() for row in mask}) == 11
    np.testing.assert_array_equal(mask, np.asarray(tile(fn, num_shards=4, rngs=rngs())(x)))
    slope = jax.grad(lambda x: jnp.sum(tile(fn, num_shards=4, rngs=rngs())(x)))(x)
    np.testing.assert_array_equal(mask, np.asarray(slope), err_msg="backward drew another mask")


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls[...] = self.calls[...] + 1
        return x


class Keeper(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen = nnx.Intermediate(x)
        return x


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (lambda: nnx.BatchNorm(8, rngs=nnx.Rngs(0)), r"mean \(BatchStat\)"),
        (Counter, r"calls \(Variable\)"),
        (Keeper, r"seen \(a new variable\)"),
    ],
    ids=["statistics", "counter", "intermediate"],
)
def test_written_state_is_refused(module: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"^tile: fn writes to the state of its modules: {name}"):
        tile(module(), num_shards=4)(jnp.ones((12, 8)))


def test_statistics_that_are_only_read_are_fine(same: Any) -> None:
    class Centred(nnx.Module):
        def __init__(self) -> None:
            self.mean = nnx.BatchStat(jnp.cos(jnp.arange(8.0)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x - self.mean[...]

    x, module = operands(3, 11)[0], Centred()
    same(tile(module, num_shards=4)(x), module(x))


NOT_A_FUNCTION: Any = 3


def fn(x: jax.Array) -> jax.Array:
    return x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: tile(NOT_A_FUNCTION), TypeError, "tile: fn must be a module or a function, got int."),
        (
            lambda x: tile(fn, num_shards=0),
            SpecError,
            "tile: num_shards must be >= 1, got 0. Pass num_shards=None to let the plan choose.",
        ),
        (
            lambda x: tile(fn, tiling=Tiling(keep=0.5)),
            SpecError,
            "tile: keep must be 0, got 0.5. A generic function has no gate and up to keep.",
        ),
        (
            lambda x: tile(fn, tiling=Tiling(memory_budget=100)),
            SpecError,
            "tile: memory_budget must be None, got 100. The bytes of a generic function are unknown; pass num_shards or "
            "shard_tokens.",
        ),
        (lambda x: tile(fn, rngs=3), TypeError, "tile: rngs must be a key, nnx.Rngs, nnx.RngStream or None, got int."),
        *(
            (
                lambda x, rngs=rngs: tile(fn, rngs=rngs),
                TypeError,
                f"tile: rngs must be a key, nnx.Rngs, nnx.RngStream or None, got an array {got}. Every shard gets a split of "
                "the one key.",
            )
            for rngs, got in (
                (jnp.ones(3), "float32 [3]"),
                (jax.random.split(jax.random.key(0), 3), "key<fry> [3]"),
                (jax.random.split(jax.random.PRNGKey(0), 3), "uint32 [3, 2]"),
            )
        ),
        (lambda x: tile(fn)([1.0]), TypeError, "tile: x, the first argument, must be an array, got list."),
        (lambda x: tile(fn)(x[0]), SpecError, "tile: x must be [tokens, hidden] or more dims, got [8]."),
        (
            lambda x: tile(jnp.sum, num_shards=4)(x),
            SpecError,
            "tile: output 0 of fn must be [t, ...], or [1, t, ...] where x has three or more dims, for a shard of t tokens, "
            "got []. fn has to return one row for each "
            "token of its shard.",
        ),
        (lambda x: tile(lambda x: 3.0)(x), TypeError, "tile: output 0 of fn must be an array or None, got float."),
        (
            lambda x: tile(lambda x, rngs: x, rngs=jax.random.key(0))(x, rngs=3),
            SpecError,
            "tile: rngs is given twice, to tile and to the call. Give it once.",
        ),
    ],
)
def test_bad_input(call: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        call(jnp.ones((12, 8)))
    assert str(caught.value) == message


def test_temp_bytes_are_those_of_one_shard() -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8192, 64), (64, 2048), (2048, 64))]

    def gradient(use: Any) -> Any:
        return y_and_gradients(use(lambda x, w: jnp.tanh(x @ w["up"]) @ w["down"]))

    arguments = shapes[0], {"up": shapes[1], "down": shapes[2]}
    plain = temp_bytes(gradient(lambda fn: fn), *arguments)
    tiled = temp_bytes(gradient(lambda fn: tile(fn, num_shards=16)), *arguments)
    assert plain > 8192 * 2048 * 4
    assert tiled < plain / 8
