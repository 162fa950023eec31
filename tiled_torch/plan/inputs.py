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
    more = _MORE.get(getattr(twin.config, "model_type", ""), lambda *_: {})
    return {"input_ids": ids_of(sequences, tokens), "use_cache": False} | more(twin, sequences)


def ids_of(sequences: int, tokens: int) -> Tensor:
    """Return ids of tokens without values: int64 [sequences, tokens]."""
    return torch.zeros(sequences, tokens, dtype=torch.long, device="meta")


def _language(twin: Any, sequences: int) -> dict[str, Any]:
    """X-MOD computes an adapter with the sequences of its language, so that their number has to be known."""
    return {"lang_ids": torch.zeros(sequences, dtype=torch.long)}


def _image(twin: Any, sequences: int) -> dict[str, Any]:
    """GIT takes as many tokens out of the logits as an image has, whether there is one or not."""
    sizes = twin.config.vision_config
    shape = sequences, sizes.num_channels, sizes.image_size, sizes.image_size
    return {"pixel_values": torch.zeros(shape, dtype=twin.dtype, device="meta")}


_MORE: dict[str, Callable[[Any, int], dict[str, Any]]] = {"xmod": _language, "git": _image}


@contextmanager
def without_values(twin: nn.Module) -> Iterator[None]:
    """Let a model run on the meta device inside this context (`simulated_device`), with as many tokens for each expert where
    its router asks how many each has."""
    routers = (module for module in twin.modules() if type(module).__name__ in _ASKING)
    with simulated_device(), ExitStack() as stack:
        for router in routers:
            stack.enter_context(patch.object(router, "forward", partial(_route, router), create=True))
        yield


_ASKING = ("JetMoeTopKGating",)


def _route(router: Any, x: Tensor) -> Any:
    chosen, experts = len(x) * router.top_k, router.num_experts
    places = [chosen * expert // experts for expert in range(experts + 1)]
    parts = [end - start for start, end in pairwise(places)]
    with patch.object(Tensor, "tolist", lambda _: parts):
        return type(router).forward(router, x)
