"""Parallel styles that torch.distributed.tensor.parallel lacks: for norms, embeddings, tiled MLPs and tiled losses."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from shared_specs.collectives.partitions import VocabPartition
from shared_specs.collectives.sequence_plan import SequencePlan, plan_sequence
from shared_specs.config import LossOptions
from shared_specs.errors import UnsupportedError, error_text
from shared_specs.layers.block_costs import WIDE
from tiled_torch.collectives.conjugates import Join, SumSplit, move
from tiled_torch.collectives.groups import rank_group
from tiled_torch.core.tensors import device_kind
from tiled_torch.layers.embedding import own_rows
from tiled_torch.loss.module import TiledLinearCrossEntropy
from tiled_torch.loss.ranks import vocab_parallel_linear_cross_entropy
from tiled_torch.mlp.module import TiledMLP
from tiled_torch.mlp.ranks import tensor_parallel_mlp

# The backward of a linear layer views gradients as rows, which uneven parts that were gathered are not.
_EVEN_TOKENS = torch.__version__ < (2, 12)  # pyright: ignore[reportOperatorIssue]


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Replace one parameter of a module by a DTensor; rank 0's values are everybody's."""
    parameter = getattr(module, name)
    if parameter is not None:
        whole = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def whole_gradients(model: nn.Module) -> None:
    """Sum the gradients of replicated parameters over the ranks as they come: each saw its own tokens or heads only."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad and parameter.placements == (Replicate(),):
            parameter.register_hook(_whole)


def _whole(gradient: Tensor) -> Tensor:
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        return gradient.redistribute(placements=[Replicate()] * gradient.device_mesh.ndim)
    return gradient


class Norm(ParallelStyle):
    """Replicated parameters, input split as `layout` says.

    Args:
        layout: of the input: Shard(1) with sequence parallelism, the dim of the heads for a norm of each head.
        result: "split" is a DTensor like the input; "local" this rank's part of it; "whole" a plain tensor with all of it.
    """

    def __init__(self, layout: Placement, result: Literal["split", "local", "whole"] = "split") -> None:
        super().__init__()
        self.layout, self.result = layout, result

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute(module, name, device_mesh, Replicate())
        module.register_forward_pre_hook(partial(self._before, device_mesh))
        module.register_forward_hook(self._after)
        return module

    def _before(self, mesh: DeviceMesh, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x = inputs[0]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [self.layout], run_check=False)
        elif x.placements != (self.layout,):
            x = x.redistribute(placements=[self.layout])
        return (x, *inputs[1:])

    def _after(self, _: nn.Module, __: Any, y: Any) -> Any:
        if self.result == "split":
            return y
        # FSDP2 warns where a module returns a view, which to_local is.
        return y.to_local() if self.result == "local" else gather_whole(y).clone()


class Whole(ParallelStyle):
    """The hidden states that a module is given, its first argument or `hidden_states`, are a DTensor with all tokens.

    Partial sums of their gradient are summed, and scattered where the tokens were split, as soon as the module is through
    with backward, so that those of the stream between modules are complete.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self._before, device_mesh), with_kwargs=True)
        return module

    def _before(self, mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_whole_input(args[0], mesh), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _whole_input(kwargs["hidden_states"], mesh)}


def _whole_input(x: Tensor, mesh: DeviceMesh) -> DTensor:
    if isinstance(x, DTensor) and x.placements != (Replicate(),):
        whole = x.redistribute(placements=[Replicate()])
        if whole.to_local().is_contiguous():
            return whole
        # Uneven tokens leave gaps where their padding was; every layer would close them anew, those of PyTorch 2.11 cannot.
        return whole.clone(memory_format=torch.contiguous_format)  # type: ignore[return-value]
    # Through a plain tensor: the backward of from_local makes its gradient whole.
    return DTensor.from_local(x.to_local() if isinstance(x, DTensor) else x, mesh, [Replicate()], run_check=False)


class HeadStyle(ColwiseParallel):
    """A head split by vocabulary: logits are a DTensor split so, or with `gathered` a plain tensor with all of them."""

    def __init__(self, *, gathered: bool) -> None:
        super().__init__(output_layouts=Replicate() if gathered else Shard(-1), use_local_output=False)
        self.gathered = gathered

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(Whole()._apply(module, device_mesh), device_mesh)
        if self.gathered:
            module.register_forward_hook(lambda _, __, y: gather_whole(y).clone())  # a view otherwise, as above
        return module


def check_embedding(function: str, module: nn.Module) -> None:
    """Check that an embedding has no option that one split by vocabulary cannot have.

    Raises:
        UnsupportedError: it has one.
    """
    for name, default in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        given = getattr(module, name, default)
        if given != default:
            raise UnsupportedError(error_text(function, name, f"{default} where the vocabulary is split", given))


