"""`tile`: any token-wise module or function, computed shard by shard and recomputed in backward, exactly.

Two autograd nodes, as for `tiled_mlp`. `TileSave` keeps the arguments, takes every other tensor that fn reaches as an input
and owns the backward; its outputs are anchors, one element seen in the shape of each result. `TileRun` computes the results
and hands their gradients to the anchors. Non-reentrant checkpointing stops its replay at `TileSave`, before the loop.
"""

import sys
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph as _keeps_graph  # torch has no public name for it
from torch.utils import _pytree as pytree

from shared_specs.config import Tiling
from shared_specs.shards import ShardPlan, plan_tiling
from shared_specs.tile.checks import check_tile
from shared_specs.tile.token_layout import noting_what_broadcasts
from tiled_torch.core import replay
from tiled_torch.core.tensors import device_kind, refuse_second_order
from tiled_torch.tile import forward_mode, token_layout
from tiled_torch.tile.call import Around, TiledCall, alone
from tiled_torch.tile.module import Standing
from tiled_torch.tile.probe import Watch
from tiled_torch.tile.state import mode_of

Chosen = Callable[[], Tensor | None]
Allows = Callable[[Watch], bool]

_WHOLE = object()
_UNTILED = "; differentiate fn itself, or use tiled_jax."


@overload
def tile(fn: nn.Module, *, num_shards: int | None = None, tiling: Tiling | None = None) -> "TiledModule": ...


@overload
def tile(
    fn: Callable[..., Any], *, num_shards: int | None = None, tiling: Tiling | None = None
) -> Callable[..., Any]: ...


def tile(fn: Callable[..., Any], *, num_shards: int | None = None, tiling: Tiling | None = None) -> Callable[..., Any]:
    """Return a function with the same arguments that computes fn shard by shard, with exact gradients. For a module: a module.

    fn must be token-wise: fn(x)[rows] = fn(x[rows]). `tile` does not check this. Only one shard of fn's intermediate results
    exists at a time. Backward runs fn again, shard by shard, with the same random numbers and autocast state. Each shard
    sees its modules in the same state as in forward: mode, buffers, attributes, and weights from `functional_call`.
    Afterwards that state is restored. A tensor that fn reads but does not write must not change before backward. If it
    does, autograd raises its own error.

    A shard of x is [1, t, H] where x has three or more dims, and [t, H] where it has two. Other tensor arguments with
    x's leading dims are cut the same way, unless they are nn.Parameters; every other argument is passed whole. Results
    may be any nested structure of tensors [1, t, ...] or [t, ...] and of None; they come back as [*leading dims, ...]
    or [T, ...].

    Besides its arguments, fn may use leaves (parameters) in a module or in a closure. `tile` finds them by running fn on the
    first two tokens. Each receives one gradient, or a sum in `main_grad` if it has that buffer. A module's trainable
    parameters are known without this run, so experts that no first token chose get gradients too. Modules that
    fully_shard wraps inside fn are gathered once for the whole loop, and their gradients are reduced once.

    The run also finds the modules that fn calls, the generators (`generator=`) that it draws from, and the plain tensors
    that PyTorch's operations write in place. It does not find modules outside fn that only later tokens reach. It also
    does not find writes to other Python objects or writes by other libraries' kernels. Backward does not restore these.

    Under torch.compile a tiled function runs uncompiled, between two compiled graphs. So fullgraph=True around it does not
    work. `tiled_mlp` and the modules of `tile_model` compile whole.

    Args:
        fn: an nn.Module or a function; its first argument is x. A module is called, so its hooks run once per shard.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. keep and memory_budget do not apply.
    Returns:
        For an nn.Module, a module that owns it and replaces it. It has the same `state_dict()` keys, attributes and items.
        Parameter names contain an extra `_checkpoint_wrapped_module`, as with PyTorch's checkpoint wrapper. For a function, a
        callable. Its x is [T, H] or [B, S, H] (any leading dims). If T = 0, fn runs once without tokens.
    Numerics: gradients of tensors that shards share are summed in float32 (float64 for float64) and cast once, or added to
        `main_grad`. A 16-bit `main_grad` gets the finished sum and is rounded once in each backward.
    Memory: keeps the tensor arguments. It also keeps a copy per shard of each tensor that fn writes, or one copy in all if the
        tensor is larger than 64 KiB. The peak is what fn needs for one shard, plus the float32 sums. Checkpointing outside does
        not replay the loop if nothing after it in the checkpointed region saves a tensor. Forward mode carries tangents shard
        by shard.
    Raises:
        TypeError: fn cannot be called, x is no tensor, a result is neither a tensor nor None.
        SpecError: x has less than two dims; a result has no row per token; fn uses a tensor that requires grad and was
            computed outside fn; in backward, fn uses a leaf that it did not use before; fn writes to its arguments; fn writes
            values that require grad to another tensor; fn writes only for later tokens what cannot be restored.
        RuntimeError: a tensor that fn reaches was written between forward and backward.
        UnsupportedError: backward with create_graph=True; torch.func; forward mode where a result requires grad; a
            DTensor argument or result; FSDP1 or DDP inside fn; a ZeRO-3 parameter that no leaf module around the call has
            gathered; a CUDA graph that is being captured.
    Source: derived in shared_specs/README.md; the sharding idea is DeepSpeed's ALST (arXiv 2506.13996).
    Example:
        >>> import torch
        >>> from torch import nn
        >>> experts = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tile(experts, num_shards=4)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """
    options = check_tile(fn, num_shards, tiling)
    return TiledModule(fn, options) if isinstance(fn, nn.Module) else Tiled(fn, options)


