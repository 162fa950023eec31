"""DeepSpeed's tiled computations by their own names and arguments, over `tile`: an MLP, a loss, anything along the sequence.

Where DeepSpeed's are autograd functions, these are classes with an `apply`: parameters are inputs of one autograd function
and get their gradient once, so that no flag on them has to say which shard is the last.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import fail, fail_type, fail_with, show_shape
from tiled_torch.compat.shards import check_call, of_rows, tiled
from tiled_torch.core.tensors import wide_dtype

Params = Iterable[Tensor] | None


class TiledMLP:
    """fn(self, x), a shard of tokens at a time: DeepSpeed's `TiledMLP.apply`."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor, shards: int, compute_params: Params = None
    ) -> Tensor:
        """Return fn(self, x), with exact gradients.

        Args:
            fn: of the module and a shard [1, t, H] ([t, H] of a two-dimensional x), token-wise.
            self: the module. x: [B, S, H] or [T, H]. shards: at most this many, of all tokens.
            compute_params: under ZeRO-3 the parameters that are gathered around all shards; None: all of the module's.
        Returns:
            As fn: [B, S, H] or [T, H].
        Numerics, Memory, Raises: as `tiled_torch.tile`.
        Source: named and called as DeepSpeed's (runtime/sequence_parallel/ulysses_sp.py).
        Example:
            >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
            >>> TiledMLP.apply(lambda module, x: module(x), mlp, torch.ones(1, 6, 4), 3, list(mlp.parameters())).shape
            torch.Size([1, 6, 4])
        """
        named = check_call("TiledMLP.apply", fn, self, x, compute_params)
        return tiled("TiledMLP.apply", of_rows(fn, self), (x,), shards, module=self, compute_params=named)


