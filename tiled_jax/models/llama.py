"""A decoder in Flax nnx whose MLP runs a shard of tokens and whose attention a block of queries at a time."""

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.config import Checkpointing, Tiling
from shared_specs.errors import UnsupportedError, error_text, fail, fail_type, show_shape
from shared_specs.layers.scope import check_block_tiling, check_scope
from tiled_jax.core.arrays import array
from tiled_jax.core.products import wide
from tiled_jax.layers.attention import BACKENDS, checked_mask, precision_of
from tiled_jax.layers.documents import (
    checked_documents,
    documents_of_positions,
    first_in_window,
    first_keys,
    positions_in,
)
from tiled_jax.layers.recompute import scan_layers
from tiled_jax.mlp.module import TiledMLP
from tiled_jax.mlp.projections import reason_not_plain
from tiled_jax.models.block.function import block_layer
from tiled_jax.models.block.plain import reason_not_block
from tiled_jax.models.config import LlamaConfig
from tiled_jax.models.layer import Angles, DecoderLayer, linear_of, mlp_of, norm_of
from tiled_jax.models.loss import checked_tokens, next_token_loss
from tiled_jax.models.rope import turned_by, turning
from tiled_jax.models.watched import Heard, watched

DTYPES = ("float32", "bfloat16", "float16", "float64")


