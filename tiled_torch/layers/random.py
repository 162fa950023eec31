"""Named streams of random numbers for ranks that compute parts of one model: who draws the same numbers, and who does not.

A stream is the state of PyTorch's own generators. Inside `fork` the default generators stand where the stream stands, so
that nn.Dropout and torch.rand draw from it without knowing.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks  # torch has no public name for it

from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, fail_with
from shared_specs.layers.random import RANDOM_STREAMS, derived_seed, stream_coordinates
from tiled_torch.core import replay

_DEFAULT = "tensor-parallel"
GeneratorState = dict[str, Tensor]  # the state of a generator for each kind of device
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of a forward, and of its replay
_forks: list[tuple["RandomStates", str]] = []  # those under way, the innermost last: the default generators stand there
_living: "weakref.WeakSet[RandomStates]" = weakref.WeakSet()
_replayed: dict[object, Any] = {}  # what packs saved tensors in the checkpoints under way that put streams back


def seed_parallel(seed: int, *, data: int = 0, tensor: int = 0, expert: int = 0) -> "RandomStates":
    """Return the named streams of one rank, all derived from one seed and the rank's place in the mesh.

    "data-parallel" differs between data ranks and is the same on all tensor and expert ranks. Use it for activations that
    tensor ranks hold whole. "tensor-parallel" also differs between tensor ranks. Use it for activations that are split.
    "expert-parallel" differs between all ranks (shared_specs.layers.random.RANDOM_STREAMS). The default generators, used
    outside `fork`, are seeded too. They agree on the same ranks as "data-parallel", with different numbers. Build the model
    before this call, under torch.manual_seed with one seed for all ranks. A model that is built afterwards has different
    weights on every data rank, and `fully_shard` would combine them into one model (DistributedDataParallel takes those of its
    first rank).

    Args:
        seed: an integer >= 0, the same on all ranks.
        data, tensor, expert: this rank's index along each axis. Context and pipeline ranks count as data ranks.
    Returns:
        `RandomStates` with the three streams.
    Numerics: the numbers are not those of tiled_jax, which has other generators. Which ranks agree is the same.
    Raises:
        SpecError: a seed or a rank below 0. TypeError: not an integer.
    Source: the roles are Megatron-LM's (arXiv 1909.08053); seeds are hashed, never added, so that no two runs share a seed.
    Example:
        >>> a, b = (seed_parallel(7, tensor=rank) for rank in (0, 1))
        >>> with a.fork("data-parallel"):
        ...     first = torch.rand(2)
        >>> with b.fork("data-parallel"):
        ...     bool((first == torch.rand(2)).all())
        True
    """
    ranks = {"data": data, "tensor": tensor, "expert": expert}
    for name, value in {"seed": seed, **ranks}.items():
        _check_integer("seed_parallel", name, value)
    states = RandomStates()
    for stream in RANDOM_STREAMS:
        states.add(stream, derived_seed(seed, stream_coordinates(stream, **ranks)))
    torch.manual_seed(derived_seed(seed, (len(RANDOM_STREAMS), data)))
    return states


class RandomStates:
    """Random streams by name, for the CPU and, if there is one, the current CUDA device.

    `tiled_torch.layers.recompute`, `parallelize` and `tile` find every RandomStates themselves, and recompute with the same
    random numbers as forward. On CUDA each stream has its own generator state. `fork` swaps it in without reading or copying
    it, so a CUDA graph can capture it; `register` the graph first.

    Args:
        device: the CUDA device; None: the current one if CUDA is available. "cpu": only the CPU.
    Example:
        >>> states = RandomStates()
        >>> states.add("dropout", 3)
        >>> with states.fork("dropout"):
        ...     dropped = torch.nn.functional.dropout(torch.ones(8), 0.5)
    """

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._cuda = _cuda_generator(device)
        self._cpu: dict[str, Tensor] = {}
        self._on_cuda: dict[str, torch.Generator] = {}
        self._seeds: dict[str, int] = {}
        _living.add(self)

    def add(self, name: str, seed: int) -> None:
        """Add a stream from a seed >= 0.

        Raises:
            SpecError: the name is taken, or another stream was made from the same seed. TypeError: no integer.
        """
        if name in self._cpu:
            fail("RandomStates.add", "name", "new", repr(name), advice="reset() forgets all streams.")
        _check_integer("RandomStates.add", "seed", seed)
        if seed in self._seeds.values():
            fail("RandomStates.add", "seed", "new", seed, advice="Two streams of one seed are the same numbers.")
        self._seeds[name] = seed
        self._cpu[name] = torch.Generator().manual_seed(seed).get_state()
        if self._cuda is not None:
            self._on_cuda[name] = self._cuda.clone_state().manual_seed(seed)

    @contextmanager
    def fork(self, name: str = _DEFAULT) -> Iterator[None]:
        """Make the default generators draw from the stream inside this context; the next fork continues it.

        A stream is one sequence of numbers, shared by all its forks. A fork inside a fork of the same stream continues from
        the outer position, and the outer fork continues after the inner one's numbers (as in Megatron-LM's tracker).

        Raises:
            SpecError: there is no such stream, or the call is inside a non-reentrant `torch.utils.checkpoint`, which would
                recompute with different numbers.
        """
        if name not in self._cpu:
            fail("RandomStates.fork", "name", f"one of {', '.join(self._cpu) or 'no streams'}", repr(name))
        _refuse_other_replays()
        _note_forked()
        cpu, cuda = torch.get_rng_state(), self._swap_cuda(self._on_cuda.get(name))
        torch.set_rng_state(self._cpu[name])
        _forks.append((self, name))
        try:
            yield
        finally:
            _forks.pop()
            self._cpu[name] = torch.get_rng_state()
            if _forks:  # whose stream may have gone on inside
                outer, of = _forks[-1]
                cpu = outer._cpu[of]
            torch.set_rng_state(cpu)
            self._swap_cuda(cuda)

    def _swap_cuda(self, state: torch.Generator | None) -> torch.Generator | None:
        """Return the state that CUDA's default generator had, which from now on is in the state given."""
        if self._cuda is None or state is None:
            return None
        before = self._cuda.graphsafe_get_state()
        self._cuda.graphsafe_set_state(state)
        return before

    def states(self) -> dict[str, GeneratorState]:
        """Return the state of every stream, as `set_states` takes them: copies on the CPU, safe to store."""
        self._refuse_forked("RandomStates.states")
        return {name: {"cpu": cpu.clone(), **self._cuda_state(name)} for name, cpu in self._cpu.items()}

    def _cuda_state(self, name: str) -> GeneratorState:
        return {} if name not in self._on_cuda else {"cuda": self._on_cuda[name].get_state()}

    def set_states(self, states: Mapping[str, GeneratorState]) -> None:
        """Continue from `states`: its streams replace all present streams.

        Raises:
            TypeError: not a mapping, or a value is not one. SpecError: the states belong to other kinds of devices than those
                here.
        """
        function = "RandomStates.set_states"
        if not isinstance(states, Mapping):
            fail_type(function, "states", "a mapping", type(states).__name__)
        kinds = {"cpu"} if self._cuda is None else {"cpu", "cuda"}
        for name, state in states.items():
            if not isinstance(state, Mapping):
                fail_type(function, f"states[{name!r}]", "a mapping", type(state).__name__)
            if set(state) != kinds:
                fail(function, f"states[{name!r}]", f"of {' and '.join(sorted(kinds))}", " and ".join(sorted(state)))
        self._refuse_forked(function)
        self._seeds = {name: seed for name, seed in self._seeds.items() if name in states}
        self._cpu = {name: state["cpu"].clone() for name, state in states.items()}
        before, self._on_cuda = self._on_cuda, {}
        for name in states if self._cuda is not None else ():
            if name in before:  # the same object: a CUDA graph may have captured it
                before[name].set_state(states[name]["cuda"])
            self._on_cuda[name] = before.get(name) or self._generator(states[name]["cuda"])

    def reset(self) -> None:
        """Remove all streams."""
        self._refuse_forked("RandomStates.reset")
        self._cpu, self._on_cuda, self._seeds = {}, {}, {}

    def register(self, graph: "torch.cuda.CUDAGraph") -> None:
        """Let a CUDA graph fork the streams during capture, and advance them on every replay.

        Raises:
            UnsupportedError: there is no CUDA device.
        """
        if self._cuda is None:
            raise UnsupportedError(error_text("RandomStates.register", "a CUDA device", "there", "none"))
        for state in self._on_cuda.values():
            graph.register_generator_state(state)

    def __deepcopy__(self, _: Any) -> "RandomStates":
        """Itself: a copied module draws from the same streams."""
        return self

    def __reduce__(self) -> Any:
        """Pickled with its streams; the copy is one that `checkpoint` knows."""
        return _unpickled, (self.states(), self._seeds)

    def _all_on_cuda(self) -> GeneratorState:
        return {name: generator.get_state() for name, generator in self._on_cuda.items()}

    def _generator(self, state: Tensor) -> torch.Generator:
        """Return a new state for CUDA's default generator."""
        assert self._cuda is not None
        generator = self._cuda.clone_state()
        generator.set_state(state)
        return generator

    def _refuse_forked(self, function: str) -> None:
        forked = [name for states, name in _forks if states is self]
        if forked:
            fail_with(function, f"this call is inside fork({forked[-1]!r})", advice="Call it after the fork.")


