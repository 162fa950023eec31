"""One call of the drop-in names: a function of a module, tiled; under ZeRO-3 its parameters are whole around all shards."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shared_specs.config import Tiling
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail_type
from tiled_torch.core.partitioned import held, is_partitioned
from tiled_torch.tile.api import Tiled
from tiled_torch.tile.call import Around, alone


def check_call(function: str, fn: Any, module: Any, x: Any, compute_params: Any) -> list[Tensor] | None:
    """Return the parameters that the caller names, None where it names none.

    Raises:
        TypeError: an argument of the wrong kind.
    """
    if not callable(fn):
        fail_type(function, "fn", "a function", type(fn).__name__)
    if not isinstance(x, Tensor):
        fail_type(function, "x", "an array", type(x).__name__)
    if compute_params is None:
        return None
    found = list(compute_params) if isinstance(compute_params, Iterable) else [compute_params]
    for parameter in found:
        if not isinstance(parameter, Tensor):
            fail_type(function, "compute_params", "None or parameters", type(parameter).__name__)
    return found


def tiled(
    function: str,
    fn: Callable[..., Any],
    arguments: Sequence[Tensor],
    shards: int,
    *,
    module: Any,
    compute_params: Sequence[Any] | None,
) -> Any:
    """Return fn(*arguments) computed in `shards` shards of rows.

    Args:
        function: the public call, for error messages.
        fn: of a shard of each argument; an nn.Module where all of its parameters are known to be used.
        module: the one that fn calls; its ZeRO-3 hooks are replaced by one gathering around all shards.
        compute_params: what is gathered then; None: all parameters of the module.
    """
    if shards is None:
        fail_type(function, "shards", "an integer", "None")
    checks.check_count(function, "shards", shards)
    around: Around = alone
    named = (
        compute_params if compute_params is not None else module.parameters() if isinstance(module, nn.Module) else ()
    )
    parts = [parameter for parameter in dict.fromkeys(named) if is_partitioned(parameter)]
    if parts:
        whole = GatheredAround(function, parts, module)
        x, *others = arguments
        around, arguments = whole, (whole.released_behind(x), *others)
    return Tiled(fn, Tiling(num_shards=shards), function, around)(*arguments)


class GatheredAround:
    """Parameters of ZeRO-3 that one call of a tiled function gathers around all of its shards, in forward and in backward.

    Backward keeps them whole until their gradients have arrived, since the engine reduces them there: until that of x has gone
    on, or, where x needs none, until backward is over.
    """

    def __init__(self, function: str, parts: Sequence[Any], module: Any) -> None:
        self.function = function
        self.parts = sorted(parts, key=lambda part: part.ds_id)  # the same order on every rank
        own = {id(part) for part in self.parts}
        inside = module.modules() if isinstance(module, nn.Module) else ()
        self.modules = [m for m in inside if all(id(p) in own for p in m._parameters.values() if is_partitioned(p))]
        self.open: list[Any] = []
        self.behind = False

    def released_behind(self, x: Tensor) -> Tensor:
        """Return x, behind whose gradient the parameters are in parts again."""
        self.behind = torch.is_grad_enabled() and x.requires_grad
        return _Release.apply(x, self) if self.behind else x

    @contextmanager
    def __call__(self, backward: bool) -> Iterator[None]:
        """Hold the parameters whole inside."""
        self._gather()
        try:
            with held(self.parts, self.modules):
                yield
        finally:
            if not backward:
                self.release()
            elif not self.behind:
                torch.autograd.Variable._execution_engine.queue_callback(self.release)

    def _gather(self) -> None:
        gone = [part for part in self.parts if part.ds_status.name != "AVAILABLE"]
        if any(part.ds_status.name == "INFLIGHT" for part in gone):
            advice = "Set stage3_prefetch_bucket_size to 0: the engine has not finished fetching it ahead for another module."
            raise UnsupportedError(
                error_text(self.function, "a parameter of ZeRO-3", "at rest", "one in flight", advice=advice)
            )
        if gone:
            gone[0].all_gather(param_list=gone)
            self.open += gone

    def release(self) -> None:
        """Leave each rank its part of what this call gathered."""
        opened, self.open = self.open, []
        if opened:
            opened[0].partition(param_list=opened, has_been_updated=False)


class _Release(torch.autograd.Function):
    """x itself; its gradient comes after those of the parameters."""

    @staticmethod
    def forward(x: Tensor, whole: GatheredAround) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.whole = inputs[1]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.whole.release()
        return dx, None


class OfModule(nn.Module):
    """A function of a module and of rows, as a module of its own: `tile` then knows every parameter of it in advance."""

    def __init__(self, fn: Callable[..., Any], module: nn.Module) -> None:
        super().__init__()
        self.fn, self.module = fn, module

    def forward(self, *arguments: Tensor) -> Any:
        return self.fn(self.module, *arguments)


def of_rows(fn: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return fn(module, ...) as a function of its other arguments."""
    if isinstance(module, nn.Module):
        return OfModule(fn, module)
    return lambda *arguments: fn(module, *arguments)
