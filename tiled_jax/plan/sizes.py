"""The sizes of a decoder in nnx, and its parameters as they are: dtypes, adapters, what is frozen."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flax import nnx

from shared_specs.app.plan.decoder import CAPS, Decoder
from shared_specs.app.plan.function.checks import check_loss_fn, fail_no_module
from shared_specs.app.plan.held import Parameter, Place, held_of
from shared_specs.errors import UnsupportedError, error_text
from tiled_jax.models.block.plain import reason_not_block
from tiled_jax.models.config import LlamaConfig
from tiled_jax.plan.measured import measured_decoder
from tiled_jax.plan.trained import with_trained

_BLOCKS = "There are formulas of layers that run as blocks alone; with loss_fn the model's own step is measured."


def decoder_of_model(function: str, model: Any, wrt: Any, loss_fn: Any = None, tokens: int = 0) -> Decoder:
    """Return the sizes that the model's config says, with the parameters that the model has; of a model of others, and with a
    loss of its own, one whose step is measured.

    Args:
        model: a `tiled_jax.models.Llama`, or another nnx.Module, of arrays or of shapes. loss_fn: as in `parallelize`.
        tokens: for which a step that is measured is compiled, and not its neighbours.
        wrt: a filter of the parameters that are trained; None: the adapters where there are any, else all.
    Raises:
        TypeError: it is no model, wrt is no filter or loss_fn no function.
        UnsupportedError: its layers have adapters with which no layer runs as one block.
    """
    if not isinstance(model, nnx.Module):
        fail_no_module(function, model)
    check_loss_fn(function, loss_fn)
    config = getattr(model, "config", None)
    if not isinstance(config, LlamaConfig) or loss_fn is not None:
        return measured_decoder(function, model, wrt, loss_fn, tokens)
    decoder = _decoder(config)
    held = replace(decoder, held=held_of(_parameters(function, model, decoder, wrt), tied=decoder.tied))
    reason = reason_not_block(getattr(model, "layers", None)) if held.adapted else None
    if reason is not None:
        raise UnsupportedError(error_text(function, "a layer's parts", "plain in JAX", reason, advice=_BLOCKS))
    return held


def _decoder(config: LlamaConfig) -> Decoder:
    windows = [config.kinds[kind].window for kind in config.kind_of_layer]
    windowed = [window for window in windows if window is not None]
    caps = config.attention_softcap, config.logit_softcap
    return Decoder(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        kind=_kind(config),
        attention_bias=config.attention_out_bias,
        mlp_bias=config.mlp_bias,
        caps=tuple(cap for cap, value in zip(CAPS, caps, strict=True) if value is not None),
        experts=0 if config.experts is None else config.experts.count,
        chosen=0 if config.experts is None else config.experts.chosen,
        window=windowed[0] if windowed else None,
        windowed=len(windowed),
    )


def _kind(config: LlamaConfig) -> str:
    """Return the model_type whose decoder has all this."""
    if config.experts is not None:
        return "qwen3_moe" if config.head_norms else "mixtral"
    if config.attention_softcap is not None or config.logit_softcap is not None:
        return "gemma2"
    if config.branch_norms:
        return "gemma3_text"
    if config.fused:
        return "phi3"
    if any(kind.rope is None for kind in config.kinds):
        return "smollm3"
    if config.head_norms:
        return "qwen3"
    return "qwen2" if config.attention_bias and not config.attention_out_bias else "llama"


def _parameters(function: str, model: nnx.Module, decoder: Decoder, wrt: Any) -> Iterator[Parameter]:
    """Layers are one stack: every parameter of theirs has all layers' part."""
    for path, value, trained in with_trained(function, model, wrt):
        if path[0] == "layers":
            place: Place = "mlp" if path[1] == "mlp" else "norm" if path[-1] == "scale" else "attention"
            for layer in range(decoder.layers):
                yield Parameter(place, layer, value.size // decoder.layers, value.dtype.itemsize, trained)
        else:
            yield Parameter(_at_ends(path), None, value.size, value.dtype.itemsize, trained)


def _at_ends(path: tuple[Any, ...]) -> Place:
    """Adapters of the head are none of its weight: it has no gradient for them."""
    if path[-1] not in ("kernel", "embedding"):
        return "ends"
    return "head" if path[0] == "head" else "embedding"