def tile_where(fn: Callable[..., Any], tiling: Tiling, allows: Allows | None) -> "Tiled":
    """Return `tile` of a function that runs by shards only where its run on the first tokens allows it: see `Tiled`."""
    return Tiled(fn, check_tile(fn, None, tiling), allows=allows)


class TiledModule(Standing):
    """The result of `tile` for a module."""

    def __init__(self, module: nn.Module, tiling: Tiling) -> None:
        super().__init__(module)
        self._tiling = tiling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Tiled(self._stands_for, self._tiling)(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"tiling={self._tiling!r}"


class Tiled:
    """The result of `tile` for a function. function: the public function called, for its messages. around: makes the context in
    which all shards run, of forward and, told True, of backward. chosen: makes the numbers of the tokens that are run, [n] in
    rising order, or None for all; results of the others are zeros, and so are their gradients. allows: says by what a run on
    the first tokens used whether fn may run by shards; if not it is called once with all tokens. None: it may.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tiling: Tiling,
        function: str = "tile",
        around: Around = alone,
        chosen: Chosen = lambda: None,
        allows: Allows | None = None,
    ) -> None:
        self.fn, self.tiling, self.function, self.around, self.chosen = fn, tiling, function, around, chosen
        self.allows = allows

    def __repr__(self) -> str:
        return f"tile({self.fn!r}, tiling={self.tiling!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:  # someone compiles: this call stays as it is, between two compiled graphs
            return torch.compiler.disable(self._run)(*args, **kwargs)
        return self._run(*args, **kwargs)  # torch.compiler would take seconds to load, for nothing

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        replay.refuse_transforms(self.function, "fn")
        layout, tensors = token_layout.split(self.fn, args, kwargs, function=self.function)
        whole = [tuple(t.shape) for t, rowed in zip(tensors, layout.rowed, strict=True) if not rowed]
        with mode_of(tensors), self.around(False), noting_what_broadcasts(layout, whole):
            found = self._run_split(layout, tensors)
        return self.fn(*args, **kwargs) if found is _WHOLE else found

    def _run_split(self, layout: token_layout.Layout, tensors: list[Tensor]) -> Any:
        """Return the results, or that fn has to be called with all tokens."""
        device = tensors[layout.rowed.index(True)].device
        plan, chosen = plan_shards(layout, self.tiling, device), None if forward_mode.active() else self.chosen()
        plan = plan if chosen is None else ShardPlan(chosen.numel(), plan.shard_tokens)
        call = TiledCall(self.fn, layout, plan, tensors, device, chosen)
        call.around = self.around
        token = call.units.open(device)
        with torch.no_grad():
            flat = layout.flat(tensors)
        if torch.is_grad_enabled() or call.units.loaded or self.allows:  # the probe also sees who would communicate
            watch = call.probe(flat)
            if self.allows is not None and not self.allows(watch):
                call.units.close(())
                return _WHOLE
        anchors: tuple[Tensor, ...] = ()
        if any(call.differentiable):
            anchors = TileSave.apply(call, token, *tensors, *(capture.tensor for capture in call.captures))
            results = _with_none(call, TileRun.apply(call, flat, *anchors))
        else:
            results = call.forward(flat)
        call.units.close(anchors)
        assert call.spec is not None
        return pytree.tree_unflatten(results, call.spec)


def plan_shards(layout: token_layout.Layout, tiling: Tiling, device: torch.device) -> ShardPlan:
    """Return the shards of the tokens of a call."""
    return plan_tiling(layout.tokens, tiling, device=device_kind(device))


def _with_none(call: TiledCall, results: tuple[Tensor, ...]) -> list[Tensor | None]:
    given = iter(results)
    return [None if form is None else next(given) for form in call.forms]


class TileSave(torch.autograd.Function):
    """Packs the arguments; owns the backward. Outputs: one anchor for each differentiable result."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, token: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Arguments: fn is computed again from them. What fn captures it finds by itself; versions guard it.
        ctx.save_for_backward(*tensors[: len(call.needs)], *call.derived())
        pairs = zip(call.forms, call.differentiable, strict=True)
        return tuple(form.anchor() for form, differentiable in pairs if form and differentiable)

    @staticmethod
    def backward(ctx: Any, *danchors: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, call = ctx.saved_tensors, ctx.call
        if not _keeps_graph():
            ctx.call = None  # with all that fn reaches, as autograd lets go of what it saves
        token = torch.zeros((), device=call.device) if ctx.needs_input_grad[1] else None
        refuse_second_order(call.layout.function, _UNTILED, "The recomputed backward")
        if all(danchor is None for danchor in danchors):
            return (None, token, *(None for _ in ctx.needs_input_grad[2:]))
        if forward_mode.active() and any(forward_mode.tangent_of(danchor) is not None for danchor in danchors):
            forward_mode.refuse(call.layout.function)
        own = len(call.needs)
        with mode_of(saved), call.around(True):
            return (None, token, *call.backward(saved[:own], saved[own:], danchors))


class TileRun(torch.autograd.Function):
    """Computes the results from detached operands; saves nothing and hands their gradients to the anchors."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, flat: list[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = call.forward(flat)
        pairs = list(zip(results, call.differentiable, strict=True))
        ctx.mark_non_differentiable(*(r for r, differentiable in pairs if r is not None and not differentiable))
        ctx.differentiable = [differentiable for r, differentiable in pairs if r is not None]
        return tuple(r for r in results if r is not None)

    @staticmethod
    def backward(ctx: Any, *dresults: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            None,
            None,
            *(d for d, differentiable in zip(dresults, ctx.differentiable, strict=True) if differentiable),
        )
