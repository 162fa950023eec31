"""One step of a plan compiled ahead of time, its bytes as XLA counts them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
from flax import nnx

from shared_specs.app.models.decoders import DECODERS
from shared_specs.app.plan.decoder import Decoder
from shared_specs.app.plan.simulated import Simulated, Simulator
from shared_specs.app.plan.step import Setting
from shared_specs.config import Checkpointing, Tiling
from shared_specs.shards import TARGET_TOKENS
from tiled_jax.commands.plan.device import mesh_of, prepare
from tiled_jax.layers import attention_blocks
from tiled_jax.models import Llama, LlamaConfig
from tiled_jax.plan.described import UNTUNED, compiles_for_gpus
from tiled_jax.plans.api import parallelize

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def setting_simulated(setting: Setting) -> Setting:
    """Return what is compiled in a setting's place: attention in blocks, as cuDNN's needs a GPU, and without the CUDA plugin a
    program for this processor, which has no other memory to move inputs to and makes 16-bit products of float32 ones."""
    if compiles_for_gpus():
        return replace(setting, kernels=False)
    return replace(setting, device="cpu", dtype="float32", offload=False)


def simulate(decoder: Decoder, setting: Setting) -> Simulated:
    """Return the bytes of forward and backward of one device, the optimizer's aside; `setting_simulated` of the setting.

    A collective counts once where it stands in the program: in the loop over layers once for all of them.
    """
    setting = setting_simulated(setting)
    prepare(setting.gpus)
    with _for_gpus():
        model = nnx.eval_shape(lambda: model_of(decoder, setting))
        made = parallelize(model, mesh_of(setting.axes), setting.config)
        batch = jax.ShapeDtypeStruct((setting.sequences * setting.data, setting.tokens + 1), jnp.int32)
        options = UNTUNED if compiles_for_gpus() else None
        program = made.gradients.lower(made.shapes.parameters, batch).compile(options)
    return _of_program(program)


def _of_program(program: Any) -> Simulated:
    found, text = program.memory_analysis(), program.as_text()
    counts = {kind: text.count(f" {kind}(") + text.count(f" {kind}-start(") for kind in COLLECTIVES}
    kinds = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporary": found.temp_size_in_bytes,
    }
    return Simulated(
        moments={"program": kinds},
        host=found.host_temp_size_in_bytes,
        collectives={kind: count for kind, count in counts.items() if count},
    )


def model_of(decoder: Decoder, setting: Setting) -> Llama:
    """Return a model of these sizes, tiled as the setting says."""
    windows = {}
    if decoder.window is not None:
        kinds = ["sliding_attention"] * decoder.windowed + ["full_attention"] * (decoder.layers - decoder.windowed)
        windows = {"sliding_window": decoder.window, "use_sliding_window": True, "layer_types": kinds}
    config = windows | {
        "model_type": decoder.kind,
        "hidden_size": decoder.hidden,
        "intermediate_size": decoder.intermediate,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab,
        "tie_word_embeddings": decoder.tied,
        "max_position_embeddings": setting.tokens,
    }
    terms = DECODERS[decoder.kind].experts
    if terms is not None:
        config |= {terms.count: decoder.experts, terms.chosen: decoder.chosen, terms.intermediate: decoder.intermediate}
    return Llama(
        LlamaConfig.from_hf(config),
        dtype=setting.dtype,
        scope="block",
        tiling=Tiling(shard_tokens=setting.shard_tokens),
        checkpointing=Checkpointing(offload=setting.offload),
        rngs=nnx.Rngs(0),
    )


@contextmanager
def _for_gpus() -> Iterator[None]:
    """The processor that compiles is no GPU."""
    if not compiles_for_gpus():
        yield
        return
    gpu = attention_blocks.BLOCK_TOKENS["gpu"]
    with (
        patch.object(attention_blocks, "BLOCK_TOKENS", {"cpu": gpu, "gpu": gpu}),
        patch.dict(TARGET_TOKENS, {"cpu": TARGET_TOKENS["gpu"]}),
    ):
        yield


SIMULATOR = Simulator(simulate, setting_simulated, whole=True)
