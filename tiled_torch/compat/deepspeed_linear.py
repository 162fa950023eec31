"""DeepSpeed's `TiledLinear` by its constructor, attributes, override points and exceptions, over `tiled_torch.TiledLinear`."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import error_text
from tiled_torch.core.partitioned import whole_shape
from tiled_torch.linear import module as tiles


class TiledLinear(tiles.TiledLinear):
    """`tiled_torch.TiledLinear` as DeepSpeed's class of that name is called and overridden.

    Subclasses override `_split_global_input`, `_reduce_local_output` and `_combine_output_splits`.

    Args:
        in_features, out_features, bias: of the whole layer. in_splits, out_splits: of its tiles.
        input_is_already_split, combine_out_splits: as `tiled_torch.TiledLinear`; with one input split x is never a list.
        linear_cls: makes a tile: linear_cls(in, out, bias=..., **kwargs). init_linear: a layer to copy.
        kwargs: of linear_cls.
    Attributes: linears[out_id][in_id], in_parts, out_parts (boundaries), in_splits, out_splits, use_bias.
    Tiles are initialised by linear_cls, each by its own size.
    Numerics, Memory: as `tiled_torch.TiledLinear`: sums over input splits in float32.
    Raises:
        RuntimeError: a number of splits out of range. AssertionError: `copy_params_from` of a layer that does not fit, or
            another number of inputs than in_splits. The rest: as `tiled_torch.TiledLinear`.
    Source: named and called as DeepSpeed's (runtime/zero/tiling.py).
    Example:
        >>> layer = TiledLinear(8, 12, in_splits=2, out_splits=3)
        >>> layer.out_parts, layer(torch.ones(2, 8)).shape
        ([0, 4, 8, 12], torch.Size([2, 12]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        splits = {"in_splits": (in_splits, in_features), "out_splits": (out_splits, out_features)}
        for name, (split, most) in splits.items():
            if not 1 <= split <= most:
                raise RuntimeError(error_text(type(self).__name__, name, f"in [1, {most}]", split))
        super().__init__(
            in_features,
            out_features,
            bias=bool(bias),
            in_splits=in_splits,
            out_splits=out_splits,
            input_is_already_split=input_is_already_split and in_splits > 1,
            combine_out_splits=combine_out_splits,
            linear_cls=linear_cls,
            linear_args={name: value for name, value in kwargs.items() if name not in _PLACED},
            **{name: kwargs[name] for name in _PLACED if name in kwargs},
        )
        self.use_bias, self.in_splits, self.out_splits = self.has_bias, in_splits, out_splits
        self.in_parts, self.out_parts = ([0, *accumulate(sizes)] for sizes in (self.in_sizes, self.out_sizes))
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weight and bias of a plain layer of the same size into the tiles; under ZeRO-3 every rank calls it.

        Raises:
            AssertionError: a layer that does not fit.
        """
        name = f"{type(self).__name__}.copy_params_from"
        bias = getattr(other, "bias", None)
        wanted = ((self.out_features, self.in_features), (self.out_features,) if self.use_bias else None)
        weight = getattr(other, "weight", None)
        found = (None if weight is None else whole_shape(weight), None if bias is None else whole_shape(bias))
        if found != wanted:
            rule = "a layer with weight {} and bias {}".format(*wanted)
            raise AssertionError(error_text(name, "other", rule, "weight {} and bias {}".format(*found)))
        super().copy_params_from(other)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Any:  # type: ignore[override]
        """Return the layer of input_: [..., in] -> [..., out], or lists of splits, as the options say."""
        return super().forward(input_)

    def split_input(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the input splits: by `_split_global_input`, unless x comes split."""
        if self.in_splits == 1:
            return [x]  # type: ignore[list-item]
        if not self.input_is_already_split:
            return self._split_global_input(x, list(self.in_sizes))
        if len(x) != self.in_splits:
            raise AssertionError(error_text(type(self).__name__, "x", f"{self.in_splits} input splits", len(x)))
        return x  # type: ignore[return-value]

    def reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return the output split so far, by `_reduce_local_output`."""
        return self._reduce_local_output(in_id=in_id, out_id=out_id, current_out=current_out, new_out=new_out)

    def combine_outputs(self, outputs: list[Any]) -> Any:
        """Return the result of forward: by `_combine_output_splits`, or the list of output splits."""
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Any, split_sizes: Sequence[int]) -> Sequence[Any]:
        return input.split(list(split_sizes), -1)

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        return tiles.TiledLinear.reduce_local_output(self, in_id, out_id, current_out, new_out)

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), -1)


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of a linear_cls that returns (output, bias); forward returns (y, bias [out] or None).

    With combine_out_splits=False it is a list of (output split, its bias), as DeepSpeed's.
    Args, Numerics, Memory, Raises, Source: as `TiledLinear`.
    """

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        output, bias = new_out
        before, found = (None, None) if current_out is None else current_out
        total = super()._reduce_local_output(in_id=in_id, out_id=out_id, current_out=before, new_out=output)
        return total, found if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        join = super()._combine_output_splits
        return join([output for output, _ in outputs]), join(biases) if biases else None


_PLACED = ("device", "dtype")
