"""Rotary position embedding in the layout of Hugging Face Llama: the two halves of a head turn together."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tiled_jax.models.config import Rope


def rotary_frequencies(rope: Rope, head_dim: int, *, long: bool = False, dtype: Any = np.float32) -> np.ndarray:
    """Radians per token of each pair, [head_dim / 2] of `dtype`, scaling included.

    long: of a sequence with positions beyond the original ones, which longrope alone asks for.

    Source: Su et al. 2021, RoFormer, section 3.2.2; "linear": Chen et al. 2023, position interpolation; "llama3": the
    wavelength ramp published with Llama 3.1; "yarn": Peng et al. 2023, YaRN; "longrope": Ding et al. 2024, LongRoPE.
    """
    kind = np.dtype(dtype).type
    exponent = np.arange(0, head_dim, 2, dtype=kind) / kind(head_dim)
    frequency = (1.0 / kind(rope.theta) ** exponent).astype(kind)
    if rope.kind == "llama3":
        return _ramped(frequency, rope).astype(kind)
    if rope.kind == "yarn":
        return _ramped_by_pair(frequency, rope, head_dim).astype(kind)
    if rope.kind == "longrope":
        return frequency / np.asarray(rope.long_factor if long else rope.short_factor, kind)
    return frequency / kind(rope.factor)


def turning(rope: Rope | None, head_dim: int, positions: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Return radians per token of each pair, and beside them what its cosine and sine are multiplied with: [2, head_dim / 2].

    rope: None for layers that turn nothing. positions: of all tokens, integers.
    """
    if rope is None:
        found = jnp.zeros(head_dim // 2, dtype)
        return jnp.stack((found, jnp.ones_like(found)))
    found = jnp.asarray(rotary_frequencies(rope, head_dim, dtype=dtype))
    if rope.kind == "longrope":
        other = jnp.asarray(rotary_frequencies(rope, head_dim, long=True, dtype=dtype))
        found = jnp.where(jnp.max(positions, initial=0) >= rope.original_positions, other, found)
    return jnp.stack((found, jnp.full_like(found, rope.attention_factor)))


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


def rotary_angles(
    rope: Rope | None, head_dim: int, positions: jax.Array | int, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of positions, times the attention factor: two arrays [..., tokens, head_dim / 2] of `dtype`.

    positions: [..., tokens] integers, or a number of tokens, for 0 .. tokens - 1. rope: None for layers that turn nothing.
    """
    positions = jnp.arange(positions, dtype=jnp.int32) if isinstance(positions, int) else positions
    return turned_by(turning(rope, head_dim, positions, dtype), positions)


def turned_by(turns: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosine and sine of positions [..., tokens]: [..., tokens, head_dim / 2]; turns: as `turning` returns them."""
    angles = positions.astype(turns.dtype)[..., None] * turns[0]
    return turns[1] * jnp.cos(angles), turns[1] * jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn dims (i, i + d/2) of every head by the angle of their position; computed in float32 (float64 for float64).

    Args:
        x: [batch, tokens, heads, d].
        cos, sin: [tokens, d / 2] or [batch or 1, tokens, d / 2], float32.
    Returns:
        Shape and dtype of x.
    """
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = (a.astype(wide)[..., :, None, :] for a in (cos, sin))
    turned = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned.astype(x.dtype)