class Llama(nnx.Module):
    """Next-token logits of a decoder with rotary positions and gated MLPs or experts: Llama and the families beside it.

    The families are Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (its text model), Phi3, SmolLM3, Mixtral and Qwen3-MoE.
    `config` says how they differ.

    Args:
        config: sizes and options, `LlamaConfig.from_hf(...)` for a Hugging Face model.
        tiling: how the tokens of the MLP and of the loss are cut; None chooses. See shared_specs.config.Tiling.
        plain: compute MLP and loss without tiling, for comparison. Excludes `tiling`.
        scope: "mlp" tiles only the MLP and the loss. "block" tiles everything in a layer except attention, and every layer
            keeps only its input. It excludes `plain`. Projections may be in an nnx.LoRA, or be an nnx.LoRALinear, that
            computes in their dtype. If a part of the layers was replaced by more than its formula (a subclass, a custom
            `dot_general`, another norm or epsilon), "block" tiles only their MLP, with a warning. `tiling_paths` gives the
            reason.
        checkpointing: recompute each layer in backward; only the layers' inputs are kept. A `Checkpointing` has further
            options, such as offloading these inputs to host memory.
        dtype: of the products, float32, bfloat16 or float16, as jax.numpy has them or by name; norms and the residual stream
            are float32. float64, where JAX has it, is that of everything.
        param_dtype: of matrices and biases, and so of their gradients, which are summed in float32 and rounded once (of a
            tied table two are, and are added); None is float32 (float64 beside it), master weights of a 16-bit dtype.
            bfloat16 halves a base that is frozen. Scales of norms stay float32.
        attention: the backend of `causal_attention`, in every scope: "auto", "blocks" or "cudnn". Rings have blocks of their
            own and refuse "cudnn".
        rngs: initialises the parameters, which `from_hf` replaces.
    Raises:
        SpecError: tiling options or scope="block" with plain=True, another dtype, param_dtype, scope or attention.
        UnsupportedError: with scope="block" a tiling by more than num_shards, shard_tokens and vocab_shards, or called on a
            mesh with Explicit axes; tokens that such axes cut; float64 where JAX has none.
    Memory: all layers are one loop over stacked parameters (`layers`, leading dim num_hidden_layers), compiled once.
        With checkpointing backward keeps 4 * batch * tokens * hidden_size bytes a layer. Where some layers attend through a
        window and others do not, attention alone is compiled for both. With scope="block" the keys outside of a window are
        multiplied and then left out.
    Source: Touvron et al. 2023, LLaMA; names and numerics of the Hugging Face implementation.
    Example:
        model = Llama(LlamaConfig.from_hf(config), checkpointing=True, rngs=nnx.Rngs(0))
        logits = model(tokens)  # [batch, tokens] int32 -> [batch, tokens, vocab_size] float32
        loss = model(tokens, attention_mask=mask, labels=labels)  # a scalar
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        tiling: Tiling | None = None,
        plain: bool = False,
        scope: str = "mlp",
        checkpointing: bool | Checkpointing = False,
        dtype: Any = "float32",
        param_dtype: Any = None,
        attention: str = "auto",
        rngs: nnx.Rngs,
    ):
        dtype = name_of(dtype)
        _check_options(config, tiling, plain, scope, attention)
        _check_dtype("dtype", dtype)
        if param_dtype is not None:
            _check_dtype("param_dtype", name_of(param_dtype))
        self.config, self.checkpointing, self.dtype = config, checkpointing, jnp.dtype(dtype)
        params = wide(self.dtype) if param_dtype is None else jnp.dtype(param_dtype)
        self.plain, self.scope = plain, scope
        self.loss_tiling = None if tiling is None else replace(tiling, keep=0.0)  # a loss keeps nothing
        self.heard: Heard | None = None  # told of every layer that is through: see models/watched.py
        stream: dict[str, Any] = {"dtype": wide(self.dtype), "param_dtype": params}
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **stream, rngs=rngs)

        @nnx.split_rngs(splits=config.num_hidden_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_layers(rngs: nnx.Rngs) -> DecoderLayer:
            dtypes: dict[str, Any] = {"dtype": self.dtype, "param_dtype": params}
            mlp = mlp_of(config, tiling, plain, rngs=rngs, **dtypes)
            return DecoderLayer(config, mlp=mlp, attention=attention, rngs=rngs, **dtypes)

        self.layers = stacked_layers(rngs)
        self.norm = norm_of(config, config.hidden_size, self.dtype, rngs)
        tied = config.tie_word_embeddings
        self.head = None if tied else linear_of(config.hidden_size, config.vocab_size, False, self.dtype, rngs, params)

    def __call__(
        self,
        tokens: jax.Array,
        position_ids: jax.Array | None = None,
        *,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        labels: jax.Array | None = None,
    ) -> jax.Array:
        """Return [batch, tokens] int32 -> logits [batch, tokens, vocab_size] of the compute dtype, or with labels the loss.

        Args:
            tokens: [batch, tokens] integers, at least one.
            position_ids: [batch or 1, tokens] integers; None is 0, 1, ... Where they do not go on by one a document begins,
                unless there is a mask, as in transformers: packed into one sequence, each attends to itself alone.
            attention_mask: [batch or 1, tokens], 0 for padding, which no other token sees, in front of the others or behind.
            segment_ids: [batch or 1, tokens] integers, runs of tokens with one number, each a document whatever the
                positions are; where these are not given they restart.
            labels: [batch, tokens], shifted here, -100 where nothing is to be predicted: the result is then the mean cross
                entropy of the next tokens, a float32 scalar, and no logits of all tokens exist. See `next_token_loss`.
        """
        if labels is not None:
            batch = {"input_ids": tokens, "labels": labels, "position_ids": position_ids}
            return next_token_loss(self, batch | {"attention_mask": attention_mask, "segment_ids": segment_ids})
        hidden = self.hidden(tokens, position_ids, attention_mask, segment_ids)
        return self.logits(hidden).reshape(*tokens.shape, -1)

    def hidden(
        self,
        tokens: jax.Array,
        position_ids: jax.Array | None = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Return the operand of the head: [batch, tokens] int32 -> [batch * tokens, hidden_size] of the compute dtype."""
        tokens = checked_tokens("Llama", "tokens", tokens)
        batch, count = tokens.shape
        documents = None if segment_ids is None else checked_documents("Llama", segment_ids, batch, count)
        mask = None
        if attention_mask is not None:
            mask = checked_mask("Llama", attention_mask, batch, count, "attention_mask")
        if position_ids is None and documents is not None:
            position_ids = positions_in(documents)
        places = checked_positions("Llama", position_ids, tokens.shape)
        if position_ids is not None and documents is None and mask is None:
            documents = documents_of_positions(places)
        kinds = LayerKinds(self.config, places, self.dtype)
        graph, parameters = nnx.split(self.layers)
        block = self.scope == "block" and self._runs_blocks()
        if self.scope == "mlp" and not self.plain:
            self._tell_of_mlp()
        if block:
            positions = jnp.broadcast_to(places, tokens.shape).reshape(-1)
            firsts = kinds.first_keys(None if documents is None else first_keys(documents), count)

        def layer(x: jax.Array, parameters: tuple[nnx.State, jax.Array | None]) -> jax.Array:
            state, kind = parameters
            one = nnx.merge(graph, state)
            if block:
                of_kind = {"mask": mask, "turns": kinds.of(kinds.turns, kind)}
                y = block_layer(one, x, positions, batch, kinds.of(firsts, kind), **of_kind)
            else:
                y = one(x, kinds.angles(kind), documents, mask, kind)
            return watched(y, self.heard)

        # One dim of rows: with a batch dim of its own XLA transposes (copies) both operands of every weight gradient.
        x = self.embedded(tokens.reshape(-1))
        whole = Checkpointing() if self.scope == "block" and not block else None
        x = scan_layers(layer, x, (parameters, kinds.of_layer), self.recomputed() or whole)
        # The norm would keep four arrays like x for backward; this way x is the only one.
        norm = jax.checkpoint(self.norm) if self.scope == "block" else self.norm
        return norm(x).astype(self.dtype)

    def _runs_blocks(self) -> bool:
        """Return whether the layers run as blocks; warn, where a part of them is to be called, that its MLP alone is tiled."""
        reason = reason_not_block(self.layers)
        if reason is not None:
            warnings.warn(
                f"Llama: scope='block' tiles the MLP of a layer alone where {reason}, and its parts are called whole. "
                "Pass scope='mlp' with checkpointing for the same without this warning.",
                stacklevel=3,
            )
        return reason is None

    def _tell_of_mlp(self) -> None:
        """Warn, where a projection of the MLP is a layer to be called, that backward computes all of the MLP again."""
        mlp = self.layers.mlp
        path = mlp._path() if isinstance(mlp, TiledMLP) else ""
        if path.startswith("tile:"):
            reason = path.removeprefix("tile: ")
            text = f"Llama: TiledMLP runs through tile, which recomputes all of it: {reason}."
            warnings.warn(f"{text} tiling_paths(model) says so too.", stacklevel=3)

    def _path(self) -> str:
        """Return how a layer of scope="block" runs, for `tiling_paths`."""
        reason = reason_not_block(self.layers)
        return "tiled_block" if reason is None else f"mlp: {reason}"

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Return [rows] int32 -> rows of the residual stream [rows, hidden_size]."""
        x = self.embed(tokens)
        return x if self.config.embedding_scale == 1 else x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def recomputed(self) -> Checkpointing | None:
        """Return what backward computes again."""
        return Checkpointing() if self.checkpointing is True else self.checkpointing or None

    def head_weight(self) -> jax.Array:
        """Return [hidden_size, vocab_size], in the dtype of the parameters."""
        return self.embed.embedding[...].T if self.head is None else self.head.kernel[...]

    def reason_not_plain_head(self) -> str | None:
        """Return why the logits are more than the product with `head_weight`; None where that is all."""
        if type(self).logits is not Llama.logits:
            return "its logits are its own"
        if self.head is None:
            return None
        head: Any = self.head
        bias = getattr(head, "bias", None)
        has_bias = isinstance(bias, nnx.Variable) and bias.get_value() is not None
        return reason_not_plain("head", head) or ("head has a bias" if has_bias else None)

    def of_head(self) -> "Llama":
        """Return a module of what `logits` reads alone: without the layers, and without a table that a head stands beside."""
        unread = {"layers", "norm"} | (
            {"embed"} if self.head is not None and type(self).logits is Llama.logits else set()
        )
        made = object.__new__(type(self))
        vars(made).update({name: value for name, value in vars(self).items() if name not in unread})
        return made

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[rows, hidden_size] -> [rows, vocab_size], in the compute dtype."""
        cap = self.config.logit_softcap
        if self.head is not None:
            found = self.head(hidden)
        else:
            weight = self.embed.embedding[...].astype(hidden.dtype)
            found = jnp.dot(hidden, weight.T, precision=precision_of(hidden.dtype))
        return found if cap is None else (cap * jnp.tanh(found.astype(wide(found.dtype)) / cap)).astype(found.dtype)


