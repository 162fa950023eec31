"""Weights for a model that was built, and parallelized, on the meta device: every rank makes only what it holds."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import fail, fail_with
from tiled_torch.collectives.initialise import Parts, fill_local

_NAME = "materialize"


def materialize(
    model: nn.Module, *, device: torch.device | str = "cpu", weights: Mapping[str, Parts] | None = None, seed: int = 0
) -> nn.Module:
    """Allocate the model's parameters and fill them: with given weights, or with random ones that do not depend on the
    sharding.

    Args:
        model: on the meta device, after `parallelize` (engine "fsdp") or without it; changed in place.
        device: of the local parameters and of the buffers.
        weights: whole tensors by the names of `model.named_parameters()`, a tied tensor once. A value may also be an object
            with a `shape` that returns a tensor for a tuple of slices, such as an array in a file; then only this rank's part
            is read. None: the modules initialise them (`reset_parameters`, or `_init_weights` of a Hugging Face model), each
            from `seed` and its module's name. The modules compute the buffers in either case.
    Returns:
        The model itself.
    Memory: for random weights, one module's whole parameters at a time in addition to the local ones.
    Raises:
        SpecError: a weight is missing, unexpected or of another shape; a module with parameters or buffers has no method that
            initialises them, or its method leaves one unchanged.
    Example:
        >>> with torch.device("meta"):
        ...     linear = nn.Linear(4, 4)
        >>> bool(materialize(linear).weight.isfinite().all())
        True
    """
    if weights is not None:
        _check(model, weights)
    ties = _ties(model)
    model.to_empty(device=device)
    for (first, name), *others in ties:
        for module, other in others:
            setattr(module, other, getattr(first, name))
    with torch.no_grad():
        for path, module in model.named_modules():
            _initialise(model, path, module, seed, drawn=weights is None)
        for name, whole in (weights or {}).items():
            fill_local(model.get_parameter(name), whole)
    return model


def _check(model: nn.Module, weights: Mapping[str, Parts]) -> None:
    parameters = dict(model.named_parameters())
    for name in parameters.keys() ^ weights.keys():
        wrong = "weights has none for the parameter" if name in parameters else "weights has one for no parameter:"
        fail_with(_NAME, f"{wrong} {name}", advice="Give one for every parameter.")
    for name, whole in weights.items():
        if whole.shape != parameters[name].shape:
            fail(_NAME, f"weights['{name}']", f"of shape {list(parameters[name].shape)}", list(whole.shape))


def _ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return every place of every parameter; to_empty makes a new one in each."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
    return list(places.values())


def _initialise(model: nn.Module, path: str, module: nn.Module, seed: int, *, drawn: bool) -> None:
    own: dict[str, Any] = {name: p for name, p in module._parameters.items() if p is not None}
    if not (own and drawn) and not any(b is not None for b in module._buffers.values()):
        return
    initialise = _initialiser(model, path, module)
    # Whole and on the host, so that the draws depend on neither the mesh nor the device; NaN, to see what is drawn.
    whole = {
        name: nn.Parameter(_unset(torch.empty(p.shape, dtype=p.dtype)), requires_grad=False) for name, p in own.items()
    }
    for buffer in module._buffers.values():
        if buffer is not None:
            _unset(buffer)
    module._parameters.update(whole)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7]))
            initialise()
    finally:
        module._parameters.update(own)
    for name, tensor in ((whole if drawn else {}) | module._buffers).items():
        if tensor is not None and tensor.is_floating_point() and bool(tensor.isnan().any()):
            advice = "Set it in reset_parameters(), or in _init_weights() of the model."
            whole_name = f"{path}.{name}".removeprefix(".")
            fail_with(_NAME, f"{whole_name} was not set by its module", advice=advice)
    for name, parameter in own.items():
        fill_local(parameter, whole[name])


def _unset(tensor: Tensor) -> Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def _initialiser(model: nn.Module, path: str, module: nn.Module) -> Callable[[], Any]:
    by_model: Any = getattr(model, "_init_weights", None)
    if by_model is not None:
        return lambda: by_model(module)
    by_itself: Any = getattr(module, "reset_parameters", None)
    if by_itself is None:
        advice = "Give it reset_parameters()."
        fail(
            _NAME,
            path or type(module).__name__,
            "a module that initialises itself",
            type(module).__name__,
            advice=advice,
        )
    return by_itself
