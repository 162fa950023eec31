"""What devices compute together, inside `jax.shard_map`."""

from tiled_jax.parallel.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy

__all__ = ["vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"]
