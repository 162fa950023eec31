"""`tiled_linear_cross_entropy`: the loss of a language-model head, exact, without its logits: checks, plan, one call."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from shared_specs import config
from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.costs import gathered_plan
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import LossOptions, LossResult, Tiling, TopLogprobs
from shared_specs.core import checks
from shared_specs.errors import fail_type
from shared_specs.loss import checks as loss_checks
from shared_specs.loss import costs as loss_costs
from shared_specs.loss.sequence_costs import compiled_sequence_loss_peak_bytes, plan_sequence_loss
from shared_specs.shards import ShardPlan
from tiled_jax import backends
from tiled_jax.collectives.gathered_tokens import TokenAxis
from tiled_jax.collectives.padding import is_token, without_padding
from tiled_jax.core.arrays import array, operands
from tiled_jax.core.own_tokens import split_of
from tiled_jax.core.products import refuse_exchanged_products, wide
from tiled_jax.core.row_shards import may_stop_early
from tiled_jax.loss.autodiff import COLUMNS, NAME, LossCall, run
from tiled_jax.loss.math import Rules
from tiled_jax.loss.rows import OF_ENTRIES
from tiled_jax.loss.steps import XLA, LossSteps


def tiled_linear_cross_entropy(
    x: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
    token_weight: jax.Array | None = None,
) -> Any:
    """Return the cross entropy of logits x w + b, one shard of tokens at a time, exactly.

    loss = mean or sum over tokens of log Σ exp(z) - z_target, z = x w + b, and what `LossOptions` adds. Logits exist for
    one shard, [t, V], or with `Tiling(vocab_shards=n)` for a part of one, [t, ceil(V / n)]; never [T, V].

    Args:
        x: [T, H], [B, S, H] or any leading dims, float32 | bfloat16 | float16 | float64. What the head sees.
        weight: [H, V], dtype of x; beside a 16-bit x also float32 (a master weight: cast once per call).
        targets: [same leading dims], int32 | int64 | uint16 | uint8. Entries of the vocabulary, or loss.ignore_index.
        bias: [V], as weight.
        loss: see shared_specs.LossOptions. Its class_weight and num_valid may be traced; they get no gradient.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form, with vocab_shards too. keep does not apply.
        backend: "auto" | "xla" | "pallas"; one named explicitly runs or raises. "pallas", which "auto" takes on a Hopper GPU,
            makes loss and gradient of a shard of logits in one kernel, for all but float64.
        token_weight: [same leading dims], floating. It multiplies the loss of each token, with all that `LossOptions` adds to
            it: weighted sums, advantages, masks. It gets no gradient and changes no count. "mean" is the sum of token_weight *
            loss divided by the same number as without it, the number of valid targets. A sum or a mean with it takes 6 THV, as
            without it; one computed from reduction "none" takes 8. A token of weight 0 is still valid.
    Returns:
        The loss, [] or with reduction "none" [same leading dims], float32 (float64 for float64); a `LossResult` where
        loss.outputs names any.
    Numerics: logits and their gradient are rounded to the dtype of x; what lies between and every sum is float32.
        Gradients of the logits are stored before the upstream gradient and 1 / num_valid multiply the products.
    Memory: one shard of logits (shared_specs.loss.costs.compiled_loss_peak_bytes), with "pallas" also a padded copy of a weight
        whose V is no multiple of 128 and, on jax 0.11 inside a `jax.shard_map` with check_vma=True, the gradient of float32
        logits beside them: there no kernel may write over what differs between devices. A memory_budget counts both.
        With reduction "mean" or "sum" and one vocabulary shard the gradients are computed in forward, 6 THV FLOP, and kept;
        else x, the weight and two numbers per token are, and backward computes the logits again, 8 THV. Without gradients
        2 THV.
    Ignored tokens: rows of x whose target is ignore_index are not multiplied. Rows with a label come first, and only as many
        shards of the plan run as they need. Each device runs ceil(valid / t) by its own count, and no host waits for it. A
        `vmap` runs as many as its element with the most labels. If a `shard_map` splits the vocabulary (and with
        sequence_parallel the tokens), devices communicate in every shard. They all run as many shards as the device of the mesh
        with the most labels needs; one reduction of one number per pass finds it. Every shard runs in these cases: "lse",
        "entropy", "prediction" or "top_logprobs" is an output; the call has one shard; a derivative of a derivative is taken
        (forward over reverse and reverse over reverse, whose loops need a known length); a partitioner splits the vocabulary,
        or a `shard_map` leaves axes to XLA, on a mesh that splits the tokens too, or may. In the last case other devices would
        wait for a device that runs fewer shards. See shared_specs.loss.costs.loss_flop(valid=).
    Raises:
        SpecError: shapes, dtypes or devices disagree (of arrays committed to one each, outside `jit`), a number is out of
        its range, or a target is neither an entry nor ignored. Under `jit` a target cannot be read: there its token's
        loss and gradients are NaN. TypeError: a wrong kind of value.
        UnsupportedError: a backend named explicitly that cannot run here.
    Sharding: as in `tiled_mlp`: a mean is over all tokens, of which every device has its own, and inside `jax.shard_map`
        each device's own (divide by a global count with num_valid). A sharded vocabulary is that of
        `vocab_parallel_linear_cross_entropy`.
    Derivatives: of forward and reverse mode, and of each other.
    Source: derived in shared_specs/README.md.
    Example:
        >>> x, weight, targets = jnp.ones((2, 5, 8)), jnp.zeros((8, 4)), jnp.zeros((2, 5), jnp.int32)
        >>> print(f"{tiled_linear_cross_entropy(x, weight, targets, num_shards=3):.3f}")
        1.386
        >>> result = tiled_linear_cross_entropy(x, weight, targets, loss=LossOptions(outputs=("log_probs",)))
        >>> result.log_probs.shape
        (2, 5)
    """
    return linear_cross_entropy(
        NAME, x, weight, targets, bias, loss, num_shards, tiling, backend, token_weight=token_weight
    )


def linear_cross_entropy(
    function: str,
    x: Any,
    weight: Any,
    targets: Any,
    bias: Any,
    loss: LossOptions,
    num_shards: int | None,
    tiling: Tiling | None,
    backend: str,
    *,
    axis: str | None = None,
    vocab: int | None = None,
    sequence_parallel: bool = False,
    split_sizes: Any = None,
    token_weight: Any = None,
) -> Any:
    """Return one checked call. `axis`: the mesh axis over which a vocabulary of `vocab` entries is split, and with
    sequence_parallel the tokens, of which every device has `split_sizes`."""
    refuse_exchanged_products(function, {"weight": weight})
    given, x = targets, array(function, "x", x)
    w = {"weight": array(function, "weight", weight)} | (
        {} if bias is None else {"bias": array(function, "bias", bias)}
    )
    targets = as_labels(array(function, "targets", targets))
    options = checks.resolve_tiling(
        function, num_shards, 0.0, tiling, x=x.shape, unused=("keep", "deterministic"), token_axes=axis is None
    )
    loss_checks.check_loss_options(function, loss)
    fixed = {"targets": targets} | _arrays(function, loss)
    fixed |= {} if token_weight is None else {"token_weight": array(function, "token_weight", token_weight)}
    steps = choose_steps(function, backend, x.dtype)
    seen = operands({"x": x, **w, **fixed})
    loss_checks.check_linear_cross_entropy(
        function,
        x=seen["x"],
        weight=seen["weight"],
        targets=seen["targets"],
        bias=seen.get("bias"),
        class_weight=seen.get("class_weight"),
        num_valid=seen.get("num_valid"),
        token_weight=seen.get("token_weight"),
        names=config.JAX,
        vocab=vocab,
        top_k=loss.top_k,
        master_weights=True,
    )
    local = w["weight"].shape[1]
    entries = local if vocab is None else vocab
    check_targets(function, given if isinstance(given, np.ndarray) else targets, entries, loss.ignore_index)
    rows = checks.flat_tokens(x.shape)
    ranks = 1 if axis is None else jax.lax.axis_size(axis)
    sizes = sequence_tokens(
        function, sequence_parallel, split_sizes, tokens=rows, ranks=ranks, rank=None, x=tuple(x.shape)
    )
    indices = () if axis is None else (jax.lax.axis_index(axis),)
    in_place = steps.in_place(x, *w.values(), *fixed.values(), *indices)
    shape = loss_costs.LossShape.of(
        loss,
        tokens=rows,
        hidden=x.shape[-1],
        vocab=local,
        vocab_shards=options.vocab_shards or 1,
        itemsize=x.dtype.itemsize,
        weight_itemsize=w["weight"].dtype.itemsize,
    )
    replan = _MakeLossPlan(function, shape, options, steps, in_place, backends.device_kind())
    plan = replan(rows, local) if sizes is None else replan.gathered(rows, ranks)
    columns = [(a, COLUMNS[name]) for name, a in w.items()]
    of_rows = [targets] if axis is None else []
    split = split_of(function, x, [*w.values(), *of_rows], columns, options.token_axes)
    if loss.num_valid is not None:
        fixed["num_valid"] = jnp.asarray(fixed.get("num_valid", loss.num_valid), wide(x.dtype))
    call = LossCall(
        plan=plan,
        parts=ShardPlan(local, -(-local // (options.vocab_shards or 1))),
        rules=Rules(
            options=replace(loss, class_weight=None, num_valid=None),
            vocab=entries,
            dtype=str(x.dtype),
            padded=ranks * local > entries,
        ),
        steps=steps,
        axis=axis,
        tokens=None if sizes is None or axis is None else TokenAxis.of(axis, plan.shard_tokens),
        split=split,
        replan=None if split is None else replan,
        valid_first=len(plan) > 1 and may_stop_early(loss.outputs, targets, axis, split),
    )
    if split is not None:
        return _result(run(call, x, w, fixed), loss, targets.shape)
    x = x.reshape(rows, x.shape[-1])
    fixed |= {name: fixed[name].reshape(rows) for name in ("targets", "token_weight") if name in fixed}
    if sizes is None or axis is None:
        return _result(run(call, x, w, fixed), loss, targets.shape)
    tokens = is_token(sizes, rows, axis)
    fixed["targets"] = without_padding(fixed["targets"], tokens, loss.ignore_index)
    if "token_weight" in fixed:
        fixed["token_weight"] = without_padding(fixed["token_weight"], tokens)
    found = run(call, without_padding(x, tokens), w, fixed)
    found = {name: without_padding(a, tokens) if a.ndim else a for name, a in found.items()}
    return _result(found, loss, targets.shape)


def as_labels(targets: jax.Array) -> jax.Array:
    """Return targets of one or two bytes, in which token files are kept, as int32; any others as they are."""
    return targets.astype(jnp.int32) if targets.dtype in (jnp.uint8, jnp.uint16) else targets


def check_targets(function: str, targets: Any, vocab: int, ignore_index: int) -> None:
    """Raise SpecError for the first target out of range, where the values can be read (a NumPy array's before they wrap)."""
    if isinstance(targets, Tracer) or not getattr(targets, "is_fully_addressable", True):
        return
    values = np.asarray(targets)
    wrong = (values != ignore_index) & ((values < 0) | (values >= vocab))
    if wrong.any():
        loss_checks.fail_target(function, int(values[wrong][0]), vocab, ignore_index)


def _arrays(function: str, loss: LossOptions) -> dict[str, jax.Array]:
    """Return the arrays among the options."""
    found = (
        {} if loss.class_weight is None else {"class_weight": array(function, "loss.class_weight", loss.class_weight)}
    )
    count = loss.num_valid
    if count is None or isinstance(count, int | float):
        return found
    if not isinstance(count, jax.Array | np.ndarray | np.generic):
        fail_type(function, "loss.num_valid", "a number or a 0-d array", type(count).__name__)
    return found | {"num_valid": jnp.asarray(count)}


@dataclass(frozen=True)
class _MakeLossPlan:
    """The plan of so many tokens, and of so many entries of the weight, of one call. Static.

    in_place: whether dlogits are written over the logits.
    """

    function: str
    shape: loss_costs.LossShape
    options: Tiling
    steps: LossSteps
    in_place: bool
    device: str

    def __call__(self, tokens: int, entries: int) -> ShardPlan:
        def peak(shape: loss_costs.LossShape, plan: ShardPlan) -> int:
            found = loss_costs.compiled_loss_peak_bytes(shape, plan, device=self.device)
            return found + self._beside(shape, entries, plan.longest)

        shape = self._padded(tokens, entries)
        return loss_costs.plan_loss(self.function, shape, **self.options.cut(), device=self.device, peak=peak)

    def gathered(self, tokens: int, ranks: int) -> ShardPlan:
        """Return the plan of a device's own tokens where each of so many devices has as many, and shards are gathered."""
        entries, cut = self.shape.vocab, self.options.cut()
        shape = self._padded(tokens, entries)

        def peak(shape: loss_costs.LossShape, plan: SequencePlan) -> int:
            found = compiled_sequence_loss_peak_bytes(shape, plan, device=self.device)
            return found + self._beside(shape, entries, gathered_plan(plan).longest)

        plan = plan_sequence_loss(self.function, shape, (tokens,) * ranks, **cut, device=self.device, peak=peak)
        return ShardPlan(tokens, plan.shard_tokens)

    def _padded(self, tokens: int, entries: int) -> loss_costs.LossShape:
        """Return the shape with the padding behind every part of the vocabulary."""
        parts = self.shape.vocab_shards
        longest = -(-entries // parts)
        return replace(self.shape, tokens=tokens, vocab=entries + parts * (self.steps.columns(longest) - longest))

    def _beside(self, shape: loss_costs.LossShape, entries: int, shard: int) -> int:
        """Return bytes that the formulas do not count, for shards of so many tokens."""
        # Parts of the vocabulary are copies anyway, and so is a weight in another dtype.
        padded = shape.vocab > entries and shape.vocab_shards == 1 and not shape.cast_bytes
        # The formulas count 16-bit dlogits beside the logits, wider ones in their place.
        copied = not self.in_place and shape.itemsize >= 4
        return (shape.hidden * shape.vocab * padded + shard * shape.vocab_shard * copied) * shape.itemsize


def _result(found: dict[str, jax.Array], loss: LossOptions, lead: tuple[int, ...]) -> Any:
    shaped: dict[str, Any] = {}
    for name, value in found.items():
        more = value.shape[-1:] if name in OF_ENTRIES else ()
        shaped[name] = value.reshape(*lead, *more) if value.ndim else value
    if "top_logprobs" in shaped:
        shaped["top_logprobs"] = TopLogprobs(shaped["top_logprobs"], shaped.pop("top_indices"))
    return LossResult(**shaped) if loss.outputs else shaped["loss"]


def choose_steps(function: str, backend: str, dtype: Any) -> LossSteps:
    """Return the steps for `backend` and logits of this dtype; UnsupportedError for a backend named that cannot run them."""

    def no_kernel() -> str | None:
        from tiled_jax.loss.kernels.cross_entropy import logits_reason

        return logits_reason(jnp.dtype(dtype))

    if backends.choose(function, backend, no_kernel=no_kernel) == "xla":
        return XLA
    from tiled_jax.loss.steps_kernels import KernelLossSteps  # where no kernel runs, Mosaic is not loaded

    return KernelLossSteps(interpret=backends.interpreting())
