"""A policy-gradient step in JAX whose logits never exist: log-probabilities and entropies from the tiled loss.

    python examples/policy_gradient_jax.py --tokens 4096

The clipped objective of PPO and GRPO with a penalty on the divergence from a reference model, over one batch of completions.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tiled_jax import LossOptions, tiled_linear_cross_entropy
from tiled_jax.models import Llama, LlamaConfig

OPTIONS = LossOptions(reduction="none", outputs=("log_probs", "entropy"))
CONFIG = LlamaConfig.from_hf(
    {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
)


def log_probs_of(model: Llama, ids: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the log-probability of every target [B, S], 0 where targets are -100, and the entropy of every token's
    distribution, which is there for any target.
    """
    hidden = model.hidden(ids).reshape(*ids.shape, -1)
    result = tiled_linear_cross_entropy(hidden, model.head_weight(), targets, loss=OPTIONS)
    return result.log_probs, result.entropy


def objective(
    new: jax.Array,
    old: jax.Array,
    reference: jax.Array,
    advantages: jax.Array,
    counted: jax.Array,
    clip: tuple[float, float] = (0.2, 0.2),
) -> jax.Array:
    """Return the mean over the counted tokens of the clipped objective and the divergence from the reference.

    clip: how far a ratio may go down and up; DAPO (arXiv 2503.14476) has (0.2, 0.28).
    """
    ratio = jnp.exp(new - old)
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip[0], 1 + clip[1]) * advantages)
    away = jnp.exp(reference - new) - (reference - new) - 1
    return jnp.sum((0.04 * away - gain) * counted) / jnp.sum(counted)


def main(arguments: list[str] | None = None) -> list[float]:
    """Take two steps on one batch of completions and return the objective of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    graph, parameters = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    moments = optimizer.init(parameters)

    ids = jax.random.randint(jax.random.key(1), (2, options.tokens), 0, 256)
    targets = jnp.concatenate([ids[:, 1:], jnp.full((2, 1), -100)], 1)
    targets = targets.at[:, : options.tokens // 4].set(-100)  # the prompt
    counted, advantages = (targets != -100).astype(jnp.float32), jnp.array([[1.0], [-1.0]])

    @jax.jit
    def score(parameters: nnx.State) -> tuple[jax.Array, jax.Array]:
        return log_probs_of(nnx.merge(graph, parameters), ids, targets)

    @jax.jit
    def step(
        parameters: nnx.State, moments: optax.OptState, old: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        def loss_of(parameters: nnx.State) -> jax.Array:
            return objective(score(parameters)[0], old, old, advantages, counted)

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, loss

    old, entropy = score(parameters)  # the reference is the policy before its first step
    print(f"entropy {jnp.sum(entropy * counted) / jnp.sum(counted):.3f} nats")
    found = []
    for number in range(2):
        parameters, moments, loss = step(parameters, moments, old)
        found.append(float(loss))
        print(f"step {number}: objective {found[-1]:+.5f}")
    return found


if __name__ == "__main__":
    main()
