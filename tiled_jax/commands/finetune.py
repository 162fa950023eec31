"""The JAX half of `finetune`: a Flax Llama, tiled, under optax's AdamW."""

from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shared_specs.app.trainer import ADAMW, TrainerState
from shared_specs.cli import FinetuneOptions
from shared_specs.errors import UnsupportedError
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss, to_hf

_MOMENTS = {"m": "mu", "v": "nu"}


class JaxTrainer:
    """See `shared_specs.app.trainer.Trainer`.

    Parameters, gradients and moments are float32; with `--dtype bfloat16` the products are bfloat16. Parameters and
    moments are donated to each step, so one step's copies are the next one's.
    """

    name = "tiled_jax"

    def versions(self) -> dict[str, str]:
        modules = {"jax": jax, "flax": flax, "optax": optax}
        device = jax.devices()[0] if not hasattr(self, "_device") else self._device
        return {name: module.__version__ for name, module in modules.items()} | {"device": device.device_kind}

    def load(self, config: dict[str, Any], tensors: dict[str, np.ndarray], options: FinetuneOptions) -> None:
        self._device = _device(options.device)
        llama = LlamaConfig.from_hf(config)
        build = partial(
            Llama,
            llama,
            tiling=options.tiling(),
            plain=options.plain,
            checkpointing=options.checkpointing,
            dtype=options.dtype,
        )
        # Shapes only: a random initialisation would be thrown away.
        self._graph, parameters = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
        self._parameters = from_hf(parameters, tensors, self._device)
        self._adamw = optax.adamw(
            options.lr, b1=ADAMW.beta1, b2=ADAMW.beta2, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
        )
        self._optimizer = jax.jit(self._adamw.init)(self._parameters)
        self._update = jax.jit(self._traced_update, donate_argnums=(0, 1))

    def _traced_update(
        self, parameters: nnx.State, optimizer: optax.OptState, tokens: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(self._graph, p), tokens))(parameters)
        # optax raises a float to the power of an integer count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self._adamw.update(gradients, optimizer, parameters)
        return optax.apply_updates(parameters, updates), optimizer, loss

    def step(self, tokens: np.ndarray) -> float:
        placed = jnp.array(tokens, dtype=jnp.int32, device=self._device)
        self._parameters, self._optimizer, loss = self._update(self._parameters, self._optimizer, placed)
        jax.block_until_ready(self._parameters)
        return float(loss)

    def peak_memory_bytes(self) -> int | None:
        """Peak device bytes since the process began: JAX does not reset its meter."""
        stats = None if self._device.platform == "cpu" else self._device.memory_stats()
        return stats["peak_bytes_in_use"] if stats else None

    def state(self) -> TrainerState:
        optimizer = {"step": np.array(optax.tree.get(self._optimizer, "count"), dtype=np.int64)}
        for ours, theirs in _MOMENTS.items():
            moments = to_hf(optax.tree.get(self._optimizer, theirs))
            optimizer |= {f"{ours}.{name}": array for name, array in moments.items()}
        return TrainerState(weights=to_hf(self._parameters), optimizer=optimizer)

    def load_state(self, state: TrainerState) -> None:
        self._parameters = from_hf(self._parameters, state.weights, self._device)
        moments = {
            theirs: from_hf(
                self._parameters, {name: state.optimizer[f"{ours}.{name}"] for name in state.weights}, self._device
            )
            for ours, theirs in _MOMENTS.items()
        }
        count = jnp.array(state.optimizer["step"], dtype=jnp.int32, device=self._device)
        self._optimizer = optax.tree.set(self._optimizer, count=count, **moments)


def _device(name: str) -> jax.Device:
    if name == "auto":
        return jax.devices()[0]
    try:
        return jax.devices(name)[0]
    except RuntimeError as error:
        advice = "JAX sees no such device."
        raise UnsupportedError(f"finetune: --device must be cpu or auto here, got {name}. {advice}") from error
