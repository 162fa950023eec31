"""Parameters of `TiledMLP` from PyTorch to its Flax nnx twin and back: the same names, weights transposed."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shared_specs.errors import fail, fail_type, show_shape
from tiled_torch.bridge.arrays import check_bridged, to_jax, to_torch
from tiled_torch.core.tensors import dtype_name
from tiled_torch.mlp.module import TiledMLP

if TYPE_CHECKING:
    import jax


def params_to_jax(torch_module: nn.Module, jax_module: Any) -> None:
    """Copy every parameter of a TiledMLP, or of a module made of TiledMLPs alone, into its nnx twin.

    Args:
        torch_module: weights [out, in]; parameter names as in `named_parameters`.
        jax_module: nnx module with parameters of the same dotted names, weights [in, out]. Changed in place; each
            parameter keeps its sharding. All is checked and converted first, so an error leaves it unchanged.
    Raises:
        SpecError: names, shapes, dtypes or activations differ. TypeError: a module of the wrong kind, or a value `to_jax`
            refuses.
    """
    import jax
    from flax import nnx

    ours, theirs = _twins("params_to_jax", torch_module, jax_module)
    values = {}
    for name, tensor in ours.items():
        found = to_jax(tensor.detach().mT if _is_weight(name) else tensor, copy=True)
        values[name] = theirs[name].replace(jax.device_put(found, theirs[name][...].sharding))
    flat = nnx.to_flat_state(nnx.state(jax_module, nnx.Param))
    nnx.update(jax_module, nnx.from_flat_state([(path, values[_dotted(path)]) for path, _ in flat]))


def params_to_torch(jax_module: Any, torch_module: nn.Module) -> None:
    """Copy every parameter of an nnx TiledMLP, or of a module made of them alone, into its PyTorch twin.

    The parameters of `torch_module` stay the same objects, so an optimizer keeps them. The rest is as in
    `params_to_jax`, in the other direction.
    """
    import jax

    ours, theirs = _twins("params_to_torch", torch_module, jax_module)
    values = {}
    for name, variable in theirs.items():
        found = to_torch(jax.device_put(variable[...], next(iter(variable[...].devices()))))
        values[name] = found.mT if _is_weight(name) else found
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(values[name])


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2].startswith("w_")


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _twins(function: str, torch_module: Any, jax_module: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return both modules' parameters by dotted name, checked to be transposes of each other."""
    from flax import nnx

    for name, module, kind in (("torch_module", torch_module, nn.Module), ("jax_module", jax_module, nnx.Module)):
        if not isinstance(module, kind):
            fail_type(function, name, f"an {'nn' if kind is nn.Module else 'nnx'}.Module", type(module).__name__)
    ours = dict(torch_module.named_parameters())
    known = {
        f"{path}.{name}" if path else name
        for path, module in torch_module.named_modules()
        if isinstance(module, TiledMLP)
        for name, _ in module.named_parameters(recurse=False)
    }
    if others := sorted(ours.keys() - known):
        advice = "Other layouts are unknown here; pass its TiledMLP modules one by one."
        fail(function, "torch_module", "made of TiledMLP alone", f"a parameter {others[0]}", advice=advice)
    theirs = {_dotted(path): v for path, v in nnx.to_flat_state(nnx.state(jax_module, nnx.Param))}
    if ours.keys() != theirs.keys():
        rule = "a twin with parameters " + (", ".join(sorted(ours)) or "none")
        fail(function, "jax_module", rule, ", ".join(sorted(theirs)) or "none")
    for name, tensor in ours.items():
        _check_pair(function, name, tensor, theirs[name][...])
    _check_activations(function, torch_module, jax_module)
    return ours, theirs


def _check_activations(function: str, torch_module: nn.Module, jax_module: Any) -> None:
    """The same parameters make another MLP of another activation."""
    from flax import nnx

    twins = {_dotted(path): module for path, module in nnx.iter_modules(jax_module)}
    for path, module in torch_module.named_modules():
        config = getattr(twins.get(path), "config", None)
        if isinstance(module, TiledMLP) and getattr(config, "activation", module.activation) != module.activation:
            name = f"{path}.activation" if path else "activation"
            rule = f"{module.activation!r}, that of torch_module"
            fail(function, f"jax_module.{name}", rule, repr(config.activation))  # type: ignore[union-attr]


def _check_pair(function: str, name: str, tensor: Tensor, array: "jax.Array") -> None:
    check_bridged(function, f"torch_module.{name}", tensor)
    want = tuple(tensor.shape)[::-1] if _is_weight(name) else tuple(tensor.shape)
    dtype = dtype_name(tensor.dtype)
    if (array.shape, array.dtype.name) != (want, dtype):
        rule, got = f"{show_shape(want)} {dtype}", f"{show_shape(array.shape)} {array.dtype.name}"
        shapes = f"torch_module.{name} is {show_shape(tensor.shape)} {dtype}"
        fail(function, f"jax_module.{name}", rule, got, shapes=shapes)
