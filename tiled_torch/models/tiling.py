"""`tile_model` and `untile_model`: the MLPs of a Hugging Face model and its loss, tiled in place.

A module keeps its attributes and parameters and only changes its class, to a subclass whose forward is tiled; state_dict
keys, hooks, `save_pretrained` and sharding engines see the same module as before.
"""

import warnings
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from shared_specs.config import TORCH, Tiling
from shared_specs.core import checks
from shared_specs.errors import UnsupportedError, error_text, fail_type
from shared_specs.layers.scope import check_block_tiling, check_scope
from tiled_torch import backends
from tiled_torch.core import partitioned
from tiled_torch.models.attention import attend_as_before, attend_by_windows
from tiled_torch.models.block.families import BLOCK_FAMILIES as BLOCKS
from tiled_torch.models.block.known import is_block
from tiled_torch.models.block.layer import TiledBlock, TiledNorm, block_class, norm_class, reason_not_block
from tiled_torch.models.causal_lm import TiledCausalLM, loss_path
from tiled_torch.models.experts.marker import OfExperts
from tiled_torch.models.experts.module import TiledExperts, TiledRouter, path_of_experts, tile_experts
from tiled_torch.models.heads.model import TiledAnyLM, decoder_of, head_of, is_exact, path_before
from tiled_torch.models.mlps.chunk import TiledChunk, chunk_path
from tiled_torch.models.mlps.found import Found
from tiled_torch.models.mlps.inline import TiledInline, inline_path
from tiled_torch.models.mlps.survey import Survey, survey
from tiled_torch.models.mlps.tiled import FAMILIES as FAMILIES
from tiled_torch.models.mlps.tiled import Tiled as Tiled
from tiled_torch.models.mlps.tiled import family_of as family_of
from tiled_torch.models.mlps.tiled import known_of, note_made, reason_not_plain
from tiled_torch.models.mlps.tiled import path_now as path_now
from tiled_torch.models.reports import ALONE


