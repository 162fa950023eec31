"""One call of a tiled function: its probe, its loop over shards, and the loop of its backward. No autograd nodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils import _pytree as pytree

from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.shards import ShardPlan
from tiled_torch.functional import leaves, replay, rows
from tiled_torch.functional.sums import RowGradient, WholeGradient
from tiled_torch.functional.units import Units
from tiled_torch.functional.watch import watched

PROBE_TOKENS = 2  # with one token, [1, t, ...] and [t, 1, ...] would look alike


class Call:
    """What forward leaves for backward, without any tensor that autograd should see being kept."""

    def __init__(
        self,
        fn: Callable[..., Any],
        layout: rows.Layout,
        plan: ShardPlan,
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self.fn, self.layout, self.device = fn, layout, device
        self.spans = plan.spans or ((0, 0),)  # without tokens fn still says what it returns
        self.modules = leaves.modules_of(fn)
        module = leaves.owner(fn)
        leaves.refuse_parted(module.parameters() if module is not None else ())
        self.units = Units(fn, self.modules)
        self.autocast = replay.Autocast(device)
        self.modes: Mapping[nn.Module, bool] = {}  # of every module that the probe sees
        self.written: Sequence[UntypedStorage] = ()
        self.random = replay.RandomStates(device)
        self.needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
        self.spec: pytree.TreeSpec | None = None
        self.forms: list[rows.Form | None] = []
        self.differentiable: list[bool] = []
        self.captures: list[leaves.Capture] = []

    def probe(self, flat: Sequence[Tensor]) -> None:
        """Runs fn on the first tokens for the form of its results and the tensors it reaches; leaves no other trace."""
        tokens = min(PROBE_TOKENS, self.layout.tokens)
        derived = leaves.derived_attributes(self.modules) if torch.is_grad_enabled() else {}
        since = leaves.now()
        with (
            self._apart(),
            replay.random_state_kept(self.device),
            watched(self.modules, self.units.check) as watch,
        ):
            pieces = self._pieces(flat, 0, tokens)
            results = self._results(pieces)
            self.forms = [rows.form_of(i, r, tokens, self.layout) for i, r in enumerate(results)]
            self.differentiable = [isinstance(r, Tensor) and r.requires_grad for r in results]
            if torch.is_grad_enabled():
                outputs = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
                found, edges = leaves.reached(outputs, derived, since)
                self.captures = leaves.captures_of(leaves.owner(self.fn), found, edges, derived, pieces)
        self.modes, self.written, self.random.generators = watch.modules, watch.written, watch.generators

    def forward(self, flat: Sequence[Tensor]) -> list[Tensor | None]:
        """Every result, its rows written shard by shard."""
        if not self.forms and self.layout.batched and self.spans[0] == (0, 1) and self.layout.tokens > 1:
            with torch.no_grad():
                self.probe(flat)  # a shard of one token does not tell [1, t, ...] from [t, 1, ...]
        wholes: list[Tensor | None] = []
        versions = [None if tensor.is_inference() else tensor._version for tensor in flat]
        watch = self._has_doubtful_results()
        with self._apart(), torch.set_grad_enabled(watch):
            for start, stop in self.spans:
                self.random.record()
                results = self._results(self._pieces(flat, start, stop))
                if not self.forms:
                    self.forms = [rows.form_of(i, r, stop - start, self.layout) for i, r in enumerate(results)]
                if start == 0:
                    wholes = [None if form is None else form.empty() for form in self.forms]
                if watch:
                    self._refuse_changed(results)
                self._write(results, wholes, start, stop)
        for tensor, version in zip(flat, versions, strict=True):
            if version is not None and tensor._version != version:
                fail(self.layout.function, "fn", "free of in-place writes to its arguments", "a write to one of them")
        return wholes

    @torch.no_grad()
    def _write(self, results: Sequence[Any], wholes: Sequence[Tensor | None], start: int, stop: int) -> None:
        for i, (result, form, whole) in enumerate(zip(results, self.forms, wholes, strict=True)):
            target = None if form is None or whole is None else form.rows(whole, self.layout.tokens)
            rows.write(self.layout.function, i, result, form, target, start, stop)

    def backward(self, tensors: Sequence[Tensor], doutputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of tensors and captures from those of the differentiable results, shard by shard."""
        flat, single = self.layout.flat(tensors), len(self.spans) == 1
        targets = [capture.target() for capture in self.captures]
        sums = [
            RowGradient(t, self.layout.tokens) if rowed else WholeGradient(t.detach(), single=single)
            for t, rowed in zip(tensors, self.layout.rowed, strict=True)
        ]
        sums += [WholeGradient(t, single=single) for t in targets]
        drows = self._rows_of(doutputs)
        since = leaves.now()
        with self._as_before(), leaves.in_place(self.captures, targets), leaves.tensor_hooks_off(targets):
            for shard, (start, stop) in enumerate(self.spans):
                with self.random.again(shard), torch.enable_grad():
                    pieces = self._pieces(flat, start, stop)
                    results = self._results(pieces)
                parts = self._differentiate(results, drows, pieces, targets, (start, stop), since)
                del pieces, results  # frees this shard's graph before the next one is built
                for total, part in zip(sums, parts, strict=True):
                    total.add(part, start, stop)
        return [total.result() for total in sums]

    def _differentiate(
        self,
        results: Sequence[Any],
        drows: Sequence[Tensor | None],
        pieces: Sequence[Tensor],
        targets: Sequence[Tensor],
        span: tuple[int, int],
        since: int,
    ) -> Iterator[Tensor | None]:
        """The parts of one shard: for every argument, then for every capture."""
        pairs = [
            (r, d[slice(*span)].reshape(r.shape))
            for r, d in zip(results, drows, strict=True)
            if d is not None and r.requires_grad
        ]
        everything = (*pieces, *targets)
        if not pairs:
            return iter([None] * len(everything))
        outputs = [result for result, _ in pairs]
        leaves.refuse_late(outputs, everything, since)
        wanted = [tensor for tensor in everything if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, [d for _, d in pairs], allow_unused=True))
        return iter([next(found) if tensor.requires_grad else None for tensor in everything])

    def _rows_of(self, doutputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """For every result its gradient as rows, None where it has none."""
        given = iter(doutputs)
        return [
            form.rows(d, self.layout.tokens) if form and differentiable and (d := next(given)) is not None else None
            for form, differentiable in zip(self.forms, self.differentiable, strict=True)
        ]

    def _pieces(self, flat: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """Detached arguments of one shard, each a leaf that asks for a gradient where the argument does."""
        grads = torch.is_grad_enabled()
        pieces = (piece.detach() for piece in self.layout.pieces(flat, start, stop))
        return [piece.requires_grad_(grads and need) for piece, need in zip(pieces, self.needs, strict=True)]

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
            stack.enter_context(self.units.paused())
            if torch.is_grad_enabled():
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
            yield

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Everything that a shard's recomputation has to find as forward found it, and what it must not change."""
        with (
            self.autocast.again(),
            self.units.paused(),
            replay.modes_again(self.modes),
            replay.unwritten(self.modes, self.written),
            self.random.kept(),
        ):
            yield

    def _has_doubtful_results(self) -> bool:
        """Whether a result might need a gradient for some tokens although the probe's did not."""
        trainable = any(self.needs) or bool(self.captures)
        pairs = zip(self.forms, self.differentiable, strict=True) if trainable else ()
        return any(form and form.dtype.is_floating_point and not differentiable for form, differentiable in pairs)

    def _refuse_changed(self, results: Iterable[Any]) -> None:
        for i, (result, differentiable) in enumerate(zip(results, self.differentiable, strict=True)):
            if isinstance(result, Tensor) and result.requires_grad and not differentiable:
                advice = "Make it depend on a tensor that requires grad for every token, or detach it."
                got = "a shard in which it does after first tokens for which it does not"
                rule = "in need of a gradient for every token or for none"
                raise UnsupportedError(error_text(self.layout.function, f"output {i} of fn", rule, got, advice=advice))


def _same(tensor: Tensor) -> Tensor:
    return tensor
