"""What a model without memory is called with: ids of tokens, and where these alone do not run what else its class asks for."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tiled_torch.plan.twin import simulated_device


def inputs_of(twin: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """Return the arguments of a forward of so many sequences of so many tokens, all of one language, each with one image where
    the loss of a model of images has to have it."""
    kind = getattr(twin.config, "model_type", "")
    more = _MORE.get(kind, lambda *_: {})
    ids = {_IDS.get(kind, "input_ids"): ids_of(sequences, tokens)}
    return ids | {"use_cache": False} | more(twin, sequences, tokens)


def ids_of(sequences: int, tokens: int) -> Tensor:
    """Return ids of tokens without values: int64 [sequences, tokens]."""
    return torch.zeros(sequences, tokens, dtype=torch.long, device="meta")


def _language(twin: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """X-MOD computes an adapter with the sequences of its language, so that their number has to be known."""
    return {"lang_ids": torch.zeros(sequences, dtype=torch.long)}


def _image(twin: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """GIT takes as many tokens out of the logits as an image has, whether there is one or not; BLIP and those whose encoder
    sees do not run without one."""
    config = twin.config
    sizes = config.encoder if "encoder" in config.to_dict() else config.vision_config
    size = sizes.image_size
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = sequences, getattr(sizes, "num_channels", 3), height, width
    return {"pixel_values": torch.zeros(shape, dtype=twin.dtype, device="meta")}


def _kinds_of_tokens(twin: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """Molmo 2 does not train without: text alone, which says so."""
    return {"mm_token_type_ids": ids_of(sequences, tokens)}


def _boxes(twin: Any, sequences: int, tokens: int) -> dict[str, Any]:
    """UDOP reads where on its page a token stands."""
    return {"bbox": torch.zeros(sequences, tokens, 4, device="meta")}


_MORE: dict[str, Callable[[Any, int, int], dict[str, Any]]] = {
    "xmod": _language,
    "git": _image,
    "blip": _image,
    "vision-encoder-decoder": _image,
    "molmo2": _kinds_of_tokens,
    "udop": _boxes,
}
_IDS = {"vision-encoder-decoder": "decoder_input_ids"}  # what the argument is called, where it is not input_ids


@contextmanager
def without_values(twin: nn.Module) -> Iterator[None]:
    """Let a model run on the meta device inside this context (`simulated_device`), with as many tokens for each expert where
    its router asks how many each has, and none that ends an image where its embedding asks."""
    with simulated_device(), ExitStack() as stack:
        for module in twin.modules():
            forward = _ASKING.get(type(module).__name__)
            if forward is not None:
                stack.enter_context(patch.object(module, "forward", partial(forward, module), create=True))
        yield


def _route(router: Any, x: Tensor) -> Any:
    """Of JetMoE."""
    chosen, experts = len(x) * router.top_k, router.num_experts
    places = [chosen * expert // experts for expert in range(experts + 1)]
    parts = [end - start for start, end in pairwise(places)]
    with patch.object(Tensor, "tolist", lambda _: parts):
        return type(router).forward(router, x)


def _embed(embedding: Any, ids: Tensor) -> Tensor:
    """Of T5Gemma 2, which writes one vector to the tokens that end an image."""
    found = nn.Embedding.forward(embedding, ids) * embedding.embed_scale.to(embedding.weight.dtype)
    found[:, :0] = embedding.eoi_embedding.to(found.dtype)
    return found


_ASKING: dict[str, Callable[..., Any]] = {
    "JetMoeTopKGating": _route,
    "T5Gemma2TextScaledWordEmbedding": _embed,
}
