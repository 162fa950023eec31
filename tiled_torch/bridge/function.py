"""A JAX function as a differentiable PyTorch operation: JAX computes, PyTorch keeps what backward needs."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type
from tiled_torch.bridge.arrays import DTYPES, to_jax, to_torch

if TYPE_CHECKING:
    import jax


def jax_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a function of JAX arrays, as a differentiable function of PyTorch tensors.

    Arguments and results are pytrees (tuples, dicts, None, ...) of arrays; here their leaves are tensors, all on one
    device. Compiled by `jax.jit` once per shapes, dtypes and set of inputs that need a gradient. Whatever else fn reads
    (captured arrays, options) is fixed by that, so pass what changes as an argument. Integer and bool tensors get no
    gradient, an input that fn ignores gets zeros. Autocast does not apply; `torch.compile` breaks its graph here.

    Numerics: bit-equal to `jax.jit` of fn, or of its `jax.vjp` where a gradient is needed. The x64 setting and the
        matmul precision of the forward call hold in its backward. Complex gradients follow PyTorch's convention.
    Memory: what JAX needs for backward, as saved tensors, so that checkpointing and saved-tensor hooks see it; an input
        among it is kept itself, uncopied, and changing it in place before backward raises as PyTorch does. What fn
        reshapes first is kept as a copy: `tiled_mlp` keeps an x of [T, H] itself, one of [B, S, H] as a copy.
    Raises:
        TypeError, SpecError, UnsupportedError: as `to_jax` and `to_torch`; devices differ; a backward with
        create_graph=True. Errors of fn come through unchanged.
    Example:
        >>> import jax.numpy as jnp
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> jax_function(lambda x: jnp.sum(x**2))(x).backward()
        >>> x.grad
        tensor([2., 4.])
    """
    import jax

    if not callable(fn):
        fail_type("jax_function", "fn", "callable", type(fn).__name__)
    forward = jax.jit(functools.partial(_linearize, fn), static_argnums=(0, 1))
    backward = jax.jit(_pull_back)

    # Without it dynamo takes jax's own Python apart and fails there.
    @functools.partial(torch.compiler.disable, reason="a function of jax_function runs in JAX")
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs, tree = jax.tree.flatten((args, kwargs))
        for leaf in inputs:
            _check_input(leaf, inputs[0])
        wanted = tuple(torch.is_grad_enabled() and leaf.requires_grad for leaf in inputs)
        found, recipe, own = forward(tree, wanted, [to_jax(leaf) for leaf in inputs])
        outputs = tuple(to_torch(leaf) for leaf in found)
        if any(wanted):
            stay = [None if _crosses(r) else r for r in own]
            saved = [to_torch(r) for r in own if _crosses(r)]
            config: Any = jax.config
            settings = config.jax_enable_x64, config.jax_default_matmul_precision
            outputs = _Node.apply(_BridgeCall(backward, recipe, stay, wanted, *settings), outputs, saved, *inputs)
        return jax.tree.unflatten(recipe.func.outputs, outputs)

    return call