class LayerKinds:
    """The angles and the first keys of each kind of layer, and, where there are several kinds, which a layer is of."""

    def __init__(self, config: LlamaConfig, places: jax.Array, dtype: jnp.dtype, of_all: jax.Array | None = None):
        """places: the positions of the tokens that attend; of_all: those of all of a batch, None where these are all."""
        kinds = config.kinds
        self._config, self._places = config, places
        self.of_layer = None if len(kinds) == 1 else jnp.asarray(config.kind_of_layer, jnp.int32)
        ropes = tuple(dict.fromkeys(kind.rope for kind in kinds))
        self._rope_of_kind = [ropes.index(kind.rope) for kind in kinds]
        of_all = places if of_all is None else of_all
        turns = [turning(rope, config.head_dim, of_all, wide(dtype)) for rope in ropes]
        self.turns = [turns[rope] for rope in self._rope_of_kind]
        self._angles = [turned_by(each, places) for each in turns]

    def angles(self, kind: jax.Array | None) -> Angles:
        """Return cosines and sines, [batch or 1, tokens, head_dim / 2]."""
        if len(self._angles) == 1:
            return self._angles[0]
        cos, sin = zip(*(self._angles[rope] for rope in self._rope_of_kind), strict=True)
        return self.of(cos, kind), self.of(sin, kind)

    def of(self, each: Any, kind: jax.Array | None) -> Any:
        """Return which of an array of each kind is that of the layer's."""
        if kind is None or all(a is each[0] for a in each):
            return each[0]
        return jnp.stack(each)[kind]

    def first_keys(self, first: jax.Array | None, tokens: int) -> list[jax.Array | None]:
        """Return of each kind the first key that every query sees, [batch or 1, tokens]; None: that of the sequence.

        first: the same where no layer has a window.
        """
        windows = self._config.windows(tokens)
        if first is None and any(windows):
            first = jnp.zeros((1, tokens), jnp.int32)
        return [first_in_window(first, window, tokens) for window in windows]