class Snapshot:
    """Every stream of every RandomStates as it stands now, and the forks under way, to be put back for a computation."""

    def __init__(self) -> None:
        _note_forked()
        self.taken = [(weakref.ref(states), states._cpu.copy(), states._all_on_cuda()) for states in living()]
        self.forks = [(weakref.ref(states), name) for states, name in _forks]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put all streams back to this state inside the context, forked as they were; the present state again afterwards."""
        with known():
            yield from self._restored()

    def _restored(self) -> Iterator[None]:
        before, forks = [], _forks.copy()
        for reference, cpu, cuda in self.taken:
            states = reference()
            if states is not None:
                before.append((states, states._cpu, states._on_cuda))
                states._cpu = cpu.copy()
                states._on_cuda = {name: states._generator(state) for name, state in cuda.items()}
        _forks[:] = [(states, name) for reference, name in self.forks if (states := reference()) is not None]
        states, name = _forks[-1] if _forks else (None, "")
        cuda = None if states is None else states._swap_cuda(states._on_cuda.get(name))
        try:
            yield
        finally:
            if states is not None:
                states._swap_cuda(cuda)
            _forks[:] = forks
            for states, cpu, on_cuda in before:
                states._cpu, states._on_cuda = cpu, on_cuda


def _note_forked() -> None:
    """Set the stream of the innermost fork to the present state of the default generator."""
    if _forks:
        states, name = _forks[-1]
        states._cpu[name] = torch.get_rng_state()


replay.STREAMS.append(Snapshot)


@contextmanager
def known() -> Iterator[None]:
    """Inside the innermost hooks on saved tensors streams may be forked: what is computed again there finds them restored."""
    this = object()
    _replayed[this] = _packing()
    try:
        yield
    finally:
        del _replayed[this]


def _packing() -> Any:
    """Return the hook that packs the tensors which autograd saves here, the innermost one; None without any."""
    hooks = _top_hooks(True)  # type: ignore[call-arg]
    return None if hooks is None else hooks[0]


def replay_contexts(contexts: Callable[[], Contexts] | None = None) -> Contexts:
    """Return the contexts of one `torch.utils.checkpoint` whose replay draws from the streams as they stand now.

    contexts: others inside.
    """
    forward, again = (nullcontext(), nullcontext()) if contexts is None else contexts()
    snapshot = Snapshot()
    return Together(lambda: (known(), forward)), Together(lambda: (snapshot.restored(), again))


class Together(AbstractContextManager[None]):
    """Several contexts as one, which may be entered again, also inside itself: a replay may be."""

    def __init__(self, make: Callable[[], tuple[AbstractContextManager[Any], ...]]) -> None:
        self.make, self.stacks = make, list[ExitStack]()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self.make():
                stack.enter_context(context)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def _refuse_other_replays() -> None:
    packing = _packing()
    if getattr(packing, "__module__", None) != "torch.utils.checkpoint":
        return
    if not any(one is packing for one in tuple(_replayed.values())):
        advice = (
            "It would compute again from other numbers. Use tiled_torch.layers.recompute, or `parallelize`; with "
            "torch.compile keep the streams as an attribute of a module of the layer, and no selective checkpoint."
        )
        fail_with("RandomStates.fork", "this call is inside torch.utils.checkpoint", advice=advice)


def _unpickled(states: dict[str, GeneratorState], seeds: dict[str, int]) -> RandomStates:
    found = RandomStates()
    found.set_states(states)
    found._seeds = seeds
    return found


def living() -> "list[RandomStates]":
    """Return every RandomStates that has not been garbage-collected."""
    return list(_living)


def _cuda_generator(device: torch.device | str | None) -> torch.Generator | None:
    """Return the default generator of a CUDA device; None for the CPU alone."""
    if device is None:
        if not torch.cuda.is_available():
            return None
        device = torch.device("cuda")
    device = torch.device(device)
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        fail("RandomStates", "device", "a CUDA device, cpu or None", device)
    if not torch.cuda.is_available():
        raise UnsupportedError(error_text("RandomStates", "device", "usable here", device, advice="CUDA is not."))
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _check_integer(function: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail_type(function, argument, "an integer", type(value).__name__)
    if value < 0:
        fail(function, argument, ">= 0", value)
