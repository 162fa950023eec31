"""The formulas of one shard of tokens over one part of the vocabulary, forward and backward. No loops, no plans.

Letters: t tokens of the shard, H hidden, V vocabulary, v entries of the part; z, lse, nll, p, ω, A, B, C, D as in
`shared_specs/README.md`. Logits and their gradient have the dtype of x; everything between is `wide`, and so is every
number per token. The log-sum-exp is kept as top + log(total): what is near the largest logit keeps its digits.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shared_specs.config import LossOptions
from tiled_jax.core.linear_call import barrier
from tiled_jax.core.loops import vary_over, varying
from tiled_jax.core.products import linear, product, product_of_rows, wide

# Below every logit: stands for padding, and for the largest logit of nothing. Finite, so that differences of it are.
LEAST = -1e30


@dataclass(frozen=True, kw_only=True)
class Rules:
    """All that is static about the loss: the options without their arrays, V, the dtype of the logits, and whether parts may
    reach beyond V."""

    options: LossOptions
    vocab: int
    dtype: str = "float32"
    padded: bool = False

    @property
    def gradients_with_loss(self) -> bool:
        """Return whether one upstream number scales every gradient of logits of this dtype, and nothing else is waited for."""
        return self.options.gradients_with_loss(self.dtype)

    @property
    def ranked(self) -> int:
        """Return how many of the best entries of each token are asked for."""
        outputs = self.options.outputs
        return max(self.options.top_k or 0, int("prediction" in outputs))


class Part(NamedTuple):
    """A run of the vocabulary: its first entry, weight [H, v] (None where logits are given), and bias [v] and class
    weights [v] where there are any. Columns of weight and bias behind the first `entries` are padding; None: none is."""

    start: Any
    weight: jax.Array | None
    bias: jax.Array | None
    class_weight: jax.Array | None
    entries: int | None = None


class Labels(NamedTuple):
    """The labels of each token, [t] each.

    target: the entry, 0 where there is none. counted: 1, 0 where ignored, NaN where the target does not exist.
    weight: class weight of the target, times counted. token: what multiplies the token's loss; None: nothing does.
    """

    target: jax.Array
    counted: jax.Array
    weight: jax.Array
    token: jax.Array | None = None


class Statistics(NamedTuple):
    """Sums over the logits z of a part of the vocabulary, all [t]; two parts make one (`merge`), and so do devices
    (`reduce_over`).

    top and target are the logits that z is of, negated where logit_scale is negative: compared before anything bends them,
    the target's is equal to the largest where it is that one.
    """

    top: jax.Array  # the largest
    total: jax.Array  # Σ exp(z - top)
    target: jax.Array  # of the target, 0 where another part has it
    weighted: jax.Array | None  # Σ ω z, for smoothing
    moment: jax.Array | None  # Σ exp(z - top) (z - top), for the entropy


class Coefficients(NamedTuple):
    """dz = A p - B [target] - C ω - D p (log p + entropy), [t] each; C, D None where they are zero."""

    a: jax.Array
    b: jax.Array
    c: jax.Array | None
    d: jax.Array | None


def make_labels(
    rules: Rules,
    targets: jax.Array,
    class_weight: jax.Array | None,
    dtype: jnp.dtype,
    token_weight: jax.Array | None = None,
) -> Labels:
    """Return the labels of targets [t], class weights [V] given whole."""
    valid = targets != rules.options.ignore_index
    exists = (targets >= 0) & (targets < rules.vocab)
    target = jnp.where(valid & exists, targets, 0)
    counted = jnp.where(valid & ~exists, jnp.nan, valid.astype(dtype))
    weight = counted if class_weight is None else counted * class_weight.astype(dtype)[target]
    return Labels(target, counted, weight, token_weight)


def transform(rules: Rules, logits: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """z and dz/dlogits of logits [t, v], which are in the wide dtype."""
    scale, cap = rules.options.logit_scale, rules.options.logit_softcap
    z = logits if scale == 1 else logits * scale
    if cap is None:
        return z, scale
    bent = jnp.tanh(z / cap)
    return cap * bent, scale * (1 - bent * bent)


def z_of(rules: Rules, compared: jax.Array) -> jax.Array:
    """Return z of what `Statistics` compares."""
    return transform(rules, signed(rules, compared))[0]


def log_sum_exp(rules: Rules, found: Statistics) -> jax.Array:
    return z_of(rules, found.top) + jnp.log(found.total)


def signed(rules: Rules, logits: jax.Array) -> jax.Array:
    """Return logits such that a larger one has a larger z, and back."""
    return -logits if rules.options.logit_scale < 0 else logits


def logits_of(x: jax.Array, part: Part) -> jax.Array:
    """Return the logits [t, v] in the dtype of x, as all who read them see them.

    Behind a product XLA may leave out a rounding to 16 bits for one reader, such as the normaliser, and not for another:
    probabilities of unrounded logits and rounded ones then add up to more or less than 1. No reader is fused past a barrier.
    """
    assert part.weight is not None
    logits = linear(x, part.weight, part.bias)
    return barrier(logits) if logits.dtype.itemsize < 4 else logits


def nothing(tokens: int, dtype: jnp.dtype, options: LossOptions) -> Statistics:
    """Return the statistics of no entries at all."""
    zeros = jnp.zeros(tokens, dtype)
    return Statistics(
        top=jnp.full(tokens, LEAST, dtype),
        total=zeros,
        target=zeros,
        weighted=zeros if options.label_smoothing else None,
        moment=zeros if "entropy" in options.outputs else None,
    )


def statistics(rules: Rules, logits: jax.Array, part: Part, labels: Labels) -> Statistics:
    """Return the statistics of one part from its logits [t, v]."""
    target = labels.target
    entries, logits_wide = _entries(part, logits, target), logits.astype(wide(logits.dtype))
    real = entries < rules.vocab if rules.padded else None
    compared = _or(real, signed(rules, logits_wide), LEAST)
    # Only a reference: every sum below is made up for it, so it has no gradient.
    top = lax.stop_gradient(jnp.maximum(jnp.max(compared, axis=1), LEAST))
    z, _ = transform(rules, logits_wide)
    below = z - z_of(rules, top)[:, None]
    weight = _or(real, jnp.exp(below), 0)
    weighted = moment = None
    if rules.options.label_smoothing:
        omega = _omega(rules, part, entries, z.dtype)
        weighted = jnp.sum(z if omega is None else omega * z, axis=1)
    if "entropy" in rules.options.outputs:
        moment = jnp.sum(jnp.where(weight > 0, weight * below, 0), axis=1)
    of_target = signed(rules, _pick(logits, target - jnp.asarray(part.start, target.dtype)))
    return Statistics(top, jnp.sum(weight, axis=1), of_target, weighted, moment)


def merge(rules: Rules, a: Statistics, b: Statistics) -> Statistics:
    """Return the statistics of two parts together."""
    top = jnp.maximum(a.top, b.top)
    added: Statistics = jax.tree.map(jnp.add, _below(rules, a, top), _below(rules, b, top))
    return added._replace(top=top)


def reduce_over(rules: Rules, axis: str, found: Statistics) -> Statistics:
    """Return the statistics of the whole vocabulary from those of every device's part: one maximum and one sum."""
    along = varying(lax.axis_index(axis))  # empty where arrays have no varying types
    found = jax.tree.map(lambda a: vary_over(a, along), found)
    top = lax.stop_gradient(lax.pmax(found.top, axis))
    sums, structure = jax.tree.flatten(_below(rules, found, top)._replace(top=None))  # type: ignore[arg-type]
    whole: Statistics = jax.tree.unflatten(structure, list(lax.psum(jnp.stack(sums), axis)))
    return whole._replace(top=top)


