"""Checkpointing policies: the same results and gradients, and exactly the bytes that each says it keeps."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shared_specs.config import Checkpointing
from shared_specs.core.rounding import relative_error
from shared_specs.tolerances import limit
from tests.asserting import assert_within
from tests.core.jax_counting import flop, kept_bytes, temp_bytes
from tests.plans.jax_parallel_models import quickly
from tiled_jax import SpecError, UnsupportedError, tile
from tiled_jax.layers import recompute
from tiled_jax.models import causal_attention
from tiled_jax.parallel import (
    checkpoint_without_output,
    checkpointed,
    column_parallel_linear,
    row_parallel_linear,
    scan_layers,
)

T, H, I, LAYERS = 64, 16, 48, 6  # noqa: E741
MODES = {
    "full": Checkpointing(),
    "every-1": Checkpointing(mode="layers", every=1),
    "every-2": Checkpointing(mode="layers", every=2),
    "every-4": Checkpointing(mode="layers", every=4),
    "every-9": Checkpointing(mode="layers", every=9),
    "products": Checkpointing(mode="products"),
    "op": Checkpointing(mode="op"),
}


def layer(x: jax.Array, w: Any) -> jax.Array:
    """Four products: [T, I], [T, H], [T, I], [T, H]. All that JAX keeps: both x, and of each tanh its slope; of those
    that a product reads, the value as well."""
    x = x + jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"])
    return x + jnp.tanh(x @ w["c"]) @ w["d"]


def operands(dtype: Any = None, *, layers: int = LAYERS, tokens: int = T, hidden: int = H, inner: int = I) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"a": (hidden, inner), "b": (inner, hidden), "c": (hidden, inner), "d": (inner, hidden)}
    w = {name: jnp.asarray(rng.standard_normal((layers, *s)) / 4, dtype) for name, s in shapes.items()}
    return jnp.asarray(rng.standard_normal((tokens, hidden)), dtype), w


def results(fn: Any, *arguments: Any) -> Any:
    @jax.jit
    def run(*arguments: Any) -> Any:
        y, pull = jax.vjp(fn, *arguments)
        return y, pull(jnp.cos(y))

    return run(*arguments)


def plain_scan(x: jax.Array, w: Any) -> jax.Array:
    return lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_changes_but_what_is_kept(mode: str, same: Any) -> None:
    x, w = operands(jnp.float64)
    expected = results(plain_scan, x, w)
    same(results(lambda x, w: scan_layers(layer, x, w, MODES[mode]), x, w), expected)

    def one_by_one(x: jax.Array, w: Any) -> jax.Array:
        for index in range(LAYERS):
            x = checkpointed(layer, MODES[mode], index=index)(x, jax.tree.map(lambda a, i=index: a[i], w))
        return x

    same(results(one_by_one, x, w), expected)


ALL = 4 * T * (3 * H + 4 * I)
"""Bytes that a layer without checkpointing needs in backward."""


def kept_of(mode: str | None, layers: int = LAYERS, a: int = ALL) -> int:
    """Bytes of activations that a stack keeps, by the formula of each mode; `a`: of a layer that keeps all."""
    x = 4 * T * H
    if mode is None:
        return layers * a
    if mode == "full":
        return layers * x
    if mode in ("products", "op"):
        return layers * (x + 4 * T * 2 * I)
    replayed = layers // int(mode.removeprefix("every-"))
    return replayed * x + (layers - replayed) * a


@pytest.mark.parametrize("mode", MODES)
def test_kept_bytes_are_those_of_the_formula(mode: str) -> None:
    """The first layer's input is the argument, which exists anyway. JAX releases differ in what one layer keeps of all:
    0.10 keeps a value of tanh that only its slope was made of."""
    x, w = operands(jnp.float32)
    layers = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(LAYERS)]

    def stack(x: jax.Array, layers: Any) -> jax.Array:
        for index, w in enumerate(layers):
            x = checkpointed(layer, MODES[mode], index=index)(x, w)
        return x

    one = kept_bytes(layer, x, layers[0]) + x.nbytes
    assert ALL <= one < 2 * ALL
    assert kept_bytes(stack, x, layers) == kept_of(mode, a=one) - x.nbytes


@cache
def used(mode: str | None, layers: int) -> int:
    """Temporary bytes of forward and backward of the rolled loop."""

    def program(x: jax.Array, w: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: scan_layers(layer, x, w, None if mode is None else MODES[mode]), x, w)
        return y, pull(y)

    return temp_bytes(program, *operands(jnp.float32, layers=layers))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("mode", ["full", "every-2", "every-4", "products"])
def test_compiled_temp_bytes_of_the_rolled_loop(mode: str) -> None:
    """Each layer more costs to the byte what the formula says it keeps: so no copy of the parameters is among them.

    What all of a layer is, is read off the loop without checkpointing: XLA in 0.10 keeps one [T, H] that is not needed.
    """
    few, many = 8, 24
    a = (used(None, many) - used(None, few)) // (many - few)
    assert ALL <= a <= ALL + 4 * T * H
    assert used(mode, many) - used(mode, few) == kept_of(mode, many, a) - kept_of(mode, few, a)
    assert used(mode, many) < used(None, many)


def test_a_checkpoint_inside_a_layer_stays_one() -> None:
    """Of a layer that keeps everything, what is tiled in it is computed again all the same: each keeps x alone."""

    def tiled(x: jax.Array, w: Any) -> jax.Array:
        return x + tile(lambda x: jnp.tanh(x @ w["a"]) @ w["b"], num_shards=8)(x)

    def bytes_of(layers: int) -> int:
        def program(x: jax.Array, w: Any) -> Any:
            return jax.vjp(lambda x, w: scan_layers(tiled, x, w, MODES["every-2"]), x, w)[1](x)

        x, w = operands(jnp.float32, layers=layers, tokens=512)
        return temp_bytes(program, x, {name: w[name] for name in ("a", "b")})

    assert bytes_of(12) - bytes_of(6) == 6 * 4 * 512 * H


def test_products_are_not_computed_again() -> None:
    """Forward and backward of 4 products are 12; "full" adds the first three again, "products" only the second."""
    x, w = operands(jnp.float32, layers=1)
    w = jax.tree.map(lambda a: a[0], w)

    def products(checkpointing: Checkpointing | None) -> float:
        fn = checkpointed(layer, checkpointing)
        return flop(lambda x, w: jax.vjp(fn, x, w)[1](x), x, w) / (2 * T * H * I)

    assert [products(None), products(MODES["full"]), products(MODES["products"])] == [12, 15, 13]


HEADS, SEQUENCE = 2, T // 2


def softmax_of_products(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    probabilities = jax.nn.softmax(jnp.einsum("bqnd,bknd->bnqk", q, k))
    return jnp.einsum("bnqk,bknd->bqnd", probabilities, v)


ATTENTION = {
    "ours": causal_attention,
    "ours in a checkpoint": jax.checkpoint(lambda q, k, v: causal_attention(jnp.sin(q), k, v)),
    "jax.nn": lambda *qkv: jax.nn.dot_product_attention(*(a.astype(jnp.float32) for a in qkv)).astype(jnp.float64),
    "products": softmax_of_products,
    "products inside jit": jax.jit(softmax_of_products),
}


@pytest.mark.deep_but(2)
@pytest.mark.parametrize("name", ATTENTION)
def test_op_keeps_what_attention_returns(name: str, same: Any) -> None:
    """q from one product, k and v from another, the output's and two more: the first, third and fifth are kept, and attention
    beside them. Of attention made of products the scores are computed again, of ours its blocks once and not twice."""

    def attending(x: jax.Array, w: Any) -> jax.Array:
        q, kv = x @ w["q"], jnp.concatenate((w["k"], w["v"]), 1)
        k, v = jnp.split(x @ kv, 2, axis=1)
        y = ATTENTION[name](*(a.reshape(2, SEQUENCE, HEADS, H // HEADS) for a in (q, k, v)))
        x = x + jnp.tanh(y).reshape(T, H) @ w["o"]
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    rng = np.random.default_rng(0)
    w = {key: jnp.asarray(rng.standard_normal((H, H)) / 4) for key in ("q", "k", "v", "o", "up", "down")}
    x = jnp.asarray(rng.standard_normal((T, H)))
    op = checkpointed(attending, MODES["op"])
    same(results(op, x, w), results(attending, x, w))
    assert kept_bytes(op, x, w) == (2 * 8 + (4 if name == "jax.nn" else 8)) * T * H, (
        "q, attention's and its product; nobody asks for the last one"
    )

    def products(mode: str | None) -> int:
        fn = checkpointed(attending, None if mode is None else MODES[mode])
        return flop(lambda x, w: jax.vjp(fn, x, w)[1](x), x, w)

    square, scores = 2 * T * H * H, 2 * 2 * SEQUENCE * SEQUENCE * H
    repeated = 0 if name.startswith("ours") else scores
    assert products("op") - products(None) == 3 * square + repeated, (products("op") - products(None)) / square
    assert products("full") - products("op") >= 2 * square + scores


def test_op_repeats_no_reduce_scatter(same: Any) -> None:
    """Neither JAX's own nor those of the layers of `tiled_jax.parallel`, inside a loop too."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def scattering(x: jax.Array, w: Any) -> jax.Array:
        h = jnp.tanh(column_parallel_linear(x, w["a"], sequence_parallel=True, axis_name="tp"))
        y = row_parallel_linear(h, w["b"], input_is_parallel=True, sequence_parallel=True, axis_name="tp")
        whole = lax.all_gather(jnp.tanh(y), "tp", tiled=True)
        return x + jnp.tanh(lax.psum_scatter(whole @ w["c"], "tp", tiled=True)) @ jnp.ones((I // 2, H), x.dtype)

    def run(mode: str | None, x: jax.Array, w: Any) -> Any:
        def stack(x: jax.Array, w: Any) -> jax.Array:
            return scan_layers(scattering, x, w, None if mode is None else MODES[mode])

        split = {"a": P(None, None, "tp"), "b": P(None, "tp"), "c": P(None, None, "tp")}
        return results(jax.shard_map(stack, mesh=mesh, in_specs=(P("tp"), split), out_specs=P("tp")), x, w)

    x, w = operands(jnp.float64, layers=3)
    del w["d"]
    counts = {
        mode: str(jax.make_jaxpr(partial(run, mode))(x, w)).count(" reduce_scatter[") for mode in (None, "full", "op")
    }
    assert counts["op"] == counts[None] == counts["full"] - 2, counts
    same(run("op", x, w), run(None, x, w))


def test_products_inside_jit_and_beside_other_rules(same: Any) -> None:
    """Products are found in jitted functions; custom rules, inner checkpoints and loops stay what they are."""

    @jax.jit
    def jitted(x: jax.Array, w: Any) -> jax.Array:
        return jax.nn.silu(x @ w["a"]) @ w["b"]

    def mixed(x: jax.Array, w: Any) -> jax.Array:
        x = x + jax.checkpoint(jitted)(x, w) + jitted(x, w)
        return lax.fori_loop(0, 2, lambda _, x: x + jnp.tanh(x @ w["c"]) @ w["d"], x)

    x, w = operands(jnp.float64, layers=1)
    w = jax.tree.map(lambda a: a[0], w)
    same(results(checkpointed(mixed, MODES["products"]), x, w), results(mixed, x, w))
    assert str(jax.make_jaxpr(checkpointed(mixed, MODES["products"]))(x, w)).count(f"name={recompute.PRODUCT}") == 1


def apart(x: jax.Array, w: Any) -> jax.Array:
    """`layer`, keeping neither of the outputs of tanh that a product reads."""
    x = x + jnp.tanh(checkpoint_without_output(jnp.tanh, lambda h: h @ w["b"])(x @ w["a"]))
    return x + checkpoint_without_output(jnp.tanh, lambda h: h @ w["d"])(x @ w["c"])


POLICIES: dict[str, Any] = {
    mode: partial(scan_layers, layer, checkpointing=MODES[mode]) for mode in ("full", "every-2", "products")
} | {"without output": partial(scan_layers, apart, checkpointing=None)}


def policies_over(devices: int, check_vma: bool, x: jax.Array, w: Any) -> dict[str, Any]:
    """Results and gradients of every policy in one program, the tokens split over the devices."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def mapped(stack: Any) -> Any:
        tokens = P("data")
        return jax.shard_map(stack, mesh=mesh, in_specs=(tokens, P()), out_specs=tokens, check_vma=check_vma)

    program = jax.jit(lambda x, w: {name: results(mapped(stack), x, w) for name, stack in POLICIES.items()})
    return quickly(program, x, w)


@cache
def plainly(dtype: Any) -> Any:
    return results(plain_scan, *operands(dtype))


@pytest.mark.deep_but(2)
@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "check_vma"), [(1, True), (2, True), (4, False), (8, True), (8, False)])
def test_inside_shard_map(devices: int, check_vma: bool, same: Any) -> None:
    for found in policies_over(devices, check_vma, *operands(jnp.float64)).values():
        same(found, plainly(jnp.float64))


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2, 4, 8])
def test_in_bfloat16(devices: int) -> None:
    """Against float64, as wrong as the stack without checkpointing, on one device, may be."""
    operands_16 = operands(jnp.bfloat16)
    with jax.enable_x64(True):
        exact = _exact_of_bfloat16()
    for name, found in policies_over(devices, True, *operands_16).items():
        for truth, plain, a in zip(*map(jax.tree.leaves, (exact, plainly(jnp.bfloat16), found)), strict=True):
            assert a.dtype == plain.dtype == jnp.bfloat16
            a, plain, truth = (np.asarray(value) for value in (a, plain, truth))
            assert_within(a, truth, limit(relative_error(plain, truth), "bfloat16"), f"{name} {a.shape}")


@cache
def _exact_of_bfloat16() -> Any:
    return results(plain_scan, *jax.tree.map(lambda a: a.astype(jnp.float64), operands(jnp.bfloat16)))


@pytest.mark.parametrize(
    "make",
    [
        lambda module: checkpointed(module, MODES["full"]),
        lambda module: checkpointed(module, MODES["products"]),
        lambda module: checkpoint_without_output(module, jnp.negative),
        lambda module: checkpoint_without_output(jnp.negative, module),
    ],
    ids=["full", "products", "fn", "consumer"],
)
def test_parameters_that_change_between_calls(make: Any) -> None:
    """A function that closes over a module is computed with the values of the call, not those of the first one."""
    module, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4))
    fn = make(module)
    for scale in (1.0, 2.0):
        module.kernel[...] = jnp.eye(4) * scale
        y, pull = jax.vjp(fn, x)
        np.testing.assert_array_equal(np.abs(y), scale * x)
        np.testing.assert_array_equal(np.abs(pull(x)[0]), scale * x)


def test_modules_and_random_keys(same: Any) -> None:
    """A layer may be an nnx module with dropout: recomputation draws what forward drew."""
    module = nnx.Linear(H, H, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
    x, key = operands(jnp.float64)[0], jax.random.key(3)

    def dropping(x: jax.Array, module: nnx.Linear, key: jax.Array) -> jax.Array:
        return x + nnx.Dropout(0.5)(jnp.tanh(module(x)), rngs=nnx.Rngs(key))

    def gradients(fn: Any) -> Any:
        return jax.jit(jax.grad(lambda x, module: jnp.sum(jnp.sin(fn(x, module, key))), argnums=(0, 1)))(x, module)

    for mode in ("full", "products"):
        same(gradients(checkpointed(dropping, MODES[mode])), gradients(dropping))


def standardised(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))


@pytest.mark.deep
def test_an_output_that_nobody_keeps(same: Any) -> None:
    """Of a norm and a gated product: x and what the product keeps, not the norm's output or what the norm keeps."""
    x, w = operands(jnp.float64, layers=1)
    a, c = w["a"][0], w["c"][0]

    def consumer(a: jax.Array, c: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(y @ a) * (y @ c)

    def plain(x: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
        return consumer(a, c, standardised(x))

    def without(x: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
        return checkpoint_without_output(standardised, partial(consumer, a, c))(x)

    same(results(without, x, a, c), results(plain, x, a, c))
    same(results(jax.checkpoint(without), x, a, c), results(plain, x, a, c))
    of_consumer = 8 * T * 3 * I  # tanh of the gate and its slope, and the other product
    assert kept_bytes(without, x, a, c) == of_consumer
    assert kept_bytes(plain, x, a, c) >= of_consumer + 8 * T * H

    def stack(fn: Any, x: jax.Array, a: jax.Array, c: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + fn(x, *w)[:, :H], None), x, (a, c))[0]

    def bytes_of(fn: Any) -> int:
        def program(*arguments: Any) -> Any:
            y, pull = jax.vjp(partial(stack, fn), *arguments)
            return pull(y)

        return temp_bytes(program, *long)

    x, w = operands(jnp.float64, layers=16)
    long = x, w["a"], w["c"]
    assert bytes_of(plain) - bytes_of(without) >= 15 * x.nbytes, "the norm's output of every layer but the one at work"


def test_masks_and_keys_are_closed_over(same: Any) -> None:
    """By either function, in a loop that is differentiated: integers and keys have no gradient, but belong to the step."""

    def stack(use: Any, x: jax.Array, w: jax.Array) -> jax.Array:
        def step(x: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
            kept, key = x > 0, jax.random.fold_in(jax.random.key(0), place)

            def fn(x: jax.Array) -> jax.Array:
                return jnp.where(kept, jnp.tanh(x), 0) * (place + 1).astype(x.dtype)

            def consumer(y: jax.Array) -> jax.Array:
                return (y @ w) * jax.random.bernoulli(key, 0.5, y.shape).astype(y.dtype)

            return x + use(fn, consumer)(x), None

        return lax.scan(step, x, jnp.arange(3))[0]

    x, w = operands(jnp.float64)
    arguments = x, w["a"][0][:, :H]
    plainly = results(partial(stack, lambda fn, consumer: lambda x: consumer(fn(x))), *arguments)
    same(results(partial(stack, checkpoint_without_output), *arguments), plainly)


@pytest.mark.parametrize("fn", [POLICIES["every-2"], lambda x, w: checkpoint_without_output(jnp.tanh, jnp.cos)(x)])
def test_forward_mode_is_refused_where_backward_has_a_rule_of_its_own(fn: Any) -> None:
    """By JAX; the other policies have it."""
    x, w = operands(jnp.float32, layers=2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(lambda x: fn(x, w), (x,), (x,))).lower(x)
    for mode in ("full", "products"):
        y, dy = jax.eval_shape(lambda x, mode=mode: jax.jvp(lambda x: POLICIES[mode](x, w), (x,), (x,)), x)
        assert y.shape == dy.shape == x.shape


def test_what_is_offloaded_waits_in_host_memory(same: Any) -> None:
    """A CPU has nothing to move, so the program is read: the residuals of x and of every second product are the host's."""
    x, w = operands(jnp.float64)
    for mode, count in (("full", 1), ("products", 3), ("op", 3)):
        fn = partial(scan_layers, layer, checkpointing=Checkpointing(mode=mode, offload=True))
        call = lambda x, w, fn=fn: fn(x, w)  # noqa: E731
        same(results(call, x, w), results(plain_scan, x, w))
        program = str(jax.make_jaxpr(lambda x, w, call=call: jax.vjp(call, x, w)[1](x))(x, w))
        moved = program.count("pinned_host") + program.count("Space.Host") + program.count("<host>")
        assert moved >= count, program
        for_gpus = jax.jit(lambda x, w, call=call: jax.vjp(call, x, w)[1](x)).trace(x, w)
        text = for_gpus.lower(lowering_platforms=("cuda",)).as_text()
        places = [text.count(f'_xla_buffer_placement = "{place}"') for place in ("pinned_host", "device")]
        assert places == [count, count], "in the loop of forward to the host, in that of backward back"


def test_a_cpu_has_nowhere_to_move_to() -> None:
    """A script that is tried on a CPU is the one that runs on a GPU; it uses as much memory as without."""

    def analysis(offload: bool) -> Any:
        fn = partial(scan_layers, layer, checkpointing=Checkpointing(offload=offload))
        program = jax.jit(lambda x, w: jax.vjp(fn, x, w)[1](x))
        return program.lower(*operands(jnp.float32)).compile().memory_analysis()

    assert analysis(True).temp_size_in_bytes == analysis(False).temp_size_in_bytes
    assert analysis(True).host_temp_size_in_bytes == 0


def test_devices_without_host_memory_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_HOST", "elsewhere")
    with pytest.raises(
        UnsupportedError, match=r"^checkpointed: offload must be False here, got True\. The devices have the memories"
    ):
        checkpointed(layer, Checkpointing(offload=True))


@pytest.mark.parametrize("how", ["whole", "shard_map"])
@pytest.mark.parametrize("mode", ["full", "products"])
def test_too_small_a_pool_is_told_where_a_gradient_is_traced(
    mode: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the bytes of all layers' inputs, on all devices of this process; a forward pass keeps none."""
    x, w = operands(jnp.float32)
    run: Any = partial(scan_layers, checkpointing=Checkpointing(mode=mode, offload=True))
    call = lambda x, w: run(layer, x, w)  # noqa: E731
    if how == "shard_map":
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        call = jax.shard_map(call, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    pool = [LAYERS * T * H * 4]
    monkeypatch.setattr(recompute, "_pool", lambda: pool[0])
    gradient = lambda x, w: jax.jit(jax.grad(lambda x, w: call(x, w).sum()))(x, w)  # noqa: E731
    gradient(x, w)
    pool[0] -= 1
    with pytest.raises(
        UnsupportedError, match=r"^Checkpointing\(offload=True\): the inputs of 6 layers take at least 0\.0 GiB"
    ):
        gradient(x, w)
    jax.jit(call)(x, w)


def test_only_gpus_have_a_pool() -> None:
    assert recompute._pool() is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="has no names; take full or products"):
        scan_layers(layer, *operands(jnp.float32), Checkpointing(mode="layers", every=2, offload=True))
    with pytest.raises(SpecError, match=r"config\.checkpointing\.every must be >= 1, got 0"):
        checkpointed(layer, Checkpointing(mode="layers", every=0))
    with pytest.raises(SpecError, match=r'config\.checkpointing\.every must be given with mode="layers"'):
        checkpointed(layer, Checkpointing(mode="layers"))
    with pytest.raises(TypeError, match="checkpointing must be a Checkpointing or None, got str"):
        checkpointed(layer, "full")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="parameters must be arrays with one leading dim of layers"):
        scan_layers(layer, jnp.ones((2, 2)), {"a": jnp.ones((2, 2)), "b": jnp.ones((3, 2))}, None)
