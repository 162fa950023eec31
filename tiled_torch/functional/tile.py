"""`tile`: any token-wise module or function, computed shard by shard and recomputed in backward, exactly.

Two autograd nodes, as for `tiled_mlp`. `Save` keeps the arguments, takes every other tensor that fn reaches as an input
and owns the backward; its outputs are anchors, one element seen in the shape of each result. `Run` computes the results
and hands their gradients to the anchors. Non-reentrant checkpointing stops its replay at `Save`, before the loop.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shared_specs import checks
from shared_specs.config import Tiling
from shared_specs.errors import UnsupportedError, fail, fail_type
from shared_specs.shards import plan_tokens
from tiled_torch.functional import replay, rows
from tiled_torch.functional.call import Call


def tile(fn: Callable[..., Any], *, num_shards: int | None = None, tiling: Tiling | None = None) -> Callable[..., Any]:
    """A function of the same arguments that computes fn shard by shard, with exact gradients.

    fn(x)[rows] = fn(x[rows]) is what makes a function token-wise, and is not checked. Of what fn computes only one
    shard exists at a time; backward runs fn again, shard by shard, on the same random numbers and autocast state, with
    its modules in the mode that forward found, and without a second write to buffers.

    A shard of x is [1, t, H] where x has three or more dims, and [t, H] where it has two. Other tensor arguments with
    x's leading dims are cut the same way, unless they are nn.Parameters; every other argument is passed whole. Results
    may be any nested structure of tensors [1, t, ...] or [t, ...] and of None; they come back as [*leading dims, ...]
    or [T, ...].

    Besides its arguments fn may reach leaves (parameters), in a module or in a closure: they are found by running fn on
    the first two tokens, and receive one gradient each, or a sum in `main_grad` where they have it. A module's
    trainable parameters are known without that, so experts that no first token chose get theirs too. Modules that
    fully_shard wraps inside fn are gathered once for the whole loop, and their gradients are reduced once.

    That run also shows, however fn reaches them, the modules that fn calls, the generators (`generator=`) that it draws
    from and the plain tensors that PyTorch's operations write in place. Not seen, and so not put back for backward, are
    what only later tokens reach outside fn's own modules, and other writes: to Python numbers, or by kernels of others.

    Under torch.compile a tiled function runs as it is, between two compiled graphs, so fullgraph=True around it cannot
    work. `tiled_mlp` and the modules of `tile_model` compile whole.

    Args:
        fn: an nn.Module (called, so its hooks run, once per shard) or a function; its first argument is x.
        num_shards: at most this many shards of T, >= 1; None lets the plan choose. See shared_specs.shards.
        tiling: the long form: num_shards or shard_tokens. keep and memory_budget do not apply.
    Returns:
        A callable. Its x is [T, H] or [B, S, H] (any leading dims); T = 0 runs fn once without tokens.
    Numerics: gradients of what shards share are summed in float32 (float64 for float64) and cast once.
    Memory: keeps the tensor arguments; peak is what fn needs for one shard, plus the float32 sums and, while fn runs a
        second time, a copy of its modules' buffers and of plain tensors that it writes. Checkpointing outside does not
        replay the loop if nothing after it in the checkpointed region saves a tensor.
    Raises:
        TypeError: fn cannot be called, x is no tensor, a result is neither a tensor nor None.
        SpecError: x has less than two dims; a result has no row per token; fn reaches a tensor that requires grad and
            was computed outside fn, or, in backward, a leaf that it did not reach before.
        UnsupportedError: backward with create_graph=True; torch.func; a DTensor argument or result; FSDP1, DDP or
            ZeRO-3 inside fn; a CUDA graph that is being captured.
    Source: derived in shared_specs/README.md; the sharding idea is DeepSpeed's ALST (arXiv 2506.13996).
    Example:
        >>> import torch
        >>> from torch import nn
        >>> experts = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tile(experts, num_shards=4)(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """
    if not callable(fn):
        fail_type("tile", "fn", "a module or a function", type(fn).__name__)
    unused = ("vocab_shards", "deterministic")
    tiling = checks.resolve_tiling("tile", num_shards, 0.0, tiling, unused=unused)
    if tiling.keep:
        fail("tile", "keep", "0", tiling.keep, advice="A generic function has no gate and up to keep.")
    if tiling.memory_budget is not None:
        advice = "The bytes of a generic function are unknown; pass num_shards or shard_tokens."
        fail("tile", "memory_budget", "None", tiling.memory_budget, advice=advice)
    return Tiled(fn, tiling)


class Tiled:
    """What `tile` returns. function: the public function called, for its messages."""

    def __init__(self, fn: Callable[..., Any], tiling: Tiling, function: str = "tile") -> None:
        self.fn, self.tiling, self.function = fn, tiling, function

    def __repr__(self) -> str:
        return f"tile({self.fn!r}, tiling={self.tiling!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:  # someone compiles: this call stays as it is, between two compiled graphs
            return torch.compiler.disable(self._run)(*args, **kwargs)
        return self._run(*args, **kwargs)  # torch.compiler would take seconds to load, for nothing

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        replay.refuse_transforms(self.function, "fn")
        layout, tensors = rows.split(self.fn, args, kwargs, function=self.function)
        device = tensors[layout.rowed.index(True)].device
        plan = plan_tokens(
            layout.tokens,
            num_shards=self.tiling.num_shards,
            shard_tokens=self.tiling.shard_tokens,
            device="cpu" if device.type == "cpu" else "gpu",
        )
        call = Call(self.fn, layout, plan, tensors, device)
        token = call.units.open(device)
        with torch.no_grad():
            flat = layout.flat(tensors)
        if torch.is_grad_enabled() or call.units.loaded:  # the probe also sees who would communicate
            call.probe(flat)
        anchors: tuple[Tensor, ...] = ()
        if any(call.differentiable):
            anchors = Save.apply(call, token, *tensors, *(capture.tensor for capture in call.captures))
            results = _with_none(call, Run.apply(call, flat, *anchors))
        else:
            results = call.forward(flat)
        call.units.close(anchors)
        assert call.spec is not None
        return pytree.tree_unflatten(results, call.spec)


def _with_none(call: Call, results: tuple[Tensor, ...]) -> list[Tensor | None]:
    given = iter(results)
    return [None if form is None else next(given) for form in call.forms]


class Save(torch.autograd.Function):
    """Packs the arguments; owns the backward. Outputs: one anchor for each differentiable result."""

    @staticmethod
    def forward(ctx: Any, call: Call, token: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Arguments: fn is computed again from them. What fn captures it finds by itself; versions guard it.
        ctx.save_for_backward(*tensors[: len(call.needs)])
        pairs = zip(call.forms, call.differentiable, strict=True)
        return tuple(form.anchor() for form, differentiable in pairs if form and differentiable)

    @staticmethod
    def backward(ctx: Any, *danchors: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        token = torch.zeros((), device=call.device) if ctx.needs_input_grad[1] else None
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{call.layout.function}: create_graph must be False in backward, got True. The recomputed backward has no "
                "second derivative; differentiate fn itself, or use tiled_jax."
            )
        if all(danchor is None for danchor in danchors):
            return (None, token, *(None for _ in ctx.needs_input_grad[2:]))
        return (None, token, *call.backward(ctx.saved_tensors, danchors))


class Run(torch.autograd.Function):
    """Computes the results from detached operands; saves nothing and hands their gradients to the anchors."""

    @staticmethod
    def forward(ctx: Any, call: Call, flat: list[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
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
