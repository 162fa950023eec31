"""Ring attention over 2, 4 and 8 virtual devices: that of one device, what is sent, and when."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shared_specs.core.rounding import relative_error
from shared_specs.errors import SpecError
from shared_specs.layers.ring import held_runs, ring_bytes
from shared_specs.tolerances import DISTRIBUTED_FLOAT64, limit
from tests.asserting import assert_within
from tests.core.jax_counting import jaxprs_in, sent_bytes
from tests.core.jax_program import counted
from tests.plans.jax_parallel_models import QUICKLY, mesh_of
from tiled_jax.layers import attention_blocks
from tiled_jax.models import causal_attention
from tiled_jax.parallel import context_attention, context_slice, ring_attention

pytestmark = pytest.mark.ranks

HEADS = (6, 2, 2, 6)  # of q, k, v and dy


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "BLOCK_TOKENS", {"cpu": 4, "gpu": 4})


def arrays(tokens: int, dtype: Any = jnp.float64, d: int = 5) -> list[jax.Array]:
    random = np.random.default_rng(tokens)
    return [jnp.asarray(random.standard_normal((2, tokens, heads, d)), dtype) for heads in HEADS]


def packed(tokens: int) -> jax.Array:
    """Documents of other lengths in each of two sequences, one of a token, some over the ends of runs."""
    lengths = (7, tokens - 9, 2), (1, tokens // 2, tokens - tokens // 2 - 1)
    return jnp.asarray([np.repeat(range(3), each) for each in lengths], jnp.int32)


def with_gradients(attend: Any, q: Any, k: Any, v: Any, dy: Any) -> tuple[jax.Array, ...]:
    y, pull = jax.vjp(attend, q, k, v)
    return y, *pull(dy)


def over_devices(devices: int, documents: jax.Array | None = None, *, check_vma: bool = True, **options: Any) -> Any:
    spec = P(None, "cp")
    attend = partial(ring_attention, documents=documents, axis_name="cp", **options)
    mesh = mesh_of(cp=devices)
    return jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=check_vma)


def order(tokens: int, ring: int, inside: int = 1) -> np.ndarray:
    """Which token stands where, once the devices' parts are laid side by side."""
    places = [(rank, place) for rank in range(ring) for place in range(inside)]
    runs = [run for r, p in places for run in held_runs(tokens, ring, r, inside=inside, place=p)]
    return np.concatenate([np.arange(*run) for run in runs])


# Devices, tokens of a run, several documents, check_vma: runs shorter than a block, of one and a half and of two blocks.
CASES: list[Any] = [
    (2, 3, False, True, {}),
    (4, 6, True, True, {"scale": 0.6, "window": 9, "softcap": 0.7}),
    pytest.param(8, 5, True, False, {}, marks=pytest.mark.slow),
    pytest.param(3, 8, False, False, {"window": 2}, marks=pytest.mark.slow),
]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(("devices", "run", "several", "check_vma", "options"), CASES)
def test_attention_is_that_of_one_device(
    devices: int, run: int, several: bool, check_vma: bool, options: dict[str, Any], x64: None
) -> None:
    """And nothing is gathered: keys and values go from one device to the next."""
    tokens = 2 * devices * run
    given, documents, places = arrays(tokens), packed(tokens) if several else None, order(tokens, devices)
    fn = jax.jit(partial(with_gradients, over_devices(devices, documents, check_vma=check_vma, **options)))
    dealt = [a[:, places] for a in given]
    program = fn.lower(*dealt).compile(QUICKLY)
    expected = jax.jit(partial(with_gradients, partial(causal_attention, documents=documents, **options)))(*given)
    for name, found, wanted in zip("yqkv", program(*dealt), expected, strict=True):
        assert_within(np.asarray(found), np.asarray(wanted[:, places]), DISTRIBUTED_FLOAT64, name)
    outside, inside, _ = counted(program.as_text())
    assert set(outside) | set(inside) == {"collective-permute"}


@pytest.mark.deep
def test_a_ring_whose_places_are_shared(x64: None) -> None:
    """2 x 2 devices: heads for tokens inside a place, keys and values round; `context_slice` deals the tokens out."""
    tokens = 24
    given, documents = arrays(tokens), packed(tokens)
    places = order(tokens, 2, 2)
    mesh, spec = mesh_of(ring=2, cp=2), P(None, ("ring", "cp"))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        round_ring = partial(ring_attention, axis_name="ring")
        return context_attention(q, k, v, round_ring, documents=documents, axis_name="cp")

    fn = partial(with_gradients, jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))
    dealt = [a[:, places] for a in given]
    found = jax.jit(fn).lower(*dealt).compile(QUICKLY)(*dealt)
    expected = jax.jit(partial(with_gradients, partial(causal_attention, documents=documents)))(*given)
    for name, a, b in zip("yqkv", found, expected, strict=True):
        assert_within(np.asarray(a), np.asarray(b[:, places]), DISTRIBUTED_FLOAT64, name)

    batch = {"x": np.arange(2 * tokens, dtype=np.int32).reshape(2, tokens), "documents": documents}

    def cut(batch: Any) -> Any:
        return context_slice(batch, order="zigzag", axis_name=("ring", "cp"))

    mine = jax.shard_map(cut, mesh=mesh, in_specs=P(), out_specs=spec)(batch)
    np.testing.assert_array_equal(mine["x"], batch["x"][:, places])


