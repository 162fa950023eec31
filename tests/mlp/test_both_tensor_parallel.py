"""The MLP and the loss that ranks share: gloo ranks of PyTorch against virtual devices of JAX, gradients included."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tiled_jax.parallel import tensor_parallel_mlp, vocab_parallel_linear_cross_entropy

pytestmark = pytest.mark.ranks

H, I, V, ROWS = 6, 8, 19, 20  # noqa: E741  # one padding entry
COLUMNS = ("w_gate", "w_up", "gate", "up", "weight", "bias")
Arrays = dict[str, np.ndarray[Any, Any]]


def draw(**shapes: tuple[int, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def spec_of(name: str, ndim: int, sequence_parallel: bool) -> P:
    """How an operand or its gradient is split: columns by the last dim, w_down and what is of tokens by the first."""
    name = name.removeprefix("d") if name != "down" else name
    if name in COLUMNS:
        return P(*[None] * (ndim - 1), "tp")
    by_rows = name == "w_down" or (sequence_parallel and ndim and name in ("x", "y", "loss"))
    return P("tp") if by_rows else P()


def joined(results: list[dict[str, Any]], sequence_parallel: bool) -> Arrays:
    """The whole of every result, from the ranks' parts; what every rank has whole has to be the same on all."""
    found = {}
    for name, first in results[0].items():
        parts = [np.asarray(result[name]).reshape(-1, *np.asarray(first).shape[1:]) for result in results]
        parts = parts if np.ndim(first) else [np.asarray(result[name]) for result in results]
        spec = spec_of("down" if name == "ddown" else name, np.ndim(first), sequence_parallel)
        if "tp" in spec:
            found[name] = np.concatenate(parts, axis=spec.index("tp"))
        else:
            for part in parts:
                assert_within(part, parts[0], DISTRIBUTED_FLOAT64, name)
            found[name] = parts[0]
    return found


def on_devices(fn: Any, ranks: int, operands: Arrays, upstream: Any, real: Any, sequence_parallel: bool) -> Arrays:
    """fn's result and gradients over `ranks` devices, rows of tokens that are padding cut off."""
    mesh = Mesh(np.asarray(jax.devices()[:ranks]), ("tp",))
    specs = {name: spec_of(name, a.ndim, sequence_parallel) for name, a in operands.items()}
    out = spec_of("y", np.ndim(upstream), sequence_parallel)

    @jax.jit
    def run(operands: Any, upstream: Any) -> Any:
        y, pull = jax.vjp(jax.shard_map(fn, mesh=mesh, in_specs=(specs,), out_specs=out), operands)
        return y, pull(upstream)[0]

    y, d = run({name: jnp.asarray(a) for name, a in operands.items()}, jnp.asarray(upstream))
    found = {"y": np.asarray(y)} | {f"d{name}": np.asarray(a) for name, a in d.items() if name != "targets"}
    return {name: a[real] if name in ("y", "dx") and a.ndim else a for name, a in found.items()}


