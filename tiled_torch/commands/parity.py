"""The cases of the specification in PyTorch, for `parity`: on the CPU and on the GPU, with every backend that can run."""

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_specs.app.parity import Place
from shared_specs.collectives.partitions import bounds
from shared_specs.config import DIFFERENTIABLE_OUTPUTS, LossResult, Tiling
from shared_specs.core.rounding import Array
from shared_specs.linear.cases import LinearCase, make_linear_inputs
from shared_specs.loss.cases import LossCase, loss_options, make_loss_inputs
from shared_specs.mlp.cases import MLPCase, make_inputs
from tiled_torch import (
    TiledLinear,
    TiledLinearReturnBias,
    TiledMLP,
    backends,
    tile,
    tiled_linear_cross_entropy,
    tiled_mlp,
)

# The framework's own functions, which the cases of `tile` are made of.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


class TorchRunner:
    """See `shared_specs.app.parity.Runner`."""

    def places(self, group: str) -> Iterable[Place]:
        usable = [name for name, reason in backends.usable_backends().items() if reason is None]
        if group in ("linear", "tile"):
            usable = ["eager"]
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            for backend in usable:
                if backend == "eager" or device == "cuda" or backends.interpreting():
                    yield Place(device=device, backend=backend)

    def run(self, group: str, case: Any, place: Place) -> Mapping[str, Array | None]:
        runs: Mapping[str, Callable[[Any, Place], dict[str, Any]]]
        runs = {"mlp": _mlp, "tile": _tiled, "loss": _loss, "linear": _linear}
        return {name: _to_numpy(tensor) for name, tensor in runs[group](case, place).items()}


def _operands(arrays: Mapping[str, Array], frozen: Iterable[str], place: Place) -> dict[str, Tensor]:
    """Return the arrays as tensors; matrices of weights are [out, in] then, and what is not frozen requires a gradient."""
    found = {}
    for name, array in arrays.items():
        tensor = _from_numpy(array, place)
        found[name] = tensor.T.contiguous() if name.startswith("w") else tensor
        if name[0] in "xwb":
            found[name].requires_grad_(name not in frozen)
    return found


def _mlp(case: MLPCase, place: Place) -> dict[str, Any]:
    given = _operands(make_inputs(case), case.frozen, place)
    x, dy = _laid_out(given.pop("x"), case.x_layout), _laid_out(given.pop("dy"), case.dy_layout)
    x.requires_grad_("x" not in case.frozen)
    biases = {name[2:]: tensor for name, tensor in given.items() if name.startswith("b_")}
    weights = (given.get("w_gate"), given["w_up"], given["w_down"])
    options: dict[str, Any] = {"num_shards": case.num_shards, "keep": case.keep, "backend": place.backend}
    options |= {"activation": case.activation, "biases": biases}
    if not case.fused:
        return _gradients(tiled_mlp(x, *weights, **options), dy, {"x": x} | given)
    module = TiledMLP.from_weights(*weights, fused_gate_up=True, **options)
    results = _gradients(module(x), dy, {"x": x} | dict(module.named_parameters()))
    for kind, both in (("w", "dw_gate_up"), ("b", "db_gate_up")):
        if both in results:
            whole = results.pop(both)
            halves = whole.chunk(2, -1) if kind == "w" else whole.chunk(2)
            results |= dict(zip((f"d{kind}_gate", f"d{kind}_up"), halves, strict=True))
    return {name: value for name, value in results.items() if name[1:] not in case.frozen}


def _tiled(case: MLPCase, place: Place) -> dict[str, Any]:
    given = _operands(make_inputs(case), case.frozen, place)

    def plain(x: Tensor) -> Tensor:
        up = F.linear(x, given["w_up"], given.get("b_up"))
        if case.gated:
            h = FUNCTIONS[case.activation](F.linear(x, given["w_gate"], given.get("b_gate"))) * up
        else:
            h = FUNCTIONS[case.activation](up)
        return F.linear(h, given["w_down"], given.get("b_down"))

    dy = given.pop("dy")
    return _gradients(tile(plain, num_shards=case.num_shards)(given["x"]), dy, given)