@pytest.mark.deep
def test_attention_in_bfloat16(x64: None) -> None:
    """As wrong as that of one device may be, which sums in float32 as well."""
    tokens = 64
    given, places = arrays(tokens, jnp.bfloat16, 8), order(tokens, 2)
    exact = with_gradients(causal_attention, *(a.astype(jnp.float64) for a in given))
    plain = jax.jit(partial(with_gradients, causal_attention))(*given)
    found = jax.jit(partial(with_gradients, over_devices(2)))(*(a[:, places] for a in given))
    for name, a, b, truth in zip("yqkv", found, plain, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        truth = np.asarray(truth)
        allowed = limit(relative_error(np.asarray(b, np.float64), truth), "bfloat16")
        assert_within(np.asarray(a, np.float64), truth[:, places], allowed, name)


def shapes(tokens: int, dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((2, tokens, heads, 8), dtype) for heads in HEADS]


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_bytes_sent(devices: int) -> None:
    """Those of the formula, in forward and in forward and backward."""
    sizes: Any = {"ring": devices, "batch": 2, "held": 8, "kv_heads": 2, "features": 16, "itemsize": 2}
    attend, given = over_devices(devices), shapes(8 * devices)
    assert sent_bytes(partial(with_gradients, attend), *given) == ring_bytes(**sizes)
    assert sent_bytes(attend, *given[:3]) == (devices - 1) * 2 * 8 * 2 * 16 * 2


def loops_that_send(jaxpr: Any) -> Iterator[Any]:
    """Bodies of the loops that have a `ppermute` of their own, not in a loop inside."""
    for equation in jaxpr.eqns:
        for inner in (inner for value in equation.params.values() for inner in jaxprs_in(value)):
            if equation.primitive.name == "scan" and any(e.primitive.name == "ppermute" for e in inner.eqns):
                yield inner
            yield from loops_that_send(inner)


def test_what_is_sent_waits_for_no_product_of_its_step() -> None:
    """XLA may overlap the two: in the loops over steps no operand of a send comes out of the loop over blocks."""
    traced = jax.jit(partial(with_gradients, over_devices(4))).trace(*shapes(32))
    bodies = list(loops_that_send(traced.jaxpr.jaxpr))
    assert len(bodies) == 2, "of forward and of backward"
    for body, sends in zip(bodies, (2, 4), strict=True):
        late: set[Any] = set()
        operands = []
        for equation in body.eqns:
            known = [v for v in equation.invars if not isinstance(v, jax.extend.core.Literal)]
            if equation.primitive.name == "ppermute":
                operands += known
            if equation.primitive.name in ("scan", "while") or late & set(known):
                late |= set(equation.outvars)
        assert late
        assert len(operands) == sends
        assert not late & set(operands)


@pytest.mark.parametrize(
    ("tokens", "documents", "error", "message"),
    [
        (3, None, SpecError, r"q must be of two runs of as many tokens, got 3 \(q is \[2, 3, 6, 8\]\)"),
        (
            4,
            np.zeros((2, 4), np.int32),
            SpecError,
            r"documents must be of shape \[2, 8\] or \[1, 8\], got \[2, 4\]\. Every",
        ),
        (4, np.zeros((2, 8), np.float32), TypeError, "documents must be of integers, got float32"),
    ],
)
def test_attention_refuses(tokens: int, documents: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="^ring_attention: " + message):
        jax.eval_shape(over_devices(2, documents), *shapes(2 * tokens)[:3])


def test_a_window_without_keys_is_refused() -> None:
    for given, message in (
        ({"window": 0}, "window must be >= 1 or None, got 0"),
        ({"softcap": 0.0}, "softcap must be > 0"),
    ):
        with pytest.raises(SpecError, match="^ring_attention: " + message):
            jax.eval_shape(over_devices(2, **given), *shapes(8)[:3])
        with pytest.raises(SpecError, match="^causal_attention: " + message):
            jax.eval_shape(partial(causal_attention, **given), *shapes(8)[:3])


def test_slice_refuses() -> None:
    def cut(tokens: int, axis_name: Any, order: Any) -> None:
        def call(x: Any) -> Any:
            return context_slice({"x": x}, order=order, axis_name=axis_name)

        mesh = mesh_of(ring=2, cp=4)
        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P()), np.zeros((1, tokens), np.int32))

    message = (
        r"batch\['x'\] must be of a multiple of 8 tokens, for 8 ranks that hold two runs in a ring of them, got 12"
    )
    with pytest.raises(SpecError, match=r"^context_slice: " + message):
        cut(12, ("ring", "cp"), "zigzag")
    with pytest.raises(SpecError, match=r"^context_slice: batch\['x'\] must be of a multiple of 4 tokens, .* got 6"):
        cut(6, "ring", "zigzag")
    with pytest.raises(SpecError, match=r"^context_slice: order must be 'zigzag' over a pair"):
        cut(16, ("ring", "cp"), "tokens")
    with pytest.raises(SpecError, match=r"^context_slice: order must be one of tokens, zigzag, got 'ring'"):
        cut(16, "ring", "ring")
