"""What a module computes, asked of its own code on a few tokens: the formula of an MLP, something token-wise, or neither."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shared_specs.config import Activation
from shared_specs.tolerances import FLOOR
from tiled_torch.core.activation_functions import FUNCTIONS
from tiled_torch.models.mlps.layout import MLPLayout, Roles, sizes_of
from tiled_torch.models.mlps.stand_in import small_sizes, small_twin

# One token each: small ones, and some whose values meet whatever a module cuts off.
_SCALES = (0.1, 0.3, 1.0, 1.0, 3.0, 10.0, 100.0)
# Of a formula: routers of experts would turn a rounding of such tokens into another result.
_LARGER = (*_SCALES, 1e3, 1e4)


def formula_of(module: nn.Module, layout: MLPLayout) -> tuple[Roles, Activation] | None:
    """Return as what and with which activation a module's result is that of `tiled_mlp`, to rounding; None where it is not."""
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        return None
    if any(tensor is not None for name in layout.others for tensor in module.get_submodule(name).state_dict().values()):
        return None
    generator = torch.Generator().manual_seed(5)
    with torch.enable_grad():
        twin = small_twin(module, small_sizes(module), generator)
        x = tokens_of(sizes_of(twin.get_submodule(next(layout.roles()).up)), generator, _LARGER)
        found = _with_gradients(twin, twin, x)
        if found is None or (training := _with_gradients(lambda x: _in_training(twin, x), twin, x)) is None:
            return None
        if not _all_same(training, found):
            return None
        for roles in layout.roles():
            for name, activation in FUNCTIONS.items():
                if _same_value(found[0], _formula(twin, roles, activation, x)):
                    expected = _with_gradients(partial(_formula, twin, roles, activation), twin, x)
                    return (roles, name) if _all_same(found, expected) else None  # type: ignore[return-value]
    return None


def _with_gradients(run: Callable[[Tensor], Any], twin: nn.Module, x: Tensor) -> list[Tensor] | None:
    """Return the result and the gradients of x and of every parameter; None where there are none.

    Gradients of parameters, which are sums over tokens, come from those of middling sizes: larger ones would hide them.
    """
    params = [p.requires_grad_() for p in twin.parameters()]
    x = x.clone().requires_grad_()
    y = run(x)
    if not isinstance(y, Tensor) or not y.requires_grad or y.shape[:-1] != x.shape[:-1]:
        return None
    dy = torch.cos(torch.arange(y.numel(), dtype=y.dtype, device=y.device)).view(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    middling = (torch.tensor(_LARGER) <= 3.0).to(dy)[:, None]
    of_params = torch.autograd.grad(y, params, dy * middling, allow_unused=True)
    zeros = (torch.zeros_like(p) if found is None else found for p, found in zip(params, of_params, strict=True))
    return [y.detach(), dx, *(gradient.reshape(1, 1, -1) for gradient in zeros)]


def _in_training(twin: Any, x: Tensor) -> Tensor:
    """The twin's result in training without what its dropout layers drop, which is seen in each call."""
    for inner in twin.modules():
        inner.training = True
        if isinstance(inner, nn.modules.dropout._DropoutNd):
            inner.p = 0.0
    with torch.random.fork_rng(devices=()):
        return twin(x)


def _formula(twin: Any, roles: Roles, activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    up = getattr(twin, roles.up)(x)
    if roles.fused is not None:
        halves = up.chunk(2, dim=-1)
        h = activation(halves[roles.fused[0]]) * halves[roles.fused[1]]
    else:
        h = activation(up) if roles.gate is None else activation(getattr(twin, roles.gate)(x)) * up
    return getattr(twin, roles.down)(h)


def reason_not_token_wise(
    module: nn.Module, call: Callable[[Any], Callable[..., Any]] = lambda twin: twin
) -> str | None:
    """Return why a module cannot be computed token by token; None where one token's result is that among others.

    call: what of the twin is called, where that is not the module itself.
    """
    generator = torch.Generator().manual_seed(6)
    try:
        with torch.no_grad():
            twin = small_twin(module, small_sizes(module), generator)
            run = call(twin)
            count = _tensors_of(run)
            if count is None:
                return "it is called with more than hidden states"
            width = next(size for size in map(sizes_of, twin.modules()) if size is not None)
            args = [tokens_of(width, generator) for _ in range(count)]
            whole = pytree.tree_leaves(run(*args))
            rows = [pytree.tree_leaves(run(*(arg[:, i : i + 1] for arg in args))) for i in range(args[0].shape[1])]
    except Exception as error:  # of code that is not ours
        return f"a probe of its code ended in {type(error).__name__}"
    for number, leaf in enumerate(whole):
        tokens = len(_SCALES)
        if not isinstance(leaf, Tensor) or leaf.shape[:2] != (1, tokens):
            return "its results are not one for every token"
        if not all(same(leaf[:, i : i + 1], row[number]) for i, row in enumerate(rows)):
            return "the result of a token depends on other tokens"
    return None


def _tensors_of(run: Callable[..., Any]) -> int | None:
    """Return how many tensors a call needs: hidden states, and a residual to add; None for more."""
    forward = run.forward if isinstance(run, nn.Module) else run
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in inspect.signature(forward).parameters.values() if p.default is p.empty and p.kind in kinds]
    return len(needed) if 1 <= len(needed) <= 2 else None


def tokens_of(
    sizes: tuple[int, int] | None, generator: torch.Generator, of_sizes: tuple[float, ...] = _SCALES
) -> Tensor:
    """Return float64 [1, T, H], the inputs of a probe of a layer with these sizes: tokens as large as `of_sizes` says."""
    assert sizes is not None
    scales = torch.tensor(of_sizes, dtype=torch.float64)
    return torch.randn(1, len(of_sizes), sizes[0], generator=generator, dtype=torch.float64) * scales[:, None]


def _all_same(found: list[Tensor], expected: list[Tensor] | None) -> bool:
    """Return whether results are the same, and gradients, which may be zeros."""
    if expected is None or not _same_value(found[0], expected[0]):
        return False
    return all(map(_near, found, expected))


def _same_value(found: Tensor, expected: Tensor) -> bool:
    """Return whether every token is the same, and most are not zero: large ones are, where activations are all negative."""
    return _near(found, expected) and bool((expected.flatten(2).norm(dim=-1) > 0).double().mean() > 0.5)


def _near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype or not expected.isfinite().all():
        return False
    return bool(
        ((found - expected).flatten(2).norm(dim=-1) <= FLOOR["float64"] * expected.flatten(2).norm(dim=-1)).all()
    )


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether every token of one is the other's, to rounding of float64, and there is something to compare."""
    return _near(found, expected) and bool(expected.flatten(2).norm(dim=-1).min() > 0)