def _loss(case: LossCase, place: Place) -> dict[str, Any]:
    given = _operands(make_loss_inputs(case), case.frozen, place)
    operands = {name: given[name] for name in ("x", "weight", "bias") if name in given}
    tiling: dict[str, Any] = {"num_shards": case.num_shards}
    if case.vocab_shards is not None:
        tiling = {"tiling": Tiling(num_shards=case.num_shards, vocab_shards=case.vocab_shards)}
    result = tiled_linear_cross_entropy(
        operands["x"],
        operands["weight"],
        given["targets"],
        bias=operands.get("bias"),
        loss=loss_options(case, given.get("class_weight")),
        backend=place.backend,
        **tiling,
    )
    every = result._asdict() if isinstance(result, LossResult) else {"loss": result}
    found = {name: value for name, value in every.items() if value is not None}
    names = ["loss", *(name for name in case.outputs if name in DIFFERENTIABLE_OUTPUTS)]
    wanted = {name: tensor for name, tensor in operands.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(
        [found[name] for name in names], list(wanted.values()), [given[f"d{n}"] for n in names]
    )
    return found | _as_specified(wanted, gradients)


def _linear(case: LinearCase, place: Place) -> dict[str, Any]:
    given = _operands(make_linear_inputs(case), case.frozen, place)
    x, dtype = given["x"], given["x"].dtype
    plain = nn.utils.skip_init(
        nn.Linear, case.in_features, case.out_features, bias=case.bias, dtype=dtype, device=place.device
    )
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(given[name])
        parameter.requires_grad_(name not in case.frozen)
    layer: Any = (TiledLinearReturnBias if case.return_bias else TiledLinear).from_linear(
        plain,
        in_splits=case.in_splits,
        out_splits=case.out_splits,
        input_is_already_split=case.already_split,
        combine_out_splits=case.combined,
    )
    edges = pairwise(bounds(case.in_features, case.in_splits))
    result, biases = layer([x[..., start:stop] for start, stop in edges] if case.already_split else x), None
    if case.return_bias:
        result, biases = result
    parts, added = (result, biases) if not case.combined else ([result], [biases])
    added = [None] * len(parts) if added is None else added
    y = torch.cat([part if bias is None else part + bias for part, bias in zip(parts, added, strict=True)], -1)
    if y.requires_grad:
        y.backward(given["dy"])
    results: dict[str, Any] = {"y": y} | ({"dx": x.grad} if x.requires_grad else {})
    dweight, dbias = (torch.full_like(given[name], torch.nan) for name in ("weight", "bias" if case.bias else "weight"))
    for out_id, in_id, rows, columns in layer.grid():
        one = layer.linears[out_id][in_id]
        if one.weight.grad is not None:
            dweight[rows, columns] = one.weight.grad
        if one.bias is not None and one.bias.grad is not None:
            dbias[rows] = one.bias.grad
    results |= {} if "weight" in case.frozen else {"dweight": dweight.T}
    return results | ({"dbias": dbias} if case.bias and "bias" not in case.frozen else {})


def _gradients(y: Tensor, dy: Tensor, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: tensor for name, tensor in operands.items() if tensor.requires_grad}
    return {"y": y} | _as_specified(wanted, torch.autograd.grad(y, list(wanted.values()), dy))


def _as_specified(wanted: Mapping[str, Tensor], gradients: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the gradients by the specification's names, those of weights [in, out]."""
    pairs = zip(wanted, gradients, strict=True)
    return {f"d{name}": gradient.T if name.startswith("w") else gradient for name, gradient in pairs}


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return a leaf of the same values that lies in memory as the case says."""
    if layout == "sliced":
        base = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), 7)
        base[..., 1:-2] = tensor.detach()
        return base[..., 1:-2].detach()
    if layout == "transposed":
        return tensor.detach().transpose(0, 1).contiguous().transpose(0, 1)
    return tensor.detach()[..., :1, :].expand(tensor.shape) if layout == "expanded" else tensor.detach()


def _from_numpy(array: Array, place: Place) -> Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).to(place.device)
    return torch.from_numpy(array.copy()).to(place.device)


def _to_numpy(tensor: Tensor | None) -> Array | None:
    if tensor is None:
        return None
    tensor = tensor.detach().contiguous().cpu()
    return (
        tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
    )
