"""Why a decoder layer cannot run as one block: of its parts the block's formulas are computed, and they are never called."""

from collections.abc import Iterator
from typing import Any

from flax import nnx

from tiled_jax.mlp.module import TiledMLP
from tiled_jax.mlp.projections import reason_not_plain, reason_of_products
from tiled_jax.models.block.adapters import dtype_of_products, mlp_projections, projection_of, reason_not_projection
from tiled_jax.models.experts import ExpertsMLP
from tiled_jax.models.layer import Attention, DecoderLayer, OffsetRMSNorm

# What an nnx.RMSNorm computes with, beside its scale and epsilon.
_OF_NORM = {"dtype": None, "use_scale": True, "axis_name": None, "reduction_axes": -1, "feature_axes": -1}


def reason_not_block(layer: Any) -> str | None:
    """Return which part of a `DecoderLayer`, or of a stack of them, is more than its formula; None where all are plain.

    A part that was exchanged, such as a norm by another one, or an option that was changed, such as a norm's epsilon, would
    have no effect in a block. Projections that are parameters of their own may have adapters, Flax's as they are.
    """
    return next((reason for reason in _reasons(layer) if reason is not None), None)


def _reasons(layer: Any) -> Iterator[str | None]:
    yield None if type(layer) is DecoderLayer else f"it is {type(layer).__name__}"
    attention: Any = layer.attention
    mlp: Any = layer.mlp
    yield None if type(attention) is Attention else f"attention is {type(attention).__name__}"
    config = attention.config
    names = ("qkv", "o") if config.fused else ("q", "k", "v", "o")
    for name in names:
        reason_of = reason_not_plain if config.fused else reason_not_projection
        yield reason_of(f"attention.{name}", getattr(attention, name))
    norms = {name: getattr(layer, name) for name in ("attention_norm", "mlp_norm")}
    branches = {name: getattr(layer, name) for name in ("attention_out_norm", "mlp_out_norm")}
    heads = {f"attention.{name}": getattr(attention, name) for name in ("q_norm", "k_norm")}
    for found, wanted in ((norms, True), (branches, config.branch_norms), (heads, config.head_norms)):
        for name, norm in found.items():
            if wanted:
                yield _reason_of_norm(name, norm, config)
            else:
                yield None if norm is None else f"{name} is {type(norm).__name__}"
    yield from _reasons_of_mlp(mlp, config) if config.experts is None else _reasons_of_experts(mlp, config)
    for name in names:  # a block computes all products in one dtype
        dtype, of_mlp = projection_of(getattr(attention, name)).base.dtype, dtype_of_products(mlp)
        yield None if dtype == of_mlp else f"attention.{name} has dtype={dtype!r} beside mlp's {of_mlp!r}"


def _reasons_of_mlp(mlp: Any, config: Any) -> Iterator[str | None]:
    yield None if type(mlp) is TiledMLP else f"mlp is {type(mlp).__name__}"
    for name, projection in mlp_projections(mlp).items():
        layer = getattr(mlp, name)
        plain = projection.adapter is None or config.fused
        yield f"mlp.{name} is {type(layer).__name__}" if plain else reason_not_projection(f"mlp.{name}", layer)
        dtype, of_mlp = projection.base.dtype, dtype_of_products(mlp)
        yield None if dtype == of_mlp else f"mlp.{name} has dtype={dtype!r} beside mlp's {of_mlp!r}"
        kernels = mlp.config.backend == "pallas"
        yield "mlp has backend='pallas', whose kernels compute no adapters" if kernels else None
    own = reason_of_products(mlp)
    yield None if own is None else own.replace("the module", "mlp")
    same = (mlp.config.activation, mlp.config.gated) == (config.activation, True)
    yield None if same else "mlp has options of its own"


def _reasons_of_experts(mlp: Any, config: Any) -> Iterator[str | None]:
    yield None if type(mlp) is ExpertsMLP else f"mlp is {type(mlp).__name__}"
    yield reason_not_plain("mlp.router", mlp.router)
    yield None if mlp.router.bias is None else "mlp.router has a bias"
    same = (mlp.activation, mlp.experts, mlp.router.dtype) == (config.activation, config.experts, mlp.dtype)
    yield None if same else "mlp has options of its own"


def _reason_of_norm(name: str, norm: Any, config: Any) -> str | None:
    wanted = OffsetRMSNorm if config.norm_offset else nnx.RMSNorm
    if type(norm) is not wanted:
        return f"{name} is {type(norm).__name__}"
    options = {"epsilon": config.rms_norm_eps} | ({"offset": config.norm_offset} if config.norm_offset else _OF_NORM)
    changed = (option for option, value in options.items() if getattr(norm, option, value) != value)
    option = next(changed, None)
    return None if option is None else f"{name} has {option}={getattr(norm, option)!r}"
