"""`tensor_parallel_mlp`: the tiled MLP with its weights, and where asked for its tokens, split over the ranks of a group.

Loops and derivative are those of `tiled_mlp` (`mlp/loops.py`, `mlp/api.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shared_specs.collectives.agreement import sequence_tokens
from shared_specs.collectives.sequence_plan import SequencePlan
from shared_specs.config import Activation, Tiling
from shared_specs.core import checks
from shared_specs.errors import fail
from shared_specs.mlp.sequence_costs import plan_sequence_mlp
from shared_specs.shards import ShardPlan
from tiled_torch import backends
from tiled_torch.collectives import transport
from tiled_torch.collectives.consistency import agree
from tiled_torch.collectives.gathered_tokens import GatheredRows
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core.gradients import main_grad_of
from tiled_torch.core.replay import refuse_transforms
from tiled_torch.core.row_shards import Rows
from tiled_torch.core.tangents import refuse_tangents
from tiled_torch.core.tensors import is_dtensor, refuse_dtensor, rows_of
from tiled_torch.mlp.api import EAGER_ORDER, checked, plan_for, plan_options, run_checked, shape_of, tiled_mlp
from tiled_torch.mlp.loops import Kept, MLPCall
from tiled_torch.mlp.steps import Weights

_NAME = "tensor_parallel_mlp"
_ORDER = "Sums over ranks are a communication library's, who adds in an order of its own."


def tensor_parallel_mlp(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    biases: Mapping[str, Tensor] | None = None,
    activation: Activation = "silu",
    sequence_parallel: bool = False,
    split_sizes: Sequence[int] | None = None,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
    group: Any = None,
) -> Tensor:
    """`tiled_mlp` with the intermediate features, and with sequence_parallel the tokens, split over the ranks of a group.

    y = sum over ranks of (act(x w_gate^T + b_gate) * (x w_up^T + b_up)) w_down^T, + b_down. No rank ever holds [T, I / R].
    Without sequence_parallel x is whole on every rank, and y and dx are summed once per call. With it, x, y and their gradients
    are the rank's own tokens, and no rank ever holds [T, H]. A shard of t tokens of each rank, [R t, H], is gathered while the
    previous shard is computed. Its partial sums are reduced and scattered while the next shard is computed.

    Args:
        x: [T, H] or any leading dims, the same on every rank; with sequence_parallel this rank's tokens, [T / R, H]. Its
            gradient is complete for these tokens.
        w_gate, w_up: [I / R, H], this rank's rows of the whole weights; w_gate None: a two-matrix MLP. w_down:
            [H_out, I / R], this rank's columns. All of them may instead be DTensors that one mesh dim splits in this way
            (Shard(0), Shard(1)). The group is then that of their mesh, and their gradients are DTensors.
        biases: any of "gate", "up" [I / R] and "down" [H_out], which is the same on every rank and added once.
        activation, backend: as in `tiled_mlp`.
        sequence_parallel: tokens are split over the ranks as well.
        split_sizes: the number of local tokens (leading dims flattened) of every rank; None if all ranks hold the same number.
        num_shards, keep, tiling: as in `tiled_mlp`. With sequence_parallel they apply to the local tokens, t = shard_tokens,
            and must be the same on every rank.
        group: a torch.distributed process group, or a DeviceMesh of one dim; None is the default group. A group of one rank
            is `tiled_mlp`.
    Returns:
        [same leading dims, H_out], dtype of x, or the autocast dtype under autocast; complete for the tokens of x.
    Numerics: as `tiled_mlp` on each rank. Partial sums of y and dx are rounded to the compute dtype. They are summed over
        ranks in float32 and rounded once. Weight and bias gradients are summed over shards in float32 and cast once.
    Memory: as `tiled_mlp` with I / R; 16-bit y and dx of more than two ranks take twice the memory while they are summed
        (`transport`). With sequence_parallel peak `sequence_costs.sequence_peak_bytes`: two gathered shards, 2 R t H elements,
        of x (in backward of x and dy together), and the partial sums of one. Ranks with fewer tokens cost as much as the rank
        with the most, because their part of a gathered shard is padded.
    Raises:
        SpecError, TypeError, UnsupportedError: as `tiled_mlp`; SpecError where split_sizes does not match this group or x;
            UnsupportedError without an initialised process group, or for tiling.deterministic. All of these are raised before
            any communication. SpecError on every rank if ranks disagree about a call (tokens, shards, which gradients they
            need); it is found before the first such call of a group sends anything else. RuntimeError with the rank and the
            collective if another rank never makes the call.
    Source: derived in shared_specs/README.md; the split is Megatron-LM's, arXiv 1909.08053 and 2205.05198.
    Example:
        >>> import torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> x, w_up, w_down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(8, 12)
        >>> tensor_parallel_mlp(x, None, w_up, w_down, sequence_parallel=True, num_shards=2).shape
        torch.Size([5, 8])
        >>> torch.distributed.destroy_process_group()
    """
    refuse_dtensor(
        _NAME, "x", x, "Convert it with to_local(), or redistribute() it to a layout that sequence_parallel has."
    )
    local = _Local.of({"w_gate": w_gate, "w_up": w_up, "w_down": w_down}, biases, group)
    over = rank_group(_NAME, local.group)
    matrices: Any = tuple(local.weights.values())
    found = checked(_NAME, x, matrices, local.biases, activation, num_shards, keep, tiling, backend)
    operands, dtype, tiling, chosen = found
    inexact = _ORDER if over.several else EAGER_ORDER if chosen != "triton" else None
    checks.check_deterministic(_NAME, tiling, inexact)
    flat = checks.flat_tokens(x.shape)
    tokens = sequence_tokens(
        _NAME, sequence_parallel, split_sizes, tokens=flat, ranks=over.size, rank=over.rank, x=tuple(x.shape)
    )
    if not over.several and not local.owners:
        given = {"biases": local.biases, "activation": activation, "tiling": tiling, "backend": backend}
        return tiled_mlp(x, *matrices, **given)  # type: ignore[arg-type]
    plan: ShardPlan | SequencePlan
    if tokens is None:
        plan = plan_for(x, operands, dtype, activation, tiling, backend=chosen, function=_NAME)
    else:
        shape = local.largest(shape_of(x, operands, dtype, activation), over.size)
        plan = plan_sequence_mlp(_NAME, shape, tokens, **plan_options(x, tiling, chosen))
    backends.record_run(_NAME, chosen)
    owners = tuple(local.owners.get(name) for name in _NAMES)
    steps = "deterministic" if tiling.deterministic else chosen
    split = plan if isinstance(plan, SequencePlan) else None
    kept = plan.kept_start(tiling.keep)
    call = _RanksMLPCall(_NAME, dtype, activation, plan.shard_tokens, steps, kept, owners, over=over, split=split)
    return _run_alike(x, operands, call)


_NAMES = ("w_gate", "w_up", "w_down", "biases['gate']", "biases['up']", "biases['down']")  # as in Weights
_SHARDED_DIM = {"w_gate": 0, "w_up": 0, "w_down": 1, "biases['gate']": 0, "biases['up']": 0, "biases['down']": None}


@dataclass(frozen=True)
class _Local:
    """This rank's part of the weights: what was given, or the local tensors of DTensors and the group of their mesh.

    owners: DTensors that want their gradients in a main_grad, by name. intermediate: I, where the DTensors say it.
    """

    weights: Mapping[str, Tensor | None]
    biases: Any
    group: Any
    owners: Mapping[str, Tensor]
    intermediate: int | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor | None], biases: Any, group: Any) -> "_Local":
        of_biases = biases if isinstance(biases, Mapping) else {}
        named: dict[str, Any] = {**weights, **{f"biases[{name!r}]": bias for name, bias in of_biases.items()}}
        named = {name: tensor for name, tensor in named.items() if tensor is not None}
        if not any(map(is_dtensor, named.values())):
            return cls(weights, biases, group, {})
        if group is not None:
            fail(_NAME, "group", "left out beside a DTensor", group)
        mesh = next(tensor.device_mesh for tensor in named.values() if is_dtensor(tensor))
        for name, tensor in named.items():
            _check_placement(name, tensor, mesh)
        return cls(
            {name: named[name].to_local() if name in named else None for name in weights},
            {name: bias if bias is None else bias.to_local() for name, bias in of_biases.items()},
            mesh,
            {name: tensor for name, tensor in named.items() if main_grad_of(tensor) is not None},
            named["w_up"].shape[0] if "w_up" in named else None,  # which is refused with the other wrong operands
        )

    def largest(self, shape: Any, ranks: int) -> Any:
        """Return the shape with the most features that any rank holds, so that all come to the same plan."""
        return shape if self.intermediate is None else replace(shape, intermediate=-(-self.intermediate // ranks))


def _check_placement(name: str, tensor: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard

    if not is_dtensor(tensor):
        fail(_NAME, name, "a DTensor as the other weights are", type(tensor).__name__)
    dim = _SHARDED_DIM.get(name)
    wanted = Replicate() if dim is None else Shard(dim)
    if tensor.device_mesh != mesh or tensor.device_mesh.ndim != 1 or tensor.placements != (wanted,):
        words = "replicated" if dim is None else f"sharded by dim {dim}"
        got = f"{tuple(tensor.placements)} over {tensor.device_mesh}"
        fail(_NAME, name, f"{words} over one mesh of one dim", got)


@dataclass(frozen=True)
class _RanksMLPCall(MLPCall):
    """A call over ranks. split: where the tokens are split over them too; else y and dx are summed once they are written."""

    over: RankGroup = field(kw_only=True)
    split: SequencePlan | None = field(kw_only=True)

    def agree(self, x: Tensor, w: Weights) -> None:
        """Refuse what would leave ranks waiting for each other; without split tokens the shards are each rank's own."""
        split, wanted = self.split, torch.is_grad_enabled()
        said = {
            "sequence_parallel": split is not None,
            "the tokens of x": checks.flat_tokens(x.shape) if split is None else split.tokens,
            "shard_tokens": None if split is None else split.shard_tokens,
            "the first kept token": None if split is None else self.kept_start,
            "the sizes of x and y": (x.shape[-1], w.w_down.shape[0]),
            "dtypes": (x.dtype, self.dtype),
            "x.requires_grad": wanted and x.requires_grad,
            "any requires_grad": wanted and any(a is not None and a.requires_grad for a in (x, *w)),
        }
        agree(self.over, x.device, said)

    def rows(self, x: Tensor) -> Rows:
        return super().rows(x) if self.split is None else GatheredRows(self.over, self.split, rows_of(x))

    def forward(self, x: Tensor, w: Weights, kept: Kept) -> Tensor:
        y = super().forward(x, w._replace(b_down=None), kept)  # a bias is not a partial sum
        with torch.no_grad():
            if self.split is None:
                transport.all_reduce_(self.over, y).wait()
            if w.b_down is not None:
                y += w.b_down.to(y.dtype)
        return y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weights: Weights,
        kept: Kept,
        needs: Sequence[bool],
        main_grads: Sequence[Tensor | None] = (None,) * 6,
    ) -> list[Tensor | None]:
        """Gradients of weights and biases are complete: every rank sees dy of all tokens."""
        dx, *dws = super().backward(dy, x, weights, kept, needs, main_grads)
        if dx is not None and self.split is None:
            transport.all_reduce_(self.over, dx).wait()
        return [dx, *dws]


@not_compiled
def _run_alike(x: Tensor, weights: Weights, call: _RanksMLPCall) -> Tensor:
    """Run a call that all ranks make alike."""
    refuse_transforms(_NAME, "the untiled MLP")  # before the ranks say anything to each other
    refuse_tangents(_NAME, "the untiled MLP", (x, *weights))
    call.agree(x, weights)
    return run_checked(x, weights, call)
