"""The loss of a causal language model."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.core import Tracer

from shared_specs.config import LossOptions, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.documents import NOTHING_LEFT
from tiled_jax.core.arrays import array
from tiled_jax.core.linear_call import Arrays, Saved, differentiable
from tiled_jax.core.params import as_operands
from tiled_jax.core.products import wide
from tiled_jax.layers.documents import documents_of_restarts, shifted_labels
from tiled_jax.loss.api import tiled_linear_cross_entropy
from tiled_jax.models.config import LlamaConfig
from tiled_jax.tile.loss import tiled_loss_of

_NAME = "next_token_loss"
BATCH = ("input_ids", "labels", "shift_labels", "position_ids", "attention_mask", "segment_ids")
IGNORED = LossOptions().ignore_index


class CausalLM(Protocol):
    """The parts of a `Llama` that the loss asks for."""

    config: LlamaConfig
    plain: bool
    loss_tiling: Tiling | None

    def hidden(
        self,
        tokens: jax.Array,
        position_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array: ...
    def head_weight(self) -> jax.Array: ...
    def logits(self, hidden: jax.Array) -> jax.Array: ...
    def reason_not_plain_head(self) -> str | None: ...
    def of_head(self) -> Any: ...


class Tokens(NamedTuple):
    """A batch: what goes in and what is to be predicted, [batch, tokens] each, and what a mapping has beside them or None."""

    inputs: jax.Array
    targets: jax.Array
    position_ids: jax.Array | None = None
    attention_mask: jax.Array | None = None
    segment_ids: jax.Array | None = None


def next_token_loss(model: CausalLM, batch: Any) -> jax.Array:
    """Mean cross-entropy of the next token, in nats, float32.

    Args:
        model: its `loss_tiling` says how the tokens of the loss are cut; with plain=True they are not.
        batch: [batch, tokens + 1] int32; the first `tokens` of a row go in, the last `tokens` are to be predicted. Rows
            that are shorter end in -100, which nothing predicts and the mean does not count. Or a mapping of arrays [batch,
            tokens], as Hugging Face names them: "input_ids"; "labels", which are shifted here, or "shift_labels", which are
            already, -100 where nothing is to be predicted; and what a call of the model takes: "attention_mask", 0 for padding,
            and, where several documents are packed into one sequence, "position_ids" that restart, or "segment_ids": each
            attends to itself alone, and its last token predicts nothing. For the loss positions restart where one is not larger
            than the one before it; steps of more than one take no label away.
    Returns:
        A float32 scalar (float64 of a float64 model); where there is nothing to predict 0, of a plain model NaN.
    Numerics: logits and their gradient have the compute dtype; everything between is float32.
    Memory: the logits of one shard of tokens; plain: one array [batch * tokens, vocab_size], which in backward becomes
        its own gradient.
    Raises:
        SpecError: a mapping without the arrays that are needed, with others, or of other shapes. TypeError: no arrays.
    """
    hidden, targets = _hidden_and_targets(model, batch)
    if model.plain:
        return _mean_cross_entropy(model.logits(hidden), targets)
    return _tiled(model, hidden, targets, LossOptions())


def summed_next_token_loss(model: CausalLM, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Return the sum of what `next_token_loss` is the mean of, and how many tokens are to be predicted.

    In this form it is a loss_fn of `parallelize` for any model, whose parts of a batch have different numbers of them.
    """
    hidden, targets = _hidden_and_targets(model, batch)
    valid = targets != IGNORED
    if not model.plain:
        return _tiled(model, hidden, targets, LossOptions(reduction="sum")), jnp.sum(valid)
    return _summed(model.logits(hidden), targets), jnp.sum(valid)


def _hidden_and_targets(model: CausalLM, batch: Any) -> tuple[jax.Array, jax.Array]:
    tokens = inputs_and_targets(batch)
    hidden = model.hidden(tokens.inputs, tokens.position_ids, tokens.attention_mask, tokens.segment_ids)
    return hidden, tokens.targets.reshape(-1)


