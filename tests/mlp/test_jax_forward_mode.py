"""Forward mode of the MLP and the loss, and derivatives of derivatives, equal to those of the plain formulas in float64."""

from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from tests.core.jax_counting import flop, temp_bytes
from tests.loss.jax_split_tokens import mesh_of
from tests.mlp.jax_untiled import ACTIVATIONS, cross_entropy, loss_operands, mlp, operands, y_and_gradients
from tiled_jax import TiledLinear, UnsupportedError, tile, tiled_linear_cross_entropy, tiled_loss, tiled_mlp
from tiled_jax.parallel import (
    tensor_parallel_mlp,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)


def moved(arrays: Any) -> Any:
    """A tangent for every array."""
    return jax.tree.map(lambda a: jnp.cos(3 * a), arrays)


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("activation", ["silu", "gelu", pytest.param("relu_squared", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gated", [True, False])
def test_tangents_of_the_mlp(activation: str, gated: bool, same: Any) -> None:
    """With biases, a shorter last shard, kept shards; of all operands together and of each alone."""
    assert activation in ACTIVATIONS
    x, gate, up, down = operands(11)
    given = {"x": x, "up": up, "down": down, "b_up": jnp.sin(up[0]), "b_down": jnp.sin(down[0])}
    given |= {"gate": gate} if gated else {}

    def call(fn: Any, a: Any) -> jax.Array:
        biases = {"up": a["b_up"], "down": a["b_down"]}
        return fn(a["x"], a.get("gate"), a["up"], a["down"], activation=activation, biases=biases)

    @jax.jit
    def tangents(given: Any) -> Any:
        """Tiled and plain; given comes as an argument, so that nothing is computed when the program is made."""
        found = []
        for fn in (partial(tiled_mlp, num_shards=3, keep=0.5), mlp):
            for names in (given, *([name] for name in given)):
                some, rest = {name: given[name] for name in names}, given
                found.append(jax.jvp(lambda some, fn=fn, rest=rest: call(fn, rest | some), (some,), (moved(some),)))
        return found[: len(found) // 2], found[len(found) // 2 :]

    same(*tangents(given))


LOSSES = {
    "mean": LossOptions(label_smoothing=0.1, z_loss=0.1),
    "none, softcap": LossOptions(reduction="none", logit_softcap=3.0),
    "outputs": LossOptions(outputs=("lse", "entropy", "log_probs", "accuracy"), label_smoothing=0.1),
}


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    ("kind", "vocab_shards"), [("mean", None), ("mean", 3), ("none, softcap", None), ("outputs", 3)]
)
def test_tangents_of_the_loss(kind: str, vocab_shards: int | None, same: Any) -> None:
    x, weight, targets = loss_operands(2, 5)
    arrays, loss = (x, weight, jnp.cos(weight[0])), LOSSES[kind]
    tiling = Tiling(num_shards=3, vocab_shards=vocab_shards)

    def tiled(x: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
        return tuple(
            jax.tree.leaves(tiled_linear_cross_entropy(x, weight, targets, bias=bias, loss=loss, tiling=tiling))
        )

    def plain(x: jax.Array, weight: jax.Array, bias: jax.Array) -> Any:
        return tuple(jax.tree.leaves(cross_entropy(x, weight, targets, bias, loss=loss)))

    @jax.jit
    def tangents(*arrays: jax.Array) -> Any:
        actual, expected = (jax.jvp(fn, arrays, moved(arrays)) for fn in (tiled, plain))
        return (*actual, jax.linearize(tiled, *arrays)[1](*moved(arrays))), (*expected, expected[1])

    same(*tangents(*arrays))


ORDERS = {
    "jacfwd of jacfwd": lambda fn: jax.jacfwd(jax.jacfwd(fn, 0), 1),
    "hessian": lambda fn: jax.hessian(fn, (0, 1)),
    "jacrev of jacfwd": lambda fn: jax.jacrev(jax.jacfwd(fn, 0), 1),
    "jacrev of jacrev": lambda fn: jax.jacrev(jax.jacrev(fn, 0), 1),
}


def every_order(fn: Any) -> Any:
    """The derivatives of all ORDERS in one program."""
    return jax.jit(lambda *arguments: [order(fn)(*arguments) for order in ORDERS.values()])


def test_second_order_of_the_mlp(same: Any) -> None:
    x, *weights = operands(3, hidden=3, intermediate=4)

    def summed(fn: Any) -> Any:
        return lambda x, up: jnp.sum(jnp.sin(fn(x, weights[0], up, weights[2])))

    tiled = summed(partial(tiled_mlp, num_shards=2, keep=0.5))
    same(every_order(tiled)(x, weights[1]), every_order(summed(mlp))(x, weights[1]))


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.slow)])
def test_second_order_of_the_loss(reduction: Any, same: Any) -> None:
    x, weight, targets = loss_operands(3, hidden=2, vocab=4)
    loss = LossOptions(reduction=reduction)

    def summed(fn: Any) -> Any:
        return lambda x, weight: jnp.sum(jnp.sin(fn(x, weight, targets)))

    tiled = summed(partial(tiled_linear_cross_entropy, loss=loss, num_shards=2))
    plain = summed(partial(cross_entropy, loss=loss))
    same(every_order(tiled)(x, weight), every_order(plain)(x, weight))


def test_tangents_of_tile_and_of_any_loss(same: Any) -> None:
    x, _, up, down = operands(2, 5)

    def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    def total(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.sum(layer(x, up, down))

    arrays = x, up, down
    for tiled, plain in ((tile(layer, num_shards=3), layer), (partial(tiled_loss, total, num_shards=3), total)):
        same(jax.jvp(tiled, arrays, moved(arrays)), jax.jvp(plain, arrays, moved(arrays)))


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tangents_of_the_tensor_parallel_mlp(sequence_parallel: bool, same: Any) -> None:
    arrays = operands(16, hidden=8, intermediate=16)
    tokens = P("tp", None) if sequence_parallel else P(None, None)
    specs = tokens, P(None, "tp"), P(None, "tp"), P("tp", None)
    on_device = partial(tensor_parallel_mlp, sequence_parallel=sequence_parallel, num_shards=2, axis_name="tp")
    split = jax.shard_map(on_device, mesh=mesh_of(4), in_specs=specs, out_specs=tokens)
    actual = jax.jit(lambda *given: jax.jvp(split, given, moved(given)))(*arrays)
    same(actual, jax.jvp(mlp, arrays, moved(arrays)))


@pytest.mark.parametrize("bias", [True, False])
def test_tangents_of_the_tiled_linear_layer(bias: bool, same: Any) -> None:
    """Of x, weight and bias together and each alone; runs of 3 and 2 features are padded to 3."""
    rngs, dtype = nnx.Rngs(0), jnp.float64
    module = TiledLinear(5, 7, bias=bias, in_splits=2, out_splits=3, dtype=dtype, param_dtype=dtype, rngs=rngs)
    graph, state = nnx.split(module)
    x = operands(2, 5, hidden=5)[0]

    def tiled(x: jax.Array, state: Any) -> jax.Array:
        return nnx.merge(graph, state)(x)

    @jax.jit
    def run(x: jax.Array, state: Any) -> Any:
        """What forward mode says and what it has to say: of the sum of both, and of reverse mode."""
        still, moving = jax.tree.map(jnp.zeros_like, (x, state)), moved((x, state))
        offset = tiled(jnp.zeros((1, 5), dtype), state)
        whole = tiled(jnp.eye(5, dtype=dtype), state) - offset
        total, of_x, of_state = (
            jax.jvp(tiled, (x, state), t)[1] for t in (moving, (moving[0], still[1]), (still[0], moving[1]))
        )
        linear = jax.linearize(tiled, x, state)[1](*moving)
        dy = jnp.cos(total)
        pairs = zip(jax.tree.leaves(jax.vjp(tiled, x, state)[1](dy)), jax.tree.leaves(moving), strict=True)
        reverse = sum(jnp.sum(d * t) for d, t in pairs)
        return (of_x, of_x + of_state, linear, reverse), (moving[0] @ whole, total, total, jnp.sum(dy * total))

    same(*run(x, state))


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("fused", [True, False])
def test_tangents_of_losses_whose_vocabulary_is_split(fused: bool, same: Any) -> None:
    x, weight, targets = loss_operands(2, 5, hidden=8, vocab=24)
    x, targets = x.reshape(-1, 8), targets.reshape(-1)

    def on_device(x: jax.Array, weight: jax.Array) -> jax.Array:
        if fused:
            options = LossOptions(reduction="none", label_smoothing=0.1)
            return vocab_parallel_linear_cross_entropy(x, weight, targets, loss=options, num_shards=2, axis_name="tp")
        return vocab_parallel_cross_entropy(x @ weight, targets, 0.1, axis_name="tp")

    def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
        return cross_entropy(x, weight, targets, loss=LossOptions(reduction="none", label_smoothing=0.1))

    specs, given = (P(), P(None, "tp")), (x, weight)
    split = jax.shard_map(on_device, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    actual = jax.jit(lambda *given: jax.jvp(split, given, moved(given)))(*given)
    same(actual, jax.jvp(plain, given, moved(given)))


def test_forward_mode_costs_a_shard_and_reverse_mode_what_it_did() -> None:
    """Products of H x I: 3 forward, 2 again and 6 of tangents; reverse mode 3, 2 and 6, of x alone 8."""
    tokens, hidden, intermediate = 4096, 8, 256
    arrays = operands(tokens, hidden=hidden, intermediate=intermediate, dtype=jnp.float32)
    tiled, product = partial(tiled_mlp, num_shards=32), 2 * tokens * hidden * intermediate

    def tangents(*given: jax.Array) -> Any:
        return jax.jvp(tiled, given, moved(given))

    assert flop(tangents, *arrays) == 11 * product
    assert flop(jax.jit(y_and_gradients(tiled)), *arrays) == 11 * product
    assert flop(lambda x, *w: jax.grad(lambda x: jnp.sum(tiled(x, *w)))(x), *arrays) == 8 * product
    whole = tokens * intermediate * 4
    assert temp_bytes(tangents, *arrays) < whole / 2
    assert temp_bytes(y_and_gradients(tiled), *arrays) < whole / 2


def test_a_scan_over_checkpointed_layers_costs_no_more_products() -> None:
    x, *weights = operands(64, hidden=8, intermediate=16, layers=2, dtype=jnp.float32)
    body = jax.checkpoint(lambda x, w: (x + tiled_mlp(x, *w, num_shards=4, keep=0.5), None))
    step = y_and_gradients(lambda x, *w: lax.scan(body, x, w)[0])
    assert flop(step, x, *weights) == 2 * 22 * 64 * 8 * 16


@pytest.mark.parametrize("name", ["tiled_mlp", "tiled_linear_cross_entropy", "tile", "tiled_loss"])
def test_a_symbolic_number_of_tokens_is_refused(name: str) -> None:
    calls: dict[str, Any] = {
        "tiled_mlp": lambda x, w: tiled_mlp(x, w, w, w.T),
        "tiled_linear_cross_entropy": lambda x, w: tiled_linear_cross_entropy(x, w, jnp.zeros(x.shape[0], jnp.int32)),
        "tile": lambda x, w: tile(lambda x: x @ w)(x),
        "tiled_loss": lambda x, w: tiled_loss(lambda x: jnp.sum(x @ w), x),
    }
    (tokens,) = jax.export.symbolic_shape("tokens")
    shapes = jax.ShapeDtypeStruct((tokens, 8), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    with pytest.raises(UnsupportedError, match=rf"{name}: x must be of a known shape, got \[tokens, 8\]\. Shards are"):
        jax.export.export(jax.jit(calls[name]))(*shapes)
