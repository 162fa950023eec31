"""Modules inside fn that an engine shards over ranks: FSDP2 units are gathered once around the loop over shards.

Left alone, every shard would gather and scatter on its own, and ranks with different shard counts would wait for each
other forever. So each unit's hooks run once: before the first shard, after the last one, before and after backward.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.errors import UnsupportedError, refusal_text
from tiled_torch.core.partitioned import refuse_called
from tiled_torch.tile.captures import owner


class Units:
    """The FSDP2 units that run inside fn.

    Their hooks are those that `register_fsdp_forward_method` runs around a method; the token stands in for fn's inputs
    and the anchors for its outputs. So a unit's hooks cast only the inputs of that unit.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self.states: list[tuple[nn.Module, Any]] = []
        self.refused: list[nn.Module] = []
        self.loaded = _engine_loaded()
        if not self.loaded:
            return
        self.allowed = [*_units_of(fn), *filter(None, [_outer(fn)])]
        states: dict[int, tuple[nn.Module, Any]] = {}
        for unit in _units_of(fn):
            state = unit._get_fsdp_state()  # type: ignore[operator]
            states.setdefault(id(state), (unit, state))
        self.states = list(states.values())
        for unit, state in self.states:
            _check_policy(unit, state)
        self.refused = [module for module in modules if _is_engine(module) and module not in self.allowed]

    def check(self, module: nn.Module) -> None:
        """Refuse a module that fn calls and that communicates, but is not one of the units: UnsupportedError."""
        refuse_called(module)
        if self.loaded and _is_engine(module) and module not in self.allowed:
            _refuse(module, None)

    def open(self, device: torch.device) -> Tensor | None:
        """Gather every unit. Return a token whose gradient, computed last, makes each unit reduce its gradients."""
        if not self.states:
            return None
        token = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        for unit, state in self.states:
            (token,), _ = state._pre_forward(unit, (token,), {})
        return token

    def close(self, anchors: Sequence[Tensor]) -> None:
        """Free the units. The gradients of the anchors gather them again before backward."""
        for unit, state in reversed(self.states):
            state._post_forward(unit, (), tuple(anchors))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the units' hooks from gathering and freeing while shards run: FSDP2's own state for recomputation."""
        with ExitStack() as stack:
            for module in self.refused:
                stack.callback(module.register_forward_pre_hook(_refuse).remove)
            before = [(state, state._training_state) for _, state in self.states]
            for state, training_state in before:
                state._training_state = type(training_state).PRE_BACKWARD
            try:
                yield
            finally:
                for state, training_state in before:
                    state._training_state = training_state


def _engine_loaded() -> bool:
    return "torch.distributed.fsdp" in sys.modules and torch.distributed.is_initialized()


def _units_of(fn: Callable[..., Any]) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    module = owner(fn)
    if module is None:
        return []
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit is not _outer(fn)]


def _outer(fn: Callable[..., Any]) -> nn.Module | None:
    """Return the module whose forward method fn is: its own hooks have already run around the call."""
    module = owner(fn)
    return None if module is fn else module


def _is_engine(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    return isinstance(module, FSDPModule | FullyShardedDataParallel | DistributedDataParallel)


def _refuse(module: nn.Module, _: Any) -> None:
    advice = (
        "Wrap the module that calls the tiled function, or pass tile() the nn.Module that holds the fully_shard units."
    )
    raise UnsupportedError(
        refusal_text("tile", f"fn calls {type(module).__name__}, which communicates for every shard", advice=advice)
    )


def _check_policy(unit: nn.Module, state: Any) -> None:
    """Refuse a policy of older releases, which do not cast a unit's inputs in the state that `paused` sets."""
    policy = state._mp_policy
    if not (policy.cast_forward_inputs and policy.param_dtype) or hasattr(state, "_cast_forward_inputs"):
        return
    advice = "Use a newer torch, or apply the policy to the module that calls the tiled function."
    wrong = f"torch {torch.__version__} cannot apply the mixed precision policy of {type(unit).__name__} inside fn"
    raise UnsupportedError(refusal_text("tile", wrong, advice=advice))
