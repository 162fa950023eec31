"""Which tensors a function reaches besides its arguments, closures included: found in the autograd graph of a call.

What is found becomes an input of the autograd function, so its gradient is returned once instead of being added to
`.grad` as a side effect of every shard.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # torch offers no public name for a node's age
from torch.autograd.graph import Node

from shared_specs.errors import UnsupportedError, error_text, fail, show_shape

Edge = tuple[Node, int]
Home = tuple[nn.Module, str]


@dataclass(frozen=True)
class Capture:
    """A tensor that fn reaches: a leaf, or a module's attribute that an engine computes from one (FSDP1's views)."""

    tensor: Tensor
    version: int
    homes: tuple[Home, ...] = ()

    def target(self) -> Tensor:
        """What a shard is differentiated by.

        The leaf itself; or a leaf that takes the attribute's place, so that nothing is differentiated beyond it.
        """
        if self.homes:
            return getattr(*self.homes[0]).detach().requires_grad_()
        if self.tensor._version != self.version:
            shape = show_shape(tuple(self.tensor.shape))
            got = f"one of shape {shape} that was written to between forward and backward"
            raise RuntimeError(error_text("tile", "a tensor that fn reaches", "left as it was", got))
        return self.tensor


@contextmanager
def in_place(captures: Sequence[Capture], targets: Sequence[Tensor]) -> Iterator[None]:
    """Targets stand in their attributes' places."""
    before = []
    try:
        for capture, target in zip(captures, targets, strict=True):
            for module, name in capture.homes:
                table: dict[str, Any] = module._parameters if name in module._parameters else vars(module)  # type: ignore[assignment]
                before.append((table, name, table[name]))
                table[name] = target
        yield
    finally:
        for table, name, value in reversed(before):
            table[name] = value


def owner(fn: Callable[..., Any]) -> nn.Module | None:
    """The module whose parameters fn may reach: fn itself, or the module whose forward method it is."""
    if isinstance(fn, nn.Module):
        return fn
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module) and fn.__name__ == "forward":
        return fn.__self__
    return None


def modules_of(fn: Any, depth: int = 4) -> list[nn.Module]:
    """Modules that fn can be seen to use without running it: itself, its object, its closure, defaults and globals.

    `watch` finds all others that it calls.
    """
    if isinstance(fn, nn.Module):
        return list(fn.modules())
    if depth == 0:
        return []
    found: list[Any] = []
    match fn:
        case MethodType():
            found = [fn.__self__, fn.__func__]
        case functools.partial():
            found = [fn.func, *fn.args, *fn.keywords.values()]
        case FunctionType():
            cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
            defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
            found = [
                *cells,
                *defaults,
                *(fn.__globals__[name] for name in _names(fn.__code__) if name in fn.__globals__),
            ]
    kinds = (nn.Module, MethodType, functools.partial, FunctionType)
    nested = (module for item in found if isinstance(item, kinds) for module in modules_of(item, depth - 1))
    return list(dict.fromkeys(nested))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def derived_attributes(modules: Iterable[nn.Module]) -> dict[Edge, list[Home]]:
    """Attributes of modules that are tensors with a history, by their place in the graph."""
    found: dict[Edge, list[Home]] = {}
    for module in modules:
        for name, value in (*vars(module).items(), *module._parameters.items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                found.setdefault((value.grad_fn, value.output_nr), []).append((module, name))
    return found


def now() -> int:
    """The age at which the next node of this thread's graph is born."""
    return _get_sequence_nr()


def reached(results: Sequence[Tensor], derived: Iterable[Edge], since: int) -> tuple[list[Tensor], list[Edge]]:
    """The leaves and the derived attributes that results depend on; SpecError at any other older node.

    Args:
        derived: edges at which to stop. since: `now()` before the function ran; older nodes are not the function's.
    """
    stops = set(derived)
    leaves = {id(r): r for r in results if r.grad_fn is None}
    edges: dict[Edge, None] = {}
    ahead: list[Edge] = [(r.grad_fn, r.output_nr) for r in results if r.grad_fn is not None]
    seen: set[Node] = set()
    while ahead:
        node, number = ahead.pop()
        if (node, number) in stops:
            edges[node, number] = None
            continue
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            leaves[id(node.variable)] = node.variable  # type: ignore[attr-defined]
        elif node._sequence_nr() < since:
            _refuse_history(node)
        ahead.extend((after, i) for after, i in node.next_functions if after is not None)
    return list(leaves.values()), list(edges)


def _refuse_history(node: Node) -> None:
    rule = "a leaf or an argument of fn"
    advice = "Pass it to the tiled function as an argument; its gradient is then returned."
    got = f"the result of {node.name()}, computed outside fn"
    fail("tile", "a captured tensor that requires grad", rule, got, advice=advice)


def captures_of(
    module: nn.Module | None,
    leaves: Sequence[Tensor],
    edges: Iterable[Edge],
    derived: dict[Edge, list[Home]],
    own: Sequence[Tensor],
) -> list[Capture]:
    """Every trainable parameter of the module and whatever else the probe reached, each once, without fn's arguments.

    A parameter that the probe did not reach may be reached by a later shard (an expert that no probed token chose).
    """
    parameters = [p for p in module.parameters() if p.requires_grad] if module is not None else []
    refuse_parted(leaves)
    # An engine may put a tensor with a history in a parameter's place; it is told from a leaf by its edge.
    edges = dict.fromkeys([*edges, *((p.grad_fn, p.output_nr) for p in parameters if p.grad_fn is not None)])
    arguments = {id(tensor) for tensor in own}
    found = {id(leaf): leaf for leaf in (*parameters, *leaves) if leaf.grad_fn is None and id(leaf) not in arguments}
    homes = [tuple(derived[edge]) for edge in edges]
    return [*(Capture(leaf, leaf._version) for leaf in found.values()), *(Capture(getattr(*h[0]), 0, h) for h in homes)]


def refuse_parted(parameters: Iterable[Tensor]) -> None:
    """ZeRO-3 fetches a parameter's data layer by layer, which would be once for every shard."""
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):
            advice = "Use ZeRO stage 0, 1 or 2, or fully_shard."
            raise UnsupportedError(error_text("tile", "a parameter of fn", "whole", "a ZeRO-3 part", advice=advice))


def refuse_late(results: Sequence[Tensor], known: Sequence[Tensor], since: int) -> None:
    """SpecError if results depend on a leaf that is not known: its gradient would be lost."""
    ids = {id(tensor) for tensor in known}
    for leaf in reached(results, (), since)[0]:
        if id(leaf) not in ids:
            advice = "Pass the nn.Module itself, whose parameters are all known in advance."
            got = f"one of shape {show_shape(tuple(leaf.shape))} that only a later shard reached"
            fail("tile", "fn", "seen to reach every tensor with its first tokens", got, advice=advice)


@contextmanager
def tensor_hooks_off(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks of `tensor.register_hook` stay silent: they belong to the summed gradient, not to each shard's part."""
    held = [(hooks, dict(hooks)) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in held:
            hooks.update(entries)
