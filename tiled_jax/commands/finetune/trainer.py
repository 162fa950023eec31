"""The JAX half of `finetune`: a Flax decoder, tiled, under optax's AdamW, on one device or on a mesh of them."""

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

from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.budget import Buffers
from shared_specs.app.finetune.processes import Team
from shared_specs.app.finetune.step_progress import Heard, Phase
from shared_specs.app.finetune.stored import Array
from shared_specs.app.finetune.trainer import TrainerState
from shared_specs.app.options import FinetuneOptions
from shared_specs.config import Checkpointing
from shared_specs.errors import UnsupportedError
from shared_specs.shards import KERNEL_MULTIPLE
from tiled_jax import backends
from tiled_jax.commands.finetune import optimizing, processes
from tiled_jax.layers.recompute import offload_refused
from tiled_jax.loss.api import choose_steps
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss, to_hf
from tiled_jax.models.weights import each_hf
from tiled_jax.plans.api import Parallelized, TrainState, parallelize

# Tokens of a micro-batch from which on a step tells of its layers: the calls keep its program out of JAX's cache on disk.
LONG_STEP_TOKENS = 4096
_MOMENTS = {"m": "mu", "v": "nu"}


class JaxTrainer:
    """See `shared_specs.app.finetune.trainer.Trainer`.

    Parameters, gradients and moments are float32; with `--dtype bfloat16` the products are bfloat16. Parameters and
    moments are donated to each step, so one step's copies are the next one's. Checkpoints are in the common form, whole,
    unless there are several processes, each of which then writes its parts with Orbax.
    """

    name = "tiled_jax"
    gradient_norm: float | None = None
    shard_format = "orbax"
    sharded = False
    _heard: Heard | None = None

    def join(self, options: FinetuneOptions) -> Team:
        if options.offload:
            processes.make_room(options)
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
        # Every device of this process tells of each of its layers.
        self._layers = llama.num_hidden_layers * max(1, options.ranks // jax.process_count())
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
        if options.batch * options.tokens >= LONG_STEP_TOKENS:
            model.heard = self._hear
        self._graph, self._parameters = nnx.split(model)
        self._adamw = optimizing.adamw(options)
        self._clips = options.clip is not None
        self._plan: Parallelized | None = None
        self._place: Any = self._device
        if options.ranks > 1 or self.sharded or options.grad_accumulation > 1:  # whose step has micro-batches in it
            over = processes.mesh_and_config(options, llama.num_attention_heads)
            self._plan = parallelize(model, *over, optimizer=self._adamw)
            self._place = self._plan.shardings.parameters
        self._update = self._step_of_plan if self._plan else jax.jit(self._traced_update, donate_argnums=(0, 1))
        self._evaluated = self._plan.loss if self._plan else jax.jit(self._traced_loss)
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
        self, parameters: nnx.State, optimizer: optax.OptState, batch: dict[str, jax.Array]
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(self._traced_loss)(parameters, batch)
        # optax raises a float to the power of an integer count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer = self._adamw.update(gradients, optimizer, parameters)
        trained: Any = optax.apply_updates(parameters, updates)
        return trained, optimizer, loss

    def _traced_loss(self, parameters: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        return next_token_loss(nnx.merge(self._graph, parameters), batch)

    def _step_of_plan(
        self, parameters: nnx.State, optimizer: optax.OptState, batch: dict[str, jax.Array]
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        assert self._plan is not None
        assert self._plan.step is not None
        state, loss = self._plan.step(TrainState(parameters, optimizer, nnx.State({})), batch)
        return state.parameters, state.optimizer, loss

    def watch(self, heard: Heard) -> None:
        self._heard = heard

    def _hear(self, phase: Phase) -> None:
        """Tell what one of this process's devices tells."""
        if self._heard is not None:
            self._heard(phase, self._layers)

    def step(self, batch: Batch) -> float:
        placed = {name: self._placed(array) for name, array in batch.arrays().items()}
        self._parameters, self._optimizer, loss = self._update(self._parameters, self._optimizer, placed)
        jax.block_until_ready(self._parameters)
        if self._clips:
            self.gradient_norm = float(optax.tree.get(self._optimizer, "gradient_norm"))
        return float(loss)

    def evaluate(self, batch: Batch) -> float:
        heard, self._heard = self._heard, None  # a step alone tells of its layers
        try:
            loss = float(self._evaluated(self._parameters, {n: self._placed(a) for n, a in batch.arrays().items()}))
            jax.effects_barrier()
            return loss
        finally:
            self._heard = heard

    def _placed(self, array: np.ndarray) -> jax.Array:
        if self._plan is None:
            return jnp.array(array, dtype=jnp.int32, device=self._device)
        array = array.astype(np.int32)
        return jax.make_array_from_callback(array.shape, self._plan.batch_sharding, lambda index: array[index])

    def peak_memory_bytes(self) -> int | None:
        """Return peak bytes of the first device since the process began: JAX does not reset its meter."""
        device = jax.local_devices(backend=self._device.platform)[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        return stats["peak_bytes_in_use"] if stats else None

    def state(self) -> TrainerState:
        optimizer = {"step": np.array(optimizing.count(self._optimizer), dtype=np.int64)}
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
        place = self._device if self._plan is None else optimizing.count(self._plan.shardings.optimizer)

        def placed(value: np.ndarray) -> jax.Array:
            if self._plan is None:
                return jnp.array(value, device=place)
            return jax.make_array_from_callback((), place, lambda index: value)

        self._optimizer = optimizing.with_count(optax.tree.set(self._optimizer, **moments), count, placed)

    def save_shards(self, folder: Path) -> None:
        from tiled_jax.commands.finetune.sharded_checkpoint import save

        state = {theirs: optax.tree.get(self._optimizer, theirs) for theirs in _MOMENTS.values()}
        save(folder, {"parameters": self._parameters} | state, optimizing.count(self._optimizer))

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