def _below(rules: Rules, found: Statistics, top: jax.Array) -> Statistics:
    """Return the same relative to a larger top."""
    shift = z_of(rules, found.top) - z_of(rules, top)
    factor = jnp.exp(shift)
    moment = None if found.moment is None else factor * (found.moment + shift * found.total)
    return Statistics(top, factor * found.total, found.target, found.weighted, moment)


def values(rules: Rules, labels: Labels, found: Statistics, class_total: jax.Array | float) -> dict[str, jax.Array]:
    """Return the loss and every output of each token, [t]; what nobody asks for costs nothing once compiled."""
    options = rules.options
    log_total, lse = jnp.log(found.total), log_sum_exp(rules, found)
    nll = log_total + (z_of(rules, found.top) - z_of(rules, found.target))
    loss = (1 - options.label_smoothing) * labels.weight * nll
    if found.weighted is not None:
        loss += options.label_smoothing / rules.vocab * (class_total * lse - found.weighted)
    if options.z_loss:
        loss += options.z_loss * lse * lse
    loss = weighted(labels, loss)
    ignored = labels.counted == 0
    out = {
        "loss": jnp.where(ignored, 0, loss),
        "log_probs": jnp.where(ignored, 0, -nll * labels.counted),
        "lse": lse,
        "accuracy": jnp.where(found.target == found.top, labels.counted, 0),
        "top": found.top,
        "total": found.total,
    }
    if found.moment is not None:
        out["entropy"] = log_total - found.moment / found.total
    return out


