"""The loss of a head that is called, since it is more than a weight: of the rows whose label counts alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import Tiling
from shared_specs.tolerances import DISTRIBUTED_FLOAT64
from tests.asserting import assert_within
from tests.core.jax_counting import flop, temp_bytes
from tests.loss.jax_ignored import SHARD, SHARES, H, T, V, labels, mesh_of, of_devices, rows_for
from tiled_jax.models.loss import _summed
from tiled_jax.tile import call
from tiled_jax.tile.loss import tiled_loss_of

RUN: list[int] = []  # rows of each call of the head; appending is safe from several devices' threads


class Adapted(nnx.Module):
    """A weight and a low-rank one beside it, which tells of how many rows it is called when a program runs."""

    def __init__(self, *, counting: bool = True, hidden: int = H, vocab: int = V, dtype: Any = jnp.float64) -> None:
        rng = np.random.default_rng(1)
        shapes = {"base": (hidden, vocab), "a": (hidden, 2), "b": (2, vocab)}
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.asarray(rng.standard_normal(shape), dtype)))
        self.counting = counting

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.counting:
            jax.debug.callback(lambda rows=x.shape[0]: RUN.append(rows))
        return x @ self.base[...] + (x @ self.a[...]) @ self.b[...]


def of_head(rows: jax.Array, targets: jax.Array, head: Any) -> jax.Array:
    return _summed(head(rows), targets)


def losses(*, counting: bool = True) -> tuple[Any, Any, Any]:
    """(x, targets, state) -> the loss, tiled and of whole logits; and the state."""
    graph, state = nnx.split(Adapted(counting=counting))

    def tiled(x: jax.Array, targets: jax.Array, state: Any) -> jax.Array:
        head, counted = nnx.merge(graph, state), targets != -100
        return tiled_loss_of(of_head, x, targets, head, tiling=Tiling(shard_tokens=SHARD), counted=counted)

    return tiled, lambda x, targets, state: of_head(x, targets, nnx.merge(graph, state)), state


def drawn(tokens: int = T) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((tokens, H)))


def ran(fn: Any, *arguments: Any) -> tuple[Any, int]:
    """What a call returns, and the rows that it ran."""
    RUN.clear()
    found = jax.block_until_ready(fn(*arguments))
    jax.effects_barrier()
    return found, sum(RUN)


def close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_within(np.asarray(a), np.asarray(b), DISTRIBUTED_FLOAT64, "loss and gradients")


def with_gradients(fn: Any) -> Any:
    return jax.value_and_grad(fn, argnums=(0, 2))


def test_as_many_shards_are_run_as_the_labels_need(x64: None) -> None:
    """In forward and again in backward; one program for every share."""
    tiled, plain, state = losses()
    fn, whole, x = jax.jit(with_gradients(tiled)), jax.jit(with_gradients(plain)), drawn()
    for share in SHARES:
        targets = labels(share)
        found, rows = ran(fn, x, targets, state)
        close(found, whole(x, targets, state))
        assert rows == 2 * rows_for(int((targets >= 0).sum()))
        assert not np.asarray(found[1][0])[targets == -100].any()


def test_flop_and_bytes_are_at_most_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in which all may count: as many products, and no copy of x but of a shard."""
    tokens, hidden, vocab, shard = 2048, 128, 512, 256
    graph, state = nnx.split(Adapted(counting=False, hidden=hidden, vocab=vocab, dtype=jnp.float32))

    def fn(x: jax.Array, targets: jax.Array, state: Any) -> jax.Array:
        head, counted = nnx.merge(graph, state), targets != -100
        return tiled_loss_of(of_head, x, targets, head, tiling=Tiling(shard_tokens=shard), counted=counted)

    arguments = jnp.zeros((tokens, hidden), jnp.float32), jnp.zeros(tokens, jnp.int32), state
    found = [measure(with_gradients(fn), *arguments) for measure in (flop, temp_bytes)]
    monkeypatch.setattr(call, "may_stop_early", lambda *_: False)
    of_all = [measure(with_gradients(lambda *a: fn(*a)), *arguments) for measure in (flop, temp_bytes)]
    assert found[0] <= of_all[0]
    assert found[1] <= of_all[1] + shard * hidden * 4 + 4 * tokens * 4


@pytest.mark.ranks
@pytest.mark.deep_but(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tokens_that_a_mesh_cuts(kind: AxisType, x64: None) -> None:
    """Every device counts for itself. (What a program tells from inside is not heard under a partitioner.)"""
    tiled, _, state = losses(counting=kind is AxisType.Explicit)
    mesh, targets, x = mesh_of(4, kind=kind), of_devices(4), drawn(4 * T)
    wanted = jax.jit(with_gradients(losses(counting=False)[1]))(x, targets, state)
    with jax.set_mesh(mesh):
        place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
        arguments = place(x, "data"), place(targets, "data"), jax.tree.map(place, state)
        fn = jax.jit(with_gradients(tiled))
        found, rows = ran(fn, *arguments)
        text = fn.lower(*arguments).compile().as_text()
    close(jax.device_get(found), jax.device_get(wanted))
    if kind is AxisType.Explicit:
        assert rows == 2 * sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))
    assert '"known_trip_count":{"n":"5"}' not in str(text)


@pytest.mark.ranks
@pytest.mark.deep_but(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_every_device_of_a_shard_map_has_its_own_count(check_vma: bool, x64: None) -> None:
    tiled, plain, state = losses()
    mesh, targets, x = mesh_of(4), of_devices(4), drawn(4 * T)
    on_device = lambda *arguments: lax.psum(tiled(*arguments), "data")  # noqa: E731
    specs = P("data"), P("data"), P()
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    found, rows = ran(jax.jit(with_gradients(mapped)), x, targets, state)
    close(found, jax.jit(with_gradients(plain))(x, targets, state))
    assert rows == 2 * sum(rows_for(int((own >= 0).sum())) for own in targets.reshape(4, T))


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("transformed", ["a batch", "forward mode", "a gradient of a gradient"])
def test_transformations(transformed: str, x64: None) -> None:
    tiled, plain, state = losses(counting=False)
    x, targets = drawn(), jnp.stack([labels(share) for share in (0.0, 0.9)])

    def of(fn: Any) -> Any:
        first = jax.grad(fn, argnums=0)
        match transformed:
            case "a batch":
                return jax.vmap(jax.grad(fn, argnums=(0, 2)), (None, 0, None))(x, targets, state)
            case "forward mode":
                return jax.jvp(lambda x: fn(x, targets[1], state), (x,), (jnp.cos(x),))
            case _:
                return jax.grad(lambda x: jnp.sum(first(x, targets[1], state) ** 2))(x)

    close(*(jax.jit(partial(of, fn))() for fn in (tiled, plain)))