def _tiled(model: CausalLM, hidden: jax.Array, targets: jax.Array, loss: LossOptions) -> jax.Array:
    reason = model.reason_not_plain_head()
    if reason is None:
        loss = replace(loss, logit_softcap=model.config.logit_softcap)
        weight = as_operands({"weight": model.head_weight()}, hidden.dtype)["weight"]
        return tiled_linear_cross_entropy(hidden, weight, targets, loss=loss, tiling=model.loss_tiling)
    name = type(model).__name__
    warnings.warn(
        f"{name}: its loss does not run through tiled_linear_cross_entropy: {reason}. tiled_loss calls it for every shard.",
        stacklevel=4,
    )
    tiling = model.loss_tiling or Tiling()
    tiling = Tiling(num_shards=tiling.num_shards, shard_tokens=tiling.shard_tokens, token_axes=tiling.token_axes)

    def summed(rows: jax.Array, targets: jax.Array, model: Any) -> jax.Array:
        return _summed(model.logits(rows), targets)

    counted = targets != IGNORED
    total = tiled_loss_of(summed, hidden, targets, model.of_head(), tiling=tiling, counted=counted)
    count = jnp.maximum(jnp.sum(counted), 1)  # nothing to predict has no loss
    return total if loss.reduction == "sum" else total / count.astype(total.dtype)


