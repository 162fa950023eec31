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

from shared_specs.errors import fail, fail_with, show_shape
from tiled_torch.core.partitioned import refuse_parts

Edge = tuple[Node, int]
Home = tuple[dict[Any, Any], Any]  # a table of a module, or of cached parametrizations, and a name in it


_KINDS = (nn.Module, Tensor, MethodType, functools.partial, FunctionType, list, tuple, dict)
_MANY = 64  # longer containers are data, and are not looked through


@dataclass(frozen=True)
class Capture:
    """A tensor that fn reaches: a leaf, or one with a history that a module holds (a substituted weight, FSDP1's views)."""

    tensor: Tensor
    homes: tuple[Home, ...] = ()


def owner(fn: Callable[..., Any]) -> nn.Module | None:
    """Return the module whose parameters fn may reach: fn itself, or the module whose forward method it is."""
    if isinstance(fn, nn.Module):
        return fn
    if isinstance(fn, MethodType) and isinstance(fn.__self__, nn.Module) and fn.__name__ == "forward":
        return fn.__self__
    return None


def modules_of(fn: Any) -> list[nn.Module]:
    """Return modules that fn can be seen to use without running it: itself, its object, its closure, defaults and globals.

    `probe` finds all others that it calls.
    """
    found = (item for item in _used_by(fn) if isinstance(item, nn.Module))
    return list(dict.fromkeys(module for item in found for module in item.modules()))


def tensors_of(fn: Any) -> list[Tensor]:
    """Return the tensors that a function can be seen to use, in the same places."""
    return [item for item in _used_by(fn) if isinstance(item, Tensor)]


def _used_by(fn: Any, depth: int = 4) -> Iterator[Any]:
    """Yield modules and tensors, looked for in functions and in plain containers."""
    found: Iterable[Any] = ()
    match fn:
        case nn.Module() | Tensor():
            yield fn
        case MethodType():
            found = [fn.__self__, fn.__func__]
        case functools.partial():
            found = [fn.func, *fn.args, *fn.keywords.values()]
        case FunctionType():
            cells = [cell.cell_contents for cell in fn.__closure__ or () if _is_filled(cell)]
            defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
            names = (name for name in _names(fn.__code__) if name in fn.__globals__)
            found = [*cells, *defaults, *(fn.__globals__[name] for name in names)]
        case list() | tuple() if len(fn) <= _MANY:
            found = fn
        case dict() if len(fn) <= _MANY:
            found = fn.values()
    for item in found if depth else ():
        if isinstance(item, _KINDS):
            yield from _used_by(item, depth - 1)


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


def derived_attributes(tables: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]) -> dict[Edge, list[Home]]:
    """Tensors with a history that modules hold, by their place in the graph. tables: each with a copy to look into."""
    found: dict[Edge, list[Home]] = {}
    for table, copy in tables:
        for name, value in copy.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                found.setdefault((value.grad_fn, value.output_nr), []).append((table, name))
    return found


def now() -> int:
    """Return the age at which the next node of this thread's graph is born."""
    return _get_sequence_nr()


def reached(results: Sequence[Tensor], derived: Iterable[Edge], since: int) -> tuple[list[Tensor], list[Edge]]:
    """Return the leaves and the derived attributes that results depend on; SpecError at any other older node.

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
            _refuse_outside_graph(node)
        ahead.extend((after, i) for after, i in node.next_functions if after is not None)
    return list(leaves.values()), list(edges)


def _refuse_outside_graph(node: Node) -> None:
    rule = "a leaf or an argument of fn"
    advice = "Pass it to the tiled function as an argument; its gradient is then returned."
    got = f"the result of {node.name()}, computed outside fn"
    fail("tile", "a captured tensor that requires grad", rule, got, advice=advice)


def captures_of(
    parameters: Iterable[Tensor],
    leaves: Sequence[Tensor],
    edges: Iterable[Edge],
    derived: dict[Edge, list[Home]],
    own: Sequence[Tensor],
) -> list[Capture]:
    """Return every trainable one of the parameters and whatever else the probe reached, each once, without fn's arguments.

    parameters: of fn's own module and of those that the probe called. One that the probe did not reach may be reached by a
    later shard (an expert that no probed token chose).
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    refuse_parts(leaves)
    # An engine may put a tensor with a history in a parameter's place; it is told from a leaf by its edge.
    edges = dict.fromkeys([*edges, *((p.grad_fn, p.output_nr) for p in parameters if p.grad_fn is not None)])
    arguments = {id(tensor) for tensor in own}
    found = {id(leaf): leaf for leaf in (*parameters, *leaves) if leaf.grad_fn is None and id(leaf) not in arguments}
    homes = [tuple(derived[edge]) for edge in edges]
    return [*map(Capture, found.values()), *(Capture(h[0][0][h[0][1]], h) for h in homes)]


def refuse_late(results: Sequence[Tensor], known: Sequence[Tensor], since: int) -> None:
    """Raise SpecError if results depend on a leaf that is not known: its gradient would be lost."""
    ids = {id(tensor) for tensor in known}
    for leaf in reached(results, (), since)[0]:
        if id(leaf) not in ids:
            advice = "Pass the nn.Module itself, whose parameters are all known in advance."
            shape = show_shape(tuple(leaf.shape))
            fail_with("tile", f"only a later shard of fn reached a tensor of shape {shape}", advice=advice)


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
