"""Plans: where a kind of model has its blocks and ends, and how tensor parallelism splits them; users add their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from shared_specs.config import ContextKind, TensorParallel
from shared_specs.errors import UnsupportedError, error_text, fail

REGISTER = "Tell where they are with tiled_torch.parallel.register_plan."


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one model for `parallelize`.

    Args:
        blocks: path of the nn.ModuleList whose layers are recomputed, compiled and sharded one by one; "" if the model is
            itself the only layer.
        towers: paths of more such lists, whose layers are treated alike: an encoder of images, for example.
        ends: paths of the modules that are called before and after the blocks (embedding, final norm, head), in order. Leave
            out a module whose forward is not called.
        ends_apart: whether, with data parallelism, the first of the ends is one unit and the others are another. False if two
            of them share a weight, or if a weight is used without calling its module.
        check: (model, tensor, ranks) -> None; raises if the model cannot be split this way. It is called before any change.
        styles: (model, tensor) -> {path, where * stands for any one name: torch ParallelStyle}; None: no tensor parallelism.
        finish: (model, mesh, tensor) -> None; called after the styles are applied, for example to tie weights again or to
            replace a loss.
        same_batch: whether every rank of the tensor axis is called with the same batch. The first call then compares the
            batches. False if ranks are called with their own tokens.
        context: (model, mesh of one axis) -> None; changes the model so that it takes whole sequences and computes only this
            rank's tokens. None: no context parallelism. See `context_slice` and `context_attention`.
        context_kinds: the kinds of `DataParallel.context` that `context` supports. For kinds other than "ulysses", `context`
            also gets the kind; for "2d" it gets a mesh of two axes.
        check_context: (model, ranks) -> None; as `check`. ranks maps the names of the axes that divide heads to their sizes,
            the context axis last; a ring counts as 1.
        token_mean: (model, meshes of one axis each) -> None; makes the model's loss the mean over the labels of all ranks of
            these axes, the same on each rank. None: the model does not compute the loss. See `DataParallel.loss_mean`.
        no_layers: why the layers of a model that nobody registered are not known. It is then one unit, with a warning, and
            has no checkpointing. None: they are known.
    """

    blocks: str
    towers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    ends_apart: bool = True
    check: Callable[[Any, TensorParallel, int], None] = _nothing
    styles: Callable[[Any, TensorParallel], Mapping[str, ParallelStyle]] | None = None
    finish: Callable[[Any, DeviceMesh, TensorParallel], None] = _nothing
    same_batch: bool = True
    context: Callable[..., None] | None = None
    context_kinds: tuple[ContextKind, ...] = ("ulysses",)
    check_context: Callable[[Any, Mapping[str, int]], None] = _nothing
    token_mean: Callable[[Any, Sequence[DeviceMesh]], None] | None = None
    no_layers: str | None = None

    def blocks_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers of this model, in order, those of towers first."""
        return [layer for layers in self.lists_of(model) for layer in layers]

    def lists_of(self, model: nn.Module) -> list[list[nn.Module]]:
        """Return the layers of every tower, and those of `blocks`."""
        return [list(model.get_submodule(path).children()) if path else [model] for path in (*self.towers, self.blocks)]


Builder = Callable[[Any], Plan]
_BUILDERS: dict[str | type, Builder] = {}
_BY_STRUCTURE: list[Callable[[nn.Module], Plan | str]] = []


def register_plan(kind: str | type[nn.Module], plan: Plan | Builder, *, replace: bool = False) -> None:
    """Register a kind of model with `parallelize`.

    Args:
        kind: the `config.model_type` of Hugging Face models, or a class, which stands for its subclasses too.
        plan: the plan of every model of that kind, or a function that returns the plan of a given model.
        replace: whether this plan may replace an existing one.
    Raises:
        SpecError: the kind has a plan and replace is False.
    Example:
        >>> class Stack(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        >>> register_plan(Stack, Plan(blocks="layers"))
        >>> len(plan_of(Stack()).blocks_of(Stack()))
        2
    """
    _load_own_plans()
    if kind in _BUILDERS and not replace:
        fail("register_plan", "kind", "one without a plan", _name(kind), advice="Pass replace=True to exchange it.")
    _BUILDERS[kind] = plan if not isinstance(plan, Plan) else lambda _: plan


def plan_by_structure(find: Callable[[nn.Module], Plan | str]) -> Callable[[nn.Module], Plan | str]:
    """Let a function find the plans of models of no registered kind, or say why there is none."""
    _BY_STRUCTURE[:] = [find]
    return find


def plan_of(model: nn.Module, function: str = "parallelize") -> Plan:
    """Return the plan of a model: of its class or the nearest base class with a plan, else of its `config.model_type`, else by
    its structure (`any_model.structural_plan`), else as one unit.

    Raises:
        UnsupportedError: it is a wrapper of peft's. function: for the message.
    """
    _load_own_plans()
    for base in type(model).__mro__:
        if base in _BUILDERS:
            return _BUILDERS[base](model)
    get_inside: Any = getattr(model, "get_base_model", None)  # of peft's models
    inside = model if get_inside is None else get_inside()
    if inside is not model and isinstance(inside, nn.Module):
        rule = f"the {type(inside).__name__} in it"
        advice = "Pass what its get_base_model() returns, which holds the adapters too and is changed in place."
        raise UnsupportedError(error_text(function, "model", rule, type(model).__name__, advice=advice))
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in _BUILDERS:
        return _BUILDERS[kind](model)
    (find,) = _BY_STRUCTURE
    found = find(model)
    return found if isinstance(found, Plan) else Plan(blocks="", no_layers=found)


def _load_own_plans() -> None:
    """The library's plans register themselves when they are imported, which need not have happened yet."""
    for name in ("decoder", "any_model"):
        import_module(f"tiled_torch.plans.{name}")


def _name(kind: str | type) -> str:
    return kind if isinstance(kind, str) else kind.__name__