def tile_model(
    model: nn.Module,
    *,
    scope: Literal["mlp", "block"] = "mlp",
    strict: bool = False,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> nn.Module:
    """Return the same model. From now on it computes its MLPs and its loss shard by shard. Parameters and state_dict keys do
    not change.

    `tile_model` finds MLPs by their linear layers. An MLP runs through `tiled_mlp` if its class is known. It also does if a
    probe of its own code equals that formula up to rounding. The probe is a small float64 copy of the MLP that reads no
    weight. An MLP runs through `tile` if it is token-wise but more than the formula: LoRA adapters, quantised or separately
    sharded projections, hooks, dropout, factors, norms. Some layers call `fc1` and `fc2` in their own forward (OPT, BART).
    There `tile_model` follows the operations between the two. If they are more than an activation (active dropout, say), or
    the two have hooks, the MLP is computed whole. Any other module stays untiled, and a warning and `tiling_paths` give the
    reason.

    A mixture of experts is tiled if transformers knows its class by `use_experts_implementation`, or if it is Llama 4's. Each
    router and its experts take one shard of tokens at a time. An expert computes only the rows routed to it and does not
    recompute its second product. Weight gradients are summed in float32, one expert at a time. Hooks, recorded router
    logits and the load-balancing term cover all tokens. That term is part of the loss if it is the model's own. Experts
    with custom kernels (`experts_implementation`), or with more than the formula, run through `tile`. keep has no meaning
    for experts. A memory budget limits the rows of one expert.

    The loss of every language model with a head and labels is tiled too. `model(..., labels=labels).loss` is the model's own
    loss, with `num_items_in_batch` and `shift_labels`; it is 0 if every label is ignored. Known classes run a forward of this
    library, which torch.compile traces. Any other class runs its own forward. Its head returns logits that are followed to
    their cross entropy, and computed whole if anything else reads them. The same holds for a module that is not from
    transformers, if it has an `lm_head` and its forward takes `labels` or `targets`. `.logits` exist as before, with
    gradients. They are computed only when they are read (under torch.compile, when an attribute or item of the outputs is
    read). They belong to the forward: reading them for the first time after the optimizer's step is a RuntimeError. If the
    head is a separate FSDP2 unit, the logits have values. Their gradient is an UnsupportedError if the unit's weights are
    not gathered.

    `logits_to_keep` selects logits. In known classes the loss always covers all labels. If a loss does not run through
    `tiled_linear_cross_entropy`, one warning says why.

    Several documents may be packed into one sequence. If `position_ids` restart, and there is no mask and no cache, attention
    stays within documents as in transformers. Llama, Mistral, Qwen and Gemma models with "sdpa" attend to one document
    after the other, without a mask of all tokens. In the loss of known classes, the last token of a document predicts
    nothing. In other classes it does what it does in transformers: give it the label -100. For the loss, positions restart
    where one is not larger than the one before it. Steps of more than one remove no label.

    Attention itself stays the model's, with one exception. If layers see a window of tokens (Mistral, Gemma 3, Qwen, Phi-3,
    Cohere 2, OLMo 3 and the other types in `models/attention.py`) and attend by "sdpa", transformers makes a mask of all pairs
    of tokens. `tile_model` sets the implementation "tiled_torch_sdpa", which computes the same by blocks of queries without
    that mask. It calls "sdpa" for padded batches, caches, masks of your own and compiled code. `untile_model` sets "sdpa".

    Under ZeRO-3 an MLP, and the head with its loss, are gathered once around all shards. You need not mark any module. The
    DeepSpeed engine may come first, except if MLPs have adapters (LoRA). Such MLPs become leaf modules of the engine. Their
    x must require grad (`model.enable_input_require_grads()`), and one backward may run through them only once.

    Args:
        model: a Hugging Face model, or a part of one; changed in place.
        scope: "mlp" tiles the MLPs and the loss. "block" also tiles the rest of every decoder layer except attention, for the
            families in `models/block/families.py` and for layers that are written as one of these. Their MLPs may be gated or
            plain MLPs or mixtures of experts. Such a layer keeps only its input, in host memory if checkpointing offloads, and
            fills no cache in training. Compilers do not compile it. `tiling_paths` says why a layer tiles only its MLP. "block"
            excludes keep, a memory budget and a backend.
        strict: True refuses a model in which anything would stay untiled, or whose loss path is not known beforehand. This
            includes the head of a classifier or a reward model, which has a few outputs per token. Pass its base model instead.
        num_shards, keep, tiling, backend: as in `tiled_mlp`, for every MLP. They apply to the loss too, except keep.
    Returns:
        The model itself.
    Raises:
        SpecError, TypeError: a number out of its range.
        UnsupportedError: nothing can be tiled, or, with strict, something cannot; with scope="block", no layer is like those
            families', or an excluded option is set; MLPs with adapters are in a ZeRO-3 engine. The model is then unchanged. In
            calls under ZeRO-3: the head is no plain linear layer, or x of an MLP with adapters does not require grad.
    Memory: with scope="block" see shared_specs.layers.block_costs.eager_block_row_bytes.
    Source: derived in shared_specs/README.md.
    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        ...                      vocab_size=16)
        >>> model = tile_model(LlamaForCausalLM(config), num_shards=4)
        >>> tiling_paths(model)["model.layers.0.mlp"]
        'tiled_mlp'
    """
    options = checked_options(scope, strict, num_shards, keep, tiling, backend)
    if not isinstance(model, nn.Module):
        fail_type("tile_model", "model", "a torch.nn.Module", type(model).__name__)
    seen = survey(model)
    _refuse_what_is_seen(model, seen, strict=strict)
    if scope == "block":
        _tile_blocks(model, options)
    else:
        _untile_blocks(model)
    for module, made_by in (*seen.mlps.values(), *seen.chunks.values(), *seen.inline.values(), *seen.heads.values()):
        tiled: Any = module
        if not isinstance(module, Tiled | TiledChunk | TiledInline | TiledCausalLM):
            tiled.__class__ = made_by(type(module))
        tiled._tiling, tiled._backend = options, backend
    tile_experts(model, options)
    for name, found in seen.found.items():
        seen.mlps[name][0]._found = found  # type: ignore[assignment]
    for module, _ in seen.heads.values():
        module._tiling = replace(options, keep=0.0)  # type: ignore[assignment]
        _watch_layers(module)
    heard: set[str] = set()
    for module in model.modules():
        if isinstance(module, Tiled | TiledBlock):
            module._heard = heard  # type: ignore[misc]
    note_made(model)
    attend_by_windows(model)
    for module, reason in (*seen.left.values(), *seen.others.values()):
        vars(module)["_left"] = reason
    _tell_what_is_left(model, seen)
    return model


def checked_options(
    scope: Literal["mlp", "block"] = "mlp",
    strict: bool = False,
    num_shards: int | None = None,
    keep: float = 0.0,
    tiling: Tiling | None = None,
    backend: str = "auto",
) -> Tiling:
    """Return the tiling that arguments of `tile_model` say, of whatever model.

    Raises:
        SpecError, TypeError: one that no model takes. UnsupportedError: an option that scope="block" excludes.
    """
    options = checks.resolve_tiling("tile_model", num_shards, keep, tiling, unused=("vocab_shards", "deterministic"))
    checks.check_backend("tile_model", backend, TORCH, backends.usable_backends())
    checks.check_flags("tile_model", strict=strict)
    check_scope("tile_model", scope)
    if scope == "block":
        check_block_tiling("tile_model", options, backend)
    return options


def _refuse_what_is_seen(model: nn.Module, seen: Survey, *, strict: bool) -> None:
    """Refuse a model of which nothing can be tiled, or, with strict, not everything; and what a ZeRO-3 engine has already."""
    left = {name: reason for name, (_, reason) in seen.left.items()}
    if strict or not seen.layers:
        paths = {f"{name}.head".removeprefix("."): head_path(module) for name, (module, _) in seen.heads.items()}
        left |= {name: path for name, path in paths.items() if path.startswith(("untiled", "unknown"))}
        if not seen.layers and all(path.startswith("untiled") for path in paths.values()):
            rule = "one with an MLP, or a causal language model's loss, that can be tiled"
            got = "; ".join((type(model).__name__, *(_named(name, reason) for name, reason in list(left.items())[:3])))
            advice = "Use tile(module) for a token-wise module of another kind."
            raise UnsupportedError(error_text("tile_model", "model", rule, got, advice=advice))
    if strict:
        inside = {name: inline_path(module) for name, (module, _) in seen.inline.items()}
        left |= {name: path for name, path in inside.items() if path.startswith("untiled")}
        left |= {name: reason for name, (_, reason) in seen.others.items()}
    if strict and left:
        name, reason = next(iter(left.items()))
        got = _named(name, reason) + (f", and {len(left) - 1} more" if len(left) > 1 else "")
        advice = "Pass strict=False to tile the others; tiling_paths then says what was left."
        raise UnsupportedError(
            error_text("tile_model", "model", "tiled as a whole with strict=True", got, advice=advice)
        )
    for name, (module, _) in seen.mlps.items():
        known = seen.found.get(name) or known_of(module)
        if known is None or isinstance(module, Tiled) or not partitioned.gathers(getattr(module, known.projections[0])):
            continue
        reason = known.reason(module) if isinstance(known, Found) else reason_not_plain(module)
        if reason is not None:
            _refuse_after_engine("tile_model", f"one that has its hooks, and {reason}")


def _named(name: str, reason: str) -> str:
    """A reason behind the name of its module; the model itself has none."""
    return f"{name}: {reason}" if name else reason


def _tell_what_is_left(model: nn.Module, seen: Survey) -> None:
    """Warn once of what tile_model leaves as it is."""
    names: dict[str, list[str]] = {}
    for name, (_, reason) in seen.left.items():
        names.setdefault(reason, []).append(name)
    for reason, found in names.items():
        stays = f" and {len(found) - 1} more stay as they are" if len(found) > 1 else " stays as it is"
        text = f"tile_model: {found[0]}{stays} in {type(model).__name__}: {reason}."
        warnings.warn(text, UserWarning, stacklevel=3)


def _watch_layers(model: Any) -> None:
    """Let one MLP of a language model see whether the model's own forward is used."""
    decoder: Any = decoder_of(model)  # not a tower of images, which `generate` calls alone
    layers = () if decoder is None else decoder.modules()
    watcher: Any = next((inner for inner in layers if isinstance(inner, Tiled | TiledInline | TiledExperts)), None)
    if watcher is not None:
        watcher._model_name = type(model).__name__


def head_path(model: Any) -> str:
    """Return how the loss of a model would run now."""
    return loss_path(model) if is_exact(model) else path_before(model)


def _tile_blocks(model: nn.Module, options: Tiling) -> None:
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, TiledBlock) or is_block(module)]
    if not blocks:
        rule = "a decoder of a family whose blocks are known: " + ", ".join(sorted(BLOCKS))
        advice = "Use scope='mlp'."
        raise UnsupportedError(error_text("tile_model", "model", rule, type(model).__name__, advice=advice))
    for block in blocks:
        if not isinstance(block, TiledBlock):
            block.__class__ = block_class(type(block))
        block._block_tiling, block._block_count = options, len(blocks)
    for module in list(model.modules()):
        layers: Any = getattr(module, "layers", ())
        norm: Any = next((found for name in _LAST_NORMS if (found := getattr(module, name, None)) is not None), None)
        if norm is not None and any(isinstance(layer, TiledBlock) for layer in layers):
            if not isinstance(norm, TiledNorm):
                norm.__class__ = norm_class(type(norm))
            norm._block_tiling = options


