"""Megatron-core's random-number tracker and checkpointing by its own names, over `RandomStates` and `recompute`.

Where there is no CUDA device a stream is one of the CPU's generator.
"""

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shared_specs.core import checks
from shared_specs.errors import fail, fail_type
from tiled_torch.collectives.groups import rank_group
from tiled_torch.compat.megatron.parallel_state import group_or_default, number_of_megatron
from tiled_torch.compat.megatron.recompute import CheckpointWithoutOutput as CheckpointWithoutOutput
from tiled_torch.compat.megatron.recompute import CheckpointWithoutOutputManager as CheckpointWithoutOutputManager
from tiled_torch.layers import recompute
from tiled_torch.layers.random import RandomStates

_TENSOR, _EXPERT, _DATA = "model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"
_OFFSETS = {
    _DATA: 0,
    _TENSOR: 2718,
    _EXPERT: 1024,
}  # Megatron-core's, so that streams draw the numbers that they draw there
_PER_EXPERT_RANK = 100
# argument -> the function of Megatron-core's parallel_state that None stands for
_GTP_SIZES = {
    "gtp_remat_world_size": "get_gtp_weight_remat_world_size",
    "egtp_remat_world_size": "get_expert_gtp_weight_remat_world_size",
}


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream of an expert's layers."""
    return _EXPERT


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that tensor-parallel ranks share."""
    return _DATA


def convert_cuda_rng_state(state: Tensor | torch.Generator, to_graphable: bool = False) -> Tensor | torch.Generator:
    """Return a state as a generator (to_graphable) or as a tensor; it is not changed.

    Raises:
        TypeError: neither of both.
    """
    if not isinstance(state, Tensor | torch.Generator):
        fail_type("convert_cuda_rng_state", "state", "a tensor or a generator", type(state).__name__)
    if isinstance(state, torch.Generator):
        return state if to_graphable else state.get_state()
    if not to_graphable:
        return state
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu")
    generator.set_state(state)
    return generator


class CudaRNGStatesTracker(RandomStates):
    """`RandomStates` as Megatron-core's tracker is called. `checkpoint`, `tile` and `parallelize` put its streams back.

    Args:
        use_cudagraphable_rng: `get_states` shows generators instead of tensors. Streams are fit for CUDA graphs in any case.
        is_inference_rng_tracker: only kept.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        super().__init__()
        checks.check_flags(type(self).__name__, use_cudagraphable_rng=use_cudagraphable_rng)
        self.use_cudagraphable_rng, self.is_inference_rng_tracker = use_cudagraphable_rng, is_inference_rng_tracker
        self._set = False

    @property
    def states_(self) -> dict[str, Any]:
        """Return the state of every stream, as `get_states`."""
        return self.get_states()

    def is_initialized(self) -> bool:
        """Return whether a stream was added or states were set since the last reset."""
        return self._set

    def get_states(self) -> dict[str, Any]:
        """Return the state of every stream: of its CUDA generator where there is a device, else of the CPU's."""
        states = self._cpu if self._cuda is None else self._all_on_cuda()
        return {
            name: convert_cuda_rng_state(state, to_graphable=True) if self.use_cudagraphable_rng else state
            for name, state in states.items()
        }

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Go on where `get_states` was taken. On a GPU a stream of the CPU's that is new here is seeded from its state."""
        self._refuse_forked(f"{type(self).__name__}.set_states")
        shown = {name: a.get_state() if isinstance(a, torch.Generator) else a for name, a in states.items()}
        if self._cuda is None:
            self._seeds = {name: seed for name, seed in self._seeds.items() if name in shown}
            self._cpu = shown
        else:
            cpu = {name: self._cpu.get(name, _cpu_state(state)) for name, state in shown.items()}
            super().set_states({name: {"cpu": cpu[name], "cuda": state} for name, state in shown.items()})
        self._set = True

    def add(self, name: str, seed: int) -> None:
        """Add a stream. SpecError (an Exception, as there): the name or the seed is taken."""
        super().add(name, seed)
        self._set = True

    def fork(self, name: str = _TENSOR) -> Any:
        """Draw from a stream inside this context: see `RandomStates.fork`."""
        return super().fork(name)

    def reset(self) -> None:
        """Forget all streams."""
        super().reset()
        self._set = False


