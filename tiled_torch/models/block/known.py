"""Which description of `families.py` a decoder layer has: by the name of its class, or because it is written as one of these.

transformers writes every model out in a file of its own, so that many have the same layer under other names. Such a layer runs
as the known one: the forward of the layer, and all methods of its attention, have the same text, and those of its MLP the text
of an MLP that the known one may have. Annotations, docstrings and comments do not count. What these texts call by name (rotary
positions, attention) is called where the layer has it.
"""

import ast
import inspect
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn
from transformers import GradientCheckpointingLayer
from transformers.models.auto import configuration_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from tiled_torch.models.block.families import BLOCK_FAMILIES, BlockFamily
from tiled_torch.models.family import forward_in_place_of, home_of, is_of

Texts = tuple[tuple[str, str], ...]  # of a class's methods, by name
_PLACES = frozenset(family.attention for family in BLOCK_FAMILIES.values())


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a decoder layer that has a description, and runs its class's own forward."""
    kind = type(module)
    if kind.__name__ not in BLOCK_FAMILIES and (home_of(module) is not kind or name_of_alike(module) is None):
        return False
    return forward_in_place_of(module, {kind.__name__}) is None


def family_of_block(layer: Any) -> BlockFamily:
    """Return the description of a decoder layer, by the class that it had before tiling or sharding."""
    names = (base.__name__ for base in type(layer).__mro__ if base.__name__ in BLOCK_FAMILIES)
    name = next(names, None) or name_of_alike(layer)
    assert name is not None
    return BLOCK_FAMILIES[name]


def attention_of(layer: Any) -> Any:
    """Return the attention of a layer."""
    return getattr(layer, family_of_block(layer).attention)


def has_experts(layer: Any) -> bool:
    """Return whether the MLP of a decoder layer is a mixture of experts."""
    return hasattr(layer.mlp, "experts")


def reason_more(layer: Any) -> str | None:
    """Return which setting of a layer adds something that is not computed in a block; None where there is none."""
    attention = attention_of(layer)
    for name in family_of_block(layer).without:
        if any(getattr(part, name, None) for part in (attention, attention.config, layer.mlp)):
            return f"{name} is not 0"
    return None


def linears_of(layer: Any) -> tuple[str, ...]:
    """Return all projections of a layer, but for those of a mixture of experts."""
    family = family_of_block(layer)
    named = (*family.qkv, family.out, *(() if has_experts(layer) else (*family.up, family.down)))
    return tuple(name for name in named if not family.latent or _is_there(layer, name))


def _is_there(layer: Any, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return getattr(layer.get_submodule(owner), own, None) is not None


def name_of_alike(layer: nn.Module) -> str | None:
    """Return the name of the known class that a layer of transformers is written as; None where there is none."""
    home, mlp = home_of(layer), getattr(layer, "mlp", None)
    if not is_of("transformers", home) or not issubclass(home, GradientCheckpointingLayer):
        return None
    attentions = {at: attention for at in _PLACES if isinstance(attention := getattr(layer, at, None), nn.Module)}
    if len(attentions) != 1 or not isinstance(mlp, nn.Module):
        return None
    ((at, attention),) = attentions.items()
    return _alike(home, at, home_of(attention), home_of(mlp), hasattr(mlp, "experts"))


@cache
def _alike(home: type, at: str, attention: type, mlp: type, experts: bool) -> str | None:
    of_layer, of_attention, of_mlp = (_texts(kind) for kind in (home, attention, mlp))
    for name, written in _all_written().items():
        family = BLOCK_FAMILIES[name]
        if family.attention == at and (written.layer, written.attention) == (of_layer, of_attention):
            same = (one for other, one in _all_written().items() if experts or _mlp_of(other) == _mlp_of(name))
            if any(of_mlp in (one.mixtures if experts else one.mlps) for one in same):
                return name
    return None


def _mlp_of(name: str) -> tuple[Any, ...]:
    family = BLOCK_FAMILIES[name]
    return family.up, family.down, family.gated, family.activation


@dataclass(frozen=True)
class _LayerTexts:
    """What a class of layers is written as. mlps: what those of the MLPs are that it may make; mixtures: those with experts."""

    layer: Texts
    attention: Texts
    mlps: frozenset[Texts]
    mixtures: frozenset[Texts]


@cache
def _all_written() -> dict[str, _LayerTexts]:
    """Return how the known classes are written that this transformers has."""
    names: Any = configuration_auto
    kinds = {name.removesuffix("Config"): kind for kind, name in names.CONFIG_MAPPING_NAMES.items()}
    found = {}
    for name, family in BLOCK_FAMILIES.items():
        kind = kinds.get(name.removesuffix("Layer").removesuffix("Decoder"))
        if kind is None:
            continue
        place = model_type_to_module_name(kind)
        layer = getattr(import_module(f"transformers.models.{place}.modeling_{place}"), name, None)
        attention, mlps = ([] if layer is None else _made(layer, attribute) for attribute in (family.attention, "mlp"))
        if len(attention) == 1:
            mixtures = {mlp for mlp in mlps if _made(mlp, "experts")}
            texts = (frozenset(_texts(mlp) for mlp in mlps if (mlp in mixtures) == mixed) for mixed in (False, True))
            found[name] = _LayerTexts(_texts(layer), _texts(attention[0]), *texts)
    return found


def _made(kind: Any, attribute: str) -> list[Any]:
    """Return the classes of its own module from which a class makes what it has as an attribute."""
    assigned = [node for node in ast.walk(_tree(kind.__init__)) if isinstance(node, ast.Assign)]
    values = [node.value for node in assigned if ast.unparse(node.targets[0]) == f"self.{attribute}"]
    calls = (node.func for value in values for node in ast.walk(value) if isinstance(node, ast.Call))
    home = vars(inspect.getmodule(kind))
    found = (home.get(func.id) for func in calls if isinstance(func, ast.Name))
    return list(dict.fromkeys(made for made in found if inspect.isclass(made)))


@cache
def _texts(kind: type) -> Texts:
    """Return the texts of a class's methods, but for the one that makes it; none where they cannot be read."""
    own = {name: method for name, method in vars(kind).items() if inspect.isfunction(method) and name != "__init__"}
    try:
        return tuple(sorted((name, ast.unparse(_bare(_tree(method)))) for name, method in own.items()))
    except OSError:
        return ()


def _tree(function: Any) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    return tree


def _bare(tree: ast.FunctionDef) -> ast.FunctionDef:
    """The same without annotations and docstring."""
    tree.returns = None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return tree
