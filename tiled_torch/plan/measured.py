"""The bytes of a layer's backward where no formula knows the layer: it runs without values, and its tensors are counted.

A twin of the model, tiled as the plan would tile it, is given a sequence. Each kind of layer runs forward, and backward as a
checkpoint, as it would on a GPU without the library's kernels; attention is FlashAttention's unless the model writes the scores
of all pairs.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.checkpoint import checkpoint

from shared_specs.app.option_fields import InputError
from shared_specs.app.plan.function.measured import Lengths, Measurement
from shared_specs.app.plan.setting import Scope, Setting
from shared_specs.config import Tiling
from shared_specs.shards import TARGET_TOKENS
from tiled_torch.check.live_bytes import LiveBytes
from tiled_torch.models.block.known import is_block
from tiled_torch.models.block.layer import TiledBlock
from tiled_torch.models.heads.planned import Zeros
from tiled_torch.models.tiling import head_path, tile_model, untile_model
from tiled_torch.plan.inputs import ids_of, inputs_of, without_values
from tiled_torch.plan.twin import cast_parameters, first_line, hooked, positions_of, twin_of
from tiled_torch.plans.any_model import structural_plan

_FEW = 8  # tokens of the forward that shows which layers are called
_WINDOWS = ("window", "chunk")  # in names of settings that say how far a query sees
_PLACES = ("idx", "index", "number", "layer_id")  # in names of attributes that say where a layer is, not what it is


@dataclass
class MeasuredLayers:
    """The layers of one model, measured when a plan asks.

    Attributes:
        what: the function and the argument that the model is of, for messages.
        scope: of `tile_model`: "block" where some layer is one. layers: in the order in which they are called. paths: of the
        lists in which they are.
        calls: of layers, after which nothing is kept but by the loss; 1 where nothing is kept between layers. inputs: that
        layers keep. between: features of a token in one of them. more: numbers that they hold together beside those of tokens.
        positions: tokens that a sequence may have at most, of a model with a table of positions; None: any number.
    """

    what: str
    twin: Any = field(repr=False)
    scope: Scope
    layers: tuple[Any, ...] = field(repr=False)
    paths: tuple[str, ...]
    calls: int
    inputs: int
    between: int
    more: int
    positions: int | None
    _lengths: dict[tuple[int, int, int], Lengths] = field(default_factory=dict, repr=False)

    def bytes_of(self, setting: Setting) -> int:
        """Return the bytes of the backward of the layer that takes most, without the inputs of any; with all buffers.

        Raises:
            InputError: the model cannot run so many tokens without values.
        """
        shard = setting.shard_tokens or TARGET_TOKENS[setting.device]
        key = setting.sequences, setting.itemsize, shard
        if key not in self._lengths:
            measure = partial(self._measure, *key)
            self._lengths[key] = Lengths(measure, self.positions, _window(self.twin.config.get_text_config()))
        try:
            found = self._lengths[key].bytes_at(setting.tokens)
        except Exception as error:  # of code that is not ours
            sizes = f"{setting.sequences} x {setting.tokens}"
            raise InputError(
                f"{self.what} must run {sizes} tokens without values: {first_line(error, 'one of them')}"
            ) from error
        more = 0 if setting.offload else self.more * setting.itemsize
        return found + more + sum(buffer.nbytes for buffer in self.twin.buffers())

    def _measure(self, sequences: int, itemsize: int, shard: int, tokens: int) -> Measurement:
        _tile(self.twin, self.scope, shard)
        cast_parameters(self.twin, torch.bfloat16 if itemsize == torch.bfloat16.itemsize else torch.float32)
        kinds = _kinds(self.layers)
        wanted, found, zeros = {*kinds.values()}, dict[Any, Measurement](), Zeros()

        def measure(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():  # inside a measurement
                return
            kind = kinds[id(layer)]
            if kind not in found:
                zeros.asked = False
                found[kind] = _backward(layer, args, kwargs)
                if zeros.asked:
                    raise RuntimeError(f"a {type(layer).__name__} asks for values, on which its sizes may depend")
            if found.keys() == wanted:
                raise _Measured

        try:
            with (
                hooked(self.layers, measure),
                _once_a_kind(kinds, self.layers),
                without_values(self.twin),
                zeros,
                torch.no_grad(),
            ):
                self.twin(**inputs_of(self.twin, sequences, tokens))
        except _Measured:
            pass
        peaks, sizes, steps = zip(*found.values(), strict=True)
        before = _beside_layers(self.twin, self.layers, inputs_of(self.twin, sequences, tokens), self.calls)
        return Measurement(max(peaks) + sum(before), frozenset().union(before, *sizes), max(steps))


class _Measured(BaseException):
    """Every kind of layer has run: the rest of the forward shows nothing more."""


def measured_layers(model: Any, what: str) -> MeasuredLayers | str:
    """Return the layers of a model of transformers, to be measured; or why they cannot be. The model is not changed.

    what: the function and the argument that it is of, for messages.
    """
    try:
        twin = twin_of(model)
        plan = structural_plan(twin)
        if isinstance(plan, str):
            return plan
        lists = {path: tuple(twin.get_submodule(path)) for path in (plan.blocks, *plan.towers)}
        scope: Scope = "block" if any(map(is_block, lists[plan.blocks])) else "mlp"
        positions = positions_of(twin)
        _tile(twin, scope, _FEW)
        found = _kept(twin, lists)
        if isinstance(found, str):
            return found
        measured = MeasuredLayers(what, twin, scope, *found, positions)
        _measure_few(measured)
    except Exception as error:  # of code that is not ours
        return f"Its layers cannot run without values: {first_line(error, 'one of them')}"
    return measured


def _measure_few(measured: MeasuredLayers) -> None:
    """Measure a few tokens, in 16 bits or, where layers compute in float32 whatever their weights are, in that.

    Raises:
        Exception: the layers run in neither; of code that is not ours.
    """
    try:
        measured._measure(1, torch.bfloat16.itemsize, _FEW, _FEW)
    except RuntimeError:
        measured._measure(1, torch.float32.itemsize, _FEW, _FEW)


class _Kept(NamedTuple):
    """What the layers of a model keep as their inputs: fields of `MeasuredLayers`."""

    layers: tuple[Any, ...]
    paths: tuple[str, ...]
    calls: int
    inputs: int
    between: int
    more: int


def _kept(twin: Any, lists: Mapping[str, tuple[Any, ...]]) -> _Kept | str:
    """Return what the layers keep, of those lists that are called; or why that does not follow from one of them.

    lists: by path, first that of the layers of text. A call without gradients keeps nothing. What layers keep of an image, as
    many numbers for any text, counts among those beside tokens.
    """
    every = tuple(layer for layers in lists.values() for layer in layers)
    calls, passed, kept, last = Counter[int](), Counter[bool](), list[list[int]](), list[Any]()

    def count(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = _input(args, kwargs)
        calls[id(layer)] += 1
        if torch.is_grad_enabled():
            kept[-1].append(x.numel())
        passed[not last or any(x.untyped_storage()._cdata == each for each in last)] += 1

    def note(_: Any, __: Any, result: Any) -> None:
        last[:] = [each.untyped_storage()._cdata for each in tree_iter(result) if isinstance(each, Tensor)]

    for tokens in (_FEW, 2 * _FEW):
        kept.append([])
        calls.clear()
        last.clear()
        given = inputs_of(twin, 1, tokens)
        once = _once_a_kind(_kinds(every), every, lambda: True)
        with (
            hooked(every, count),
            hooked(every, note, after=True),
            once,
            without_values(twin),
            Zeros(),
            torch.enable_grad(),
        ):
            twin(**given, labels=ids_of(1, tokens))
    few, more = kept
    grows = [(after - before) // _FEW for before, after in zip(few, more, strict=True)]
    of_tokens = [each for each in grows if each]
    if len({*of_tokens}) != 1:
        return "Its layers have other features than each other, or other tokens, of which there is no formula."
    paths = tuple(path for path, layers in lists.items() if any(calls[id(layer)] for layer in layers))
    run = getattr(twin, "_ran", None) or head_path(twin)
    if not run.startswith("tiled"):
        return f"Its loss is not tiled, of which there is no formula: {run}"
    order = {number: place for place, number in enumerate(calls)}
    layers = tuple(
        sorted((each for path in paths for each in lists[path]), key=lambda each: order.get(id(each), len(order)))
    )
    stop = calls.total() if passed[False] else 1
    return _Kept(layers, paths, stop, len(of_tokens), of_tokens[0], sum(few) - sum(grows) * _FEW)


def _window(config: Any) -> int:
    """Return the longest window, or chunk, of attention that a configuration says."""
    found = (value for name, value in vars(config).items() if type(value) is int and any(w in name for w in _WINDOWS))
    return max(found, default=0)


def _tile(twin: Any, scope: Scope, shard: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it leaves is told where the model itself is tiled
        tile_model(untile_model(twin), scope="block" if scope == "block" else "mlp", tiling=Tiling(shard_tokens=shard))


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def _backward(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Measurement:
    """Return what a layer that keeps its input alone takes, with all that it is given beside that."""
    x = _input(args, kwargs)
    own = x.detach().requires_grad_()
    args = tuple(own if each is x else each for each in args)
    kwargs = {name: own if each is x else each for name, each in kwargs.items()}
    given = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_iter((args, kwargs)) if _is_other(t, own)
    }
    call: Any = partial(checkpoint, layer, use_reentrant=False)
    if issubclass(type(layer), TiledBlock):  # one itself
        call = layer
    with torch.enable_grad(), LiveBytes() as live:
        _Result.apply(_first(call(*args, **kwargs), own)).backward()
    for parameter in layer.parameters():
        parameter.grad = None
    return Measurement(live.peak + sum(given.values()), frozenset(live.sizes.union(given.values())), live.steps)


def _is_other(value: Any, x: Tensor) -> bool:
    return isinstance(value, Tensor) and value is not x


def _first(result: Any, x: Tensor) -> Tensor:
    """Return what goes to the next layer."""
    return next(each for each in tree_iter(result) if isinstance(each, Tensor) and each.shape == x.shape)


def _beside_layers(twin: Any, layers: tuple[Any, ...], inputs: dict[str, Any], calls: int = 1) -> list[int]:
    """Return the bytes of what a model keeps for the backward of what comes before its layers, and between so many calls of
    them, and of gradients that wait for it: those of what all layers are given beside their input."""
    known = {
        tensor.untyped_storage()._cdata
        for tensor in (*twin.parameters(), *twin.buffers(), *tree_iter(inputs))
        if isinstance(tensor, Tensor)
    }
    saved: dict[int, Tensor] = {}
    given: dict[int, Tensor] = {}
    seen: list[Any] = []

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = _input(args, kwargs)
        known.add(x.untyped_storage()._cdata)  # counted with the inputs of layers
        if not seen:
            others = (each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor) and each is not x)
            given.update((each.untyped_storage()._cdata, each) for each in others)
        seen.append(x)
        if len(seen) == calls:
            raise _Measured

    try:
        with (
            hooked(layers, see),
            _nothing_kept_in(layers),
            without_values(twin),
            Zeros(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            twin(**inputs)
    except _Measured:
        pass
    kept = (tensor for place, tensor in saved.items() if place not in known and place not in given)
    waiting = (tensor for place, tensor in given.items() if place not in known and tensor.requires_grad)
    return [tensor.untyped_storage().nbytes() for tensor in (*kept, *waiting)]


def _kinds(layers: Iterable[Any]) -> dict[int, Any]:
    """Return the kind of each layer, by its number, before it runs: some note in themselves that they did."""
    return {id(layer): _kind(layer) for layer in layers}


@contextmanager
def _once_a_kind(
    kinds: dict[int, Any], layers: Iterable[Any], keeps: Callable[[], bool] = lambda: not torch.is_grad_enabled()
) -> Iterator[None]:
    """Let, inside this context, the first layer of every kind compute, and all others return what that one has returned.

    keeps: whether a result is one to return; while a layer is measured it is not.
    """
    firsts: dict[Any, Any] = {}
    others = [layer for layer in layers if firsts.setdefault(kinds[id(layer)], layer) is not layer]
    results: dict[Any, Any] = {}

    def keep(layer: Any, _: Any, result: Any) -> None:
        if keeps():
            results[kinds[id(layer)]] = result

    handles = [layer.register_forward_hook(keep) for layer in firsts.values()]
    with ExitStack() as stack:
        for layer in others:
            again = partial(_result_of, results, layer, kinds[id(layer)])
            stack.enter_context(patch.object(layer, "forward", again, create=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _nothing_kept_in(layers: Iterable[Any]) -> Iterator[None]:
    """Let every layer keep nothing inside this context, as a checkpoint whose input is counted elsewhere."""
    results: dict[Any, Any] = {}

    def run(layer: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        x = _input(args, kwargs)
        with torch.no_grad():
            result = _result_of(results, layer, kind, *args, **kwargs)
        return tree_map_only(Tensor, lambda each: _After.apply(x, each) if each.is_floating_point() else each, result)

    kinds = _kinds(layers)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(patch.object(layer, "forward", partial(run, layer, kinds[id(layer)]), create=True))
        yield


def _result_of(results: dict[Any, Any], layer: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
    if kind not in results:  # the first of the kind is called later
        results[kind] = type(layer).forward(layer, *args, **kwargs)
    return results[kind]


class _After(torch.autograd.Function):
    """Stands for a result of a layer: it depends on x, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:
        return torch.empty_like(result)


class _Result(torch.autograd.Function):
    """Takes a layer's result and lets it go: the layers behind have used it when its gradient comes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.like = y.shape, y.dtype
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta")


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return what makes two layers take the same bytes: their modules, the numbers and names these have, parameters' shapes."""
    modules = tuple((name, type(module), *_settings(module)) for name, module in layer.named_modules())
    return modules, tuple((name, p.shape, p.requires_grad) for name, p in layer.named_parameters())


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, bool | int | str | None))
    return [(name, value) for name, value in plain if not (name[0] == "_" or any(place in name for place in _PLACES))]