def name_of(dtype: Any) -> str:
    """Return the name of a dtype, or of what is none."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def _check_options(config: LlamaConfig, tiling: Tiling | None, plain: bool, scope: str, attention: str) -> None:
    if plain and tiling is not None:
        fail("Llama", "tiling", "None with plain=True", tiling, advice="The plain MLP is not tiled.")
    check_scope("Llama", scope)
    if scope == "block" and tiling is not None:
        check_block_tiling("Llama", tiling)
    if plain and scope != "mlp":
        fail("Llama", "scope", "'mlp' with plain=True", repr(scope), advice="The plain layers are not tiled.")
    if attention not in BACKENDS:
        fail("Llama", "attention", f"one of {', '.join(BACKENDS)}", repr(attention))


def _check_dtype(argument: str, dtype: str) -> None:
    if dtype not in DTYPES:
        fail("Llama", argument, f"one of {', '.join(DTYPES)}", dtype)
    settings: Any = jax.config
    if dtype == "float64" and not settings.jax_enable_x64:
        advice = "Set jax_enable_x64 first."
        raise UnsupportedError(error_text("Llama", argument, "of 32 bits or fewer here", dtype, advice=advice))


def checked_positions(function: str, position_ids: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Return the positions of tokens of this shape, [batch or 1, tokens] int32.

    Raises:
        SpecError: they have another shape. TypeError: they are no array of integers.
    """
    batch, tokens = shape
    if position_ids is None:
        return jnp.arange(tokens, dtype=jnp.int32)[None]
    position_ids = array(function, "position_ids", position_ids)
    if not jnp.issubdtype(position_ids.dtype, jnp.integer):
        fail_type(function, "position_ids", "of integers", position_ids.dtype)
    if position_ids.shape not in ((batch, tokens), (1, tokens)):
        rule = f"of shape {show_shape(shape)} or [1, {tokens}]"
        fail(function, "position_ids", rule, show_shape(position_ids.shape))
    return position_ids.astype(jnp.int32)
