"""Whole MLPs and losses by every way there is, forward and backward, for `bench --device gpu`."""

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shared_specs.app.gpu.worker import Variant
from shared_specs.config import Tiling
from shared_specs.kernels.blocks import DETERMINISTIC, Paths, paths_for
from shared_specs.kernels.roofline import MLPVariant, gpu_named, loss_seconds, mlp_seconds
from shared_specs.loss import costs as loss_costs
from shared_specs.mlp import costs as mlp_costs
from shared_specs.shards import ShardPlan
from tiled_jax import backends, tiled_linear_cross_entropy, tiled_mlp
from tiled_jax.commands.gpu.device import variant
from tiled_jax.commands.gpu.kernels import draw
from tiled_jax.core.mosaic import ARCHITECTURE
from tiled_jax.core.products import product_of_rows

MLP_GROUPS = ("main", "peers", "rest", "sweep")
LOSS_GROUPS = ("main", "peers", "ignored")
# Of the labels of the group "ignored": as in a chat, of which the answers alone are learned.
IGNORED = 0.9
RESULTS = ("y", "dx", "dw_gate", "dw_up", "dw_down")

MLP = Callable[..., jax.Array]
Groups = dict[str, Callable[[], dict[str, Variant]]]


def plain(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def with_gradients(fn: MLP) -> Callable[..., Any]:
    """Return y and every gradient, of the operands and dy."""

    def run(*arguments: jax.Array) -> Any:
        y, pull = jax.vjp(fn, *arguments[:-1])
        return y, *pull(arguments[-1])

    return run


class MLPs:
    """The variants of one workload: t tokens of a shard, T = `tokens`; data are drawn when a group begins."""

    def __init__(self, *, tokens: int, hidden: int, width: int, shard: int, dtype: Any) -> None:
        self.shard, dtype = shard, jnp.dtype(dtype)
        h, i = hidden, width
        self.arguments = (
            draw(0, tokens, h, dtype=dtype),
            *(draw(seed, h, i, dtype=dtype, scale=h**-0.5) for seed in (1, 2)),
            draw(3, i, h, dtype=dtype, scale=i**-0.5),
            draw(4, tokens, h, dtype=dtype),
        )
        self.shape = mlp_costs.MLPShape(
            tokens=tokens, hidden=h, intermediate=i, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize
        )
        kind = backends.device_kind()
        self.plan = mlp_costs.plan_mlp("bench", self.shape, shard_tokens=shard, device=kind)
        self.peak = mlp_costs.compiled_peak_bytes(self.shape, self.plan, device=kind)
        self.gpu = gpu_named(jax.devices()[0].device_kind)
        self.paths = paths_for("pallas", ARCHITECTURE, str(dtype), (i, h))

    def model(self, variant: MLPVariant, keep: float = 0.0, paths: Paths | None = None) -> float | None:
        """Return seconds that the model of the time says; None for a device whose rates nobody has put down."""
        if self.gpu is None:
            return None
        return mlp_seconds(self.shape, self.plan, self.gpu, variant=variant, keep=keep, paths=paths).total

    def step(self, fn: MLP, flop: float, **facts: Any) -> Variant:
        return variant(with_gradients(fn), *self.arguments, names=RESULTS, flop=flop, **facts)

    def forward_only(self, fn: MLP) -> Variant:
        return variant(fn, *self.arguments[:-1], names=("y",), flop=3 * mlp_costs.thi(self.shape))

    def plain(self) -> Variant:
        return self.step(plain, mlp_costs.plain_flop(self.shape), library=True)

    def own(
        self, backend: str, *, keep: float = 0.0, in_checkpoint: bool = False, deterministic: bool = False
    ) -> Variant:
        tiling = Tiling(shard_tokens=self.shard, keep=keep, deterministic=deterministic)
        fn: MLP = partial(tiled_mlp, tiling=tiling, backend=backend)
        flop = mlp_costs.mlp_flop(
            self.shape, self.plan, keep=keep, checkpointing="non-reentrant" if in_checkpoint else "none"
        )
        predicted = self.peak + mlp_costs.saved_bytes(self.shape, self.plan, keep=keep)
        paths = None if backend == "xla" else DETERMINISTIC if deterministic else self.paths
        facts = {"predicted_bytes": predicted, "model_seconds": self.model("tiled", keep, paths)}
        return self.step(jax.checkpoint(fn) if in_checkpoint else fn, flop, **facts)

    def products(self, recomputed: float) -> Variant:
        """Nothing but products: what no implementation of as many can be faster than."""
        whole = self.shape.tokens // self.shard
        again = int(recomputed * whole)
        run = partial(products_alone, self.shard, again)
        flop = (9 * whole + 2 * again) * mlp_costs.thi(self.shape) * self.shard / self.shape.tokens
        seconds = self.model("products", 1.0 - recomputed)
        return variant(run, *self.arguments, names=None, flop=flop, model_seconds=seconds)

    def main(self) -> dict[str, Variant]:
        once = mlp_costs.plain_flop(self.shape, checkpointing="non-reentrant")
        return {
            "plain": self.plain(),
            "tiled-pallas": self.own("pallas"),
            "tiled-xla": self.own("xla"),
            "tiled-pallas-keep-1": self.own("pallas", keep=1.0),
            "tiled-in-checkpoint": self.own("auto", in_checkpoint=True),
            "checkpoint": self.step(jax.checkpoint(plain), once),
            "products-22": self.products(1.0),
            "products-18": self.products(0.0),
        }

    def peers(self) -> dict[str, Variant]:
        tokamax = self.step(_tokamax, mlp_costs.plain_flop(self.shape), peer=True)
        return {"plain": self.plain(), "tiled-pallas": self.own("pallas"), "tokamax": tokamax}

    def rest(self) -> dict[str, Variant]:
        return {
            "plain": self.plain(),
            "products-20": self.products(0.5),
            "tiled-deterministic": self.own("pallas", deterministic=True),
            "plain-forward": self.forward_only(plain),
            **{
                f"tiled-{backend}-forward": self.forward_only(
                    partial(tiled_mlp, tiling=Tiling(shard_tokens=self.shard), backend=backend)
                )
                for backend in ("pallas", "xla")
            },
        }

    def sweep(self) -> dict[str, Variant]:
        found = {"plain": self.plain(), "tiled-pallas": self.own("pallas"), "tiled-xla": self.own("xla")}
        return found | {"products-22": self.products(1.0)}


def products_alone(
    shard: int,
    again: int,
    x: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    dy: jax.Array,
) -> Any:
    """As many products as forward and backward have, of their shapes, and nothing else; a rest of tokens is left out.

    Nine a shard and eleven of the first `again`: [t, H] [H, I] 3 (5) times, [t, I] [I, H] 3 times, and the weights' three
    gradients in float32 sums. Each is an operand of another one, so that the compiler drops none and shares none.
    """
    h, i = w_gate.shape
    whole = x.shape[0] // shard
    sums = tuple(jnp.zeros(size, jnp.float32) for size in ((h, i), (h, i), (i, h)))

    def of_shard(recompute: bool, acc: tuple[jax.Array, ...], operands: tuple[jax.Array, jax.Array]) -> Any:
        x, dy = operands
        first = x @ w_gate
        y = first @ w_down
        second = y @ w_up
        third = (second @ w_down) @ w_gate
        wide = (dy @ w_gate, dy @ w_up) if recompute else (second, third)
        pairs = ((x, wide[0]), (y, wide[1]), (first, dy))
        found = tuple(total + product_of_rows(a, b, total.dtype) for total, (a, b) in zip(acc, pairs, strict=True))
        return found, third @ w_down

    rows = [a[: whole * shard].reshape(whole, shard, h) for a in (x, dy)]
    outs = []
    for recompute, part in ((True, slice(0, again)), (False, slice(again, whole))):
        sums, out = lax.scan(partial(of_shard, recompute), sums, (rows[0][part], rows[1][part]))
        outs.append(out)
    return sums, outs


def mlp_groups(**sizes: Any) -> Groups:
    """Group -> what draws its data and returns its variants, plain first."""
    return {name: lambda name=name: getattr(MLPs(**sizes), name)() for name in MLP_GROUPS}


def _tokamax(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    gated = importlib.import_module("tokamax").gated_linear_unit
    return gated(x, (w_gate, w_up), activation=jax.nn.silu) @ w_down


class Losses:
    """The variants of one head and its loss; tiled at several shard lengths, by XLA and with the kernel.

    ignored: the share of labels that are -100.
    """

    def __init__(
        self, *, tokens: int, hidden: int, vocab: int, shards: Sequence[int], dtype: Any, ignored: float = 0.0
    ) -> None:
        self.shards, self.kind, dtype = tuple(shards), backends.device_kind(), jnp.dtype(dtype)
        rng = np.random.default_rng(2)
        labels = rng.integers(0, vocab, tokens)
        labels[rng.permutation(tokens)[: round(ignored * tokens)]] = -100
        self.valid, targets = float(np.mean(labels >= 0)), jnp.asarray(labels, jnp.int32)
        weight = draw(1, hidden, vocab, dtype=dtype, scale=hidden**-0.5)
        self.arguments = draw(0, tokens, hidden, dtype=dtype), weight, targets
        self.shape = loss_costs.LossShape(
            tokens=tokens, hidden=hidden, vocab=vocab, itemsize=dtype.itemsize, weight_itemsize=dtype.itemsize
        )

    def step(self, loss: Callable[..., jax.Array], flop: float | None = None, **facts: Any) -> Variant:
        flop = flop or loss_costs.loss_flop(self.shape, gradients_in_forward=True)
        fn = jax.value_and_grad(loss, argnums=(0, 1))
        return variant(fn, *self.arguments, names=("loss", "dx", "dweight"), flop=flop, **facts)

    def own(self, backend: str, shard: int) -> Variant:
        loss = partial(tiled_linear_cross_entropy, tiling=Tiling(shard_tokens=shard), backend=backend)
        plan = ShardPlan(self.shape.tokens, shard)
        gpu = gpu_named(jax.devices()[0].device_kind)
        # The kernel finds a shard of logits in the cache the second time.
        sweeps = 2 if backend == "pallas" else 3
        known = None if gpu is None or self.valid < 1 else loss_seconds(self.shape, plan, gpu, sweeps=sweeps)
        seconds = None if known is None else known.total
        predicted = loss_costs.compiled_loss_peak_bytes(self.shape, plan, device=self.kind)
        flop = loss_costs.loss_flop(self.shape, gradients_in_forward=True, valid=self.valid)
        return self.step(loss, flop, predicted_bytes=predicted, model_seconds=seconds)

    def plain(self) -> Variant:
        return self.step(plain_loss, library=True)

    def main(self) -> dict[str, Variant]:
        # XLA compiles for seconds a variant, its own form at one length.
        names = [*(("pallas", shard) for shard in self.shards), ("xla", self.shards[0])]
        return {"plain": self.plain()} | {
            f"tiled-{backend}-{shard}": self.own(backend, shard) for backend, shard in names
        }

    def peers(self) -> dict[str, Variant]:
        shard = self.shards[len(self.shards) // 2 - 1]
        again = loss_costs.loss_flop(self.shape, gradients_in_forward=False)
        found = {"plain": self.plain(), f"tiled-pallas-{shard}": self.own("pallas", shard)}
        return found | {"scan-checkpoint": self.step(partial(scan_checkpoint, shard), again, peer=True)}

    def ignored(self) -> dict[str, Variant]:
        """Rows without a label: of one shard length, so that what counts is not one shard alone."""
        shard = self.shards[0]
        names = {f"tiled-{backend}-{shard}": self.own(backend, shard) for backend in ("pallas", "xla")}
        return {"plain": self.plain()} | names


def losses(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the loss of every token, [T], in float32 from logits in the dtype of x; 0 where there is no label."""
    logits = (x @ weight).astype(jnp.float32)
    found = (
        jax.nn.logsumexp(logits, axis=-1)
        - jnp.take_along_axis(logits, targets[:, None] % weight.shape[1], axis=-1)[:, 0]
    )
    return jnp.where(targets < 0, 0.0, found)


def plain_loss(x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.sum(losses(x, weight, targets)) / jnp.sum(targets >= 0, dtype=jnp.float32)


def scan_checkpoint(shard: int, x: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Compute the loss as JAX users write it today; a rest of tokens is a call of its own."""

    @partial(jax.checkpoint, prevent_cse=False)
    def of_shard(x: jax.Array, targets: jax.Array) -> jax.Array:
        return jnp.sum(losses(x, weight, targets))

    whole = x.shape[0] // shard
    at = whole * shard
    shards = x[:at].reshape(whole, shard, -1), targets[:at].reshape(whole, shard)
    total, _ = lax.scan(lambda total, part: (total + of_shard(*part), None), jnp.zeros((), jnp.float32), shards)
    return (total + (of_shard(x[at:], targets[at:]) if at < x.shape[0] else 0.0)) / jnp.sum(
        targets >= 0, dtype=jnp.float32
    )


def loss_groups(**sizes: Any) -> Groups:
    """As `mlp_groups`."""
    ignored = {"ignored": IGNORED}
    return {
        name: lambda name=name: getattr(Losses(**sizes, ignored=ignored.get(name, 0.0)), name)() for name in LOSS_GROUPS
    }