_LAST_NORMS = ("norm", "final_layernorm", "final_layer_norm")  # names of the one behind the last layer


def _untile_blocks(model: nn.Module) -> None:
    """Give layers that ran as one function their own forward again; their MLPs stay tiled."""
    for module in model.modules():
        if isinstance(module, TiledBlock | TiledNorm):
            tiled: Any = module
            tiled.__class__ = tiled._untiled
            for name in TiledBlock.__annotations__:
                vars(module).pop(name, None)


def untile_model(model: nn.Module) -> nn.Module:
    """Return the same model with its MLPs computed whole again; a model that was not tiled is returned as it is.

    Args:
        model: changed in place, also inside sharding wrappers that came after tiling.
    Example:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96))
        >>> type(untile_model(tile_model(mlp))).__name__
        'LlamaMLP'
    """
    if not isinstance(model, nn.Module):
        fail_type("untile_model", "model", "a torch.nn.Module", type(model).__name__)
    if any(isinstance(m, Tiled) and partitioned.gathers(m) and m._z3_leaf for m in model.modules()):
        _refuse_after_engine("untile_model", "one in which it gathers tiled MLPs as a whole")
    made = [module for module in model.modules() if isinstance(module, MADE)]
    others = [module for module in made if type(module) is not type(module)._made_by(module._untiled)]
    if others:
        advice = "Untile the model before wrapping it."
        got = type(others[0]).__name__
        raise UnsupportedError(
            error_text("untile_model", "model", "free of classes added after tiling", got, advice=advice)
        )
    attend_as_before(model)
    for module in model.modules():
        vars(module).pop("_left", None)
    for module in made:
        tiled: Any = module
        tiled.__class__ = tiled._untiled
        for kind in MADE:
            for name in getattr(kind, "__annotations__", ()):
                vars(tiled).pop(name, None)
    return model


