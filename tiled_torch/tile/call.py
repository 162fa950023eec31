"""One call of a tiled function: its probe, its loop over shards, and the loop of its backward. No autograd nodes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.shards import ShardPlan
from tiled_torch.core import replay
from tiled_torch.core.partitioned import refuse_parts
from tiled_torch.tile import captures, forward_mode, token_layout
from tiled_torch.tile.fsdp_units import Units
from tiled_torch.tile.probe import Watch, watched
from tiled_torch.tile.shared_gradients import RowGradient, WholeGradient
from tiled_torch.tile.state import Override, State, is_fake, refuse_written_argument
from tiled_torch.tile.versions import Versions

PROBE_TOKENS = 2  # with one token, [1, t, ...] and [t, 1, ...] would look alike
Around = Callable[[bool], AbstractContextManager[Any]]


def alone(backward: bool) -> AbstractContextManager[Any]:
    """Return a context that does nothing."""
    del backward
    return nullcontext()


class TiledCall:
    """The state that forward leaves for backward; autograd sees every tensor that is kept."""

    def __init__(
        self,
        fn: Callable[..., Any],
        layout: token_layout.Layout,
        plan: ShardPlan,
        tensors: Sequence[Tensor],
        device: torch.device,
        chosen: Tensor | None = None,
    ) -> None:
        """chosen: the numbers of the tokens that are run, [n] in rising order, which plan then is of; None: all."""
        self.fn, self.layout, self.device, self.chosen = fn, layout, device, chosen
        self.spans = plan.spans or ((0, 0),)  # without tokens fn still says what it returns
        self.modules = captures.modules_of(fn)
        module = captures.owner(fn)
        refuse_parts(module.parameters() if module is not None else ())
        self.units = Units(fn, self.modules)
        self.autocast, self.cache = replay.Autocast(device), replay.ParametrizedCache()
        self.random = replay.GeneratorStates(device, apart=any(map(is_fake, tensors)))
        self.grads = torch.is_grad_enabled()
        self.needs = [self.grads and tensor.requires_grad for tensor in tensors]
        self.spec: pytree.TreeSpec | None = None
        self.forms: list[token_layout.Form | None] = []
        self.differentiable: list[bool] = []
        self.captures: list[captures.Capture] = []
        self.state: State | None = None
        self.versions: Versions | None = None
        self.around: Around = alone

    def probe(self, flat: Sequence[Tensor]) -> Watch:
        """Run fn on the first tokens for the form of its results and the tensors it reaches. No other trace remains.

        Returns what the run used.
        """
        tokens = min(PROBE_TOKENS, self.layout.tokens)
        since = captures.now()
        with (
            self._apart(),
            self.random.kept(),
            watched(self.modules, self.units.check, flat) as watch,
        ):
            pieces = self._pieces(flat, slice(0, tokens))
            results = self._results(pieces)
            self.forms = [token_layout.form_of(i, r, tokens, self.layout) for i, r in enumerate(results)]
            self.differentiable = [isinstance(r, Tensor) and r.requires_grad for r in results]
            if self.grads:
                if forward_mode.active():
                    forward_mode.refuse_both(self.layout.function, results, self.differentiable)
                derived = captures.derived_attributes([*watch.tables(), (self.cache.entries, self.cache.entries)])
                outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
                found, edges = captures.reached(outputs, derived, since)
                parameters = watch.parameters(captures.owner(self.fn))
                self.captures = captures.captures_of(parameters, found, edges, derived, pieces)
        watch.refuse_writes(self.layout.function)
        if any(self.differentiable):
            self._prepare_backward(watch)
        self.random.generators = watch.generators
        return watch

    def _prepare_backward(self, watch: Watch) -> None:
        """Note fn's modules and tensors before the first shard, so that backward finds them again."""
        self.state = watch.state(self.layout.function)
        derived = {id(capture.tensor) for capture in self.captures if capture.homes}
        reached = [tensor for tensor in watch.reached() if id(tensor) not in derived]
        others = [tensor for tensor in watch.known() if id(tensor) not in derived]
        self.versions = Versions(self.layout.function, reached, [*others, *captures.tensors_of(self.fn)])

    def forward(self, flat: Sequence[Tensor]) -> list[Tensor | None]:
        """Return every result, its rows written shard by shard."""
        if not self.forms and self.layout.batched and self.spans[0] == (0, 1) and self.layout.tokens > 1:
            with torch.no_grad():
                self.probe(flat)  # a shard of one token does not tell [1, t, ...] from [t, 1, ...]
        wholes: list[Tensor | None] = []
        tangents = forward_mode.Tangents(self.layout.tokens) if forward_mode.active() else None
        versions = [None if tensor.is_inference() else tensor._version for tensor in flat]
        doubtful, state = self._has_doubtful_results(), self.state
        # What fn writes may depend on whether gradients are wanted, as in Megatron's count of tokens for each expert.
        grads = doubtful or (state is not None and state.seen)
        with torch.set_grad_enabled(grads), self._apart(), forward_mode.on():
            for start, stop in self.spans:
                if state is not None:
                    self.random.record()
                    state.record()
                results = self._results(self._pieces(flat, self._place(start, stop)))
                if not self.forms:
                    self.forms = [token_layout.form_of(i, r, stop - start, self.layout) for i, r in enumerate(results)]
                if start == 0:
                    made = {"all_written": self.chosen is None}
                    wholes = [None if form is None else form.room(**made) for form in self.forms]
                if doubtful:
                    self._refuse_changed(results)
                if tangents is not None:
                    forward_mode.refuse_both(self.layout.function, results, self.differentiable)
                    with torch.no_grad():
                        results = tangents.take(results, self.forms, start, stop)
                self._write(results, wholes, start, stop)
                del results  # frees this shard's graph, if it has one, before the next one is built
        for tensor, version in zip(flat, versions, strict=True):
            if version is not None and tensor._version != version:
                refuse_written_argument(self.layout.function)
        if state is not None and self.versions is not None:
            state.finish()
            self.versions.check_forward(state.written)
        return wholes if tangents is None else tangents.give(wholes)

    @torch.no_grad()
    def _write(self, results: Sequence[Any], wholes: Sequence[Tensor | None], start: int, stop: int) -> None:
        for i, (result, form, whole) in enumerate(zip(results, self.forms, wholes, strict=True)):
            target = None if form is None or whole is None else form.rows(whole, self.layout.tokens)
            place = self._place(start, stop)
            token_layout.write(self.layout.function, i, result, form, target, place, stop - start)

    def derived(self) -> list[Tensor]:
        """Captures that are no leaves: they live as long as somebody keeps them."""
        return [capture.tensor for capture in self.captures if capture.homes]

    def backward(
        self, tensors: Sequence[Tensor], derived: Sequence[Tensor], doutputs: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return gradients of tensors and captures from those of the differentiable results, shard by shard."""
        flat, single = self.layout.flat(tensors), len(self.spans) == 1
        # A leaf stands in for what has a history, so that nothing is differentiated beyond it.
        stand_ins = iter(tensor.detach().requires_grad_() for tensor in derived)
        targets = [next(stand_ins) if capture.homes else capture.tensor for capture in self.captures]
        homes = [(*home, t) for c, t in zip(self.captures, targets, strict=True) for home in c.homes]
        sums = [
            RowGradient(t, self.layout.tokens, all_written=self.chosen is None)
            if rowed
            else WholeGradient(t.detach(), single=single)
            for t, rowed in zip(tensors, self.layout.rowed, strict=True)
        ]
        sums += [WholeGradient(t, single=single) for t in targets]
        drows = self._rows_of(doutputs)
        since = captures.now()
        with self._as_before(homes) as put_state, captures.tensor_hooks_off(targets):
            for shard, span in enumerate(self.spans):
                put_state(shard)
                place = self._place(*span)
                with self.cache.again({name: target for table, name, target in homes if table is self.cache.entries}):
                    with self.random.again(shard), torch.enable_grad():
                        pieces = self._pieces(flat, place)
                        results = self._results(pieces)
                    parts = self._differentiate(results, drows, pieces, targets, place, since)
                del pieces, results  # frees this shard's graph before the next one is built
                for total, part in zip(sums, parts, strict=True):
                    total.add(part, place)
        return [total.result() for total in sums]

    def _differentiate(
        self,
        results: Sequence[Any],
        drows: Sequence[Tensor | None],
        pieces: Sequence[Tensor],
        targets: Sequence[Tensor],
        place: token_layout.Place,
        since: int,
    ) -> Iterator[Tensor | None]:
        """Return the parts of one shard: for every argument, then for every capture."""
        pairs = [
            (r, d[place].reshape(r.shape))
            for r, d in zip(results, drows, strict=True)
            if d is not None and r.requires_grad
        ]
        everything = (*pieces, *targets)
        if not pairs:
            return iter([None] * len(everything))
        outputs = [result for result, _ in pairs]
        captures.refuse_late(outputs, everything, since)
        wanted = [tensor for tensor in everything if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, [d for _, d in pairs], allow_unused=True))
        return iter([next(found) if tensor.requires_grad else None for tensor in everything])

    def _rows_of(self, doutputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradient of every result as rows; None where it has none."""
        given = iter(doutputs)
        return [
            form.rows(d, self.layout.tokens) if form and differentiable and (d := next(given)) is not None else None
            for form, differentiable in zip(self.forms, self.differentiable, strict=True)
        ]

    def _place(self, start: int, stop: int) -> token_layout.Place:
        """Return which tokens a shard has."""
        return slice(start, stop) if self.chosen is None else self.chosen[start:stop]

    def _pieces(self, flat: Sequence[Tensor], place: token_layout.Place) -> list[Tensor]:
        """Detached arguments of one shard, each a leaf that asks for a gradient where the argument does."""
        grads, pieces = torch.is_grad_enabled(), self.layout.pieces(flat, place)
        return [
            forward_mode.detached(piece, requires_grad=grads and need)
            for piece, need in zip(pieces, self.needs, strict=True)
        ]

    def _results(self, pieces: Sequence[Tensor]) -> list[Any]:
        args, kwargs = self.layout.arguments(pieces)
        results, spec = pytree.tree_flatten(self.fn(*args, **kwargs))
        if self.spec is None:
            self.spec = spec
        elif spec != self.spec:
            fail(self.layout.function, "fn's output", f"of one structure, {self.spec}", spec)
        return results

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """fn runs as it would in place, but checkpointing and offloading do not see what it saves."""
        with ExitStack() as stack:
            stack.enter_context(self.autocast.again())
            stack.enter_context(self.cache.again())
            stack.enter_context(self.units.paused())
            if torch.is_grad_enabled():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_detached, _same))
            yield

    @contextmanager
    def _as_before(self, homes: Sequence[Override]) -> Iterator[Callable[[int], None]]:
        """Everything that a shard's recomputation has to find as forward found it, and what it must not change.

        Yields what puts a shard's state back. homes: what stands in for tensors with a history.
        """
        assert self.state is not None
        assert self.versions is not None
        with (
            self.versions.check_backward(self.state.written),
            self.autocast.again(),
            self.units.paused(),
            self.state.again(homes) as put_state,
            self.random.kept(),
        ):
            yield put_state

    def _has_doubtful_results(self) -> bool:
        """Return whether a result might need a gradient for some tokens although the probe's did not."""
        pairs = zip(self.forms, self.differentiable, strict=True) if self.grads else ()
        return any(
            form and (form.dtype.is_floating_point or form.dtype.is_complex) and not differentiable
            for form, differentiable in pairs
        )

    def _refuse_changed(self, results: Iterable[Any]) -> None:
        for i, (result, differentiable) in enumerate(zip(results, self.differentiable, strict=True)):
            if isinstance(result, Tensor) and result.requires_grad and not differentiable:
                advice = "Make it depend on a tensor that requires grad for every token, or detach it."
                got = "a shard in which it does after first tokens for which it does not"
                rule = "in need of a gradient for every token or for none"
                raise UnsupportedError(error_text(self.layout.function, f"output {i} of fn", rule, got, advice=advice))


def _detached(tensor: Tensor) -> Tensor:
    """A result that its own node saves would keep the node, and so its inputs, alive for ever."""
    return tensor.detach()


def _same(tensor: Tensor) -> Tensor:
    return tensor
