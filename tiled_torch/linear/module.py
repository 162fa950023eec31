"""`TiledLinear`: a linear layer as a grid of small linear layers that run one after another. No math of its own."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn

from shared_specs.config import TORCH
from shared_specs.errors import UnsupportedError, error_text, fail_type
from shared_specs.linear import checks as linear_checks
from tiled_torch.core.partitioned import gathering, whole_shape
from tiled_torch.core.tensors import is_dtensor
from tiled_torch.linear.sums import add_partial, shared_input

_PASSED = ("bias", "device", "dtype")


class TiledLinear(nn.Module):
    """A linear layer in in_splits x out_splits tiles, so that whoever gathers weights needs one tile at a time.

    y_j = sum_i x_i w_ij + b_j. Tile (i, j) is the module `linears[j][i]`; `fully_shard` each of them (then the layer or
    the model) and the gathered weight is never whole: two tiles at most, the one that runs and the next one. ZeRO-3 gathers
    tile by tile too, also to draw or to copy them inside deepspeed.zero.Init.

    Splits follow `shared_specs.collectives.partitions.bounds`: sizes differ by at most one, the longer ones first. The bias
    belongs to the last input split. Subclasses may override the three steps: `split_input`, `reduce_local_output` and
    `combine_outputs`.

    Args:
        in_features, out_features: sizes of the whole layer. bias: whether it has one.
        in_splits: in [1, in_features]. out_splits: in [1, out_features].
        input_is_already_split: x is a list of the input splits.
        combine_out_splits: return one tensor; where False, the list of output splits.
        linear_cls: makes a tile: linear_cls(in, out, bias=..., **linear_args), with device and dtype where they are given
            here; None is nn.Linear.
        linear_args: a mapping of further keyword arguments for linear_cls.
        init_linear: a layer whose weight and bias the tiles start as copies of.
        device, dtype: of the parameters.
    Tiles of linear_cls=None are initialised as one nn.Linear of the whole size is; others initialise themselves.
    load_state_dict also takes the weight and bias of one plain layer, or the tiles of another grid.
    Numerics: sums over input splits (y) and over output splits (dx) are made in float32 for 16-bit tensors and rounded
        once; each term was rounded to 16 bits when its tile returned it. DTensor inputs sum dx in their own dtype.
    Memory: backward keeps x, once. Forward: y twice while output splits are joined, and a float32 [T, out / out_splits]
        where there are several input splits. Backward: a float32 dx where there are several output splits.
    Raises:
        SpecError, TypeError: sizes, splits or shapes that do not fit.
    Source: derived in shared_specs/README.md; the idea is DeepSpeed's TiledLinear (zero/tiling).
    Example:
        >>> import torch
        >>> TiledLinear(8, 12, in_splits=2, out_splits=3)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 12])
    """

    plain_cls: type[nn.Linear] = nn.Linear  # what linear_cls=None stands for

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] | None = None,
        linear_args: Mapping[str, Any] | None = None,
        init_linear: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        flags = {
            "input_is_already_split": input_is_already_split,
            "combine_out_splits": combine_out_splits,
            "bias": bias,
        }
        sizes = linear_checks.check_tiled_linear(name, in_features, out_features, in_splits, out_splits, **flags)
        linear_checks.check_linear_class(name, linear_cls, linear_args, _PASSED)
        self.in_features, self.out_features, self.has_bias = in_features, out_features, bias
        self.in_sizes, self.out_sizes = sizes
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        if init_linear is not None:
            self._whole_of(name, "init_linear", init_linear)
        placed = {name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None}
        make, options = linear_cls or self.plain_cls, {**(linear_args or {}), **placed}
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                make(inputs, outputs, bias=self.has_bias and i == last, **options)
                for i, inputs in enumerate(self.in_sizes)
            )
            for outputs in self.out_sizes
        )
        if init_linear is not None:
            self._copy(*self._whole_of(name, "init_linear", init_linear))
        elif linear_cls is None:
            self.reset_parameters()
        self.register_load_state_dict_pre_hook(_load_other_grids)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
    ) -> Self:
        """Return the same layer in tiles of nn.Linear, which hold copies of its weight and bias and train as they do.

        UnsupportedError where it is more than its weight and bias: a subclass with a forward of its own, hooks,
        parametrizations.
        """
        weight, bias = _params_of(f"{cls.__name__}.from_linear", "linear", linear)
        _refuse_more_than_plain(f"{cls.__name__}.from_linear", linear)
        outputs, inputs = whole_shape(weight)
        module = cls(
            inputs,
            outputs,
            bias=bias is not None,
            in_splits=in_splits,
            out_splits=out_splits,
            input_is_already_split=input_is_already_split,
            combine_out_splits=combine_out_splits,
            init_linear=linear,
            device=weight.device,
            dtype=weight.dtype,
        )
        for row in module.linears:
            for tile in row:  # type: ignore[attr-defined]
                tile.weight.requires_grad_(weight.requires_grad)
                if tile.bias is not None and bias is not None:
                    tile.bias.requires_grad_(bias.requires_grad)
        return module.train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return one nn.Linear with copies of the tiles' weights and biases. Tiles sharded over ranks are gathered one by
        one.
        """
        first = self._tile(0, 0).weight
        linear: Any = nn.utils.skip_init(
            nn.Linear, self.in_features, self.out_features, bias=self.has_bias, device=first.device, dtype=first.dtype
        )
        with torch.no_grad():
            for out_id, in_id, rows, columns in self.grid():
                tile = self._tile(out_id, in_id)
                bias = getattr(tile, "bias", None)
                with gathering(tile.weight, bias):
                    linear.weight[rows, columns] = _full(tile.weight)
                    if bias is not None:
                        linear.bias[rows] = _full(bias)
        linear.weight.requires_grad_(first.requires_grad)
        if self.has_bias:
            linear.bias.requires_grad_(self._tile(0, len(self.in_sizes) - 1).bias.requires_grad)
        return linear.train(self.training)

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy the weight and bias of a plain layer of the same size into the tiles.

        Tiles sharded over ranks (`fully_shard`) take their parts of it, without communication; a sharded plain layer is
        gathered, so that all of its ranks have to call this. So are tiles under ZeRO-3, one by one.
        """
        self._copy(*self._whole_of(f"{type(self).__name__}.copy_params_from", "", other))

    def reset_parameters(self) -> None:
        """Draw every parameter of the tiles anew, uniformly within 1/sqrt(in_features), as nn.Linear does."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            with gathering(parameter, write=True):
                nn.init.uniform_(parameter, -bound, bound)

    def grid(self) -> list[tuple[int, int, slice, slice]]:
        """Return (out_id, in_id, its rows, its columns) of every tile's weight within the whole weight [out, in]."""
        rows, columns = _slices(self.out_sizes), _slices(self.in_sizes)
        return [(j, i, row, column) for j, row in enumerate(rows) for i, column in enumerate(columns)]

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """[..., in] -> [..., out]; or lists of splits, as the options say."""
        parts = [shared_input(part, len(self.out_sizes)) for part in self.split_input(x)]
        outputs = []
        for out_id in range(len(self.out_sizes)):
            total = None
            for in_id, part in enumerate(parts):
                total = self.reduce_local_output(in_id, out_id, total, self._tile(out_id, in_id)(part()))
            outputs.append(total)
        return self.combine_outputs(outputs)

    def split_input(self, x: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        """Return x as its input splits: views of it, or x itself where it is already split."""
        name = type(self).__name__
        if not self.input_is_already_split:
            if not isinstance(x, Tensor):
                fail_type(name, "x", "an array", type(x).__name__)
            linear_checks.check_linear_input(name, tuple(x.shape), self.in_features)
            return x.split(self.in_sizes, -1)
        if not isinstance(x, list | tuple):
            fail_type(name, "x", "a list or tuple of arrays", type(x).__name__)
        linear_checks.check_linear_parts(name, [tuple(part.shape) for part in x], self.in_sizes)
        return x

    def reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return the output split `out_id` so far, once tile (in_id, out_id) has returned new_out; None came before in_id 0."""
        if len(self.in_sizes) == 1:
            return new_out
        total = add_partial(in_id, current_out, new_out)
        return total.to(new_out.dtype) if in_id == len(self.in_sizes) - 1 else total

    def combine_outputs(self, outputs: list[Any]) -> Any:
        """Return the result of forward, from its output splits."""
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _tile(self, out_id: int, in_id: int) -> Any:
        return self.linears[out_id][in_id]  # type: ignore[index]

    def _whole_of(self, function: str, name: str, linear: Any) -> tuple[Tensor, Tensor | None]:
        weight, bias = _params_of(function, name or "other", linear)
        linear_checks.check_linear_params(
            function,
            f"{name}." if name else "",
            whole_shape(weight),
            None if bias is None else whole_shape(bias),
            in_features=self.in_features,
            out_features=self.out_features,
            has_bias=self.has_bias,
            names=TORCH,
        )
        return weight, bias

    @torch.no_grad()
    def _copy(self, weight: Tensor, bias: Tensor | None) -> None:
        with gathering(weight, bias):
            weight, bias = _full(weight), None if bias is None else _full(bias)
            for out_id, in_id, rows, columns in self.grid():
                tile = self._tile(out_id, in_id)
                with gathering(tile.weight, getattr(tile, "bias", None), write=True):
                    _copy_into(tile.weight, weight[rows, columns])
                    if bias is not None and in_id == len(self.in_sizes) - 1:
                        _copy_into(tile.bias, bias[rows])

    def extra_repr(self) -> str:
        splits = f"in_splits={len(self.in_sizes)}, out_splits={len(self.out_sizes)}"
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}, {splits}"


class LinearReturnBias(nn.Linear):
    """nn.Linear that leaves adding its bias to the caller: (x w^T, b)."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        # A copy: an engine may free the gathered parameter as soon as this returns.
        return nn.functional.linear(x, self.weight), None if self.bias is None else self.bias.clone()


class TiledLinearReturnBias(TiledLinear):
    """`TiledLinear` of layers that return (output, bias) and leave adding the bias to the caller.

    linear_cls=None is `LinearReturnBias`. A linear_cls whose parameters an engine frees after forward has to return a copy of
    its bias.
    Returns:
        (y, bias [out] or None); with combine_out_splits=False two lists, of output splits and of their biases.
    Args, Numerics, Memory, Raises and Source are those of `TiledLinear`.
    Example:
        >>> import torch
        >>> y, bias = TiledLinearReturnBias(8, 12, in_splits=2, out_splits=3)(torch.randn(2, 5, 8))
        >>> y.shape, bias.shape
        (torch.Size([2, 5, 12]), torch.Size([12]))
    """

    plain_cls = LinearReturnBias

    def reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Return (output so far, the bias where a tile of this output split has returned one)."""
        output, bias = new_out
        before, found = (None, None) if current_out is None else current_out
        return super().reduce_local_output(in_id, out_id, before, output), found if bias is None else bias

    def combine_outputs(self, outputs: list[Any]) -> Any:
        """Return the result of forward, from the pairs of its output splits."""
        parts, biases = [output for output, _ in outputs], [bias for _, bias in outputs]
        if not self.combine_out_splits:
            return parts, biases
        return super().combine_outputs(parts), None if biases[0] is None else torch.cat(biases)


def _slices(sizes: Sequence[int]) -> list[slice]:
    edges = [0, *accumulate(sizes)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _copy_into(parameter: Any, whole: Tensor) -> None:
    """Copy a value in; of a DTensor this rank's part, which it cuts out of its own copy of the whole."""
    if is_dtensor(parameter):
        from torch.distributed.tensor import distribute_tensor

        mesh, device = parameter.device_mesh, parameter.to_local().device
        whole = distribute_tensor(whole.to(device), mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(whole)


def _params_of(function: str, name: str, linear: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
    if not isinstance(weight, Tensor) or len(whole_shape(weight)) != 2:
        fail_type(function, name, "a layer with a weight", type(linear).__name__)
    return weight, bias


def _refuse_more_than_plain(function: str, linear: nn.Module) -> None:
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    own = type(linear).forward in (nn.Linear.forward, LinearReturnBias.forward)
    if own and not any(hooks) and not hasattr(linear, "parametrizations"):
        return
    advice = "Construct the layer with linear_cls and call copy_params_from."
    got = f"{type(linear).__name__} with hooks or a forward of its own"
    raise UnsupportedError(error_text(function, "linear", "a plain layer", got, advice=advice))


def _load_other_grids(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before loading: a plain layer's weight and bias, or the tiles of another grid, become the tiles of this one."""
    whole = {name: state.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state}
    whole |= _pop_other_grid(module, state, prefix)
    for name, shape in (("weight", (module.out_features, module.in_features)), ("bias", (module.out_features,))):
        if name in whole and tuple(whole[name].shape) != shape:
            found = f"{tuple(whole.pop(name).shape)} in the checkpoint and {shape} in the current model"
            rest[-1].append(f"size mismatch for {prefix}{name}: {found}.")
    for out_id, in_id, row, column in module.grid():
        name = f"{prefix}linears.{out_id}.{in_id}."
        if "weight" in whole:
            state[f"{name}weight"] = whole["weight"][row, column]
        if "bias" in whole and in_id == len(module.in_sizes) - 1:
            state[f"{name}bias"] = whole["bias"][row]


def _pop_other_grid(module: Any, state: dict[str, Any], prefix: str) -> dict[str, Tensor]:
    """Return the whole weight and bias of tiles that are cut differently from the module's; nothing where they are not."""
    grid = [tuple(map(int, key[len(prefix) :].split(".")[1:3])) for key in state if _is_tile_weight(key, prefix)]
    rows, columns = (max(ids) + 1 for ids in zip(*grid, strict=True)) if grid else (0, 0)
    if len(grid) != rows * columns or (rows, columns) in ((0, 0), (len(module.out_sizes), len(module.in_sizes))):
        return {}
    names = [[f"{prefix}linears.{j}.{i}." for i in range(columns)] for j in range(rows)]
    weight = torch.cat([torch.cat([state.pop(f"{name}weight") for name in row], 1) for row in names])
    biases = [state.pop(f"{row[-1]}bias") for row in names if f"{row[-1]}bias" in state]
    return {"weight": weight, "bias": torch.cat(biases)} if biases else {"weight": weight}


def _is_tile_weight(key: str, prefix: str) -> bool:
    return key.startswith(f"{prefix}linears.") and key.endswith(".weight") and key[len(prefix) :].count(".") == 3
