"""The Flax decoder against transformers' Llama, and the two halves of `finetune` against each other, on tiny models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from shared_specs.app.data.batches import Batch
from shared_specs.app.finetune.trainer import Trainer, TrainerState
from shared_specs.app.models.model_config import scale_positions
from shared_specs.app.options import FinetuneOptions
from shared_specs.tolerances import DEMO_LOSS_RTOL, MODEL_FLOAT32
from tests.asserting import assert_within
from tests.tiny_model import QWEN2, tiny_config, tiny_weights
from tiled_jax.commands.finetune.trainer import JaxTrainer
from tiled_jax.models import Llama, LlamaConfig, from_hf, next_token_loss, to_hf
from tiled_jax.models.rope import rotary_angles, rotary_frequencies
from tiled_torch.commands.finetune.trainer import TorchTrainer, build_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 2048}
WIDE = {"head_dim": 32, "max_position_embeddings": 8192}
CONFIGS = {
    "smollm2": tiny_config(),
    "untied": tiny_config(tie_word_embeddings=False),
    "biases": tiny_config(attention_bias=True, mlp_bias=True),
    "wide-heads": tiny_config(head_dim=16, num_key_value_heads=1),
    "no-groups": tiny_config(num_key_value_heads=4),
    "gelu": tiny_config(hidden_act="gelu"),
    "gelu-tanh": tiny_config(hidden_act="gelu_pytorch_tanh"),
    "relu": tiny_config(hidden_act="relu"),
    "relu-squared": tiny_config(hidden_act="relu2"),
    "linear-rope": scale_positions(tiny_config(), 2.0),
    "llama3-rope": tiny_config(rope_parameters=LLAMA3),
    "theta": tiny_config(rope_theta=500000.0),
    "eps": tiny_config(rms_norm_eps=1e-2),
    "one-layer": tiny_config(num_hidden_layers=1),
    "qwen2-yarn": tiny_config(**QWEN2 | WIDE, rope_parameters=YARN),
}
# Of yarn every term that may be left out; the ramp between the pairs is several pairs long.
ROPES = {
    "default": YARN,
    "factor given": YARN | {"attention_factor": 0.7},
    "scales": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
    "one scale": YARN | {"mscale": 0.7},
    "turns": YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False},
    "nothing": YARN | {"beta_fast": None, "attention_factor": None, "truncate": None},
    "few positions": YARN | {"original_max_position_embeddings": 4},
    "factor 1": YARN | {"factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.3},
}


def windows(seed: int = 0, shape: tuple[int, int] = (2, 71)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 272, size=shape, dtype=np.int32)


def step_of(seed: int) -> Batch:
    return Batch.of_windows(windows(seed))


def transformers_results(config: dict[str, Any], weights: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
    model = build_model(config, weights, CPU)
    tokens = torch.from_numpy(windows()).long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return logits.detach().numpy(), {name: weight.grad.numpy() for name, weight in model.named_parameters()}


# Activations, which every case of the MLP has in both halves, are compared once more inside a model.
IN_SLOW_RUNS = ("relu", "relu-squared", "gelu")


@pytest.mark.deep_but(2)
@pytest.mark.parametrize(
    ("name", "plain"),
    [
        *(pytest.param(name, False, marks=pytest.mark.slow if name in IN_SLOW_RUNS else ()) for name in CONFIGS),
        ("smollm2", True),
        ("biases", True),
    ],
)
def test_logits_and_gradients_are_those_of_transformers(name: str, plain: bool) -> None:
    config = CONFIGS[name]
    weights = tiny_weights(config)
    logits, gradients = transformers_results(config, weights)
    build = lambda: Llama(LlamaConfig.from_hf(config), plain=plain, rngs=nnx.Rngs(0))  # noqa: E731
    graph, parameters = nnx.split(nnx.eval_shape(build))
    parameters, tokens = from_hf(parameters, weights), jnp.asarray(windows())

    def results(p: nnx.State) -> Any:
        loss = jax.grad(lambda p: next_token_loss(nnx.merge(graph, p), tokens))
        return nnx.merge(graph, p)(tokens[:, :-1]), loss(p)

    ours, found = jax.jit(results)(parameters)
    assert_within(np.asarray(ours), logits, MODEL_FLOAT32, "logits")
    found = to_hf(found)
    assert found.keys() == gradients.keys()
    for each, gradient in gradients.items():
        assert_within(found[each], gradient, MODEL_FLOAT32, each)


@pytest.mark.parametrize("name", ["smollm2", "theta", "linear-rope", "llama3-rope"])
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    theirs = build_model(config, tiny_weights(config), CPU).model.rotary_emb.inv_freq.numpy()
    ours = rotary_frequencies(LlamaConfig.from_hf(config).rope, config["head_dim"])
    assert_within(ours, theirs, np.finfo(np.float32).eps, "frequencies")


@pytest.mark.parametrize("name", ROPES)
def test_angles_of_yarn_are_those_of_transformers(name: str) -> None:
    config = tiny_config(**WIDE, rope_parameters=ROPES[name])
    theirs = build_model(config, tiny_weights(config), CPU).model.rotary_emb
    positions = torch.arange(64)[None]
    rope = LlamaConfig.from_hf(config).rope
    assert_within(rotary_frequencies(rope, 32), theirs.inv_freq.numpy(), np.finfo(np.float32).eps, "frequencies")
    for ours, expected in zip(rotary_angles(rope, 32, 64), theirs(torch.zeros(()), positions), strict=True):
        assert_within(np.asarray(ours), expected[0, :, :16].numpy(), MODEL_FLOAT32, "angles")


def trainers(**changes: Any) -> list[Trainer]:
    """Both halves with the same model and options."""
    options = FinetuneOptions(tokens=70, batch=2, lr=1e-3, device="cpu", **changes)
    both: list[Trainer] = [TorchTrainer(), JaxTrainer()]
    for trainer in both:
        trainer.load(tiny_config(), tiny_weights(tiny_config()), options)
    return both


@pytest.mark.deep_but(1)
@pytest.mark.parametrize(
    "changes",
    [{"plain": True}, {"shard_tokens": 32, "keep": 0.5}, {"num_shards": 3, "checkpointing": True}],
    ids=str,
)
def test_same_losses_and_state_in_both_halves(changes: dict[str, Any]) -> None:
    theirs, ours = trainers(**changes)
    for seed in range(3):
        assert ours.step(step_of(seed)) == pytest.approx(theirs.step(step_of(seed)), rel=DEMO_LOSS_RTOL / 10)
    assert_same_state(ours.state(), theirs.state())


def assert_same_state(found: TrainerState, expected: TrainerState) -> None:
    assert found.weights.keys() == expected.weights.keys()
    assert found.optimizer.keys() == expected.optimizer.keys()
    assert found.optimizer["step"] == expected.optimizer["step"] == 3
    assert found.optimizer["step"].dtype == expected.optimizer["step"].dtype
    for name, array in expected.weights.items():
        assert_within(found.weights[name], array, MODEL_FLOAT32, name)
    for name, array in expected.optimizer.items():
        # Adam divides by the root of tiny numbers: after three steps rounding has grown in the moments.
        assert_within(found.optimizer[name], array, 100 * MODEL_FLOAT32, name)


@pytest.mark.parametrize("first", [0, 1], ids=["torch-to-jax", "jax-to-torch"])
def test_one_half_continues_from_the_checkpoint_of_the_other(first: int) -> None:
    pair = trainers(num_shards=3)
    before, after = pair[first], pair[1 - first]
    for seed in range(2):
        before.step(step_of(seed))
    after.load_state(before.state())
    for seed in range(2, 4):
        assert after.step(step_of(seed)) == pytest.approx(before.step(step_of(seed)), rel=DEMO_LOSS_RTOL / 10)
