"""Cross entropy over a vocabulary that is split over a mesh axis: of given logits, or fused with the tiled head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.collectives.partitions import vocab_partition
from shared_specs.config import LossOptions, Tiling
from shared_specs.core import checks
from shared_specs.loss import checks as loss_checks
from tiled_jax.collectives.gathered_tokens import axis_ranks
from tiled_jax.core.arrays import array, operand
from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.loops import Like, gradient_of, upstream_of
from tiled_jax.core.products import wide
from tiled_jax.loss import math as loss_math
from tiled_jax.loss.api import as_labels, check_targets, linear_cross_entropy
from tiled_jax.loss.math import Part, Rules, Statistics


def vocab_parallel_linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    axis_name: str,
    token_weight: jax.Array | None = None,
) -> Any:
    """`tiled_linear_cross_entropy` where every device of a mesh axis has a run of the vocabulary, in order.

    No device holds more than one shard's logits of its own entries, [t, V / R]. Devices communicate twice per shard, for a
    maximum and for a sum of a few numbers per token, and once per call, for the sum of dx. With sequence_parallel no device
    holds x, or its gradient, for more tokens than two gathered shards, 2 R t H elements. Shard i of every device's own tokens
    is gathered while shard i - 1 computes. Every device then receives its own rows of the sum of dx.

    Args:
        x, targets: as there, the same on all devices of the axis; with sequence_parallel this device's tokens.
        weight: [H, V / R], this device's entries.
        bias: [V / R]. loss: as there; its class_weight is whole, [V].
        num_shards, tiling, backend: as there; vocab_shards cuts a device's own entries.
        vocab_size: V; None is R times what a device has. Where it is less, the last entries of the last devices are
            padding: no token has them as its target, and their gradients are zero.
        sequence_parallel: tokens are split over the axis too. A shard (num_shards, shard_tokens) is of a device's own ones.
        split_sizes: tokens of every device where they differ, as in `tensor_parallel_mlp`; numbers of padding are zero.
        axis_name: the axis of the surrounding `jax.shard_map`. Other axes may split the tokens.
        token_weight: as targets are, the same on all devices of the axis or, with sequence_parallel, of this device's tokens.
    Returns:
        What `tiled_linear_cross_entropy` of the whole weight returns, the same on all devices of the axis; with
        sequence_parallel sums and means are over the tokens of all of its devices, and what there is of every token is of
        this device's.
    Numerics, Memory: as there, of V / R entries (shared_specs.loss.sequence_costs.compiled_sequence_loss_peak_bytes).
    Ignored tokens: as there; with sequence_parallel every device's own rows with a label come first, and a shard has those of
        all: R times what the device with most labels has is multiplied.
    Raises:
        As there; SpecError where the devices have fewer entries than vocab_size.
    Source: derived in shared_specs/README.md; the split is Megatron-LM's, arXiv 1909.08053.
    Example:
        loss = jax.shard_map(
            partial(vocab_parallel_linear_cross_entropy, axis_name="tensor"),
            mesh=mesh, in_specs=(P(), P(None, "tensor"), P()), out_specs=P(),
        )(x, weight, targets)
    """
    name = "vocab_parallel_linear_cross_entropy"
    weight = array(name, "weight", weight)
    vocab = _vocab(name, vocab_size, weight.shape[-1], axis_name)
    return linear_cross_entropy(
        name,
        x,
        weight,
        targets,
        bias,
        loss,
        num_shards,
        tiling,
        backend,
        axis=axis_name,
        vocab=vocab,
        sequence_parallel=sequence_parallel,
        split_sizes=split_sizes,
        token_weight=token_weight,
    )


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: jax.Array,
    target: jax.Array,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int | None = None,
    axis_name: str,
) -> jax.Array:
    """Return the cross entropy of every token from logits whose vocabulary is split over a mesh axis.

    loss = (1 - ε) (lse - z_target) + ε / V Σ (lse - z). No array but the given logits and their gradient has their size.

    Args:
        vocab_parallel_logits: [*tokens, V / R], this device's entries of the vocabulary, in the order of the devices.
        target: [*tokens], int32 | int64, the same on all devices of the axis. -100 has no loss and no gradient; any other
            value outside [0, V) makes its token's loss and gradients NaN.
        label_smoothing: ε in [0, 1], as in torch.nn.functional.cross_entropy: the target gets 1 - ε + ε / V, every other entry
            ε / V. Megatron-LM's function of this name gives the target 1 - ε and every other entry ε / (V - 1): for its ε pass
            ε V / (V - 1).
        vocab_size, axis_name: as in `vocab_parallel_linear_cross_entropy`.
    Returns:
        [*tokens] float32 (float64 for float64), the same on all devices of the axis.
    Numerics: elementwise work and sums in float32; the gradient has the dtype of the logits.
    Memory: keeps the logits and two numbers per token for backward.
    Raises:
        SpecError: shapes, dtypes or numbers out of range. TypeError: a wrong kind of value.
    Source: named after and called as Megatron-LM's (arXiv 1909.08053), whose smoothing differs.
    Example:
        loss = jax.shard_map(
            partial(vocab_parallel_cross_entropy, axis_name="tensor"),
            mesh=mesh, in_specs=(P(None, "tensor"), P()), out_specs=P(),
        )(logits, target)
    """
    name = "vocab_parallel_cross_entropy"
    logits = array(name, "vocab_parallel_logits", vocab_parallel_logits)
    target = as_labels(array(name, "target", target))
    options = LossOptions(label_smoothing=label_smoothing, reduction="none")
    loss_checks.check_loss_options(name, options)
    loss_checks.check_vocab_parallel_logits(name, operand(logits), operand(target))
    local = logits.shape[-1]
    vocab = _vocab(name, vocab_size, local, axis_name)
    check_targets(name, target, vocab, options.ignore_index)
    rules = Rules(options=options, vocab=vocab, padded=vocab < local * lax.axis_size(axis_name))
    operands = {"logits": logits.reshape(-1, local), "target": target.reshape(-1)}
    return _logits_loss(_LogitsCall(rules, axis_name), operands)["loss"].reshape(target.shape)


def _vocab(function: str, vocab_size: int | None, local: int, axis_name: str) -> int:
    """V, from the entries of every device; SpecError where there are fewer than vocab_size."""
    checks.check_count(function, "vocab_size", vocab_size)
    return vocab_partition(function, vocab_size, local, axis_ranks(function, axis_name), 0).vocab


@dataclass(frozen=True)
class _LogitsCall:
    rules: Rules
    axis: str


class _LogitsRules:
    """The loss of logits [T, V / R]; the derivatives need the logits, and two numbers per token."""

    @staticmethod
    def forward(call: _LogitsCall, operands: Arrays) -> Arrays:
        return _LogitsRules.save(call, operands, ())[0]

    @staticmethod
    def save(call: _LogitsCall, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        logits, target = operands["logits"], operands["target"]
        labels = loss_math.make_labels(call.rules, target, None, wide(logits.dtype))
        found = loss_math.statistics(call.rules, logits, _part(call, logits), labels)
        found = loss_math.reduce_over(call.rules, call.axis, found)
        losses = loss_math.values(call.rules, labels, found, call.rules.vocab)["loss"]
        return {"loss": losses}, Saved(operands | {"top": found.top, "total": found.total})

    @staticmethod
    def tangents(call: _LogitsCall, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        one = jnp.ones_like(saved.arrays["total"])
        own = jnp.sum(_logit_gradients(call, saved, one).astype(one.dtype) * t["logits"].astype(one.dtype), axis=-1)
        return {"loss": lax.psum(own, call.axis)}

    @staticmethod
    def gradients(call: _LogitsCall, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        d = _logit_gradients(call, saved, upstream_of(call.axis, g["loss"]))
        return {"logits": gradient_of(Like.of(saved.arrays["logits"]), d)}


def _logit_gradients(call: _LogitsCall, saved: Saved, upstream: jax.Array) -> jax.Array:
    """Return the derivative of each token's loss in this device's logits, times `upstream`."""
    logits, target, top, total = (saved.arrays[name] for name in ("logits", "target", "top", "total"))
    labels = loss_math.make_labels(call.rules, target, None, wide(logits.dtype))
    found = Statistics(top, total, target=top, weighted=None, moment=None)
    lse = loss_math.log_sum_exp(call.rules, found)
    k = loss_math.coefficients(call.rules, labels, lse, call.rules.vocab, {"loss": upstream})
    return loss_math.gradient(call.rules, logits, _part(call, logits), labels, found, k, None)


def _part(call: _LogitsCall, logits: jax.Array) -> Part:
    """Return this device's entries."""
    return Part(lax.axis_index(call.axis) * logits.shape[-1], None, None, None)


_logits_loss = differentiable(_LogitsRules.forward, _LogitsRules)
