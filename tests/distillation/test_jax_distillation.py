"""What the distillation loss of JAX costs, its derivatives of every kind, and that it is the same on meshes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shared_specs.config import LossOptions, Tiling
from shared_specs.distillation import costs
from shared_specs.shards import ShardPlan
from tests.core.jax_counting import flop, temp_bytes
from tests.core.jax_program import counted
from tiled_jax import tiled_distillation_loss

T, H, G, V, SHARD = 22, 8, 12, 13, 4

tiled = partial(tiled_distillation_loss, tiling=Tiling(shard_tokens=SHARD))


def operands(tokens: int = T, dtype: Any = np.float64, sizes: tuple[int, int, int] = (H, G, V)) -> list[jax.Array]:
    """Student, its weight, teacher, its weight."""
    rng, (hidden, teacher_hidden, vocab) = np.random.default_rng(0), sizes
    shapes = (tokens, hidden), (hidden, vocab), (tokens, teacher_hidden), (teacher_hidden, vocab)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def labels(share: float, tokens: int = T) -> jax.Array:
    rng = np.random.default_rng(1)
    targets = rng.integers(0, V, tokens)
    targets[rng.permutation(tokens)[: round(share * tokens)]] = -100
    return jnp.asarray(targets, jnp.int32)


def plain(student: Any, w: Any, teacher: Any, w_teacher: Any, targets: Any, loss: LossOptions) -> Any:
    """Jensen and Shannon's divergence of whole logits, at temperature 2, and a third of the cross entropy."""
    z = student @ w
    log_q, log_p = (jax.nn.log_softmax(each / 2) for each in (z, teacher @ w_teacher))
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    log_m = jnp.log((q + p) / 2)
    soft = ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2
    valid = targets != -100
    hard = -jnp.take_along_axis(jax.nn.log_softmax(z), jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(valid, soft * (2 / 3) + hard / 3, 0)
    return losses if loss.reduction == "none" else losses.sum() / valid.sum().astype(losses.dtype)


ARGUMENTS: dict[str, Any] = {"kind": "jsd", "temperature": 2.0, "weight_hard": 1 / 3}


@pytest.mark.deep
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivatives_of_every_order_and_mode(reduction: Any, same: Any) -> None:
    student, w, *rest = operands()
    loss, targets = LossOptions(reduction=reduction), labels(0.4)
    tangents = [jnp.sin(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape) for a in (student, w)]

    def of(fn: Any) -> Any:
        def run(student: jax.Array, w: jax.Array) -> Any:
            return (
                fn(student, w) * jnp.cos(jnp.arange(1, 1 + fn(student, w).size).reshape(fn(student, w).shape))
            ).sum()

        along = jax.jit(partial(jax.jvp, run))((student, w), tuple(tangents))
        curvature = jax.jit(partial(jax.jvp, jax.grad(run, (0, 1))))((student, w), tuple(tangents))
        batch = jax.jit(jax.vmap(jax.grad(run, (0, 1)), (0, None)))(jnp.stack([student, 2 * student]), w)
        return along, curvature, batch

    with jax.numpy_dtype_promotion("standard"):
        found = of(lambda x, w: tiled(x, w, *rest, targets, loss=loss, **ARGUMENTS))
        same(found, of(lambda x, w: plain(x, w, *rest, targets, loss)))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_flop_are_three_units_of_the_student_and_one_of_the_teacher(reduction: Any) -> None:
    """Without gradients one of each; a frozen head spares its own gradient's."""
    arguments, loss = operands(dtype=np.float32), LossOptions(reduction=reduction)

    def value(*arguments: jax.Array) -> jax.Array:
        return tiled(*arguments, labels(0.5), loss=loss, **ARGUMENTS).sum()

    shape = costs.DistillationShape(tokens=T, hidden=H, teacher_hidden=G, vocab=V)
    expected = costs.distillation_flop(shape, gradients_in_forward=reduction == "mean")
    assert flop(jax.grad(value, (0, 1)), *arguments) == expected
    assert flop(jax.grad(value), *arguments) == expected - 2 * T * H * V
    assert flop(value, *arguments) == 2 * T * V * (H + G)


def test_as_many_shards_run_as_the_labels_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 22 tokens in shards of four, five with a label: two shards, not six; and none where no token has one."""
    from tiled_jax.distillation import math as distillation_math

    rows, of = [], distillation_math.losses_and_gradient

    def counting(rules: Any, logits: jax.Array, *args: Any) -> Any:
        jax.debug.callback(lambda: rows.append(logits.shape[0]))
        return of(rules, logits, *args)

    monkeypatch.setattr(distillation_math, "losses_and_gradient", counting)
    for valid, most in ((5, 8), (0, 0)):
        rows.clear()
        targets = jnp.where(jnp.arange(T) % 4 == 1, 3, -100)
        targets = jnp.where(jnp.cumsum(targets >= 0) <= valid, targets, -100).astype(jnp.int32)
        # Another temperature for each, so that each is traced with the counter.
        grads = jax.grad(partial(tiled, targets=targets, temperature=1.5 + valid), (0, 1))(*operands(dtype=np.float32))
        jax.effects_barrier()
        assert sum(rows) == most
        assert not np.asarray(grads[0])[np.asarray(targets) == -100].any()


def test_compiled_bytes_are_within_the_formula() -> None:
    """The logits of one shard of both heads, and what elementwise work stores beside them: the same for 16 times the tokens."""
    sizes, found = (64, 96, 4096), []
    for tokens in (512, 8192):
        arguments = operands(tokens, np.float32, sizes)
        for kind in ("forward_kl", "jsd"):
            fn = partial(tiled_distillation_loss, kind=kind, temperature=2.0, tiling=Tiling(shard_tokens=256))
            shape = costs.DistillationShape(tokens=tokens, hidden=sizes[0], teacher_hidden=sizes[1], vocab=sizes[2])
            kept = tokens * 4 * 4 + arguments[0].nbytes  # numbers of every token; dx before it is the result
            used = temp_bytes(jax.grad(fn, (0, 1)), *arguments) - kept
            assert used <= costs.compiled_distillation_peak_bytes(shape, ShardPlan(tokens, 256))
            found.append(used)
    assert found[2] <= found[0]
    assert found[3] <= found[1]


@pytest.mark.deep_but(1)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tokens_that_a_mesh_cuts(kind: AxisType, reduction: Any, same: Any) -> None:
    """Every device computes its own, by its own number of labels; gradients of the weight are added up once."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    student, w, teacher, w_teacher = operands(4 * T)
    targets = jnp.concatenate([labels(share) for share in (0.0, 0.5, 0.9, 1.0)])
    loss = LossOptions(reduction=reduction)

    def value(student: jax.Array, w: jax.Array, teacher: jax.Array, targets: jax.Array) -> jax.Array:
        found = tiled(student, w, teacher, jnp.asarray(w_teacher), targets, loss=loss, **ARGUMENTS)
        return (found**2).sum()

    expected = jax.jit(jax.value_and_grad(value, (0, 1)))(student, w, teacher, targets)
    place = lambda a, *axes: jax.device_put(a, NamedSharding(mesh, P(*axes)))  # noqa: E731
    arguments = place(student, "data"), place(w), place(teacher, "data"), place(targets, "data")
    with jax.set_mesh(mesh):
        w_teacher = place(w_teacher)
        run = jax.jit(jax.value_and_grad(value, (0, 1)))
        same(jax.device_get(run(*arguments)), jax.device_get(expected))
        outside, inside, products = counted(run.lower(*arguments).compile().as_text(), turns=T // SHARD)
    assert not inside
    assert not outside["all-gather"]
    of_one = costs.distillation_flop(
        costs.DistillationShape(tokens=T, hidden=H, teacher_hidden=G, vocab=V), gradients_in_forward=reduction == "mean"
    )
    assert 2 * products <= of_one * 1.2  # the loops of unknown length count as whole ones
    del outside


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_every_device_has_its_own(check_vma: bool, same: Any) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    arguments = operands(4 * T)
    targets = jnp.concatenate([labels(share) for share in (0.0, 0.5, 0.9, 1.0)])

    def value(student: Any, w: Any, teacher: Any, w_teacher: Any, targets: Any) -> Any:
        return jax.lax.psum(tiled(student, w, teacher, w_teacher, targets, loss=LossOptions(reduction="sum")), "data")

    specs = (P("data"), P(), P("data"), P(), P("data"))
    mapped = jax.shard_map(value, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    whole = partial(tiled, loss=LossOptions(reduction="sum"))
    run, expected = (jax.jit(jax.value_and_grad(fn, (0, 1))) for fn in (mapped, whole))
    same(run(*arguments, targets), expected(*arguments, targets))


def test_the_teacher_gets_no_gradient() -> None:
    grads = jax.grad(tiled, (2, 3))(*operands(dtype=np.float32))
    assert not any(np.asarray(each).any() for each in grads)
