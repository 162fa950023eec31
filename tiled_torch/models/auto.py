"""`AutoTiledModelForCausalLM`: a causal language model of transformers, loaded and tiled in one line.

The model is tiled after its weights are there, which it has the same names for as before. transformers' own
`register_patch_mapping` exchanges classes by name, for the whole process, while a model is made: too early for what only a
module's own attributes say, and past the model's own class, whose forward holds the loss.
"""

import inspect
from typing import Any

from transformers import AutoModelForCausalLM

from tiled_torch.models.tiling import checked_options, tile_model

_OWN = frozenset(inspect.signature(tile_model).parameters) - {"model"}


class AutoTiledModelForCausalLM:
    """transformers' AutoModelForCausalLM with the additional arguments of `tile_model`.

    Raises:
        TypeError: the class itself is called.
    Example:
        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)
        >>> model = AutoTiledModelForCausalLM.from_config(config, num_shards=4)
        >>> type(model).__name__
        'GPT2LMHeadModel'
    """

    def __init__(self) -> None:
        text = "is made by from_pretrained(name, ...) or from_config(config, ...)"
        raise TypeError(f"AutoTiledModelForCausalLM: a model {text}.")

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the model of a folder or of the hub, tiled.

        Args:
            args, kwargs: of AutoModelForCausalLM.from_pretrained; those that `tile_model` knows by name go there.
        Returns:
            What transformers returns; with output_loading_info=True the model and that.
        Raises:
            SpecError, TypeError, UnsupportedError: as `tile_model`. What transformers raises.
        """
        own = _taken(kwargs)
        found = AutoModelForCausalLM.from_pretrained(*args, **kwargs)
        if isinstance(found, tuple):
            return tile_model(found[0], **own), *found[1:]
        return tile_model(found, **own)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """Return a new model of a configuration, tiled.

        Args:
            config, kwargs: of AutoModelForCausalLM.from_config; those that `tile_model` knows by name go there.
        Raises:
            SpecError, TypeError, UnsupportedError: as `tile_model`. What transformers raises.
        """
        own = _taken(kwargs)
        return tile_model(AutoModelForCausalLM.from_config(config, **kwargs), **own)


def _taken(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of `tile_model` out, refused before a model is loaded."""
    own = {name: kwargs.pop(name) for name in _OWN & kwargs.keys()}
    checked_options(**own)
    return own