def _cpu_state(state: Tensor) -> Tensor:
    digest = hashlib.sha256(bytes(state.cpu().tolist())).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little")).get_state()


class InferenceCudaRNGStatesTracker(CudaRNGStatesTracker):
    """A tracker that does nothing: inference draws from the default generators."""

    def add(self, name: str, seed: int) -> None:
        """Do nothing."""

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Do nothing."""

    def fork(self, name: str = _TENSOR) -> Any:
        """Return a context that does nothing."""
        return nullcontext()


_trackers: list[CudaRNGStatesTracker] = []  # none, or the one of this process


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Make the tracker of this process, where there is none yet. use_te_rng_tracker: False; Transformer Engine is not used."""
    if use_te_rng_tracker:
        fail("initialize_rng_tracker", "use_te_rng_tracker", "False", True, advice="Streams are fit for CUDA graphs.")
    if force_reset:
        _trackers.clear()
    if not _trackers:
        kind = InferenceCudaRNGStatesTracker if inference_rng_tracker else CudaRNGStatesTracker
        _trackers.append(kind(use_cudagraphable_rng, inference_rng_tracker))


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> CudaRNGStatesTracker:
    """Return the tracker of this process; the arguments are of the one that the first call makes."""
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    return _trackers[0]


def get_all_rng_states() -> dict[str, Any]:
    """Return the states of the tracker of this process."""
    return get_cuda_rng_tracker().get_states()


def is_graph_safe_cuda_rng_tracker(cuda_rng_tracker: Any) -> bool:
    """Return whether a tracker shows generators as its states."""
    return bool(getattr(cuda_rng_tracker, "use_cudagraphable_rng", False))


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seed the three streams of this rank, and CUDA's default generator, with Megatron-core's seeds.

    "data-parallel-rng": seed. "model-parallel-rng": seed + 2718 + tp_rank. "expert-parallel-rng": seed + 1024 +
    100 ep_rank + etp_rank. The CPU's default generator stays as it is. (`seed_parallel` hashes instead, so that no two runs
    share a stream.)

    Args:
        tp_rank, etp_rank: None: this rank's places in `parallel_state`'s groups. ep_rank: None: that of Megatron-core's own
            `parallel_state` where it is loaded, else 0.
        gtp_remat_world_size, egtp_remat_world_size: at most 1, also as Megatron-core's own `parallel_state` has them.
        gtp_remat_rank, egtp_remat_rank: not used, as there with these sizes.
        force_reset_rng: make a new tracker. The rest: as `get_cuda_rng_tracker`.
    Raises:
        SpecError: a seed below 0, weights over more than one rank of a gtp group. UnsupportedError: no process group to take a
            rank from.
    """
    name = "model_parallel_cuda_manual_seed"
    del gtp_remat_rank, egtp_remat_rank
    sizes = {"gtp_remat_world_size": gtp_remat_world_size, "egtp_remat_world_size": egtp_remat_world_size}
    for argument, given in sizes.items():
        size = number_of_megatron(_GTP_SIZES[argument], 1) if given is None else given
        if size > 1:
            fail(name, argument, "at most 1", size, advice="fully_shard is what shards weights here.")
    ep_rank = number_of_megatron("get_expert_model_parallel_rank", 0) if ep_rank is None else ep_rank
    ranks = {_DATA: 0, _TENSOR: _rank(name, tp_rank, expert=False)}
    ranks[_EXPERT] = _PER_EXPERT_RANK * ep_rank + _rank(name, etp_rank, expert=True)
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
    _trackers[0].reset()
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
    for stream, rank in ranks.items():
        _trackers[0].add(stream, seed + _OFFSETS[stream] + rank)


def _rank(name: str, given: int | None, *, expert: bool) -> int:
    return rank_group(name, group_or_default(None, expert=expert)).rank if given is None else given


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any) -> Any:
    """Return function(*args), of which only the inputs are kept; backward computes the rest again, on the same numbers.

    Args:
        distribute_saved_activations: keep 1/R of the tensors among args on each tensor-parallel rank.
    Numerics, Memory, Raises: as `tiled_torch.parallel.checkpoint`. The caller's tensors stay whole.
    Source: named and called as Megatron-core's (core/tensor_parallel/random.py).
    """
    if not distribute_saved_activations:
        return recompute.checkpoint(function, *args)
    return recompute.checkpoint(function, *args, partition_inputs=True, group=group_or_default(None))
