"""The sizes of a model of a family without formulas by name, from its config.json: its layers are built to read them."""

from typing import Any

import torch
import transformers

from shared_specs.app.option_fields import InputError
from shared_specs.app.plan.decoder import Decoder
from tiled_torch.plan.sizes import with_parameters
from tiled_torch.plan.structure import decoder_by_structure


def decoder_of_config(config: dict[str, Any], what: str) -> Decoder:
    """Return the sizes of the model that the dictionary of a config.json describes, with its parameters in float32.

    what: the option that it is of, for messages.

    Raises:
        InputError: transformers makes no causal language model of it, or it is of a family without formulas.
    """
    try:
        with torch.device("meta"):
            known = transformers.AutoConfig.for_model(**config)
            model = transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except Exception as error:  # of code that is not ours
        first = str(error).strip().partition("\n")[0]
        raise InputError(f"{what} must be the config of a causal language model of transformers: {first}") from error
    return with_parameters(model, decoder_by_structure(model, what))
