"""`Tiling(deterministic=True)` in JAX: results of equal bits at every shard count, in the interpreter; what is refused."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError
from shared_specs.kernels.blocks import DETERMINISTIC
from shared_specs.mlp.cases import MLPCase
from shared_specs.shards import ShardPlan
from tests.adapters import ADAPTERS
from tests.asserting import assert_case
from tests.kernels.jax_interpreted import FINDS_RACES
from tiled_jax import backends, tiled_mlp
from tiled_jax.core.loops import Body, for_each_shard
from tiled_jax.mlp.autodiff import MLPCall, run
from tiled_jax.mlp.steps_kernels import KernelMLPSteps

pytestmark = pytest.mark.usefixtures("interpreting")

H, I = 128, 128  # noqa: E741
NAMES = ("x", "w_up", "w_down", "up", "down", "w_gate", "gate")
# The interpreter of jax 0.10 takes minutes for these.
slow_before_0_11 = pytest.mark.slow if not FINDS_RACES else lambda test: test


def operands(tokens: int, *, gated: bool) -> dict[str, jax.Array]:
    rng = np.random.default_rng(tokens)
    shapes = {"x": (tokens, H), "w_up": (H, I), "w_down": (I, H), "up": (I,), "down": (H,)}
    shapes |= {"w_gate": (H, I), "gate": (I,)} if gated else {}
    scales = {name: H**-0.5 if name.startswith("w_") else 1.0 for name in shapes}
    # float32 master weights, whose gradients are the sums themselves, not yet rounded.
    kinds = {name: jnp.bfloat16 if name == "x" else jnp.float32 for name in shapes}
    return {name: jnp.asarray(scales[name] * rng.standard_normal(s), kinds[name]) for name, s in shapes.items()}


def call(tiling: Tiling, activation: str, a: dict[str, jax.Array]) -> jax.Array:
    biases = {name: a[name] for name in ("gate", "up", "down") if name in a}
    return tiled_mlp(
        a["x"],
        a.get("w_gate"),
        a["w_up"],
        a["w_down"],
        biases=biases,
        activation=activation,
        tiling=tiling,
        backend="pallas",
    )


def results(tokens: int, num_shards: int, *, gated: bool, keep: float = 0.0, wanted: tuple[str, ...] = NAMES) -> Any:
    """y and the gradients of the wanted operands, as bits."""
    arrays = operands(tokens, gated=gated)
    tiling = Tiling(num_shards=num_shards, keep=keep, deterministic=True)
    moving = {name: a for name, a in arrays.items() if name in wanted}
    dy = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, H)), jnp.bfloat16)

    @jax.jit
    def step(moving: dict[str, jax.Array]) -> Any:
        y, pull = jax.vjp(lambda moving: call(tiling, "silu" if gated else "relu_squared", arrays | moving), moving)
        return {"y": y, **pull(dy)[0]}

    return {name: np.asarray(value).view(f"u{value.dtype.itemsize}") for name, value in step(moving).items()}


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    __tracebackhide__ = True
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@slow_before_0_11
@pytest.mark.parametrize(
    ("gated", "tokens", "counts"),
    [(True, 256, (2,)), (False, 384, (3,)), pytest.param(True, 512, (2, 4), marks=pytest.mark.slow)],
    ids=["gated", "plain", "more shards"],
)
def test_results_do_not_depend_on_the_number_of_shards(gated: bool, tokens: int, counts: tuple[int, ...]) -> None:
    """Nor on how many of the shards are kept."""
    whole = results(tokens, 1, gated=gated)
    assert all(value.any() for value in whole.values())
    for num_shards in counts:
        assert_same_bits(results(tokens, num_shards, gated=gated, keep=0.5), whole)


@slow_before_0_11
def test_rows_do_not_depend_on_shards_of_two_lengths() -> None:
    """200 tokens in two shards are 128 and 72."""
    whole = results(200, 1, gated=True, wanted=("x",))
    assert_same_bits(results(200, 2, gated=True, wanted=("x",)), whole)


def test_gradients_of_weights_over_shards_of_two_lengths_are_refused() -> None:
    for name in ("w_down", "up"):
        with pytest.raises(UnsupportedError) as caught:
            results(200, 2, gated=True, wanted=(name,))
        assert str(caught.value) == (
            "tiled_mlp: the length of a shard must be a divisor of the number of tokens for deterministic gradients of "
            "weights, got 128 (there are 200 tokens). Pass a shard_tokens that divides them and is a multiple of 128, or "
            "num_shards=1."
        )


CASE = partial(MLPCase, dims=(2, 128), hidden=128, intermediate=128, num_shards=2)
CASES = [
    CASE(dtype="bfloat16", biases=("gate", "up", "down"), keep=0.5, reason="deterministic, gated, one shard kept"),
    CASE(dtype="float16", gated=False, activation="gelu", biases=("up",), out=64, reason="deterministic, plain"),
]


@slow_before_0_11
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_results_are_right(case: MLPCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def deterministic(*operands: Any, num_shards: int, keep: float, **options: Any) -> jax.Array:
        tiling = Tiling(num_shards=num_shards, keep=keep, deterministic=True)
        return tiled_mlp(*operands, tiling=tiling, **options)

    monkeypatch.setattr("tiled_jax.tiled_mlp", deterministic)
    backends.record_run("tiled_mlp", "nothing")
    assert_case(case, ADAPTERS["jax"].run(case, "pallas"))
    assert backends.last_run("tiled_mlp") == "pallas"


REFUSED = {
    "xla": (
        {"backend": "xla"},
        'tiled_mlp: deterministic must be False here, got True. XLA adds in an order of its own; the backend "pallas" has '
        "kernels for all of the products, and runs or says why it cannot.",
    ),
    "sizes": (
        {"backend": "pallas"},
        "tiled_mlp: backend must be usable here, got 'pallas'. The Pallas kernel weight_gradient needs sizes that are "
        'multiples of 128, found 64. Pass backend="auto".',
    ),
}
REFUSED["auto never interprets"] = ({"backend": "auto"}, REFUSED["xla"][1])


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_deterministic_is_refused(what: str) -> None:
    options, text = REFUSED[what]
    x, w_up, w_down = (jnp.zeros(shape, jnp.bfloat16) for shape in ((128, 64), (64, 128), (128, 64)))
    with pytest.raises(UnsupportedError) as caught:
        tiled_mlp(x, w_up, w_up, w_down, tiling=Tiling(deterministic=True), **options)
    assert str(caught.value) == text


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_every_product_is_a_kernel(gated: bool) -> None:
    """Compiled for CUDA, neither pass has a product of XLA's."""
    text = lowered(128, gated=gated)
    assert "stablehlo.dot_general" not in text
    assert text.count("mosaic_gpu_v2") >= 6