def weighted(labels: Labels, of_losses: jax.Array) -> jax.Array:
    """Return losses [t], or gradients of them, times the tokens' weights."""
    return of_losses if labels.token is None else of_losses * labels.token


def coefficients(
    rules: Rules, labels: Labels, lse: jax.Array, class_total: jax.Array | float, g: dict[str, jax.Array]
) -> Coefficients:
    """Return the coefficients of every token [t] for upstream gradients g per token of loss, log_probs, lse and entropy."""
    options, zero = rules.options, jnp.zeros_like(lse)
    smooth = options.label_smoothing
    g_loss = jnp.where(labels.counted == 0, 0, weighted(labels, g["loss"])) if "loss" in g else zero
    g_log_probs = jnp.where(labels.counted == 0, 0, g["log_probs"]) if "log_probs" in g else zero
    b = g_loss * (1 - smooth) * labels.weight - g_log_probs
    a = b + g_loss * (smooth / rules.vocab * class_total + 2 * options.z_loss * lse)
    return Coefficients(
        a=a + g["lse"] if "lse" in g else a,
        b=b,
        c=g_loss * (smooth / rules.vocab) if smooth else None,
        d=g.get("entropy"),
    )


def loss_coefficients(
    rules: Rules, labels: Labels, lse: jax.Array, class_total: jax.Array | float, size: jax.Array | float = 1
) -> Coefficients:
    """Return the coefficients of the sum of the losses, divided by `size`."""
    return coefficients(rules, labels, lse, class_total, {"loss": jnp.ones_like(lse) / size})


def size_of_losses(
    rules: Rules, labels: Labels, class_total: jax.Array | float, class_weight: jax.Array | None
) -> jax.Array:
    """Return []: how large the gradients of the sum of the losses in the logits are, but for what z_loss adds; a power of
    two.
    """
    without_lse = jnp.zeros_like(labels.weight)
    return size_of_gradients(rules, loss_coefficients(rules, labels, without_lse, class_total), class_weight)


def size_of_gradients(rules: Rules, k: Coefficients, class_weight: jax.Array | None) -> jax.Array:
    """Return []: a power of two near the largest gradient in the logits that finite ones of these coefficients give; near 1
    for none.

    Dividing gradients by it and multiplying by it later rounds nothing, and what is stored in between is near 1, where
    float16 has most of its digits.
    """
    c = k.c if k.c is None or class_weight is None else k.c * jnp.max(jnp.abs(class_weight))
    parts = [jnp.abs(a) for a in (k.a, k.b, c, k.d) if a is not None]
    sizes = lax.stop_gradient([jnp.max(jnp.where(jnp.isfinite(a), a, 0), initial=0) for a in parts])
    size = jnp.max(jnp.stack(sizes))
    return power_of_two(jnp.where(size == 0, 1, size * (abs(rules.options.logit_scale) or 1)))


