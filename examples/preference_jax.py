"""Preferences in JAX whose logits never exist: DPO, and a reward that needs no reference model.

    python examples/preference_jax.py --tokens 4096

A batch holds chosen and rejected answers to the same prompts. What either objective needs is the log-probability of every token
of an answer. The prompts' labels are -100, so their rows are never multiplied by the head.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tiled_jax import LossOptions, tiled_linear_cross_entropy
from tiled_jax.models import Llama, LlamaConfig

OPTIONS = LossOptions(reduction="none", outputs=("log_probs",))
CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
)


def log_probs_of(hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the log-probability of every target, [..., S]; 0 where targets are -100."""
    return tiled_linear_cross_entropy(hidden, weight, targets, loss=OPTIONS).log_probs


def dpo(new: jax.Array, reference: jax.Array, beta: float = 0.1) -> jax.Array:
    """Return the loss of DPO (arXiv 2305.18290) of log-probabilities [2, B, S]: of the chosen answers, then of the rejected."""
    chosen, rejected = beta * jnp.sum(new - reference, -1)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected))


def simpo(new: jax.Array, counted: jax.Array, beta: float = 2.0, margin: float = 1.0) -> jax.Array:
    """Return the loss of SimPO (arXiv 2405.14734), whose reward is an answer's mean log-probability. counted: [2, B, S]."""
    chosen, rejected = beta * jnp.sum(new, -1) / jnp.sum(counted, -1)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected - margin))


def main(arguments: list[str] | None = None) -> list[float]:
    """Take two steps of DPO on one batch and return the loss of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    graph, parameters = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    moments = optimizer.init(parameters)

    ids = jax.random.randint(jax.random.key(1), (2, 3, options.tokens), 0, 256)
    targets = jnp.concatenate([ids[..., 1:], jnp.full((2, 3, 1), -100)], -1)
    targets = targets.at[..., : options.tokens // 2].set(-100)  # the prompts

    @jax.jit
    def scored(parameters: nnx.State) -> jax.Array:
        model = nnx.merge(graph, parameters)
        hidden = model.hidden(ids.reshape(6, -1)).reshape(*ids.shape, -1)
        return log_probs_of(hidden, model.head_weight(), targets)

    @jax.jit
    def step(
        parameters: nnx.State, moments: optax.OptState, reference: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda parameters: dpo(scored(parameters), reference))(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    reference = scored(parameters)  # the policy before its first step
    found = []
    for number in range(2):
        reward = float(simpo(scored(parameters), (targets != -100).astype(jnp.float32)))
        parameters, moments, loss = step(parameters, moments, reference)
        found.append(float(loss))
        print(f"step {number}: DPO {found[-1]:.5f}, SimPO {reward:.5f}")
    return found


if __name__ == "__main__":
    main()