def _summed(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the sum of the cross entropies of the targets that are not ignored, in float32 (float64)."""
    logits, valid = logits.astype(wide(logits.dtype)), targets != IGNORED
    of_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - of_target
    return jnp.sum(jnp.where(valid, nll, jnp.zeros_like(nll)))


def checked_tokens(function: str, name: str, value: Any, at_least: int = 1) -> jax.Array:
    """Return tokens [sequences, tokens], as an array of integers that is not empty.

    Raises:
        TypeError: they are no array of integers. SpecError: they have another shape, or fewer than `at_least` tokens.
        UnsupportedError: Explicit axes of a mesh cut them.
    """
    tokens = array(function, name, value)
    if jnp.issubdtype(tokens.dtype, jnp.integer) and tokens.dtype not in (jnp.int32, jnp.int64):
        tokens = tokens.astype(jnp.int32)  # in an unsigned one -100 would be an entry
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        fail_type(function, name, "an array of integers", tokens.dtype.name)
    if tokens.ndim != 2 or not tokens.shape[0] or tokens.shape[1] < at_least:
        rule = (
            "[sequences, tokens + 1], at least one of each"
            if at_least > 1
            else "[sequences, tokens], at least one of each"
        )
        fail(function, name, rule, show_shape(tuple(tokens.shape)))
    refuse_cut_by_types(tokens)
    return tokens


def refuse_cut_by_types(tokens: Any) -> None:
    """Refuse tokens that Explicit axes of a mesh cut: attention and the embedding are left to XLA, which does not cut those.

    Raises:
        UnsupportedError: they are.
    """
    sharding = getattr(jax.typeof(tokens), "sharding", None) if isinstance(tokens, jax.Array) else None
    if sharding is not None and any(axes is not None for axes in sharding.spec):
        advice = "Call it under parallelize, or inside jax.shard_map."
        rule = "of axis type Auto where they cut the tokens"
        raise UnsupportedError(error_text("Llama", "the axes of the mesh", rule, "Explicit", advice=advice))


def inputs_and_targets(batch: Any) -> Tokens:
    """Return a batch as `next_token_loss` takes it.

    Padding goes in as entry 0: no other position of a causal model sees what stands behind its own.
    """
    if not isinstance(batch, Mapping):
        tokens = checked_tokens(_NAME, "batch", batch, at_least=2)
        return Tokens(_known(tokens[:, :-1]), tokens[:, 1:])
    given = {name: array(_NAME, f"batch[{name!r}]", value) for name, value in batch.items() if value is not None}
    _check(given)
    for name in ("input_ids", "labels", "shift_labels"):
        if name in given:
            given[name] = checked_tokens(_NAME, f"batch[{name!r}]", given[name])
    labels, beside = given.get("labels"), {name: given.get(name) for name in BATCH[3:]}
    documents, positions = beside["segment_ids"], beside["position_ids"]
    if documents is None and positions is not None and beside["attention_mask"] is None:
        documents = documents_of_restarts(positions)
    shifted = given["shift_labels"] if labels is None else shifted_labels(labels, documents, IGNORED)
    if labels is not None and documents is not None:
        _tell_where_nothing_is_left(labels, shifted)
    return Tokens(_known(given["input_ids"]), shifted, **beside)


def _tell_where_nothing_is_left(labels: jax.Array, shifted: jax.Array) -> None:
    """Warn where every label looks across a seam, so that there is no loss; of values that can be read."""
    if isinstance(labels, Tracer) or isinstance(shifted, Tracer):
        return
    if bool(jnp.all(shifted == IGNORED)) and bool(jnp.any(labels[:, 1:] != IGNORED)):
        warnings.warn(f"{_NAME}: the loss is of no label: {NOTHING_LEFT}", UserWarning, stacklevel=4)


def _known(inputs: jax.Array) -> jax.Array:
    return jnp.where(inputs == IGNORED, jnp.zeros_like(inputs), inputs)


def _check(given: Mapping[str, jax.Array]) -> None:
    if "input_ids" not in given or ("labels" in given) == ("shift_labels" in given):
        rule = "a mapping with input_ids, and either labels or shift_labels"
        fail(_NAME, "batch", rule, ", ".join(given) or "nothing")
    for name, value in given.items():
        if name not in BATCH:
            fail(_NAME, "batch", "a mapping of " + ", ".join(BATCH), repr(name))
        shape = given["input_ids"].shape
        if value.ndim != 2 or (value.shape != shape and (name not in BATCH[3:] or value.shape != (1, *shape[1:]))):
            like = show_shape(shape) if len(shape) == 2 else "[batch, tokens]"
            fail(_NAME, f"batch[{name!r}]", f"of shape {like}", show_shape(value.shape))


def _mean_cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logits: [rows, vocab_size]; targets: [rows]."""
    return _of_logits(None, {"logits": logits, "targets": targets})["loss"]


class _MeanRules:
    """Operands "logits" and "targets", result "loss".

    Written out so that XLA makes of the gradient one pass over the logits, in place; of the derivative it makes two arrays.
    """

    @staticmethod
    def forward(call: None, operands: Arrays) -> Arrays:
        return _MeanRules.save(call, operands, ())[0]

    @staticmethod
    def save(call: None, operands: Arrays, wanted: tuple[str, ...]) -> tuple[Arrays, Saved]:
        logits, targets = operands["logits"], operands["targets"]
        valid = targets != IGNORED
        acc = wide(logits.dtype)
        lse = jax.nn.logsumexp(logits.astype(acc), axis=-1)
        of_target = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[:, None], axis=-1)[:, 0].astype(acc)
        loss = jnp.sum(jnp.where(valid, lse - of_target, 0.0)) / valid.sum().astype(acc)
        return {"loss": loss}, Saved({**operands, "lse": lse})

    @staticmethod
    def tangents(call: None, saved: Saved, t: Arrays, results: tuple[str, ...]) -> Arrays:
        slope = _slope(saved.arrays)
        return {"loss": jnp.sum(slope * t["logits"].astype(slope.dtype))}

    @staticmethod
    def gradients(call: None, saved: Saved, g: Arrays, wanted: tuple[str, ...]) -> Arrays:
        return {"logits": (_slope(saved.arrays) * g["loss"]).astype(saved.arrays["logits"].dtype)}


def _slope(saved: Arrays) -> jax.Array:
    """Return the derivative of the loss for every logit."""
    logits, lse, targets = saved["logits"], saved["lse"], saved["targets"]
    probability = jnp.exp(logits.astype(lse.dtype) - lse[:, None])
    is_target = targets[:, None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, :]
    valid = (targets != IGNORED).astype(lse.dtype)
    return (probability - is_target.astype(lse.dtype)) * (valid / valid.sum())[:, None]


_of_logits = differentiable(_MeanRules.forward, _MeanRules)
