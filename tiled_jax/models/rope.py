"""Rotary position embedding in the layout of Hugging Face Llama: the two halves of a head turn together."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from tiled_jax.models.config import Rope


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per token of each pair, [head_dim / 2] float32, scaling included.

    Source: Su et al. 2021, RoFormer, section 3.2.2; "linear": Chen et al. 2023, position interpolation; "llama3": the
    wavelength ramp published with Llama 3.1; "yarn": Peng et al. 2023, YaRN.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / np.float32(rope.theta) ** exponent).astype(np.float32)
    if rope.kind == "llama3":
        return _ramped(frequency, rope).astype(np.float32)
    if rope.kind == "yarn":
        return _ramped_by_pair(frequency, rope, head_dim).astype(np.float32)
    return frequency / np.float32(rope.factor)


def _ramped(frequency: np.ndarray, rope: Rope) -> np.ndarray:
    turns = rope.original_positions * frequency.astype(np.float64) / (2 * np.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return frequency * (kept + (1 - kept) / rope.factor)


def _ramped_by_pair(frequency: np.ndarray, rope: Rope, head_dim: int) -> np.ndarray:
    def pair_with(turns: float) -> float:
        """Return the number, in general not whole, of the pair that makes so many turns over the original positions."""
        return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as transformers, instead of dividing by zero
    divided = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0, 1)
    return frequency * (1 - divided + divided / rope.factor)


def rotary_angles(rope: Rope, head_dim: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of positions 0 .. tokens - 1, times the attention factor: two arrays [tokens, head_dim / 2] float32."""
    positions = jnp.arange(tokens, dtype=jnp.float32)
    angles = positions[:, None] * jnp.asarray(rotary_frequencies(rope, head_dim))[None, :]
    return rope.attention_factor * jnp.cos(angles), rope.attention_factor * jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn dims (i, i + d/2) of every head by the angle of their position; computed in float32 (float64 for float64).

    Args:
        x: [batch, tokens, heads, d].
        cos, sin: [tokens, d / 2] float32.
    Returns:
        Shape and dtype of x.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = (a.astype(wide)[None, :, None, :] for a in (cos, sin))
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)