class TiledFusedLogitsLoss:
    """The mean or sum over shards of tokens of a loss: DeepSpeed's `TiledFusedLogitsLoss.apply`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Params,
        output_reduction: str,
    ) -> Tensor:
        """Return the losses of all shards, reduced, with exact gradients.

        Args:
            fn: of self, a shard of x [t, ...], of y [t, ...] and, unless mask is None, of the mask [t]; returns a scalar.
            x: [B, S, ...]. y: [B, S, ...]. mask: [B, S] or None. shards: at most this many, of all B S tokens.
            compute_params: under ZeRO-3 the parameters that are gathered around all shards.
            output_reduction: "mean" or "sum" over shards. A mean weighs every shard alike, also a short one: where shards
                differ, let fn return a sum and divide by the number of tokens.
        Returns:
            A scalar in the dtype that fn returns; added in float32 (float64 for float64).
        Memory: as `tiled_torch.tile`: fn runs again in backward. `tiled_linear_cross_entropy` is the faster way to a cross
            entropy.
        Raises:
            SpecError (a ValueError): shapes that do not agree, another output_reduction. The rest: as `tiled_torch.tile`.
        Source: named and called as DeepSpeed's (runtime/sequence_parallel/ulysses_sp.py).
        """
        name = "TiledFusedLogitsLoss.apply"
        named = check_call(name, fn, self, x, () if compute_params is None else compute_params)
        if output_reduction not in ("mean", "sum"):
            fail(name, "output_reduction", "mean or sum", repr(output_reduction))
        if not isinstance(y, Tensor):
            fail_type(name, "y", "an array", type(y).__name__)
        for argument, tensor in (("x", x), ("y", y)):
            if tensor.dim() < 2:
                fail(name, argument, "[batch, tokens, ...]", show_shape(tuple(tensor.shape)))
        lead = x.shape[:2]
        if y.shape[:2] != lead:
            fail(name, "y", f"{show_shape(tuple(lead))} or more, as x begins", show_shape(tuple(y.shape)))
        if mask is not None and mask.shape != lead:
            fail(name, "mask", show_shape(tuple(lead)), show_shape(tuple(mask.shape)))
        rows = [a.reshape(lead.numel(), *a.shape[2:]) for a in (x, y, mask) if a is not None]
        rest = rows[0].shape[1:]
        rows[0] = rows[0].reshape(lead.numel(), -1)

        def call(x: Tensor, *parts: Tensor) -> Tensor:
            return fn(self, x.reshape(-1, *rest), *parts)

        return _scalars(name, call, rows, shards, self, named, output_reduction)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Params = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Return fn(**kwargs), a shard of the sequence at a time, with exact gradients.

    Args:
        fn: of keyword arguments: shards [B, s, ...] of kwargs_to_shard, and kwargs_to_pass as they are.
        seqlen: S. shards: at most this many, of ceil(S / shards) positions of all rows of the batch.
        kwargs_to_shard: tensors [B, S, ...]. grad_requiring_tensor_key: one of them.
        compute_params: under ZeRO-3 the parameters that are gathered around all shards; None: those of the modules among
            kwargs_to_pass.
        output_unshard_dimension: 1 where fn returns [B, s, ...], 0 where it returns a scalar of each shard.
        output_reduction: None, "mean" or "sum" of the joined result: [B, S, ...], or [shards].
    Returns:
        What that makes. Every tensor that requires grad gets its gradient.
    Numerics, Memory: as `tiled_torch.tile`; arguments of a batch of several rows are copied.
    Raises:
        SpecError (a ValueError), TypeError: arguments that do not fit. The rest: as `tiled_torch.tile`.
    Source: named and called as DeepSpeed's (runtime/sequence_parallel/ulysses_sp.py).
    Example:
        >>> x = torch.ones(2, 6, 4)
        >>> options = {"output_unshard_dimension": 1, "output_reduction": None}
        >>> sequence_tiled_compute(lambda x, w: x * w, 6, 3, {"x": x}, {"w": 2.0}, "x", **options).shape
        torch.Size([2, 6, 4])
    """
    name = "sequence_tiled_compute"
    return _sequence(
        name,
        fn,
        (seqlen, shards),
        (kwargs_to_shard, kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
    )


class SequenceTiledCompute:
    """`sequence_tiled_compute` with arguments in a row: DeepSpeed's `SequenceTiledCompute.apply`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Params,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        """Return as `sequence_tiled_compute`. args: the values of keys_to_shard, then those of keys_to_pass."""
        name, cut = "SequenceTiledCompute.apply", len(keys_to_shard)
        if len(args) != cut + len(keys_to_pass):
            fail(name, "args", f"{cut + len(keys_to_pass)} values, one for each key", len(args))
        given = dict(zip(keys_to_shard, args[:cut], strict=True)), dict(zip(keys_to_pass, args[cut:], strict=True))
        return _sequence(
            name,
            fn,
            (seqlen, shards),
            given,
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


def _sequence(
    name: str,
    fn: Callable[..., Tensor],
    lengths: tuple[int, int],
    given: tuple[Mapping[str, Any], Mapping[str, Any]],
    key: str,
    compute_params: Params,
    dimension: int,
    reduction: str | None,
) -> Tensor:
    (seqlen, shards), (cut, passed) = lengths, given
    if key not in cut:
        fail(name, "grad_requiring_tensor_key", f"one of {', '.join(cut) or 'no keys'}", repr(key))
    named = check_call(name, fn, None, cut[key], compute_params)
    if dimension not in (0, 1):
        fail(name, "output_unshard_dimension", "0 (a scalar of each shard) or 1 (the sequence)", repr(dimension))
    if reduction not in (None, "mean", "sum"):
        fail(name, "output_reduction", "None, mean or sum", repr(reduction))
    for argument, tensor in cut.items():
        if not isinstance(tensor, Tensor):
            fail_type(name, f"kwargs_to_shard[{argument!r}]", "an array", type(tensor).__name__)
        if tensor.dim() < 2 or tensor.shape[1] != seqlen or tensor.shape[0] != cut[key].shape[0]:
            wanted = f"[{cut[key].shape[0]}, {seqlen}, ...]"
            fail(name, f"kwargs_to_shard[{argument!r}]", wanted, show_shape(tuple(tensor.shape)))
    modules = nn.ModuleList(value for value in passed.values() if isinstance(value, nn.Module))
    names = [key, *(other for other in cut if other != key)]
    shapes = {argument: (tensor.shape[0], *tensor.shape[2:]) for argument, tensor in cut.items()}

    def call(*parts: Tensor) -> Tensor:
        shard = {n: part.reshape(-1, *shapes[n]).transpose(0, 1) for n, part in zip(names, parts, strict=True)}
        return fn(**shard, **passed)

    rows = [cut[n].transpose(0, 1).reshape(seqlen, -1) for n in names]
    if dimension == 0:
        return _scalars(name, call, rows, shards, modules, named, reduction)

    def by_position(*parts: Tensor) -> Tensor:
        found = call(*parts)
        if found.dim() < 2 or found.shape[:2] != (shapes[key][0], parts[0].shape[0]):
            advice = "A scalar of each shard takes output_unshard_dimension=0."
            wanted = f"[{shapes[key][0]}, {parts[0].shape[0]}, ...]"
            fail(name, "fn's result", wanted, show_shape(tuple(found.shape)), advice=advice)
        return found.transpose(0, 1)

    joined = tiled(name, by_position, rows, shards, module=modules, compute_params=named)
    return _reduced(joined.transpose(0, 1).contiguous(), reduction)


def _scalars(
    name: str,
    fn: Callable[..., Tensor],
    rows: Sequence[Tensor],
    shards: int,
    module: Any,
    named: Any,
    reduction: str | None,
) -> Tensor:
    """Return the scalar of each shard, [shards] (fewer where there are fewer rows), or their mean or sum."""
    if not rows[0].shape[0]:
        fail_with(name, "there are no tokens", advice="Leave the call out.")
    dtypes: list[torch.dtype] = []

    def column(*parts: Tensor) -> tuple[Tensor, Tensor]:
        found = fn(*parts)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = show_shape(tuple(found.shape)) if isinstance(found, Tensor) else type(found).__name__
            fail(name, "fn's result", "a scalar of each shard", got)
        dtypes.append(found.dtype)
        wide, t = found.reshape(1).to(wide_dtype(found.dtype)), parts[0].shape[0]
        first = torch.zeros(t, dtype=torch.bool, device=found.device)
        first[:1] = True
        return torch.cat([wide, wide.new_zeros(t - 1)]), first

    values, first = tiled(name, column, rows, shards, module=module, compute_params=named)
    return _reduced(values[first], reduction).to(dtypes[0])


def _reduced(values: Tensor, reduction: str | None) -> Tensor:
    return values if reduction is None else values.mean() if reduction == "mean" else values.sum()