def power_of_two(size: jax.Array) -> jax.Array:
    """Return the largest power of two that is not above a size, both [], or the smallest normal number: its exponent alone."""
    limits = jnp.finfo(size.dtype)
    # Not by jnp.frexp, whose exponents jax 0.12 types as the same on all devices.
    bits = lax.bitcast_convert_type(jnp.clip(size, limits.tiny, limits.max), jnp.dtype(f"uint{limits.bits}"))
    return lax.bitcast_convert_type(bits >> limits.nmant << limits.nmant, size.dtype)


def gradient(
    rules: Rules,
    logits: jax.Array,
    part: Part,
    labels: Labels,
    found: Statistics,
    k: Coefficients,
    entropy: jax.Array | None,
) -> jax.Array:
    """Return the gradient [t, v] of the logits, in their dtype. `found`: top and total over the whole vocabulary."""
    z, slope = transform(rules, logits.astype(wide(logits.dtype)))
    entries = _entries(part, logits, labels.target)
    log_p = z - z_of(rules, found.top)[:, None] - jnp.log(found.total)[:, None]
    p, factor = jnp.exp(log_p), k.a[:, None]
    if k.d is not None and entropy is not None:
        factor = factor - k.d[:, None] * jnp.where(p > 0, log_p + entropy[:, None], 0)
    dz = p * factor - jnp.where(labels.target[:, None] == entries, k.b[:, None], 0)
    if k.c is not None:
        omega = _omega(rules, part, entries, z.dtype)
        dz -= k.c[:, None] if omega is None else k.c[:, None] * omega
    return _or(entries < rules.vocab if rules.padded else None, dz * slope, 0).astype(logits.dtype)


def operand_gradients(x: jax.Array, dlogits: jax.Array, part: Part, wanted: tuple[str, ...]) -> dict[str, jax.Array]:
    """Return the share of one shard and one part in the gradients of x, weight and bias, in the wide dtype."""
    acc, out = wide(x.dtype), {}
    if "x" in wanted and part.weight is not None:
        out["x"] = product(dlogits, part.weight, (1, 1), acc)
    if "weight" in wanted:
        out["weight"] = without_columns(product_of_rows(x, dlogits, acc), part.entries)
    if "bias" in wanted:
        out["bias"] = without_columns(jnp.sum(dlogits, axis=0, dtype=acc), part.entries)
    return out


def with_columns(a: jax.Array, columns: int) -> jax.Array:
    """Return a [..., v] with zeros behind its columns, so that there are `columns`."""
    behind = columns - a.shape[-1]
    return jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, behind)]) if behind else a


def without_columns(a: jax.Array, columns: int | None) -> jax.Array:
    """Return a [..., v] without what is behind its first `columns`; None: as it is."""
    return a if columns is None or columns == a.shape[-1] else a[..., :columns]


def _entries(part: Part, logits: jax.Array, target: jax.Array) -> jax.Array:
    """Return [1, v]: which entry of the vocabulary a column is."""
    return (jnp.asarray(part.start, target.dtype) + jnp.arange(logits.shape[1], dtype=target.dtype))[None, :]


def _or(real: jax.Array | None, a: jax.Array, padding: float) -> jax.Array:
    """a, with `padding` where an entry is not real."""
    return a if real is None else jnp.where(real, a, padding)


def _pick(logits: jax.Array, column: jax.Array) -> jax.Array:
    """Return the logit [t] of each token's column in the wide dtype, 0 where there is no such column."""
    here = (column >= 0) & (column < logits.shape[1])
    inside = vary_over(jnp.where(here, column, 0), varying(logits))
    picked = jnp.take_along_axis(vary_over(logits, varying(column)), inside[:, None], axis=1)[:, 0]
    return jnp.where(here, picked.astype(wide(logits.dtype)), 0)


def _omega(rules: Rules, part: Part, entries: jax.Array, dtype: jnp.dtype) -> jax.Array | None:
    """Return [1, v]: the class weights, 0 for padding; None where all are 1."""
    if part.class_weight is not None:  # zero beyond V
        return part.class_weight[None, :]
    return (entries < rules.vocab).astype(dtype) if rules.padded else None
