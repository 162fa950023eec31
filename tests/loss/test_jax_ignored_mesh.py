"""Rows without a label over several devices: each counts its own, and results are those of one device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.core.jax_counting import temp_bytes
from tests.loss.jax_ignored import (
    SHARD,
    T,
    V,
    counting,
    labels,
    mesh_of,
    of_devices,
    operands,
    rows_for,
    tiled,
    token_weights,
)
from tests.mlp.jax_untiled import cross_entropy
from tiled_jax import vocab_parallel_linear_cross_entropy
from tiled_jax.loss import api


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    return counting(monkeypatch)


@pytest.mark.deep
@pytest.mark.ranks
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_weights_of_tokens_that_a_mesh_cuts(kind: AxisType, same: Any) -> None:
    """Each device has those of its own tokens; in float64 what gradients are divided by in between changes no bit of them."""
    mesh, targets, (x, weight, _), weights = mesh_of(4, kind=kind), of_devices(4), operands(4 * T), token_weights(4 * T)
    fn = jax.jit(jax.value_and_grad(partial(tiled, loss=LossOptions(reduction="sum")), argnums=(0, 1)))
    each = LossOptions(reduction="none")
    by_hand = jax.value_and_grad(
        lambda x, w: jnp.sum(weights * cross_entropy(x, w, targets, loss=each)), argnums=(0, 1)
    )
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        arguments = place(x, "data"), place(weight), place(targets, "data")
        found = fn(*arguments, token_weight=place(weights, "data"))
    same(found, by_hand(x, weight))


@pytest.mark.ranks
def test_tokens_cut_by_an_auto_mesh(same: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One mean over all tokens; how often a device's loop of five shards runs is not known before it does."""
    mesh, targets, (x, weight, _) = mesh_of(4), of_devices(4), operands(4 * T)
    place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
    arguments = place(x, "data"), place(weight), place(targets, "data")
    wanted = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))(x, weight, targets)
    turns = []
    for early in (True, False):
        if not early:
            monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
        program = jax.jit(jax.value_and_grad(partial(tiled), argnums=(0, 1))).lower(*arguments).compile()
        same(program(*arguments), wanted)
        turns.append('"known_trip_count":{"n":"5"}' in str(program.as_text()))
    assert turns == [False, True]


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tokens_and_vocabulary_that_a_mesh_cuts_over_two_axes(
    kind: AxisType, reduction: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices with parts of one vocabulary have the same tokens and stop together, each such group where its labels end."""
    mesh, (x, weight, _) = mesh_of(4, 2, kind=kind), operands(4 * T)
    weight, targets = weight[:, : V - 1], jnp.minimum(of_devices(4), V - 2)
    loss, place = LossOptions(reduction=reduction), lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))

    def total(fn: Any, *given: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(fn(*given, loss=loss)))

    wanted = jax.jit(jax.value_and_grad(partial(total, cross_entropy), argnums=(0, 1)))(x, weight, targets)
    turns = []
    with jax.set_mesh(mesh):
        arguments = place(x, "data"), place(weight, None, "tensor"), place(targets, "data")
        for early in (True, False):
            if not early:
                monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
            program = jax.jit(jax.value_and_grad(partial(total, tiled), argnums=(0, 1))).lower(*arguments).compile()
            same(program(*arguments), wanted)
            text = str(program.as_text())
            assert f"f64[{weight.shape[0]},{weight.shape[1] // 2}]" in text, "the vocabulary is not split"
            turns.append('"known_trip_count":{"n":"5"}' in text)
    assert turns == [False, True]


@pytest.mark.ranks
def test_tokens_cut_by_an_explicit_mesh(counted: Any, same: Any) -> None:
    """Every device stops where its own labels end."""
    mesh, targets, (x, weight, _) = mesh_of(4, kind=AxisType.Explicit), of_devices(4), operands(4 * T)
    wanted = jax.jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)))(x, weight, targets)
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        fn = jax.jit(jax.value_and_grad(tiled, argnums=(0, 1)))
        arguments = place(x, "data"), place(weight), place(targets, "data")
        same(fn(*arguments), wanted)
        rows = sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))
        assert counted(fn, *arguments) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_device_of_a_shard_map_has_its_own_count(check_vma: bool, counted: Any, same: Any) -> None:
    mesh, targets, (x, weight, _) = mesh_of(4), of_devices(4), operands(4 * T)

    def on_device(*arguments: jax.Array) -> Any:
        return lax.psum(tiled(*arguments, loss=LossOptions(reduction="sum")), "data")

    specs = P("data"), P(), P("data")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    plain = partial(cross_entropy, loss=LossOptions(reduction="sum"))
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    arguments = x, weight, targets
    same(found(*arguments), wanted(*arguments))
    rows = sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))
    assert counted(found, *arguments) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("data", "check_vma"), [(1, True), (2, False), (1, False), (2, True)])
def test_a_vocabulary_that_is_split(data: int, check_vma: bool, counted: Any, same: Any) -> None:
    """Devices meet in every shard, and have the same labels. Where others have other tokens all take the most turns of any."""
    mesh, targets, (x, weight, _) = mesh_of(data, 2), of_devices(4)[T : T * (1 + data)], operands(data * T)
    x, weight = x[: data * T], jnp.pad(weight, ((0, 0), (0, 1)))

    def on_device(*arguments: jax.Array) -> Any:
        fn = partial(vocab_parallel_linear_cross_entropy, vocab_size=V, axis_name="tensor")
        total = fn(*arguments, loss=LossOptions(reduction="sum"), tiling=Tiling(shard_tokens=SHARD))
        return lax.psum(total, "data")

    of_rows = P("data") if data > 1 else P()
    specs = of_rows, P(None, "tensor"), of_rows
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    plain = lambda x, w, targets: cross_entropy(x, w[:, :V], targets, loss=LossOptions(reduction="sum"))  # noqa: E731
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    actual = found(x, weight, targets)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted(x, weight, targets)), strict=True):
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "loss and gradients")
    rows = 2 * data * rows_for(max(int((own >= 0).sum()) for own in targets.reshape(data, T)))
    assert counted(found, x, weight, targets) == {"statistics": rows, "gradient": rows}


@pytest.mark.ranks
@pytest.mark.deep_but(2)
@pytest.mark.parametrize(("data", "check_vma", "reduction"), [(1, True, "mean"), (2, False, "none"), (2, True, "sum")])
def test_tokens_that_are_split_with_the_vocabulary(
    data: int, check_vma: bool, reduction: Any, counted: Any, same: Any
) -> None:
    """Each device's own rows that count come first; all take the turns of the one with most labels."""
    mesh, (x, weight, _) = mesh_of(data, 2), operands(2 * data * T)
    weight = jnp.pad(weight, ((0, 0), (0, 1)))

    def on_device(x: jax.Array, weight: jax.Array, targets: jax.Array) -> Any:
        fn = partial(vocab_parallel_linear_cross_entropy, vocab_size=V, axis_name="tensor", sequence_parallel=True)
        loss = LossOptions(reduction="none" if reduction == "none" else "sum")
        found = fn(x, weight, targets, loss=loss, tiling=Tiling(shard_tokens=SHARD))
        return lax.psum(jnp.sum(jnp.sin(found)), ("data", "tensor")) if found.ndim else lax.psum(found, "data")

    def plain(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
        found = cross_entropy(x, weight[:, :V], targets, loss=LossOptions(reduction="none"))
        return jnp.sum(jnp.sin(found) if reduction == "none" else found)

    of_rows = P(("data", "tensor"))
    specs = of_rows, P(None, "tensor"), of_rows
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    found, wanted = (jax.jit(jax.value_and_grad(fn, argnums=(0, 1))) for fn in (mapped, plain))
    for shares in [(0.9, 0.9), (0.5, 0.9), (0.1, 0.1), (0.0, 1.0), (1.0, 1.0)]:
        targets = jnp.concatenate([labels(share, seed=i) for i, share in enumerate(shares * data)])
        run = counted(found, x, weight, targets)
        pairs = zip(*(jax.tree.leaves(fn(x, weight, targets)) for fn in (found, wanted)), strict=True)
        for a, b in pairs:
            assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "loss and gradients")
        most = rows_for(max(int((own >= 0).sum()) for own in targets.reshape(2 * data, T)))
        rows = 2 * 2 * data * most  # of every device's gathered shards
        assert run == ({"statistics": rows, "gradient": rows} if rows else {}), shares


@pytest.mark.ranks
@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bytes_of_split_tokens_are_those_of_all_rows(reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a few numbers per token: no shard is there more than where all are run."""
    tokens, hidden, vocab, shard = 1024, 64, 512, 64
    fn = partial(vocab_parallel_linear_cross_entropy, axis_name="tensor", sequence_parallel=True)
    given = {"loss": LossOptions(reduction=reduction), "tiling": Tiling(shard_tokens=shard)}
    specs = P("tensor"), P(None, "tensor"), P("tensor")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, hidden), (hidden, vocab))]
    found = []
    for _ in range(2):
        out = P("tensor") if reduction == "none" else P()
        mapped = jax.shard_map(partial(fn, **given), mesh=mesh_of(1, 2), in_specs=specs, out_specs=out)
        total = lambda *a, mapped=mapped: jnp.sum(jnp.sin(mapped(*a)))  # noqa: E731
        arguments = *shapes, jax.ShapeDtypeStruct((tokens,), jnp.int32)
        found.append(temp_bytes(jax.value_and_grad(total, argnums=(0, 1)), *arguments))
        monkeypatch.setattr(api, "may_stop_early", lambda *_: False)
    assert found[0] <= found[1] + 4 * tokens * 4