def _check_input(leaf: Any, first: Any) -> None:
    name = "every argument"
    if not isinstance(leaf, Tensor):
        advice = "Bind other values with functools.partial."
        fail_type("jax_function", name, "a torch.Tensor or a pytree of them", type(leaf).__name__, advice=advice)
    if leaf.device != first.device:
        fail("jax_function", name, f"on one device, {first.device}", leaf.device)


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How the outputs and the pullback of one trace are put together again. Holds no tracers."""

    outputs: Any  # tree of fn's result
    differentiable: tuple[bool, ...]  # of its leaves
    pull: Any  # tree of the pullback
    sources: tuple[int | None, ...]  # of its leaves: the number of an input, or None for a residual of its own

    @property
    def used(self) -> list[int]:
        """Return the inputs that backward needs."""
        return sorted({source for source in self.sources if source is not None})

    def __call__(self, inputs: list[Any], own: list[Any]) -> Any:
        """Return the pullback, from the used inputs and its own residuals."""
        import jax

        by_number, rest = dict(zip(self.used, inputs, strict=True)), iter(own)
        return jax.tree.unflatten(self.pull, [next(rest) if s is None else by_number[s] for s in self.sources])


def _linearize(fn: Callable[..., Any], tree: Any, wanted: tuple[bool, ...], inputs: list[Any]) -> Any:
    """Traced: fn's output leaves, a recipe, and the residuals that are no inputs (jit would copy those that are)."""
    import jax

    recipe: dict[str, Any] = {}

    def of_wanted(*chosen: Any) -> tuple[list[Any], list[Any]]:
        rest = iter(chosen)
        args, kwargs = jax.tree.unflatten(tree, [next(rest) if w else a for a, w in zip(inputs, wanted, strict=True)])
        leaves, recipe["outputs"] = jax.tree.flatten(fn(*args, **kwargs))
        leaves = [jax.numpy.asarray(leaf) for leaf in leaves]
        flags = tuple(bool(jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)) for leaf in leaves)
        recipe["differentiable"] = flags
        return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag], leaves

    chosen = [a for a, w in zip(inputs, wanted, strict=True) if w]
    _, pull, leaves = jax.vjp(of_wanted, *chosen, has_aux=True)
    residuals, pull_tree = jax.tree.flatten(pull)
    number = {id(a): i for i, a in enumerate(inputs)}
    sources = tuple(number.get(id(r)) for r in residuals)
    own = [r for r, source in zip(residuals, sources, strict=True) if source is None]
    # A Partial crosses jit with its function as static data.
    return leaves, jax.tree_util.Partial(_Recipe(pull=pull_tree, sources=sources, **recipe)), own


def _pull_back(recipe: Any, inputs: list[Any], own: list[Any], dys: list[Any]) -> Any:
    """Traced: the gradients of the wanted inputs. PyTorch's complex gradients are the conjugates of JAX's."""
    import jax

    conj = functools.partial(jax.tree.map, jax.numpy.conj)
    return conj(recipe(inputs, own)(conj(dys)))


def _crosses(residual: "jax.Array") -> bool:
    """Return whether it can be kept as a tensor; keys of jax.random, 4-bit numbers and arrays on several devices cannot."""
    return residual.dtype.name in DTYPES and len(residual.devices()) == 1


@dataclass(frozen=True, eq=False)
class _BridgeCall:
    """The state of one call that backward needs besides the saved tensors."""

    backward: Callable[..., Any]
    recipe: Any
    stay: list[Any]  # residuals that no tensor can hold; None where a saved tensor does
    wanted: tuple[bool, ...]
    x64: bool  # these two are the thread's settings; backward may run where they differ
    precision: Any


class _Node(torch.autograd.Function):
    """Hangs the outputs, which JAX has computed already, into PyTorch's graph."""

    @staticmethod
    def forward(ctx: Any, call: _BridgeCall, outputs: tuple[Tensor, ...], saved: list[Tensor], *inputs: Tensor) -> Any:
        recipe = call.recipe.func
        ctx.call = call
        # The inputs among the residuals, so that changes in place are noticed; then what only JAX knows.
        ctx.save_for_backward(*(inputs[i] for i in recipe.used), *saved)
        return outputs

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        import jax

        call, recipe = ctx.call, ctx.call.recipe.func
        if torch.is_grad_enabled():
            advice = "Differentiate twice inside fn, with jax.grad."
            raise UnsupportedError(error_text("jax_function", "create_graph", "False in backward", True, advice=advice))
        with jax.enable_x64(call.x64), jax.default_matmul_precision(call.precision):
            saved = [to_jax(tensor) for tensor in ctx.saved_tensors]
            inputs, rest = saved[: len(recipe.used)], iter(saved[len(recipe.used) :])
            own = [next(rest) if r is None else r for r in call.stay]
            wanted_dys = [to_jax(dy) for dy, d in zip(dys, recipe.differentiable, strict=True) if d]
            grads = iter(call.backward(call.recipe, inputs, own, wanted_dys))
            return None, None, None, *(to_torch(next(grads)) if w else None for w in call.wanted)