def check_tokens(ids: Sequence[int], layout: Placement, ranks: int) -> None:
    """Check that the ranks can share the tokens evenly, where the backward of PyTorch's own layers needs that.

    Raises:
        UnsupportedError: they cannot.
    """
    if _EVEN_TOKENS and isinstance(layout, Shard) and layout.dim < len(ids) and ids[layout.dim] % ranks:
        rule = f"a multiple of the {ranks} ranks with PyTorch {torch.__version__}"
        advice = "Pad them, update PyTorch (2.13 takes any number), or leave sequence_parallel out."
        raise UnsupportedError(
            error_text("parallelize", "the tokens of a sequence", rule, ids[layout.dim], advice=advice)
        )


class Embedding(ParallelStyle):
    """An `nn.Embedding` split by vocabulary whose result is a DTensor in `layout`; ids are the same on every rank.

    A rank looks up the rows that it holds, and the parts are added; where the layout splits the tokens, of as many tokens at a
    time as a shard has, so that those of all ranks, [T, H], are never there (in compiled code they are). Under torch's
    RowwiseParallel every rank makes and keeps the whole [V, H] gradient, and the layer cannot be compiled: its mask travels in
    a placement.
    """

    def __init__(self, layout: Placement) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        check_embedding("Embedding", module)
        distribute(module, "weight", device_mesh, Shard(0))
        split: Any = module
        split.__class__ = _embedding_class(type(module))  # keeps parameters, hooks and state_dict keys
        split._layout, split._tensor_mesh = self.layout, device_mesh
        return split


class _SplitEmbedding(nn.Embedding):
    """Forward of an embedding whose weight is a DTensor."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        mesh: DeviceMesh = self._tensor_mesh
        check_tokens(ids.shape, self._layout, mesh.size())
        vocab = self.weight.shape[0]
        chunk = -(-vocab // mesh.size())
        start = min(mesh.get_local_rank() * chunk, vocab)
        weight = self.weight.to_local()
        part = VocabPartition(start, weight.shape[0], vocab)
        ids = gather_whole(ids)
        shards = _shards_of_positions(ids, self._layout, mesh.size())
        if len(shards) > 1 and not torch.compiler.is_compiling():  # which plans memory itself
            return self._in_shards(ids, weight, part, shards)
        rows = own_rows("Embedding", ids, weight, part, padding_idx=self.padding_idx)
        whole = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[self._layout])

    def _in_shards(self: Any, ids: Tensor, weight: Tensor, part: VocabPartition, shards: SequencePlan) -> Tensor:
        """Gradients of the shards are added in float32; the last axis of ids is split."""
        dim, over = ids.dim() - 1, rank_group("Embedding", self._tensor_mesh)
        summed = weight.float() if weight.requires_grad and weight.element_size() < WIDE else weight
        starts = [sum(shards.tokens[:rank]) for rank in range(len(shards.tokens))]
        found = []
        for shard in range(len(shards)):
            spans = [(start + shards.span(rank, shard)[0], size) for rank, (start, size) in
                     enumerate(zip(starts, shards.sizes(shard), strict=True))]  # fmt: skip
            own = torch.cat([ids.narrow(dim, start, size) for start, size in spans], dim)
            rows = own_rows("Embedding", own, summed.to(weight.dtype), part, padding_idx=self.padding_idx)
            found.append(move(rows, over, SumSplit(dim, shards.sizes(shard)), Join(dim, shards.sizes(shard))))
        shape = torch.Size((*ids.shape, weight.shape[1]))
        return _of_parts(torch.cat(found, dim), shape, self._tensor_mesh, self._layout)


def _shards_of_positions(ids: Tensor, layout: Placement, ranks: int) -> SequencePlan:
    """Return how the positions of all sequences are cut that the ranks have of [B, S] ids; one shard where they have none."""
    length, batch = ids.shape[-1], ids.shape[:-1].numel()
    if layout != Shard(ids.dim() - 1) or ids.numel() == 0:
        return SequencePlan((length,), max(length, 1))
    positions = _parts_of(length, ranks)
    tokens = tuple(batch * own for own in positions)
    rows = plan_sequence("Embedding", tokens, device=device_kind(ids.device)).shard_tokens
    return SequencePlan(positions, max(1, rows // batch))


@cache
def _embedding_class(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of nn.Embedding may do more to what its base class looks up."""
    bases = (_SplitEmbedding,) if plain is nn.Embedding else (plain, _SplitEmbedding)
    return type(plain.__name__, bases, {"__module__": plain.__module__})


class TiledMLPStyle(ParallelStyle):
    """A `TiledMLP` split by intermediate features; with sequence_parallel x and y are the rank's own tokens.

    A DTensor x, split along its tokens or replicated, gives a DTensor y.
    """

    def __init__(self, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TiledMLP)
        for name, _ in list(module.named_parameters()):
            placement = {"w_down": Shard(1), "b_down": Replicate()}.get(name, Shard(0))
            distribute(module, name, device_mesh, placement)
        split: Any = module
        split.__class__ = _mlp_class(type(module))  # keeps parameters, hooks and state_dict keys
        split._sequence_parallel, split._tensor_mesh = self.sequence_parallel, device_mesh
        return split