MADE = (
    Tiled,
    TiledChunk,
    TiledInline,
    TiledCausalLM,
    TiledAnyLM,
    TiledBlock,
    TiledNorm,
    TiledExperts,
    TiledRouter,
    OfExperts,
)


def _refuse_after_engine(function: str, got: str) -> None:
    advice = "Call it before deepspeed.initialize, which hangs hooks on modules as they are then."
    raise UnsupportedError(error_text(function, "model", "one that no ZeRO-3 engine has yet", got, advice=advice))


def tiling_paths(model: nn.Module) -> dict[str, str]:
    """Return a mapping from the name of each part to the path that it runs.

    A tiled MLP has "tiled_mlp", or "tile" and the reason why its projections are not plain. Experts have "tiled_experts",
    or the other path and the reason. Their routers have "tile". Every other MLP that `tile_model` saw has "untiled" and the
    reason. With scope="block" every layer also has "tiled_block", or the reason why only its MLP is tiled.

    The head of a language model has "tiled_linear_cross_entropy", or the other path of its loss and the reason. The head of a
    classifier or a reward model has "untiled", and a note that its loss is a different one. Each path is what the last call
    ran. Before the first call, or if only compiled code ran, it is what a call would run now.

    Args:
        model: a model that `tile_model` has changed. Any other model has no paths.
    Example:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaMLP
        >>> tiling_paths(tile_model(LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))))
        {'': 'tiled_mlp'}
    """
    if not isinstance(model, nn.Module):
        fail_type("tiling_paths", "model", "a torch.nn.Module", type(model).__name__)
    paths = {}
    within: tuple[str, ...] = ()  # layers whose MLP is a part of one function
    for name, module in model.named_modules():
        if isinstance(module, Tiled):
            paths[name] = "tiled_block" if name.startswith(within) else module._ran or path_now(module)
        elif isinstance(module, TiledBlock):
            reason = reason_not_block(module)
            paths[name] = module._block_ran or ("tiled_block" if reason is None else f"mlp: {reason}")
            within += (f"{name}.",) if paths[name].startswith("tiled_block") else ()
        elif isinstance(module, TiledExperts | TiledRouter):
            paths[name] = path_of_experts(module)
        elif isinstance(module, TiledChunk):
            paths[name] = module._ran or chunk_path(module)  # type: ignore[arg-type]  # a mixin of modules
        elif isinstance(module, TiledInline):
            paths[name] = module._ran or inline_path(module)
        if isinstance(module, TiledCausalLM):
            inside: Any = module.modules()  # type: ignore[attr-defined]  # a mixin of modules
            alone = any(isinstance(inner, Tiled | TiledInline | TiledExperts) and inner._alone for inner in inside)
            path = f"untiled: {ALONE}" if alone else module._ran or head_path(module)
            head, _ = head_of(module) or ("lm_head", None)
            place = f"{name}.{head}".removeprefix(".")
            if place not in paths or module._ran:  # else the model around this one has the loss
                paths[place] = path
        elif "_left" in vars(module):
            paths.setdefault(name, f"untiled: {vars(module)['_left']}")
    return paths
