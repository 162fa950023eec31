"""Activations that backward computes again: with the named random streams, over tensor-parallel ranks, without an output."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks  # torch has no public name for it
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shared_specs.errors import error_text, fail, fail_type, fail_with
from tiled_torch.collectives import transport
from tiled_torch.collectives.consistency import agree, first_time
from tiled_torch.collectives.groups import RankGroup, not_compiled, rank_group
from tiled_torch.core import replay
from tiled_torch.layers.random import Snapshot, replay_contexts
from tiled_torch.tile import call as tile_call

_NAME = "CheckpointWithoutOutput"
_SAMPLES, _ALIKE = 64, 1 / 8  # numbers compared of each partitioned input; how far they may lie apart, of the largest
# Where the hooks of recomputed regions are defined.
_RECOMPUTING = (__name__, torch_checkpoint.__module__, tile_call.__name__)


@not_compiled
def checkpoint(
    fn: Callable[..., Any], *args: Any, partition_inputs: bool = False, group: Any = None, **kwargs: Any
) -> Any:
    """Return fn(*args, **kwargs) and keep only its inputs; backward recomputes the rest with the same random numbers.

    This is `torch.utils.checkpoint` (non-reentrant) with two additions. It restores the streams of every `RandomStates`, so
    dropout inside `fork` is the same in recomputation. It can keep 1/R of the inputs on each of R tensor-parallel ranks.
    torch.compile does not compile the call or fn: compile fn itself, or let `parallelize` do both.

    Args:
        fn: a module or a function.
        args, kwargs: of fn.
        partition_inputs: keep only this rank's part of the tensors among args, and gather them in backward. The tensors must
            be the same on every rank of the group, so do not use it for a sequence-parallel region, whose tensors are parts
            already. Shapes and some of the numbers are compared at the first call of a group with these shapes. All ranks must
            run backward through the same calls in the same order. Parameters, small tensors and keyword arguments are kept
            whole.
        group: the ranks among which inputs are partitioned: a process group, a DeviceMesh of one dim, or None for the
            default group.
    Returns:
        What fn returns.
    Numerics: bitwise equal to fn without checkpointing, if fn is deterministic.
    Memory: the tensor arguments. With partition_inputs, 1/R of their bytes (rounded up) between forward and backward; in
        backward the arguments of two successive calls are whole at a time.
    Raises:
        TypeError: fn is not callable. SpecError, UnsupportedError: group is given but not used, or cannot be used;
            UnsupportedError while a CUDA graph is captured. SpecError on every rank: the inputs to partition are not the same
            on all ranks.
    Source: sublinear memory: Chen et al., arXiv 1604.06174; partitioned inputs: Megatron-LM, arXiv 2104.04473.
    Example:
        >>> layer, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
        >>> checkpoint(layer, x).shape
        torch.Size([2, 8])
    """
    if not callable(fn):
        fail_type("checkpoint", "fn", "a module or a function", type(fn).__name__)
    replay.refuse_capture("checkpoint")
    if not partition_inputs and group is not None:
        fail("checkpoint", "group", "left out unless partition_inputs is True", type(group).__name__)
    with _parted("checkpoint", group, args) if partition_inputs else nullcontext():
        return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=replay_contexts, **kwargs)


def _parted(function: str, group: Any, args: Sequence[Any]) -> AbstractContextManager[Any]:
    """Saved tensors are kept in parts. Around `torch_checkpoint`, which inside has hooks of its own, they are its inputs."""
    ranks = rank_group(function, group)
    if not ranks.several or not torch.is_grad_enabled():
        return nullcontext()
    _check_alike(ranks, [a.detach() for a in args if _is_parted(a, ranks)])
    return saved_tensors_hooks(lambda tensor: _part(tensor, ranks), _whole)


@not_compiled
def _check_alike(ranks: RankGroup, inputs: Sequence[Tensor]) -> None:
    """Refuse inputs that ranks do not share, where a group meets their shapes for the first time.

    Numbers of theirs are compared with room for roundings, which reductions of different orders may leave.
    """
    shapes = tuple((tuple(a.shape), a.dtype) for a in inputs)
    with first_time(ranks, (ranks.function, shapes)) as new:
        if not new or not inputs:
            return
        agree(ranks, inputs[0].device, {"the shapes of partitioned inputs": shapes})
        samples = [_samples(a).to(inputs[0].device, torch.float32) for a in inputs]
        found = transport.all_gather(ranks, torch.cat(samples)[None], 0).wait()
        for numbers in found.split([a.numel() for a in samples], 1):
            if bool(((numbers - numbers[0]).abs() > _ALIKE * numbers.abs().amax()).any()):
                advice = "Inputs of a sequence-parallel region are parts already: leave partition_inputs out."
                fail_with(ranks.function, "partitioned inputs differ between the ranks", advice=advice)


def _samples(a: Tensor) -> Tensor:
    """Return a few numbers of a, evenly spread."""
    part = a.reshape(-1)[:: max(1, a.numel() // _SAMPLES)][:_SAMPLES]
    return torch.view_as_real(part).reshape(-1) if part.is_complex() else part


class _KeptPart:
    """This rank's part of a flattened tensor."""

    def __init__(self, tensor: Tensor, ranks: RankGroup) -> None:
        size = -(-tensor.numel() // ranks.size)
        flat = tensor.detach().reshape(-1)[ranks.rank * size : (ranks.rank + 1) * size]
        self.local = flat.new_zeros(size)
        self.local[: flat.numel()] = flat
        self.shape, self.requires_grad, self.ranks = tensor.shape, tensor.requires_grad, ranks


def _is_parted(value: Any, ranks: RankGroup) -> bool:
    return type(value) is Tensor and value.numel() >= ranks.size


def _part(tensor: Tensor, ranks: RankGroup) -> Tensor | _KeptPart:
    return _KeptPart(tensor, ranks) if _is_parted(tensor, ranks) else tensor


def _whole(kept: Tensor | _KeptPart) -> Tensor:
    if not isinstance(kept, _KeptPart):
        return kept
    whole = transport.all_gather(kept.ranks, kept.local, 0).wait()
    return whole[: kept.shape.numel()].view(kept.shape)


class CheckpointWithoutOutput:
    """A checkpointed call that also discards its output after use and recomputes it for backward.

    The next operation keeps the output, its input, for its own backward. If the output is cheap to compute, such as a norm
    or an activation before a large product, it is most of the memory that is kept.

        call = CheckpointWithoutOutput()
        h = call.checkpoint(activation, x)
        y = down(h)
        call.discard_output_and_register_recompute(y)

    The hook on y computes fn once more before the backward of y needs h; the same computation serves fn's own backward.
    Random numbers, named streams and autocast are those of forward.

    Inside a region that is recomputed as a whole (`checkpoint`, `tile`, another call of this kind), fn runs unchanged and
    nothing is discarded, because that region keeps neither. Other hooks on saved tensors (offloading) would move the output
    instead of discarding it. They are refused.

    Memory: the inputs of fn; neither its activations nor its output. An object serves one call.
    Source: Megatron-LM's checkpointing without output storage; derived in shared_specs/README.md.
    """

    retains_inputs = False  # whether an output that shares the memory of an argument is kept, instead of refused

    def __init__(self) -> None:
        self._call: _CheckpointCall | None = None
        self._outputs: list[Tensor] = []
        self._kept: set[int] = set()  # numbers of those that are not discarded
        self._inside = False

    @not_compiled
    def checkpoint(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return fn(*args) without keeping its activations. The result is a tensor or any nested structure of tensors.

        Raises:
            TypeError: fn is not callable. SpecError: this object has already run a call, or the call is inside hooks on saved
                tensors that do not belong to recomputation.
        """
        if not callable(fn):
            fail_type(f"{_NAME}.checkpoint", "fn", "a module or a function", type(fn).__name__)
        if self._outputs:
            advice = "Make a new one for every call."
            fail_with(f"{_NAME}.checkpoint", "this object has been used for a call before", advice=advice)
        self._inside = _recomputed(_top_hooks(True))  # type: ignore[call-arg]
        self._call = _CheckpointCall(fn, args) if torch.is_grad_enabled() and not self._inside else None
        with self._call.dropping() if self._call is not None else nullcontext():
            results = fn(*args)
        self._outputs = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        given = {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
        outputs = enumerate(self._outputs)
        self._kept = {number for number, output in outputs if output.untyped_storage()._cdata in given}
        if self._kept and not self.retains_inputs:
            self._outputs = []
            advice = "Return a copy of it."
            fail_with(f"{_NAME}.checkpoint", "the output shares the memory of an argument", advice=advice)
        return results

    @not_compiled
    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output's storage; it is refilled when the gradient of `hook_tensor` arrives.

        Args:
            hook_tensor: computed from the output. From this call until backward, nothing else may read the output.
        Raises:
            TypeError: hook_tensor is not a tensor. SpecError: there is no call whose output can be discarded, or hook_tensor
                needs no gradient while the output does.
        """
        function = f"{_NAME}.discard_output_and_register_recompute"
        if not isinstance(hook_tensor, Tensor):
            fail_type(function, "hook_tensor", "an array", type(hook_tensor).__name__)
        if not self._outputs:
            fail_with(function, "there is no output to discard", advice="Call checkpoint first.")
        call, outputs, kept = self._call, self._outputs, self._kept
        needed = call is not None and any(output.requires_grad for output in outputs)
        if needed and not hook_tensor.requires_grad:
            advice = "Compute it from the output, with gradients enabled."
            fail_with(function, "hook_tensor needs no gradient, while the output does", advice=advice)
        sizes = [output.untyped_storage().nbytes() for output in outputs]
        if needed:
            waiting = [call]  # emptied by the first backward: later ones find the output there
            hook_tensor.register_hook(lambda _: _refill(waiting.pop(), outputs, sizes, kept) if waiting else None)
        for number, output in enumerate(() if self._inside else outputs):
            if number not in kept:
                output.untyped_storage().resize_(0)
        self._call, self._outputs = None, []


def _recomputed(hooks: Any) -> bool:
    """Return whether saved tensors are dropped here and computed again; SpecError where hooks do anything else with them."""
    if hooks is None:
        return False
    pack, _ = hooks
    if getattr(pack, "__module__", None) not in _RECOMPUTING:
        whose = getattr(pack, "__module__", type(pack).__name__)
        advice = "What they take elsewhere need not be discarded: call fn itself there."
        fail_with(f"{_NAME}.checkpoint", f"this call is inside hooks on saved tensors of {whose}", advice=advice)
    return True


def _refill(
    call: "_CheckpointCall | None", outputs: Sequence[Tensor], sizes: Sequence[int], kept: Container[int]
) -> None:
    """Write the values back into the storages: a write to the tensors would change versions that autograd remembers."""
    assert call is not None
    for number, (output, size, value) in enumerate(zip(outputs, sizes, call.compute_again(), strict=True)):
        if number in kept:
            continue
        storage = output.untyped_storage()
        if value.untyped_storage().nbytes() != size or value.stride() != output.stride():
            got = f"one of {value.untyped_storage().nbytes()} bytes"
            raise RuntimeError(error_text(_NAME, "the output computed again", f"one of {size} bytes", got))
        storage.resize_(size)
        storage.copy_(value.untyped_storage())


class _CheckpointCall:
    """A call whose saved tensors are dropped and computed again, once, when the first of them is asked for."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn, self.args = fn, args
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
        self.versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.snapshot, self.state = Snapshot(), replay.random_state(self.device)
        self.autocast = replay.Autocast(self.device)
        self.count = 0
        self.saved: dict[int, Tensor] = {}

    def dropping(self) -> AbstractContextManager[Any]:
        """Make autograd keep, inside this context, only a number for each tensor that it saves."""

        def forget(_: Tensor) -> int:
            self.count += 1
            return self.count - 1

        return saved_tensors_hooks(forget, self._recall)

    def _recall(self, number: int) -> Tensor:
        if number not in self.saved:
            self.compute_again()
        return self.saved.pop(number)

    def compute_again(self) -> list[Tensor]:
        """Run fn again; keep the tensors that autograd saves and return the outputs."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(error_text(_NAME, "an argument", "left as it was", "one that was written to"))
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor.detach())
            return tensor

        args = pytree.tree_map_only(Tensor, lambda a: a.detach().requires_grad_(a.requires_grad), self.args)
        with ExitStack() as stack:
            stack.enter_context(replay.random_state_kept(self.device))
            replay.set_random_state(self.device, self.state)
            stack.enter_context(self.snapshot.restored())
            stack.enter_context(self.autocast.again())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            results = self.fn(*args)
        if len(found) != self.count:
            got = f"{len(found)} tensors"
            raise RuntimeError(error_text(_NAME, "what fn saves", f"as before, {self.count} tensors", got))
        self.saved = dict(enumerate(found))
        return [leaf.detach() for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
