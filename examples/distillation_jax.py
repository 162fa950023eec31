"""Distillation in JAX whose logits never exist: a small model learns from a larger one of the same vocabulary.

    python examples/distillation_jax.py --tokens 4096

The prompts' labels are -100: neither head multiplies their rows, but for what is left of the last shard.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tiled_jax import tiled_distillation_loss
from tiled_jax.models import Llama, LlamaConfig


def model_of(hidden_size: int, layers: int, seed: int) -> Llama:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_attention_heads": 4}
    return Llama(LlamaConfig.from_hf(sizes | {"num_hidden_layers": layers, "vocab_size": 256}), rngs=nnx.Rngs(seed))


def main(arguments: list[str] | None = None) -> list[float]:
    """Take three steps on one batch and return the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kind", choices=("forward_kl", "reverse_kl", "jsd"), default="forward_kl")
    parser.add_argument("--temperature", type=float, default=2.0)
    options = parser.parse_args(arguments)
    teacher, (graph, parameters) = model_of(64, 3, seed=0), nnx.split(model_of(32, 2, seed=1))
    optimizer = optax.adamw(1e-2)
    moments = optimizer.init(parameters)

    ids = jax.random.randint(jax.random.key(2), (2, options.tokens), 0, 256)
    targets = jnp.concatenate([ids[:, 1:], jnp.full((2, 1), -100)], -1)
    targets = targets.at[:, : options.tokens // 2].set(-100)  # the prompts
    of_teacher, w_teacher = teacher.hidden(ids).reshape(*ids.shape, -1), teacher.head_weight()

    @jax.jit
    def step(parameters: nnx.State, moments: optax.OptState) -> tuple[nnx.State, optax.OptState, jax.Array]:
        def value(parameters: nnx.State) -> jax.Array:
            student = nnx.merge(graph, parameters)
            return tiled_distillation_loss(
                student.hidden(ids).reshape(*ids.shape, -1),
                student.head_weight(),
                of_teacher,
                w_teacher,
                targets,
                kind=options.kind,
                temperature=options.temperature,
                weight_hard=0.1,  # a tenth of the cross entropy with the labels
            )

        loss, gradients = jax.value_and_grad(value)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    found = []
    for number in range(3):
        parameters, moments, loss = step(parameters, moments)
        found.append(float(loss))
        print(f"step {number}: {found[-1]:.5f}")
    return found


if __name__ == "__main__":
    main()
