"""A Llama decoder in Flax nnx whose MLP runs a shard of tokens and whose attention a block of queries at a time."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.config import Checkpointing, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail
from shared_specs.layers.scope import check_block_tiling, check_scope
from tiled_jax.layers.attention import causal_attention, precision_of
from tiled_jax.layers.recompute import scan_layers
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.models.block.function import block_layer
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.mlp import PlainMLP
from tiled_jax.models.rope import rotary_angles, rotate

Angles = tuple[jax.Array, jax.Array]
DTYPES = ("float32", "bfloat16", "float16")


class Llama(nnx.Module):
    """Next-token logits of a pre-norm decoder with rotary positions, grouped heads and a gated MLP: Llama, Mistral, Qwen2.

    Args:
        config: sizes and options, `LlamaConfig.from_hf(...)` for a Hugging Face model.
        tiling: how the tokens of the MLP and of the loss are cut; None chooses. See shared_specs.config.Tiling.
        plain: MLP and loss as they are, without tiling, for comparison. Excludes `tiling`.
        scope: "mlp" cuts the tokens of the MLP and of the loss alone; "block" those of everything in a layer but
            attention, and every layer keeps its input alone. Excludes `plain`.
        checkpointing: recompute each layer in backward; only the layers' inputs are kept. A `Checkpointing` says more, such
            as that these wait in the host's memory.
        dtype: of the products, "float32", "bfloat16" or "float16"; parameters, norms and the residual stream are float32.
        rngs: initialises the parameters, which `from_hf` replaces.
    Raises:
        SpecError: tiling options or scope="block" with plain=True, another dtype or scope.
        UnsupportedError: with scope="block" a tiling by more than num_shards, shard_tokens and vocab_shards, or called on a
            mesh with Explicit axes; called with a sequence longer than `config.sliding_window`.
    Memory: all layers are one loop over stacked parameters (`layers`, leading dim num_hidden_layers), compiled once.
        With checkpointing backward keeps 4 * batch * tokens * hidden_size bytes a layer.
    Source: Touvron et al. 2023, LLaMA; names and numerics of the Hugging Face implementation.
    Example:
        model = Llama(LlamaConfig.from_hf(config), checkpointing=True, rngs=nnx.Rngs(0))
        logits = model(tokens)  # [batch, tokens] int32 -> [batch, tokens, vocab_size] float32
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        tiling: Tiling | None = None,
        plain: bool = False,
        scope: str = "mlp",
        checkpointing: bool | Checkpointing = False,
        dtype: str = "float32",
        rngs: nnx.Rngs,
    ):
        if plain and tiling is not None:
            fail("Llama", "tiling", "None with plain=True", tiling, advice="The plain MLP is not tiled.")
        check_scope("Llama", scope)
        if scope == "block" and tiling is not None:
            check_block_tiling("Llama", tiling)
        if plain and scope != "mlp":
            fail("Llama", "scope", "'mlp' with plain=True", repr(scope), advice="The plain layers are not tiled.")
        if dtype not in DTYPES:
            fail("Llama", "dtype", f"one of {', '.join(DTYPES)}", dtype)
        self.config, self.checkpointing, self.dtype = config, checkpointing, jnp.dtype(dtype)
        self.plain, self.scope = plain, scope
        self.loss_tiling = None if tiling is None else replace(tiling, keep=0.0)  # a loss keeps nothing
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, mlp=_mlp(config, tiling, plain, self.dtype, rngs), dtype=self.dtype, rngs=rngs)

        self.layers = stacked_layers(rngs)
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        tied = config.tie_word_embeddings
        self.head = None if tied else _linear(config.hidden_size, config.vocab_size, False, self.dtype, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return [batch, tokens] int32 -> logits [batch, tokens, vocab_size] of the compute dtype."""
        return self.logits(self.hidden(tokens)).reshape(*tokens.shape, -1)

    def hidden(self, tokens: jax.Array) -> jax.Array:
        """Return the operand of the head: [batch, tokens] int32 -> [batch * tokens, hidden_size] of the compute dtype."""
        angles = sequence_angles(self.config, tokens.shape[1])
        positions = jnp.tile(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape[0])
        graph, parameters = nnx.split(self.layers)

        def layer(x: jax.Array, parameters: nnx.State) -> jax.Array:
            one = nnx.merge(graph, parameters)
            return block_layer(one, x, positions, tokens.shape[0]) if self.scope == "block" else one(x, angles)

        # One dim of rows: with a batch dim of its own XLA transposes (copies) both operands of every weight gradient.
        x = self.embed(tokens.reshape(-1))
        x = scan_layers(layer, x, parameters, self.recomputed())
        # The norm would keep four arrays like x for backward; this way x is the only one.
        norm = jax.checkpoint(self.norm) if self.scope == "block" else self.norm
        return norm(x).astype(self.dtype)

    def recomputed(self) -> Checkpointing | None:
        """Return what backward computes again."""
        return Checkpointing() if self.checkpointing is True else self.checkpointing or None

    def head_weight(self) -> jax.Array:
        """Return [hidden_size, vocab_size], float32."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[rows, hidden_size] -> [rows, vocab_size], in the compute dtype."""
        if self.head is not None:
            return self.head(hidden)
        return jnp.dot(hidden, self.embed.embedding[...].astype(hidden.dtype).T, precision=precision_of(hidden.dtype))


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x: [batch * tokens, hidden_size] float32."""

    def __init__(self, config: LlamaConfig, *, mlp: nnx.Module, dtype: jnp.dtype, rngs: nnx.Rngs):
        norm = partial(nnx.RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.attention_norm = norm()
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = norm()
        self.mlp = mlp

    def __call__(self, x: jax.Array, angles: Angles) -> jax.Array:
        # Without the checkpoints each norm would keep four arrays like x for backward; this way x is the only one.
        x = x + self.attention(jax.checkpoint(self.attention_norm)(x), angles).astype(x.dtype)
        return x + self.mlp(jax.checkpoint(self.mlp_norm)(x)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key and value heads."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.head_dim = config, config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        linear = partial(_linear, dtype=dtype, rngs=rngs)
        self.q = linear(config.hidden_size, queries, config.attention_bias)
        self.k = linear(config.hidden_size, keys, config.attention_bias)
        self.v = linear(config.hidden_size, keys, config.attention_bias)
        self.o = linear(queries, config.hidden_size, config.attention_out_bias)

    def __call__(self, x: jax.Array, angles: Angles) -> jax.Array:
        """[batch * tokens, hidden_size] -> the same; `angles` tell how many tokens a sequence has."""
        tokens = angles[0].shape[0]
        q, k, v = (
            a.reshape(-1, tokens, a.shape[-1] // self.head_dim, self.head_dim)
            for a in (self.q(x), self.k(x), self.v(x))
        )

        # Keeps q, k and v alone: not their turned copies, nor the keys of each run of query blocks.
        @jax.checkpoint
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return causal_attention(rotate(q, *angles), rotate(k, *angles), v)

        y = attend(q, k, v)
        return self.o(y.reshape(x.shape[0], -1))


def sequence_angles(config: LlamaConfig, tokens: int) -> Angles:
    """Cosine and sine of all positions of sequences of so many tokens, which no window may cut.

    Raises:
        UnsupportedError: the model's sliding window is shorter.
    """
    if config.sliding_window is not None and tokens > config.sliding_window:
        rule = f"<= {config.sliding_window}, the sliding window of this model"
        advice = "The decoder's attention has no windows."
        raise UnsupportedError(error_text("Llama", "the tokens of a sequence", rule, tokens, advice=advice))
    return rotary_angles(config.rope, config.head_dim, tokens)


def _linear(inputs: int, outputs: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, precision=precision_of(dtype), rngs=rngs)


def _mlp(config: LlamaConfig, tiling: Tiling | None, plain: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Module:
    sizes = config.hidden_size, config.intermediate_size
    shared: dict[str, Any] = dict(activation=config.activation, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
    return PlainMLP(*sizes, **shared) if plain else TiledMLP(*sizes, tiling=tiling, **shared)
