"""The JAX half of `finetune`: a Flax Llama, tiled, under optax's AdamW, on one device or on a mesh of them."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shared_specs.app.finetune.budget import Buffers
from shared_specs.app.finetune.processes import Team
from shared_specs.app.finetune.stored import Array
from shared_specs.app.finetune.trainer import ADAMW, TrainerState
from shared_specs.app.options import FinetuneOptions
from shared_specs.config import Checkpointing
from shared_specs.errors import UnsupportedError
from shared_specs.shards import KERNEL_MULTIPLE
from tiled_jax import backends
from tiled_jax.commands.finetune import processes
from tiled_jax.layers.recompute import offload_refused
from tiled_jax.loss.api import choose_steps
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss, to_hf
from tiled_jax.models.weights import each_hf
from tiled_jax.plans.api import Parallelized, TrainState, parallelize

_MOMENTS = {"m": "mu", "v": "nu"}


class JaxTrainer:
    """See `shared_specs.app.finetune.trainer.Trainer`.

    Parameters, gradients and moments are float32; with `--dtype bfloat16` the products are bfloat16. Parameters and
    moments are donated to each step, so one step's copies are the next one's. Checkpoints are in the common form, whole,
    unless there are several processes, each of which then writes its parts with Orbax.
    """

    name = "tiled_jax"
    shard_format = "orbax"
    sharded = False

    def join(self, options: FinetuneOptions) -> Team:
        reason = offload_refused() if options.offload else None
        if reason is not None:
            raise UnsupportedError(f"finetune: --offload must be left out here. {reason}")
        found = processes.join(options)
        self.sharded = found.count > 1
        return found

    def leave(self) -> None:
        processes.leave()

    def versions(self) -> dict[str, str]:
        modules = {"jax": jax, "flax": flax, "optax": optax}
        device = jax.devices()[0] if not hasattr(self, "_device") else self._device
        return {name: module.__version__ for name, module in modules.items()} | {"device": device.device_kind}

    def buffers(self, config: dict[str, Any], options: FinetuneOptions) -> Buffers:
        def no_kernel() -> str | None:
            from tiled_jax.core.mosaic import mlp_reason  # where no kernel runs, Mosaic is not loaded

            hidden, intermediate = config["hidden_size"], config["intermediate_size"]
            return mlp_reason(options.dtype, hidden=hidden, intermediate=intermediate, out=hidden, gated=True)

        # A decoder whose layers are split plans without kernels.
        kernels = options.tp == 1 and backends.choose("finetune", "auto", no_kernel=no_kernel) == "pallas"
        return Buffers(
            device=backends.device_kind(),
            compiled=True,
            multiple_of=KERNEL_MULTIPLE if kernels else 1,
            logit_columns=choose_steps("finetune", "auto", options.dtype).columns,
        )

    def load(self, config: dict[str, Any], weights: Mapping[str, Array] | None, options: FinetuneOptions) -> None:
        self._device = processes.devices_of(options.device)[0]
        llama = LlamaConfig.from_hf(config)
        build = partial(
            Llama,
            llama,
            tiling=options.tiling(),
            plain=options.plain,
            scope=options.scope,
            checkpointing=Checkpointing(offload=True) if options.offload else options.checkpointing,
            dtype=options.dtype,
        )
        # Shapes only: a random initialisation would be thrown away.
        model = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
        self._graph, self._parameters = nnx.split(model)
        self._adamw = optax.adamw(
            options.lr, b1=ADAMW.beta1, b2=ADAMW.beta2, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay
        )
        self._plan: Parallelized | None = None
        self._place: Any = self._device
        if options.ranks > 1 or self.sharded:
            self._plan = parallelize(model, *processes.mesh_and_config(options), optimizer=self._adamw)
            self._place = self._plan.shardings.parameters
        self._update = self._step_of_plan if self._plan else jax.jit(self._traced_update, donate_argnums=(0, 1))
        if weights is None:
            self._optimizer = jax.eval_shape(self._adamw.init, self._parameters)
            return
        self._parameters = from_hf(self._parameters, weights, self._place)
        self._optimizer = self._initialised()

    def _initialised(self) -> optax.OptState:
        # Said for one device too: an array that nobody placed is another input than the placed one of the second step,
        # for which the step would be compiled again.
        one = jax.sharding.SingleDeviceSharding(self._device)
        places = one if self._plan is None else self._plan.shardings.optimizer
        return jax.jit(self._adamw.init, out_shardings=places)(self._parameters)

    def _traced_update(
        self, parameters: nnx.State, optimizer: optax.OptState, tokens: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: next_token_loss(nnx.merge(self._graph, p), tokens))(parameters)
        # optax raises a float to the power of an integer count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self._adamw.update(gradients, optimizer, parameters)
        trained: Any = optax.apply_updates(parameters, updates)
        return trained, optimizer, loss

    def _step_of_plan(
        self, parameters: nnx.State, optimizer: optax.OptState, tokens: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        assert self._plan is not None
        assert self._plan.step is not None
        state, loss = self._plan.step(TrainState(parameters, optimizer, nnx.State({})), tokens)
        return state.parameters, state.optimizer, loss

    def step(self, tokens: np.ndarray) -> float:
        if self._plan is None:
            placed = jnp.array(tokens, dtype=jnp.int32, device=self._device)
        else:
            tokens, sharding = tokens.astype(np.int32), self._plan.batch_sharding
            placed = jax.make_array_from_callback(tokens.shape, sharding, lambda index: tokens[index])
        self._parameters, self._optimizer, loss = self._update(self._parameters, self._optimizer, placed)
        jax.block_until_ready(self._parameters)
        return float(loss)

    def peak_memory_bytes(self) -> int | None:
        """Return peak bytes of the first device since the process began: JAX does not reset its meter."""
        device = jax.local_devices(backend=self._device.platform)[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        return stats["peak_bytes_in_use"] if stats else None

    def state(self) -> TrainerState:
        optimizer = {"step": np.array(optax.tree.get(self._optimizer, "count"), dtype=np.int64)}
        for ours, theirs in _MOMENTS.items():
            moments = to_hf(optax.tree.get(self._optimizer, theirs))
            optimizer |= {f"{ours}.{name}": array for name, array in moments.items()}
        return TrainerState(weights=to_hf(self._parameters), optimizer=optimizer)

    def full_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        return each_hf(self._parameters)

    def load_state(self, state: TrainerState) -> None:
        self._parameters = from_hf(self._parameters, state.weights, self._place)
        moments = {
            theirs: from_hf(
                self._parameters, {name: state.optimizer[f"{ours}.{name}"] for name in state.weights}, self._place
            )
            for ours, theirs in _MOMENTS.items()
        }
        self._set_optimizer(int(state.optimizer["step"][...]), moments)

    def _set_optimizer(self, count: int, moments: dict[str, nnx.State]) -> None:
        like = optax.tree.get(self._optimizer, "count")
        place = self._device if self._plan is None else optax.tree.get(self._plan.shardings.optimizer, "count")
        value = np.asarray(count, like.dtype)
        if self._plan is None:
            placed = jnp.array(value, device=place)
        else:
            placed = jax.make_array_from_callback((), place, lambda index: value)
        self._optimizer = optax.tree.set(self._optimizer, count=placed, **moments)

    def save_shards(self, folder: Path) -> None:
        from tiled_jax.commands.finetune.sharded_checkpoint import save

        state = {theirs: optax.tree.get(self._optimizer, theirs) for theirs in _MOMENTS.values()}
        save(folder, {"parameters": self._parameters} | state, optax.tree.get(self._optimizer, "count"))

    def load_shards(self, folder: Path) -> None:
        from tiled_jax.commands.finetune.sharded_checkpoint import load

        places = jax.tree.map(lambda _: self._place, self._parameters) if self._plan is None else self._place
        like = jax.tree.map(lambda a, place: _at(a, place), self._parameters, places)
        wanted: Any = dict.fromkeys(("parameters", *_MOMENTS.values()), like)
        states, count = load(folder, wanted)
        self._parameters = states.pop("parameters")
        self._set_optimizer(count, states)


def _at(like: Any, place: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an array at its place."""
    sharding = jax.sharding.SingleDeviceSharding(place) if isinstance(place, jax.Device) else place
    return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
