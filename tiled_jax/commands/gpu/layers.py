"""A stack of decoder layers by every scope of `models.Llama`, forward and backward, for `bench --device gpu`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shared_specs.app.gpu.layer_bytes import compiled_layers_bytes
from shared_specs.app.gpu.worker import Variant
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.search import step_flop, step_seconds
from shared_specs.app.plan.setting import Setting
from shared_specs.config import Checkpointing, Tiling
from shared_specs.kernels.roofline import gpu_named
from tiled_jax import backends
from tiled_jax.commands.gpu.device import variant
from tiled_jax.models import Llama, LlamaConfig

LAYER_GROUPS = ("main", "long")
ENTRIES = 4096  # of the table that x is drawn from, [ENTRIES, H]


class Stacks:
    """The variants of a few layers of one model, without its head: tokens [1, T], dy [T, H]."""

    def __init__(self, *, decoder: Decoder, tokens: int, shard: int, dtype: Any) -> None:
        self.decoder, self.tokens, self.shard, self.dtype = decoder, tokens, shard, jnp.dtype(dtype)
        described = {
            "model_type": "qwen3",
            "hidden_size": decoder.hidden,
            "intermediate_size": decoder.intermediate,
            "num_hidden_layers": decoder.layers,
            "num_attention_heads": decoder.heads,
            "num_key_value_heads": decoder.kv_heads,
            "head_dim": decoder.head_dim,
            "vocab_size": min(ENTRIES, decoder.hidden),
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
        self.config = LlamaConfig.from_hf(described)
        rng = np.random.default_rng(0)
        self.ids = jnp.asarray(rng.integers(0, self.config.vocab_size, (1, tokens)), jnp.int32)
        self.dy = jax.random.normal(jax.random.key(1), (tokens, decoder.hidden), self.dtype)
        self.parameters = nnx.state(self._model(plain=True), nnx.Param)
        self.gpu = gpu_named(jax.devices()[0].device_kind)

    def _model(self, **options: Any) -> Llama:
        return Llama(self.config, dtype=self.dtype, **options, rngs=nnx.Rngs(0))

    def step(self, *, library: bool = False, predicted: int | None = None, **options: Any) -> Variant:
        """Forward and backward of the layers; the gradients of all parameters are compared."""
        graph, _ = nnx.split(nnx.eval_shape(lambda: self._model(**options)))

        def fn(parameters: Any, ids: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(lambda p: nnx.merge(graph, p).hidden(ids), parameters)
            return y, *jax.tree.leaves(pull(dy))

        paths = jax.tree_util.tree_flatten_with_path(self.parameters)[0]
        setting = Setting(tokens=self.tokens, scope="block", shard_tokens=self.shard)
        facts: dict[str, Any] = {
            "library": library,
            "flop": sum(step_flop(self.decoder, setting)) - 6 * self.decoder.hidden * self.decoder.vocab * self.tokens,
            "model_seconds": None if self.gpu is None else step_seconds(self.decoder, setting, self.gpu),
            "predicted_bytes": predicted,
        }
        names = ["y", *(f"d{jax.tree_util.keystr(path)}" for path, _ in paths)]
        return variant(fn, self.parameters, self.ids, self.dy, names=names, chain=self.decoder.layers, **facts)

    def predicted(self, *, offload: bool) -> int:
        """Return the temporary bytes of the program, as the formulas of scope="block" say them."""
        sizes, device = (self.decoder, self.tokens, self.shard, self.dtype.itemsize), backends.device_kind()
        cudnn = device == "gpu" and self.dtype.itemsize == 2
        return compiled_layers_bytes(*sizes, offload=offload, device=device, cudnn=cudnn)

    def main(self) -> dict[str, Variant]:
        tiling = Tiling(shard_tokens=self.shard)
        return {
            "checkpoint": self.step(library=True, plain=True, checkpointing=True),
            "mlp": self.step(tiling=tiling, checkpointing=True),
            **self._blocks(tiling),
        }

    def long(self) -> dict[str, Variant]:
        """As main, but for what a long context has no time for."""
        return {name: variant for name, variant in self.main().items() if name != "mlp"}

    def _blocks(self, tiling: Tiling) -> dict[str, Variant]:
        return {
            name: self.step(
                tiling=tiling,
                scope="block",
                checkpointing=Checkpointing(offload=offload),
                predicted=self.predicted(offload=offload),
            )
            for name, offload in (("block", False), ("block-offload", True))
        }


def layer_groups(**sizes: Any) -> dict[str, Callable[[], dict[str, Variant]]]:
    """Group -> what draws its data and returns its variants, the library's form first."""
    return {name: lambda name=name: getattr(Stacks(**sizes), name)() for name in LAYER_GROUPS}