class _SplitMLP:
    """Forward of a TiledMLP whose parameters are DTensors."""

    def forward(self: Any, x: Tensor) -> Tensor:
        options = {"activation": self.activation, "tiling": self.tiling, "backend": self.backend}
        weights, biases = self._operands()
        return run_mlp(x, weights, biases, options, self._tensor_mesh, sequence_parallel=self._sequence_parallel)


@cache
def _mlp_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (_SplitMLP, plain), {"__module__": plain.__module__})


def run_mlp(
    x: Tensor,
    weights: Any,
    biases: dict[str, Any],
    options: dict[str, Any],
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool,
) -> Tensor:
    """`tensor_parallel_mlp` of DTensor weights and a plain or DTensor x."""
    present = {name: bias for name, bias in biases.items() if bias is not None}
    call = partial(tensor_parallel_mlp, biases=present, sequence_parallel=sequence_parallel, **options)
    if not isinstance(x, DTensor):
        return call(x, *weights)
    dim = x.dim() - 2
    layout = Shard(dim) if sequence_parallel else Replicate()
    if x.placements != (layout,):
        x = x.redistribute(placements=[layout])
    sizes = local_tokens(x, dim, mesh.size()) if sequence_parallel else None
    y = call(x.to_local(), *weights, split_sizes=sizes)
    shape = torch.Size((*x.shape[:-1], y.shape[-1]))
    return _of_parts(y, shape, mesh, layout)


def _of_parts(own: Tensor, shape: torch.Size, mesh: DeviceMesh, layout: Placement) -> DTensor:
    """Return a contiguous DTensor of parts that may be of unequal sizes."""
    stride = tuple(prod(size or 1 for size in shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(own, mesh, [layout], run_check=False, shape=shape, stride=stride)


def local_tokens(x: Tensor, dim: int, ranks: int) -> tuple[int, ...]:
    """Return tokens (leading dims flattened) of every rank of a DTensor whose `dim` is split."""
    others = x.shape[:-1].numel() // max(x.shape[dim], 1)
    return tuple(others * own for own in _parts_of(x.shape[dim], ranks))


def _parts_of(length: int, ranks: int) -> tuple[int, ...]:
    """Return how many of a dim every rank of a DTensor has: full chunks first, then less."""
    chunk = -(-length // ranks)
    return tuple(max(0, min(length, (rank + 1) * chunk) - rank * chunk) for rank in range(ranks))


class TiledLossStyle(ParallelStyle):
    """A `TiledLinearCrossEntropy` split by vocabulary; x and targets are the same on every rank, or x a DTensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, TiledLinearCrossEntropy)
        for name in ("weight", "bias"):
            distribute(module, name, device_mesh, Shard(0))
        split: Any = module
        split.__class__ = _loss_class(type(module))
        return split


class _SplitLoss:
    """Forward of a TiledLinearCrossEntropy whose parameters are DTensors."""

    def forward(self: Any, x: Tensor, targets: Tensor, *, num_valid: Any = None, token_weight: Any = None) -> Any:
        loss = self.loss if num_valid is None else replace(self.loss, num_valid=num_valid)
        options = {"bias": self.bias, "loss": loss, "tiling": self.tiling, "backend": self.backend}
        return split_loss(x, self.weight, targets, token_weight=token_weight, **options)


@cache
def _loss_class(plain: type[nn.Module]) -> type[nn.Module]:
    return type(plain.__name__, (_SplitLoss, plain), {"__module__": plain.__module__})


def split_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    loss: LossOptions = LossOptions(),
    token_weight: Tensor | None = None,
    **options: Any,
) -> Any:
    """`vocab_parallel_linear_cross_entropy` of a DTensor head and a plain x, or a DTensor x.

    Of an x that is split by tokens one shard at a time is gathered; all of it where a result for every token is asked for.
    targets, token_weight: whole on every rank.
    """
    run = partial(vocab_parallel_linear_cross_entropy, loss=loss, **options)
    dim = x.dim() - 2
    if not isinstance(x, DTensor) or x.placements != (Shard(dim),) or not loss.gradients_in_forward:
        return run(gather_whole(x), weight, targets, token_weight=token_weight)
    ranks, rank = x.device_mesh.size(), x.device_mesh.get_local_rank()
    chunk = -(-x.shape[dim] // ranks)

    def own(a: Tensor) -> Tensor:
        return a.narrow(dim, min(rank * chunk, x.shape[dim]), x.to_local().shape[dim])

    given = {
        "split_sizes": local_tokens(x, dim, ranks),
        "token_weight": None if token_weight is None else own(token_weight),
    }
    return run(x.to_local(), weight, own(targets), sequence_parallel=True, **given)


def gather_whole(x: Tensor) -> Tensor:
    """Return the whole of a DTensor on every rank; its gradient has to be the same on all of them."""
    if not isinstance(x, DTensor):
        return x
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
