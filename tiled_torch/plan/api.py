"""`plan` and `fits`: whether a step of a model fits into the memory of some devices, and what to set for it."""

from typing import Any

from torch import nn

from shared_specs.app.plan.function.checks import planned
from shared_specs.app.plan.function.report import ModelPlan
from tiled_torch.plan.sizes import decoder_of_model


def plan(
    model: nn.Module,
    tokens: int,
    *,
    devices: int = 1,
    device_memory: str | int = "80GB",
    host_memory: str | int | None = None,
    sequences: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    loss_fn: Any = None,
) -> ModelPlan:
    """Return what to set so that a training step of a model fits, bytes by part and the longest context.

    Nothing of the model is run: the bytes come from the formulas of the command `plan`, for a step under `parallelize` with
    every layer checkpointed. Of layers that no formula knows one of each kind runs on the meta device, in seconds. The
    parameters are those of the model: each counts in its own dtype, and one that does not require grad has no gradient, no
    float32 sum and no optimizer state. So the base of a model with adapters (LoRA) costs its weights alone.

    Of modules of others, with loss_fn, and where a model has its layers in no list or a loss that is not tiled, the whole step
    runs on the meta device, at a few lengths. Such a model is planned as it is, so tile it first (`tile_model`).

    Args:
        model: a causal language model of transformers, also on the meta device, also with adapters, or peft's around one. Or
            any other nn.Module that returns logits [batch, tokens, V] for int64 [batch, tokens], or that loss_fn takes.
        tokens: of a sequence, >= 1.
        devices: GPUs, >= 1, over which parameters, gradients and optimizer state are sharded.
        device_memory: of one device: the name of a GPU, such as "h100", a size, such as "80GB", or a number of bytes. With a
            name there is a time as well.
        host_memory: for each device, a size or a number of bytes; None: as much as it takes.
        sequences: that a device, or the devices that share a sequence, work on at a time, >= 1.
        dtype: "bfloat16" or "float32", in which parameters are gathered and products made.
        optimizer: "adamw" keeps two moments of every trained parameter, in its dtype; "adamw_8bit" keeps two of a byte each and
            for every 256 of them a float32 scale, as torchao and bitsandbytes do; "sgd" keeps none.
        loss_fn: loss_fn(model, batch) -> the mean, of int64 [sequences, tokens + 1]. None: the model's own loss, and of other
            modules `tiled_model_loss` of each token's next one.
    Returns:
        shared_specs.app.plan.function.report.ModelPlan: `fits`, `what_to_set`, `bytes`, `longest` (tokens), `seconds`,
        `plan`; as text, a summary.
    Memory: none but the names of the parameters.
    Raises:
        SpecError, TypeError: an argument is wrong, or there are no formulas of the model and it cannot run without values.
    Source: the formulas of each capability (`costs.py` in shared_specs), put together in shared_specs/app/plan/step.py.
    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=4))
        >>> found = plan(model, 2**20, devices=8, device_memory="h100")
        >>> found.fits, found.what_to_set["tile_model"]
        (True, 'scope="block"')
    """
    return planned(
        "plan",
        "torch",
        lambda: decoder_of_model("plan", model, loss_fn, tokens),
        tokens,
        devices=devices,
        device_memory=device_memory,
        host_memory=host_memory,
        sequences=sequences,
        dtype=dtype,
        optimizer=optimizer,
    )


def fits(
    model: nn.Module,
    tokens: int,
    *,
    devices: int = 1,
    device_memory: str | int = "80GB",
    host_memory: str | int | None = None,
    sequences: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    loss_fn: Any = None,
) -> bool:
    """Return whether a training step of a model fits with some setting. Arguments and errors are those of `plan`.

    Args:
        model, tokens, devices, device_memory, host_memory, sequences, dtype, optimizer, loss_fn: see `plan`.
    Returns:
        bool.
    Raises:
        SpecError, TypeError: as `plan`.
    Source: as `plan`.
    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, num_hidden_layers=4))
        >>> fits(model, 65536, devices=8, device_memory="h100"), fits(model, 65536, device_memory="8GB")
        (True, False)
    """
    return planned(
        "fits",
        "torch",
        lambda: decoder_of_model("fits", model, loss_fn, tokens),
        tokens,
        devices=devices,
        device_memory=device_memory,
        host_memory=host_memory,
        sequences=sequences,
        dtype=dtype,
        optimizer=optimizer,
    ).fits
