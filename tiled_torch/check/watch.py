"""What a model does in a step, seen from outside, in ways that do not change which path its tiled parts take."""

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from shared_specs.check.trained import Value

# Names that wrappers put into those of what they wrap: DDP, torch.compile, checkpointing and `tile`, FSDP1.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_LIBRARIES = ("torch.", "transformers.", "accelerate.", "deepspeed.")


def plain_name(name: str) -> str:
    """Return the name of a module or a parameter as the model has it without wrappers."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] else parts)


def as_value(tensor: Any) -> Value:
    """Return a copy of a tensor, whole where ranks have parts of it."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    kept = whole.detach().cpu()
    dtype = str(kept.dtype).removeprefix("torch.")
    array = kept.float() if dtype in ("bfloat16", "float16") else kept
    return Value(np.array(array.numpy()), dtype)


def count_hooks(model: nn.Module, counts: dict[str, int]) -> None:
    """Let every hook that somebody put on a module or a parameter count in `counts` how often it runs.

    A forward hook does not count where backward computes the forward again.
    """
    for name, module in model.named_modules():
        for kind in _HOOKS:
            hooks: dict[int, Callable[..., Any]] = getattr(module, kind)
            for number, hook in hooks.items():
                if not getattr(hook, "__module__", "").startswith(_OF_LIBRARIES):
                    hooks[number] = _counted(hook, f"{name or 'the model'}, {_title(hook)}", counts, "forward" in kind)
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or {}
        for number, hook in hooks.items():
            hooks[number] = _counted(hook, f"{name}, {_title(hook)}", counts, False)


def _title(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__)).strip("<>")


def _counted(hook: Callable[..., Any], name: str, counts: dict[str, int], forward: bool) -> Callable[..., Any]:
    counts[name] = 0

    @functools.wraps(hook)
    def counted(*given: Any, **more: Any) -> Any:
        counts[name] += not (forward and torch._C._current_graph_task_id() >= 0)
        return hook(*given, **more)

    return counted


class Observer(AbstractContextManager["Observer"]):
    """Keeps the first result of each module in a step, the order in which gradients come, and how often each one does.

    Args:
        model: as it is trained. paths: `tiling_paths` of it: what is inside of these parts is not called by itself.
        hooks: where `count_hooks` counts.
    """

    def __init__(self, model: nn.Module, paths: Mapping[str, str], hooks: dict[str, int]) -> None:
        self.forward: dict[str, Value] = {}
        self.given: dict[str, Value] = {}
        self.hooks = hooks
        self.order: dict[str, None] = {}
        self._handles: list[Any] = []
        self._model, self._apart = model, tuple(f"{name}." for name in paths if name)
        self._tiled = {name for name in paths if name}

    def __enter__(self) -> Self:
        self.forward.clear()
        self.given.clear()
        self.order.clear()
        self.hooks.update(dict.fromkeys(self.hooks, 0))
        for name, module in self._watched():
            self._handles.append(module.register_forward_hook(self._keep(plain_name(name))))
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "full_tensor"):
                key = plain_name(name)
                self.hooks[key] = 0
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._count(key)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _watched(self) -> Iterable[tuple[str, nn.Module]]:
        """Return the modules that tiling does not take apart: not a head either, whose logits may never be made."""
        for name, module in self._model.named_modules():
            head = name in self._tiled and not list(module.children())
            inside = name.startswith(self._apart) or any(part in name.split(".") for part in _WRAPPERS)
            if plain_name(name) and not head and not inside:
                yield name, module

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) and result else result
            if name not in self.forward and isinstance(first, Tensor):
                self.forward[name] = as_value(first)
                if given and isinstance(given[0], Tensor):
                    self.given[name] = as_value(given[0])

        keep.__module__ = __name__
        return keep

    def _count(self, name: str) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:  # also of one that no gradient has come to
            self.hooks[name] += parameter.grad is not None
            self.order.pop(name, None)
            self.order[name] = None

        return fired
