"""Cross entropy over a vocabulary that is split over ranks: of given logits, and fused with the tiled head.

Two reductions of a few numbers per token: the maximum, then the sums relative to it. The loops are those of
`loss/loops.py`; every rank of the group makes the same calls, since shards follow from T alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.partitions import VocabPartition, vocab_partition
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import LossOptions, LossResult, Tiling
from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from shared_specs.loss import checks as loss_checks
from tiled_torch import backends
from tiled_torch.collectives import transport
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.autocast import operand
from tiled_torch.core.operands import has_values
from tiled_torch.core.replay import refuse_transforms
from tiled_torch.core.tangents import refuse_tangents
from tiled_torch.core.tensors import is_dtensor, refuse_dtensor, refuse_second_order, wide_dtype
from tiled_torch.loss import math as loss_math
from tiled_torch.loss.api import Given
from tiled_torch.loss.math import Coefficients, Labels, Part, Rules
from tiled_torch.loss.split_tokens import SplitSequence
from tiled_torch.loss.steps import EAGER

_ENTRIES = "the number of entries, without vocab_size,"
_LOGITS, _HEAD = "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"


class Group:
    """One process group as the loops see it: reductions in place."""

    def __init__(self, over: RankGroup) -> None:
        self.over = over

    @property
    def size(self) -> int:
        return self.over.size

    def maximum_(self, a: Tensor) -> Tensor:
        return self._reduce(a, torch.distributed.ReduceOp.MAX)

    def sum_(self, a: Tensor) -> Tensor:
        return self._reduce(a, torch.distributed.ReduceOp.SUM)

    def gather(self, a: Tensor) -> Tensor:
        return transport.all_gather(self.over, a[None], 0).wait()

    def _reduce(self, a: Tensor, op: Any) -> Tensor:
        return transport.all_reduce_(self.over, a, op).wait()


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    loss: LossOptions = LossOptions(),
    num_shards: int | None = None,
    tiling: Tiling | None = None,
    backend: str = "auto",
    vocab_size: int | None = None,
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    group: Any = None,
    token_weight: Tensor | None = None,
) -> Tensor | LossResult:
    """`tiled_linear_cross_entropy` with the head split over the ranks of a group by vocabulary.

    No rank ever holds [T, V / R] logits: one shard of tokens exists at a time, [t, V / R]. Results are the same on every rank.
    dx is complete on every rank; dweight and dbias are those of the rank's own entries. With sequence_parallel no rank ever
    holds [T, H] either. A shard of t tokens of each rank, [R t, H], is gathered while the previous shard is computed. Its dx is
    reduced and scattered while the next shard is computed.

    Args:
        x, targets: the same on every rank of the group; with sequence_parallel this rank's own tokens, [T / R, H] and
            [T / R].
        weight: this rank's rows [V / R, H], or the whole head as a DTensor that one mesh dim shards by rows (group and
            vocab_size are then its own). bias: this rank's [V / R], or a DTensor split alike.
        loss: class_weight is whole, [V]; num_valid is of all tokens. outputs as in `tiled_linear_cross_entropy`, complete on
            every rank; with sequence_parallel scalars are of all tokens, results per token of the rank's own.
        vocab_size: V, where ranks do not all hold V / R entries: partitions are those of
            `shared_specs.collectives.partitions.vocab_range`, or equal with padding at the end, which gets no gradient.
        sequence_parallel: tokens are split over the ranks as well; num_shards and tiling are of the local tokens then,
            t = shard_tokens, and the same on every rank.
        split_sizes: the number of local tokens (leading dims flattened) of every rank; None where all hold as many.
        group: a torch.distributed process group, or a DeviceMesh of one dim; None is the default group.
        token_weight: as targets are, the same on every rank or, with sequence_parallel, of this rank's own tokens.
        the rest: as in `tiled_linear_cross_entropy`.
    Numerics: as `tiled_linear_cross_entropy`, sums over ranks included. Partial dx are rounded to the dtype of x; their sum
        over ranks is a float32 one, rounded once. dweight and dbias are added to the main_grad of weight and bias where these
        (DTensors, padded ones) have one.
    Cost: as `tiled_linear_cross_entropy`. With sequence_parallel every rank takes out its own rows that count, and all run as
        many shards as the one with most of them needs: R times its rows are multiplied. All labels are gathered anyway,
        so no collective is added.
    Memory: as `tiled_linear_cross_entropy` with V / R; 16-bit dx of more than two ranks take as much again while they are
        summed (`transport`). With sequence_parallel peak `sequence_costs.sequence_loss_peak_bytes`:
        one shard of logits [R t, V / R], two gathered shards of x, 2 R t H elements, and the partial dx of one; some numbers
        per token of all ranks.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_linear_cross_entropy`; SpecError where the partition does not
            fit vocab_size, or split_sizes are not of the group or not of x; UnsupportedError without an initialised process
            group. SpecError on every rank where ranks say different things of one call (entries without vocab_size, tokens,
            shards, options), found before the first such call of a group sends anything else. RuntimeError that names rank
            and collective where another rank never makes the call.
    Source: derived in shared_specs/README.md; the two reductions: Megatron-LM, arXiv 1909.08053.
    """
    for name, tensor in (("x", x), ("targets", targets), ("token_weight", token_weight)):
        refuse_dtensor(_HEAD, name, tensor, "Convert it with to_local() or full_tensor().")
    split_by_mesh, owners = is_dtensor(weight), (weight, bias)
    if split_by_mesh:
        whole: Any = weight
        weight, group, part = _local(_HEAD, "weight", whole, 0, vocab_size, group)
        if bias is not None:
            if not is_dtensor(bias) or (bias.placements, bias.device_mesh) != (whole.placements, whole.device_mesh):
                fail(_HEAD, "bias", "a DTensor split as weight is", type(bias).__name__)
            bias = bias.to_local()
    else:
        part = None
    over = rank_group(_HEAD, group)
    given = Given(_HEAD, x, weight, targets, bias, loss, token_weight)
    if isinstance(weight, Tensor) and weight.dim() == 2 and part is None:
        part = _partition(over, vocab_size, weight.shape[0])
    entries = None if part is None else max(weight.shape[0], -(-part.vocab // over.size))  # the same on every rank
    tokens = _tokens(over, x, sequence_parallel, split_sizes)
    vocab = 0 if part is None else part.vocab
    plan, vocab_shards, chosen = given.check(num_shards, tiling, backend, vocab, entries, tokens)
    assert part is not None
    if part.size < weight.shape[0]:
        given = given._replace(weight=weight[: part.size], bias=None if bias is None else bias[: part.size])
    alike = weight.shape[0] if vocab_size is None and not split_by_mesh else None
    call = (plan, vocab_shards, part.vocab, part.start, Group(over))
    return _run_alike(given, call, {_ENTRIES: alike, "sequence_parallel": sequence_parallel}, owners, chosen)


@not_compiled
def _run_alike(given: Given, call: Any, alike: dict[str, Any], owners: Any, backend: str) -> Tensor | LossResult:
    """Run a call that all ranks make alike."""
    refuse_transforms(given.function, "the untiled loss")  # before the ranks say anything to each other
    refuse_tangents(given.function, "the untiled loss", (given.x, given.weight, given.bias))
    plan, vocab_shards, vocab, _, ranks = call
    wanted, operands = torch.is_grad_enabled(), (given.x, given.weight, given.bias)
    alike |= {
        "vocab_size": vocab,
        "the tokens of x": plan.tokens,
        "shard_tokens": plan.shard_tokens,
        "vocab_shards": vocab_shards,
        "loss": replace(given.loss, class_weight=None, num_valid=None),
        "dtypes": (given.x.dtype, given.weight.dtype),
        "whether there is a token_weight": given.token_weight is not None,
        "x.requires_grad": wanted and given.x.requires_grad,
        "any requires_grad": wanted and any(a is not None and a.requires_grad for a in operands),
    }
    agree(ranks.over, given.x.device, alike)
    split = SplitSequence(ranks.over, plan) if isinstance(plan, SequencePlan) else None
    return given.run(*call, split=split, owners=owners, backend=backend)


def _tokens(over: RankGroup, x: Any, sequence_parallel: Any, split_sizes: Any) -> tuple[int, ...] | None:
    """Return the number of local tokens of every rank; None where x is whole, or so wrong that `Given.check` refuses it."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    flat, shape = checks.flat_tokens(x.shape), tuple(x.shape)
    ranks = {"tokens": flat, "ranks": over.size, "rank": over.rank}
    tokens = sequence_tokens(over.function, sequence_parallel, split_sizes, x=shape, **ranks)
    return tokens if over.several else None


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    *,
    vocab_size: int | None = None,
    group: Any = None,
) -> Tensor:
    """Return the cross entropy of each token, from logits whose vocabulary is split over the ranks of a group.

    Args:
        vocab_parallel_logits: [*tokens, V / R], this rank's entries, of any float dtype, or all of them as a DTensor
            that one mesh dim shards by its last dim (group and vocab_size are then its own); left as they are.
        target: [*tokens], the same on every rank; -100 where there is none.
        label_smoothing: ε in [0, 1], as in torch.nn.functional.cross_entropy: the target gets 1 - ε + ε / V, every other entry
            ε / V. Megatron-LM's function of this name gives the target 1 - ε and every other entry ε / (V - 1): for its ε pass
            ε V / (V - 1). (It takes the V / R entries of a rank for V there, each rank its own, so that its losses differ from
            rank to rank where R > 1.)
        vocab_size, group: as in `vocab_parallel_linear_cross_entropy`.
    Returns:
        [*tokens], float32 (float64 for float64), the same on every rank; 0 where target is -100.
    Memory: the gradient of the logits, and a few rows of them in float32.
    Raises:
        SpecError: shapes or dtypes disagree; on a CPU, a target outside [0, V) (on other devices its loss is NaN).
        TypeError, UnsupportedError: as `vocab_parallel_linear_cross_entropy`.
    Source: derived in shared_specs/README.md; named and called as Megatron-LM's (arXiv 1909.08053), whose smoothing differs.
    """
    for name, tensor in (("vocab_parallel_logits", vocab_parallel_logits), ("target", target)):
        if not isinstance(tensor, Tensor):
            fail_type(_LOGITS, name, "an array", type(tensor).__name__)
    options = LossOptions(label_smoothing=label_smoothing, reduction="none")
    loss_checks.check_loss_options(_LOGITS, options)
    split_by_mesh = is_dtensor(vocab_parallel_logits)
    if split_by_mesh:
        last = vocab_parallel_logits.dim() - 1
        logits, group, part = _local(_LOGITS, "vocab_parallel_logits", vocab_parallel_logits, last, vocab_size, group)
    else:
        logits, part = vocab_parallel_logits, None
    over = rank_group(_LOGITS, group)
    loss_checks.check_vocab_parallel_logits(_LOGITS, *(operand(a, None) for a in (logits, target)))
    if part is None:
        part = _partition(over, vocab_size, logits.shape[-1])
    if target.device.type == "cpu" and has_values(target):
        missing = loss_math.first_missing_target(target, part.vocab, options.ignore_index)
        if missing is not None:
            loss_checks.fail_target(_LOGITS, missing, part.vocab, options.ignore_index)
    backends.record_run(_LOGITS, "eager")
    said = {
        _ENTRIES: logits.shape[-1] if vocab_size is None and not split_by_mesh else None,
        "vocab_size": part.vocab,
        "the tokens of target": target.numel(),
        "dtype": logits.dtype,
        "label_smoothing": label_smoothing,
    }
    agree(over, logits.device, said)
    return _OfLogits.apply(logits, target, options, part, Group(over))[0]


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, target: Tensor, options: LossOptions, part: VocabPartition, ranks: Group) -> Any:
        rules, rows, labels, own = _given(logits, target, options, part)
        if not rows.shape[0]:
            empty = logits.new_zeros(target.shape, dtype=wide_dtype(logits.dtype))
            return empty, empty.clone()
        local = EAGER.statistics(rules, rows, own, labels, keep=True)
        top = ranks.maximum_(local.top.clone())
        found = local.above(top, list(ranks.sum_(torch.stack(local.below(top)))))
        return loss_math.token_losses(rules, labels, found).view(target.shape), found.lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        logits, target, options, part, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, target, output[1])  # the gradient is exp(logits - lse), minus 1 at the target
        ctx.options, ctx.part = options, part

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        refuse_second_order(_LOGITS)
        options, part = ctx.options, ctx.part
        dlogits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        rules, rows, labels, own = _given(dlogits, target, options, part)
        given = logits.reshape(target.numel(), logits.shape[-1])[:, : part.size]
        k = loss_math.loss_coefficients(rules, labels, lse)
        upstream = dloss.reshape(-1).to(lse.dtype)
        k = Coefficients(*(None if a is None else torch.where(labels.counted == 0, 0.0, a * upstream) for a in k))  # type: ignore[arg-type]
        rows.copy_(given)
        EAGER.gradient_(rules, rows, own, labels, lse, k, None)
        return dlogits, None, None, None, None


def _given(
    logits: Tensor, target: Tensor, options: LossOptions, part: VocabPartition
) -> tuple[Rules, Tensor, Labels, Part]:
    """Return what the steps take of given logits: rules, rows without padding, labels, and this rank's entries."""
    rules, rows = Rules(options, part.vocab), logits.reshape(target.numel(), logits.shape[-1])[:, : part.size]
    labels = loss_math.make_labels(rules, target.reshape(-1), None, wide_dtype(logits.dtype))
    return rules, rows, labels, Part(part.start, part.start + part.size)


def _partition(over: RankGroup, vocab_size: int | None, local: int) -> VocabPartition:
    checks.check_count(over.function, "vocab_size", vocab_size)
    return vocab_partition(over.function, vocab_size, local, over.size, over.rank)


def _local(
    function: str, name: str, whole: Any, dim: int, vocab_size: int | None, group: Any
) -> tuple[Tensor, Any, VocabPartition]:
    """This rank's part of a DTensor that is split along the vocabulary, `dim`: it, the group, and which entries it has."""
    from torch.distributed.tensor import Shard

    mesh, placements = whole.device_mesh, whole.placements
    if mesh.ndim != 1 or not isinstance(placements[0], Shard) or placements[0].dim % whole.dim() != dim:
        words = {0: "rows"}.get(dim, "its last dim")
        fail(function, name, f"sharded by {words} over a mesh of one dim", f"{placements} over {mesh.ndim}")
    if group is not None or vocab_size is not None:
        given = "group" if group is not None else "vocab_size"
        fail(function, given, "left out beside a DTensor", group if group is not None else vocab_size)
    local, vocab = whole.to_local(), whole.shape[dim]
    start = min(mesh.get_local_rank() * -(-vocab // mesh.size()), vocab)  # full chunks first, then less
    return local, mesh.get_group(), VocabPartition(start, local.shape[dim], vocab)
