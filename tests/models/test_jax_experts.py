"""Experts a shard of tokens at a time against every expert on every token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shared_specs import Tiling, UnsupportedError
from shared_specs.tolerances import FACTOR, FLOOR
from tests.asserting import assert_within
from tests.core.jax_counting import temp_bytes
from tiled_jax.models import experts as experts_file
from tiled_jax.models.config import Experts
from tiled_jax.models.experts import ExpertsMLP

HIDDEN, INNER = 6, 10


@pytest.fixture(autouse=True)
def _short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_file, "_FEWEST", 1)


def mlp(count: int = 5, chosen: int = 2, dtype: Any = jnp.float64, **options: Any) -> ExpertsMLP:
    experts = Experts(count=count, chosen=chosen)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return ExpertsMLP(HIDDEN, INNER, experts=experts, dtype=dtype, param_dtype=wide, rngs=nnx.Rngs(0), **options)


def results(module: ExpertsMLP, x: jax.Array, dy: jax.Array) -> Any:
    graph, parameters = nnx.split(module)

    @jax.jit
    def run(parameters: nnx.State, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda p, x: nnx.merge(graph, p)(x), parameters, x)
        return y, *pull(dy)

    return run(parameters, x, dy)


def rows(tokens: int, dtype: Any = np.float64) -> list[jax.Array]:
    random = np.random.default_rng(tokens)
    return [jnp.asarray(random.standard_normal((tokens, HIDDEN)), dtype) for _ in range(2)]


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "shard"),
    [(23, 5, 2, 4), (7, 5, 2, 1), (3, 8, 2, 64), (1, 4, 4, 2), (0, 4, 2, 3)],
    ids=["ragged", "one row", "more experts than tokens", "all chosen", "no tokens"],
)
def test_shards_of_experts_have_the_results_of_all_of_them(
    same: Any, tokens: int, count: int, chosen: int, shard: int
) -> None:
    x, dy = rows(tokens)
    tiled, plain = (
        mlp(count, chosen, **options) for options in ({"tiling": Tiling(shard_tokens=shard)}, {"plain": True})
    )
    same(results(tiled, x, dy), results(plain, x, dy))


def test_experts_that_nobody_chose_have_gradients_of_zero(same: Any) -> None:
    module, plain = mlp(tiling=Tiling(shard_tokens=4)), mlp(plain=True)
    x, dy = rows(9)
    for each in (module, plain):
        # Of the first feature, which is the same for all: experts 1 and 3 win everywhere.
        each.router.kernel[...] = jnp.zeros((HIDDEN, 5)).at[0].set(jnp.asarray([0.0, 9.0, 1.0, 8.0, 2.0]))
    x = x.at[:, 0].set(1.0)
    found = results(module, x, dy)
    same(found, results(plain, x, dy))
    for name in experts_file.WEIGHTS:
        gradient = np.asarray(found[1][name][...])
        assert [bool(np.any(gradient[expert])) for expert in range(5)] == [False, True, False, True, False]


def test_forward_mode_and_its_mix_with_reverse_mode(same: Any) -> None:
    x, dx = rows(11)

    def hessian_product(module: ExpertsMLP) -> Any:
        graph, parameters = nnx.split(module)
        loss = lambda x: jnp.sum(jnp.sin(nnx.merge(graph, parameters)(x)))  # noqa: E731
        return jax.jit(lambda: (jax.jvp(loss, (x,), (dx,)), jax.jvp(jax.grad(loss), (x,), (dx,))))()

    same(hessian_product(mlp(tiling=Tiling(shard_tokens=3))), hessian_product(mlp(plain=True)))


@pytest.mark.deep
def test_bfloat16_gradients_of_many_shards_err_no_more_than_of_one(x64: None) -> None:
    """Of an expert that many shards have added to; sums in bfloat16 would drift."""
    x, dy = rows(256, jnp.bfloat16)
    exact = results(mlp(2, 1, plain=True), x.astype(jnp.float64), dy.astype(jnp.float64))[1]["w_up"][...]

    def error(shard: int) -> float:
        options = {"dtype": jnp.bfloat16, "tiling": Tiling(shard_tokens=shard)}
        found = results(mlp(2, 1, **options), x, dy)[1]["w_up"][...]
        assert found.dtype == jnp.float32
        return float(jnp.linalg.norm(found.astype(jnp.float64) - exact) / jnp.linalg.norm(exact))

    assert error(2) <= FACTOR * error(256) + FLOOR["bfloat16"]


def test_bytes_are_those_of_one_shard() -> None:
    x = jax.ShapeDtypeStruct((8192, 64), jnp.float32)

    def gradient_bytes(**options: Any) -> int:
        experts = Experts(count=4, chosen=2)
        graph, parameters = nnx.split(
            nnx.eval_shape(lambda: ExpertsMLP(64, 512, experts=experts, dtype=jnp.float32, rngs=nnx.Rngs(0), **options))
        )
        loss = lambda p, x: jnp.sum(nnx.merge(graph, p)(x) ** 2)  # noqa: E731
        return temp_bytes(jax.value_and_grad(loss, argnums=(0, 1)), parameters, x)

    plain, tiled = gradient_bytes(plain=True), gradient_bytes(tiling=Tiling(shard_tokens=256))
    assert plain >= 2 * 4 * 8192 * 512 * 4  # gate and up of four experts
    assert tiled < 8192 * 512 * 4


@pytest.mark.parametrize(
    ("name", "tiling"), [("keep", Tiling(keep=0.5)), ("memory_budget", Tiling(memory_budget=2**20))]
)
def test_a_tiling_that_experts_do_not_have_is_refused(name: str, tiling: Tiling) -> None:
    with pytest.raises(UnsupportedError, match=f"^Llama: {name} must be .* with experts, got .*Pass num_shards"):
        mlp(dtype=jnp.float32, tiling=tiling)


def test_the_router_takes_part_in_the_derivative(x64: None) -> None:
    """Against differences of the value, which know nothing of how it is derived."""
    module = mlp(tiling=Tiling(shard_tokens=3))
    x, dy = rows(7)
    gradient = results(module, x, dy)[1]["router"]["kernel"][...]
    kernel, step = module.router.kernel[...], 1e-6
    graph, parameters = nnx.split(module)

    @jax.jit
    def value(kernel: jax.Array) -> jax.Array:
        moved = nnx.merge(graph, jax.tree.map(lambda a: a, parameters))
        moved.router.kernel[...] = kernel
        return jnp.sum(moved(x) * dy)

    for place in ((0, 0), (3, 2), (5, 4)):
        values = [float(value(kernel.at[place].add(sign * step))) for sign in (1, -1)]
        assert_within(np.asarray((values[0] - values[1]) / (2 * step)), np.asarray(gradient[place]), step, str(place))
