"""What of a model `tile_model` would tile, and what it would leave and why; nothing is changed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tiled_torch.models.causal_lm import TiledCausalLM, tiled_causal_lm
from tiled_torch.models.experts.forms import is_experts, routers_in
from tiled_torch.models.family import forward_in_place_of
from tiled_torch.models.heads.model import any_lm, head_of, is_exact, other_heads, reason_not_any
from tiled_torch.models.mlps.chunk import TiledChunk, chunk_class, has_chunk, reason_not_chunk
from tiled_torch.models.mlps.found import Found, find
from tiled_torch.models.mlps.inline import TiledInline, inline_class, reason_not_inline
from tiled_torch.models.mlps.layout import inline_pair, is_named_mlp, is_routed, is_split_mlp
from tiled_torch.models.mlps.tiled import Tiled, family_of, tiled_class

Maker = Callable[[type[nn.Module]], type[nn.Module]]
ROUTED = "it is a mixture of experts"
SHAPES = "it has no two or three linear layers with the sizes of an MLP's"
HALVES = "its MLP is in two modules, intermediate and output, which it calls itself"
ADVICE = "Tile the model before what replaces it (accelerate's hooks, say)"


@dataclass
class Survey:
    """mlps, chunks, inline, heads: name -> (module, what its class becomes). experts: names of experts and routers. found:
    what probes showed, by the name of the MLP. left: name -> (module, why). heads' reasons are by the name of the head.
    others: the same of heads of other losses, which are a few numbers for a token and of which nobody is warned."""

    mlps: dict[str, tuple[nn.Module, Maker]] = field(default_factory=dict)
    experts: list[str] = field(default_factory=list)
    chunks: dict[str, tuple[nn.Module, Maker]] = field(default_factory=dict)
    inline: dict[str, tuple[nn.Module, Maker]] = field(default_factory=dict)
    heads: dict[str, tuple[nn.Module, Maker]] = field(default_factory=dict)
    found: dict[str, Found] = field(default_factory=dict)
    left: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    others: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Return how many layers are tiled, heads not counted."""
        return len(self.mlps) + len(self.chunks) + len(self.inline) + len(self.experts)


def survey(model: nn.Module) -> Survey:
    """Return what is to be tiled of a model. Probes have values of their own, also under fake tensors, which have none."""
    with unset_fake_temporarily():
        return _survey(model)


def _survey(model: nn.Module) -> Survey:
    result = Survey()
    heads = {id(head[1]) for head in map(head_of, model.modules()) if head is not None}
    _look_for_experts(result, model)
    inside = tuple(f"{name}." for name in result.experts)
    for name, module in model.named_modules():
        if name in result.experts or name.startswith(inside):
            continue
        if not any(id(child) in heads for child in module.children()):  # the layers in front of a head are no MLP
            _look(result, name, module)
    tiled = (*result.mlps, *result.experts)
    names = tuple(f"{name}." for name in (*tiled, *result.chunks) if name)
    for name, module in model.named_modules():
        unseen = name not in result.left and name not in tiled and not name.startswith(names)
        if unseen and is_named_mlp(name, module) and not any(inner.startswith(f"{name}.") for inner in tiled):
            result.left[name] = module, ROUTED if is_routed(module) else SHAPES
        elif unseen and (pair := inline_pair(module)) is not None:
            _look_inside(result, name, module, pair)
        elif unseen and name not in result.chunks and is_split_mlp(module):
            result.left[name] = module, HALVES
    for name, module in model.named_modules():
        _look_for_head(result, name, module)
        _look_for_others(result, name, module)
    return result


def _look_for_experts(result: Survey, model: nn.Module) -> None:
    experts = [(name, module) for name, module in model.named_modules() if is_experts(module)]
    for name, module in (*experts, *routers_in(model)):
        if "forward" in vars(module):
            result.left[name] = module, _forward_of_its_own(module)
        else:
            result.experts.append(name)


def _forward_of_its_own(module: nn.Module) -> str:
    own = vars(module)["forward"]
    return f"its forward is {getattr(own, '__name__', type(own).__name__)}. {ADVICE}"


def _look(result: Survey, name: str, module: nn.Module) -> None:
    if isinstance(module, Tiled):
        result.mlps[name] = module, tiled_class
    elif isinstance(module, TiledChunk):
        result.chunks[name] = module, chunk_class
    elif "forward" in vars(module):
        if is_named_mlp(name, module) or family_of(module):
            result.left[name] = module, _forward_of_its_own(module)
    elif (family := family_of(module)) is not None and forward_in_place_of(module, family.classes) is None:
        result.mlps[name] = module, tiled_class
    elif has_chunk(module):
        reason = reason_not_chunk(module)
        if reason is None:
            result.chunks[name] = module, chunk_class
        else:
            result.left[name] = module, reason
    else:
        _probe(result, name, module)


def _look_inside(result: Survey, name: str, module: nn.Module, pair: tuple[str, str]) -> None:
    if "forward" in vars(module):
        result.left[name] = module, _forward_of_its_own(module)
        return
    reason = None if isinstance(module, TiledInline) else reason_not_inline(module, pair)
    if reason is None:
        result.inline[name] = module, inline_class
    else:
        result.left[name] = module, reason


def _probe(result: Survey, name: str, module: nn.Module) -> None:
    found = find(module)
    if isinstance(found, Found):
        result.mlps[name], result.found[name] = (module, tiled_class), found
    elif found is not None and is_named_mlp(name, module):
        result.left[name] = module, found


def _look_for_head(result: Survey, name: str, module: Any) -> None:
    if isinstance(module, TiledCausalLM):
        result.heads[name] = module, module._made_by  # type: ignore[assignment]  # a mixin of modules
        return
    if is_exact(module):
        result.heads[name] = module, tiled_causal_lm
        return
    head = head_of(module)
    if head is None:
        return
    reason = reason_not_any(module)
    if reason is None:
        result.heads[name] = module, any_lm
    else:
        result.left[f"{name}.{head[0]}".removeprefix(".")] = head[1], reason


def _look_for_others(result: Survey, name: str, module: nn.Module) -> None:
    seen = result.mlps.keys() | result.left.keys() | result.chunks.keys() | result.inline.keys()
    for head, child in other_heads(module).items():
        place = f"{name}.{head}".removeprefix(".")
        if place not in seen:
            result.others[place] = child, f"the loss of {type(module).__name__} is no language model's"
