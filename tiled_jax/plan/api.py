"""`plan` and `fits`: whether a step of a model fits into the memory of some devices, and what to set for it."""

from typing import Any

from flax import nnx

from shared_specs.app.plan.function.checks import planned
from shared_specs.app.plan.function.report import ModelPlan
from tiled_jax.plan.sizes import decoder_of_model


def plan(
    model: nnx.Module,
    tokens: int,
    *,
    devices: int = 1,
    device_memory: str | int = "80GB",
    host_memory: str | int | None = None,
    sequences: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    wrt: Any = None,
    loss_fn: Any = None,
) -> ModelPlan:
    """Return what to set so that a training step of a model fits, bytes by part and the longest context.

    Nothing is run: the bytes come from the formulas of the command `plan`, for a step under `parallelize` with every layer
    checkpointed. The parameters are those of the model: each counts in its own dtype, and one that is not trained has no
    gradient, no float32 sum and no optimizer state.

    Of other models, and with loss_fn, the step itself is compiled, and XLA says what it takes: exactly for `tokens`, and for
    the longest context by lines through other lengths. The program is for the devices of this process or, where these are no
    GPUs and JAX's CUDA plugin is installed, for H200s. The model is planned as it is, so tile it first (`tile_model`).

    Args:
        model: a tiled_jax.models.Llama, of arrays or of shapes (`nnx.eval_shape`). Families: those of the command. What it is
            built with (scope, tiling) is not read, as the plan says what to set. Or any other nnx.Module that returns logits
            [batch, tokens, V] for int32 [batch, tokens], or that loss_fn takes.
        tokens: of a sequence, >= 1.
        devices: GPUs, >= 1, over which parameters, gradients and optimizer state are sharded.
        device_memory: of one device: the name of a GPU, such as "h100", a size, such as "80GB", or a number of bytes. With a
            name there is a time as well.
        host_memory: for each device, a size or a number of bytes; None: as much as it takes.
        sequences: that a device, or the devices that share a sequence, work on at a time, >= 1.
        dtype: "bfloat16" or "float32", in which parameters are gathered and products made.
        optimizer: "adamw" keeps two moments of every trained parameter, in its dtype; "adamw_8bit" keeps two of a byte each and
            for every 256 of them a float32 scale, as torchao and bitsandbytes do; "sgd" keeps none.
        wrt: a filter of the trained parameters, as in `nnx.Optimizer` and `parallelize`; None: the adapters (nnx.LoRAParam)
            where there are any, else all.
        loss_fn: as in `parallelize`: loss_fn(model, batch) -> the mean, of int32 [sequences, tokens + 1]. None: the loss of the
            Llama's rules, and of other models `tiled_model_loss` of each token's next one.
    Returns:
        shared_specs.app.plan.function.report.ModelPlan: `fits`, `what_to_set`, `bytes`, `longest` (tokens), `seconds`,
        `plan`; as text, a summary.
    Memory: none but the names of the parameters; that of the compiler where the step is compiled.
    Raises:
        SpecError, TypeError: an argument is wrong, before anything of the model is read; the step cannot be compiled, or there
        are fewer devices, or no GPUs for 16 bits, to compile it for.
        UnsupportedError: a Llama's layers have adapters with which they do not run as blocks.
    Source: the formulas of each capability (`costs.py` in shared_specs), put together in shared_specs/app/plan/step.py.
    Example:
        >>> from tiled_jax.models import Llama, LlamaConfig
        >>> sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8}
        >>> config = LlamaConfig.from_hf(sizes | {"num_key_value_heads": 8, "vocab_size": 32000})
        >>> model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
        >>> found = plan(model, 65536, devices=8, device_memory="h100")
        >>> found.fits, found.what_to_set["models.Llama"]
        (True, 'scope="block"')
    """
    return planned(
        "plan",
        "jax",
        lambda: decoder_of_model("plan", model, wrt, loss_fn, tokens),
        tokens,
        devices=devices,
        device_memory=device_memory,
        host_memory=host_memory,
        sequences=sequences,
        dtype=dtype,
        optimizer=optimizer,
    )


def fits(
    model: nnx.Module,
    tokens: int,
    *,
    devices: int = 1,
    device_memory: str | int = "80GB",
    host_memory: str | int | None = None,
    sequences: int = 1,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    wrt: Any = None,
    loss_fn: Any = None,
) -> bool:
    """Return whether a training step of a model fits with some setting. Arguments and errors are those of `plan`.

    Args:
        model, tokens, devices, device_memory, host_memory, sequences, dtype, optimizer, wrt, loss_fn: see `plan`.
    Returns:
        bool.
    Raises:
        SpecError, TypeError: as `plan`.
    Source: as `plan`.
    Example:
        >>> from tiled_jax.models import Llama, LlamaConfig
        >>> sizes = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 4, "num_attention_heads": 8}
        >>> config = LlamaConfig.from_hf(sizes | {"num_key_value_heads": 8, "vocab_size": 32000})
        >>> model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
        >>> fits(model, 65536, devices=8, device_memory="h100"), fits(model, 2**22, device_memory="8GB")
        (True, False)
    """
    return planned(
        "fits",
        "jax",
        lambda: decoder_of_model("fits", model, wrt, loss_fn, tokens),
        tokens,
        devices=devices,
        device_memory=device_memory,
        host_memory=host_memory,
        sequences=sequences,
        dtype=dtype,
        optimizer=optimizer,
    ).fits