def lowered(tokens: int, *, gated: bool) -> str:
    arrays = operands(tokens, gated=gated)
    w = {name if name.startswith("w_") else f"b_{name}": a for name, a in arrays.items() if name != "x"}
    plan, steps = ShardPlan(tokens, tokens), KernelMLPSteps(DETERMINISTIC)
    static = MLPCall(plan=plan, kept_start=tokens, activation="silu", steps=steps, token_order=True)

    def step(x: jax.Array, w: dict[str, jax.Array], dy: jax.Array) -> Any:
        y, pull = jax.vjp(partial(run, static), x, w)
        return y, pull(dy)

    return jax.jit(step).trace(arrays["x"], w, arrays["x"]).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kept_start", [0, 16, 32, 40, 64])
def test_shards_in_token_order(kept_start: int) -> None:
    """Every shard once, in order, by the body it belongs to; a shorter one at the end is refused."""

    def body(kind: int) -> Any:
        def write(start: Any, tokens: int, carry: Any) -> Any:
            seen, count = carry
            return seen.at[count].set(jnp.array([start, kind * tokens], jnp.int32)), count + 1

        return Body(write, lambda start, carry: (start, carry))

    def seen(plan: ShardPlan) -> np.ndarray[Any, Any]:
        carry = jnp.zeros((len(plan), 2), jnp.int32), jnp.int32(0)
        found, _ = for_each_shard(plan, kept_start, body(1), body(-1), carry, token_order=True)
        return np.asarray(found)

    expected = [(start, 16 if start < kept_start else -16) for start in (0, 16, 32, 48)]
    np.testing.assert_array_equal(seen(ShardPlan(64, 16)), expected)
    with pytest.raises(ValueError, match="must be of one length"):
        seen(ShardPlan(70, 16))