def padded(a: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rows of tokens, with rows of zeros where a device has fewer of them than another."""
    whole = np.zeros((len(real), *a.shape[1:]), a.dtype)
    whole[real] = a
    return whole


def assert_equal(actual: Arrays, expected: Arrays) -> None:
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert_within(actual[name], value, DISTRIBUTED_FLOAT64, name)


# ranks, tokens of each, sequence_parallel
SPLITS = [(2, (5, 5), True), (4, (6, 1, 0, 5), True), (2, (10, 0), False)]


def real_rows(sizes: tuple[int, ...], sequence_parallel: bool) -> np.ndarray[Any, Any]:
    if not sequence_parallel:
        return np.ones(sum(sizes), bool)
    return (np.arange(max(sizes))[None] < np.asarray(sizes)[:, None]).reshape(-1)


@pytest.mark.parametrize(("ranks", "sizes", "sequence_parallel"), SPLITS, ids=str)
@pytest.mark.parametrize("keep", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])  # of 0.5 some shards are kept
def test_mlp(pools: Any, keep: float, ranks: int, sizes: tuple[int, ...], sequence_parallel: bool) -> None:
    tokens, options = sum(sizes), {"num_shards": 3, "keep": keep}
    weights = draw(w_gate=(H, I), w_up=(H, I), w_down=(I, H), gate=(I,), up=(I,), down=(H,))
    given = weights | {"x": draw(x=(tokens, H))["x"], "dy": draw(_=(1,), dy=(tokens, H))["dy"]}
    arguments = {"sequence_parallel": sequence_parallel, **options}
    results = pools[ranks].run(
        "tests.mlp.ranks_torch_tensor_parity:mlp",
        given={name: a.tolist() for name, a in given.items()},
        sizes=list(sizes),
        **arguments,
    )
    width = [
        {**result, **{k: np.asarray(result[k]).reshape(-1, H).tolist() for k in ("y", "dx")}} for result in results
    ]
    real = real_rows(sizes, sequence_parallel)

    def fn(local: Any) -> jax.Array:
        biases = {name: local[name] for name in ("gate", "up", "down")}
        split = {"split_sizes": sizes} if sequence_parallel else {}
        arrays = (local[name] for name in ("x", "w_gate", "w_up", "w_down"))
        return tensor_parallel_mlp(*arrays, biases=biases, axis_name="tp", **arguments, **split)

    with jax.enable_x64(True):
        operands = weights | {"x": padded(given["x"], real)}
        actual = on_devices(fn, ranks, operands, padded(given["dy"], real), real, sequence_parallel)
    assert_equal(actual, joined(width, sequence_parallel))


@pytest.mark.parametrize(("ranks", "sizes", "sequence_parallel"), SPLITS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss(pools: Any, reduction: Any, ranks: int, sizes: tuple[int, ...], sequence_parallel: bool) -> None:
    tokens = sum(sizes)
    given = draw(x=(tokens, H), weight=(H, ROWS), bias=(ROWS,))
    targets = np.where(np.arange(tokens) % 4 == 1, -100, np.random.default_rng(1).integers(0, V, tokens))
    dloss = draw(dloss=(tokens,))["dloss"] if reduction == "none" else np.asarray(3.0)
    options = {"reduction": reduction, "label_smoothing": 0.2, "z_loss": 0.1}
    results = pools[ranks].run(
        "tests.mlp.ranks_torch_tensor_parity:head",
        given={name: a.tolist() for name, a in given.items()} | {"dloss": dloss.tolist()},
        targets=targets.tolist(),
        sizes=list(sizes),
        sequence_parallel=sequence_parallel,
        num_shards=3,
        vocab_size=V,
        **options,
    )
    wide = [result | {"dx": np.asarray(result["dx"]).reshape(-1, H).tolist()} for result in results]
    expected = joined(wide, sequence_parallel)
    real = real_rows(sizes, sequence_parallel)
    labels = jnp.asarray(padded(targets, real), jnp.int32)

    def fn(local: Any) -> jax.Array:
        split = {"split_sizes": sizes, "sequence_parallel": True} if sequence_parallel else {}
        mine = labels
        if sequence_parallel:
            rows = len(real) // ranks
            mine = jax.lax.dynamic_slice_in_dim(labels, jax.lax.axis_index("tp") * rows, rows)
        return vocab_parallel_linear_cross_entropy(
            local["x"],
            local["weight"],
            mine,
            bias=local["bias"],
            loss=LossOptions(**options),
            num_shards=3,
            vocab_size=V,
            axis_name="tp",
            **split,
        )

    with jax.enable_x64(True):
        operands = given | {"x": padded(given["x"], real)}
        upstream = padded(dloss, real) if reduction == "none" else dloss
        actual = on_devices(fn, ranks, operands, upstream, real, sequence_parallel)
    actual["loss"] = actual.pop("y")
    assert_equal(actual, expected)
