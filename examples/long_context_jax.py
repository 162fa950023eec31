"""A long context over many devices in JAX: one compiled train step, sharded state, sequences cut over devices.

    python examples/long_context_jax.py --model FOLDER --tokens 131072 --offload      # all devices of this machine
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/long_context_jax.py      # to see it run

With several processes (JAX_COORDINATOR_ADDRESS and its kind, or srun) call `jax.distributed.initialize()` first: --distributed.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from shared_specs.app.models.weights import read_model
from tiled_jax import Checkpointing, DataParallel, ParallelConfig, parallelize
from tiled_jax.models import Llama, LlamaConfig, from_hf

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def build(folder: str | None, dtype: str, checkpointing: Checkpointing) -> nnx.Module:
    """Return a model whose layers run a shard at a time but for attention, random or with the weights of a folder."""
    files = read_model(folder) if folder else None
    config = LlamaConfig.from_hf(files.config if files else SMALL)

    def model() -> Llama:
        return Llama(config, scope="block", checkpointing=checkpointing, dtype=dtype, rngs=nnx.Rngs(0))

    if files is None:
        return model()
    graph, parameters = nnx.split(nnx.eval_shape(model))
    return nnx.merge(graph, from_hf(parameters, files.weights))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for a few steps and return their losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hugging Face folder; without it a small random model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--offload", action="store_true", help="inputs of layers wait in host memory")
    parser.add_argument("--devices", type=int, help="take so many; without it all")
    parser.add_argument("--distributed", action="store_true")
    options = parser.parse_args(arguments)

    if options.distributed:
        jax.distributed.initialize()
    checkpointing = Checkpointing(offload=options.offload)
    # All devices share one sequence, as a ring: keys and values travel round, so the number of heads is no limit.
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[: options.devices])[None], ("dp_shard", "cp"))
    config = ParallelConfig(
        checkpointing=checkpointing,
        data=DataParallel(context_axis="cp", context="ring", param_dtype=options.dtype),
    )
    plan = parallelize(build(options.model, options.dtype, checkpointing), mesh, config, optimizer=optax.adamw(1e-3))
    tokens = jnp.arange(options.tokens, dtype=jnp.int32)[None] % 97
    batch = jax.device_put({"input_ids": tokens, "labels": tokens}, plan.batch_sharding)
    state, losses = plan.state, []
    for step in range(options.steps):
        state, loss = plan.step(state, batch)
        losses.append(float(loss))
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
